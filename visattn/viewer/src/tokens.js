// Tokens and where they lie: layouts, cells of the grid, pixels of the input and of the photo. Points are (y, x).

export function cellsOf(layout) {
  return layout.grid.length ? layout.grid.reduce((a, b) => a * b, 1) : 0;
}

export function sizeOf(layout) {
  return layout.prefix.length + cellsOf(layout) - layout.holes.length;
}

// Cell of each grid token, and token of each cell (-1: a hole).
export function places(layout) {
  if (!layout.places) {
    const holes = new Set(layout.holes);
    const cells = [];
    const tokens = new Int32Array(cellsOf(layout)).fill(-1);
    for (let cell = 0; cell < tokens.length; cell++) {
      if (holes.has(cell)) continue;
      tokens[cell] = layout.prefix.length + cells.length;
      cells.push(cell);
    }
    layout.places = { cells, tokens };
  }
  return layout.places;
}

// Rows and columns of a grid; frames of a clip lie one below the other.
export function shapeOf(layout) {
  const [frames, rows, columns] = layout.grid.length === 3 ? layout.grid : [1, ...layout.grid];
  return { frames, rows: rows || 0, columns: columns || 0 };
}

// Values of the grid tokens by cell; holes are NaN.
export function onGrid(layout, row) {
  const { tokens } = places(layout);
  const out = new Float32Array(tokens.length);
  for (let cell = 0; cell < out.length; cell++) out[cell] = tokens[cell] < 0 ? NaN : row[tokens[cell]];
  return out;
}

// Box of the photo that the grid covers, as [top, left, bottom, right] in pixels of the photo.
export function boxOnPhoto(view, layout) {
  const [top, left, bottom, right] = view.window;
  const down = (bottom - top) / view.input[0];
  const across = (right - left) / view.input[1];
  const box = layout.box;
  return [top + box[0] * down, left + box[1] * across, top + box[2] * down, left + box[3] * across];
}

// Row and column of the cell below a point of the photo, or null.
export function cellAt(view, layout, y, x) {
  const { rows, columns } = shapeOf(layout);
  const [top, left, bottom, right] = boxOnPhoto(view, layout);
  const row = Math.floor(((y - top) / (bottom - top)) * rows);
  const column = Math.floor(((x - left) / (right - left)) * columns);
  return row >= 0 && row < rows && column >= 0 && column < columns ? [row, column] : null;
}

// A query is a named token, `{ name }`, or a point of the photo, `{ y, x }`. Each layer has its own token for it, or none (-1).
export function tokenOf(view, layout, query) {
  if (query.name !== undefined) {
    if (query.name === "mean") return -1;
    return layout.prefix.indexOf(query.name);
  }
  if (layout.grid.length < 2) return -1;
  const cell = cellAt(view, layout, query.y, query.x);
  return cell ? places(layout).tokens[cell[0] * shapeOf(layout).columns + cell[1]] : -1;
}

// Box of a cell, in pixels of the photo.
export function cellBox(view, layout, [row, column]) {
  const { rows, columns } = shapeOf(layout);
  const [top, left, bottom, right] = boxOnPhoto(view, layout);
  const [high, wide] = [(bottom - top) / rows, (right - left) / columns];
  return [top + row * high, left + column * wide, top + (row + 1) * high, left + (column + 1) * wide];
}

// Row and column of a token of the photo, or null: a named token, or one of a later frame.
export function cellOf(layout, token) {
  const { rows, columns } = shapeOf(layout);
  const cell = places(layout).cells[token - layout.prefix.length];
  return cell < rows * columns ? [Math.floor(cell / columns), cell % columns] : null;
}

// Center of a cell, in pixels of the photo.
export function centerOf(view, layout, row, column) {
  const [top, left, bottom, right] = cellBox(view, layout, [row, column]);
  return { y: (top + bottom) / 2, x: (left + right) / 2 };
}

// Name of a token for people: `cls`, the word, or `patch 3,7`.
export function nameOf(view, layout, token) {
  const name = layout.prefix[token];
  if (name !== undefined) return view.texts[name] === undefined ? name : `${name}: ${view.texts[name]}`;
  const cell = places(layout).cells[token - layout.prefix.length];
  const { rows, columns } = shapeOf(layout);
  const frame = Math.floor(cell / (rows * columns));
  const row = Math.floor((cell % (rows * columns)) / columns);
  return `patch ${layout.grid.length === 3 ? `${frame},` : ""}${row},${cell % columns}`;
}
