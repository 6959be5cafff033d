/** Plan tab: the GPUs and settings that serve a visitor's request log within objectives. */

import { once } from "./api.js";
import { announce, el, field, fill, select, table, wrongNumber } from "./dom.js";
import { compact, counted, percent } from "./format.js";
import { player } from "./players.js";
import { Alert, EngineSettings, LogBox, cardName, folded, inTheForm, leftOut, namer, setting, waitFor } from "./request_log.js";

const INKS = ["heuristic", "you", "ppo", "static", "search", "vllm", "climb", "hpa"]; // colours of cards
const BESIDE = 13; // between cards that cost as much, of a picture's width
const HOURS_A_MONTH = 730;
const SVG = "http://www.w3.org/2000/svg";
const CERTAINTY = { likely: "likely", "meets with 90%": "90%", not: "no" };
const HEAD = ["Card", "GPUs", "GPUs per replica", "Setting", "Certainty", "In time", "TTFT p99 ms", "TPOT p50 ms", "Margin", "GPU-hours per million tokens"];

export async function start(panel) {
  const { models, hardware } = await once("info");
  const tab = new PlanTab(models, hardware);
  fill(panel, tab.node);
  return tab;
}

class PlanTab {
  constructor(models, hardware) {
    this.catalogue = hardware;
    this.named = namer(hardware);
    this.box = new LogBox({
      label: "Request log to plan for (CSV or JSON)", example: "Load an example log", onProblem: (error) => this.refuse(error),
      hint: "A table with arrival time, prompt tokens and output tokens under any usual names, or a published trace. The server does not keep it.",
    });
    this.ttft = el("input", { type: "number", min: "1", max: "999999", step: "1", value: "500" });
    this.tpot = el("input", { type: "number", min: "1", max: "999999", step: "1", value: "50" });
    this.e2e = el("input", { type: "number", min: "1", max: "999999", step: "1", placeholder: "20000" });
    this.model = select(models.map((name) => [name, name]), models[0], () => this.offer());
    this.cards = el("fieldset", { class: "cards" });
    this.precision = select([["", "any"], ["FP16,BF16", "16 bit only"]], "");
    this.drafts = select([["", "none"], ["yes", "allowed"]], "");
    const price = (card) => el("input", { type: "number", min: "0.01", max: "1000000", step: "any", placeholder: "no price", "aria-label": `Price of ${cardName(card)} per GPU hour` });
    this.prices = new Map(Object.values(hardware).map(({ card }) => [card, price(card)]));
    this.currency = el("input", { type: "text", value: "USD", maxlength: "20" });
    this.replicas = el("input", { type: "number", min: "1", max: "256", step: "1", placeholder: "1" });
    this.button = el("button", { type: "button", class: "main", text: "Make a plan", on: { click: () => this.run() } });
    this.alert = new Alert(this.box, this.button);
    this.out = el("div", { "aria-live": "polite" }, el("p", { class: "note", text: "The plan appears here: what to rent, its settings, and the latency of each card. Searching takes some seconds." }));
    this.node = el("div", {},
      el("h2", { text: "Which GPUs, how many, which settings" }),
      el("p", { text: "Drop a request log and state objectives. The server searches cards, numbers of GPUs and hundreds of settings, and says what to rent." }),
      el("div", { class: "columns narrow" },
        el("div", {}, this.box.node,
          el("div", { class: "buttons" }, this.button, this.box.example), this.alert.node,
          el("div", { class: "controls small" }, field("Model", this.model), field("TTFT p99 (ms)", this.ttft), field("TPOT p50 (ms)", this.tpot), field("End to end p99 (ms)", this.e2e), field("Precisions", this.precision), field("Draft tokens", this.drafts), field("Replicas, at least", this.replicas),
            ...this.box.fields, field("Currency", this.currency)),
          this.cards),
        this.out));
    this.offer();
  }

  /** List the cards that have tables of the model; all are searched unless some are left out. */
  offer() {
    const cards = new Set(Object.values(this.catalogue).filter(({ model }) => model === this.model.value).map(({ card }) => card));
    fill(this.cards, el("legend", { text: "Cards to search, and your price per GPU hour" }), ...[...cards].flatMap((card) => [el("label", { class: "chip plain" },
      el("input", { type: "checkbox", checked: true, value: card }), cardName(card)), this.prices.get(card)]),
    el("small", { text: "Prices are optional, and none are built in. Take them from your provider's price list or contract: the price of an instance per hour, divided by its GPUs. With prices the plan takes the cheapest fleet of the cards that have one. Without any it takes the fewest GPUs and, of equally many, the card with the least memory." }));
  }

  tell(...nodes) {
    fill(this.out, ...nodes);
  }

  /** Prices of these cards as the request has them; undefined where none are given. Throws an error in the words of the form. */
  priceList(cards) {
    const given = cards.map((card) => [card, this.prices.get(card).value]).filter(([, price]) => price);
    if (!given.length) return undefined;
    if (!this.currency.value.trim()) throw { field: this.currency, message: "The currency of the prices is missing", next: "fill it in, such as USD" };
    return { currency: this.currency.value, per_gpu_hour: Object.fromEntries(given.map(([card, price]) => [card, Number(price)])) };
  }

  /** The request that the form makes. Throws an error in the words of the form. */
  request() {
    this.box.requireLog();
    const wrong = wrongNumber(this.node);
    if (wrong) throw wrong;
    const objectives = [["ttft_p99", this.ttft], ["tpot_p50", this.tpot], ["e2e_p99", this.e2e]].filter(([, input]) => input.value !== "").map(([name, input]) => `${name}=${Number(input.value)}`);
    if (!objectives.length) throw { field: this.ttft, message: "There is no objective", next: "fill in TTFT p99, TPOT p50 or end to end p99" };
    const boxes = [...this.cards.querySelectorAll("[type=checkbox]")], hardware = boxes.filter((box) => box.checked).map((box) => box.value);
    if (!hardware.length) throw { field: boxes[0], message: "No card is chosen", next: "choose at least one" };
    return { ...this.box.body, objectives, prices: this.priceList(hardware), hardware: hardware.length < boxes.length ? hardware : undefined,
      model: this.model.value, precisions: this.precision.value ? this.precision.value.split(",") : undefined, drafts: this.drafts.value ? true : undefined,
      replicas_min: this.replicas.value === "" ? undefined : Number(this.replicas.value) };
  }

  /** Say what is wrong with the form or the log; what was shown before was of other ones. */
  refuse(error) {
    this.tell();
    this.alert.show({ field: error.field, code: error.code, next: error.next, message: this.words(error.message) });
  }

  /** A sentence of the server in the words of the page. */
  words(text) {
    return this.named(text).replaceAll("<=", "≤").replace(/(\d) x /g, "$1 × ");
  }

  async run() {
    this.button.disabled = true;
    this.alert.clear(this.node);
    try {
      const body = this.request();
      const cards = this.cards.querySelectorAll("[type=checkbox]:checked").length;
      const report = await waitFor(this.alert, this.out, `Searching ${cards} ${cards > 1 ? "cards" : "card"}: hundreds of settings on more and more GPUs, then the best of them request by request. Usually some seconds; a minute for a long log.`, "plan", body);
      if (report) this.report(report);
    } catch (error) {
      this.refuse(error);
    }
    this.button.disabled = false;
  }

  report(report) {
    const priced = Boolean(report.currency), fleets = choicesOf(report), [first] = fleets, refused = first ? undefined : tooLong(report);
    const [said, ...more] = refused ? [`No number of GPUs meets the objectives: ${refused} requests are too long for every card that was searched. Leave them out of the log to plan for the others.`] : fleets.length > 1 ? [eitherOf(fleets, report)] : report.answer.map((text) => this.words(text));
    if (report.undecided) {
      this.tell(el("h2", { class: "verdict", text: said }));
      announce(said);
      return;
    }
    const safest = ({ hardware, precision }) => {
      const safe = report.certain.find((plan) => plan.hardware === hardware);
      return safe ? `${safe.n_gpus}${safe.precision === precision ? "" : ` in ${safe.precision}`}` : `none up to ${Math.max(...report.tried.filter((plan) => plan.hardware === hardware).map((plan) => plan.n_gpus))}`;
    };
    const plans = first ? report.plans : nearest(report), inTime = (plan) => percent(plan.share_in_time, 2), differ = new Set(plans.map(inTime)).size > 1;
    const short = (plan) => [el("span", {}, rent(plan), el("small", { text: settingOf(plan) })), CERTAINTY[plan.verdict], ...(first ? [safest(plan)] : []), ...(differ ? [inTime(plan)] : []),
      ...report.objectives.map((objective) => `${compact(latency(plan, objective, "p50"))} ms`), ...(priced ? [plan.cost_per_hour.toFixed(2)] : [])];
    const head = priced ? [...HEAD, `${report.currency} per hour`, `${report.currency} per million tokens`] : HEAD;
    const row = (plan) => [cardName(plan.card), plan.n_gpus, plan.tensor_parallel, settingOf(plan), CERTAINTY[plan.verdict], inTime(plan), compact(plan.figures.ttft_p99_ms), compact(plan.figures.tpot_p50_ms),
      plan.margin < -1 ? "< −100%" : percent(plan.margin), compact(plan.gpu_hours_per_million_tokens), ...(priced ? [compact(plan.cost_per_hour), compact(plan.cost_per_million_tokens)] : [])];
    const nodes = [el("h2", { class: "verdict", text: said }), ...more.map((text) => el("p", { text })), leftOut(report.read)];
    for (const text of new Set(Object.values(report.refused))) nodes.push(el("p", { class: "bad", text: `${text}.` }));
    if (!refused) {
      const rows = table(first ? `${priced ? "Cheapest fleet" : "Fewest GPUs"} of each card` : "Nearest fleet of each card", ["Fleet", "Certainty", ...(first ? ["GPUs for 90% certainty"] : []), ...(differ ? ["In time"] : []), ...report.objectives.map((text) => told(text)), ...(priced ? [`${report.currency} per hour`] : [])], plans.map(short));
      rows.classList.add("stacked");
      const choice = first ? this.choice(report, fleets) : [];
      nodes.push(...choice, rows, el("p", { class: "note", text: `Simulated; latencies and shares in time at the median error of measured runs. TTFT: time to first token; TPOT: time per output token after it; p99: 99% of the requests are faster; FP8, MXFP4, NVFP4: weights in 8 and 4 bits.${first ? ` Likely: at least half of the measured runs that the simulation was compared with would meet the objectives; 90% certain: nine tenths of them. ${priced ? "" : " No prices were given: the fewest GPUs come first, and of equally many the card with the least memory."}` : ""}` }));
    }
    if (first) nodes.push(this.warnings, this.settings.node);
    nodes.push(folded(`All ${report.tried.length} fleets tried: cost against latency`,
      el("p", { class: "note", text: "Each point is a fleet, with its number of GPUs, at the median error of measured runs; its line reaches to the 90% bound. Filled fleets meet all objectives. Of settings with equally few GPUs the plan takes the highest precision, even if a lower one is faster, because lower ones change the model's answers. Cards that cost as much stand side by side." }),
      ...report.objectives.map((objective) => picture(report, priced, objective)), table("Fleets that no other one beats in both cost and requests in time", head, report.front.map(row))),
      folded("All figures of these fleets", el("p", { class: "note", text: "Latencies as simulated; above, and in the shares in time, they are at the median error of measured runs." }), table("Figures", head, [...plans, ...fleets.filter((plan) => !plans.some((each) => same(each, plan)))].map(row))));
    const other = [];
    if (report.adaptive.length) other.push(table(`Adaptive policies on ${rent(report.plans[0])} and on fewer`, ["Policy", "GPUs", "Certainty", "In time"],
      report.adaptive.map((plan) => [player({ name: plan.policy }).label, plan.n_gpus, CERTAINTY[plan.verdict], percent(plan.share_in_time, 2)])));
    if (report.autoscaling.length) other.push(table(`${rent(report.plans[0])} with an autoscaler`, ["Autoscaler", "Target", "Replicas", "GPU-hours saved", "In time", "Meets"],
      report.autoscaling.map((each) => [player({ name: each.policy }).label, percent(each.target), `${each.mean_replicas.toFixed(1)} of ${each.max_replicas}`, percent(each.saved_share), percent(each.share_in_time, 2), each.meets ? "yes" : "no"])));
    if (other.length) nodes.push(folded("Adaptive policies and autoscalers", ...other));
    nodes.push(folded("All notes: errors, limits, what was left out", el("ul", {}, ...[...report.read.notes, ...report.notes].map((text) => el("li", { text: inTheForm(this.named(text)) })))));
    this.tell(...nodes.filter(Boolean));
    this.out.scrollIntoView({ block: "nearest" });
    announce(said);
  }

  /** The fleets to choose between, each with its cost and its risk; warnings and engine settings follow the choice. */
  choice(report, fleets) {
    this.warnings = el("ul");
    const choose = (plan) => {
      this.chosen = plan;
      fill(this.warnings, ...warnings(report, plan).map((text) => el("li", { text })));
      this.settings.node.firstChild.textContent = `Engine settings of ${rent(plan)} in ${plan.precision}, to copy or download`;
      this.settings.show();
    };
    [this.chosen] = fleets;
    this.settings = settings(report, this.named, () => (this.chosen === report.plans[0] ? report.export_likely : report.export));
    choose(this.chosen);
    return [el("fieldset", { class: "choices" }, el("legend", { text: fleets.length > 1 ? "Your choice: the settings below follow it" : "The fleet" }), ...fleets.map((plan) => el("label", { class: "choice" },
      fleets.length > 1 ? el("input", { type: "radio", name: "fleet", checked: plan === this.chosen, on: { change: () => choose(plan) } }) : null,
      ...offerOf(plan, fleets, report).map(([tag, text]) => el(tag, { text })))))];
  }
}

const same = (one, other) => ["hardware", "n_gpus", "precision"].every((name) => one[name] === other[name]);

/** The cheapest likely fleet, then the cheapest one that is 90% certain, if that is another. */
function choicesOf({ plans: [likely], certain: [sure] }) {
  if (!likely) return [];
  return sure && !same(likely, sure) ? [likely, sure] : [likely];
}

const changesAnswers = ({ precision }) => !["FP16", "BF16"].includes(precision);
const certainly = ({ verdict }) => CERTAINTY[verdict] === "90%";

/** Both fleets in a sentence. */
function eitherOf(fleets, { objectives }) {
  const [likely, sure] = fleets.map((plan) => `${rent(plan)} in ${plan.precision}`);
  return `Rent ${likely}, which should meet ${objectives.map(told).join(" and ")}, or ${sure}, which is 90% certain to.`;
}

/** What a fleet is, costs and risks: tags and their texts. */
function offerOf(plan, [cheapest], { currency }) {
  const priced = Boolean(currency), money = (amount) => `${currency} ${amount.toLocaleString("en-US", amount < 100 ? { minimumFractionDigits: 2, maximumFractionDigits: 2 } : { maximumFractionDigits: 0 })}`;
  const more = priced ? plan.cost_per_hour - cheapest.cost_per_hour : plan.n_gpus - cheapest.n_gpus;
  const costs = [priced && `${money(plan.cost_per_hour)} per hour, ${money(plan.cost_per_hour * HOURS_A_MONTH)} per month`, plan !== cheapest && priced && (more > 0 ? `${money(more * HOURS_A_MONTH)} per month more than the other` : "As much as the other"),
    plan !== cheapest && !priced && (same({ ...plan, precision: "" }, { ...cheapest, precision: "" }) ? "The same GPUs" : `${more > 0 ? `${counted(more, "GPU")} more` : "As many GPUs, of another card"}: enter your prices to see the cost`)];
  const title = certainly(plan) ? "90% certain" : priced ? "Cheapest that should do" : "Fewest GPUs that should do";
  return [["strong", plan === cheapest && certainly(plan) ? `${priced ? "Cheapest" : "Fewest GPUs"}, and 90% certain` : title], ["span", rent(plan)], ["small", settingOf(plan)],
    ...costs.filter(Boolean).map((text) => ["span", `${text}.`]),
    ["span", `Risk: of ten such plans, ${certainly(plan) ? "at most one misses" : "one to five miss"} an objective on real GPUs.${changesAnswers(plan) ? ` ${plan.precision} changes the model's answers.` : ""}`]];
}

const settingOf = ({ policy, action, precision }) => (action ? setting(action, precision) : player({ name: policy }).label);

/** GPUs to rent, such as `4 × H100 SXM (2 replicas of 2)`. */
function rent({ n_gpus: gpus, n_replicas: replicas, card }) {
  const each = gpus / replicas;
  return `${gpus} × ${cardName(card)}${each > 1 ? ` (${replicas} ${replicas > 1 ? "replicas" : "replica"} of ${each})` : ""}`;
}

/** The largest fleet of each card where none meets the objectives, that with the most requests in time first. */
const nearest = ({ unmet }) => [...unmet].sort((a, b) => b.share_in_time - a.share_in_time || b.margin - a.margin);

/** How many requests no card can serve, such as "30 of 300", if more GPUs serve no more; else undefined. */
function tooLong(report) {
  const told = Object.values(report.refused).map((text) => text.match(/^([\d,]+) of ([\d,]+) requests .* count as late/)), [best] = nearest(report);
  const [least] = told.filter(Boolean).map(([, some, all]) => [some, all]).sort((a, b) => number(a[0]) - number(b[0]));
  return least && told.length === new Set(report.unmet.map(({ hardware }) => hardware)).size && best.share_in_time > 1 - number(least[0]) / number(least[1]) - 0.001 ? least.join(" of ") : undefined;
}

const number = (text) => Number(text.replaceAll(",", ""));

/** An objective in words, such as `TTFT p99 ≤ 500 ms`. */
const told = (objective) => objective.replace(/^(\w+)_(\w+)=(.*)$/, (_, quantity, statistic, ms) => `${quantity.toUpperCase()} ${statistic} ≤ ${ms} ms`);

/** Latency of a plan that an objective bounds (`ttft_p99=500`), at the "p50" or "p90" of the errors of measured runs, in ms. */
function latency(plan, objective, error) {
  const [quantity, statistic] = objective.split(/[_=]/);
  return plan.figures[`${quantity}_${statistic}_ms`] * plan.errors[quantity][error];
}

/** What may change the choice of a plan, a sentence each. The server tells how the recommended one grows. */
function warnings({ recommended, plans, certain, currency, growth, objectives }, first) {
  const others = (certainly(first) ? certain : plans).filter(({ n_gpus: gpus }) => gpus === first.n_gpus).length - 1;
  const outgrown = same(first, recommended) && growth.find(({ meets }) => !meets), needed = outgrown?.gpus_needed;
  const missed = outgrown && objectives.filter((objective) => latency({ ...first, ...outgrown }, objective, "p50") > Number(objective.split("=")[1]));
  const why = missed?.length ? missed.map((objective) => `${told(objective)} (it would be ${compact(latency({ ...first, ...outgrown }, objective, "p50"))} ms)`).join(" and ") : `the objectives with ${certain.length ? "90% certainty" : "enough certainty"}`;
  return [
    !currency && others > 0 && `${others + 1} cards need equally few GPUs: enter your prices to compare them by cost.`,
    outgrown && `With ${outgrown.traffic} times the traffic it no longer meets ${why}${needed ? `: that takes ${needed} ${needed > 1 ? "GPUs" : "GPU"} with these settings` : ""}.`,
    first.n_replicas === 1 && "A single replica serves nothing while it fails or restarts: set Replicas, at least, to 2 if that matters.",
    changesAnswers(first) && `${first.precision} changes the model's answers, which this plan does not measure: choose 16 bit only if they must stay.`,
  ].filter(Boolean);
}

/**
 * Cost of all fleets tried against a latency that an objective bounds (`ttft_p99=500`), at the median error of measured runs; lines
 * reach to the 90% bound. Each card has its colour; its fleets stand a little beside those of other cards, which often cost as much.
 */
function picture(report, priced, objective) {
  const [, quantity, statistic, limit] = objective.match(/^(\w+)_(\w+)=(.*)$/);
  const [width, height, left, bottom] = [560, 260, 56, 40];
  const cost = (plan) => (priced ? plan.cost_per_million_tokens : plan.gpu_hours_per_million_tokens);
  const at = (plan, error) => latency(plan, objective, error);
  const tried = report.tried.filter((plan) => plan.tokens_per_s > 0 && at(plan, "p50") > 0), cards = [...new Set(tried.map(({ card }) => card))];
  const aside = (card) => (cards.indexOf(card) - (cards.length - 1) / 2) * BESIDE;
  const x = scale(tried.map(cost), left + cards.length * BESIDE / 2, width - 30 - cards.length * BESIDE / 2, 40);
  const y = scale([Number(limit), ...tried.flatMap((plan) => [at(plan, "p50"), at(plan, "p90")])], height - bottom, 16, 16);
  const shape = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
    if (text) node.textContent = text;
    return node;
  };
  const across = `${priced ? report.currency : "GPU hours"} per million output tokens`, up = `${quantity.toUpperCase()} ${statistic}, ms`;
  const readout = el("p", { class: "note", text: "Point at a fleet to read it." });
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${up}, against ${across}, of ${tried.length} fleets; the objective is ${limit} ms`, class: "pareto" });
  for (const mark of y.marks) svg.append(shape("text", { x: left - 6, y: y.at(mark) + 4, "text-anchor": "end" }, compact(mark)), shape("path", { d: `M${left} ${y.at(mark)}H${width - 12}`, class: "rule" }));
  for (const mark of x.marks) svg.append(shape("text", { x: x.at(mark), y: height - bottom + 15, "text-anchor": "middle" }, compact(mark)));
  svg.append(shape("text", { x: 4, y: 12 }, up), shape("text", { x: width - 12, y: height - 6, "text-anchor": "end" }, across));
  svg.append(shape("path", { d: `M${left} ${y.at(limit)}H${width - 12}`, class: "limit" }), shape("text", { x: width - 12, y: y.at(limit) - 4, "text-anchor": "end" }, `objective ${limit} ms`));
  for (const plan of tried) {
    const [cx, cy] = [x.at(cost(plan)) + aside(plan.card), y.at(at(plan, "p50"))], ink = INKS[cards.indexOf(plan.card) % INKS.length];
    const said = `${rent(plan)}, ${settingOf(plan)}: ${up}: ${compact(at(plan, "p50"))} to ${compact(at(plan, "p90"))}; ${percent(plan.share_in_time, 2)} in time; ${compact(cost(plan))} ${across}`;
    const fleet = shape("g", { class: `ink-${ink}` });
    fleet.append(shape("title", {}, said), shape("path", { d: `M${cx} ${cy}V${y.at(at(plan, "p90"))}`, class: "error" }), shape("circle", { cx, cy, r: 4.5, class: plan.meets ? "met" : "missed" }), shape("text", { x: cx + 6, y: cy + 11 }, String(plan.n_gpus)));
    fleet.addEventListener("pointerenter", () => { readout.textContent = said; });
    svg.append(fleet);
  }
  const legend = el("div", { class: "legend" }, ...cards.map((card, i) => el("span", { class: `chip dot ink-${INKS[i % INKS.length]}`, text: cardName(card) })));
  return el("div", {}, legend, svg, readout);
}

/** A logarithmic scale from values to places between two ends, with marks at 1, 2 and 5 times powers of ten that are `apart`, or at the ends if those are too few. */
function scale(values, from, to, apart) {
  const [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
  const at = (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  const round = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power < high; power += 1) round.push(...[1, 2, 5].map((times) => times * 10 ** power));
  const spread = (marks) => marks.filter((mark) => mark >= low && mark <= high).reduce((kept, mark) => (kept.length && Math.abs(at(mark) - at(kept.at(-1))) < apart ? kept : [...kept, mark]), []);
  const inside = spread(round);
  return { at, marks: inside.length > 1 ? inside : spread([Math.min(...values), Math.max(...values)]) };
}

function settings(report, named, files) {
  return new EngineSettings({ title: "", label: "Engine settings of the plan", engineLabel: "For the engine", downloadLabel: "Download the settings",
    textOf: (engine) => files()[engine], tell: (comment) => report.objectives.reduce((said, objective) => said.replace(objective, told(objective)), named(comment)), report: { text: "Download the plan", name: "plan.json", data: report } });
}
