// Contact sheet: the patches of a selection, or the patches whose attention in this head is strongest.

import { choice, element, ink, plain, redrawn, sized } from "../dom.js";

const TILE = 52;
const MOST = 96;
const AROUND = 1; // patches of context on each side

export class Sheet {
  constructor(app) {
    this.app = app;
    this.title = element("p", { class: "shown" });
    this.controls = element("div", { class: "controls" });
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "Patches, each with one patch around it. A click chooses one, arrow keys the next one.",
      onclick: (event) => this.#click(event),
      onkeydown: (event) => this.#key(event),
    });
    this.root = element("div", { class: "sheet" }, this.controls, this.title, this.canvas);
  }

  // Tokens to show, each once.
  get shown() {
    const { app } = this;
    const { table } = app.layer;
    if (app.state.patches === "exemplars") return this.exemplars;
    const [queries, keys] = ["query", "key"].map((side) => app.members(app.state.row, side));
    const found = [];
    for (let i = 0; i < table.count; i++) if (!table.named(i) && ((queries && queries[i]) || (keys && keys[i]))) found.push(i);
    return found;
  }

  // Queries of patches by the largest weight that they give to another patch.
  get exemplars() {
    const { layer, state } = this.app;
    const { table } = layer;
    const strength = [];
    for (let i = 0; i < table.count; i++) {
      if (table.named(i)) continue;
      const row = layer.row(state.head, i);
      const own = table.token[i];
      let most = 0;
      row.forEach((weight, key) => {
        if (key !== own && (table.ofWords ? key > 0 : table.cellRow[key] >= 0)) most = Math.max(most, weight);
      });
      strength.push([most, i]);
    }
    return strength.sort((a, b) => b[0] - a[0]).slice(0, 48).map(([, i]) => i);
  }

  draw() {
    const { app } = this;
    const { space, state, layer } = app;
    const { table } = layer;
    const { shown } = this;
    this.tokens = shown.slice(0, MOST);
    redrawn(this.controls, () =>
      this.controls.replaceChildren(choice("patches", [["selected", "that are selected"], ["exemplars", "whose attention here is strongest"]], state.patches, (patches) => app.set({ patches }))),
    );
    this.title.textContent = plain(this.#told(shown, table));
    const wide = Math.max(1, Math.floor(Math.max(this.root.clientWidth, 200) / TILE));
    this.columns = wide;
    const context = sized(this.canvas, wide * TILE, Math.max(1, Math.ceil(this.tokens.length / wide)) * TILE);
    this.tokens.forEach((token, place) => {
      const [x, y] = [(place % wide) * TILE, Math.floor(place / wide) * TILE];
      if (table.ofWords) {
        this.#word(context, token, x, y);
        return;
      }
      const picture = space.pictures[layer.block][table.image[token]];
      if (!picture.complete) picture.onload = () => app.later("panel");
      if (!picture.naturalWidth) return;
      const [top, left, bottom, right] = table.frame;
      const side = TILE - 4;
      const unit = side / (1 + 2 * AROUND);
      context.save();
      context.beginPath();
      context.rect(x + 2, y + 2, side, side);
      context.clip();
      context.imageSmoothingEnabled = true;
      const [width, height] = [(table.grid[1] * unit) / (right - left), (table.grid[0] * unit) / (bottom - top)]; // of the whole picture
      context.drawImage(picture, x + 2 - (table.column[token] - AROUND) * unit - left * width, y + 2 - (table.row[token] - AROUND) * unit - top * height, width, height);
      context.restore();
      context.lineWidth = token === app.token ? 3 : 1.5;
      context.strokeStyle = token === app.token ? "#d55e00" : "#ffffff";
      context.strokeRect(x + 2 + AROUND * unit, y + 2 + AROUND * unit, unit, unit);
    });
  }

  #word(context, token, x, y) {
    const { app } = this;
    context.strokeStyle = token === app.token ? "#d55e00" : ink("--line");
    context.lineWidth = token === app.token ? 3 : 1;
    context.strokeRect(x + 2, y + 2, TILE - 4, TILE - 4);
    context.fillStyle = ink("--text");
    context.font = "13px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(plain(app.layer.table.nameOf(token), 20), x + TILE / 2, y + TILE / 2, TILE - 8);
  }

  #told(shown, table) {
    const { app } = this;
    const images = new Set(shown.map((i) => table.image[i])).size;
    const cut = shown.length > MOST ? `; the first ${MOST} are shown` : "";
    const [one, many] = table.ofWords ? ["word", "words"] : ["patch", "patches"];
    if (app.state.patches === "exemplars") return `${shown.length} queries that give another ${one} the most of their attention`;
    if (!app.selected) return "Nothing is selected. Draw a lasso around points of the head.";
    if (!shown.length) return `This layer has no ${one} of the selection by ${app.selected.what}.`;
    return `${shown.length.toLocaleString("en")} ${shown.length === 1 ? one : many} of ${images} ${images === 1 ? "image" : "images"}, selected by ${app.selected.what}${cut}`;
  }

  #click(event) {
    const box = this.canvas.getBoundingClientRect();
    const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((at) => Math.floor(at / TILE));
    const token = this.tokens[row * this.columns + column];
    if (token !== undefined && column < this.columns) this.app.choose(token);
  }

  #key(event) {
    const { app, tokens } = this;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (!step || !tokens.length) return;
    event.preventDefault();
    const at = tokens.indexOf(app.token);
    const next = at < 0 ? 0 : at + step;
    if (next >= 0 && next < tokens.length) app.choose(tokens[next]);
  }
}
