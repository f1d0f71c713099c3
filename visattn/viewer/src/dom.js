// Elements. Texts of the study become text nodes, never markup.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

// A text without control characters and marks that change its direction, cut to a length.
export function plain(text, most = 120) {
  const clean = String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
  return clean.length > most ? `${clean.slice(0, most - 1)}…` : clean;
}

let count = 0;

// A labeled select whose options are pairs of a value and a text.
export function choice(label, options, value, change) {
  const id = `choice${count++}`;
  const select = element(
    "select",
    { id, onchange: () => change(select.value) },
    ...options.map(([key, text]) => element("option", { value: key }, plain(text, 60))),
  );
  select.value = value;
  return element("span", { class: "field" }, element("label", { for: id }, label), select);
}

export function slider(label, [low, high, step], value, change) {
  const id = `slider${count++}`;
  const input = element("input", { id, type: "range", min: low, max: high, step, oninput: () => change(Number(input.value)) });
  input.value = value;
  return element("span", { class: "field" }, element("label", { for: id }, label), input);
}

export function check(label, value, change) {
  const id = `check${count++}`;
  const input = element("input", { id, type: "checkbox", onchange: () => change(input.checked) });
  input.checked = value;
  return element("span", { class: "field" }, input, element("label", { for: id }, label));
}

// Sets a control of `slider` or `check` to a value.
export function put(field, value) {
  const input = field.querySelector("input");
  if (input.type === "checkbox") input.checked = value;
  else input.value = value;
}

// Draws the inside of an element anew. The control that had the focus has it again, or if it is gone, the first one.
export function redrawn(root, draw) {
  const held = root.contains(document.activeElement) ? document.activeElement : null;
  draw();
  if (!held || held.isConnected) return;
  const name = (control) => control.getAttribute("aria-label") || control.parentElement.textContent;
  const controls = [...root.querySelectorAll("button, input, select")];
  const again = controls.find((control) => name(control) === name(held)) || controls[0];
  if (again) again.focus({ preventScroll: true });
}

// Arrow keys choose the next or the last of some radio buttons, which are neighbors unless they are given.
export function radioKey(event, entries = [...event.currentTarget.parentElement.children]) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = entries[(entries.indexOf(event.currentTarget) + step + entries.length) % entries.length];
  next.focus();
  next.click();
}

// A canvas whose pixels are those of the screen.
export function sized(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// A color of the style sheet, for canvases.
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
