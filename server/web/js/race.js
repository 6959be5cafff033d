/** Race tab: the visitor and the built-in policies play the same episode, second by second. */

import * as address from "./address.js";
import { get, once, post, sleep } from "./api.js";
import { TimeChart, floods } from "./charts.js";
import { announce, copy, download, el, field, fill, problem, select } from "./dom.js";
import { compact, percent, score as shownScore, words } from "./format.js";
import { Knobs, knobsOf } from "./knobs.js";
import { handed } from "./log.js";
import { player } from "./players.js";
import { placeOf, scoreBoard } from "./score.js";
import { Strip } from "./strip.js";

const YOU = { key: "you", label: "You", colour: "you", width: 2.5 };
const SHARED = { key: "shared", label: "Shared run", called: "the shared run", title: "The run of the link that you followed.", colour: "ink", width: 2 };
const HIDDEN = ["hill_climb", "random", "random_search", "vllm_defaults", "naive", "kpa"]; // until the visitor asks for them
const STARTS = ["hpa", "vllm_defaults", "naive"]; // whose first action is the visitor's: the first that plays the task
const TARGETS = ["hpa", "heuristic"]; // whom to beat first
const SPEEDS = [[2, "2×"], [5, "5×"], [10, "10×"], [25, "25×"], [1000, "as fast as possible"]];
const RETRY_MS = 1000;
const KEPT = "race"; // in the session storage: the run that a reload takes up again
const MAX_SEED = 2 ** 53 - 1;

/** The seed of the day (UTC), such as 20260131: everybody gets the same traffic. */
const today = () => Number(new Date().toISOString().slice(0, 10).replaceAll("-", ""));

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
    this.speed = 5;
    this.knobs = new Knobs(info.action.properties);
    this.knobs.node.addEventListener("input", () => {
      this.startsAs = "Your sliders are where you left them.";
      if (this.phase === "idle" && this.target) this.tellScores();
    });
    this.buildControls();
    this.buildDuel();
    this.board = el("div", { class: "charts" });
    this.strips = el("div", { class: "strips" });
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Lines shown" });
    this.who = el("details", {});
    this.result = el("section", { class: "result", "aria-label": "Result" });
    this.leftOut = el("p", { class: "note" });
    this.lanes = el("p", { class: "note" });
    this.readings = el("dl", { class: "readings" });
    this.node = el("div", { class: "race" },
      this.duel,
      el("aside", { class: "side" }, this.knobs.node, this.readings),
      el("div", { class: "stage" }, this.result, this.controls, this.story, el("details", {}, el("summary", { text: "How the score is computed" }), this.formula), this.legend, this.who, this.leftOut, this.board,
        el("h2", { text: "Decisions" }),
        this.lanes, this.strips));
    addEventListener("pagehide", () => this.keep());
  }

  /** The first screen: the score to beat, the scores so far, and the button. */
  buildDuel() {
    this.goal = el("h2", { class: "goal" });
    this.about = el("p", { class: "about" });
    this.lead = el("p", { class: "lead", text: " " });
    this.parts = el("p", { class: "note" });
    this.versus = el("div", { class: "versus" });
    this.scoreBox = el("div", { class: "score-chart" });
    this.trouble = el("div", { class: "trouble" });
    this.startButton = el("button", { type: "button", class: "main", text: "Start the race", on: { click: () => this.press() } });
    this.againButton = el("button", { type: "button", text: "Start over", hidden: true, on: { click: () => this.choose(this.shared) } });
    this.clock = el("progress", { max: 200, value: 0, "aria-label": "Seconds played" });
    this.duel = el("section", { class: "duel", "aria-label": "The score to beat" },
      el("div", { class: "duel-text" }, this.goal, this.about, this.versus, this.lead, this.parts,
        el("div", { class: "buttons" }, this.startButton, this.againButton), this.trouble),
      this.scoreBox, this.clock);
  }

  buildControls() {
    const described = this.tasks.map((task) => [task.id, `${task.recorded ? "Recorded" : task.id}: ${task.name} (${task.difficulty === "easy" ? "warm-up" : task.difficulty + (task.static ? ", static" : "")})`]);
    this.taskSelect = select(described, this.first.id, () => this.choose());
    this.seedInput = el("input", { type: "number", min: "0", max: String(MAX_SEED), step: "1", value: String(today()), on: { change: () => this.choose() } });
    const daily = el("button", { type: "button", class: "quiet", text: "Today's", "aria-label": "Today's seed", on: { click: () => {
      this.seedInput.value = String(today());
      this.choose();
    } } });
    const dice = el("button", { type: "button", class: "quiet", text: "Another", "aria-label": "Another seed", on: { click: () => {
      this.seedInput.value = String(Math.floor(Math.random() * 100_000));
      this.choose();
    } } });
    this.speedSelect = select(SPEEDS, this.speed, (value) => { this.speed = Number(value); });
    this.story = el("p", { class: "story" });
    this.formula = el("p", { class: "note" });
    this.controls = el("div", { class: "controls" },
      field("Task", this.taskSelect), el("div", { class: "pair" }, field("Seed", this.seedInput), daily, dice), field("Speed", this.speedSelect));
  }

  /** Called whenever the tab is opened or its address changes. */
  async show(params) {
    const asked = params.get("task") ?? String(this.task?.id ?? this.first.id);
    const seed = params.get("seed") ?? this.seedInput.value;
    const shared = params.has("you") ? address.unpackActions(params.get("you")) : null;
    const same = this.task && String(this.task.id) === asked && seed === this.seedInput.value && !params.has("you");
    if (same) return;
    if (this.tasks.some((task) => String(task.id) === asked)) this.taskSelect.value = asked;
    this.seedInput.value = /^\d{1,16}$/.test(seed) ? seed : String(today());
    this.claimed = /^[01]\.\d{1,3}$/.test(params.get("beat") ?? "") ? Number(params.get("beat")) : undefined;
    await this.choose(shared);
    if (this.taskSelect.value !== asked) fill(this.trouble, problem({ message: `There is no task ${asked.slice(0, 60)} here`, next: "choose one of the list" }));
    else if (params.has("you") && !shared) fill(this.trouble, problem({ message: "The link does not contain a valid run", next: "start the race to play this episode yourself" }));
  }

  /** Load the policies' episodes for the chosen task and seed, and draw them; `shared` are the actions of a link. */
  async choose(shared = null) {
    const generation = ++this.generation;
    this.phase = "idle";
    this.shared = shared;
    const task = this.tasks.find(({ id }) => String(id) === this.taskSelect.value);
    if (task !== this.task) this.aim = null;
    this.task = task;
    const seed = Number(this.seedInput.value || NaN);
    if (!Number.isInteger(seed) || seed < 0 || seed > MAX_SEED) {
      fill(this.trouble, problem({ message: `The seed must be a whole number from 0 to ${MAX_SEED}`, next: "correct the seed" }));
      return;
    }
    this.seed = seed;
    if (!shared) address.write("race", { task: task.id, seed });
    fill(this.trouble);
    fill(this.result);
    this.story.textContent = task.description;
    this.formula.textContent = `Score, from 0 to 1: ${task.score}.`;
    this.tiers = this.info.hardware[task.hardware].tiers;
    this.lanesOf = knobsOf(task);
    this.knobs.offer(task, this.tiers);
    this.mine = newRun();
    this.startButton.disabled = true;
    this.updateButtons();
    try {
      const { policies } = await once(`policies?task_id=${encodeURIComponent(task.id)}`);
      const everyone = policies.map(player).reverse(); // the server begins with the baselines
      const oneOf = (names) => names.map((name) => everyone.find(({ key }) => key === name)).find(Boolean) ?? everyone[0];
      const begin = oneOf(STARTS), goal = oneOf([this.aim, ...TARGETS]);
      const playing = new Map();
      const play = ({ key }) => {
        if (!playing.has(key)) playing.set(key, post("play", { task_id: task.id, seed, agent: key }));
        return playing.get(key);
      };
      const first = { task_id: task.id, seed, agent: begin.key, config: { episode_length: 1 } }; // a whole episode is long to load
      const [begun, episode] = await Promise.all([post("play", first), play(goal)]);
      if (generation !== this.generation) return;
      this.length = episode.steps;
      this.phases = episode.phase;
      this.arrivals = episode.arrivals;
      const ghost = { ...SHARED, episode: { ...newRun(), score: this.claimed } };
      this.target = shared ? ghost : { ...goal, episode };
      this.knobs.set(Object.fromEntries(Object.entries(begun.action).map(([name, column]) => [name, column[0]])));
      this.startsAs = begin.key === "vllm_defaults" ? "Your sliders start at vLLM's defaults." : `Your sliders start where ${begin.called} starts.`;
      this.scale = "Scores go from 0 to 1.";
      this.showTarget();
      // The race can start; the other players follow.
      this.loaded = Promise.all(everyone.map(play));
      this.startButton.disabled = false;
      this.takeUp();
      const episodes = await this.loaded;
      if (generation !== this.generation) return;
      const rivals = everyone.map((rival, i) => ({ ...rival, episode: episodes[i] }));
      const scores = ({ episode: { score } }) => score >= 0.0005;
      const rest = rivals.filter((rival) => !scores(rival));
      this.rivals = [...(shared ? [this.target] : []), ...rivals.filter(scores)];
      const best = rivals.reduce((a, b) => (a.episode.score >= b.episode.score ? a : b));
      this.scale += ` The best policy here, ${best.called}, has ${shownScore(best.episode.score)}.`;
      const why = task.max_replicas ? "in this task, where the number of replicas has to follow the load" : "in this task";
      this.leftOut.textContent = rest.length ? `Left out, because they score 0 ${why}: ${rest.map(({ label }) => label).join(", ")}.` : "";
      this.buildBoard();
      this.draw();
    } catch (error) {
      if (generation === this.generation) fill(this.trouble, problem(error));
    }
  }

  /** Name the score to beat, and draw its line. */
  showTarget() {
    const { label, called, episode, colour } = this.target;
    const whose = this.shared ? "a shared run" : called;
    const traffic = this.seed === today() ? "today's traffic" : "this traffic";
    fill(this.goal, "Beat ", el("strong", { class: `ink-${colour}`, text: episode.score === undefined ? whose : shownScore(episode.score) }));
    const kind = this.task.difficulty === "easy" ? "A warm-up: nearly every setting scores this much. " : this.task.static ? "Static: a well-tuned constant setting scores as much as policies that adapt. " : "";
    const bands = floods(this.phases).length ? "Requests come in floods: be ready for them. " : "";
    this.about.textContent = `${episode.score === undefined ? "It plays" : `${whose[0].toUpperCase()}${whose.slice(1)} scores this on`} ${traffic}. ${kind}${bands}Serve much, be in time, spend little.`;
    const row = (player) => {
      const bar = el("meter", { min: 0, max: 1, value: 0, class: `ink-${player.colour}`, "aria-hidden": "true" }), value = el("span", { class: "value", text: "–" });
      return { bar, value, nodes: [el("span", { class: `chip ink-${player.colour}`, text: player.label }), bar, value] };
    };
    this.rows = [row(YOU), row({ label, colour })];
    fill(this.versus, ...this.rows.flatMap(({ nodes }) => nodes));
    this.scoreChart?.destroy();
    this.scoreChart = new TimeChart({ title: "Score so far", series: [YOU, { ...this.target, width: 2 }], height: matchMedia("(max-width: 560px)").matches ? 100 : 170, limits: episode.score === undefined ? [] : [{ value: episode.score, label: "to beat" }] });
    this.scoreChart.shade(floods(this.phases));
    fill(this.scoreBox, this.scoreChart.figure);
    this.draw();
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
    const shaded = floods(this.phases);
    for (const chart of Object.values(this.charts)) chart.shade(shaded);
    fill(this.board, ...Object.values(this.charts).map((chart) => chart.figure));
    this.stripOf = new Map(players.map((player) => [player.key, new Strip(player.label, player.colour, this.lanesOf, this.length, this.tiers, this.task.max_replicas)]));
    fill(this.strips, ...[...this.stripOf.values()].map((strip) => strip.node));
    fill(this.who, el("summary", { text: "Who are they?" }), el("dl", {}, ...this.rivals.filter(({ title }) => title).flatMap(({ label, title }) => [el("dt", { text: label }), el("dd", { text: title })])));
    fill(this.legend, ...players.map((player) => this.legendEntry(player)), el("span", { class: "chip flood", text: "flood" }));
    const lanes = this.lanesOf.map((name) => this.knobs.title(name)).join(", ");
    this.lanes.textContent = `One column per second, one lane per knob; stronger colour is a higher setting. From the top: ${lanes}.`;
    this.hide();
    this.built = this.generation;
  }

  ttftChoice() {
    const choice = select([["ttft_p50_ms", "median"], ["ttft_p99_ms", "99th percentile"]], this.ttft ??= "ttft_p50_ms", (value) => {
      this.ttft = value;
      this.draw();
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

  /** Draw the seconds that were played, or before the race the policies' whole episodes. */
  draw() {
    const until = this.phase === "idle" ? this.length : this.mine.reward.length;
    const x = Array.from({ length: this.length }, (_, i) => i + 1);
    const cut = (column) => x.map((_, i) => (i < until ? column[i] ?? null : null));
    const span = [0, this.length];
    const { key, episode } = this.target;
    this.scoreChart.set(x, { you: cut(this.mine.score_so_far), [key]: cut(episode.score_so_far) }, span);
    this.clock.max = this.length;
    this.clock.value = this.mine.reward.length;
    this.tellScores(until);
    this.tellReadings();
    if (this.built !== this.generation) return; // the other players are still on their way
    const everyone = (pick) => Object.fromEntries([["you", cut(pick(this.mine))], ...this.rivals.map((rival) => [rival.key, cut(pick(rival.episode))])]);
    // Observation 0 is that of the reset, before the first second.
    const seen = (name) => (run) => run.observation[name].slice(1);
    const measured = (name) => (run) => run.metrics[name];
    this.charts.arrivals.set(x, { traffic: cut(this.arrivals) }, span);
    this.charts.queue.set(x, everyone(seen("queue_depth")), span);
    this.charts.ttft.set(x, everyone(measured(this.ttft)), span);
    this.charts.memory.set(x, everyone(measured("gpu_memory_gb")), span);
    this.charts.throughput.set(x, everyone(measured("tokens_per_sec")), span);
    this.charts.cost.set(x, everyone(seen("cost_so_far")), span);
    this.charts.replicas?.set(x, everyone((run) => run.action.replicas), span);
    // What the others decide shows as the race goes on: before, it would be the answer.
    for (const [key, run] of [["you", this.mine], ...this.rivals.map((rival) => [rival.key, rival.episode])]) {
      this.stripOf.get(key).set(run.action, Math.min(this.mine.reward.length, run.reward.length));
    }
  }

  /** Both scores after `until` seconds, and who is ahead. */
  tellScores(until = this.mine.reward.length) {
    const scores = [this.mine, this.target.episode].map(({ score_so_far: column }) => column[until - 1]);
    scores.forEach((value, i) => {
      this.rows[i].value.textContent = value === undefined ? "–" : shownScore(value);
      this.rows[i].bar.value = value ?? 0;
    });
    const parts = this.mine.parts?.[until - 1];
    this.parts.textContent = parts ? Object.entries(parts).map(([name, value]) => `${words(name)} ${compact(value)}`).join(" · ") : this.scale;
    const [you, other] = scores, by = Math.abs(you - other);
    if (Number.isNaN(by)) this.lead.textContent = this.startsAs;
    else this.lead.textContent = by < 0.0005 ? "Level." : `You are ${shownScore(by)} ${you > other ? "ahead" : "behind"}.`;
  }

  tellReadings() {
    const at = this.mine.reward.length - 1;
    const last = (column) => (at < 0 ? undefined : column.at(-1));
    const missed = last(this.mine.observation.slo_violation_rate);
    const entries = [
      ["Second", `${at + 1} of ${this.length}`, false],
      ["Queue", at < 0 ? "–" : compact(Math.round(last(this.mine.observation.queue_depth))), false],
      ["First token", at < 0 ? "–" : `${compact(last(this.mine.metrics.ttft_p50_ms))} ms`, last(this.mine.metrics.ttft_p50_ms) > this.task.slo_target_ms],
      ["Missed this second", at < 0 ? "–" : percent(missed), missed > 0.1],
      ["Memory", at < 0 ? "–" : `${last(this.mine.metrics.gpu_memory_gb).toFixed(1)} GB`, last(this.mine.metrics.gpu_memory_gb) > (this.task.memory_hard_limit_gb ?? Infinity)],
      ["Cost", at < 0 ? "–" : `${last(this.mine.observation.cost_so_far).toFixed(2)} of ${this.task.cost_budget}`, last(this.mine.observation.cost_so_far) > this.task.cost_budget],
    ];
    if (this.task.max_replicas) entries.push(["Replicas", at < 0 ? "–" : `${last(this.mine.fleet.replicas_ready)} of ${last(this.mine.fleet.replicas)} ready`, false]);
    fill(this.readings, ...entries.map(([name, value, bad]) => el("div", { class: bad ? "bad" : "" }, el("dt", { text: name }), el("dd", { text: value }))));
  }

  // ---------------------------------------------------------------- playing

  press() {
    if (this.phase === "running") this.phase = "paused";
    else if (this.phase === "over") this.choose(this.shared).then(() => this.press());
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
      const reset = () => post("reset", { task_id: this.task.id, seed: this.seed });
      const [begun, other] = await Promise.all([reset(), this.shared ? reset() : null]);
      if (generation !== this.generation) return;
      this.mine = newRun(begun);
      if (other) Object.assign(this.target.episode, newRun(other));
      this.draw();
      announce(`The race has started. ${this.goal.textContent}.`);
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
          this.draw();
          drawn = performance.now();
        }
        due = Math.max(due + 1000 / this.speed, performance.now());
        const wait = due - performance.now();
        if (wait > 1) await sleep(wait);
      }
      if (generation !== this.generation) return;
      this.draw();
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
    if (error.status === 0) this.reconnect(generation);
  }

  /** Go on as soon as the server can be reached again, unless the visitor has done something else meanwhile. */
  async reconnect(generation) {
    const notice = this.trouble.firstChild;
    do {
      await sleep(RETRY_MS);
      if (generation !== this.generation || this.trouble.firstChild !== notice) return;
    } while (!(await get("health").then(() => true, () => false)));
    if (this.trouble.firstChild !== notice) return;
    fill(this.trouble);
    if (this.phase === "paused") this.run(generation);
  }

  /** Play the next second, and that of the shared run. */
  async second() {
    const number = this.mine.reward.length + 1, { shared } = this;
    await Promise.all([
      this.play(this.mine, number, () => this.knobs.action()),
      ...(shared ? [this.play(this.target.episode, number, (second) => shared[second - 1] ?? shared.at(-1))] : []),
    ]);
    const { slo_violation_rate: missed } = this.mine.observation;
    if (number % 25 === 0) announce(`Second ${number}: score ${shownScore(this.mine.score_so_far.at(-1))}, ${percent(missed.at(-1))} missed their SLO.`);
  }

  /** Play a run up to a second; `actionAt` gives the action of each. */
  async play(run, until, actionAt) {
    for (let step = run.reward.length + 1; step <= until; step++) {
      const answer = await post("step", { session_id: run.session, action: actionAt(step), step });
      append(run.observation, answer.observation);
      append(run.metrics, answer.info.metrics);
      append(run.fleet, answer.info.fleet);
      append(run.action, answer.info.action_applied);
      run.score_so_far.push(answer.info.grade_so_far.score);
      run.parts.push(answer.info.grade_so_far.breakdown);
      run.reward.push(answer.reward);
    }
  }

  // ---------------------------------------------------------------- a reload

  /** Keep a run that is not over, for a reload. Storage may be denied, as within a frame: the reload then starts anew. */
  keep() {
    const on = this.phase === "running" || (this.phase === "paused" && this.mine.reward.length > 0);
    try {
      if (!on) sessionStorage.removeItem(KEPT);
      else sessionStorage.setItem(KEPT, JSON.stringify({ hash: location.hash, phase: this.phase, speed: this.speed, action: this.knobs.action(), mine: this.mine, other: this.shared ? this.target.episode : null }));
    } catch { /* denied or full */ }
  }

  /** Take up the run that was kept for this address, if there is one. */
  takeUp() {
    let kept = null;
    try {
      kept = JSON.parse(sessionStorage.getItem(KEPT));
      sessionStorage.removeItem(KEPT);
    } catch { /* denied */ }
    if (kept?.hash !== location.hash || !kept.mine.session) return;
    this.mine = oldRun(kept.mine);
    if (kept.other) Object.assign(this.target.episode, oldRun(kept.other));
    this.knobs.set(kept.action);
    this.speed = kept.speed;
    this.speedSelect.value = String(kept.speed);
    this.phase = "paused";
    this.draw();
    this.updateButtons();
    if (kept.phase === "running") this.run(this.generation);
  }

  async finish(generation) {
    const graded = (run) => post("grader", { session_id: run.session });
    const [grade, other] = await Promise.all([graded(this.mine), this.shared ? graded(this.target.episode) : null, this.loaded]);
    if (generation !== this.generation) return;
    this.phase = "over";
    if (other) Object.assign(this.target.episode, other);
    const { called, episode } = this.target;
    const score = shownScore(grade.score), won = grade.score > episode.score;
    const params = { task: this.task.id, seed: this.seed, beat: score, you: address.packActions(rows(this.mine.action)) };
    address.write("race", params);
    const log = JSON.stringify({ task_id: this.task.id, seed: this.seed, episode_log: logOf(this.mine) });
    const places = [{ ...YOU, ...grade }, ...this.rivals.map((rival) => ({ ...rival, ...rival.episode }))].sort((a, b) => b.score - a.score);
    const verdict = score === shownScore(episode.score) ? `You are level with ${called}, with ${score}.` : won ? `You beat ${called} (${shownScore(episode.score)}) with ${score}.` : `Not yet: ${called} has ${shownScore(episode.score)}, you finish with ${score}.`;
    const next = places.findLast((rival) => rival.score > grade.score && rival.key !== "shared");
    const url = new URL(address.link("race", params), location.href).href;
    const share = el("button", { type: "button", class: "main", text: `Challenge a friend: beat my ${score}` });
    share.addEventListener("click", () => copy(url, share));
    const onward = won && next ? el("button", { type: "button", text: `Next: beat ${next.called}, ${shownScore(next.score)}`, on: { click: () => this.raceAgainst(next.key) } }) : null;
    fill(this.result,
      el("h2", { text: verdict, tabindex: "-1" }),
      el("p", { text: `Place ${placeOf(grade, places)} of ${places.length}. ${grade.feedback}` }),
      el("div", { class: "buttons" }, share, onward,
        el("button", { type: "button", text: "Download the log", on: { click: () => download(`inferencegym-task-${this.task.id}-seed-${this.seed}.json`, log) } }),
        el("button", { type: "button", text: "Verify it", on: { click: () => verify(log) } })),
      scoreBoard(places));
    announce(verdict);
    this.result.scrollIntoView({ block: "nearest" });
  }

  /** Race against another policy on the same traffic. */
  async raceAgainst(key) {
    this.aim = key;
    await this.choose();
    this.duel.scrollIntoView({ block: "nearest" });
    this.press();
  }
}

/** Pass a log to the Verify tab. */
function verify(log) {
  handed.text = log;
  location.hash = "verify?log=handed";
}

/** A run of which nothing is played yet, from the answer of POST /reset. */
function newRun(begun) {
  const run = { session: begun?.session_id, observation: columns(), metrics: columns(), fleet: columns(), action: columns(), reward: [], score_so_far: [], parts: [] };
  if (begun) append(run.observation, begun.observation);
  return run;
}

/** A run as JSON had it. */
function oldRun(run) {
  const parts = ["observation", "metrics", "fleet", "action"];
  return { parts: [], ...run, ...Object.fromEntries(parts.map((name) => [name, columns(run[name])])) };
}

/** Object whose missing properties are created as empty arrays when they are read. */
function columns(known = {}) {
  return new Proxy(known, { get: (target, name) => (typeof name === "string" && name !== "toJSON" ? target[name] ??= [] : undefined) });
}

/** Columns by name as an array of objects. */
function rows(table) {
  const names = Object.keys(table);
  return table[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, table[name][i]])));
}

/** The episode log of a run, as graders read it. */
function logOf(run) {
  const metrics = rows(run.metrics);
  return rows(run.action).map((action, i) => ({ timestep: i + 1, action, reward: run.reward[i], metrics: metrics[i] }));
}

function append(target, values) {
  for (const [name, value] of Object.entries(values)) target[name].push(value);
}
