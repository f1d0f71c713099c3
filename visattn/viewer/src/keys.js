// The strongest keys of the row, with values; keys can be hidden.

import { check, element, plain, redrawn, slider } from "./dom.js";
import { number } from "./page.js";
import { cellBox, cellOf, nameOf } from "./tokens.js";

const SIDE = 26; // of a patch

export class Keys {
  constructor(page, image) {
    this.page = page;
    this.image = image;
    this.list = element("ol", { class: "keys", "aria-label": "Strongest keys" });
    this.note = element("p", { class: "soft" });
    this.hide = element("div", { class: "hide" });
    this.root = element(
      "div",
      {},
      slider("number of keys", [5, 50, 1], page.state.get("top"), (top) => page.state.set({ top })),
      this.note,
      this.list,
      this.hide,
    );
  }

  draw() {
    redrawn(this.root, () => this.#draw());
  }

  #draw() {
    const { page } = this;
    const view = page.view;
    const record = page.record(view);
    const shown = page.shown();
    this.list.replaceChildren();
    this.hide.replaceChildren();
    if (!record || shown.missing || !shown.row) {
      this.note.textContent = plain(shown.missing || "This map has no rows.");
      return;
    }
    const { row, layout } = shown;
    const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a]);
    const most = Math.max(...order.map((token) => Math.abs(row[token]))) || 1;
    this.note.textContent = plain(`${shown.title}: ${shown.about || ""}.${shown.record ? this.#even(shown) : ""}`, 300);
    for (const token of order.slice(0, page.state.get("top"))) {
      const bar = element("span", { class: token < layout.prefix.length ? "fill named" : "fill" });
      bar.style.width = `${(100 * Math.abs(row[token])) / most}%`;
      this.list.append(
        element(
          "li",
          {},
          element("span", { class: "patch", "aria-hidden": "true" }, ...this.#patch(view, layout, token)),
          element("span", { class: "key" }, plain(nameOf(view, layout, token), 60)),
          element("span", { class: "track", "aria-hidden": "true" }, bar),
          element("span", { class: "value" }, number(row[token], shown.digits)),
          ...(shown.record ? [element("button", { class: "small", "aria-label": plain(`hide the key ${nameOf(view, layout, token)}`, 80), onclick: () => this.#hide(record, [token], true) }, "hide")] : []),
        ),
      );
    }
    if (shown.record) this.#hiding(record);
  }

  // The photo at a patch; nothing at named tokens.
  #patch(view, layout, token) {
    const cell = cellOf(layout, token);
    if (!cell) return [];
    const canvas = element("canvas");
    this.image.crop(canvas, view, cellBox(view, layout, cell), SIDE);
    return [canvas];
  }

  // What each key would have if all that are not hidden had the same, where weights are shares.
  #even({ record, row }) {
    const total = row.reduce((sum, weight) => sum + weight, 0);
    if (Math.abs(total - 1) > 0.01 || row.some((weight) => weight < 0)) return "";
    const count = row.length - this.page.hiddenIn(this.page.view, record).size;
    return ` Shared evenly, each of ${count} keys would have ${(1 / count).toPrecision(2)}.`;
  }

  // Checkboxes for the named keys, and one for the sinks.
  #hiding(record) {
    const { page } = this;
    const view = page.view;
    const hidden = page.state.get("hidden");
    const sinks = page.sinksOn(view, record.keyLayout);
    const named = record.keyLayout.prefix.slice(0, 8).map((name, token) => [nameOf(view, record.keyLayout, token), [token]]);
    const grouped = new Set([...named.flatMap(([, tokens]) => tokens), ...sinks]);
    const others = [...page.hiddenIn(view, record)].filter((token) => !grouped.has(token)).map((token) => [nameOf(view, record.keyLayout, token), [token]]);
    const groups = [...named, ...(sinks.length ? [["sinks", sinks]] : []), ...others];
    this.hide.append(
      element("p", { class: "soft" }, "Hidden keys leave their weight to the others. The model itself would compute other things without them."),
      ...groups.map(([name, tokens]) =>
        check(
          `hide ${plain(name, 40)}`,
          tokens.every((token) => hidden.has(page.hiddenKey(view, record, token))),
          (on) => this.#hide(record, tokens, on),
        ),
      ),
    );
  }

  #hide(record, tokens, on) {
    const { page } = this;
    const next = new Set(page.state.get("hidden"));
    tokens.map((token) => page.hiddenKey(page.view, record, token)).forEach((key) => (on ? next.add(key) : next.delete(key)));
    page.state.set({ hidden: next });
  }
}
