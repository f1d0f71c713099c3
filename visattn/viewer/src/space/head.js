// One head, large: a click chooses a token, a lasso chooses many.

import { check, element, ink, plain } from "../dom.js";
import { legendOf, parsed } from "./palette.js";
import { Raster, inside } from "./plot.js";

const NEAR = 12; // pixels around a point that count as the point
const CLICK = 4;
const MOST = 560;
const NEIGHBORS = 30;

export class HeadPlot {
  constructor(app) {
    this.app = app;
    this.title = element("h2");
    this.reading = element("p", { class: "reading", "aria-live": "polite" });
    this.notes = element("p", { class: "soft" });
    this.legend = element("div", { class: "legend" });
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "Queries and keys of one head. Arrow keys choose the next token, n selects its neighbors, Escape lets go.",
      onpointerdown: (event) => this.#down(event),
      onpointermove: (event) => this.#move(event),
      onpointerup: (event) => this.#up(event),
      onpointercancel: () => this.#letGo(),
      onpointerleave: () => !this.held && (this.reading.textContent = ""),
      onkeydown: (event) => this.#key(event),
    });
    this.raster = new Raster(this.canvas);
    this.over = element("canvas", { class: "over", "aria-hidden": "true" });
    this.lassoing = app.space.dimensions === 2;
    const turned = app.space.dimensions === 3 ? [check("dragging draws a lasso (else turns)", false, (on) => (this.lassoing = on))] : [];
    this.neighbors = element("button", { onclick: () => this.selectNeighbors() }, "Select neighbors");
    this.root = element("section", { class: "spacehead", "aria-label": "Head" }, this.title, ...turned, element("div", { class: "stack" }, this.canvas, this.over), element("div", { class: "controls" }, this.neighbors), this.legend, this.reading, this.notes);
    this.held = null;
  }

  get side() {
    return Math.max(200, Math.min(this.root.clientWidth, MOST));
  }

  get box() {
    const { side } = this;
    return [0.03 * side, 0.03 * side, 0.94 * side];
  }

  draw() {
    const { app, raster, side, box } = this;
    const { state } = app;
    const layer = app.layer;
    raster.begin(side, side, parsed(ink("--panel")));
    for (const which of app.sides) {
      raster.points(app.places(state.row, state.head, which), app.painted.of(layer, state.head, which, state.mode), box, 4, app.members(state.row, which), app.dim);
    }
    raster.end();
    this.title.textContent = plain(`${app.space.nameOf(layer)}, head ${layer.numbers[state.head]} (${layer.name})`, 120);
    const shares = (layer.shares[state.head] || []).filter((share) => share !== null);
    const along = shares.length ? `The axes hold ${shares.map((share) => `${(100 * share).toFixed(0)}`).join(" + ")} % of the variance. ` : "";
    this.notes.textContent = plain(`${along}${layer.notes.length ? `The attention here is not by products alone: ${layer.notes.join("; ")}.` : ""}`, 600);
    this.neighbors.disabled = app.token === null;
    this.#legend();
    this.#overlay();
  }

  #legend() {
    const { app } = this;
    const told = legendOf(app.space, app.layer.table, app.state.mode);
    if (told.entries) {
      this.legend.replaceChildren(
        ...(told.text ? [plain(told.text)] : []),
        ...told.entries.map(([color, text]) => {
          const dot = element("span", { class: "dot" });
          dot.style.background = color;
          return element("span", { class: "entry" }, dot, plain(text, 40));
        }),
      );
    } else if (told.scale) {
      const bar = element("canvas", { width: 120, height: 10, role: "img", "aria-label": "Color scale" });
      const table = app.space.colors.of(told.scale);
      const context = bar.getContext("2d");
      for (let x = 0; x < 120; x++) {
        const at = 3 * Math.round((255 * x) / 119);
        context.fillStyle = `rgb(${table[at]},${table[at + 1]},${table[at + 2]})`;
        context.fillRect(x, 0, 1, 10);
      }
      this.legend.replaceChildren(plain(told.low), bar, plain(told.high));
    } else this.legend.replaceChildren(plain(told.text));
  }

  // The lasso, the chosen token as query and as key, and the line between both.
  #overlay() {
    const { app, over, side } = this;
    const { token } = app;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    over.width = over.height = Math.round(side * ratio);
    over.style.width = over.style.height = `${side}px`;
    const context = over.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.lineWidth = 2;
    if (this.held && this.held.path) {
      context.strokeStyle = ink("--focus");
      context.beginPath();
      this.held.path.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.closePath();
      context.stroke();
    }
    if (token === null) return;
    for (const which of app.sides) {
      const at = this.#place(which, token);
      if (!at) continue;
      context.strokeStyle = ink("--text");
      context.beginPath();
      if (which === "query") context.arc(...at, 8, 0, 2 * Math.PI);
      else context.rect(at[0] - 7, at[1] - 7, 14, 14);
      context.stroke();
    }
  }

  #place(which, token) {
    const { state } = this.app;
    const places = this.app.places(state.row, state.head, which);
    const [left, top, scale] = this.box;
    const [x, y] = [left + places[2 * token] * scale, top + places[2 * token + 1] * scale];
    return x === x ? [x, y] : null;
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  // The nearest point: its side and token.
  nearest([x, y]) {
    let found = null;
    let least = NEAR;
    for (const which of this.app.sides) {
      for (let token = 0; token < this.app.layer.table.count; token++) {
        const at = this.#place(which, token);
        const apart = at ? Math.hypot(at[0] - x, at[1] - y) : Infinity;
        if (apart < least) [least, found] = [apart, { which, token }];
      }
    }
    return found;
  }

  #down(event) {
    const at = this.#at(event);
    this.held = { start: at, turn: [...this.app.turn], path: null, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  #move(event) {
    const at = this.#at(event);
    const { app, held } = this;
    if (!held) {
      const found = this.nearest(at);
      this.reading.textContent = found ? plain(app.nameOf(found.which, app.layer.table, found.token), 160) : "";
      return;
    }
    const [dx, dy] = [at[0] - held.start[0], at[1] - held.start[1]];
    if (Math.hypot(dx, dy) > CLICK) held.moved = true;
    if (!held.moved) return;
    if (this.lassoing) {
      held.path ||= [held.start];
      held.path.push(at);
      this.#overlay();
    } else app.turnTo([held.turn[0] + dx / 120, held.turn[1] + dy / 120]);
  }

  #up(event) {
    const { app, held } = this;
    this.held = null;
    if (!held) return;
    if (held.path && held.path.length > 2) this.lasso(held.path);
    else if (!held.moved) {
      const found = this.nearest(this.#at(event));
      app.choose(found ? found.token : null);
    }
  }

  #letGo() {
    this.held = null;
    this.#overlay();
  }

  // Selects the points nearest to the query of the chosen token.
  selectNeighbors() {
    const { app } = this;
    const { layer, state } = app;
    const own = app.token === null ? null : layer.at(state.head, "query", app.token);
    if (!own) return;
    const { count } = layer.table;
    const points = app.sides.flatMap((which) => Array.from({ length: count }, (_, token) => [which, token, layer.at(state.head, which, token)]));
    const near = points.filter(([, , at]) => at).map(([which, token, at]) => [Math.hypot(...Array.from(own, (code, axis) => code - at[axis])), which, token]);
    const masks = { query: new Uint8Array(count), key: new Uint8Array(count) };
    for (const [, which, token] of near.sort((a, b) => a[0] - b[0]).slice(0, NEIGHBORS)) masks[which][token] = 1;
    app.selectPoints(masks, `nearness to ${app.nameOf("query", layer.table, app.token)}`);
  }

  // Chooses the points inside a polygon, in pixels of the plot.
  lasso(path) {
    const { app } = this;
    const found = {};
    for (const which of ["query", "key"]) {
      const { count } = app.layer.table;
      found[which] = new Uint8Array(count);
      if (!app.sides.includes(which)) continue;
      for (let token = 0; token < count; token++) {
        const at = this.#place(which, token);
        if (at && inside(at, path)) found[which][token] = 1;
      }
    }
    app.selectPoints(found, "lasso");
  }

  #key(event) {
    const { app } = this;
    const { token } = app;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") {
      app.choose(null);
      app.select(null);
    } else if (event.key === "n") this.selectNeighbors();
    else if (step) {
      const { count } = app.layer.table;
      app.choose(token === null ? 0 : (token + step + count) % count);
    } else return;
    event.preventDefault();
  }
}
