// Start of the page of a space: all heads on the left, the chosen head, its images and numbers on the right.

import { check, choice, element, ink, plain } from "../dom.js";
import { arraysOf } from "../payload.js";
import { Space, placesOf } from "./data.js";
import { HeadPlot } from "./head.js";
import { SpaceImage } from "./image.js";
import { HeadMatrix } from "./matrix.js";
import { Numbers } from "./numbers.js";
import { Painted, modesOf, parsed } from "./palette.js";
import { Sheet } from "./sheet.js";
import { Thumbs } from "./thumbs.js";

const TABS = { image: "Image", patches: "Patches", images: "Images", numbers: "Numbers" };

class App {
  constructor(space) {
    this.space = space;
    this.painted = new Painted(space);
    this.state = { row: space.layers.length - 1, head: 0, mode: "kind", image: 0, tab: "image", attention: "one", patches: "selected", ...this.#linked() };
    this.sides = ["query", "key"];
    this.turn = [0.6, 0.4];
    this.picked = null; // the chosen token and its table
    this.selected = null;
    this.known = new Map();
    this.waiting = new Set();
    this.matrix = new HeadMatrix(this);
    this.plot = new HeadPlot(this);
    this.panels = { image: new SpaceImage(this), patches: new Sheet(this), images: new Thumbs(this), numbers: new Numbers(this) };
    this.build();
    let width = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - width) < 1) return;
      width = entry.contentRect.width;
      this.later("all");
    }).observe(this.main);
  }

  get layer() {
    return this.space.layers[this.state.row];
  }

  // Color of points that are not selected.
  get dim() {
    return parsed(ink("--line"));
  }

  build() {
    const { space } = this;
    this.tabs = element(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Panels" },
      ...Object.entries(TABS).map(([name, text]) => element("button", { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => this.set({ tab: name }), onkeydown: (event) => this.#tabKey(event) }, text)),
    );
    const panels = Object.entries(this.panels).map(([name, panel]) => element("div", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, class: "panel" }, panel.root));
    this.told = element("p", { class: "reading", "aria-live": "polite" });
    const controls = element(
      "div",
      { class: "controls", role: "group", "aria-label": "Display" },
      choice("color", modesOf(space), this.state.mode, (mode) => this.set({ mode })),
      check("queries", true, (on) => this.#side("query", on)),
      check("keys", true, (on) => this.#side("key", on)),
      element("button", { onclick: () => this.matrix.zoomAt(0, 0, 0) }, "Show all heads"),
      element("button", { onclick: () => this.select(null) }, "Clear selection"),
    );
    this.main = element(
      "main",
      { class: "space" },
      element("section", { class: "left", "aria-label": "All heads" }, controls, this.matrix.root, this.told, element("ul", { class: "warnings", "aria-label": "Warnings" }, ...space.warnings.map((text) => element("li", {}, plain(text, 400))))),
      this.plot.root,
      element("section", { "aria-label": "Panels" }, this.tabs, ...panels),
    );
    const notes = space.notes.length ? ` Notes: ${space.notes.join("; ")}.` : "";
    document.body.append(
      element("header", {}, element("h1", {}, plain(space.title, 160)), element("div", { class: "exports" }, element("button", { onclick: () => this.#save() }, "Save selection"), element("button", { onclick: () => this.#theme(), "aria-label": "Switch between light and dark" }, "Light / dark"))),
      this.main,
      element("footer", {}, element("p", { class: "soft" }, plain(`${space.about} ${space.points.toLocaleString("en")} points in all.${notes}`, 1500))),
    );
  }

  places(row, head, side) {
    const key = `${row} ${head} ${side}`;
    if (!this.known.has(key)) this.known.set(key, placesOf(this.space.layers[row], head, side, this.turn));
    return this.known.get(key);
  }

  turnTo(turn) {
    this.turn = turn;
    this.known.clear();
    this.later("all");
  }

  // The chosen token in a layer's table; null if none is chosen, or the layer does not have it.
  tokenIn(row) {
    return this.picked ? this.picked.table.into(this.space.layers[row].table, this.picked.token) : null;
  }

  get token() {
    return this.tokenIn(this.state.row);
  }

  // The image that is shown: that of the chosen token.
  get image() {
    return this.picked ? this.picked.table.image[this.picked.token] : this.state.image;
  }

  // Selected tokens of a layer as a mask; null: all.
  members(row, side) {
    return this.selected ? this.#mask(this.space.layers[row].table, side) : null;
  }

  // Selected tokens of a table.
  #mask(table, side) {
    const { known, of } = this.selected;
    const key = `${this.space.tables.indexOf(table)} ${side}`;
    if (!known.has(key)) known.set(key, of(table, side));
    return known.get(key);
  }

  set(changes) {
    Object.assign(this.state, changes);
    this.state.head = Math.min(this.state.head, this.layer.heads - 1);
    this.later("all");
  }

  // Chooses a token of the open layer, or lets go.
  choose(token) {
    const { table } = this.layer;
    const image = this.image;
    this.picked = token === null ? null : { table, token };
    this.set({ image: token === null ? image : table.image[token], ...(token === null ? {} : { attention: "one" }) });
  }

  chooseImage(image) {
    this.picked = null;
    this.state.image = image;
    this.select((table) => Uint8Array.from(table.image, (one) => (one === image ? 1 : 0)), `image ${this.space.images[image].name}`);
  }

  // Selects points of the open head, given as a mask for queries and one for keys.
  selectPoints(masks, what) {
    const own = this.layer.table;
    const of = (table, side) => {
      const found = new Uint8Array(table.count);
      masks[side].forEach((one, i) => {
        const there = one ? own.into(table, i) : null;
        if (there !== null) found[there] = 1;
      });
      return found;
    };
    const empty = !masks.query.includes(1) && !masks.key.includes(1);
    this.select(empty ? null : of, what);
    if (!empty) this.set({ tab: "patches", patches: "selected" });
  }

  // Selects tokens, given as a function from a table and a side to a mask.
  select(of, what = "") {
    const { layer } = this;
    this.selected = of && { of, what, known: new Map(), table: layer.table, layer, head: layer.numbers[this.state.head] };
    this.set({});
  }

  nameOf(side, table, token) {
    return `${side} ${table.nameOf(token)} of ${this.space.images[table.image[token]].name}${table.sink[token] ? ", a sink" : ""}`;
  }

  // Draws a part of the page once before the next frame: `all`, `matrix` or `panel`.
  later(part) {
    this.waiting.add(part);
    if (this.waiting.size > 1) return;
    requestAnimationFrame(() => {
      const parts = this.waiting;
      this.waiting = new Set();
      if (parts.has("all")) this.draw();
      else {
        if (parts.has("matrix")) this.matrix.draw();
        if (parts.has("panel")) this.panels[this.state.tab].draw();
      }
    });
  }

  draw() {
    const { state } = this;
    this.matrix.draw();
    this.plot.draw();
    for (const name of Object.keys(TABS)) {
      const chosen = state.tab === name;
      const tab = document.getElementById(`tab-${name}`);
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      document.getElementById(`panel-${name}`).hidden = !chosen;
    }
    this.panels[state.tab].draw();
    const { picked, selected } = this;
    const chosen = picked ? `Chosen: ${this.nameOf("query", picked.table, picked.token)}, ringed in every head that has it.` : "No token is chosen.";
    const counts = selected ? ["query", "key"].map((side) => this.#mask(selected.table, side).reduce((sum, one) => sum + one, 0)) : [];
    const selection = selected ? ` Selected by ${selected.what}: ${counts[0]} queries, ${counts[1]} keys.` : "";
    this.told.textContent = plain(chosen + selection, 300);
    this.#remember();
  }

  #side(side, on) {
    this.sides = ["query", "key"].filter((one) => (one === side ? on : this.sides.includes(one)));
    this.set({});
  }

  #tabKey(event) {
    const names = Object.keys(TABS);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(this.state.tab) + step + names.length) % names.length];
    this.set({ tab: next });
    document.getElementById(`tab-${next}`).focus();
  }

  #linked() {
    const said = new URLSearchParams(location.hash.slice(1));
    const found = {};
    const limits = { row: this.space.layers.length, head: this.space.mostHeads, image: this.space.images.length };
    for (const [name, limit] of Object.entries(limits)) {
      const value = Number(said.get(name));
      if (said.has(name) && Number.isInteger(value) && value >= 0 && value < limit) found[name] = value;
    }
    if (found.head !== undefined) found.head = Math.min(found.head, this.space.layers[found.row ?? this.space.layers.length - 1].heads - 1);
    if (modesOf(this.space).some(([mode]) => mode === said.get("mode"))) found.mode = said.get("mode");
    if (said.get("tab") in TABS) found.tab = said.get("tab");
    return found;
  }

  #remember() {
    const { row, head, mode, tab } = this.state;
    const { image } = this;
    try {
      history.replaceState(null, "", `#${new URLSearchParams({ row, head, mode, tab, image })}`);
    } catch {
      // a frame in a notebook has no address
    }
  }

  // The selection as JSON: image and name of each token.
  selection() {
    const { selected, space } = this;
    if (!selected) return { layer: this.layer.name, head: this.layer.numbers[this.state.head], by: "", queries: [], keys: [] };
    const { table, layer, head, what } = selected;
    const list = (side) => {
      const mask = this.#mask(table, side);
      const tokens = Array.from(mask.keys()).filter((i) => mask[i]);
      return tokens.map((i) => ({ image: space.images[table.image[i]].name, number: table.image[i], token: table.nameOf(i) }));
    };
    return { model: space.blocks[layer.block].model, layer: layer.name, head, by: what, queries: list("query"), keys: list("key") };
  }

  #save() {
    const link = element("a", { download: "selection.json", href: URL.createObjectURL(new Blob([JSON.stringify(this.selection(), null, 1)], { type: "application/json" })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  #theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.draw();
  }
}

async function start() {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const arrays = await arraysOf(facts.chunks, document.getElementById("data").textContent);
  const app = new App(new Space(facts, arrays));
  window.app = app;
  await Promise.all(app.space.pictures[0].slice(0, 1).map((picture) => picture.decode().catch(() => null)));
  app.draw();
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  document.body.append(element("p", { class: "failed" }, plain(`This page cannot be shown: ${error.message}`, 400)));
  throw error;
});
