/** Your trace tab: compares policies on a visitor's request log and gives engine settings to try. */

import { once } from "./api.js";
import { TimeChart } from "./charts.js";
import { announce, el, field, fill, select, table, wrongNumber } from "./dom.js";
import { compact, percent } from "./format.js";
import { KnobFields, titleOf } from "./knobs.js";
import { player } from "./players.js";
import { Alert, EngineSettings, LogBox, cardName, folded, inTheForm, leftOut, namer, setting, tableName, waitFor } from "./request_log.js";
import { Strip } from "./strip.js";

const BASELINES = {
  fixed: { label: "Your configuration", colour: "naive", dash: [1, 3] },
  best_constant: { label: "Best constant", colour: "ink" },
  best_own_precision: { label: "Best constant in your precision", colour: "hpa" },
};
const UNFINISHED = 0.01; // share of requests beyond which a 99th percentile is named after those that it is of
const UNCHECKED = ["hill_climb", "random", "naive", "vllm_defaults"]; // the last is the baseline until the visitor sets another
const KNOBS = ["kv_budget", "spec_length", "batch_size", "prefill_disagg", "quant_tier"];

export async function start(panel) {
  const [{ tasks }, info] = await Promise.all([once("tasks?all=true"), once("info")]);
  const tab = new Trace(tasks, info);
  await tab.offer();
  fill(panel, tab.node);
  return tab;
}

class Trace {
  constructor(tasks, info) {
    this.charts = [];
    this.catalogue = info.hardware;
    this.named = namer(info.hardware);
    this.first = tasks[0].id;
    this.hardwareOf = new Map(tasks.map((task) => [String(task.id), task.hardware]));
    this.box = new LogBox({
      label: "Request log (CSV or JSON)", example: "Load an example", onProblem: (error) => this.refuse(error),
      hint: "Plain CSV as above, or logs of Azure, Mooncake, BurstGPT, GuideLLM, AIPerf or vllm bench. The server does not keep it.",
    });
    this.task = select([["", "sized to the log"], ...tasks.map((task) => [task.id, `as in ${task.name}`])], "", () => this.offer());
    this.model = select(info.models.map((name) => [name, name]), Object.values(info.hardware)[0].model, () => this.offerTables());
    this.hardware = select([], "", () => this.offerTiers());
    this.slo = el("input", { type: "number", min: "1", max: "600000", step: "1", placeholder: "500" });
    this.gpus = el("input", { type: "number", min: "1", max: "64", step: "1", placeholder: "auto" });
    this.from = el("input", { type: "number", min: "0", step: "1", placeholder: "0" });
    this.to = el("input", { type: "number", min: "0", step: "1", placeholder: "end" });
    this.drafts = select([["", "no"], ["yes", "yes, with a draft model"]], "");
    this.fixed = new KnobFields(info.action.properties);
    this.policies = el("fieldset", { class: "legend" });
    this.button = el("button", { type: "button", class: "main", text: "Compare policies", on: { click: () => this.run() } });
    this.alert = new Alert(this.box, this.button);
    this.out = el("div", { "aria-live": "polite" }, el("p", { class: "note", text: "The comparison appears here. It takes some seconds." }));
    this.node = el("div", {},
      el("h2", { text: "Compare policies on your own traffic" }),
      el("p", { text: "Drop a request log. The server simulates how each policy and a fixed configuration would have served it; no engine is controlled and the log is not kept. You get the share of requests that miss the objective on the same GPUs, and engine settings to try." }),
      el("div", { class: "columns narrow" },
        el("div", {}, this.box.node,
          el("div", { class: "buttons" }, this.button, this.box.example), this.alert.node,
          el("small", { text: "The example is five minutes of an Azure LLM service, November 2023 (Microsoft, CC-BY 4.0)." }),
          el("div", { class: "controls stacked" }, field("Model", this.model), field("Hardware", this.hardware), field("Fleet and objectives", this.task)),
          el("div", { class: "controls small" }, field("GPUs", this.gpus), field("TTFT objective (ms)", this.slo), field("Policies may draft", this.drafts),
            field("From second", this.from), field("To second", this.to), ...this.box.fields),
          el("fieldset", {}, el("legend", { text: "Your configuration: vLLM's defaults unless you change them" }), this.fixed.node),
          this.policies),
        this.out));
  }

  /** List the tables of the model. */
  offerTables() {
    const tables = Object.entries(this.catalogue).filter(([, { model }]) => model === this.model.value)
      .map(([name, each]) => [name, tableName(each)]);
    fill(this.hardware, ...tables.map(([value, text]) => el("option", { value, text })));
    this.offerTiers();
  }

  /** List the policies to choose from. Stored policies belong to one task; the others work on any log. */
  async offer() {
    const table = this.hardwareOf.get(this.task.value) ?? (this.hardware.value || Object.keys(this.catalogue)[0]);
    this.model.value = this.catalogue[table].model;
    this.offerTables();
    this.hardware.value = table;
    this.offerTiers();
    const { policies } = await once(`policies?task_id=${encodeURIComponent(this.task.value || this.first)}`);
    const players = policies.filter(({ stored }) => !stored || this.task.value).map(player).reverse();
    fill(this.policies, el("legend", { text: "Policies" }), ...players.map(({ key, label, colour, title }) => el("label", { class: `chip ink-${colour}`, title },
      el("input", { type: "checkbox", checked: !UNCHECKED.includes(key), value: key }), label)));
  }

  /** Name of the table that the log is played on. */
  get table() {
    return this.hardware.value;
  }

  offerTiers() {
    this.fixed.offer(this.catalogue[this.table].tiers);
  }

  tell(...nodes) {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
    fill(this.out, ...nodes);
  }

  /** A sentence of the server in the words of the page. */
  words(text) {
    return inTheForm(this.named(text)).replace(/(\d) x /g, "$1 × ");
  }

  /** The request that the form makes. Throws an error in the words of the form. */
  request() {
    this.box.requireLog();
    const policies = [...this.policies.querySelectorAll("input:checked")].map((box) => box.value);
    if (!policies.length) throw { field: this.policies.querySelector("input"), message: "No policy is chosen", next: "choose at least one" };
    const wrong = wrongNumber(this.node);
    if (wrong) throw wrong;
    const number = (input) => (input.value === "" ? undefined : Number(input.value));
    const from_s = number(this.from), to_s = number(this.to);
    if (to_s <= (from_s ?? 0)) throw { field: this.to, message: `To second: ${to_s} is not after second ${from_s ?? 0}`, next: "choose a later end, or leave it empty" };
    const task = this.task.value;
    return { ...this.box.body, policies, fixed: this.fixed.action(), hardware: this.table,
      task_id: task ? (/^\d+$/.test(task) ? Number(task) : task) : undefined, gpus: number(this.gpus), slo_ms: number(this.slo), from_s, to_s, drafts: this.drafts.value ? true : undefined };
  }

  /** Say what is wrong with the form or the log; what was shown before was of other ones. */
  refuse(error, ...nodes) {
    this.tell();
    this.alert.show(error, ...nodes);
  }

  async run() {
    const { tiers, model, card } = this.catalogue[this.table];
    this.button.disabled = true;
    this.alert.clear(this.node);
    try {
      const body = this.request();
      const many = body.policies.length, report = await waitFor(this.alert, this.out, `Simulating the log under your configuration, constant settings and ${many} ${many > 1 ? "policies" : "policy"}: some seconds for minutes of traffic, half a minute for an hour.`, "shadow", body);
      if (report) this.report({ ...report, card: cardName(card) }, tiers, model, body.fixed ? BASELINES.fixed.label : "vLLM's defaults");
    } catch (error) {
      const [, from, to] = error.message.match(/busiest hour, from second (\d+) to (\d+)/) ?? [];
      const take = to && el("button", { type: "button", text: "Compare on the busiest hour", on: { click: () => {
        [this.from.value, this.to.value] = [from, to];
        this.run();
      } } });
      this.refuse(error, take);
    }
    this.button.disabled = false;
  }

  report(report, tiers, model, own) {
    const players = report.outcomes.map((outcome) => ({ ...player({ name: outcome.policy }), ...BASELINES[outcome.policy], outcome }));
    if (own !== players[0].label) Object.assign(players[0], player({ name: "vllm_defaults" }), { key: "fixed" });
    const [said, ...more] = report.answer.map((text) => this.words(text)), { log } = report;
    const mine = players[0].outcome.action.quant_tier, others = ({ timeline }) => [...new Set(timeline.quant_tier)].filter((tier) => tier !== mine).map((tier) => tiers[tier]);
    const chip = ({ label, colour }) => el("span", { class: `chip ink-${colour}`, text: label });
    const row = (twins, others) => el("span", { class: "twins" }, ...twins.map(chip), others.length ? el("small", { text: `in ${others.join(", ")}, not your ${tiers[mine]}` }) : null);
    const late = `First token after ${compact(report.slo_ms)} ms`, cost = ({ gpu_s_per_1k_tokens: gpus }) => gpus.toFixed(2);
    const costs = new Set(players.filter(({ outcome }) => outcome.completed).map(({ outcome }) => cost(outcome)));
    const figures = (o) => [percent(o.slo_miss_share, 1), percent(lost(o), 1), ...(o.completed ? [`${compact(o.ttft_p99_ms)}${lost(o) > UNFINISHED ? ", if answered" : ""}`, o.tpot_mean_ms.toFixed(1)] : ["–", "–"]), ...(costs.size > 1 ? [o.completed ? cost(o) : "–"] : [])];
    // Policies with the same figures and precisions share a row.
    const rows = new Map();
    for (const each of players) {
      const key = JSON.stringify([figures(each.outcome), others(each.outcome)]);
      rows.set(key, [...(rows.get(key) ?? []), each]);
    }
    const results = table("Results of each policy, all on the same GPUs", ["Policy", late, "Not finished", "TTFT p99 ms", "TPOT ms", ...(costs.size > 1 ? ["GPU-seconds per 1,000 tokens"] : [])],
      [...rows.values()].map((twins) => [row(twins, others(twins[0].outcome)), ...figures(twins[0].outcome)]));
    results.classList.add("stacked");
    this.tell();
    this.out.append(...[
      el("h2", { class: "verdict", text: said }),
      ...more.map((text) => el("p", { text })),
      leftOut(report.read),
      ...[report.refused, report.short].filter(Boolean).map((text) => el("p", { class: "bad", text: `${this.words(text)}.` })),
      results,
      el("p", { class: "note", text: `${log.requests} ${log.requests === 1 ? "request" : "requests"} in ${Math.round(log.span_s)} s (${log.rate_rps.toFixed(2)}/s, prompts ${compact(log.prompt_tokens_p50)} tokens), served with ${model} on ${report.n_gpus} × ${report.card} for every policy${costs.size === 1 ? `, which is ${[...costs][0]} GPU-seconds per 1,000 tokens` : ""}. Requests without an answer count as late; TTFT and TPOT are those of the others. ${players.some(({ outcome }) => others(outcome).length) ? `A precision other than ${tiers[mine]} changes the model's answers, which is not measured here. ` : ""}Simulated: the Fidelity tab shows the errors.` }),
      this.settings(report, players),
      folded("Second by second: latency, queue and knobs", this.drawing(report, players, tiers)),
      folded("All figures and notes", table("Figures of each policy", ["Policy", "GPUs", "Goodput /s", "TTFT p50 ms", "Restarts"],
        players.map(({ outcome: o, ...each }) => [chip(each), o.n_gpus, o.goodput_rps.toFixed(2), compact(o.ttft_p50_ms), o.restarts])),
      ...[...report.read.notes, ...report.notes].map((text) => el("p", { text: inTheForm(this.named(text)) }))),
    ].filter(Boolean));
    for (const draw of this.later) draw();
    this.out.scrollIntoView({ block: "nearest" });
    announce(said);
  }

  drawing(report, players, tiers) {
    const x = players[0].outcome.timeline.t_s.map((t) => t + 1), span = [0, x.at(-1)], sync = "trace";
    const series = players.map(({ key, label, colour, dash }) => ({ key, label, colour, dash }));
    const line = (name) => Object.fromEntries(players.map(({ key, outcome }) => [key, outcome.timeline[name]]));
    const make = (options, columns) => {
      const chart = new TimeChart({ sync, ...options });
      this.charts.push(chart);
      this.later.push(() => chart.set(x, columns, span));
      return chart.figure;
    };
    this.later = [];
    const figures = [
      make({ title: "Arrivals", unit: "requests/s", stepped: true, series: [{ key: "arrivals", label: "Arrivals", colour: "ink" }] }, { arrivals: report.arrivals_per_s }),
      make({ title: "Queue", unit: "requests", series }, line("queue_requests")),
      make({ title: "Time to first token, p99", unit: "ms, log", series, log: true, limits: [{ value: report.slo_ms, label: "objective" }] }, line("ttft_p99_ms")),
      make({ title: "Throughput", unit: "tokens/s", series }, line("tokens_per_sec")),
    ];
    const strips = players.map(({ label, colour, outcome }) => {
      const strip = new Strip(label, colour, KNOBS.map((name) => [name, titleOf(name)]), x.length, tiers);
      this.later.push(() => strip.set(Object.fromEntries(KNOBS.map((name) => [name, outcome.timeline[name]])), x.length));
      return strip.node;
    });
    return el("div", {}, el("div", { class: "charts" }, ...figures), el("h3", { text: "Knob settings" }), ...strips);
  }

  settings(report, players) {
    const choice = select(players.map(({ key, label }) => [key, label]), report.best, () => shown.show());
    const shown = new EngineSettings({ title: "Engine settings to try, to copy or download", label: "Engine settings", engineLabel: "Engine", downloadLabel: "Download", choices: [field("Policy", choice)],
      textOf: (engine) => report.export[choice.value][engine].replace(/the policy '\w+'/, inSentence(players.find(({ key }) => key === choice.value))), tell: this.named, report: { text: "Download the report", name: "shadow.json", data: report } });
    return shown.node;
  }
}

const inSentence = ({ label }) => label.replace("Your", "your").replace("Best", "the best");

/** Share of the requests that were refused, or not served by the end. */
const lost = ({ completed, rejected, unserved }) => (rejected + unserved) / (completed + rejected + unserved);
