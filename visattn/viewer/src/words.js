// Words, object queries and other named queries of the layer: one small map each, in their order.

import { rangeOf } from "./colors.js";
import { element, plain, radioKey, sized } from "./dom.js";
import { nameOf, onGrid, shapeOf } from "./tokens.js";

const WIDTH = 110;
const MOST = 60; // tiles

export class Words {
  constructor(page, image) {
    this.page = page;
    this.image = image;
    this.note = element("p", { class: "soft" });
    this.list = element("div", { class: "maps words", role: "radiogroup", "aria-label": "Named queries" });
    this.root = element("div", {}, this.note, this.list);
  }

  draw() {
    const { page } = this;
    const view = page.view;
    const record = page.record(view);
    const names = record ? record.queryLayout.prefix : [];
    const count = `${names.length} named ${names.length === 1 ? "query" : "queries"}`;
    const shown = names.length > MOST ? `the first ${MOST} of ${count}` : count;
    this.note.textContent = record ? plain(`${record.layer}: ${shown}`) : "This view has no attention.";
    const chosen = page.state.get("query").name;
    const held = this.list.contains(document.activeElement);
    const focusable = Math.max(names.indexOf(chosen), 0);
    this.list.replaceChildren(
      ...names.slice(0, MOST).map((name, token) => {
        const canvas = element("canvas", { "aria-hidden": "true" });
        this.#map(canvas, view, record, token);
        return element(
          "button",
          {
            role: "radio",
            "aria-checked": String(name === chosen),
            tabindex: token === focusable ? 0 : -1,
            onclick: () => page.state.set({ query: { name }, pinned: true }),
            onkeydown: (event) => radioKey(event),
          },
          canvas,
          element("span", { class: "name" }, plain(nameOf(view, record.queryLayout, token), 40)),
        );
      }),
    );
    if (held && this.list.children[focusable]) this.list.children[focusable].focus();
  }

  #map(canvas, view, record, token) {
    const [high, wide] = view.size;
    const factor = Math.min(WIDTH / wide, WIDTH / high);
    const context = sized(canvas, wide * factor, high * factor);
    const layout = record.keyLayout;
    const { rows, columns } = shapeOf(layout);
    const values = onGrid(layout, this.page.rowOf(view, record, this.page.head(record), token)).subarray(0, rows * columns);
    const signed = values.some((value) => value < 0);
    const range = rangeOf(values, signed, record.how === "sampled");
    this.image.over(context, view, { values: layout.grid.length ? values : null, layout, signed }, range, factor, false);
  }
}
