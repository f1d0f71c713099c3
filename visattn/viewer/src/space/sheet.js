// Contact sheet: the patches of a selection, or the patches whose attention in this head is strongest.

import { choice, element, plain, sized } from "../dom.js";

const TILE = 52;
const MOST = 96;
const AROUND = 1; // patches of context on each side

export class Sheet {
  constructor(app) {
    this.app = app;
    this.title = element("p", { class: "shown" });
    this.controls = element("div", { class: "controls" });
    this.canvas = element("canvas", { role: "img", "aria-label": "Patches, each with one patch around it. A click chooses one.", onclick: (event) => this.#click(event) });
    this.root = element("div", { class: "sheet" }, this.controls, this.title, this.canvas);
  }

  // Tokens to show, each once.
  get shown() {
    const { app } = this;
    const table = app.layer.queryTable;
    if (app.state.patches === "exemplars") return this.exemplars;
    const [queries, keys] = ["query", "key"].map((side) => app.members(app.state.row, side));
    const found = [];
    for (let i = 0; i < table.count; i++) if (!table.named(i) && ((queries && queries[i]) || (app.layer.same && keys && keys[i]))) found.push(i);
    return found;
  }

  // Queries of patches by the largest weight that they give to another patch.
  get exemplars() {
    const { layer, state } = this.app;
    const table = layer.queryTable;
    const prefix = layer.keyNames.length;
    const strength = [];
    for (let i = 0; i < table.count; i++) {
      if (table.named(i)) continue;
      const row = layer.row(state.head, i);
      const own = table.token[i];
      let most = 0;
      for (let key = prefix; key < row.length; key++) if (!(layer.same && key === own) && row[key] > most) most = row[key];
      strength.push([most, i]);
    }
    return strength.sort((a, b) => b[0] - a[0]).slice(0, 48).map(([, i]) => i);
  }

  draw() {
    const { app } = this;
    const { space, state, layer } = app;
    const table = layer.queryTable;
    const { shown } = this;
    this.tokens = shown.slice(0, MOST);
    this.controls.replaceChildren(choice("patches", [["selected", "that are selected"], ["exemplars", "whose attention here is strongest"]], state.patches, (patches) => app.set({ patches })));
    this.title.textContent = plain(this.#told(shown, table));
    const wide = Math.max(1, Math.floor(Math.max(this.root.clientWidth, 200) / TILE));
    this.columns = wide;
    const context = sized(this.canvas, wide * TILE, Math.max(1, Math.ceil(this.tokens.length / wide)) * TILE);
    this.tokens.forEach((token, place) => {
      const picture = space.pictures[layer.block][table.image[token]];
      if (!picture.complete) picture.onload = () => app.later("panel");
      if (!picture.naturalWidth) return;
      const [x, y] = [(place % wide) * TILE, Math.floor(place / wide) * TILE];
      const [high, across] = [picture.naturalHeight / table.grid[0], picture.naturalWidth / table.grid[1]];
      const side = TILE - 4;
      const unit = side / (1 + 2 * AROUND);
      context.save();
      context.beginPath();
      context.rect(x + 2, y + 2, side, side);
      context.clip();
      context.imageSmoothingEnabled = true;
      const left = x + 2 - ((table.column[token] - AROUND) * unit);
      const top = y + 2 - ((table.row[token] - AROUND) * unit);
      context.drawImage(picture, left, top, (picture.naturalWidth / across) * unit, (picture.naturalHeight / high) * unit);
      context.restore();
      context.lineWidth = token === state.token ? 3 : 1.5;
      context.strokeStyle = token === state.token ? "#d55e00" : "#ffffff";
      context.strokeRect(x + 2 + AROUND * unit, y + 2 + AROUND * unit, unit, unit);
    });
  }

  #told(shown, table) {
    const { app } = this;
    const images = new Set(shown.map((i) => table.image[i])).size;
    const cut = shown.length > MOST ? `; the first ${MOST} are shown` : "";
    if (app.state.patches === "exemplars") return `${shown.length} queries that give another patch the most of their attention`;
    if (!shown.length) return "Nothing is selected. Draw a lasso around points of the head.";
    return `${shown.length.toLocaleString("en")} patches of ${images} images, selected by ${app.what}${cut}`;
  }

  #click(event) {
    const box = this.canvas.getBoundingClientRect();
    const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((at) => Math.floor(at / TILE));
    const token = this.tokens[row * this.columns + column];
    if (token !== undefined && column < this.columns) this.app.choose(token);
  }
}
