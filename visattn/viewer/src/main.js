// Start of the page: unpack, build the panels, and draw what changed.

import { readAttn } from "./attn.js";
import { check, choice, element, plain, put, slider } from "./dom.js";
import { Contributions } from "./contributions.js";
import { Heads, ORDERS } from "./heads.js";
import { ImagePanel } from "./image.js";
import { Keys } from "./keys.js";
import { Lines } from "./lines.js";
import { Maps } from "./maps.js";
import { Matrix } from "./matrix.js";
import { ATTENTION, CONTRIBUTIONS, SIMILARITY, Page } from "./page.js";
import { arraysOf } from "./payload.js";
import { State, headOf } from "./state.js";
import { boxOnPhoto } from "./tokens.js";
import { Words } from "./words.js";

const VERSION = 1;
const NARROW = matchMedia("(max-width: 900px)"); // as in the style sheet
const SAID = 8000; // milliseconds that a message stays
const KEYBOARD = "Keyboard: arrow keys move the query, Enter holds it, Escape lets it go, G switches the photo between gray and its own colors, Tab reaches everything else.";
const TABS = { heads: "Heads", contributions: "Contributions", maps: "Maps", words: "Words", keys: "Keys", lines: "Lines", matrix: "Matrix" };

function firstState(facts) {
  const view = facts.views[0];
  const record = Math.max(view.records.length - 1, 0);
  const layout = view.records.length ? facts.layouts[view.records[record].queries] : facts.layouts[0];
  const [top, left, bottom, right] = layout && layout.grid.length ? boxOnPhoto(view, layout) : [0, 0, ...view.size];
  const named = layout && !layout.grid.length && layout.prefix.length; // words of a caption, object queries
  return {
    view: 0,
    record,
    head: "mean",
    query: named ? { name: layout.prefix[0] } : { y: (top + bottom) / 2, x: (left + right) / 2 },
    map: view.records.length || !view.maps.length ? ATTENTION : view.maps[0].name,
    colormap: "inferno",
    opacity: facts.look.opacity,
    blend: "value",
    ground: "auto",
    scale: "panel",
    smooth: false,
    mass: 0,
    sinks: true,
    pinned: false,
    tab: named ? "words" : view.records.length ? "heads" : "maps",
    sort: "layer",
    part: "all",
    allQueries: false,
    allHeads: false,
    zoom: 1,
    top: 12,
    hidden: new Set(),
    compare: -1,
    otherRecord: -1,
    otherHead: "same",
  };
}

function layersOf(view) {
  return view.attention.map((one, i) => [String(i), `${i}: ${one.layer}`]);
}

function headsOf(record) {
  return [["mean", "mean"], ["max", "largest"], ...record.numbers.map((_, i) => [String(i), record.nameOf(i)])];
}

class Viewer {
  constructor(page) {
    this.page = page;
    this.image = new ImagePanel(page, () => page.first, () => this.draw());
    this.other = new ImagePanel(page, () => page.second, () => this.draw());
    this.panels = {
      heads: new Heads(page),
      contributions: new Contributions(page),
      maps: new Maps(page, this.image),
      words: new Words(page, this.image),
      keys: new Keys(page, this.image),
      lines: new Lines(page),
      matrix: new Matrix(page),
    };
    this.build();
    page.state.listen((names) => this.changed(names));
    NARROW.addEventListener("change", () => this.fold());
    let width = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - width) < 1) return; // drawing changes the height
      width = entry.contentRect.width;
      requestAnimationFrame(() => this.draw());
    }).observe(this.main);
  }

  build() {
    const { page } = this;
    const { state } = page;
    this.title = element("h1");
    this.controls = element("div", { class: "controls", role: "group", "aria-label": "Display" });
    this.display = element("details", {}, element("summary", {}, "Display"), this.controls);
    this.query = element("div", { class: "controls", role: "group", "aria-label": "Query, layer and head" });
    this.said = element("p", { class: "said", role: "status" });
    this.tabs = element(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Panels" },
      ...Object.entries(TABS).map(([name, text]) =>
        element("button", { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => this.choose(name), onkeydown: (event) => this.tabKey(event) }, text),
      ),
    );
    const panels = Object.entries(this.panels).map(([name, panel]) =>
      element("div", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, class: "panel" }, panel.root),
    );
    this.warnings = element("ul", { class: "warnings", "aria-label": "Warnings" });
    this.about = element("p", { class: "soft" });
    this.main = element(
      "main",
      { class: "study" },
      element("section", { class: "left", "aria-label": "Image" }, this.query, element("div", { class: "pair" }, this.image.root, this.other.root), this.display, this.warnings),
      element("section", { class: "right", "aria-label": "Panels" }, this.tabs, ...panels),
    );
    document.body.append(element("header", {}, this.title, this.exports()), this.main, element("footer", {}, element("p", { class: "soft keyboard" }, KEYBOARD), this.about, this.said));
    this.settings();
    this.fold();
  }

  // Where the window is narrow, what is seldom changed is folded away, so that photo and heads are near each other.
  fold() {
    this.display.open = !NARROW.matches;
  }

  exports() {
    return element(
      "div",
      { class: "exports", role: "group", "aria-label": "Export" },
      element("button", { onclick: () => this.savePicture() }, "Save PNG"),
      element("button", { onclick: () => this.saveNumbers() }, "Save numbers"),
      element("button", { onclick: () => this.copyLink() }, "Copy link"),
      this.opener(),
      element("button", { onclick: () => this.theme(), "aria-label": "Switch between light and dark" }, "Light / dark"),
    );
  }

  // Button that opens another study in this page.
  opener() {
    const input = element("input", { type: "file", accept: ".attn", hidden: true, "aria-label": "Study to open" });
    input.addEventListener("change", () => {
      if (input.files.length) window.dispatchEvent(new CustomEvent("visattn-open", { detail: input.files[0] }));
      input.value = "";
    });
    return element("span", {}, element("button", { onclick: () => input.click(), title: "Show another study here: a file .attn that visattn or another tool wrote" }, "Open .attn"), input);
  }

  settings() {
    const { state, colors } = this.page;
    const set = (name) => (value) => state.set({ [name]: value });
    const maps = colors.names.filter((name) => name !== "blue-white-red").map((name) => [name, name]);
    this.controls.replaceChildren(
      slider("opacity", [0, 1, 0.05], state.get("opacity"), set("opacity")),
      choice("blend", [["value", "high values only"], ["constant", "everywhere"]], state.get("blend"), set("blend")),
      choice("colors", maps, state.get("colormap"), set("colormap")),
      choice("scale", [["panel", "each panel its own"], ["shared", "one for all heads"]], state.get("scale"), set("scale")),
      slider("outline of mass", [0, 0.95, 0.05], state.get("mass"), set("mass")),
      (this.gray = check("gray photo", this.page.gray, (on) => this.ground(on))),
      check("smooth", state.get("smooth"), set("smooth")),
      ...(this.page.views.some((view) => view.sinks.cells.length) ? [check("ring sinks", state.get("sinks"), set("sinks"))] : []),
    );
  }

  ground(gray) {
    this.page.state.set({ ground: gray ? "gray" : "photo" });
  }

  // Choices of query, layer and head, which depend on the view.
  choices() {
    const { page } = this;
    const { state } = page;
    const view = page.view;
    const record = page.record(view);
    const fields = [];
    const views = page.views.map((one, i) => [String(i), one.title]);
    if (views.length > 1) {
      fields.push(choice("view", views, String(page.views.indexOf(page.view)), (value) => state.set({ view: Number(value), map: this.mapFor(Number(value)) })));
    }
    if (record) {
      const query = state.get("query");
      const names = [...new Set(view.attention.flatMap((one) => one.queryLayout.prefix))];
      const points = view.attention.some((one) => one.queryLayout.grid.length);
      const options = [...(points ? [["", "point on the image"]] : []), ...names.map((name) => [name, view.texts[name] === undefined ? name : `${name}: ${view.texts[name]}`])];
      if (options.length > 1 || !points) {
        fields.push(choice("query", options, names.includes(query.name) ? query.name : "", (name) => state.set({ query: name ? { name } : this.middle(view, record), pinned: Boolean(name) })));
      }
      fields.push(choice("layer", layersOf(view), String(view.attention.indexOf(record)), (value) => state.set({ record: Number(value), map: ATTENTION })));
      fields.push(choice("head", headsOf(record), String(page.head(record)), (value) => state.set({ head: headOf(value), map: ATTENTION })));
    }
    fields.push(...this.comparison(views));
    const focused = this.query.contains(document.activeElement) ? [...this.query.querySelectorAll("select")].indexOf(document.activeElement) : -1;
    this.query.replaceChildren(...fields);
    const again = focused >= 0 && this.query.querySelectorAll("select")[focused];
    if (again) again.focus();
  }

  // Choices of the second image. One of the same view begins with the layer and the head of the first, and keeps them.
  comparison(views) {
    const { page } = this;
    const { state } = page;
    const own = page.views.indexOf(page.view);
    if (views.length === 1 && !page.view.attention.length) return [];
    const others = views.map(([number, title], i) => [number, i === own ? "another layer or head" : title]);
    const compare = (number) => {
      const { record, head } = page.first;
      const kept = number === own && record ? { otherRecord: page.view.attention.indexOf(record), otherHead: head } : { otherRecord: -1, otherHead: "same" };
      state.set({ compare: number, ...kept });
    };
    const fields = [choice("compare with", [["-1", "nothing"], ...others], String(page.views[state.get("compare")] ? state.get("compare") : -1), (value) => compare(Number(value)))];
    const { view, record } = page.second;
    if (!page.views[state.get("compare")] || !record) return fields;
    const [layer, head] = [state.get("otherRecord"), state.get("otherHead")];
    return [
      ...fields,
      choice("second layer", [["-1", "same number"], ...layersOf(view)], String(layer < 0 ? -1 : view.attention.indexOf(record)), (value) => state.set({ otherRecord: Number(value), map: ATTENTION })),
      choice("second head", [["same", "same"], ...headsOf(record)], head === "same" ? head : String(page.head(record, head)), (value) => state.set({ otherHead: headOf(value), map: ATTENTION })),
    ];
  }

  middle(view, record) {
    const [top, left, bottom, right] = record.queryLayout.grid.length ? boxOnPhoto(view, record.queryLayout) : [0, 0, ...view.size];
    return { y: (top + bottom) / 2, x: (left + right) / 2 };
  }

  // The map that is shown now, if the other view has it.
  mapFor(number) {
    const view = this.page.views[number];
    const now = this.page.state.get("map");
    if (view.maps.some((map) => map.name === now) || (now === ATTENTION && view.attention.length) || (now === CONTRIBUTIONS && view.contributions)) return now;
    return view.attention.length || !view.maps.length ? ATTENTION : view.maps[0].name;
  }

  changed(names) {
    this.draw(names);
    clearTimeout(this.linking);
    this.linking = setTimeout(() => this.remember(), 300);
  }

  draw(names = null) {
    const { page } = this;
    const { state } = page;
    const view = page.view;
    const moved = names && [...names].every((name) => name === "query");
    if (!moved) {
      this.choices();
      put(this.gray, page.gray);
      this.title.textContent = plain(view.title, 160);
      this.warnings.replaceChildren(...view.warnings.map((text) => element("li", {}, plain(text, 400))));
      const worst = Math.max(0, ...view.attention.map((one) => one.error));
      const left = view.refused.length ? ` ${view.refused.length} attention calls cannot be placed on the image: ${view.refused.slice(0, 3).map(([layer, reason]) => `${layer} (${reason})`).join("; ")}.` : "";
      const notes = view.notes.length ? ` Notes: ${view.notes.join("; ")}.` : "";
      this.about.textContent = plain(`${view.model}.${view.attention.length ? ` Weights in this page are exact to ${worst.toExponential(1)}.` : ""} Patches are row,column, counted from 0.${left}${notes}`, 1200);
      const names = view.attention.some((one) => one.queryLayout.prefix.length);
      Object.keys(TABS).forEach((name) => {
        const chosen = state.get("tab") === name;
        const tab = document.getElementById(`tab-${name}`);
        tab.hidden = !(name === "words" ? names : name === "contributions" ? view.contributions : name === "maps" || (name === "keys" && view.features) || view.attention.length);
        if (name === "words") tab.textContent = Object.keys(view.texts).length ? "Words" : "Named tokens";
        tab.setAttribute("aria-selected", String(chosen));
        tab.tabIndex = chosen ? 0 : -1;
        document.getElementById(`panel-${name}`).hidden = !chosen;
      });
      this.other.root.hidden = !page.views[state.get("compare")];
    }
    this.image.draw();
    if (!this.other.root.hidden) this.other.draw();
    if (moved) this.waiting ||= requestAnimationFrame(() => this.drawPanel(true));
    else this.drawPanel();
  }

  // While the query moves, the image is drawn first and the panel in the next frames, so that no frame takes long.
  drawPanel(moved = false) {
    cancelAnimationFrame(this.waiting);
    this.waiting = null;
    const panel = this.panels[this.page.state.get("tab")] || this.panels.heads;
    if (moved && panel.drawMoved) panel.drawMoved();
    else panel.draw();
  }

  tabKey(event) {
    const names = Object.keys(TABS).filter((name) => !document.getElementById(`tab-${name}`).hidden);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(this.page.state.get("tab")) + step + names.length) % names.length];
    this.choose(next);
    document.getElementById(`tab-${next}`).focus();
  }

  // Keys that work wherever the focus is; in a list, letters choose its entries.
  pressed(event) {
    if (event.key === "Escape") this.page.state.set({ pinned: false });
    else if (event.key === "g" && !event.ctrlKey && !event.metaKey && !event.altKey && event.target.tagName !== "SELECT") this.ground(!this.page.gray);
  }

  // Panels about attention show it on the image too.
  choose(tab) {
    const { state, view } = this.page;
    const map = state.get("map");
    if (tab === "contributions") {
      state.set({ tab, map: CONTRIBUTIONS });
      return;
    }
    const kept = tab === "maps" || (tab === "keys" && map === SIMILARITY) || !view.attention.length;
    state.set({ tab, map: kept ? map : ATTENTION });
  }

  say(text) {
    this.said.textContent = text;
    clearTimeout(this.saying);
    this.saying = setTimeout(() => (this.said.textContent = ""), SAID);
  }

  download(name, blob) {
    const link = element("a", { download: name, href: URL.createObjectURL(blob) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    this.say(`Saved ${name}.`);
  }

  // Name of a file: photo, and what is shown of it.
  fileName(end) {
    const parts = [this.page.view.image, this.page.shown().title || "", this.page.shown().about || ""];
    return `${parts.join(" ").replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 80) || "attention"}${end}`;
  }

  savePicture() {
    this.image.canvas.toBlob((blob) => this.download(this.fileName(".png"), blob), "image/png");
  }

  // The row of the query in every head, as JSON.
  numbers() {
    const { page } = this;
    const view = page.view;
    return {
      title: view.title,
      ...(view.contributions && { contributions: this.contributed(view) }),
      query: page.state.get("query"),
      rows: view.attention.flatMap((record) => {
        const token = page.token(view, record.queryLayout);
        if (token < 0) return [];
        return Array.from({ length: record.heads }, (_, head) => ({ layer: record.layer, head: record.numbers[head], query: token, error: record.error, weights: Array.from(record.row(head, token), (weight) => Number(weight.toPrecision(6))) }));
      }),
    };
  }

  // The terms of the score; values of heads are those of their tokens.
  contributed(view) {
    const { target, score, layers, rest } = view.contributions;
    const heads = layers.map((layer) => ({ layer: layer.layer, heads: layer.heads, tokens: Array.from(this.page.arrays[layer.values]), bias: layer.bias }));
    return { target, score, layers: heads, rest };
  }

  saveNumbers() {
    this.download(this.fileName(".json"), new Blob([JSON.stringify(this.numbers())], { type: "application/json" }));
  }

  // Writes the state into the address, which a frame in a notebook may not change.
  remember() {
    if (window.parent !== window) window.parent.postMessage({ visattn: this.page.state.link }, "*"); // a widget of a notebook
    try {
      history.replaceState(null, "", `#${this.page.state.link}`);
    } catch {
      this.say("This frame has no address; save the page to a file to make links.");
    }
  }

  async copyLink() {
    const link = `${location.href.split("#")[0]}#${this.page.state.link}`;
    this.remember();
    try {
      await navigator.clipboard.writeText(link);
      this.say("The link is copied. It opens this view of the same file.");
    } catch {
      this.say("The link stands in the address line. It opens this view of the same file.");
    }
  }

  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.draw();
  }
}

// Shows a study in place of the one before.
function mount(facts, arrays, link) {
  const before = [...document.querySelectorAll("header, main, footer")];
  before.forEach((part) => part.remove());
  try {
    build(facts, arrays, link);
  } catch (error) {
    document.querySelectorAll("header, main, footer").forEach((part) => part.remove());
    document.body.append(...before);
    throw error;
  }
}

function build(facts, arrays, link) {
  const state = new State(firstState(facts));
  Object.assign(state.values, sound(state.read(link), facts));
  const made = new Viewer(new Page(facts, arrays, state));
  made.draw();
  window.viewer = made;
}

// What a link says, without panels, colors and other choices that do not exist.
function sound(said, { colormaps, look }) {
  const known = { tab: Object.keys(TABS), colormap: Object.keys(colormaps), blend: ["value", "constant"], ground: Object.keys(look.gray), scale: ["panel", "shared"], sort: ORDERS.map(([name]) => name) };
  for (const [name, values] of Object.entries(known)) if (said[name] !== undefined && !values.includes(said[name])) delete said[name];
  return said;
}

// Opens a study that somebody chose or dropped; if it is none, the page stays as it is and says why.
async function open(file, { colormaps, look }) {
  try {
    const [facts, arrays] = await readAttn(await file.arrayBuffer());
    mount({ ...facts, colormaps, look }, arrays, "");
    window.viewer.say(`Opened ${plain(file.name, 60)}.`);
  } catch (error) {
    window.viewer.say(plain(`${file.name}: not a study (${error.message.split("\n")[0]})`, 300));
  }
  document.documentElement.dataset.opened = String(Number(document.documentElement.dataset.opened || 0) + 1);
}

async function start() {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  if (facts.version !== VERSION) throw new Error(`this page has data of version ${facts.version}`);
  const data = document.getElementById("data");
  const arrays = await arraysOf(facts.chunks, data.textContent);
  data.remove();
  mount(facts, arrays, location.hash.slice(1));
  const follow = (link) => {
    const { state } = window.viewer.page;
    if (link === state.link) return;
    state.set(sound(state.read(link), facts));
    window.viewer.settings();
  };
  window.addEventListener("hashchange", () => follow(location.hash.slice(1)));
  window.addEventListener("message", (event) => {
    if (event.source === window.parent && event.source !== window && typeof event.data?.visattn === "string") follow(event.data.visattn);
  });
  window.addEventListener("keydown", (event) => window.viewer.pressed(event));
  window.addEventListener("dragover", (event) => event.preventDefault());
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) open(event.dataTransfer.files[0], facts);
  });
  window.addEventListener("visattn-open", (event) => open(event.detail, facts));
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  document.body.append(element("p", { class: "failed", role: "alert" }, `The page cannot be shown: ${error.message}.`));
});
