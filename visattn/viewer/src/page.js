// The study in the page, and what the state selects of it.

import { Attention, digitsFor, leftBy, similarities, without } from "./attention.js";
import { Colors, even, extentOf, rangeOf } from "./colors.js";
import { nameOf, onGrid, places, shapeOf, sizeOf, tokenOf } from "./tokens.js";

// What the page computes itself; no map of a study begins so.
export const ATTENTION = "@attention";
export const SIMILARITY = "@similarity";
export const CONTRIBUTIONS = "@contributions";

export class Page {
  constructor(facts, arrays, state) {
    this.facts = facts;
    this.state = state;
    this.layouts = facts.layouts;
    this.colors = new Colors(facts.colormaps);
    this.arrays = arrays;
    this.views = facts.views.map((view) => ({ ...view, attention: view.records.map((one) => new Attention(one, this.layouts, arrays)) }));
    this.rows = new Map();
    this.digits = new Map();
    state.listen((names) => {
      if (!["query", "hidden", "record", "view"].some((name) => names.has(name))) return;
      this.rows.clear();
      this.digits.clear();
    });
  }

  get view() {
    return this.views[within(this.state.get("view"), this.views.length)];
  }

  record(view = this.view) {
    return view.attention[within(this.state.get("record"), view.attention.length)];
  }

  head(record, head = this.state.get("head")) {
    return typeof head === "number" ? within(head, record.heads) : head === "max" ? "max" : "mean";
  }

  // What an image shows: a view, and a layer and a head of it.
  get first() {
    return this.#side(this.view, this.state.get("record"), this.state.get("head"));
  }

  // What the second image shows: the layer and the head of the first, unless it has its own.
  get second() {
    const [record, head] = [this.state.get("otherRecord"), this.state.get("otherHead")];
    const view = this.views[this.state.get("compare")] || this.view;
    return this.#side(view, record < 0 ? this.state.get("record") : record, head === "same" ? this.state.get("head") : head);
  }

  #side(view, number, asked) {
    const record = view.attention[within(number, view.attention.length)];
    return { view, record, head: record && this.head(record, asked) };
  }

  // The query, in pixels of this view's photo; a link of two photos compares the same part of both.
  query(view) {
    const query = this.state.get("query");
    if (query.name !== undefined || view === this.view) return query;
    return { y: (query.y / this.view.size[0]) * view.size[0], x: (query.x / this.view.size[1]) * view.size[1] };
  }

  token(view, layout) {
    return tokenOf(view, layout, this.query(view));
  }

  // Weights of the query on all keys, or null if the layer has no such query. Rows are kept until the query changes.
  row(view, record, head) {
    const key = this.#key(view, record, head);
    if (!this.rows.has(key)) {
      const token = this.token(view, record.queryLayout);
      this.rows.set(key, token < 0 ? null : this.rowOf(view, record, head, token));
    }
    return this.rows.get(key);
  }

  // Digits that are certain in the row of the query; kept as rows are.
  digitsOf(view, record, head) {
    const key = this.#key(view, record, head);
    if (!this.digits.has(key)) this.digits.set(key, this.digitsAt(view, record, head, this.token(view, record.queryLayout)));
    return this.digits.get(key);
  }

  // Digits that are certain in the row of any query token. Where hidden keys leave little to the others, its errors grow too.
  digitsAt(view, record, head, token) {
    const hidden = this.hiddenIn(view, record);
    const left = hidden.size ? leftBy(record.fused(head, token), hidden) : 1;
    return digitsFor(record.errorOf(head, token) / left);
  }

  #key(view, record, head) {
    return `${this.views.indexOf(view)} ${view.attention.indexOf(record)} ${head}`;
  }

  // Weights of any query token; hidden keys get nothing.
  rowOf(view, record, head, token) {
    const row = record.fused(head, token);
    const hidden = this.hiddenIn(view, record);
    return hidden.size ? without(row, hidden) : row;
  }

  // Keys of a layer that are hidden. They are kept as view, layout and token, so that they are never those of other tokens.
  hiddenIn(view, record) {
    const start = this.hiddenKey(view, record, "");
    return new Set([...this.state.get("hidden")].filter((key) => key.startsWith(start)).map((key) => Number(key.slice(start.length))));
  }

  hiddenKey(view, record, token) {
    return `${this.views.indexOf(view)}.${record.keys}.${token}`;
  }

  // Sinks of a view on the grid of a layout; none if they were found on another.
  sinksOn(view, layout) {
    if (layout !== this.layouts[view.sinks.layout]) return [];
    const { columns } = shapeOf(layout);
    return view.sinks.cells.map(([row, column]) => this.tokens(layout)[row * columns + column]).filter((token) => token >= 0);
  }

  // What the image shows of a map or of the attention: values on a grid, its layout, and what they are.
  shown({ view, record, head } = this.first, chosen = this.state.get("map")) {
    const map = view.maps.find((one) => one.name === chosen);
    if (map) {
      const values = this.arrays[map.values];
      return { values, layout: this.layouts[map.layout], signed: map.signed, pixelwise: map.pixelwise, colored: map.colored, digits: digitsOf(values), title: map.name, about: [map.about, frameOf(this.layouts[map.layout])].filter(Boolean).join(", ") };
    }
    if (chosen === SIMILARITY && view.features) {
      const layout = this.layouts[view.features.layout];
      const token = this.token(view, layout);
      if (token < 0) return { missing: "The query is no token of the last layer." };
      const row = similarities(this.arrays[view.features.values], sizeOf(layout), token);
      return { values: onGrid(layout, row), layout, row, signed: false, digits: 3, title: "cosine similarity", about: `of layer ${view.features.layer}` };
    }
    if (chosen === CONTRIBUTIONS && view.contributions) return this.#contributed(view);
    if (!view.attention.length) return { missing: "This view has no attention on the image." };
    const row = this.row(view, record, head);
    if (!row) return { missing: `Layer ${record.layer} has no such query.` };
    const layout = record.keyLayout;
    return {
      values: layout.grid.length ? onGrid(layout, row) : null,
      layout,
      row,
      record,
      signed: row.some((value) => value < 0),
      pixelwise: record.how === "sampled",
      digits: this.digitsOf(view, record, head),
      title: `${record.layer}, ${record.nameOf(head)}`,
      about: [`attention of ${this.queryName(view, record.queryLayout)}`, frameOf(layout), this.#hiddenSaid(view, record)].filter(Boolean).join(", "),
    };
  }

  // What each head of an attention call adds to the score, over all tokens.
  contributionsOf(view, number) {
    const layer = view.contributions.layers[number];
    const values = this.arrays[layer.values];
    const size = values.length / layer.heads;
    return Array.from({ length: layer.heads }, (_, head) => values.subarray(head * size, (head + 1) * size).reduce((a, b) => a + b, 0));
  }

  // Whether all layers read the same tokens, so that they sum to one map.
  allContributions({ contributions }) {
    return contributions.layers.every((layer) => layer.layout === contributions.layers[0].layout);
  }

  // The part of the contributions that the image shows: `all`, a layer such as `2`, or a head such as `2.0`.
  part(view) {
    const { layers } = view.contributions;
    const [layer, head] = String(this.state.get("part")).split(".").map(Number);
    const known = layers[layer] && (head === undefined || head < layers[layer].heads);
    return known ? this.state.get("part") : this.allContributions(view) ? "all" : "0";
  }

  // Contributions of the tokens that a part reads.
  #contributed(view) {
    const { layers, target } = view.contributions;
    const part = this.part(view);
    const [number, head] = part.split(".").map(Number);
    const chosen = part === "all" ? layers : [layers[number]];
    const layout = this.layouts[chosen[0].layout];
    const row = new Float32Array(sizeOf(layout));
    for (const layer of chosen) {
      const values = this.arrays[layer.values];
      const [from, to] = head === undefined ? [0, values.length] : [head * row.length, (head + 1) * row.length];
      for (let i = from; i < to; i++) row[i % row.length] += values[i];
    }
    const title = part === "all" ? "all heads" : chosen[0].layer + (head === undefined ? "" : `, head ${head}`);
    return { values: onGrid(layout, row), layout, row, signed: true, digits: digitsOf(row), title, about: `direct contribution to ${target}` };
  }

  queryName(view, layout) {
    const token = this.token(view, layout);
    return token < 0 ? "no token" : nameOf(view, layout, token);
  }

  #hiddenSaid(view, record) {
    const count = this.hiddenIn(view, record).size;
    return count ? `${count} key${count > 1 ? "s" : ""} hidden` : "";
  }

  // Range of colors: of the panel alone, or of all heads of the views that are shown.
  range(view, shown) {
    return this.state.get("scale") === "shared" && shown.record ? this.shared() : rangeOf(shown.values, shown.signed, shown.pixelwise);
  }

  // Whether colors of a range are those of signed values; a range for all heads may be, where the head has no value below zero.
  signed(shown, range) {
    return shown.record ? range[0] < 0 : shown.signed;
  }

  shared() {
    let [low, high] = [0, 0];
    for (const view of new Set([this.view, this.views[this.state.get("compare")] || this.view])) {
      for (const record of view.attention) {
        for (let head = 0; head < record.heads; head++) {
          for (const value of this.row(view, record, head) || []) {
            if (value < low) low = value;
            if (value > high) high = value;
          }
        }
      }
    }
    const most = Math.max(-low, high) || 1;
    return [low < 0 ? -most : 0, most];
  }

  get table() {
    return (signed) => this.colors.of(this.state.get("colormap"), signed);
  }

  // Opacity of a value between 0 and 1; it follows the magnitude of signed ones.
  alpha(signed) {
    const opacity = this.state.get("opacity");
    if (this.state.get("blend") !== "value") return () => opacity;
    return signed ? (part) => opacity * Math.abs(2 * part - 1) : (part) => opacity * part;
  }

  // Whether colors lie on the gray photo; visattn says when that is so by itself.
  get gray() {
    return this.facts.look.gray[this.state.get("ground")][this.state.get("blend")];
  }

  // Whether a map gets colors: components always do.
  drawn(shown, range) {
    return Boolean(shown.values) && (Boolean(shown.colored) || (this.state.get("opacity") > 0 && !even(range)));
  }

  // Whether the photo is gray below a map. It is as it is where no colors are drawn.
  grayBelow(shown, range) {
    return this.drawn(shown, range) && (shown.colored ? this.facts.look.components.gray : this.gray);
  }

  // Rank of a token among the values of a row, from 1.
  rank(row, token) {
    let rank = 1;
    for (const value of row) if (value > row[token]) rank++;
    return rank;
  }

  tokens(layout) {
    return places(layout).tokens;
  }
}

// Digits that tell values of a map apart.
function digitsOf(values) {
  const [low, high] = extentOf(values, false);
  const most = Math.max(Math.abs(low), Math.abs(high));
  return most > 0 ? Math.min(Math.max(2 - Math.floor(Math.log10(most)), 0), 9) : 2;
}

function frameOf(layout) {
  const { frames } = shapeOf(layout);
  return frames > 1 ? `frame 0 of ${frames}` : "";
}

// A number from a link as an index; a link may say anything.
function within(index, count) {
  return Math.min(Math.max(Math.trunc(index), 0), count - 1);
}

export function number(value, digits) {
  return Math.abs(value) < 10 ** -digits / 2 ? (0).toFixed(digits) : value.toFixed(digits);
}
