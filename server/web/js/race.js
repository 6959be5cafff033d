/** Race tab: the visitor and the built-in policies play the same episode, second by second. */

import * as address from "./address.js";
import { once, post, sleep } from "./api.js";
import { TimeChart, floods } from "./charts.js";
import { announce, copy, download, el, field, fill, problem, select } from "./dom.js";
import { compact, percent } from "./format.js";
import { Knobs, knobsOf } from "./knobs.js";
import { handed } from "./log.js";
import { player } from "./players.js";
import { placeOf, scoreBoard } from "./score.js";
import { Strip } from "./strip.js";

const YOU = { key: "you", label: "You", colour: "you", width: 2.5 };
const HIDDEN = ["hill_climb", "random", "random_search", "vllm_defaults", "naive"]; // until the visitor asks for them
const SPEEDS = [[2, "2×"], [5, "5×"], [10, "10×"], [25, "25×"], [1000, "as fast as possible"]];
const REPLAY_SPEED = 25;
const MAX_SEED = 2 ** 53 - 1;

export async function start(panel) {
  const [{ tasks }, info] = await Promise.all([once("tasks?all=true"), once("info")]);
  const race = new Race(tasks, info);
  fill(panel, race.node);
  return race;
}

class Race {
  constructor(tasks, info) {
    this.tasks = tasks;
    // First visits start with the task that offers the most knobs.
    const knobs = tasks.map((task) => task.active_actions.length);
    this.first = tasks[knobs.indexOf(Math.max(...knobs))];
    this.info = info;
    this.hidden = new Set(HIDDEN);
    this.phase = "idle"; // idle, running, paused, over
    this.generation = 0;
    this.speed = 10;
    this.knobs = new Knobs(info.action.properties);
    this.buildControls();
    this.board = el("div", { class: "charts" });
    this.strips = el("div", { class: "strips" });
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Lines shown" });
    this.result = el("section", { class: "result", "aria-label": "Result" });
    this.trouble = el("div");
    this.lanes = el("p", { class: "note" });
    this.readings = el("dl", { class: "readings" });
    this.node = el("div", { class: "race" },
      this.controls,
      el("aside", { class: "side" }, this.story, this.knobs.node, this.readings),
      el("div", { class: "stage" }, this.trouble, this.result, this.legend, this.board,
        el("h2", { text: "Decisions" }),
        this.lanes, this.strips));
  }

  buildControls() {
    const described = this.tasks.map((task) => [task.id, `${task.recorded ? "Recorded" : task.id}: ${task.name} (${task.difficulty === "easy" ? "warm-up" : task.difficulty})`]);
    this.taskSelect = select(described, this.first.id, () => this.choose());
    this.seedInput = el("input", { type: "number", min: "0", max: String(MAX_SEED), step: "1", value: "42", on: { change: () => this.choose() } });
    const dice = el("button", { type: "button", class: "quiet", text: "Another", "aria-label": "Another seed", on: { click: () => {
      this.seedInput.value = String(Math.floor(Math.random() * 100_000));
      this.choose();
    } } });
    this.speedSelect = select(SPEEDS, this.speed, (value) => { this.speed = Number(value); });
    this.startButton = el("button", { type: "button", class: "main", text: "Start the race", on: { click: () => this.press() } });
    this.againButton = el("button", { type: "button", text: "Start over", hidden: true, on: { click: () => this.choose() } });
    this.clock = el("progress", { max: 200, value: 0, "aria-label": "Seconds played" });
    this.story = el("p", { class: "story" });
    this.controls = el("div", { class: "controls" },
      field("Task", this.taskSelect), el("div", { class: "pair" }, field("Seed", this.seedInput), dice), field("Speed", this.speedSelect),
      el("div", { class: "buttons" }, this.startButton, this.againButton), this.clock);
  }

  /** Called whenever the tab is opened or its address changes. */
  async show(params) {
    const asked = params.get("task") ?? String(this.task?.id ?? this.first.id);
    const seed = params.get("seed") ?? this.seedInput.value;
    const shared = params.has("you") ? address.unpackActions(params.get("you")) : null;
    const same = this.task && String(this.task.id) === asked && seed === this.seedInput.value && !params.has("you");
    if (same) return;
    if (this.tasks.some((task) => String(task.id) === asked)) this.taskSelect.value = asked;
    this.seedInput.value = /^\d{1,16}$/.test(seed) ? seed : "42";
    await this.choose(shared);
    if (params.has("you") && !shared) fill(this.trouble, problem({ message: "The link does not contain a valid run", next: "start the race to play this episode yourself" }));
    else if (shared) this.press();
  }

  /** Load the policies' episodes for the chosen task and seed, and draw them. */
  async choose(shared = null) {
    const generation = ++this.generation;
    this.phase = "idle";
    this.shared = shared;
    this.task = this.tasks.find((task) => String(task.id) === this.taskSelect.value);
    const seed = Number(this.seedInput.value);
    if (!Number.isInteger(seed) || seed < 0 || seed > MAX_SEED) {
      fill(this.trouble, problem({ message: "The seed must be a whole number from 0", next: "correct the seed" }));
      return;
    }
    this.seed = seed;
    if (!shared) address.write("race", { task: this.task.id, seed });
    fill(this.trouble);
    fill(this.result);
    this.story.textContent = this.task.description;
    this.tiers = this.info.hardware[this.task.hardware].tiers;
    this.lanesOf = knobsOf(this.task);
    this.knobs.offer(this.task, this.tiers, !shared);
    this.mine = emptyRun();
    this.startButton.disabled = true;
    this.updateButtons();
    try {
      const { policies } = await once(`policies?task_id=${encodeURIComponent(this.task.id)}`);
      const rivals = policies.map(player).reverse(); // the server begins with the baselines
      const episodes = await Promise.all(rivals.map(({ key }) => post("play", { task_id: this.task.id, seed, agent: key })));
      if (generation !== this.generation) return;
      this.rivals = rivals.map((rival, i) => ({ ...rival, episode: episodes[i] }));
      this.length = episodes[0].steps;
      this.buildBoard();
      this.draw(this.length);
      this.startButton.disabled = false;
    } catch (error) {
      if (generation === this.generation) fill(this.trouble, problem(error));
    }
  }

  buildBoard() {
    const players = [YOU, ...this.rivals];
    for (const chart of Object.values(this.charts ?? {})) chart.destroy();
    const memoryLimit = this.task.memory_hard_limit_gb;
    const sync = "race";
    this.charts = {
      arrivals: new TimeChart({ title: "Arrivals", unit: "requests/s", series: [{ key: "traffic", label: "Arrivals", colour: "ink", width: 1 }], sync, stepped: true }),
      queue: new TimeChart({ title: "Queue", unit: "requests", series: players, sync }),
      ttft: new TimeChart({ title: "Time to first token", unit: "ms, log", series: players, log: true, sync,
        limits: [{ value: this.task.slo_target_ms, label: "SLO" }], tools: this.ttftChoice() }),
      memory: new TimeChart({ title: "Memory per GPU", unit: "GB", series: players, sync,
        limits: memoryLimit ? [{ value: memoryLimit, label: "limit" }] : [{ value: this.info.data.memory_budget_gb, label: "GPU" }] }),
      throughput: new TimeChart({ title: "Throughput", unit: "tokens/s", series: players, sync }),
      ...(this.task.max_replicas ? { replicas: new TimeChart({ title: "Replicas requested", unit: "loading and in service", series: players, sync, stepped: true, limits: [{ value: this.task.max_replicas, label: "maximum" }] }) } : {}),
      cost: new TimeChart({ title: "Cost so far", unit: "units", series: players, sync, limits: [{ value: this.task.cost_budget, label: "budget" }] }),
    };
    const shaded = floods(this.rivals[0].episode.phase);
    for (const chart of Object.values(this.charts)) chart.shade(shaded);
    fill(this.board, ...Object.values(this.charts).map((chart) => chart.figure));
    this.stripOf = new Map(players.map((player) => [player.key, new Strip(player.label, player.colour, this.lanesOf, this.length, this.tiers, this.task.max_replicas)]));
    fill(this.strips, ...[...this.stripOf.values()].map((strip) => strip.node));
    fill(this.legend, ...players.map((player) => this.legendEntry(player)), el("span", { class: "chip flood", text: "flood" }));
    const lanes = this.lanesOf.map((name) => this.knobs.title(name)).join(", ");
    this.lanes.textContent = `One column per second, one lane per knob; stronger colour is a higher setting. From the top: ${lanes}.`;
    this.hide();
  }

  ttftChoice() {
    const choice = select([["ttft_p50_ms", "median"], ["ttft_p99_ms", "99th percentile"]], this.ttft ??= "ttft_p50_ms", (value) => {
      this.ttft = value;
      this.draw(this.phase === "idle" ? this.length : this.mine.reward.length);
    });
    choice.setAttribute("aria-label", "Which time to first token");
    return choice;
  }

  legendEntry({ key, label, colour, title = "" }) {
    const box = el("input", { type: "checkbox", checked: !this.hidden.has(key), on: { change: (event) => {
      if (event.target.checked) this.hidden.delete(key);
      else this.hidden.add(key);
      this.hide();
    } } });
    return el("label", { class: `chip ink-${colour}`, title }, box, label);
  }

  hide() {
    for (const chart of Object.values(this.charts)) chart.setHidden(this.hidden);
    for (const [key, strip] of this.stripOf) strip.node.hidden = this.hidden.has(key);
  }

  // ---------------------------------------------------------------- drawing

  /** Draw the first `until` seconds of all players. */
  draw(until) {
    const x = Array.from({ length: this.length }, (_, i) => i + 1);
    const cut = (column) => x.map((_, i) => (i < until ? column[i] ?? null : null));
    const everyone = (pick) => Object.fromEntries([["you", cut(pick(this.mine))], ...this.rivals.map(({ key, episode }) => [key, cut(pick(episode))])]);
    const span = [0, this.length];
    // Observation 0 is that of the reset, before the first second.
    const seen = (name) => (run) => run.observation[name].slice(1);
    const measured = (name) => (run) => run.metrics[name];
    this.charts.arrivals.set(x, { traffic: cut(this.rivals[0].episode.arrivals) }, span);
    this.charts.queue.set(x, everyone(seen("queue_depth")), span);
    this.charts.ttft.set(x, everyone(measured(this.ttft)), span);
    this.charts.memory.set(x, everyone(measured("gpu_memory_gb")), span);
    this.charts.throughput.set(x, everyone(measured("tokens_per_sec")), span);
    this.charts.cost.set(x, everyone(seen("cost_so_far")), span);
    this.charts.replicas?.set(x, everyone((run) => run.action.replicas), span);
    this.stripOf.get("you").set(this.mine.action, Math.min(until, this.mine.reward.length));
    for (const { key, episode } of this.rivals) this.stripOf.get(key).set(episode.action, until);
    this.clock.max = this.length;
    this.clock.value = this.mine.reward.length;
    this.tellReadings();
  }

  tellReadings() {
    const at = this.mine.reward.length - 1;
    const last = (column) => (at < 0 ? undefined : column.at(-1));
    const missed = last(this.mine.observation.slo_violation_rate);
    const entries = [
      ["Second", `${at + 1} of ${this.length}`, false],
      ["Queue", at < 0 ? "–" : compact(Math.round(last(this.mine.observation.queue_depth))), false],
      ["First token", at < 0 ? "–" : `${compact(last(this.mine.metrics.ttft_p50_ms))} ms`, last(this.mine.metrics.ttft_p50_ms) > this.task.slo_target_ms],
      ["SLO missed", at < 0 ? "–" : percent(missed), missed > 0.1],
      ["Memory", at < 0 ? "–" : `${last(this.mine.metrics.gpu_memory_gb).toFixed(1)} GB`, last(this.mine.metrics.gpu_memory_gb) > (this.task.memory_hard_limit_gb ?? Infinity)],
      ["Cost", at < 0 ? "–" : `${last(this.mine.observation.cost_so_far).toFixed(2)} of ${this.task.cost_budget}`, last(this.mine.observation.cost_so_far) > this.task.cost_budget],
    ];
    if (this.task.max_replicas) entries.push(["Replicas", at < 0 ? "–" : `${last(this.mine.fleet.replicas_ready)} of ${last(this.mine.fleet.replicas)} ready`, false]);
    fill(this.readings, ...entries.map(([name, value, bad]) => el("div", { class: bad ? "bad" : "" }, el("dt", { text: name }), el("dd", { text: value }))));
  }

  // ---------------------------------------------------------------- playing

  press() {
    if (this.phase === "running") this.phase = "paused";
    else if (this.phase === "over") this.choose().then(() => this.press());
    else if (this.phase === "paused" && this.looping === this.generation) this.phase = "running"; // its last second is still being played
    else if (this.phase === "paused") this.run(this.generation);
    else this.begin();
    this.updateButtons();
  }

  updateButtons() {
    this.node.dataset.phase = this.phase;
    this.startButton.textContent = { idle: "Start the race", running: "Pause", paused: "Resume", over: "Race again" }[this.phase];
    this.againButton.hidden = this.phase === "idle" || this.phase === "over";
    for (const control of [this.taskSelect, this.seedInput]) control.disabled = this.phase === "running";
  }

  async begin() {
    const generation = this.generation;
    this.phase = "running";
    fill(this.trouble);
    try {
      const begun = await post("reset", { task_id: this.task.id, seed: this.seed });
      if (generation !== this.generation) return;
      this.session = begun.session_id;
      this.mine = emptyRun();
      append(this.mine.observation, begun.observation);
      this.draw(0);
      announce(this.shared ? "Replaying a shared run." : "The race has started.");
      await this.run(generation);
    } catch (error) {
      this.stopped(generation, error);
    }
  }

  /** Play until paused or over. Repeating a step is safe, since it carries its number. */
  async run(generation) {
    this.phase = "running";
    this.looping = generation;
    this.updateButtons();
    let due = performance.now(), drawn = 0;
    try {
      while (this.phase === "running" && generation === this.generation && this.mine.reward.length < this.length) {
        await this.second();
        if (generation !== this.generation) return;
        if (performance.now() - drawn > 30) {
          this.draw(this.mine.reward.length);
          drawn = performance.now();
        }
        due = Math.max(due + 1000 / (this.shared ? Math.max(REPLAY_SPEED, this.speed) : this.speed), performance.now());
        const wait = due - performance.now();
        if (wait > 1) await sleep(wait);
      }
      if (generation !== this.generation) return;
      this.draw(this.mine.reward.length);
      if (this.mine.reward.length >= this.length) await this.finish(generation);
    } catch (error) {
      this.stopped(generation, error);
    } finally {
      if (this.looping === generation) this.looping = null;
    }
    this.updateButtons();
  }

  stopped(generation, error) {
    if (generation !== this.generation) return;
    this.phase = this.mine.reward.length ? "paused" : "idle";
    fill(this.trouble, problem(error));
    this.updateButtons();
  }

  async second() {
    const number = this.mine.reward.length + 1;
    if (this.shared?.[number - 1]) this.knobs.set(this.shared[number - 1]);
    const answer = await post("step", { session_id: this.session, action: this.knobs.action(), step: number });
    append(this.mine.observation, answer.observation);
    append(this.mine.metrics, answer.info.metrics);
    append(this.mine.fleet, answer.info.fleet);
    append(this.mine.action, answer.info.action_applied);
    this.mine.reward.push(answer.reward);
    this.mine.log.push({ timestep: answer.info.timestep, action: answer.info.action_applied, reward: answer.reward, metrics: answer.info.metrics });
    if (number % 25 === 0) announce(`Second ${number}: queue ${Math.round(answer.observation.queue_depth)}, ${percent(answer.observation.slo_violation_rate)} missed their SLO.`);
  }

  async finish(generation) {
    const grade = await post("grader", { session_id: this.session });
    if (generation !== this.generation) return;
    this.phase = "over";
    const you = address.packActions(this.mine.log.map(({ action }) => action));
    const params = { task: this.task.id, seed: this.seed, you };
    address.write("race", params);
    const log = JSON.stringify({ task_id: this.task.id, seed: this.seed, episode_log: this.mine.log });
    const places = [{ ...YOU, ...grade }, ...this.rivals.map((rival) => ({ ...rival, ...rival.episode }))].sort((a, b) => b.score - a.score);
    const place = placeOf(grade, places);
    const verdict = `${place === 1 ? "You win" : `You are number ${place} of ${places.length}`} with ${grade.score.toFixed(3)}.`;
    const url = new URL(address.link("race", params), location.href).href;
    const share = el("button", { type: "button", class: "main", text: "Copy the link to this run" });
    share.addEventListener("click", () => copy(url, share));
    fill(this.result,
      el("h2", { text: verdict, tabindex: "-1" }),
      el("p", { text: grade.feedback }),
      scoreBoard(places),
      el("div", { class: "buttons" }, share,
        el("button", { type: "button", text: "Download the log", on: { click: () => download(`inferencegym-task-${this.task.id}-seed-${this.seed}.json`, log) } }),
        el("button", { type: "button", text: "Verify it", on: { click: () => verify(log) } })));
    announce(verdict);
    this.result.scrollIntoView({ block: "nearest" });
  }
}

/** Pass a log to the Verify tab. */
function verify(log) {
  handed.text = log;
  location.hash = "verify?log=handed";
}

function emptyRun() {
  return { observation: columns(), metrics: columns(), fleet: columns(), action: columns(), reward: [], log: [] };
}

/** Object whose missing properties are created as empty arrays when they are read. */
function columns() {
  return new Proxy({}, { get: (target, name) => (typeof name === "string" ? target[name] ??= [] : undefined) });
}

function append(target, values) {
  for (const [name, value] of Object.entries(values)) target[name].push(value);
}
