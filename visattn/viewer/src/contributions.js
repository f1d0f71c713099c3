// Direct contributions to a score: a bar for each head, in a row for each layer, then the other terms. All bars sum to the score.

import { element, plain, radioKey, redrawn } from "./dom.js";
import { CONTRIBUTIONS } from "./page.js";

const LABEL = 40; // characters

export function signedText(value) {
  const digits = Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 0.01 || value === 0 ? 3 : 6;
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
}

export class Contributions {
  constructor(page) {
    this.page = page;
    this.note = element("p", { class: "reading" });
    this.terms = element("div", { class: "terms", role: "radiogroup", "aria-label": "What the image shows: all heads, a layer, or a head" });
    this.root = element("div", {}, this.note, this.terms, element("p", { class: "soft" }, "Direct: what a head itself adds to the score. What later layers make of it counts as theirs."));
  }

  draw() {
    redrawn(this.root, () => this.#fill());
  }

  #fill() {
    const { page } = this;
    const found = page.view.contributions;
    if (!found) {
      this.note.textContent = "This view has no contributions.";
      this.terms.replaceChildren();
      return;
    }
    const layers = found.layers.map((layer, number) => ({ ...layer, number, heads: page.contributionsOf(page.view, number) }));
    const totals = layers.map((layer) => layer.heads.reduce((a, b) => a + b, 0) + layer.bias);
    this.note.textContent = plain(`${found.target} = ${found.score.toPrecision(4)}: layers and other terms sum to it.`, 200);
    const most = Math.max(...layers.flatMap((layer) => layer.heads.map(Math.abs)), 1e-30);
    const widest = Math.max(...found.rest.map(([, value]) => Math.abs(value)), 1e-30);
    this.terms.replaceChildren(
      ...(page.allContributions(page.view) ? this.#row("all heads", "all", [], layers.reduce((sum, layer) => sum + layer.heads.reduce((a, b) => a + b, 0), 0), most) : []),
      ...layers.flatMap((layer) => this.#row(layer.layer, String(layer.number), layer.heads, totals[layer.number], most, layer.bias)),
      ...found.rest.flatMap(([name, value]) => this.#rest(name, value, widest)),
    );
  }

  // A layer: its name, which shows all of its heads, a bar for each head, and its sum with biases.
  #row(name, part, heads, total, most, bias = 0) {
    const chosen = this.page.part(this.page.view);
    const said = `${name}: ${signedText(total)}${bias ? `, of it biases ${signedText(bias)}` : ""}`;
    return [
      this.#button(part, chosen, "layer", said, plain(name, LABEL)),
      element("span", { class: "chart" }, ...heads.map((value, head) => this.#bar(`${part}.${head}`, chosen, `${name}, head ${head}: ${signedText(value)}`, value / most))),
      element("span", { class: "value", title: plain(said) }, signedText(total)),
    ];
  }

  #bar(part, chosen, said, height) {
    const bar = this.#button(part, chosen, "bar", said);
    bar.append(this.#fillOf(height));
    return bar;
  }

  // The colored part of a bar, upward or downward from zero, which lies in the middle.
  #fillOf(height) {
    const side = height < 0 ? "top: 50%" : "bottom: 50%";
    return element("span", { class: "fill", style: `${side}; height: ${50 * Math.abs(height)}%; background: ${this.#color(height)}` });
  }

  #color(value) {
    const table = this.page.colors.of("", true);
    const at = 3 * (value < 0 ? 40 : 215);
    return `rgb(${table[at]},${table[at + 1]},${table[at + 2]})`;
  }

  #button(part, chosen, kind, said, text = "") {
    return element(
      "button",
      {
        role: "radio",
        class: kind,
        "aria-checked": String(part === chosen),
        "aria-label": plain(said),
        title: plain(said),
        tabindex: part === chosen ? 0 : -1,
        onclick: () => this.page.state.set({ part, map: CONTRIBUTIONS }),
        onkeydown: (event) => this.#key(event),
      },
      text,
    );
  }

  // Arrow keys go through layers and heads in their order.
  #key(event) {
    const buttons = [...this.terms.querySelectorAll("button")];
    radioKey(event, buttons);
  }

  #rest(name, value, most) {
    const [side, width] = [value < 0 ? "right: 50%" : "left: 50%", (50 * Math.abs(value)) / most];
    return [
      element("span", { class: "other" }, plain(name, LABEL)),
      element("span", { class: "line", "aria-hidden": "true" }, element("span", { class: "fill", style: `${side}; width: ${width}%; background: ${this.#color(value)}` })),
      element("span", { class: "value" }, signedText(value)),
    ];
  }
}
