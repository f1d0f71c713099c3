// All heads: layers downward, heads across. The wheel zooms, dragging moves, a click opens a head.

import { element, ink } from "../dom.js";
import { parsed } from "./palette.js";
import { Raster } from "./plot.js";

const GAP = 0.12; // between tiles, as a share of a tile
const MOST_ZOOM = 24;
const CLICK = 4; // pixels that a click may move
const MOST_HIGH = 1000;

export class HeadMatrix {
  constructor(app) {
    this.app = app;
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "All heads: layers downward, heads across. Arrow keys choose a head, plus and minus zoom, 0 shows all.",
      onwheel: (event) => this.#wheel(event),
      onpointerdown: (event) => this.#down(event),
      onpointermove: (event) => this.#move(event),
      onpointerup: (event) => this.#up(event),
      onpointercancel: () => (this.held = null),
      onkeydown: (event) => this.#key(event),
    });
    this.raster = new Raster(this.canvas);
    this.labels = element("canvas", { class: "over", "aria-hidden": "true" });
    this.root = element("div", { class: "spacematrix" }, this.canvas, this.labels);
    this.view = { x: 0, y: 0, zoom: 1 };
  }

  get size() {
    const { space } = this.app;
    const width = Math.max(this.root.clientWidth, 200);
    const across = space.mostHeads + 0.6; // of a model
    const unit = Math.min(width / (across * space.blocks.length), (MOST_HIGH - 8) / space.deepest);
    return { width, height: Math.max(unit * space.deepest + 8, 160), unit, across };
  }

  // Rectangle of a tile: left, top, side.
  tile(row, column) {
    const { unit, across } = this.size;
    const { x, y, zoom } = this.view;
    const layer = this.app.space.layers[row];
    const side = unit * (1 - GAP) * zoom;
    return [(unit * (across * layer.block + column + 0.55) - x) * zoom, (unit * layer.depth + 4 - y) * zoom, side];
  }

  draw() {
    const { app, raster, view } = this;
    const { space, state, painted } = app;
    const { width, height, unit } = this.size;
    const panel = parsed(ink("--panel"));
    raster.begin(width, height, parsed(ink("--page")));
    const size = Math.max(1, Math.min(5, Math.round(1.2 * Math.sqrt(view.zoom) * Math.sqrt(unit / 60))));
    const shown = [];
    space.layers.forEach((layer, row) => {
      for (let head = 0; head < layer.heads; head++) {
        const tile = this.tile(row, head);
        const [left, top, side] = tile;
        if (left > width || top > height || left + side < 0 || top + side < 0) continue;
        this.#fill(tile, panel);
        const inner = [left + 0.03 * side, top + 0.03 * side, 0.94 * side];
        for (const which of app.sides) {
          raster.points(app.places(row, head, which), painted.of(layer, head, which, state.mode), inner, size, app.members(row, which), app.dim);
        }
        shown.push([row, head, inner]);
      }
    });
    raster.end();
    this.#over(shown);
  }

  #fill([left, top, side], color) {
    const { ratio, wide, high, pixels } = this.raster;
    const [x0, x1] = [left, left + side].map((at) => Math.max(0, Math.min(wide, Math.round(at * ratio))));
    const [y0, y1] = [top, top + side].map((at) => Math.max(0, Math.min(high, Math.round(at * ratio))));
    for (let y = y0; y < y1; y++) pixels.fill(color, y * wide + x0, y * wide + x1);
  }

  // Names, the frame of the chosen head, and the chosen token in every head.
  #over(shown) {
    const { app, labels } = this;
    const { state, space } = app;
    const { width, height, unit } = this.size;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    labels.width = Math.round(width * ratio);
    labels.height = Math.round(height * ratio);
    labels.style.width = `${width}px`;
    labels.style.height = `${height}px`;
    const context = labels.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = ink("--text");
    context.textBaseline = "middle";
    for (const [row, head, [left, top, side]] of shown) {
      if (head === 0) context.fillText(String(space.layers[row].number), Math.max(2, left - unit * 0.45 * this.view.zoom), top + side / 2);
      if (state.row === row && state.head === head) {
        context.strokeStyle = ink("--focus");
        context.lineWidth = 3;
        context.strokeRect(left - 3, top - 3, side + 6, side + 6);
      }
      const token = app.tokenIn(row);
      for (const which of token === null ? [] : app.sides) {
        const places = app.places(row, head, which);
        const [x, y] = [left + places[2 * token] * side, top + places[2 * token + 1] * side];
        if (!(x === x)) continue;
        context.strokeStyle = ink("--text");
        context.lineWidth = 2;
        context.beginPath();
        context.arc(x, y, 4, 0, 2 * Math.PI);
        context.stroke();
      }
      if (this.view.zoom > 2.5) context.fillText(`layer ${space.layers[row].number}, head ${space.layers[row].numbers[head]}`, left + 4, top + 9);
    }
  }

  // Zooms about a point of the canvas.
  zoomAt(x, y, factor) {
    const { view } = this;
    const zoom = Math.max(1, Math.min(MOST_ZOOM, view.zoom * factor));
    view.x += x / view.zoom - x / zoom;
    view.y += y / view.zoom - y / zoom;
    view.zoom = zoom;
    if (zoom === 1) view.x = view.y = 0;
    this.app.later("matrix");
  }

  // Moves the view so that a tile lies in it.
  #reveal(row, head) {
    const { view } = this;
    const { width, height } = this.size;
    const [left, top, side] = this.tile(row, head);
    if (left >= 0 && top >= 0 && left + side <= width && top + side <= height) return;
    view.x = Math.max(0, view.x + (left + side / 2 - width / 2) / view.zoom);
    view.y = Math.max(0, view.y + (top + side / 2 - height / 2) / view.zoom);
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas && this.view.zoom === 1 && event.deltaY > 0) return; // the page scrolls
    event.preventDefault();
    this.zoomAt(...this.#at(event), Math.exp(-event.deltaY / 300));
  }

  #down(event) {
    this.held = { at: this.#at(event), view: { ...this.view }, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  #move(event) {
    if (!this.held) return;
    const [x, y] = this.#at(event);
    const [dx, dy] = [x - this.held.at[0], y - this.held.at[1]];
    if (Math.hypot(dx, dy) > CLICK) this.held.moved = true;
    if (!this.held.moved) return;
    this.view.x = this.held.view.x - dx / this.view.zoom;
    this.view.y = this.held.view.y - dy / this.view.zoom;
    this.app.later("matrix");
  }

  #up(event) {
    const { held } = this;
    this.held = null;
    if (!held || held.moved) return;
    const [x, y] = this.#at(event);
    this.app.space.layers.forEach((layer, row) => {
      for (let head = 0; head < layer.heads; head++) {
        const [left, top, side] = this.tile(row, head);
        if (x >= left && x <= left + side && y >= top && y <= top + side) this.app.set({ row, head });
      }
    });
  }

  #key(event) {
    const { app } = this;
    const { row, head } = app.state;
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { width, height } = this.size;
    if (steps[event.key]) {
      const [down, right] = steps[event.key];
      const { layers } = app.space;
      const now = layers[row];
      const beyond = head + right < 0 || head + right >= now.heads; // to the other model
      const block = now.block + (beyond ? right : 0);
      const next = layers.findIndex((layer) => layer.block === block && layer.depth === now.depth + down);
      if (next >= 0) {
        app.set({ row: next, head: beyond ? (right > 0 ? 0 : layers[next].heads - 1) : Math.min(layers[next].heads - 1, head + right) });
        this.#reveal(app.state.row, app.state.head);
      }
    } else if (event.key === "+" || event.key === "=") this.zoomAt(width / 2, height / 2, 1.5);
    else if (event.key === "-") this.zoomAt(width / 2, height / 2, 1 / 1.5);
    else if (event.key === "0") this.zoomAt(0, 0, 0);
    else return;
    event.preventDefault();
  }
}

