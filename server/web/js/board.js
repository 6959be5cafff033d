/** Charts and decisions of everybody in a race, and which of their lines are shown. */

import { TimeChart, floods } from "./charts.js";
import { el, fill, select } from "./dom.js";
import { SHARED, YOU } from "./players.js";
import { Strip } from "./strip.js";

const HIDDEN = ["hill_climb", "random", "random_search", "vllm_defaults", "naive", "kpa"]; // until the visitor asks for them

export class Board {
  /** `race` is read at every drawing. */
  constructor(race) {
    this.race = race;
    this.hidden = new Set(HIDDEN);
    this.ttft = "ttft_p50_ms";
    this.charts = {};
    this.figures = el("div", { class: "charts" });
    this.key = el("summary");
    this.choices = el("div", { class: "choices" });
    this.legend = el("details", { class: "legend", hidden: true }, this.key, this.choices); // until the policies are there
    this.leftOut = el("p", { class: "note" });
    this.strips = el("div", { class: "strips" });
    this.decisions = el("div", { hidden: true }, el("h2", { text: "Decisions" }), el("p", { class: "note", text: "One column per second; stronger colour is a higher setting." }), this.strips);
    this.node = el("div", {}, this.legend, this.leftOut, this.figures, this.decisions);
  }

  /** Grey until the charts are those of the chosen episode. */
  wait() {
    this.figures.classList.add("stale");
  }

  build() {
    const { task, rivals, memoryLimit, length, tiers, phases } = this.race, players = [YOU, ...rivals], sync = "race";
    for (const chart of Object.values(this.charts)) chart.destroy();
    this.charts = {
      arrivals: new TimeChart({ title: "Arrivals", unit: "requests/s", series: [{ key: "traffic", label: "Arrivals", colour: "ink", width: 1 }], sync, stepped: true }),
      queue: new TimeChart({ title: "Queue", unit: "requests", series: players, sync }),
      ttft: new TimeChart({ title: "Time to first token", unit: "ms, log", series: players, log: true, sync,
        limits: [{ value: task.slo_target_ms, label: "time limit" }], tools: this.ttftChoice() }),
      memory: new TimeChart({ title: "Memory per GPU", unit: "GB", series: players, sync,
        limits: [memoryLimit === Infinity ? { value: task.oom_above_gb, label: "out of memory" } : { value: memoryLimit, label: "limit" }] }),
      throughput: new TimeChart({ title: "Throughput", unit: "tokens/s", series: players, sync }),
      ...(task.max_replicas ? { replicas: new TimeChart({ title: "Replicas requested", unit: "loading and in service", series: players, sync, stepped: true, limits: [{ value: task.max_replicas, label: "maximum" }] }) } : {}),
      cost: new TimeChart({ title: "Cost so far", unit: "% of the budget", series: players, sync, limits: [{ value: 100, label: "budget" }] }),
    };
    fill(this.figures, ...Object.values(this.charts).map((chart) => chart.figure));
    this.stripOf = new Map(players.map((player) => [player.key, new Strip(player.label, player.colour, this.race.lanes(), length, tiers, task.max_replicas)]));
    fill(this.strips, ...[...this.stripOf.values()].map((strip) => strip.node));
    this.legend.hidden = false;
    this.players = players;
    this.surges = floods(phases).length ? el("span", { class: "chip flood", text: "surge" }) : null;
    fill(this.choices, ...players.map((player) => this.choice(player)));
    this.hide();
    this.figures.classList.remove("stale");
  }

  ttftChoice() {
    const choice = select([["ttft_p50_ms", "median"], ["ttft_p99_ms", "99th percentile"]], this.ttft, (value) => {
      this.ttft = value;
      this.race.draw();
    });
    choice.setAttribute("aria-label", "Which time to first token");
    return choice;
  }

  /** A line's check box, and what its policy does. */
  choice({ key, label, colour, title }) {
    const box = el("input", { type: "checkbox", checked: !this.hidden.has(key), on: { change: (event) => {
      if (event.target.checked) this.hidden.delete(key);
      else this.hidden.add(key);
      this.hide();
    } } });
    return el("div", {}, el("label", { class: `chip ink-${colour}` }, box, label), title && el("small", { text: title }));
  }

  /** Show the lines that the visitor chose. What others decide shows after the visitor's own race: before, it would be the answer. */
  hide() {
    const { phase, finished, task } = this.race, told = (key) => (key === SHARED.key ? phase === "over" : key === YOU.key || finished.has(task.id));
    for (const chart of Object.values(this.charts)) chart.setHidden(this.hidden);
    for (const [key, strip] of this.stripOf) strip.node.hidden = this.hidden.has(key) || !told(key);
    const lines = this.players.filter(({ key }) => !this.hidden.has(key));
    fill(this.key, "Lines: ", ...lines.map(({ label, colour }) => el("span", { class: `chip ink-${colour}`, text: label })), this.surges);
  }

  /** Draw each run as `cut` leaves it, over the seconds `x`, with `shaded` surges. */
  draw(x, cut, span, shaded) {
    const { mine, rivals, arrivals, task } = this.race, runs = [[YOU.key, mine], ...rivals.map(({ key, episode }) => [key, episode])];
    const everyone = (pick) => Object.fromEntries(runs.map(([key, run]) => [key, cut(pick(run))]));
    // Observation 0 is that of the reset, before the first second.
    const seen = (name) => (run) => run.observation[name].slice(1);
    const measured = (name) => (run) => run.metrics[name];
    for (const chart of Object.values(this.charts)) chart.shade(shaded);
    this.charts.arrivals.set(x, { traffic: cut(arrivals) }, span);
    this.charts.queue.set(x, everyone(seen("queue_depth")), span);
    this.charts.ttft.set(x, everyone(measured(this.ttft)), span);
    this.charts.memory.set(x, everyone(measured("gpu_memory_gb")), span);
    this.charts.throughput.set(x, everyone(measured("tokens_per_sec")), span);
    this.charts.cost.set(x, everyone((run) => seen("cost_so_far")(run).map((cost) => 100 * cost / task.cost_budget)), span);
    this.charts.replicas?.set(x, everyone((run) => run.action.replicas), span);
    this.decisions.hidden = mine.reward.length === 0;
    for (const [key, run] of runs) this.stripOf.get(key).set(run.action, Math.min(mine.reward.length, run.reward.length));
  }
}
