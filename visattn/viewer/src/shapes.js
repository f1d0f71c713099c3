// Checks of JSON from a file: a shape is a type, an object of shapes (`name?` may be missing), `[shape]` for a list, a tuple
// `{ tuple: [...] }`, `{ any: shape }` for an object with any names, or `{ maybe: shape }`. The rules are those of `_support/json_files.py`.

const SIDE = 2 ** 20;
const LARGEST = 1e30;

export function check(value, shape, name) {
  const fail = (said) => {
    throw new Error(`${name} ${said}`);
  };
  if (shape === "text") return typeof value === "string" || fail("must be a text");
  if (shape === "whole") return (Number.isInteger(value) && Math.abs(value) <= SIDE) || fail("must be a whole number");
  if (shape === "number") return (typeof value === "number" && Math.abs(value) < LARGEST) || fail("must be a finite number");
  if (shape === "flag") return typeof value === "boolean" || fail("must be true or false");
  if (shape === "object") return (value !== null && typeof value === "object" && !Array.isArray(value)) || fail("must be an object");
  if (Array.isArray(shape)) {
    if (!Array.isArray(value)) fail("must be a list");
    value.forEach((item) => check(item, shape[0], name));
  } else if (shape.tuple) {
    if (!Array.isArray(value) || value.length !== shape.tuple.length) fail(`must be a list of ${shape.tuple.length}`);
    value.forEach((item, i) => check(item, shape.tuple[i], name));
  } else if ("maybe" in shape) {
    if (value !== null) check(value, shape.maybe, name);
  } else {
    check(value, "object", name);
    if (shape.any) return Object.entries(value).forEach(([key, item]) => check(item, shape.any, key));
    for (const [key, inner] of Object.entries(shape)) {
      const plain = key.replace(/\?$/, "");
      if (Object.hasOwn(value, plain)) check(value[plain], inner, plain);
      else if (plain === key) fail(`must have '${key}'`);
    }
  }
  return true;
}

const box = { tuple: ["number", "number", "number", "number"] };
const LAYOUT = { space: "text", prefix: ["text"], grid: ["whole"], box, "holes?": ["whole"] };
const SCORE = {
  class: "whole",
  name: { maybe: "text" },
  "versus?": { maybe: "whole" },
  "score?": "number",
  "probability?": "number",
  "predicted?": "whole",
  "predicted_probability?": "number",
};
const PROVENANCE = {
  "model?": "text",
  "weights?": "text",
  "random?": "flag",
  "image?": { maybe: "text" },
  "geometry?": { maybe: "object" },
  "scores?": [SCORE],
  "warnings?": ["text"],
  "notes?": ["text"],
};
const KNOWN = ["model", "weights", "weights_sha256", "random", "image", "image_sha256", "geometry", "preprocessing", "method", "parameters", "target", "scores", "normalization", "value_range", "drawing", "sinks", "notes", "warnings", "versions"];
const OPERATOR = {
  kind: "text",
  "scale?": "number",
  "keys?": "whole",
  ...Object.fromEntries(["query", "key", "bias", "weights", "cells", "shares", "query_index", "key_index"].map((name) => [`${name}?`, "text"])),
};
const VIEW = {
  photo: "text",
  geometry: { photo: { tuple: ["whole", "whole"] }, input: { tuple: ["whole", "whole"] }, window: box, rule: "text" },
  provenance: PROVENANCE,
  layouts: [LAYOUT],
  records: [{ layer: "text", "call?": "whole", kind: "text", queries: "whole", keys: "whole", operator: OPERATOR, "reason?": { maybe: "text" } }],
  "readout?": "text",
  "features?": [{ layer: "text", role: "text", value: "text", "layout?": { maybe: "whole" } }],
  "unseen?": [{ tuple: ["text", "text"] }],
  "maps?": { any: { axes: ["text"], layout: LAYOUT, labels: { any: ["text"] }, meaning: "text", "signed?": "flag", provenance: PROVENANCE, values: "text" } },
  "classes?": [{ class: "whole", "name?": { maybe: "text" }, probability: "number" }],
  "texts?": { any: "text" },
  "importance?": { maybe: { target: "text", heads: [["number"]] } },
  "contributions?": {
    maybe: { target: "text", score: "number", layers: [{ layer: "text", layout: "whole", values: "text", bias: "number" }], rest: [{ tuple: ["text", "number"] }] },
  },
  "name?": "text",
};
const KINDS = ["self", "cross", "pool", "sampled", "channel", "unplaced"];
const ROLES = ["activation", "tokens", "channel_gate", "spatial_gate", "gate", "branch_gate", "transform", "glimpse", "mix"];
const MOST_CELLS = 2 ** 25;

function need(right, said) {
  if (!right) throw new Error(said);
}

function checkBox([top, left, bottom, right], name) {
  need([bottom - top, right - left].every((side) => side >= 1e-3 && side <= SIDE), `${name} must have sides of 0.001 to ${SIDE} pixels`);
}

function checkLayout(layout, places) {
  const { grid, holes = [] } = layout;
  const cells = grid.reduce((a, b) => a * b, 1);
  need(places.includes(grid.length) && grid.every((side) => side >= 1) && cells <= MOST_CELLS, "a grid must be empty, (rows, columns) or (frames, rows, columns)");
  if (grid.length) checkBox(layout.box, "the box of a grid");
  need(holes.every((hole, i) => hole >= 0 && hole < cells && (i === 0 || hole > holes[i - 1])), "holes must be cells of the grid, in ascending order");
}

function checkProvenance(provenance) {
  const strange = Object.keys(provenance).find((name) => !KNOWN.includes(name));
  need(strange === undefined, `provenance has the unknown field '${strange}'`);
  if (provenance.geometry) checkBox(provenance.geometry.window ?? [0, 0, 0, 0], "its window");
}

// Checks the JSON of a study; throws the first fault.
export function checkStudy(facts) {
  check(facts, { views: [VIEW] }, "the study");
  need(facts.views.length >= 1 && facts.views.length <= 1000, `a study must have 1 to 1000 views, got ${facts.views.length}`);
  for (const view of facts.views) {
    need([...view.geometry.photo, ...view.geometry.input].every((side) => side >= 1), "sides of photo and input must be positive");
    checkBox(view.geometry.window, "the window");
    checkProvenance(view.provenance);
    view.layouts.forEach((layout) => checkLayout(layout, [0, 2, 3]));
    const numbered = (number) => need(number >= 0 && number < view.layouts.length, `a layout must be one of ${view.layouts.length}, got ${number}`);
    for (const record of view.records) {
      need(KINDS.includes(record.kind), `kind must be one of ${KINDS.join(", ")}`);
      [record.queries, record.keys].forEach(numbered);
    }
    for (const feature of view.features ?? []) {
      need(ROLES.includes(feature.role), `role must be one of ${ROLES.join(", ")}`);
      if (feature.layout !== null && feature.layout !== undefined) numbered(feature.layout);
    }
    for (const map of Object.values(view.maps ?? {})) {
      checkLayout(map.layout, [2]);
      checkProvenance(map.provenance);
    }
    (view.contributions?.layers ?? []).forEach((layer) => numbered(layer.layout));
    const importance = view.importance?.heads;
    need(!importance || importance.length === view.records.length, `importance must be given for ${view.records.length} records`);
    need((view.classes ?? []).every((one) => one.probability >= 0 && one.probability <= 1), "probabilities must lie in [0, 1]");
  }
}
