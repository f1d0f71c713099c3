// Rows of attention, decoded. The encodings are those of `visattn/viewer/encoding.py`.

import { sizeOf } from "./tokens.js";

// Inner product of two vectors; four sums at once are twice as fast as one.
function product(a, i, b, j, length) {
  let [s, t, u, v] = [0, 0, 0, 0];
  const whole = length - (length % 4);
  for (let c = 0; c < whole; c += 4) {
    s += a[i + c] * b[j + c];
    t += a[i + c + 1] * b[j + c + 1];
    u += a[i + c + 2] * b[j + c + 2];
    v += a[i + c + 3] * b[j + c + 3];
  }
  for (let c = whole; c < length; c++) s += a[i + c] * b[j + c];
  return s + t + u + v;
}

// Digits behind the point that an error leaves certain.
export function digitsFor(error) {
  return Math.max(2, Math.min(6, Math.floor(-Math.log10(Math.max(error, 1e-7)))));
}

// One attention call: `row(head, query)` returns the weights of a query on all keys, in the order of the layout of the keys.
export class Attention {
  constructor(facts, layouts, arrays) {
    Object.assign(this, facts);
    this.queryLayout = layouts[facts.queries];
    this.keyLayout = layouts[facts.keys];
    this.numbers ??= Array.from({ length: this.heads }, (_, head) => head); // of the heads in the page, in the model
    this.all ??= this.heads;
    this.rowsCount = sizeOf(this.queryLayout);
    this.keysCount = sizeOf(this.keyLayout);
    this.rows ??= this.rowsCount;
    this.columns ??= this.keysCount;
    this.arrays = Object.fromEntries(Object.entries(facts.arrays).map(([name, number]) => [name, arrays[number]]));
    this.digits = digitsFor(facts.error);
    this.place = this.arrays.query_index ? this.#places() : null;
  }

  // Position of each query token among the rows of all blocks.
  #places() {
    const place = new Int32Array(this.rowsCount).fill(-1);
    this.arrays.query_index.forEach((token, at) => {
      if (token >= 0) place[token] = at;
    });
    return place;
  }

  // Name of a head, or of the mean or the largest of heads.
  nameOf(head) {
    if (typeof head === "number") return `head ${this.numbers[head]}`;
    return `${head === "max" ? "largest" : head} of ${this.heads < this.all ? `heads ${this.numbers.join(", ")}` : `${this.heads} heads`}`;
  }

  row(head, query) {
    const out = new Float32Array(this.keysCount);
    if (this.how === "softmax") this.#softmax(out, head, query);
    else if (this.how === "sampled") this.#sampled(out, head, query);
    else this.#rows(out, head, query);
    return out;
  }

  #softmax(out, head, query) {
    const [block, at] = this.#where(query);
    if (at < 0) return;
    const { query: q, key: k, bias, key_index: keys } = this.arrays;
    const { channels: d, scale, columns } = this;
    const first = (head * this.#height + at) * d;
    const scores = (this.scores ||= new Float64Array(columns));
    let from = (head * (this.#height / this.rows) + block) * columns * d;
    let top = -Infinity;
    for (let j = 0; j < columns; j++) {
      let score = scale * product(q, first, k, from, d);
      if (bias) score += bias[this.#biased(head, block, at % this.rows, j)];
      from += d;
      scores[j] = score;
      if (score > top) top = score;
    }
    if (top === -Infinity) return; // a row that is masked entirely
    let total = 0;
    for (let j = 0; j < columns; j++) total += scores[j] = Math.exp(scores[j] - top);
    for (let j = 0; j < columns; j++) {
      const key = keys ? keys[block * columns + j] : j;
      if (key >= 0) out[key] += scores[j] / total;
    }
  }

  // Position in a bias that broadcasts over heads, blocks, rows or columns.
  #biased(...place) {
    return this.biasShape.reduce((at, side, i) => at * side + (side === 1 ? 0 : place[i]), 0);
  }

  // Block of a query, and its row among all rows of a head.
  #where(query) {
    const at = this.place ? this.place[query] : query;
    return [Math.floor(at / this.rows), at];
  }

  // Number of rows of one head, in all blocks.
  get #height() {
    return this.place ? this.arrays.query_index.length : this.rowsCount;
  }

  #rows(out, head, query) {
    const [block, at] = this.#where(query);
    if (at < 0) return;
    const row = head * this.#height + at;
    const { codes, low, scale, weights, key_index: keys } = this.arrays;
    const first = row * this.columns;
    const [start, factor] = codes ? [low[row], scale[row]] : [0, 1];
    const source = codes || weights;
    for (let c = 0; c < this.columns; c++) {
      const key = keys ? keys[block * this.columns + c] : c;
      if (key >= 0) out[key] += start + source[first + c] * factor;
    }
  }

  #sampled(out, head, query) {
    const [block, at] = this.#where(query);
    if (at < 0) return;
    const { cells, shares, key_index: keys } = this.arrays;
    const first = (head * this.#height + at) * this.points;
    const width = keys ? keys.length / (this.arrays.query_index.length / this.rows) : 0;
    for (let i = first; i < first + this.points; i++) {
      const key = keys ? keys[block * width + cells[i]] : cells[i];
      if (key >= 0) out[key] += shares[i];
    }
  }

  // Row of one head, or the mean or largest value of all heads.
  fused(head, query) {
    if (head !== "mean" && head !== "max") return this.row(head, query);
    const out = this.row(0, query);
    for (let h = 1; h < this.heads; h++) {
      const other = this.row(h, query);
      for (let j = 0; j < out.length; j++) out[j] = head === "mean" ? out[j] + other[j] : Math.max(out[j], other[j]);
    }
    if (head === "mean") for (let j = 0; j < out.length; j++) out[j] /= this.heads;
    return out;
  }

  // Largest error of a weight in such a row.
  errorOf(head, query) {
    if (head === "mean" || head === "max") {
      const errors = Array.from({ length: this.heads }, (_, h) => this.errorOf(h, query));
      return head === "max" ? Math.max(...errors) : errors.reduce((a, b) => a + b, 0) / this.heads;
    }
    if (this.arrays.codes) return this.arrays.scale[head * this.#height + this.#where(query)[1]] / 2;
    if (!this.relative) return this.error;
    const most = this.row(head, query).reduce((a, b) => Math.max(a, Math.abs(b)), 0);
    return Math.min(this.error, this.relative * most);
  }
}

// What some keys leave to the others; 1 if it is nothing to divide by.
export function leftBy(row, hidden) {
  const left = row.reduce((sum, weight, j) => (hidden.has(j) ? sum : sum + weight), 0);
  return left > 0 ? left : 1;
}

// Row without some keys: they get nothing, and the others share what is left in proportion.
export function without(row, hidden) {
  if (!hidden.size) return row;
  const left = leftBy(row, hidden);
  return row.map((weight, j) => (hidden.has(j) ? 0 : weight / left));
}

// Cosine similarity of one token with all others.
export function similarities(features, count, token) {
  const d = features.length / count;
  const out = new Float32Array(count);
  for (let j = 0; j < count; j++) {
    let sum = 0;
    for (let c = 0; c < d; c++) sum += features[token * d + c] * features[j * d + c];
    out[j] = sum;
  }
  return out;
}
