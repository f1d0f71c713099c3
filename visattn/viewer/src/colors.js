// Colors: tables of 256 RGB rows, and the scale from values to them.

import { bytesOf } from "./payload.js";

export class Colors {
  constructor(tables) {
    this.tables = Object.fromEntries(Object.entries(tables).map(([name, text]) => [name, bytesOf(text)]));
    this.names = Object.keys(this.tables);
  }

  // Table for values: a diverging one for signed maps.
  of(name, signed) {
    return this.tables[signed ? "blue-white-red" : name] || this.tables.inferno;
  }
}

// Lowest and highest value; signed maps are symmetric about zero. Holes are left out.
export function rangeOf(values, signed) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low <= high)) return [0, 1];
  if (signed) {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return [-most, most];
  }
  return [low, high];
}

// Whether a range is so narrow that colors over it would show noise: at most 5 % of its largest magnitude, all of one sign.
export function even([low, high]) {
  return !(low < high) || (low * high > 0 && high - low <= 0.05 * Math.max(Math.abs(low), Math.abs(high)));
}

// Fills RGBA pixels from values. `alpha` gives the opacity of a value between 0 (lowest) and 1. Nearly even values have one color.
export function paint(pixels, values, range, table, alpha) {
  const [low, high] = range;
  const factor = even(range) ? 0 : 1 / (high - low);
  for (let i = 0; i < values.length; i++) {
    const at = 4 * i;
    const share = (values[i] - low) * factor;
    if (!(share === share)) {
      pixels[at + 3] = 0;
      continue;
    }
    const part = Math.max(0, Math.min(1, share));
    const color = 3 * Math.round(part * 255);
    pixels[at] = table[color];
    pixels[at + 1] = table[color + 1];
    pixels[at + 2] = table[color + 2];
    pixels[at + 3] = 255 * alpha(part);
  }
}

const spare = document.createElement("canvas");
let pixels = null;

// A canvas of this size, and its pixels to fill; resizing takes long, so both are kept.
function blank(columns, rows) {
  const inner = spare.getContext("2d", { willReadFrequently: true });
  if (!pixels || spare.width !== columns || spare.height !== rows) {
    spare.width = columns;
    spare.height = rows;
    pixels = inner.createImageData(columns, rows);
  }
  return [inner, pixels];
}

// A gray copy of a picture. Canvases weigh red, green and blue as static overlays do: 0.3, 0.59 and 0.11.
export function grayOf(picture) {
  const canvas = document.createElement("canvas");
  canvas.width = picture.naturalWidth;
  canvas.height = picture.naturalHeight;
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  context.globalCompositeOperation = "saturation";
  context.fillStyle = "#808080";
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

// Draws values of a grid into a rectangle.
export function drawGrid(context, values, { rows, columns }, range, table, alpha, [x, y, width, height], smooth) {
  const [inner, image] = blank(columns, rows);
  paint(image.data, values, range, table, alpha);
  inner.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = smooth;
  context.imageSmoothingQuality = "high";
  context.drawImage(spare, x, y, width, height);
}

// Draws values over a photo, which stays as it is if they are nearly even.
export function drawOver(context, values, shape, range, ...how) {
  if (!even(range)) drawGrid(context, values, shape, range, ...how);
}

// Draws three components as red, green and blue, each on its own range.
export function drawComponents(context, values, { rows, columns }, opacity, [x, y, width, height], smooth) {
  const count = rows * columns;
  const [inner, image] = blank(columns, rows);
  for (let channel = 0; channel < 3; channel++) {
    const part = values.subarray(channel * count, (channel + 1) * count);
    const [low, high] = rangeOf(part, false);
    for (let i = 0; i < count; i++) {
      const hole = Number.isNaN(part[i]);
      image.data[4 * i + channel] = hole ? 0 : (255 * (part[i] - low)) / (high - low || 1);
      image.data[4 * i + 3] = hole ? 0 : 255 * opacity;
    }
  }
  inner.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = smooth;
  context.drawImage(spare, x, y, width, height);
}

// Cells of the smallest region that holds a share of the sum, as a Uint8Array.
export function regionOf(values, share) {
  const order = Array.from(values.keys()).filter((i) => values[i] > 0);
  order.sort((a, b) => values[b] - values[a]);
  const total = order.reduce((sum, i) => sum + values[i], 0);
  const region = new Uint8Array(values.length);
  let sum = 0;
  for (const i of order) {
    if (sum >= share * total) break;
    region[i] = 1;
    sum += values[i];
  }
  return region;
}
