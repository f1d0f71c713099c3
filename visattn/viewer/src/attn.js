// Reading of `.attn` files in the page: safetensors with JSON; see docs/studies.md. Everything is checked before it is used.

import { statedSize } from "./photos.js";
import { checkStudy } from "./shapes.js";
import { sizeOf } from "./tokens.js";

const BYTES = { F64: 8, F32: 4, F16: 2, BF16: 2, I64: 8, I32: 4, I16: 2, I8: 1, U8: 1, BOOL: 1 };
const WHOLE = ["I64", "I32", "I16", "I8", "U8"];
const MOST_TEXT = 2 ** 24;
const MOST_PIXELS = 64e6;

function need(right, said) {
  if (!right) throw new Error(said);
}

// Header and tensors of a safetensors file. A tensor is `{ kind, shape, bytes }`.
function tensorsOf(buffer) {
  need(buffer.byteLength >= 8, "it is no safetensors file");
  const view = new DataView(buffer);
  const length = Number(view.getBigUint64(0, true));
  need(length >= 2 && length <= buffer.byteLength - 8 && length <= 1e8, "its header is damaged");
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(buffer, 8, length)));
  } catch {
    throw new Error("its header is no JSON");
  }
  const said = header.__metadata__ ?? {};
  const tensors = new Map();
  let end = 0;
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  entries.sort(([, one], [, other]) => one.data_offsets?.[0] - other.data_offsets?.[0]);
  for (const [name, one] of entries) {
    const [from, to] = one.data_offsets ?? [];
    need(Array.isArray(one.shape) && one.shape.every((side) => Number.isInteger(side) && side >= 0) && one.dtype in BYTES, `tensor ${name} is damaged`);
    const size = one.shape.reduce((a, b) => a * b, 1) * BYTES[one.dtype];
    need(from === end && to - from === size && 8 + length + to <= buffer.byteLength, `tensor ${name} does not fit into the file`);
    end = to;
    tensors.set(name, { kind: one.dtype, shape: one.shape, bytes: buffer.slice(8 + length + from, 8 + length + to) });
  }
  need(8 + length + end === buffer.byteLength, "it has bytes that belong to no tensor");
  return [said, tensors];
}

// Numbers of a tensor; whole numbers become Int32Array.
function numbersOf({ kind, bytes }, any = false) {
  let out;
  if (kind === "F32") out = new Float32Array(bytes);
  else if (kind === "F64") out = Float32Array.from(new Float64Array(bytes));
  else if (kind === "BF16") {
    const bits = new Uint32Array(bytes.byteLength / 2);
    new Uint16Array(bytes).forEach((half, i) => (bits[i] = half << 16));
    out = new Float32Array(bits.buffer);
  } else if (kind === "F16") out = Float32Array.from(new Uint16Array(bytes), halfOf);
  else if (kind === "I64") return Int32Array.from(new BigInt64Array(bytes), (value) => (value > 2n ** 31n - 1n || value < -(2n ** 31n) ? 2 ** 31 - 1 : Number(value)));
  else return Int32Array.from(new { I32: Int32Array, I16: Int16Array, I8: Int8Array, U8: Uint8Array, BOOL: Uint8Array }[kind](bytes));
  if (!any && !out.every(Number.isFinite)) throw new Error("a tensor holds NaN or infinite values");
  return out;
}

function halfOf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * (1 + fraction / 1024) * 2 ** (exponent - 15) : sign * fraction * 2 ** -24;
}

// Reads a file and returns facts and arrays as those of the page.
export async function readAttn(buffer) {
  const [said, tensors] = tensorsOf(buffer);
  need(said.format === "attn", "its header does not state the format 'attn'");
  need(said.version === "1", `it is of version ${said.version}, and this page reads version 1`);
  need(typeof said.study === "string" && said.study.length <= MOST_TEXT, "its description is missing or too long");
  let facts;
  try {
    facts = JSON.parse(said.study);
  } catch {
    throw new Error("its description is no JSON");
  }
  checkStudy(facts);
  const reader = new Reader(tensors);
  const views = [];
  for (const view of facts.views) views.push(await reader.view(view));
  numberEqualTitles(views);
  need(views[0].records.length || views[0].maps.length, "its first view has neither attention nor maps");
  return [{ version: 1, views, layouts: reader.layouts }, reader.arrays];
}

// Views with equal titles are numbered, as in a page that Python made.
function numberEqualTitles(views) {
  const titles = views.map((view) => view.title);
  views.forEach((view, i) => {
    const alike = (title) => title === titles[i];
    if (titles.filter(alike).length > 1) view.title += ` (${titles.slice(0, i + 1).filter(alike).length})`;
  });
}

class Reader {
  constructor(tensors) {
    this.tensors = tensors;
    this.arrays = [];
    this.layouts = [];
    this.known = new Map();
    this.photos = new Map();
  }

  tensor(name) {
    need(this.tensors.has(name), `tensor ${name} is missing`);
    return this.tensors.get(name);
  }

  kept(array) {
    this.arrays.push(array);
    return this.arrays.length - 1;
  }

  // Numbers of a tensor; one that is named again is read once. A mask may hold -inf.
  read(name, masks = false) {
    if (!this.known.has(name)) {
      const values = numbersOf(this.tensor(name), masks);
      need(!masks || values.every((value) => value < Infinity), `tensor ${name} holds NaN or infinite values`);
      this.known.set(name, this.kept(values));
    }
    return this.known.get(name);
  }

  layout(layout) {
    this.layouts.push({ ...layout, holes: layout.holes ?? [] });
    return this.layouts.length - 1;
  }

  async view(view) {
    const first = this.layouts.length;
    view.layouts.forEach((layout) => this.layout(layout));
    const placed = view.records.filter((record) => !record.reason && record.kind !== "unplaced");
    const model = (view.provenance.model || "a model") + (view.provenance.random ? " (random weights)" : "");
    const title = view.provenance.image ? `${model} on ${view.provenance.image}` : model;
    return {
      title: view.name ? `${view.name}: ${title}` : title,
      model,
      image: view.provenance.image || "photo",
      photo: await this.photo(view),
      size: view.geometry.photo,
      input: view.geometry.input,
      window: view.geometry.window,
      records: placed.map((record) => this.record(record, first, this.importance(view, record))),
      importance: view.importance?.target ?? null,
      contributions: this.contributions(view, first),
      refused: [...view.records.filter((record) => record.reason).map(({ layer, reason }) => [layer, reason]), ...(view.unseen ?? [])],
      maps: Object.entries(view.maps ?? {}).map(([name, map]) => this.map(name, map)),
      features: this.features(view, first),
      classes: (view.classes ?? []).map((one) => [one.name ?? `class ${one.class}`, one.class, one.probability]),
      texts: view.texts ?? {},
      sinks: { layout: -1, cells: [] },
      warnings: view.provenance.warnings ?? [],
      notes: view.provenance.notes ?? [],
    };
  }

  async photo(view) {
    if (!this.photos.has(view.photo)) this.photos.set(view.photo, await this.decoded(view));
    return this.photos.get(view.photo);
  }

  async decoded(view) {
    const { kind, shape, bytes } = this.tensor(view.photo);
    need(kind === "U8" && shape.length === 1, "a photo must be bytes");
    const stated = statedSize(bytes);
    need(stated, "a photo must be PNG or JPEG");
    need(stated[0] * stated[1] <= MOST_PIXELS, "its photo is too large");
    const png = new Uint8Array(bytes, 0, 1)[0] === 0x89;
    const blob = new Blob([bytes], { type: png ? "image/png" : "image/jpeg" });
    let picture;
    try {
      picture = await createImageBitmap(blob);
    } catch {
      throw new Error("its photo is damaged");
    }
    const [height, width] = view.geometry.photo;
    need(picture.height === height && picture.width === width, `its photo has ${picture.width} x ${picture.height} pixels, not ${width} x ${height}`);
    picture.close();
    return URL.createObjectURL(blob);
  }

  importance(view, record) {
    return view.importance?.heads[view.records.indexOf(record)];
  }

  contributions(view, first) {
    if (!view.contributions) return null;
    const layers = view.contributions.layers.map(({ layer, layout, values, bias }) => {
      const [heads, tokens, ...more] = this.tensor(values).shape;
      need(!more.length && heads >= 1 && tokens === sizeOf(this.layouts[first + layout]), `contributions of ${layer} must be heads x tokens`);
      return { layer, layout: first + layout, heads, values: this.read(values), bias };
    });
    return { ...view.contributions, layers };
  }

  record(record, first, importance) {
    const [queries, keys] = [first + record.queries, first + record.keys];
    const [rows, columns] = [sizeOf(this.layouts[queries]), sizeOf(this.layouts[keys])];
    const made = this.operator(record.operator, rows, columns);
    need(!importance || importance.length === made.heads, `importance must be given for ${made.heads} heads`);
    const statistics = importance ? { importance } : {};
    return { layer: record.layer + (record.call ? ` #${record.call}` : ""), kind: record.kind, queries, keys, error: 0, statistics, ...made };
  }

  operator(operator, queries, keys) {
    const index = ["query_index", "key_index"].map((name) => operator[name] && this.tensor(operator[name]));
    need(Boolean(index[0]) === Boolean(index[1]), "query_index and key_index must be given together");
    index.forEach((one, i) => one && this.checkIndex(one, [queries, keys][i]));
    const blocked = index[0] ? 1 : 0;
    const sizes = (name, rank) => {
      need(operator[name], `attention of kind '${operator.kind}' must have '${name}'`);
      const { shape } = this.tensor(operator[name]);
      need(shape.length === rank + blocked, `${name} must have ${rank + blocked} axes, got ${shape.length}`);
      need(!shape.includes(0) && (name === "cells" || !WHOLE.includes(this.tensor(operator[name]).kind)), `${name} must hold floating-point numbers`);
      return blocked ? shape : [shape[0], 1, ...shape.slice(1)];
    };
    const [rows, columns] = blocked ? index.map((one) => one.shape[1]) : [queries, keys];
    const blocks = blocked ? index[0].shape[0] : 1;
    const fits = (shape, wanted, name) => need(shape.every((side, i) => wanted[i] === null || side === wanted[i]), `${name} must be ${wanted.map((side) => side ?? "any").join(" x ")}, got ${shape.join(" x ")}`);
    const arrays = blocked ? { query_index: this.kept(numbersOf(index[0])), key_index: this.kept(numbersOf(index[1])) } : {};
    const numbers = (name) => this.read(operator[name]);
    if (operator.kind === "weights") {
      const shape = sizes("weights", 3);
      fits(shape, [null, blocks, rows, columns], "weights");
      return { how: "rows", heads: shape[0], rows, columns, arrays: { ...arrays, weights: numbers("weights") } };
    }
    if (operator.kind === "sampled") {
      const shape = sizes("cells", 3);
      fits(shape, [null, blocks, rows, null], "cells");
      fits(sizes("shares", 3), shape, "shares");
      need(WHOLE.includes(this.tensor(operator.cells).kind), "cells must be whole numbers");
      need(operator.keys === columns, `keys must be ${columns}, got ${operator.keys}`);
      const cells = numbersOf(this.tensor(operator.cells));
      need(cells.every((cell) => cell >= 0 && cell < columns), `cells must be indices from 0 to ${columns - 1}`);
      return { how: "sampled", heads: shape[0], rows, points: shape[3], arrays: { ...arrays, cells: this.kept(cells), shares: numbers("shares") } };
    }
    need(operator.kind === "softmax", "attention must be of kind 'softmax', 'weights' or 'sampled'");
    const shape = sizes("query", 3);
    const [heads, , , channels] = shape;
    fits(shape, [null, blocks, rows, null], "query");
    fits(sizes("key", 3), [heads, blocks, columns, channels], "key");
    const made = { how: "softmax", heads, rows, columns, channels, scale: operator.scale ?? channels ** -0.5, arrays: { ...arrays, query: numbers("query"), key: numbers("key") } };
    if (operator.bias) {
      const own = this.tensor(operator.bias).shape;
      need(own.length <= 3 + blocked, "bias has too many axes");
      const whole = [...Array(3 + blocked - own.length).fill(1), ...own];
      const bias = blocked ? whole : [whole[0], 1, ...whole.slice(1)];
      need(bias.every((side, i) => side === 1 || side === [heads, blocks, rows, columns][i]), `bias must broadcast to ${heads} x ${blocks} x ${rows} x ${columns}`);
      Object.assign(made, { biasShape: bias });
      made.arrays.bias = this.read(operator.bias, true);
    }
    return made;
  }

  // Checks that an index names every token from 0 on; -1 is padding.
  checkIndex(tensor, count) {
    need(WHOLE.includes(tensor.kind) && tensor.shape.length === 2, "an index must be (blocks, tokens) of whole numbers");
    const found = new Set();
    for (const token of numbersOf(tensor)) {
      need(token >= -1 && token < count, "an index must name every token from 0 on; -1 is padding");
      if (token >= 0) found.add(token);
    }
    need(found.size === count, "an index must name every token from 0 on; -1 is padding");
  }

  map(name, map) {
    const { shape, ...held } = this.tensor(map.values);
    const lead = shape.slice(0, map.axes.length);
    const grid = shape.slice(map.axes.length);
    need(shape.length === map.axes.length + 2 && grid.every((side, i) => side === map.layout.grid[i]), `map ${name} must be its axes and grid`);
    const holes = Boolean((map.layout.holes ?? []).length);
    const values = numbersOf(held, holes);
    const cells = grid[0] * grid[1];
    const dropped = new Set(map.layout.holes ?? []);
    need(values.every((value, i) => Number.isFinite(value) || dropped.has(i % cells)), `map ${name} holds NaN or infinite values`);
    const colored = map.axes.length === 1 && map.axes[0] === "component" && lead[0] === 3;
    const panels = lead.reduce((a, b) => a * b, 1);
    const mean = new Float32Array(cells);
    if (!colored) for (let i = 0; i < cells * panels; i++) mean[i % cells] += values[i] / panels;
    const shown = colored ? values : mean;
    const { pixelwise, interval } = map.facts ?? {};
    const signed = Boolean(map.signed) || (!interval && shown.some((value) => value < 0));
    return { name, meaning: map.meaning, about: "", signed, pixelwise: Boolean(pixelwise), colored, layout: this.layout(map.layout), values: this.kept(shown) };
  }

  features(view, first) {
    let found = null;
    for (const one of view.features ?? []) {
      const { shape } = this.tensor(one.value);
      const numbered = one.layout === null || one.layout === undefined ? null : this.layouts[first + one.layout];
      if (one.role !== "tokens" || !numbered) continue;
      need(shape.length === 2 && shape[0] === sizeOf(numbered), `${one.layer}: tokens must be ${sizeOf(numbered)} x channels`);
      if (numbered.grid.length === 2) found = [one, shape];
    }
    if (!found) return null;
    const [one, [count, d]] = found;
    const values = numbersOf(this.tensor(one.value));
    for (let i = 0; i < count; i++) {
      let sum = 0;
      for (let c = 0; c < d; c++) sum += values[i * d + c] ** 2;
      const norm = Math.max(Math.sqrt(sum), 1e-12);
      for (let c = 0; c < d; c++) values[i * d + c] /= norm;
    }
    return { layer: one.layer, layout: first + one.layout, values: this.kept(values) };
  }
}
