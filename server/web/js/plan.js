/** Plan tab: the GPUs and settings that serve a visitor's request log within objectives. */

import { once, post } from "./api.js";
import { announce, el, field, fill, select, table, wrongNumber } from "./dom.js";
import { compact, percent } from "./format.js";
import { EngineSettings, LogBox, refusal } from "./request_log.js";

const SVG = "http://www.w3.org/2000/svg";
const HEAD = ["Hardware", "GPUs", "TP", "Setting", "Verdict", "In time", "TTFT p99 ms", "TPOT p50 ms", "Margin", "GPU h /M tokens"];

export async function start(panel) {
  const { models, hardware } = await once("info");
  const tab = new PlanTab(models, hardware);
  fill(panel, tab.node);
  return tab;
}

class PlanTab {
  constructor(models, hardware) {
    this.catalogue = hardware;
    this.box = new LogBox({
      label: "Request log to plan for (CSV or JSON)", example: "Load an example log", tell: (node) => this.tell(node),
      hint: "A table with arrival time, prompt tokens and output tokens under any usual names, or a published trace. The server does not keep it.",
    });
    this.ttft = el("input", { type: "number", min: "1", max: "999999", step: "1", value: "500" });
    this.tpot = el("input", { type: "number", min: "1", max: "999999", step: "1", value: "50" });
    this.model = select(models.map((name) => [name, name]), models[0], () => this.offer());
    this.cards = el("fieldset", { class: "legend" });
    this.precision = select([["", "any"], ["FP16,BF16", "16 bit only"]], "");
    this.drafts = select([["", "none"], ["yes", "allowed"]], "");
    this.prices = el("input", { type: "text", placeholder: "a100-40gb=1.20, h100_sxm=2.50" });
    this.currency = el("input", { type: "text", value: "USD", maxlength: "20" });
    this.button = el("button", { type: "button", class: "main", text: "Make a plan", on: { click: () => this.run() } });
    this.out = el("div", { "aria-live": "polite" });
    this.node = el("div", {},
      el("h2", { text: "Which GPUs, how many, which settings" }),
      el("p", { text: "Drop a request log and state objectives. The server searches cards, numbers of GPUs and hundreds of settings. It reports the cheapest plans, their results under more traffic, and whether adapting the settings pays. All results are simulated." }),
      el("div", { class: "columns narrow" },
        el("div", {}, this.box.node,
          el("div", { class: "buttons" }, this.button, this.box.example),
          el("div", { class: "controls small" }, field("Model", this.model), field("TTFT p99 (ms)", this.ttft), field("TPOT p50 (ms)", this.tpot), field("Precisions", this.precision), field("Draft tokens", this.drafts),
            ...this.box.fields, field("Price per GPU hour", this.prices, "Your price of each card; cards without a price are left out. If empty, plans are ordered by number of GPUs."), field("Currency", this.currency)),
          this.cards),
        this.out));
    this.offer();
  }

  /** List the cards that have tables of the model; all are searched unless some are left out. */
  offer() {
    const cards = new Set(Object.values(this.catalogue).filter(({ model }) => model === this.model.value).map(({ card }) => card));
    fill(this.cards, el("legend", { text: "Cards to search" }), ...[...cards].map((card) => el("label", { class: "chip plain" },
      el("input", { type: "checkbox", checked: true, value: card }), card)));
  }

  tell(...nodes) {
    fill(this.out, ...nodes);
  }

  /** Prices as the request has them; undefined where none are given. Throws an error in the words of the form. */
  priceList() {
    const parts = this.prices.value.split(",").map((part) => part.trim()).filter(Boolean);
    if (!parts.length) return undefined;
    const known = new Set(Object.values(this.catalogue).map(({ card }) => card));
    const pairs = parts.map((part) => {
      const [card, price] = part.split("=").map((text) => text.trim());
      if (!known.has(card) || !(Number(price) > 0)) {
        const what = known.has(card) ? "is not a card and its price" : "names no card of the list";
        throw { message: `Price per GPU hour: "${part}" ${what}`, next: `write cards and prices such as ${this.prices.placeholder}; cards are ${[...known].join(", ")}` };
      }
      return [card, Number(price)];
    });
    if (!this.currency.value.trim()) throw { message: "The currency of the prices is missing", next: "fill it in, such as USD" };
    return { currency: this.currency.value, per_gpu_hour: Object.fromEntries(pairs) };
  }

  /** The request that the form makes. Throws an error in the words of the form. */
  request() {
    if (!this.box.body.log.trim()) throw { message: "There is no log yet", next: "drop a file, paste text, or load the example" };
    const wrong = wrongNumber(this.node);
    if (wrong) throw wrong;
    const objectives = [["ttft_p99", this.ttft], ["tpot_p50", this.tpot]].filter(([, input]) => input.value !== "").map(([name, input]) => `${name}=${Number(input.value)}`);
    if (!objectives.length) throw { message: "There is no objective", next: "fill in TTFT p99 or TPOT p50" };
    const boxes = [...this.cards.querySelectorAll("input")], hardware = boxes.filter((box) => box.checked).map((box) => box.value);
    if (!hardware.length) throw { message: "No card is chosen", next: "choose at least one" };
    return { ...this.box.body, objectives, prices: this.priceList(), hardware: hardware.length < boxes.length ? hardware : undefined,
      model: this.model.value, precisions: this.precision.value ? this.precision.value.split(",") : undefined, drafts: this.drafts.value ? true : undefined };
  }

  async run() {
    this.button.disabled = true;
    try {
      const body = this.request();
      this.tell(el("p", { text: "Searching…" }));
      this.report(await post("plan", body));
    } catch (error) {
      this.tell(refusal(error));
    }
    this.button.disabled = false;
  }

  report(report) {
    const priced = Boolean(report.currency);
    const head = priced ? [...HEAD, `${report.currency} /h`, `${report.currency} /M tokens`] : HEAD;
    const row = (plan) => [plan.hardware, plan.n_gpus, plan.tensor_parallel, setting(plan), plan.verdict, percent(plan.share_in_time, 2), compact(plan.figures.ttft_p99_ms), compact(plan.figures.tpot_p50_ms),
      plan.margin < -1 ? "< −100 %" : percent(plan.margin), compact(plan.gpu_hours_per_million_tokens), ...(priced ? [compact(plan.cost_per_hour), compact(plan.cost_per_million_tokens)] : [])];
    const first = report.plans[0];
    const verdict = first ? `${priced ? "Cheapest" : "Fewest GPUs"}: ${first.n_gpus} × ${first.hardware}, ${setting(first)}.` : "No fleet in the search meets the objectives.";
    const nodes = [el("p", { class: "verdict", text: verdict })];
    if (first) nodes.push(table(priced ? "Cheapest plans" : "Fewest GPUs of each hardware", head, report.plans.map(row)));
    nodes.push(picture(report, priced), table("Cost against requests in time", head, report.front.map(row)));
    if (report.adaptive.length) nodes.push(table("Adaptive policies on as many GPUs and on fewer", ["Policy", "GPUs", "Verdict", "In time"],
      report.adaptive.map((plan) => [plan.policy, plan.n_gpus, plan.verdict, percent(plan.share_in_time, 2)])));
    if (report.autoscaling.length) nodes.push(table("The first plan with an autoscaler", ["Autoscaler", "Target", "Replicas", "GPU-hours saved", "In time", "Meets"],
      report.autoscaling.map((each) => [each.policy, percent(each.target), `${each.mean_replicas.toFixed(1)} of ${each.max_replicas}`, percent(each.saved_share), percent(each.share_in_time, 2), each.meets ? "yes" : "no"])));
    nodes.push(el("ul", {}, ...report.notes.map((text) => el("li", { text }))));
    if (first) nodes.push(settings(report));
    this.tell(...nodes);
    announce(verdict);
  }
}

function setting({ policy, action, precision }) {
  if (!action) return policy;
  return `${precision}, batch ${action.batch_size}, KV ${action.kv_budget}${action.spec_length ? `, ${action.spec_length} drafts` : ""}${action.prefill_disagg ? ", separate prefill" : ""}`;
}

/** All fleets tried, cost against the share of requests in time, with the front as a line; without prices each hardware has its own. */
function picture(report, priced) {
  const [width, height, left, bottom] = [560, 240, 48, 34];
  const cost = (plan) => (priced ? plan.cost_per_hour : plan.n_gpus);
  const most = Math.max(...report.tried.map(cost), 1);
  const x = (plan) => left + ((width - left - 12) * cost(plan)) / most;
  const y = (share) => height - bottom - (height - bottom - 12) * share;
  const shape = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
    if (text) node.textContent = text;
    return node;
  };
  const unit = priced ? `${report.currency} per hour` : "GPUs";
  const label = `Share of requests in time against ${unit}, for ${report.tried.length} fleets`;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "pareto" });
  for (const share of [0, 0.5, 1]) svg.append(shape("text", { x: 4, y: y(share) + 4 }, percent(share)), shape("path", { d: `M${left} ${y(share)}H${width - 12}`, class: "rule" }));
  svg.append(shape("text", { x: left, y: height - 8 }, "0"), shape("text", { x: width - 12, y: height - 8, "text-anchor": "end" }, `${compact(most)} ${unit}`));
  const begins = (plan, before) => !before || (!priced && before.hardware !== plan.hardware);
  const steps = report.front.map((plan, i) => (begins(plan, report.front[i - 1]) ? `M${x(plan)} ${y(plan.share_in_time)}` : `H${x(plan)}V${y(plan.share_in_time)}`)).join("");
  svg.append(shape("path", { d: steps, class: "front" }));
  for (const plan of report.tried) {
    const dot = shape("circle", { cx: x(plan), cy: y(plan.share_in_time), r: 3.5, class: plan.meets ? "met" : "missed" });
    dot.append(shape("title", {}, `${plan.n_gpus} × ${plan.hardware}, ${setting(plan)}: ${percent(plan.share_in_time, 2)}`));
    svg.append(dot);
  }
  return svg;
}

function settings(report) {
  return new EngineSettings({ title: "Settings for the first plan", label: "Engine settings of the plan", engineLabel: "For the engine", downloadLabel: "Download the settings",
    textOf: (engine) => report.export[engine], report: { text: "Download the plan", name: "plan.json", data: report } }).node;
}
