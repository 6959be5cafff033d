/** The five sliders. Their ranges come from the API's own schema. */

import { el } from "./dom.js";
import { shown } from "./strip.js";

const TEXTS = {
  kv_budget: ["KV cache", "Memory for running requests. More: fewer preemptions, but closer to the memory limit."],
  batch_size: ["Batch size", "Most requests running at once on a GPU. More: higher throughput. Too many: slow tokens, full memory."],
  spec_length: ["Speculation", "Draft tokens per verification. Faster at low load, wasted work at high load."],
  quant_tier: ["Precision", "INT8 and INT4 are faster and smaller; changing restarts the GPUs one by one."],
  prefill_disagg: ["Separate prefill", "Prompts on separate GPUs: decoding does not stall, but it costs more."],
};
const BATCHES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512];

/** The positions of a slider: every value that it may take. */
function positions(name, schema) {
  if (schema.enum) return schema.enum;
  if (name === "prefill_disagg") return [false, true];
  if (name === "quant_tier") return schema.anyOf[0].enum;
  if (name === "batch_size") return BATCHES.filter((v) => v >= schema.minimum && v <= schema.maximum);
  const steps = Math.round((schema.maximum - schema.minimum) / 0.05);
  return Array.from({ length: steps + 1 }, (_, i) => Math.round(1000 * (schema.minimum + 0.05 * i)) / 1000);
}

const nearest = (list, value) => list.reduce((best, v, i) => (Math.abs(Number(v) - Number(value)) < Math.abs(Number(list[best]) - Number(value)) ? i : best), 0);

export class Knobs {
  /** `properties` is the action schema of GET /info. */
  constructor(properties) {
    this.knobs = {};
    this.node = el("div", { class: "knobs", role: "group", "aria-label": "Your five knobs" });
    for (const [name, [title, hint]] of Object.entries(TEXTS)) {
      const list = positions(name, properties[name]);
      const slider = el("input", { type: "range", id: `knob-${name}`, min: "0", max: String(list.length - 1), step: "1", "aria-describedby": `hint-${name}` });
      const output = el("output", { for: slider.id });
      const knob = { list, slider, output, value: properties[name].default, fallback: properties[name].default };
      slider.addEventListener("input", () => this.put(name, list[slider.valueAsNumber]));
      this.knobs[name] = knob;
      knob.box = el("div", { class: "knob" },
        el("div", { class: "knob-head" }, el("label", { for: slider.id, text: title }), output),
        slider, el("small", { id: `hint-${name}`, text: hint }));
      this.node.append(knob.box);
      this.put(name, knob.fallback);
    }
  }

  title(name) {
    return TEXTS[name][0];
  }

  put(name, value) {
    const knob = this.knobs[name];
    knob.value = value;
    knob.slider.value = String(nearest(knob.list, value));
    const text = shown(name, value);
    knob.output.textContent = text;
    knob.slider.setAttribute("aria-valuetext", text);
  }

  /** The action as POST /step accepts it. */
  action() {
    return Object.fromEntries(Object.entries(this.knobs).map(([name, knob]) => [name, knob.value]));
  }

  set(action) {
    for (const [name, value] of Object.entries(action)) this.put(name, value);
  }

  reset() {
    for (const [name, knob] of Object.entries(this.knobs)) this.put(name, knob.fallback);
  }

  /** Enable the knobs that a task offers; the others keep their default and cannot be moved. */
  offer(active, enabled = true) {
    for (const [name, knob] of Object.entries(this.knobs)) {
      const on = active.includes(name);
      knob.slider.disabled = !on || !enabled;
      knob.box.classList.toggle("off", !on);
      knob.box.querySelector("small").textContent = on ? TEXTS[name][1] : "Fixed in this task.";
      if (!on) this.put(name, knob.fallback);
    }
  }
}
