// Colors of points by a property of their tokens, as 32-bit pixels (alpha, blue, green, red).

const OKABE_ITO = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
const QUERY = "#d55e00";
const KEY = "#0072b2";
const MOST_LABELS = 16;
const NONE = "#8c959e"; // tokens without the property

export const MODES = [
  ["kind", "query or key"],
  ["row", "row"],
  ["column", "column"],
  ["position", "row and column"],
  ["checks", "row and column, in nine parts"],
  ["norm", "norm"],
  ["color", "color of the patch"],
  ["hue", "hue"],
  ["brightness", "brightness"],
  ["object", "object"],
  ["label", "class of the image"],
  ["image", "image"],
  ["outlier", "class token, register, sink"],
];

function pixel(red, green, blue) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export function parsed(hex) {
  const number = parseInt(hex.slice(1), 16);
  return pixel(number >> 16, (number >> 8) & 255, number & 255);
}

// A color of the hue circle, from 0 to 1.
function wheel(hue) {
  const part = (shift) => {
    const k = (shift + hue * 6) % 6;
    return Math.round(255 * (0.9 - 0.75 * Math.max(0, Math.min(k, 4 - k, 1))));
  };
  return pixel(part(5), part(3), part(1));
}

function along(table, share) {
  const at = 3 * Math.round(255 * Math.max(0, Math.min(1, share)));
  return pixel(table[at], table[at + 1], table[at + 2]);
}

export function modesOf(space) {
  const object = space.tables.some((table) => table.object);
  return MODES.filter(([name]) => (name !== "object" || object) && (name !== "label" || space.labels.length > 1));
}

// Function from a token to a pixel, and the entries of the legend: [color, text], or a scale.
function painter(space, table, side, mode) {
  const viridis = space.colors.of("viridis");
  const [rows, columns] = table.grid;
  const category = (number) => parsed(OKABE_ITO[number % OKABE_ITO.length]);
  const placed = (paint) => (i) => (table.named(i) ? parsed(NONE) : paint(i));
  const seen = (paint) => (table.ofWords ? () => parsed(NONE) : placed(paint)); // words have no colors
  switch (mode) {
    case "row":
      return placed((i) => along(viridis, table.row[i] / Math.max(rows - 1, 1)));
    case "column":
      return placed((i) => along(viridis, table.column[i] / Math.max(columns - 1, 1)));
    case "position":
      return placed((i) => pixel(Math.round((230 * table.row[i]) / Math.max(rows - 1, 1)), 90, Math.round((230 * table.column[i]) / Math.max(columns - 1, 1))));
    case "checks":
      return placed((i) => category((Math.floor((3 * table.row[i]) / rows) * 3 + Math.floor((3 * table.column[i]) / columns)) % 8));
    case "color":
      return seen((i) => pixel(...table.color.subarray(3 * i, 3 * i + 3)));
    case "hue":
      return seen((i) => {
        const [hue, chroma] = table.hue(i);
        return chroma < 0.06 ? parsed(NONE) : wheel(hue);
      });
    case "brightness":
      return seen((i) => along(viridis, table.brightness(i)));
    case "object":
      return seen((i) => along(viridis, table.object ? table.object[i] : 0));
    case "label":
      return (i) => category(space.labels.indexOf(space.images[table.image[i]].label));
    case "image":
      return (i) => wheel((table.image[i] * 0.61803) % 1);
    case "outlier":
      return (i) => (table.sink[i] ? parsed("#d55e00") : table.named(i) ? parsed("#cc79a7") : parsed("#56b4e9"));
    default:
      return () => parsed(side === "query" ? QUERY : KEY);
  }
}

export function legendOf(space, table, mode) {
  const [rows, columns] = table.grid;
  const scale = (low, high) => ({ scale: "viridis", low, high });
  switch (mode) {
    case "row":
      return scale("top row 0", `bottom row ${rows - 1}`);
    case "column":
      return scale("left column 0", `right column ${columns - 1}`);
    case "position":
      return { text: "red grows with the row, blue with the column" };
    case "checks":
      return { text: "nine parts of the image, each its own color (one color is used twice)" };
    case "norm":
      return scale("smallest norm of the head", "largest");
    case "color":
      return { text: "mean color of the patch" };
    case "hue":
      return { text: "hue of the patch's mean color; gray: hardly any" };
    case "brightness":
      return scale("dark", "bright");
    case "object":
      return scale("background", "object");
    case "label":
      return {
        text: space.labels.length > OKABE_ITO.length ? `${space.labels.length} classes, whose colors repeat` : "",
        entries: space.labels.slice(0, MOST_LABELS).map((label, i) => [OKABE_ITO[i % OKABE_ITO.length], label]),
      };
    case "image":
      return { text: "each image its own color" };
    case "outlier":
      return { entries: [["#d55e00", "sink"], ["#cc79a7", "class token, register"], ["#56b4e9", "patch"]] };
    default:
      return { entries: [[QUERY, "query"], [KEY, "key"]] };
  }
}

// Pixels of all points of one head and side. Only those of norms differ between heads.
export class Painted {
  constructor(space) {
    this.space = space;
    this.known = new Map();
  }

  of(layer, head, side, mode) {
    const { table } = layer;
    const key = mode === "norm" ? `${layer.block} ${layer.name} ${head} ${side}` : `${this.space.tables.indexOf(table)} ${mode === "kind" ? side : ""}`;
    const full = `${mode} ${key}`;
    if (!this.known.has(full)) {
      const pixels = new Uint32Array(table.count);
      if (mode === "norm") this.#norms(layer, head, side, pixels);
      else {
        const paint = painter(this.space, table, side, mode);
        for (let i = 0; i < pixels.length; i++) pixels[i] = paint(i);
      }
      this.known.set(full, pixels);
    }
    return this.known.get(full);
  }

  #norms(layer, head, side, pixels) {
    const count = pixels.length;
    const norms = layer.norms(side).subarray(head * count, (head + 1) * count);
    let [low, high] = [Infinity, -Infinity];
    for (const norm of norms) [low, high] = [Math.min(low, norm), Math.max(high, norm)];
    const viridis = this.space.colors.of("viridis");
    for (let i = 0; i < count; i++) pixels[i] = along(viridis, (norms[i] - low) / (high - low || 1));
  }
}
