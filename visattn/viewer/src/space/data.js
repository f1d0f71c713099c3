// Tokens, layers and heads of a space. A token has the same number in every head whose layer shares its table; other tables may hold it too.

import { Colors } from "../colors.js";

export const NOWHERE = 65535; // code of a point without a place
const LAST = NOWHERE - 1;

class Table {
  constructor(facts, arrays) {
    Object.assign(this, facts);
    for (const name of ["token", "image", "row", "column", "sink", "color", "cellRow", "cellColumn"]) this[name] = arrays[facts[name]];
    this.object = facts.object === null ? null : arrays[facts.object];
    this.count = this.image.length;
    this.ofWords = facts.words.length > 0;
  }

  // Whether a token has no place, such as a class token.
  named(i) {
    return this.row[i] < 0;
  }

  nameOf(i) {
    return this.nameAt(this.image[i], this.token[i]);
  }

  // Name of the token of an image.
  nameAt(image, token) {
    if (this.ofWords) return this.words[image][token] ?? "";
    return this.cellRow[token] < 0 ? this.names[token] : `${this.cellRow[token]},${this.cellColumn[token]}`;
  }

  // Values of all tokens of an image as a grid; NaN where a cell has no token.
  onGrid(values) {
    const found = new Float32Array(this.grid[0] * this.grid[1]).fill(NaN);
    values.forEach((value, token) => {
      if (this.cellRow[token] >= 0) found[this.cellRow[token] * this.grid[1] + this.cellColumn[token]] = value;
    });
    return found;
  }

  // Number in another table of a token of this one; null if it is not there. Patches are the same if both grids cover the same pixels.
  into(other, i) {
    if (other === this) return i;
    if (!this.named(i) && other.places !== this.places) return null;
    other.index ||= new Map(Array.from({ length: other.count }, (_, j) => [other.#key(j), j]));
    return other.index.get(this.#key(i)) ?? null;
  }

  #key(i) {
    return `${this.image[i]} ${this.named(i) ? this.names[this.token[i]] : `${this.row[i]},${this.column[i]}`}`;
  }

  // Brightness from 0 to 1; hue from 0 to 1, and chroma.
  brightness(i) {
    return (0.299 * this.color[3 * i] + 0.587 * this.color[3 * i + 1] + 0.114 * this.color[3 * i + 2]) / 255;
  }

  hue(i) {
    const [red, green, blue] = this.color.subarray(3 * i, 3 * i + 3);
    const high = Math.max(red, green, blue);
    const chroma = high - Math.min(red, green, blue);
    if (!chroma) return [0, 0];
    const sixth = high === red ? (green - blue) / chroma : high === green ? 2 + (blue - red) / chroma : 4 + (red - green) / chroma;
    return [((sixth / 6) + 1) % 1, chroma / 255];
  }
}

class Layer {
  constructor(facts, arrays, tables, dimensions) {
    Object.assign(this, facts);
    this.numbers = facts.heads;
    this.heads = facts.heads.length;
    this.dimensions = dimensions;
    this.table = tables[facts.table];
    for (const name of ["queries", "keys", "queryNorms", "keyNorms", "rows", "rowScale"]) this[name] = arrays[facts[name]];
    this.columns = this.rows.length / (this.heads * this.table.count);
  }

  codes(side) {
    return side === "query" ? this.queries : this.keys;
  }

  norms(side) {
    return side === "query" ? this.queryNorms : this.keyNorms;
  }

  // Place of a point on one scale for all dimensions and both sides of its head; null if it has none.
  at(head, side, i) {
    const start = (head * this.table.count + i) * this.dimensions;
    const codes = this.codes(side).subarray(start, start + this.dimensions);
    return codes[0] === NOWHERE ? null : codes;
  }

  // Attention of a drawn query, over all keys of its image.
  row(head, i) {
    const start = (head * this.table.count + i) * this.columns;
    const scale = this.rowScale[head * this.table.count + i];
    return Float32Array.from(this.rows.subarray(start, start + this.columns), (code) => code * scale);
  }

  // Mean attention of some drawn queries, over the keys of an image.
  meanRow(head, members) {
    const sum = new Float32Array(this.columns);
    for (const i of members) {
      const row = this.row(head, i);
      for (let j = 0; j < sum.length; j++) sum[j] += row[j] / members.length;
    }
    return sum;
  }
}

// Places of all points of a head in a square from 0 to 1, after a turn about both axes if there are three dimensions; NaN without a place.
export function placesOf(layer, head, side, [turn, tilt]) {
  const codes = layer.codes(side);
  const { count } = layer.table;
  const d = layer.dimensions;
  const found = new Float32Array(2 * count);
  const [ct, st, cp, sp] = [Math.cos(turn), Math.sin(turn), Math.cos(tilt), Math.sin(tilt)];
  for (let i = 0; i < count; i++) {
    const at = (head * count + i) * d;
    if (codes[at] === NOWHERE) {
      found[2 * i] = NaN;
      continue;
    }
    let x = (2 * codes[at]) / LAST - 1;
    let y = (2 * codes[at + 1]) / LAST - 1;
    if (d === 3) {
      const z = (2 * codes[at + 2]) / LAST - 1;
      [x, y] = [(ct * x + st * z) / 1.7321, (cp * y - sp * (ct * z - st * x)) / 1.7321]; // a cube fits when it is turned
    }
    found[2 * i] = (x + 1) / 2;
    found[2 * i + 1] = (1 - y) / 2;
  }
  return found;
}

export class Space {
  constructor(facts, arrays) {
    Object.assign(this, { title: facts.title, about: facts.about, images: facts.images, blocks: facts.blocks });
    this.warnings = facts.warnings;
    this.notes = facts.notes;
    this.dimensions = facts.dimensions;
    this.tables = facts.tables.map((table) => new Table(table, arrays));
    this.layers = facts.layers.map((layer) => new Layer(layer, arrays, this.tables, facts.dimensions));
    this.colors = new Colors(facts.colormaps);
    this.labels = [...new Set(this.images.map((image) => image.label))];
    this.mostHeads = Math.max(...this.layers.map((layer) => layer.heads));
    for (const layer of this.layers) layer.depth = this.layers.filter((one) => one.block === layer.block).indexOf(layer);
    this.deepest = Math.max(...this.layers.map((layer) => layer.depth)) + 1;
    this.pictures = this.blocks.map((block) =>
      block.photos.map((photo) => {
        const picture = new Image();
        picture.src = photo;
        return picture;
      }),
    );
  }

  // Name of a layer by its number, and of its model if there are two.
  nameOf(layer) {
    return this.blocks.length > 1 ? `${this.blocks[layer.block].model}, layer ${layer.number}` : `layer ${layer.number}`;
  }

  get points() {
    return this.layers.reduce((sum, layer) => sum + 2 * layer.heads * layer.table.count, 0);
  }
}
