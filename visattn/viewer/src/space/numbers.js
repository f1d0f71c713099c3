// Numbers of all heads as a table. A header sorts, a row opens its head.

import { element, plain, redrawn } from "../dom.js";

const NAMES = {
  factor: ["scale", "factor of the queries"],
  row_pearson: ["distance, Pearson", "correlation of dot product and distance within the rows of an image"],
  row_spearman: ["distance, Spearman", "the same for ranks"],
  attention_spearman: ["attention, Spearman", "ranks of distance against ranks of the attention itself"],
  pooled_pearson: ["all images, Pearson", "queries against the keys of all images"],
  weighted: ["close pairs", "correlation over the closest pairs of all images"],
  null_attention: ["to no patch", "attention on class tokens, registers and sinks"],
  norm_ratio: ["key / query norm", "ratio of the median norms"],
};

function told(value) {
  return value === null || value === undefined ? "" : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// Place in an order: missing values come last, either way.
function rank(value, sign) {
  return value === null || value === undefined ? Number.MAX_VALUE : sign * value;
}

export class Numbers {
  constructor(app) {
    this.app = app;
    this.sorted = ["layer", 1];
    this.note = element("p", { class: "soft" }, "Scores of properties are followed by those of their null, and by p. They hold for each head on its own.");
    this.body = element("div", { class: "numbers", tabindex: 0, role: "region", "aria-label": "Numbers of all heads" });
    this.root = element("div", {}, this.note, this.body);
    this.rows = this.#joined();
    this.columns = Object.keys(this.rows[0] || {}).filter((name) => !["place", "interval"].includes(name));
  }

  #joined() {
    const { space } = this.app;
    const keyed = (block, rows) => rows.map((row) => [`${block} ${row.layer} ${row.head}`, row]);
    const titles = [...new Set(space.blocks.flatMap((block) => Object.keys(block.scores)))];
    const scores = titles.map((name) => [name, new Map(space.blocks.flatMap((block, i) => keyed(i, block.scores[name] || [])))]);
    const numbers = new Map(space.blocks.flatMap((block, i) => keyed(i, block.numbers)));
    return space.layers.flatMap((layer, row) =>
      layer.numbers.map((head, index) => {
        const key = `${layer.block} ${layer.name} ${head}`;
        const own = numbers.get(key) || {};
        return {
          place: [row, index],
          ...(space.blocks.length > 1 ? { model: space.blocks[layer.block].model } : {}),
          layer: layer.number,
          head,
          interval: own.low === null || own.low === undefined ? null : [own.low, own.high],
          ...Object.fromEntries(Object.keys(NAMES).filter((name) => name in own).map((name) => [name, own[name]])),
          ...Object.fromEntries(scores.map(([name, of]) => [name, of.get(key) || null])),
        };
      }),
    );
  }

  #value(row, name) {
    const value = row[name];
    if (!value || typeof value !== "object") return value;
    return value.score === null || value.null === null ? value.score : value.score - value.null;
  }

  draw() {
    const { app } = this;
    const { state } = app;
    const [by, sign] = this.sorted;
    const ordered = [...this.rows].sort((a, b) => {
      const [one, other] = [this.#value(a, by), this.#value(b, by)];
      const apart = typeof one === "string" ? sign * one.localeCompare(other) : rank(one, sign) - rank(other, sign);
      return apart || a.place[0] - b.place[0] || a.place[1] - b.place[1];
    });
    const sort = (name) => {
      this.sorted = [name, this.sorted[0] === name ? -this.sorted[1] : ["model", "layer", "head"].includes(name) || name in NAMES ? 1 : -1];
      this.draw();
      this.body.querySelector(`[data-name="${name}"]`).focus();
    };
    const head = this.columns.map((name) =>
      element("th", { scope: "col", "aria-sort": by === name ? (sign > 0 ? "ascending" : "descending") : "none" }, element("button", { class: "small", "data-name": name, title: NAMES[name] ? NAMES[name][1] : "", onclick: () => sort(name) }, NAMES[name] ? NAMES[name][0] : name)),
    );
    const body = ordered.map((row) => {
      const open = () => app.set({ row: row.place[0], head: row.place[1] });
      const chosen = row.place[0] === state.row && row.place[1] === state.head ? { class: "chosen" } : {};
      return element("tr", { ...chosen, onclick: open }, ...this.columns.map((name) => element("td", {}, this.#cell(row, name))));
    });
    redrawn(this.body, () => this.body.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body))));
  }

  #cell(row, name) {
    const value = row[name];
    if (name === "layer") return element("button", { class: "small", "aria-label": `open layer ${row.layer}, head ${row.head}${row.model ? ` of ${row.model}` : ""}` }, String(value));
    if (name === "head" || name === "model") return plain(value);
    if (name === "row_pearson" && row.interval) return `${told(value)} (${row.interval.map(told).join(" to ")})`;
    if (value && typeof value === "object") {
      const beside = [told(value.null), value.p === null ? "" : value.p.toFixed(3)].filter(Boolean);
      return `${told(value.score)}${value.score !== null && beside.length ? ` (${beside.join("; ")})` : ""}`;
    }
    return told(value);
  }
}
