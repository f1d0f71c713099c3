// Query x key matrix of one head. The pointer reads a weight; a click asks for its query.

import { drawGrid, extentOf } from "./colors.js";
import { element, plain, put, sized, slider } from "./dom.js";
import { number } from "./page.js";
import { cellOf, centerOf, nameOf } from "./tokens.js";

const MOST = 3000; // queries and keys

export class Matrix {
  constructor(page) {
    this.page = page;
    this.zoom = slider("zoom", [1, 8, 0.5], 1, (zoom) => page.state.set({ zoom }));
    this.canvas = element("canvas", {
      role: "img",
      "aria-label": "Matrix of the head: queries in rows, keys in columns",
      onpointermove: (event) => this.#moved(event),
      onclick: (event) => this.#pressed(event),
    });
    this.reading = element("p", { class: "reading", "aria-live": "polite" });
    this.root = element(
      "div",
      {},
      this.zoom,
      (this.scrolled = element("div", { class: "matrix", tabindex: 0, role: "region", "aria-label": "Matrix, scrolls" }, this.canvas)),
      this.reading,
    );
  }

  // Weights of the whole head, kept until layer or head change.
  #weights(record, head) {
    const hidden = this.page.state.get("hidden");
    if (this.record !== record || this.head !== head || this.hidden !== hidden) {
      this.record = record;
      this.hidden = hidden;
      this.head = head;
      this.weights = new Float32Array(record.rowsCount * record.keysCount);
      for (let query = 0; query < record.rowsCount; query++) this.weights.set(this.page.rowOf(this.page.view, record, head, query), query * record.keysCount);
      this.range = extentOf(this.weights, this.weights.some((value) => value < 0));
    }
    return this.weights;
  }

  draw() {
    const { page } = this;
    const record = page.record();
    const wide = Math.max(this.root.clientWidth - 4, 200);
    if (!record || record.rowsCount > MOST || record.keysCount > MOST) {
      sized(this.canvas, wide, 20);
      this.reading.textContent = record ? `The matrix of ${record.rowsCount} x ${record.keysCount} tokens is too large to draw.` : "This view has no attention.";
      return;
    }
    const head = page.head(record);
    const weights = this.#weights(record, head);
    const zoom = Math.min(Math.max(page.state.get("zoom"), 1), 8);
    put(this.zoom, zoom);
    const width = Math.min(wide * zoom, 4000);
    const height = Math.min((width * record.rowsCount) / record.keysCount, 4000);
    const context = sized(this.canvas, width, height);
    const shape = { rows: record.rowsCount, columns: record.keysCount };
    drawGrid(context, weights, shape, this.range, page.table(this.range[0] < 0), (part) => (part >= 0 ? 1 : 0), [0, 0, width, height], false);
    const token = page.token(page.view, record.queryLayout);
    if (token >= 0) {
      context.strokeStyle = "#00e5ff";
      context.strokeRect(0, (token / shape.rows) * height, width, height / shape.rows);
      if (this.zoomed !== zoom) this.scrolled.scrollTop = (token / shape.rows) * height - this.scrolled.clientHeight / 2;
    }
    this.zoomed = zoom;
    const [low, high] = this.range.map((value) => number(value, record.digits));
    const hidden = page.hiddenIn(page.view, record).size;
    const said = hidden ? `, ${hidden} key${hidden > 1 ? "s" : ""} hidden` : "";
    this.reading.textContent = plain(`${record.layer}, ${record.nameOf(head)}: ${shape.rows} queries (rows) x ${shape.columns} keys (columns), colors from ${low} to ${high}${said}`, 200);
  }

  #at(event) {
    const record = this.page.record();
    if (!record || !this.weights) return null;
    const box = this.canvas.getBoundingClientRect();
    const query = Math.floor(((event.clientY - box.top) / box.height) * record.rowsCount);
    const key = Math.floor(((event.clientX - box.left) / box.width) * record.keysCount);
    return query >= 0 && query < record.rowsCount && key >= 0 && key < record.keysCount ? { record, query, key } : null;
  }

  #moved(event) {
    const at = this.#at(event);
    if (!at) return;
    const { record, query, key } = at;
    const view = this.page.view;
    const value = number(this.weights[query * record.keysCount + key], this.page.digitsAt(view, record, this.head, query));
    this.reading.textContent = plain(`${nameOf(view, record.queryLayout, query)} to ${nameOf(view, record.keyLayout, key)}: ${value}`);
  }

  #pressed(event) {
    const at = this.#at(event);
    if (!at) return;
    const layout = at.record.queryLayout;
    const name = layout.prefix[at.query];
    if (name !== undefined) {
      this.page.state.set({ query: { name }, pinned: true });
      return;
    }
    const cell = cellOf(layout, at.query);
    if (cell) this.page.state.set({ query: centerOf(this.page.view, layout, ...cell), pinned: true });
  }
}
