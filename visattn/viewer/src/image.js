// The photo with the map over it. The pointer selects the query; a click holds it, and the pointer then reads values.

import { drawComponents, drawGrid, even, extentOf, grayOf, hatch, regionOf } from "./colors.js";
import { element, ink, plain, sized } from "./dom.js";
import { number } from "./page.js";
import { boxOnPhoto, cellAt, cellBox, centerOf, nameOf, places, shapeOf } from "./tokens.js";

const REST = 250; // milliseconds after which a patch stays the query when the pointer leaves the photo

export class ImagePanel {
  constructor(page, sideOf, loaded) {
    this.page = page;
    this.loaded = loaded;
    this.sideOf = sideOf;
    this.reading = element("p", { class: "reading", "aria-live": "polite" });
    this.title = element("p", { class: "shown" });
    this.hint = element("p", { class: "soft" });
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "Photo with attention. Arrow keys move the query, Enter holds it, Escape lets it go.",
      onpointermove: (event) => this.#moved(event),
      onpointerdown: (event) => this.#pressed(event),
      onpointerleave: () => this.#left(),
      onkeydown: (event) => this.#key(event),
    });
    this.bar = element("canvas", { class: "bar", role: "img", "aria-label": "Color scale" });
    this.low = element("span");
    this.high = element("span");
    this.root = element(
      "figure",
      { class: "image" },
      this.canvas,
      element("figcaption", {}, this.title, element("div", { class: "scale" }, this.low, this.bar, this.high), this.reading, this.hint),
    );
    this.pictures = new Map();
    this.grays = new Map();
    this.pointer = null;
  }

  // The decoded photo of a view; what shows it is drawn again once it is there.
  picture(view) {
    if (!this.pictures.has(view)) {
      const picture = new Image();
      picture.onload = () => this.loaded();
      picture.src = view.photo;
      this.pictures.set(view, picture);
    }
    return this.pictures.get(view);
  }

  // Draws the photo of a view, once it is there.
  paint(context, view, width, height, gray) {
    const picture = this.picture(view);
    if (!picture.complete || !picture.naturalWidth) return;
    if (gray && !this.grays.has(view)) this.grays.set(view, grayOf(picture));
    context.drawImage(gray ? this.grays.get(view) : picture, 0, 0, width, height);
  }

  // Draws the photo of a view and a map over it, as static overlays do.
  over(context, view, shown, range, factor, smooth) {
    const { page } = this;
    const [height, width] = view.size.map((side) => side * factor);
    this.paint(context, view, width, height, page.grayBelow(shown, range));
    if (!page.drawn(shown, range)) return;
    const shape = shapeOf(shown.layout);
    const [top, left, bottom, right] = boxOnPhoto(view, shown.layout).map((side) => side * factor);
    const area = [left, top, right - left, bottom - top];
    const signed = !shown.colored && page.signed(shown, range);
    const first = shown.values.subarray(0, shape.rows * shape.columns); // frame or component
    if (shown.colored) drawComponents(context, shown.values, shape, page.facts.look.components.opacity, area);
    else drawGrid(context, first, shape, range, page.table(signed), page.alpha(signed), area, smooth);
    hatch(context, first, shape, area, factor);
  }

  // Draws a box of the photo, in its pixels, in its colors.
  crop(canvas, view, [top, left, bottom, right], side) {
    const picture = this.picture(view);
    const [wide, high] = [right - left, bottom - top];
    const factor = side / Math.max(wide, high);
    const context = sized(canvas, wide * factor, high * factor);
    if (!picture.complete || !picture.naturalWidth) return;
    const inner = picture.naturalWidth / view.size[1];
    context.drawImage(picture, left * inner, top * inner, wide * inner, high * inner, 0, 0, wide * factor, high * factor);
  }

  draw() {
    const { page } = this;
    const { state } = page;
    const side = this.sideOf();
    const { view } = side;
    const [high, wide] = view.size;
    const room = Math.max(this.root.clientWidth, 200);
    this.factor = Math.min(room / wide, parseFloat(getComputedStyle(this.canvas).maxHeight) / high);
    const [width, height] = [wide * this.factor, high * this.factor];
    const context = sized(this.canvas, width, height);
    const shown = (this.shown = page.shown(side));
    const range = shown.values && !shown.colored ? page.range(view, shown) : null;
    this.over(context, view, shown, range, this.factor, state.get("smooth"));
    this.hint.textContent = this.#hintFor(view, shown, range);
    if (shown.missing || !shown.values) {
      this.title.textContent = plain(shown.missing || `${shown.title}: its keys lie nowhere on the image; see Keys.`);
      this.#scale(null);
      this.#read();
      return;
    }
    const { rows, columns } = shapeOf(shown.layout);
    const [top, left, bottom, right] = boxOnPhoto(view, shown.layout).map((side) => side * this.factor);
    const area = [left, top, right - left, bottom - top];
    if (!shown.colored && state.get("mass") > 0) this.#outline(context, regionOf(shown.values.subarray(0, rows * columns), state.get("mass")), rows, columns, area);
    this.#scale(range, shown);
    this.#marks(context, view, shown);
    const which = page.views[state.get("compare")] && page.second.view !== page.view ? [view.title] : [];
    this.title.textContent = plain([...which, shown.title, ...(shown.about ? [shown.about] : [])].join(": "), 240);
    this.#read();
  }

  #hintFor(view, shown, range) {
    const rings = this.page.state.get("sinks") && view.sinks.cells.length ? "Rings: sinks, patches that receive more than 20 times the uniform share of attention in some layer." : "";
    const how = view.attention.length || view.features ? this.#how() : "";
    const gray = this.page.grayBelow(shown, range) && "The photo is shown in gray.";
    const own = shown.colored && "Red, green and blue are three components; no setting changes them.";
    return [how, how && rings, gray, own].filter(Boolean).join(" ");
  }

  #how() {
    if (matchMedia("(pointer: coarse)").matches) return "Tap a patch to choose it.";
    if (this.page.state.get("pinned")) return "The query is held: point to read values; click or press Escape to let it go.";
    return "Rest on a patch to choose it; click to hold it.";
  }

  #outline(context, region, rows, columns, [x, y, width, height]) {
    const [w, h] = [width / columns, height / rows];
    context.strokeStyle = "#ffffff";
    context.lineWidth = 2;
    context.beginPath();
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        if (!region[row * columns + column]) continue;
        const [l, t] = [x + column * w, y + row * h];
        const inside = (r, c) => r >= 0 && r < rows && c >= 0 && c < columns && region[r * columns + c];
        const edges = [
          [inside(row - 1, column), l, t, l + w, t],
          [inside(row + 1, column), l, t + h, l + w, t + h],
          [inside(row, column - 1), l, t, l, t + h],
          [inside(row, column + 1), l + w, t, l + w, t + h],
        ];
        for (const [closed, x1, y1, x2, y2] of edges) {
          if (closed) continue;
          context.moveTo(x1, y1);
          context.lineTo(x2, y2);
        }
      }
    }
    context.stroke();
  }

  #marks(context, view, shown) {
    const { state } = this.page;
    const layout = shown.record ? shown.record.queryLayout : shown.layout;
    const query = this.page.query(view);
    if (query.name === undefined && layout.grid.length) {
      const cell = cellAt(view, layout, query.y, query.x);
      if (cell) this.#cell(context, view, layout, cell, "#ffffff", state.get("pinned") ? 3 : 2);
    }
    const own = this.page.layouts[view.sinks.layout];
    if (!state.get("sinks") || !own || !shown.layout.grid.length) return;
    const [top, , bottom] = boxOnPhoto(view, own);
    for (const [row, column] of view.sinks.cells) {
      const at = centerOf(view, own, row, column);
      context.beginPath();
      context.arc(at.x * this.factor, at.y * this.factor, (0.75 * this.factor * (bottom - top)) / shapeOf(own).rows, 0, 2 * Math.PI);
      context.strokeStyle = "#00e6ff";
      context.lineWidth = 2;
      context.stroke();
    }
  }

  #cell(context, view, layout, cell, color, width) {
    const [top, left, bottom, right] = cellBox(view, layout, cell).map((side) => side * this.factor);
    for (const [line, stroke] of [
      [width + 2, "#000000"],
      [width, color],
    ]) {
      context.lineWidth = line;
      context.strokeStyle = stroke;
      context.strokeRect(left, top, right - left, bottom - top);
    }
  }

  #scale(range, shown) {
    this.bar.hidden = !range || even(range);
    const digits = range && this.page.state.get("scale") === "shared" && shown.record ? shown.record.digits : shown?.digits;
    if (!range) {
      this.low.textContent = this.high.textContent = "";
      return;
    }
    const [least, most] = extentOf(shown.values, false); // a scale of percentiles ends before them
    this.low.textContent = (least < range[0] ? "<" : "") + number(range[0], digits);
    this.high.textContent = (most > range[1] ? ">" : "") + number(range[1], digits) + (even(range) ? " (nearly even: no colors)" : "");
    const context = sized(this.bar, 160, 12);
    const table = this.page.table(this.page.signed(shown, range));
    for (let x = 0; x < 160; x++) {
      const at = 3 * Math.round((x / 159) * 255);
      context.fillStyle = `rgb(${table[at]},${table[at + 1]},${table[at + 2]})`;
      context.fillRect(x, 0, 1, 12);
    }
    context.strokeStyle = ink("--line");
    context.strokeRect(0.5, 0.5, 159, 11);
  }

  // Says the value below the pointer, or at the query.
  #read() {
    const { view } = this.sideOf();
    const { shown } = this;
    const at = this.pointer || this.page.query(view);
    if (!shown || shown.missing || !shown.values || shown.colored || at.name !== undefined) {
      this.reading.textContent = "";
      return;
    }
    const cell = cellAt(view, shown.layout, at.y, at.x);
    const { columns } = shapeOf(shown.layout);
    const index = cell ? cell[0] * columns + cell[1] : -1;
    const token = cell ? places(shown.layout).tokens[index] : -1;
    if (token < 0) {
      this.reading.textContent = cell ? "The model dropped the token of this patch." : "The model did not receive this part of the photo.";
      return;
    }
    const row = shown.row || shown.values;
    const place = shown.row ? token : index;
    const name = nameOf(view, shown.layout, token);
    const hidden = shown.record ? this.page.hiddenIn(view, shown.record).size : 0;
    const count = row.filter((value) => !Number.isNaN(value)).length - hidden;
    this.reading.textContent = `${name}: ${number(row[place], shown.digits)}, rank ${this.page.rank(row, place)} of ${count}`;
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [height, width] = this.sideOf().view.size;
    return { y: ((event.clientY - box.top) / box.height) * height, x: ((event.clientX - box.left) / box.width) * width };
  }

  // Sets the query to a point of this view's photo, in pixels of the first view's.
  #ask(point) {
    const { view, record } = this.sideOf();
    const { page } = this;
    const layout = (record && record.queryLayout) || page.layouts[0];
    const cell = layout.grid.length ? cellAt(view, layout, point.y, point.x) : null;
    if (!cell) return;
    const at = centerOf(view, layout, cell[0], cell[1]);
    const main = page.view;
    const query = { y: (at.y / view.size[0]) * main.size[0], x: (at.x / view.size[1]) * main.size[1] };
    const before = page.state.get("query");
    if (before.y !== query.y || before.x !== query.x) page.state.set({ query });
  }

  #moved(event) {
    if (!this.pointer) this.rested ??= this.page.state.get("query"); // it enters
    this.pointer = this.#point(event);
    if (!this.page.state.get("pinned")) {
      this.#ask(this.pointer);
      clearTimeout(this.resting);
      this.resting = setTimeout(() => (this.rested = this.page.state.get("query")), REST);
    }
    this.#read();
  }

  #pressed(event) {
    this.pointer = this.#point(event);
    this.#settle();
    const pinned = this.page.state.get("pinned");
    this.#ask(this.pointer);
    this.page.state.set({ pinned: event.pointerType === "touch" ? true : !pinned });
    this.canvas.focus({ preventScroll: true });
  }

  // On its way to the heads the pointer crosses other patches; the query is then the one on which it rested, or the one before.
  #left() {
    this.pointer = null;
    if (this.rested && !this.page.state.get("pinned")) this.page.state.set({ query: this.rested });
    this.#settle();
    this.#read();
  }

  #settle() {
    clearTimeout(this.resting);
    this.rested = null;
  }

  #key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { state } = this.page;
    if (event.key === "Escape") state.set({ pinned: false });
    else if (event.key === "Enter" || event.key === " ") state.set({ pinned: !state.get("pinned") });
    else if (steps[event.key]) this.#step(steps[event.key]);
    else return;
    event.preventDefault();
  }

  #step([down, across]) {
    const { view, record } = this.sideOf();
    const layout = (record && record.queryLayout) || this.page.layouts[0];
    if (!layout.grid.length) return;
    const { rows, columns } = shapeOf(layout);
    const query = this.page.query(view);
    const cell = query.name === undefined ? cellAt(view, layout, query.y, query.x) : null;
    const [row, column] = cell || [Math.floor(rows / 2), Math.floor(columns / 2)];
    const next = cell ? [row + down, column + across] : [row, column];
    this.pointer = null;
    this.#settle();
    this.#ask(centerOf(view, layout, Math.min(Math.max(next[0], 0), rows - 1), Math.min(Math.max(next[1], 0), columns - 1)));
  }
}
