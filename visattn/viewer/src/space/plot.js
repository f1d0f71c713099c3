// Points as pixels: 100,000 of them take a few milliseconds, on any machine.

// A picture of the screen's pixels, into which points are written.
export class Raster {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  // Begins a picture of this size in pixels of the page, filled with a color.
  begin(width, height, background) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const [wide, high] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
      this.image = null;
    }
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.image ||= this.context.createImageData(wide, high);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.pixels.fill(background);
    Object.assign(this, { ratio, wide, high });
  }

  // Draws points into a rectangle of the page's pixels. Those that are not among the members, if there are any, get the dim color and lie below.
  points(places, pixels, [left, top, side], size, members, dim) {
    if (members) {
      this.#some(places, pixels, [left, top, side], size, members, dim);
      this.#some(places, pixels, [left, top, side], size, members, null);
    } else this.#some(places, pixels, [left, top, side], size, null, null);
  }

  #some(places, pixels, [left, top, side], size, members, dim) {
    const { ratio, wide, high } = this;
    const target = this.pixels;
    const [x0, y0, scale] = [left * ratio, top * ratio, side * ratio];
    const width = Math.max(1, Math.round(size * ratio));
    const half = width >> 1;
    for (let i = 0; i < pixels.length; i++) {
      if (members && (dim === null) !== (members[i] === 1)) continue;
      const x = Math.round(x0 + places[2 * i] * scale) - half;
      const y = Math.round(y0 + places[2 * i + 1] * scale) - half;
      if (!(x >= 0 && y >= 0 && x + width <= wide && y + width <= high)) continue; // also without a place
      const color = dim === null ? pixels[i] : dim;
      for (let row = 0; row < width; row++) {
        const at = (y + row) * wide + x;
        for (let column = 0; column < width; column++) target[at + column] = color;
      }
    }
  }

  end() {
    this.context.setTransform(1, 0, 0, 1, 0, 0);
    this.context.putImageData(this.image, 0, 0);
  }
}

// Whether a point lies in a polygon of points.
export function inside([x, y], polygon) {
  let odd = false;
  for (let i = 0, j = polygon.length - 1; i < polygon.length; j = i++) {
    const [xi, yi] = polygon[i];
    const [xj, yj] = polygon[j];
    if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) odd = !odd;
  }
  return odd;
}
