/** The sliders: five, and a sixth in tasks that scale. Their ranges come from the API's own schema and the task. */

import { el, field, fill, select } from "./dom.js";
import { LEVELS, bare } from "./strip.js";

const TEXTS = {
  kv_budget: ["KV cache", "GPU memory for running requests. More: fewer are interrupted, but closer to the memory limit."],
  batch_size: ["Batch size", "Most requests running at once on a GPU. More: higher throughput. Too many: slow tokens, full memory."],
  spec_length: ["Speculation", "A small model drafts tokens for the LLM to check. Faster at low load, wasted work at high load."],
  quant_tier: ["Precision", "INT8 and INT4 are faster and smaller; changing restarts the GPUs one by one."],
  prefill_disagg: ["Separate prefill", "Prompts are read on GPUs of their own: answers do not stall, but it costs more."],
  replicas: ["Replicas", "A new one is paid from now and serves once it has loaded; a removed one finishes its requests."],
};
// Why to lower and why to raise a knob, in the order in which hints name them: what gains most in surges comes first.
const REASONS = {
  replicas: ["idle replicas cost too", "the load needs more, and a new one has to load first"],
  batch_size: ["fewer at once answer sooner", "fewer requests wait"],
  quant_tier: ["a smaller format gains nothing here", "INT8 is faster and takes less memory"],
  kv_budget: ["it leaves memory free", "fewer requests are interrupted"],
  spec_length: ["rejected drafts are wasted work", "accepted drafts save time and money"],
  prefill_disagg: ["shared GPUs cost less", "prompts no longer hold up the answers"],
};
const FAR = 0.04; // of a knob's range: less than a step of the KV cache

/** The task's knobs that are far from where `goal` has them: name, value to reach, and the way to move it and why as `text`. */
export function hints(action, goal, { max_replicas: most, ...task }) {
  const gap = (name) => LEVELS[name](Number(goal[name]), most) - LEVELS[name](Number(action[name]), most);
  const offered = knobsOf({ ...task, max_replicas: most });
  return Object.keys(REASONS).filter((name) => offered.includes(name) && Math.abs(gap(name)) > FAR)
    .map((name) => ({ name, value: goal[name], text: `Move ${TEXTS[name][0]} ${gap(name) > 0 ? "up" : "down"}: ${REASONS[name][Number(gap(name) > 0)]}.` }));
}

const BATCHES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512];

/** The knobs that a task offers, in the order of the sliders. */
export const knobsOf = ({ active_actions: active, max_replicas: most }) => Object.keys(TEXTS).filter((name) => (name === "replicas" ? most : active.includes(name)));

/** Title of a knob's slider. */
export const titleOf = (name) => TEXTS[name][0];

const counted = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);

/** The positions of a slider: every value that it may take. */
function positions(name, schema) {
  if (name === "replicas") return [1];
  if (schema.enum) return schema.enum;
  if (name === "prefill_disagg") return [false, true];
  if (name === "quant_tier") return schema.anyOf[0].enum;
  if (name === "batch_size") return BATCHES.filter((v) => v >= schema.minimum && v <= schema.maximum);
  const steps = Math.round((schema.maximum - schema.minimum) / 0.05);
  return Array.from({ length: steps + 1 }, (_, i) => Math.round(1000 * (schema.minimum + 0.05 * i)) / 1000);
}

const nearest = (list, value) => list.reduce((best, v, i) => (Math.abs(Number(v) - Number(value)) < Math.abs(Number(list[best]) - Number(value)) ? i : best), 0);

/** Form fields for a constant setting of the five knobs, for tables with the precisions that `offer` names. */
export class KnobFields {
  /** `properties` is the action schema of GET /info. */
  constructor(properties) {
    const { kv_budget: kv, batch_size: batch } = properties;
    const number = (schema, step, placeholder) => el("input", { type: "number", min: String(schema.minimum), max: String(schema.maximum), step, placeholder });
    this.kv = number(kv, "0.05", "vLLM's");
    this.batch = number(batch, "1", "vLLM's, 256");
    this.drafts = select(properties.spec_length.enum.map((k) => [k, k || "none"]), properties.spec_length.default);
    this.apart = select([[0, "shared GPUs"], [1, "separate GPUs"]], 0);
    this.precision = select([], 0);
    this.node = el("div", { class: "controls small" }, field("Fixed batch size", this.batch), field("KV cache (share)", this.kv),
      field("Draft tokens", this.drafts), field("Precision", this.precision), field("Prefill", this.apart));
  }

  /** Offer these precisions; the one chosen stays where it is among them. */
  offer(tiers) {
    const chosen = this.precision.value;
    fill(this.precision, ...tiers.map((name, i) => el("option", { value: String(i), text: name, selected: String(i) === chosen })));
  }

  /** The knobs that the visitor chose, as requests have them: undefined if none, and vLLM's defaults hold. */
  action() {
    const chosen = { kv_budget: this.kv, batch_size: this.batch, spec_length: this.drafts, prefill_disagg: this.apart, quant_tier: this.precision };
    const given = Object.entries(chosen).filter(([, { value, type }]) => value !== (type === "number" ? "" : "0")).map(([name, { value }]) => [name, name === "prefill_disagg" || Number(value)]);
    return given.length ? Object.fromEntries(given) : undefined;
  }
}

export class Knobs {
  /** `properties` is the action schema of GET /info. */
  constructor(properties) {
    this.knobs = {};
    this.tiers = properties.quant_tier.anyOf[1].enum;
    this.node = el("div", { class: "knobs", role: "group", "aria-label": "Your sliders" });
    for (const [name, [title, hint]] of Object.entries(TEXTS)) {
      const list = positions(name, properties[name]), fallback = properties[name].default ?? list[0];
      const slider = el("input", { type: "range", id: `knob-${name}`, min: "0", max: String(list.length - 1), step: "1", "aria-describedby": `hint-${name}` });
      const output = el("output", { for: slider.id });
      const mark = el("span", { role: "img", hidden: true }), knob = { list, slider, output, fallback, mark };
      slider.addEventListener("input", () => this.put(name, knob.list[slider.valueAsNumber]));
      this.knobs[name] = knob;
      knob.box = el("div", { class: "knob" },
        el("div", { class: "knob-head" }, el("label", { for: slider.id, text: title }), output),
        el("div", { class: "track" }, slider, mark), el("small", { id: `hint-${name}`, text: hint }));
      this.node.append(knob.box);
      this.put(name, knob.fallback);
    }
    this.node.prepend(this.knobs.replicas.box); // where a task scales it decides most
  }

  /** Frame the knob that a hint names, and no other. */
  point(name) {
    for (const [each, { box }] of Object.entries(this.knobs)) box.classList.toggle("hinted", each === name);
  }

  /** Mark where a player has the sliders; without an `action`, mark nothing. */
  mark(action, { label, colour } = {}) {
    for (const [name, { list, slider, mark }] of Object.entries(this.knobs)) {
      mark.hidden = !action || slider.disabled || !(name in action);
      if (mark.hidden) continue;
      mark.className = `mark ink-${colour}`;
      mark.style.setProperty("--at", nearest(list, action[name]) / (list.length - 1));
      mark.title = mark.ariaLabel = `${label}: ${bare(name, action[name], this.tiers)}`;
    }
  }

  put(name, value) {
    const knob = this.knobs[name];
    knob.value = value;
    knob.slider.value = String(nearest(knob.list, value));
    const text = bare(name, value, this.tiers);
    knob.output.textContent = text;
    knob.slider.setAttribute("aria-valuetext", text);
  }

  /** An action with each value where its slider can come nearest to it. */
  reach(action) {
    return Object.fromEntries(Object.entries(action).map(([name, value]) => [name, this.knobs[name].list[nearest(this.knobs[name].list, value)]]));
  }

  /** Actions with one slider at the next position, up or down. */
  beside() {
    return Object.entries(this.knobs).flatMap(([name, { list, value }]) => [-1, 1].map((step) => list[nearest(list, value) + step]).filter((next) => next !== undefined).map((next) => ({ ...this.action(), [name]: next })));
  }

  /** The action as POST /step accepts it; replicas only where the task scales. */
  action() {
    return Object.fromEntries(Object.entries(this.knobs).filter(([, { box }]) => !box.hidden).map(([name, knob]) => [name, knob.value]));
  }

  /** Give the sliders positions for the values of `action` too, so that each can come back to them. */
  hold(action) {
    for (const [name, value] of Object.entries(action)) {
      const { list, fallback } = this.knobs[name];
      if (!list.includes(value)) this.resize(name, [...list, value].sort((a, b) => a - b), fallback);
    }
  }

  /** Set the knobs that can be moved. */
  set(action) {
    for (const [name, value] of Object.entries(action)) if (!this.knobs[name].slider.disabled) this.put(name, value);
  }

  /** Start from the defaults; enable the knobs that a task offers: the others keep theirs and cannot be moved. */
  offer(task, tiers) {
    this.tiers = tiers;
    this.resize("quant_tier", tiers.map((_, i) => i), 0);
    this.resize("replicas", counted(1, task.max_replicas ?? 1), task.n_replicas);
    this.knobs.replicas.box.hidden = !task.max_replicas;
    const offered = knobsOf(task);
    for (const [name, knob] of Object.entries(this.knobs)) {
      const on = offered.includes(name);
      knob.slider.disabled = !on;
      knob.box.classList.toggle("off", !on);
      knob.box.querySelector("small").textContent = on ? TEXTS[name][1] : "Fixed in this task.";
      this.put(name, knob.fallback);
    }
  }

  /** Give a slider other positions, as a task or its card has them. */
  resize(name, list, fallback) {
    Object.assign(this.knobs[name], { list, fallback });
    this.knobs[name].slider.max = String(list.length - 1);
  }
}
