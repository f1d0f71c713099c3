// What is shown. The part after `#` of the address holds it, so a link opens the same picture.

const TEXTS = ["map", "colormap", "scale", "blend", "ground", "tab", "sort", "part"];
const NUMBERS = ["view", "record", "opacity", "mass", "compare", "otherRecord", "top", "zoom"];
const HEADS = ["head", "otherHead"];
const FLAGS = ["smooth", "pinned", "sinks", "allQueries", "allHeads"];

// A head is a number, or `mean`, `max` or `same`.
export function headOf(text) {
  return /^\d+$/.test(text) ? Number(text) : text;
}

export class State {
  constructor(initial) {
    this.values = { ...initial };
    this.listeners = [];
    this.waiting = null;
  }

  get(name) {
    return this.values[name];
  }

  // Changes values; listeners are called once before the next frame, with the names that changed.
  set(changes) {
    const names = Object.keys(changes).filter((name) => this.values[name] !== changes[name]);
    if (!names.length) return;
    Object.assign(this.values, changes);
    if (this.waiting) {
      names.forEach((name) => this.waiting.add(name));
      return;
    }
    this.waiting = new Set(names);
    requestAnimationFrame(() => this.flush());
  }

  flush() {
    const names = this.waiting;
    this.waiting = null;
    if (names) this.listeners.forEach((listener) => listener(names));
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  get link() {
    const said = new URLSearchParams();
    const { values } = this;
    for (const name of [...TEXTS, ...NUMBERS, ...HEADS]) said.set(name, values[name]);
    for (const name of FLAGS) said.set(name, values[name] ? "1" : "0");
    const { query } = values;
    said.set("query", query.name !== undefined ? `:${query.name}` : `${query.x.toFixed(1)},${query.y.toFixed(1)}`);
    said.set("hidden", [...values.hidden].join(" "));
    return said.toString();
  }

  // Reads a link; what it does not say stays, and what makes no sense is left out.
  read(link) {
    const said = new URLSearchParams(link);
    const found = {};
    for (const name of TEXTS) if (said.has(name)) found[name] = said.get(name);
    for (const name of NUMBERS) if (said.has(name) && Number.isFinite(Number(said.get(name)))) found[name] = Number(said.get(name));
    for (const name of FLAGS) if (said.has(name)) found[name] = said.get(name) === "1";
    for (const name of HEADS) if (said.has(name)) found[name] = headOf(said.get(name));
    const query = said.get("query");
    if (query && query.startsWith(":")) found.query = { name: query.slice(1) };
    else if (query && /^-?[\d.]+,-?[\d.]+$/.test(query)) {
      const [x, y] = query.split(",").map(Number);
      found.query = { y, x };
    }
    if (said.has("hidden")) found.hidden = new Set(said.get("hidden").split(" ").filter((key) => /^\d+\.\d+\.\d+$/.test(key)));
    return found;
  }
}
