// All heads for the query: layers in rows, heads in columns, or one list in the order of a number.

import { drawGrid, rangeOf } from "./colors.js";
import { choice, element, ink, plain, sized } from "./dom.js";
import { ATTENTION } from "./page.js";
import { onGrid, shapeOf } from "./tokens.js";

const GAP = 3;
const ABOVE = 190; // pixels of the window above and below the heads
const LEAST = 40; // height of a tile, where the window is low
const LABEL = 34;
const NAME = 13; // height of the name of a tile in a list
const SIDE = 72; // of a tile in a list, at least
const BUDGET = 8; // milliseconds of a frame
export const ORDERS = [
  ["layer", "layer"],
  ["entropy", "entropy, lowest first"],
  ["distance", "distance, farthest first"],
  ["sink", "attention of this query to sinks, most first"],
  ["named", "attention of this query to named tokens, most first"],
  ["importance", "importance for the score, most first"],
];

// Height of a grid over its width.
function proportion(layout) {
  const { rows, columns } = shapeOf(layout);
  return columns ? rows / columns : 0;
}

export class Heads {
  constructor(page) {
    this.page = page;
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "All heads for the query. Arrow keys choose a head.",
      onclick: (event) => this.#pressed(event),
      onkeydown: (event) => this.#key(event),
      onpointermove: (event) => this.#moved(event),
    });
    this.note = element("p", { class: "reading", "aria-live": "polite" });
    this.root = element(
      "div",
      {},
      choice("order", ORDERS.filter(([name]) => name !== "importance" || page.views.some((view) => view.importance)), page.state.get("sort"), (sort) => page.state.set({ sort })),
      element("div", { class: "wall" }, this.canvas),
      this.note,
    );
    this.values = new Map();
  }

  // Tiles in order: `[record, head]`.
  tiles(view) {
    const every = view.attention.flatMap((record, number) => Array.from({ length: record.heads }, (_, head) => ({ record, number, head })));
    const sort = this.page.state.get("sort");
    if (sort === "layer") return every;
    const key = (tile) => this.#number(view, tile, sort);
    return every.sort((a, b) => key(a) - key(b));
  }

  #number(view, { record, head }, sort) {
    if (sort === "entropy" || sort === "distance" || sort === "importance") {
      const known = record.statistics[sort];
      const value = known ? known[head] : null;
      return value === null ? Infinity : sort === "entropy" ? value : -value;
    }
    const row = this.page.row(view, record, head);
    if (!row) return Infinity;
    const named = record.keyLayout.prefix.length;
    if (sort === "named") return -row.slice(0, named).reduce((a, b) => a + b, 0);
    const sinks = this.page.sinksOn(view, record.keyLayout);
    return sinks.length ? -sinks.reduce((sum, token) => sum + row[token], 0) : Infinity;
  }

  draw() {
    const { page } = this;
    const view = page.view;
    const wide = Math.max(this.root.clientWidth, 200);
    const tiles = (this.order = this.tiles(view));
    const grouped = page.state.get("sort") === "layer";
    const most = Math.max(1, ...view.attention.map((record) => record.heads));
    const across = grouped ? most : Math.max(4, Math.min(tiles.length, Math.floor((wide - LABEL) / (SIDE + GAP))));
    const gap = grouped ? GAP : GAP + NAME;
    const flat = Math.min(1, Math.max(0.3, ...view.attention.map((record) => proportion(record.keyLayout))));
    const fitting = grouped ? Math.max(LEAST, (window.innerHeight - ABOVE) / view.attention.length - GAP) : Infinity;
    const side = Math.floor(Math.min(96, (wide - LABEL) / across - GAP, fitting / flat));
    const tall = Math.round(side * flat);
    let line = -1;
    let place = 0;
    let last = null;
    this.boxes = tiles.map((tile) => {
      if (grouped ? tile.record !== last : place === across || line < 0) {
        line++;
        place = 0;
        last = tile.record;
      }
      return { ...tile, x: LABEL + place++ * (side + GAP), y: line * (tall + gap) + 14, side, tall };
    });
    this.context = sized(this.canvas, wide, (line + 1) * (tall + gap) + 16);
    this.inks = Object.fromEntries(["soft", "panel", "line", "bar", "focus"].map((name) => [name, ink(`--${name}`)]));
    this.shared = page.state.get("scale") === "shared" ? page.shared() : null;
    if (grouped) this.#labels();
    else this.#names();
    this.boxes.forEach((box) => this.#one(view, box));
    this.left = 0;
  }

  // Draws the heads of another query over those of the last, a few in each frame; the next frame goes on where this one ended.
  drawMoved() {
    if (this.shared || this.page.state.get("sort") !== "layer") {
      this.draw();
      return;
    }
    this.left = this.boxes.length;
    this.#some();
  }

  #some() {
    const start = performance.now();
    const view = this.page.view;
    while (this.left > 0 && performance.now() - start < BUDGET) {
      this.next = ((this.next ?? -1) + 1) % this.boxes.length;
      this.#one(view, this.boxes[this.next]);
      this.left--;
    }
    if (this.left > 0 && !this.frame) {
      this.frame = requestAnimationFrame(() => {
        this.frame = null;
        this.#some();
      });
    }
  }

  #labels() {
    const { context, inks } = this;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = inks.soft;
    for (const { record, number, head, x, y, side, tall } of this.boxes) {
      if (head === 0) context.fillText(String(number), 6, y + tall / 2 + 4);
      if (y < 20) context.fillText(String(record.numbers[head]), x + side / 2 - 3, 10);
    }
  }

  // Layer and head of each tile of a list.
  #names() {
    const { context, inks } = this;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = inks.soft;
    for (const { record, number, head, x, y } of this.boxes) context.fillText(`${number}.${record.numbers[head]}`, x, y - 3);
  }

  #one(view, box) {
    const { context, inks, page } = this;
    const { record, x, y, side, tall } = box;
    context.fillStyle = inks.panel;
    context.fillRect(x, y, side, tall);
    const row = page.row(view, record, box.head);
    if (row && record.keyLayout.grid.length) this.#tile(context, record, row, this.shared, box);
    else if (row) this.#bars(context, row, box);
    else {
      context.strokeStyle = inks.line;
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + side, y + tall);
      context.stroke();
    }
    const chosen = page.record(view);
    if (record !== chosen) return;
    const head = page.head(chosen);
    if (typeof head === "number" && head !== box.head) return;
    context.strokeStyle = inks.focus;
    context.lineWidth = 3;
    context.strokeRect(x - 1, y - 1, side + 2, tall + 2);
    context.lineWidth = 1;
  }

  #tile(context, record, row, range, { x, y, side, tall }) {
    const { rows, columns } = shapeOf(record.keyLayout);
    const values = onGrid(record.keyLayout, row).subarray(0, rows * columns);
    const scale = Math.min(side / columns, tall / rows);
    const [w, h] = [columns * scale, rows * scale];
    const signed = range ? range[0] < 0 : values.some((value) => value < 0);
    const area = [x + (side - w) / 2, y + (tall - h) / 2, w, h];
    drawGrid(context, values, { rows, columns }, range || rangeOf(values, signed, record.how === "sampled"), this.page.table(signed), () => 1, area, false);
  }

  // Keys that lie nowhere on the image: one bar each.
  #bars(context, row, { x, y, side, tall }) {
    const most = Math.max(...row) || 1;
    context.fillStyle = this.inks.bar;
    const width = side / row.length;
    row.forEach((value, i) => context.fillRect(x + i * width, y + tall * (1 - value / most), Math.max(width - 1, 1), (tall * value) / most));
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    return (this.boxes || []).find((tile) => x >= tile.x && x < tile.x + tile.side && y >= tile.y && y < tile.y + tile.tall);
  }

  #moved(event) {
    const tile = this.#at(event);
    this.note.textContent = tile ? plain(this.#said(tile)) : "";
  }

  #said({ record, head }) {
    const { entropy, distance, importance } = record.statistics;
    const numbers = [
      ...(entropy && entropy[head] !== null ? [`entropy ${entropy[head].toFixed(2)} nats`] : []),
      ...(distance && distance[head] !== null ? [`distance ${distance[head].toFixed(0)} px`] : []),
      ...(importance ? [`importance ${importance[head].toPrecision(2)} for ${this.page.view.importance}`] : []),
    ];
    const sort = this.page.state.get("sort");
    const sorted = this.#number(this.page.view, { record, head }, sort);
    const row = (sort === "sink" || sort === "named") && sorted !== Infinity ? [`this query's attention to ${sort === "sink" ? "sinks" : "named tokens"} ${(-sorted).toFixed(record.digits)}`] : [];
    return [`${record.layer}, ${record.nameOf(head)}`, ...row, ...numbers].join(", ");
  }

  #choose(tile) {
    this.page.state.set({ record: tile.number, head: tile.head, map: ATTENTION });
    this.note.textContent = plain(this.#said(tile));
  }

  #pressed(event) {
    const tile = this.#at(event);
    if (tile) this.#choose(tile);
  }

  #key(event) {
    const { page } = this;
    const chosen = page.record();
    const head = chosen ? page.head(chosen) : 0;
    const at = this.boxes.findIndex((box) => box.record === chosen && box.head === (typeof head === "number" ? head : 0));
    const here = this.boxes[at];
    if (!here) return;
    const found = {
      ArrowRight: () => this.boxes[at + 1],
      ArrowLeft: () => this.boxes[at - 1],
      ArrowDown: () => this.boxes.find((box) => box.y > here.y && box.x === here.x),
      ArrowUp: () => [...this.boxes].reverse().find((box) => box.y < here.y && box.x === here.x),
      Home: () => this.boxes[0],
      End: () => this.boxes[this.boxes.length - 1],
    }[event.key];
    if (!found) return;
    event.preventDefault();
    const tile = found();
    if (tile) this.#choose(tile);
  }
}
