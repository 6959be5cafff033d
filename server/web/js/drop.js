/** A text box into which a file can be dropped, chosen or pasted. */

import { el, field } from "./dom.js";

export class DropBox {
  /** `onText(text, name)` is called with the whole text whenever it changes. */
  constructor({ label, hint, placeholder, accept, rows = 9, limitBytes, onText, onProblem }) {
    Object.assign(this, { limitBytes, onText, onProblem });
    this.from = el("span", { class: "note", text: "or drop it here" });
    this.area = el("textarea", { rows, placeholder, spellcheck: "false", on: { input: () => onText(this.area.value, "") } });
    const file = el("input", { type: "file", accept, class: "unseen" });
    file.addEventListener("change", () => {
      this.take(file.files[0]);
      file.value = ""; // else the same file, corrected, could not be chosen again
    });
    const choose = el("button", { type: "button", text: "Choose a file", on: { click: () => file.click() } });
    file.setAttribute("aria-label", `${label}: choose a file`);
    file.tabIndex = -1;
    this.node = el("div", { class: "drop" }, field(label, this.area, hint), el("div", { class: "buttons" }, choose, file, this.from));
    this.node.addEventListener("dragover", (event) => { event.preventDefault(); this.node.classList.add("over"); });
    this.node.addEventListener("dragleave", () => this.node.classList.remove("over"));
    this.node.addEventListener("drop", (event) => {
      event.preventDefault();
      this.node.classList.remove("over");
      if (event.dataTransfer.files.length) this.take(event.dataTransfer.files[0]);
      else this.put(event.dataTransfer.getData("text"));
    });
  }

  async take(file) {
    if (!file) return;
    try {
      this.put(...await textOf(file, this.limitBytes));
    } catch (error) {
      this.put(""); // what was in the box is another log
      this.refused = error;
      this.from.textContent = `${file.name} was refused`;
      this.onProblem(error);
    }
  }

  put(text, name = "") {
    this.refused = undefined;
    this.area.value = text;
    this.area.removeAttribute("aria-invalid");
    this.from.textContent = name || "or drop it here";
    this.node.closest("[role=tabpanel]")?.querySelector(".problem")?.remove(); // it was about another text
    this.onText(text, name);
  }
}

/** Text and name of a file; one that ends with .gz is decompressed. */
async function textOf(file, limitBytes) {
  const tooLong = (what) => ({ message: `${what}; the limit is ${limitBytes} bytes`, next: "take a part of it" });
  if (file.size === 0) throw { message: `${file.name} is empty`, next: "choose a file with requests" };
  if (file.size > limitBytes) throw tooLong(`${file.name} has ${file.size} bytes`);
  const text = async (blob) => {
    const read = await blob.text();
    if (read.includes("\0")) throw { message: `${file.name} is not text`, next: "choose a file of text, such as CSV or JSON" };
    return read;
  };
  if (!/\.gz$/i.test(file.name)) return [await text(file), file.name];
  const parts = [];
  let bytes = 0;
  try {
    for (const reader = file.stream().pipeThrough(new DecompressionStream("gzip")).getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      bytes += value.length;
      if (bytes > limitBytes) break;
    }
  } catch {
    throw { message: `${file.name} is not a complete gzip file`, next: "compress it again, or choose the file as it is" };
  }
  if (bytes > limitBytes) throw tooLong(`${file.name} is longer when decompressed`);
  return [await text(new Blob(parts)), file.name.replace(/\.gz$/i, "")];
}
