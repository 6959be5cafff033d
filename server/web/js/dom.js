/** Small helpers to build and find elements. */

/** An element with properties (`class`, `text`, `on` = listeners, anything else an attribute) and children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

let lastId = 0;

/** A labelled form field: the label's text, the control, and an optional hint below it. */
export function field(label, control, hint) {
  control.id ||= `field-${++lastId}`;
  const parts = [el("label", { for: control.id, text: label }), control];
  if (hint) {
    const note = el("small", { id: `${control.id}-hint`, text: hint });
    control.setAttribute("aria-describedby", note.id);
    parts.push(note);
  }
  return el("div", { class: "field" }, ...parts);
}

/** A select over [value, text] pairs, or over [name of a group, its pairs]. */
export function select(pairs, chosen, onChange) {
  const option = ([value, text]) => (Array.isArray(text) ? el("optgroup", { label: value }, ...text.map(option)) : el("option", { value: String(value), text, selected: String(value) === String(chosen) }));
  const options = pairs.map(option);
  return el("select", { on: { change: (event) => onChange?.(event.target.value) } }, ...options);
}

/** A table of text: `head` are column titles, `rows` arrays of text, numbers or nodes. */
export function table(caption, head, rows) {
  const cell = (value, index) => {
    const node = el(index === 0 ? "th" : "td", index === 0 ? { scope: "row" } : { "data-head": head[index] });
    node.append(value instanceof Node ? value : String(value));
    return node;
  };
  return scrolling(caption, el("table", {},
    el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))))));
}

/** A table in a box of its own that scrolls sideways, with a line that says so while columns are out of sight. */
export function scrolling(label, content) {
  const box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
  const hint = el("small", { class: "scroll-hint", hidden: true, text: "More columns to the right: scroll the table sideways →" });
  new ResizeObserver(() => { hint.hidden = box.scrollWidth <= box.clientWidth + 1; }).observe(box);
  return el("div", {}, hint, box);
}

/** Announce a text to screen readers, through a polite live region. */
export function announce(text) {
  let region = document.getElementById("announcer");
  if (!region) {
    region = el("div", { id: "announcer", class: "unseen", "aria-live": "polite" });
    document.body.append(region);
  }
  region.textContent = text;
}

/** Replace the children of an element. */
export function fill(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An alert with an error's message and what to do next. */
export function problem(error) {
  const next = error.next ? ` What to do: ${error.next}.` : "";
  return el("p", { class: "problem", role: "alert", text: `${error.message}.${next}`.replace("..", ".") });
}

/** The first number of a form that its field does not allow, as an error in the field's own words; undefined if all are. */
export function wrongNumber(node) {
  for (const input of node.querySelectorAll("input[type=number]")) {
    const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = input.validity, whole = input.step === "1";
    if (!(badInput || rangeUnderflow || rangeOverflow || (whole && stepMismatch))) continue;
    const from = input.max ? `from ${input.min} to ${input.max}` : `of at least ${input.min}`;
    return { field: input, message: `${input.labels[0]?.textContent ?? input.ariaLabel}: ${badInput ? "this is not a number" : `${input.value} is not allowed`}`, next: `enter a ${whole ? "whole " : ""}number ${from}` };
  }
  return undefined;
}

/** Copy text to the clipboard; in a frame without that permission, select it so that the visitor can copy it. */
export async function copy(text, button) {
  const said = button.dataset.said ??= button.textContent; // a second click finds "Copied"
  button.style.minWidth = `${button.offsetWidth}px`; // its neighbours stay where they are
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const box = el("textarea", { class: "unseen", "aria-label": "Text to copy" });
    box.value = text;
    document.body.append(box);
    box.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    box.remove();
  }
  setTimeout(() => { button.textContent = said; }, 5000);
}

/** A button that copies a message to a friend, and the place where the message is shown, with squares that need no font of emoji. */
export function challenge(message) {
  const button = el("button", { type: "button", text: "Challenge a friend" }), parts = message.split(/(🟩|🟥)/u), square = (text) => el("i", { class: `square ${text === "🟩" ? "good" : "bad"}` });
  const copied = el("small", { class: "copied", hidden: true }, ...parts.map((text) => (/🟩|🟥/u.test(text) ? square(text) : text)));
  button.addEventListener("click", () => {
    copied.hidden = false;
    copy(message, button);
  });
  return [button, copied];
}

/** Offer a file for download. */
export function download(name, text, type = "application/json") {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
