// Maps that Python computed, beside the raw attention, and the predicted classes.

import { rangeOf } from "./colors.js";
import { element, plain, radioKey, sized } from "./dom.js";
import { ATTENTION, SIMILARITY } from "./page.js";

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
        onkeydown: (event) => radioKey(event),
      },
      canvas,
      element("span", { class: "name" }, plain(map ? name : name.slice(1), 60)),
      element("span", { class: "soft" }, plain(about, 80)),
    );
    this.#thumbnail(canvas, view, name);
    return entry;
  }

  #thumbnail(canvas, view, name) {
    const { page } = this;
    const [high, wide] = view.size;
    const factor = Math.min(WIDTH / wide, WIDTH / high);
    const context = sized(canvas, wide * factor, high * factor);
    const shown = page.shown(page.first, name);
    const range = shown.values && !shown.colored ? rangeOf(shown.values, shown.signed, shown.pixelwise) : null;
    this.image.over(context, view, shown, range, factor, false);
  }
}
