// Colors: tables of 256 RGB rows, and the scale from values to them.

import { bytesOf } from "./payload.js";

const FINE = 8; // smooth pixels of a cell, along each side
const MOST = 512; // of a map

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
export function extentOf(values, signed) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low <= high)) return [0, 1];
  if (signed) {
    const most = Math.max(Math.abs(low), Math.abs(high));
    return [-most, most];
  }
  return [low, high];
}

// Value that a share of sorted values does not exceed.
function quantile(sorted, share) {
  const place = share * (sorted.length - 1);
  const below = Math.floor(place);
  const far = place - below;
  return sorted[below] * (1 - far) + sorted[Math.ceil(place)] * far;
}

// Range of the colors of a map by the rule of static overlays, `resolved` in visattn/core/maps/scaling.py: sparse maps go from their 1st
// to their 99th percentile, and so do maps of single pixels or points.
export function rangeOf(values, signed, pixelwise = false) {
  const [low, high] = extentOf(values, signed);
  if ((signed && !pixelwise) || even([low, high])) return [low, high];
  const known = values.filter((value) => value === value);
  if (signed) {
    const most = quantile(known.map(Math.abs).sort(), 0.99) || high;
    return [-most, most];
  }
  known.sort();
  const inner = [quantile(known, 0.01), quantile(known, 0.99)];
  if (!(inner[0] < inner[1])) return [low, high];
  const above = known.reduce((sum, value) => (value > inner[1] ? sum + value - low : sum), 0);
  const total = known.reduce((sum, value) => sum + value - low, 0);
  const sparse = inner[1] - inner[0] < 0.75 * (high - low) && !even(inner) && above < total / 2;
  return pixelwise || sparse ? inner : [low, high];
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
    const level = Math.round(255 * Math.max(0, Math.min(1, share)));
    const color = 3 * level;
    pixels[at] = table[color];
    pixels[at + 1] = table[color + 1];
    pixels[at + 2] = table[color + 2];
    pixels[at + 3] = 255 * alpha(level / 255);
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

// Values between those of a grid, `fine` for each cell and side, as weighted means of the four nearest cells that are no holes.
function between(values, { rows, columns }, fine) {
  const out = new Float32Array(rows * columns * fine * fine);
  const taps = (at, count) => {
    const place = Math.max(0, Math.min(count - 1, (at + 0.5) / fine - 0.5));
    const first = Math.floor(place);
    return [[first, 1 - place + first], [Math.ceil(place), place - first]];
  };
  const across = Array.from({ length: columns * fine }, (_, at) => taps(at, columns));
  for (let y = 0, i = 0; y < rows * fine; y++) {
    const down = taps(y, rows);
    for (let x = 0; x < columns * fine; x++) {
      let [sum, weight] = [0, 0];
      for (const [row, high] of down) {
        for (const [column, wide] of across[x]) {
          const value = values[row * columns + column];
          if (value === value) [sum, weight] = [sum + high * wide * value, weight + high * wide];
        }
      }
      const own = values[Math.floor(y / fine) * columns + Math.floor(x / fine)];
      out[i++] = own === own ? sum / weight : NaN;
    }
  }
  return out;
}

// Draws values of a grid into a rectangle. Smoothing is between values, as in static overlays, not between their colors.
export function drawGrid(context, values, shape, range, table, alpha, [x, y, width, height], smooth) {
  const { rows, columns } = shape;
  const fine = smooth ? Math.max(1, Math.min(FINE, Math.floor(MOST / Math.max(rows, columns)))) : 1;
  const [inner, image] = blank(columns * fine, rows * fine);
  paint(image.data, fine > 1 ? between(values, shape, fine) : values, range, table, alpha);
  inner.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = smooth;
  context.imageSmoothingQuality = "high";
  context.drawImage(spare, x, y, width, height);
}

// Draws values over a photo, which stays as it is if they are nearly even.
export function drawOver(context, values, shape, range, ...how) {
  if (!even(range)) drawGrid(context, values, shape, range, ...how);
}

// Darkens the photo in holes and draws lines there, as static overlays do; `unit` is the side of a pixel of the photo.
export function hatch(context, values, { rows, columns }, [x, y, width, height], unit) {
  const holes = new Path2D();
  let any = false;
  for (let i = 0; i < rows * columns; i++) {
    if (values[i] === values[i]) continue;
    holes.rect(x + ((i % columns) * width) / columns, y + (Math.floor(i / columns) * height) / rows, width / columns, height / rows);
    any = true;
  }
  if (!any) return;
  const step = Math.max(6, Math.floor(Math.max(width, height) / unit / 60));
  const line = Math.max(1, Math.floor(step / 5));
  context.save();
  context.clip(holes);
  context.fillStyle = "rgb(0 0 0 / 66.7%)";
  context.fillRect(x, y, width, height);
  context.strokeStyle = "#bebebe";
  context.lineWidth = line * unit * Math.SQRT1_2;
  context.beginPath();
  for (let at = ((line + 1) / 2) * unit; at < width + height; at += step * unit) {
    context.moveTo(x + at, y);
    context.lineTo(x + at - height, y + height);
  }
  context.stroke();
  context.restore();
}

// Draws three components as red, green and blue, each from its 1st to its 99th percentile.
export function drawComponents(context, values, { rows, columns }, opacity, [x, y, width, height]) {
  const count = rows * columns;
  const [inner, image] = blank(columns, rows);
  for (let channel = 0; channel < 3; channel++) {
    const part = values.subarray(channel * count, (channel + 1) * count);
    const [low, high] = rangeOf(part, false, true);
    for (let i = 0; i < count; i++) {
      const hole = Number.isNaN(part[i]);
      image.data[4 * i + channel] = hole ? 0 : (255 * (part[i] - low)) / (high - low || 1);
      image.data[4 * i + 3] = hole ? 0 : 255 * opacity;
    }
  }
  inner.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
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
