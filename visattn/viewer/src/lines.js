// Tokens left and right, and lines between them: queries and the keys they attend to, after BertViz (Vig, 2019).

import { check, element, ink, put, sized } from "./dom.js";
import { nameOf } from "./tokens.js";

const HEIGHT = 560;
const SIDE = 110;
const LEGEND = 14; // height
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999"]; // Okabe and Ito, 2008

export class Lines {
  constructor(page) {
    this.page = page;
    this.all = check("all queries, their strongest key each", false, (allQueries) => page.state.set({ allQueries }));
    this.heads = check("all heads, a color each", false, (allHeads) => page.state.set({ allHeads }));
    this.canvas = element("canvas", { role: "img", "aria-label": "Lines from queries to their strongest keys; Keys lists them with values" });
    this.root = element(
      "div",
      {},
      this.all,
      " ",
      this.heads,
      this.canvas,
    );
  }

  draw() {
    const { page } = this;
    const view = page.view;
    const [every, colored] = [page.state.get("allQueries"), page.state.get("allHeads") && !page.state.get("allQueries")];
    put(this.all, every);
    put(this.heads, colored);
    this.heads.querySelector("input").disabled = every;
    const width = Math.max(this.root.clientWidth, 240);
    const context = sized(this.canvas, width, HEIGHT);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = ink("--text");
    const record = page.record(view);
    if (!record) {
      context.fillText("This view has no attention.", 8, 20);
      return;
    }
    const head = page.head(record);
    const token = page.token(view, record.queryLayout);
    const top = colored ? LEGEND : 0;
    const y = (index, count) => top + 14 + ((index + 0.5) / count) * (HEIGHT - top - 24);
    const [left, right] = [SIDE, width - SIDE];
    const line = (from, to, share) => {
      context.globalAlpha = Math.max(0.05, Math.min(1, share));
      context.beginPath();
      context.moveTo(left, y(from, record.rowsCount));
      context.lineTo(right, y(to, record.keysCount));
      context.stroke();
    };
    context.strokeStyle = ink("--bar");
    context.lineWidth = 1.5;
    this.drawn = [];
    if (every) {
      for (let query = 0; query < record.rowsCount; query++) {
        const row = page.rowOf(view, record, head, query);
        const key = row.indexOf(Math.max(...row));
        line(query, key, row[key]);
        this.drawn.push([query, key]);
      }
    } else if (token >= 0) {
      const heads = colored ? Array.from({ length: record.heads }, (_, number) => number) : [head];
      for (const one of heads) {
        if (colored) context.strokeStyle = COLORS[one % COLORS.length];
        const row = page.row(view, record, one);
        const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a]).slice(0, page.state.get("top"));
        for (const key of [...order].reverse()) {
          line(token, key, row[key] / (row[order[0]] || 1));
          this.drawn.push([token, key, one]);
        }
      }
    }
    context.globalAlpha = 1;
    if (colored) this.#legend(context, record);
    this.#names(context, view, record.queryLayout, record.rowsCount, y, left - 6, "right", new Set(this.drawn.map(([query]) => query)));
    this.#names(context, view, record.keyLayout, record.keysCount, y, right + 6, "left", new Set(this.drawn.map(([, key]) => key)));
  }

  // The color of each head.
  #legend(context, record) {
    let x = SIDE;
    record.numbers.forEach((number, one) => {
      context.fillStyle = COLORS[one % COLORS.length];
      context.fillRect(x, 4, 9, 9);
      context.fillStyle = ink("--text");
      context.fillText(String(number), x + 12, 12);
      x += 20 + context.measureText(String(number)).width;
    });
  }

  // Writes as many names as fit; those with a line come first.
  #names(context, view, layout, count, y, x, align, wanted) {
    context.textAlign = align;
    const taken = [];
    const free = (at) => taken.every((other) => Math.abs(other - at) >= 11);
    const order = [...wanted, ...layout.prefix.keys(), ...Array.from({ length: count }, (_, i) => i)];
    for (const token of order) {
      const at = y(token, count);
      if (!free(at)) continue;
      taken.push(at);
      context.fillStyle = wanted.has(token) ? ink("--text") : ink("--soft");
      context.fillText(nameOf(view, layout, token).slice(0, 18), x, at + 4);
    }
    context.textAlign = "left";
  }
}
