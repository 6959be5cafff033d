/** A text box into which a file can be dropped, chosen or pasted. */

import { el, field } from "./dom.js";

export class DropBox {
  /** `onText(text, name)` is called with the whole text whenever it changes. */
  constructor({ label, hint, placeholder, accept, rows = 9, limitBytes, onText, onProblem }) {
    Object.assign(this, { limitBytes, onText, onProblem });
    this.area = el("textarea", { rows, placeholder, spellcheck: "false", on: { input: () => onText(this.area.value, "") } });
    const file = el("input", { type: "file", accept, class: "unseen", on: { change: () => this.take(file.files[0]) } });
    const choose = el("button", { type: "button", text: "Choose a file", on: { click: () => file.click() } });
    file.setAttribute("aria-label", `${label}: choose a file`);
    file.tabIndex = -1;
    this.node = el("div", { class: "drop" }, field(label, this.area, hint), el("div", { class: "buttons" }, choose, file, el("span", { class: "note", text: "or drop it here" })));
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
    if (file.size > this.limitBytes) {
      this.onProblem({ message: `${file.name} has ${file.size} bytes; the limit is ${this.limitBytes}`, next: "send a part of it" });
      return;
    }
    this.put(await file.text(), file.name);
  }

  put(text, name = "") {
    this.area.value = text;
    this.onText(text, name);
  }
}
