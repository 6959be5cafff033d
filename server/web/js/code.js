/** Code tab: examples to copy; each is a file that the tests run unchanged. */

import { baseUrl, own } from "./api.js";
import { copy, el, fill } from "./dom.js";

const PLACEHOLDER = "http://localhost:7860";

export async function start(panel) {
  const pieces = await own("snippets/index.json");
  const texts = await Promise.all(pieces.map(({ file }) => fetch(`snippets/${file}`).then((answer) => answer.text())));
  const url = baseUrl();
  fill(panel,
    el("h2", { text: "From your own code" }),
    el("p", { text: `This server: ${url}. The tests of this version run every example below unchanged.` }),
    ...pieces.map((piece, i) => show(piece, texts[i].replaceAll(PLACEHOLDER, url).trimEnd())));
  return {};
}

function show({ title, about, file }, text) {
  const button = el("button", { type: "button", class: "quiet", text: "Copy", "aria-label": `Copy: ${title}` });
  button.addEventListener("click", () => copy(text, button));
  return el("article", {},
    el("div", { class: "buttons" }, el("h3", { text: title }), button),
    el("p", { class: "note", text: about }),
    el("pre", { tabindex: "0", role: "region", "aria-label": title, "data-file": file }, el("code", { text })));
}
