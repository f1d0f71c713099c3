// The image of the chosen token, with the attention of its query; or the mean attention of many.

import { drawGrid, rangeOf } from "../colors.js";
import { choice, element, plain, sized } from "../dom.js";

const ARROWS = 3;
const TOLD = 5;
const MOST = 420;

export class SpaceImage {
  constructor(app) {
    this.app = app;
    this.canvas = element("canvas", { role: "img", "aria-label": "Image with attention. A click chooses the nearest drawn patch.", onclick: (event) => this.#click(event) });
    this.title = element("p", { class: "shown" });
    this.strong = element("p", { class: "reading" });
    this.choices = element("div", { class: "controls" });
    this.root = element("figure", { class: "image" }, this.choices, this.canvas, element("figcaption", {}, this.title, this.strong));
  }

  get members() {
    const { app } = this;
    const found = app.members(app.state.row, "query");
    const { queryTable } = app.layer;
    const every = Array.from({ length: queryTable.count }, (_, i) => i).filter((i) => !queryTable.named(i));
    return found ? every.filter((i) => found[i]) : every;
  }

  draw() {
    const { app } = this;
    const { state, space, layer } = app;
    const images = space.images.map((image, i) => [String(i), `${i}: ${image.name}`]);
    const now = state.token === null ? state.image : layer.queryTable.image[state.token];
    this.choices.replaceChildren(
      choice("image", images, String(now), (value) => app.chooseImage(Number(value))),
      choice("attention", [["one", "of the chosen token"], ["mean", "mean of the selected queries"]], state.attention, (attention) => app.set({ attention })),
    );
    if (state.attention === "mean") this.#mean();
    else this.#one(now);
  }

  #frame(picture) {
    const room = Math.max(200, Math.min(this.root.clientWidth, MOST));
    const ratio = picture && picture.naturalWidth ? picture.naturalHeight / picture.naturalWidth : this.app.layer.keyGrid[0] / this.app.layer.keyGrid[1];
    return [room, Math.min(room * ratio, MOST * 1.2)];
  }

  #cell([rows, columns], row, column, [width, height]) {
    return [((column + 0.5) * width) / columns, ((row + 0.5) * height) / rows];
  }

  #heat(context, row, size, alpha) {
    const { layer, space } = this.app;
    const [rows, columns] = layer.keyGrid;
    const patches = row.subarray(layer.keyNames.length);
    if (patches.length !== rows * columns) return;
    drawGrid(context, patches, { rows, columns }, rangeOf(patches, false), space.colors.of("inferno"), alpha, [0, 0, ...size], false);
  }

  #mean() {
    const { app } = this;
    const { layer, state } = app;
    const { members } = this;
    const size = this.#frame(null);
    const context = sized(this.canvas, ...size);
    if (!members.length) {
      this.title.textContent = "No queries of patches are selected.";
      this.strong.textContent = "";
      return;
    }
    const row = layer.meanRow(state.head, members);
    this.#heat(context, row, size, () => 1);
    this.title.textContent = plain(`Mean attention of ${members.length.toLocaleString("en")} queries, over the places of their images`);
    this.#names(row);
  }

  #one(now) {
    const { app } = this;
    const { state, space, layer } = app;
    const table = layer.queryTable;
    const picture = space.pictures[layer.block][now];
    if (!picture.complete) picture.onload = () => app.later("panel");
    const size = this.#frame(picture);
    const context = sized(this.canvas, ...size);
    this.size = size;
    if (picture.naturalWidth) context.drawImage(picture, 0, 0, ...size);
    this.strong.textContent = "";
    if (state.token === null || !app.hasToken(state.row)) {
      this.#dots(context, now, size);
      this.title.textContent = plain(`${space.images[now].name}: the dots are its drawn patches. Choose one.`);
      return;
    }
    const row = layer.row(state.head, state.token);
    this.#heat(context, row, size, (share) => 0.75 * Math.sqrt(share));
    this.#dots(context, now, size);
    const at = table.named(state.token) ? null : this.#cell(table.grid, table.row[state.token], table.column[state.token], size);
    const prefix = layer.keyNames.length;
    const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a]);
    if (at) {
      const [high, wide] = [size[1] / table.grid[0], size[0] / table.grid[1]];
      context.lineWidth = 3;
      context.strokeStyle = "#ffffff";
      context.strokeRect(at[0] - wide / 2, at[1] - high / 2, wide, high);
      for (const key of order.filter((one) => one >= prefix).slice(0, ARROWS)) this.#arrow(context, at, this.#cell(layer.keyGrid, Math.floor((key - prefix) / layer.keyGrid[1]), (key - prefix) % layer.keyGrid[1], size));
    }
    this.title.textContent = plain(`${space.images[now].name}: attention of the query ${table.nameOf(state.token)} in ${space.nameOf(layer)}, head ${layer.numbers[state.head]}`, 160);
    this.#names(row, order);
  }

  #names(row, order = Array.from(row.keys()).sort((a, b) => row[b] - row[a])) {
    const { layer } = this.app;
    const prefix = layer.keyNames.length;
    const name = (key) => (key < prefix ? layer.keyNames[key] : `${Math.floor((key - prefix) / layer.keyGrid[1])},${(key - prefix) % layer.keyGrid[1]}`);
    this.strong.textContent = plain(`Strongest keys: ${order.slice(0, TOLD).map((key) => `${name(key)} ${(100 * row[key]).toFixed(1)} %`).join(", ")}`, 200);
  }

  #dots(context, now, size) {
    const table = this.app.layer.queryTable;
    context.fillStyle = "#ffffff";
    context.strokeStyle = "#000000";
    context.lineWidth = 1;
    for (let i = 0; i < table.count; i++) {
      if (table.image[i] !== now || table.named(i)) continue;
      context.beginPath();
      context.arc(...this.#cell(table.grid, table.row[i], table.column[i], size), 3, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    }
  }

  #arrow(context, [x, y], [toX, toY]) {
    const length = Math.hypot(toX - x, toY - y);
    if (length < 4) return;
    const [ux, uy] = [(toX - x) / length, (toY - y) / length];
    for (const [color, wide] of [["#000000", 4], ["#ffffff", 2]]) {
      context.strokeStyle = color;
      context.lineWidth = wide;
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(toX, toY);
      context.moveTo(toX - 10 * ux + 5 * uy, toY - 10 * uy - 5 * ux);
      context.lineTo(toX, toY);
      context.lineTo(toX - 10 * ux - 5 * uy, toY - 10 * uy + 5 * ux);
      context.stroke();
    }
  }

  #click(event) {
    const { app } = this;
    if (app.state.attention === "mean") return;
    const table = app.layer.queryTable;
    const now = app.state.token === null ? app.state.image : table.image[app.state.token];
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [found, least] = [null, Infinity];
    for (let i = 0; i < table.count; i++) {
      if (table.image[i] !== now || table.named(i)) continue;
      const at = this.#cell(table.grid, table.row[i], table.column[i], this.size);
      const apart = Math.hypot(at[0] - x, at[1] - y);
      if (apart < least) [found, least] = [i, apart];
    }
    if (found !== null) app.choose(found);
  }
}
