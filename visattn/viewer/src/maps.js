// Maps that Python computed, beside the raw attention, and the predicted classes.

import { drawComponents, drawOver, rangeOf } from "./colors.js";
import { element, plain, radioKey, sized } from "./dom.js";
import { ATTENTION, SIMILARITY } from "./page.js";
import { boxOnPhoto, shapeOf } from "./tokens.js";

const WIDTH = 150;

export class Maps {
  constructor(page, image) {
    this.page = page;
    this.image = image;
    this.list = element("div", { class: "maps", role: "radiogroup", "aria-label": "What the image shows" });
    this.classes = element("ol", { class: "classes", "aria-label": "Predicted classes" });
    this.root = element("div", {}, this.list, this.classes);
  }

  draw() {
    const { page } = this;
    const view = page.view;
    const names = [...(view.attention.length ? [ATTENTION] : []), ...(view.features ? [SIMILARITY] : []), ...view.maps.map((map) => map.name)];
    const held = this.list.contains(document.activeElement) ? names.indexOf(page.state.get("map")) : -1;
    this.list.replaceChildren(...names.map((name) => this.#entry(view, name)));
    if (held >= 0) this.list.children[held].focus();
    this.classes.replaceChildren(
      ...view.classes.map(([name, , share]) =>
        element(
          "li",
          {},
          element("span", { class: "class" }, plain(name, 80)),
          element("span", { class: "share" }, `${(100 * share).toFixed(1)} %`),
          element("meter", { min: 0, max: 1, value: share, "aria-label": plain(`probability of ${name}`, 80) }),
        ),
      ),
    );
  }

  #entry(view, name) {
    const { page } = this;
    const chosen = page.state.get("map") === name;
    const canvas = element("canvas", { "aria-hidden": "true" });
    const map = view.maps.find((one) => one.name === name);
    const about = map ? [map.meaning === name ? "" : map.meaning, map.about].filter(Boolean).join(": ") : name === SIMILARITY ? "to the query's token" : "of the chosen head";
    const entry = element(
      "button",
      {
        role: "radio",
        "aria-checked": String(chosen),
        tabindex: chosen ? 0 : -1,
        onclick: () => page.state.set({ map: name }),
        onkeydown: radioKey,
      },
      canvas,
      element("span", { class: "name" }, plain(map ? name : name.slice(1), 60)),
      element("span", { class: "soft" }, plain(about, 80)),
    );
    this.#thumbnail(canvas, view, name, map);
    return entry;
  }

  #thumbnail(canvas, view, name, map) {
    const { page } = this;
    const [high, wide] = view.size;
    const factor = Math.min(WIDTH / wide, WIDTH / high);
    const [width, height] = [wide * factor, high * factor];
    const context = sized(canvas, width, height);
    const shown = page.shown(page.first, name);
    if (!shown.values) {
      this.image.paint(context, view, width, height, false);
      return;
    }
    const colored = map && map.colored;
    const shape = shapeOf(shown.layout);
    const values = colored ? shown.values : shown.values.subarray(0, shape.rows * shape.columns);
    const range = colored ? null : rangeOf(values, shown.signed);
    this.image.paint(context, view, width, height, page.grayBelow(range));
    const [top, left, bottom, right] = boxOnPhoto(view, shown.layout).map((side) => side * factor);
    const area = [left, top, right - left, bottom - top];
    if (colored) drawComponents(context, values, shape, 0.8, area, false);
    else drawOver(context, values, shape, range, page.table(shown.signed), page.alpha, area, false);
  }
}
