// The image of the chosen token with the attention of its query, or the mean attention of many; for layers over words, the image's text.

import { drawOver, grayOf, rangeOf } from "../colors.js";
import { choice, element, ink, plain, redrawn, sized } from "../dom.js";

const ARROWS = 3;
const TOLD = 5;
const MOST = 420;
const ACROSS = 4; // words beside each other
const LINE = 40; // height of a word's cell

export class SpaceImage {
  constructor(app) {
    this.app = app;
    this.grays = new Map();
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "Image with attention. A click chooses the nearest drawn patch, arrow keys the next one.",
      onclick: (event) => this.#click(event),
      onkeydown: (event) => this.#key(event),
    });
    this.title = element("p", { class: "shown" });
    this.strong = element("p", { class: "reading" });
    this.choices = element("div", { class: "controls" });
    this.root = element("figure", { class: "image" }, this.choices, this.canvas, element("figcaption", {}, this.title, this.strong));
  }

  // Selected queries of patches, or all.
  get members() {
    const { app } = this;
    const found = app.members(app.state.row, "query");
    const { table } = app.layer;
    return Array.from({ length: table.count }, (_, i) => i).filter((i) => !table.named(i) && (!found || found[i]));
  }

  // Drawn tokens of the image that have a place.
  get shown() {
    const { table } = this.app.layer;
    return Array.from({ length: table.count }, (_, i) => i).filter((i) => table.image[i] === this.app.image && !table.named(i));
  }

  draw() {
    const { app } = this;
    const { state, space } = app;
    const images = space.images.map((image, i) => [String(i), `${i}: ${image.name}`]);
    redrawn(this.choices, () =>
      this.choices.replaceChildren(
        choice("image", images, String(app.image), (value) => app.chooseImage(Number(value))),
        choice("attention", [["one", "of the chosen token"], ["mean", "mean of the selected queries"]], state.attention, (attention) => app.set({ attention })),
      ),
    );
    this.strong.textContent = "";
    if (state.attention === "mean") this.#mean();
    else this.#one();
  }

  // Begins a drawing as large as a picture or a text, and keeps its size.
  #begin(picture) {
    const { table } = this.app.layer;
    const room = Math.max(200, Math.min(this.root.clientWidth, MOST));
    const lines = table.ofWords ? Math.ceil(table.words[this.app.image].length / ACROSS) : 0;
    const ratio = picture && picture.naturalWidth ? picture.naturalHeight / picture.naturalWidth : table.grid[0] / table.grid[1];
    this.size = [room, table.ofWords ? lines * LINE : Math.min(room * ratio, MOST * 1.2)];
    return sized(this.canvas, ...this.size);
  }

  // Rectangle that the grid covers.
  #frame() {
    const [width, height] = this.size;
    const [top, left, bottom, right] = this.app.layer.table.frame;
    return [left * width, top * height, (right - left) * width, (bottom - top) * height];
  }

  // Rectangle of the cell of a token of the image.
  #cell(token) {
    const { table } = this.app.layer;
    if (table.ofWords) {
      const wide = this.size[0] / ACROSS;
      return [(token % ACROSS) * wide, Math.floor(token / ACROSS) * LINE, wide, LINE];
    }
    const [x, y, width, height] = this.#frame();
    const [high, wide] = [height / table.grid[0], width / table.grid[1]];
    return [x + table.cellColumn[token] * wide, y + table.cellRow[token] * high, wide, high];
  }

  #center(token) {
    const [x, y, wide, high] = this.#cell(token);
    return [x + wide / 2, y + high / 2];
  }

  #heat(context, row, alpha) {
    const { layer, space } = this.app;
    const { table } = layer;
    const [rows, columns] = table.grid;
    const values = table.onGrid(row);
    drawOver(context, values, { rows, columns }, rangeOf(values, false), space.colors.of("inferno"), alpha, this.#frame(), false);
  }

  // Colors lie on a gray photo, so none of the photo's is taken for one of the map.
  #gray(picture) {
    if (!this.grays.has(picture)) this.grays.set(picture, grayOf(picture));
    return this.grays.get(picture);
  }

  // Words of the image's text, each colored by a weight.
  #text(context, row) {
    const { app } = this;
    const { table } = app.layer;
    const words = table.words[app.image];
    const most = row ? Math.max(...row) : 1;
    context.font = "14px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    words.forEach((word, token) => {
      const [x, y, wide, high] = this.#cell(token);
      context.globalAlpha = row ? row[token] / (most || 1) : 0;
      context.fillStyle = "#e69f00";
      context.fillRect(x + 2, y + 2, wide - 4, high - 4);
      context.globalAlpha = 1;
      context.fillStyle = ink("--text");
      context.fillText(plain(word, 24), x + wide / 2, y + high / 2, wide - 8);
    });
  }

  #mean() {
    const { app } = this;
    const { layer, state } = app;
    const { members } = this;
    const context = this.#begin(null);
    if (layer.table.ofWords) {
      this.#text(context, null);
      this.title.textContent = "The words of different texts have no common places, so there is no mean.";
      return;
    }
    if (!members.length) {
      this.title.textContent = "No queries of patches are selected in this layer.";
      return;
    }
    const row = layer.meanRow(state.head, members);
    this.#heat(context, row, () => 1);
    this.title.textContent = plain(`Mean attention of ${members.length.toLocaleString("en")} ${members.length === 1 ? "query" : "queries"}, over the places of their images`);
    this.#names(row, -1);
  }

  #one() {
    const { app } = this;
    const { state, space, layer, image, token } = app;
    const { table } = layer;
    const { name } = space.images[image];
    const picture = table.ofWords ? null : space.pictures[layer.block][image];
    if (picture && !picture.complete) picture.onload = () => app.later("panel");
    const context = this.#begin(picture);
    const row = token === null ? null : layer.row(state.head, token);
    if (picture && picture.naturalWidth) context.drawImage(row ? this.#gray(picture) : picture, 0, 0, ...this.size);
    if (table.ofWords) this.#text(context, row);
    else if (row) this.#heat(context, row, (share) => 0.75 * Math.sqrt(share));
    if (!table.ofWords) this.#dots(context);
    if (!row) {
      const missing = app.picked ? `This layer does not have ${app.nameOf("query", app.picked.table, app.picked.token)}. ` : "";
      this.title.textContent = plain(`${missing}${name}: ${table.ofWords ? "the words of its text" : "the dots are its drawn patches"}. Choose one.`, 200);
      return;
    }
    const own = table.token[token];
    if (table.ofWords || !table.named(token)) {
      context.lineWidth = 3;
      context.strokeStyle = table.ofWords ? ink("--focus") : "#ffffff";
      context.strokeRect(...this.#cell(own));
    }
    if (!table.ofWords && !table.named(token)) {
      const others = this.#order(row).filter((key) => key !== own && table.cellRow[key] >= 0);
      for (const key of others.slice(0, ARROWS)) this.#arrow(context, this.#center(own), this.#center(key));
    }
    this.title.textContent = plain(`${name}: attention of the query ${table.nameOf(token)} in ${space.nameOf(layer)}, head ${layer.numbers[state.head]}`, 160);
    this.#names(row, own);
  }

  #order(row) {
    return Array.from(row.keys()).sort((a, b) => row[b] - row[a]);
  }

  #names(row, own) {
    const { app } = this;
    const { table } = app.layer;
    const name = (key) => (key === own ? "itself" : table.nameAt(app.image, key));
    const strongest = this.#order(row).slice(0, TOLD);
    this.strong.textContent = plain(`Strongest keys: ${strongest.map((key) => `${name(key)} ${(100 * row[key]).toFixed(1)} %`).join(", ")}`, 200);
  }

  #dots(context) {
    const { table } = this.app.layer;
    context.fillStyle = "#ffffff";
    context.strokeStyle = "#000000";
    context.lineWidth = 1;
    for (const i of this.shown) {
      context.beginPath();
      context.arc(...this.#center(table.token[i]), 3, 0, 2 * Math.PI);
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
    const { table } = app.layer;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [found, least] = [null, Infinity];
    for (const i of this.shown) {
      const at = this.#center(table.token[i]);
      const apart = Math.hypot(at[0] - x, at[1] - y);
      if (apart < least) [found, least] = [i, apart];
    }
    if (found !== null) app.choose(found);
  }

  #key(event) {
    const { app, shown } = this;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !shown.length || app.state.attention === "mean") return;
    event.preventDefault();
    const at = shown.indexOf(app.token);
    app.choose(shown[at < 0 ? 0 : (at + step + shown.length) % shown.length]);
  }
}
