// Images as thumbnails, close to each other if their codes are: the class token after the last layer, or the mean of the patches.

import { element, ink, plain, sized } from "../dom.js";

const MOST = 560;

export class Thumbs {
  constructor(app) {
    this.app = app;
    this.title = element("p", { class: "shown" });
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "Images by their codes. A click chooses one, arrow keys the next one.",
      onclick: (event) => this.#click(event),
      onpointermove: (event) => this.#move(event),
      onkeydown: (event) => this.#key(event),
    });
    this.reading = element("p", { class: "reading" });
    this.root = element("div", { class: "thumbs" }, this.title, this.canvas, this.reading);
  }

  get codes() {
    const { space, layer } = this.app;
    return space.blocks[layer.block].codes;
  }

  draw() {
    const { app, codes } = this;
    const { space, layer } = app;
    this.side = Math.max(200, Math.min(this.root.clientWidth, MOST));
    this.thumb = Math.max(18, Math.min(64, (this.side * 0.9) / Math.sqrt(codes.length || 1)));
    const context = sized(this.canvas, this.side, codes.length ? this.side : 1);
    this.title.textContent = codes.length ? plain(`${codes.length} ${codes.length === 1 ? "image" : "images"} of ${space.blocks[layer.block].model}, by their class token or the mean of their patches`) : "The tokens after the last layer are not known, so images have no codes.";
    codes.forEach((code, i) => {
      const picture = space.pictures[layer.block][i];
      if (!picture.complete) picture.onload = () => app.later("panel");
      if (!picture.naturalWidth) return;
      const [x, y] = this.#place(code);
      const [wide, high] = this.#size(picture);
      context.drawImage(picture, x - wide / 2, y - high / 2, wide, high);
      if (i !== app.image) return;
      context.strokeStyle = ink("--focus");
      context.lineWidth = 3;
      context.strokeRect(x - wide / 2, y - high / 2, wide, high);
    });
  }

  #place([x, y]) {
    const room = this.side - this.thumb;
    return [this.thumb / 2 + x * room, this.thumb / 2 + (1 - y) * room];
  }

  #size(picture) {
    const scale = this.thumb / Math.max(picture.naturalWidth, picture.naturalHeight);
    return [picture.naturalWidth * scale, picture.naturalHeight * scale];
  }

  // The image under the pointer; the last one that was drawn lies above.
  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const within = (code) => this.#place(code).every((at, axis) => Math.abs(at - [x, y][axis]) < this.thumb / 2);
    return this.codes.findLastIndex(within);
  }

  #move(event) {
    const found = this.#at(event);
    this.reading.textContent = found < 0 ? "" : plain(this.app.space.images[found].name, 120);
  }

  #click(event) {
    const found = this.#at(event);
    if (found >= 0) this.app.chooseImage(found);
  }

  #key(event) {
    const { app } = this;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !this.codes.length) return;
    event.preventDefault();
    app.chooseImage((app.image + step + this.codes.length) % this.codes.length);
  }
}
