/** Strip chart of knob settings: one lane per knob, one column per second; stronger colour is a higher setting. */

import { colour } from "./charts.js";
import { el } from "./dom.js";
import { changes } from "./format.js";

const LANE = 12; // as high as its title
const GAP = 2;

/** Position of a knob's value within its range, 0 to 1. */
export const LEVELS = {
  kv_budget: (v) => (v - 0.1) / 0.9,
  spec_length: (v) => Math.log2(1 + v) / Math.log2(9),
  batch_size: (v) => Math.log2(v) / 9,
  prefill_disagg: (v) => Number(v),
  quant_tier: (v) => v / 2,
  replicas: (v, most) => v / most,
};

export class Strip {
  /** `titled` are names of knobs with their titles, `tiers` the precisions' names, `mostReplicas` the largest fleet of a task that scales. */
  constructor(label, ink, titled, length, tiers, mostReplicas) {
    Object.assign(this, { label, ink, lanes: titled.map(([name]) => name), length, tiers, mostReplicas });
    this.canvas = el("canvas", { role: "img" });
    this.now = el("span", { class: "readout" });
    this.node = el("div", { class: "strip" },
      el("div", { class: "strip-head" }, el("span", { class: `chip ink-${ink}`, text: label }), this.now),
      el("div", { class: "lanes" }, el("div", { "aria-hidden": "true" }, ...titled.map(([, title]) => el("span", { text: title }))), this.canvas));
    this.columns = null;
    this.until = 0;
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.tell(Math.floor(event.offsetX / this.canvas.clientWidth * this.length)));
    this.canvas.addEventListener("pointerleave", () => this.tell(this.until - 1));
  }

  /** Set the columns of knob values (name -> array) and how many seconds of them to show. */
  set(columns, until) {
    this.columns = columns;
    this.until = until;
    this.draw();
    this.tell(until - 1);
    this.canvas.setAttribute("aria-label", this.describe());
  }

  draw() {
    const ratio = devicePixelRatio, width = this.canvas.clientWidth, height = this.lanes.length * (LANE + GAP);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.max(1, width * ratio);
    this.canvas.height = height * ratio;
    const ctx = this.canvas.getContext("2d"), step = this.canvas.width / this.length;
    ctx.fillStyle = colour("grid");
    this.lanes.forEach((_, lane) => ctx.fillRect(0, lane * (LANE + GAP) * ratio, this.canvas.width, LANE * ratio));
    if (!this.columns) return;
    ctx.fillStyle = colour(this.ink);
    this.lanes.forEach((name, lane) => {
      for (let i = 0; i < this.until; i++) {
        ctx.globalAlpha = 0.1 + 0.9 * LEVELS[name](this.columns[name][i], this.mostReplicas);
        const from = Math.round(i * step);
        ctx.fillRect(from, lane * (LANE + GAP) * ratio, Math.round((i + 1) * step) - from, LANE * ratio);
      }
    });
  }

  tell(step) {
    if (!this.columns || step < 0 || step >= this.until) { this.now.textContent = ""; return; }
    this.now.textContent = `In second ${step + 1}: ${this.lanes.map((name) => shown(name, this.columns[name][step], this.tiers)).join(" · ")}`;
  }

  describe() {
    const parts = this.lanes.map((name) => {
      const values = this.columns[name].slice(0, this.until);
      return values.length ? `${shown(name, values.at(-1), this.tiers)}, ${changes(values)} changes` : "nothing yet";
    });
    return `Decisions of ${this.label} after ${this.until} seconds: ${parts.join("; ")}`;
  }
}

/** A knob's value after its slider's name: "512" for Batch size. */
export const bare = (name, value, tiers) => shown(name, value, tiers).replace(/^(KV|batch|speculate) | speculation$| replicas?$/, "").replace(/^no$/, "none").replace(/^separate prefill$/, "separate GPUs");

/** A knob's value in words; `tiers` are the names of the precisions. */
export function shown(name, value, tiers) {
  switch (name) {
    case "kv_budget": return `KV ${Math.round(100 * value)}%`;
    case "spec_length": return value ? `speculate ${value}` : "no speculation";
    case "batch_size": return `batch ${value}`;
    case "prefill_disagg": return Number(value) ? "separate prefill" : "shared GPUs";
    case "replicas": return `${value} ${value === 1 ? "replica" : "replicas"}`;
    default: return tiers[value];
  }
}
