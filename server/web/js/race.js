/** Race tab: the visitor and the built-in policies play the same episode, second by second. */

import * as address from "./address.js";
import { STARTS, asked, briefly } from "./ahead.js";
import { get, once, post, sleep } from "./api.js";
import { TimeChart, floods } from "./charts.js";
import { announce, copy, download, el, field, fill, problem, select } from "./dom.js";
import { compact, mean, percent, score as shownScore, sum, words } from "./format.js";
import { Knobs, hints, knobsOf, titleOf } from "./knobs.js";
import { handed, keep, takeKept } from "./kept.js";
import { SHARED, player } from "./players.js";
import { append, columnsOf, first, inRuns, logOf, newRun, oldRun, rows } from "./runs.js";
import { costOf, explained, mostLost, placeOf, rewarded, scoreBoard, summed } from "./score.js";
import { MAX_SEED, isSeed, seedOf, today } from "./seeds.js";
import { Strip, bare, shown } from "./strip.js";

const YOU = { key: "you", label: "You", colour: "you", width: 2.5 };
const HIDDEN = ["hill_climb", "random", "random_search", "vllm_defaults", "naive", "kpa"]; // until the visitor asks for them
const SKIPPING = 1000; // times the clock: as fast as possible
const SPEEDS = [[2, "2×"], [5, "5×"], [10, "10×"], [25, "25×"], [SKIPPING, "as fast as possible"]];
const PACE_SECONDS = 10; // over which the speed that the connection allows is taken
const NOTICE_S = 15; // before a flood, hints prepare for it
const RELIEVED_S = 3; // after an overload, its warning goes
const TREND_S = 5; // over which a part of the score rises or falls
const HINTS = 20; // times in a race that the server is asked which slider to move
const REACTION_S = 1; // a visitor takes so long to move a slider, at the chosen speed: a hint gains after it too
const HINTED = 5; // times the clock at most meanwhile, so that there is time to read a hint
const LATE = 0.2; // of the requests: as the first flood makes so many late, the race stops for a visitor who has moved no slider
const RACE_S = 45; // a race lasts at most so long at the preset speed
const FOLLOWED = 25; // times the clock: faster races are not watched
const RETRY_MS = 1000;
const LEAST = 0.0005; // in score: less is shown as 0
const GAIN = 0.005; // in score: advice that gains less is not given
const SCALING_GAIN = 0.001; // the same for hints in tasks that scale, of which many add up
const MOVE_REPLICAS = "The load rises and falls: move Replicas before it does.";
const NO_MOVE = "Leave your sliders: no single move helps now.";
const NO_MOVE_LEFT = "No single move helps any more: skip to the end, or try moves of your own.";
const BATCH_SECONDS = 4096; // of all episodes of a batch, in a request
const KEPT = "race"; // in the session storage: the run that a reload shows again

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
    this.finished = new Set(); // ids of the tasks that the visitor has raced to the end
    this.phase = "idle"; // idle, running, paused, over
    this.generation = 0;
    this.knobs = new Knobs(info.action.properties);
    this.knobs.node.addEventListener("input", () => {
      this.taught = true;
      this.advised = null;
      this.settled = false;
      if (!this.follows()) this.hinted = null; // a hint that was followed to its end goes
      if (this.phase === "running" || this.phase === "paused") this.coach();
      this.startsAs = "Your sliders are where you left them.";
      if (this.phase === "idle" && this.rows) this.tellScores();
    });
    this.buildControls();
    this.buildDuel();
    this.board = el("div", { class: "charts" });
    this.strips = el("div", { class: "strips" });
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Lines shown" });
    this.who = el("details", { hidden: true }); // until the players are there
    this.places = el("section", { class: "places", "aria-label": "All scores" });
    this.leftOut = el("p", { class: "note" });
    this.defaultsButton = el("button", { type: "button", class: "quiet", text: "vLLM's defaults", on: { click: () => this.useDefaults() } });
    this.decisions = el("div", { hidden: true }, el("h2", { text: "Decisions" }), el("p", { class: "note", text: "One column per second; stronger colour is a higher setting." }), this.strips);
    this.readings = el("dl", { class: "readings" });
    this.node = el("div", { class: "race" },
      this.duel,
      el("aside", { class: "side" }, this.knobs.node, this.defaultsButton),
      this.readings,
      el("div", { class: "stage" }, this.places, this.controls, this.fixed, this.story, el("details", {}, el("summary", { text: "How the score is computed" }), this.formula), this.legend, this.who, this.leftOut, this.board,
        this.decisions));
    addEventListener("pagehide", () => this.keep());
  }

  /** The first screen: the score to beat, the scores so far, and the button; after the race, the result. */
  buildDuel() {
    this.goal = el("h2", { class: "goal" });
    this.about = el("p", { class: "about" });
    this.result = el("section", { class: "result", "aria-label": "Result" });
    this.onward = el("span", { class: "onward" });
    this.lead = el("p", { class: "lead", text: " " });
    this.parts = el("p", { class: "note" });
    this.versus = el("div", { class: "versus" });
    this.scoreBox = el("div", { class: "score-chart" });
    this.trouble = el("div", { class: "trouble" });
    this.startButton = el("button", { type: "button", class: "main", text: "Start the race", on: { click: () => this.press() } });
    this.againButton = el("button", { type: "button", text: "Start over", hidden: true, on: { click: () => this.choose(this.shared) } });
    this.skipButton = el("button", { type: "button", text: "Skip to the end", hidden: true, on: { click: () => this.skip() } });
    this.clock = el("progress", { max: 200, value: 0, "aria-label": "Seconds played" });
    this.duel = el("section", { class: "duel", "aria-label": "The score to beat" },
      el("div", { class: "duel-text" }, this.goal, this.about, this.result, this.versus, this.lead, this.parts,
        el("div", { class: "buttons" }, this.startButton, this.skipButton, this.againButton, this.onward), this.trouble),
      this.scoreBox, this.clock);
  }

  buildControls() {
    const named = (tasks) => tasks.map(({ id, name, difficulty, recorded }) => [id, `${name}${difficulty === "easy" ? " (warm-up)" : recorded ? " (recorded)" : ""}`]);
    const described = [["Where adapting pays", named(this.tasks.filter((task) => !task.static))], ["Static: one good setting is enough", named(this.tasks.filter((task) => task.static))]].filter(([, tasks]) => tasks.length);
    this.taskSelect = select(described, this.first.id, () => this.choose());
    this.seedInput = el("input", { type: "number", min: "0", max: String(MAX_SEED), step: "1", value: String(today()), on: { change: () => this.choose() } });
    this.daily = el("button", { type: "button", class: "quiet", text: "Today's", "aria-label": "Today's seed", on: { click: () => {
      this.seedInput.value = String(today());
      this.choose();
    } } });
    this.dice = el("button", { type: "button", class: "quiet", text: "Another", "aria-label": "Another seed", on: { click: () => {
      this.seedInput.value = String(Math.floor(Math.random() * 100_000));
      this.choose();
    } } });
    this.speedSelect = select(SPEEDS, 5, (value) => { this.speed = this.ownSpeed = Number(value); });
    this.story = el("p", { class: "story" });
    this.fixed = el("p", { class: "note", hidden: true, text: "Task and seed stay as they are until the race is over, or you press Start over." });
    this.formula = el("p", { class: "note" });
    this.controls = el("div", { class: "controls" },
      field("Task", this.taskSelect), el("div", { class: "pair" }, field("Seed", this.seedInput), this.daily, this.dice), field("Speed", this.speedSelect));
  }

  /** Called whenever the tab is opened or its address changes. */
  async show(params) {
    if (this.task && location.hash === this.at) return; // back on this tab, with its race or its result as it was
    const kept = this.task ? null : takeKept(KEPT);
    if (kept) {
      this.at = location.hash;
      this.taskSelect.value = kept.task;
      this.seedInput.value = kept.seed;
      await this.choose(kept.shared && address.unpackActions(kept.shared), kept);
      return;
    }
    const asked = params.get("task") ?? String((params.has("you") ? null : this.task?.id) ?? this.first.id);
    const seed = params.get("seed") ?? this.seedInput.value;
    const shared = params.has("you") ? address.unpackActions(params.get("you")) : null;
    const same = this.task && !params.has("lost") && String(this.task.id) === asked && seed === this.seedInput.value && !params.has("you");
    if (same) return;
    if (this.tasks.some((task) => String(task.id) === asked)) this.taskSelect.value = asked;
    this.seedInput.value = isSeed(seed) ? seed : String(today());
    this.claimed = /^[01]\.\d{1,3}$/.test(params.get("beat") ?? "") ? Number(params.get("beat")) : undefined;
    const wrong = [
      [this.taskSelect.value !== asked, `There is no task ${asked.slice(0, 60)} here`, "choose one of the list"],
      [!isSeed(seed), `The link's seed, ${seed.slice(0, 60)}, is not a whole number from 0 to ${MAX_SEED}: this is today's`, "ask for the link again, or enter the seed"],
      [params.has("lost"), "The link names no part of this page", "ask for the link again, or choose a tab"],
      [params.has("you") && !shared, "The link does not contain a valid run", "start the race to play this episode yourself"],
      [params.has("beat") && !params.has("you"), "The link names a score but no run that has it, so the score to beat is another one", "ask for the link again, or start the race"],
    ].find(([is]) => is);
    const chosen = this.choose(shared);
    if (wrong) fill(this.trouble, problem({ message: wrong[1], next: wrong[2] }));
    await chosen;
  }

  /** Load the policies' episodes for the chosen task and seed, and draw them; `shared` are the actions of a link, `kept` is what `keep` kept. */
  async choose(shared = null, kept = null) {
    const generation = ++this.generation;
    this.phase = "idle";
    this.waiting = false;
    this.shared = shared;
    const task = this.tasks.find(({ id }) => String(id) === this.taskSelect.value);
    const before = [this.task, this.seed];
    if (task !== this.task) [this.aim, this.defaults, this.advised] = [kept?.aim, null, null];
    this.task = task;
    this.startButton.disabled = true;
    try {
      this.seed = seedOf(this.seedInput);
    } catch (error) {
      fill(this.trouble, problem(error));
      return;
    }
    const { seed } = this;
    if (!shared && !kept) this.write({ task: task.id, seed });
    fill(this.trouble);
    if (before[0] && (task !== before[0] || seed !== before[1])) this.clear();
    for (const box of [this.result, this.onward, this.places]) fill(box);
    this.board.classList.add("stale"); // until the charts are those of this episode
    this.story.textContent = task.description;
    this.tiers = this.info.hardware[task.hardware].tiers;
    this.memoryLimit = /\bmemory\b/.test(task.score) ? task.memory_hard_limit_gb : Infinity; // beyond it the score falls
    this.lanesOf = knobsOf(task);
    if (!this.defaults) this.knobs.offer(task, this.tiers); // another episode of a task keeps the visitor's sliders
    this.mine = newRun();
    this.defaultsButton.disabled = !this.defaults;
    this.updateButtons();
    try {
      const { policies } = await once(`policies?task_id=${encodeURIComponent(task.id)}`);
      const everyone = policies.map(player).reverse(); // the server begins with the baselines
      const oneOf = (names) => names.map((name) => everyone.find(({ key }) => key === name)).find(Boolean) ?? everyone[0];
      const base = oneOf(STARTS);
      let goal = oneOf([this.aim, base.key]);
      const playing = new Map();
      const play = ({ key }) => {
        if (!playing.has(key)) playing.set(key, post("play", { task_id: task.id, seed, agent: key }));
        return playing.get(key);
      };
      const brief = ({ key }) => post("play", briefly(task.id, seed, key));
      await asked;
      let episode = await brief(goal);
      if (generation !== this.generation) return;
      if (episode.score < LEAST) { // nobody is beaten by scoring nothing: the weakest of those that score is next
        const weakest = (await Promise.all(everyone.map(play))).map((played, i) => [everyone[i], played]).filter(([, { score }]) => score >= LEAST).sort((a, b) => a[1].score - b[1].score)[0];
        if (generation !== this.generation) return;
        if (weakest) [goal, episode] = weakest;
      }
      this.length = episode.steps;
      if (!this.ownSpeed) this.setSpeed(SPEEDS.slice(1).find(([times]) => this.length / times <= RACE_S)[0]);
      this.formula.textContent = `The score adds up its parts, each at most 1, and is at least 0. ${explained(episode.breakdown, task.grade).replace(/^./, (letter) => letter.toUpperCase())}.`;
      this.parts.title = this.formula.textContent;
      this.phases = episode.phase;
      this.target = shared ? { ...SHARED, episode: { ...newRun(), score: this.claimed } } : { ...goal, episode };
      if (!this.defaults) {
        const vllm = base.key === "vllm_defaults", { action } = base === goal ? episode : await brief(base);
        if (generation !== this.generation) return;
        this.defaults = { action: first(action), text: vllm ? "Your sliders are at the defaults of vLLM, an LLM server." : `Your sliders are where ${base.called} starts${this.asksFor(action)}.` };
        this.defaultsButton.textContent = vllm ? "vLLM's defaults" : `Where ${base.called} starts`;
        this.defaultsButton.disabled = false;
        this.useDefaults();
      }
      this.hidden.delete(this.target.key);
      this.scale = `Scores from 0 to 1 reward service that is ${rewarded(episode.breakdown)}.`;
      this.showTarget();
      // The race can start; the players' whole episodes follow, one after the other: a slow connection has room for the race.
      this.loaded = inTurn(everyone, play);
      this.replayed = shared && this.replay(this.target.episode, shared, generation);
      this.startButton.disabled = false;
      this.updateButtons();
      if (kept) this.takeUp(kept);
      const episodes = await this.loaded;
      if (generation !== this.generation) return;
      const rivals = everyone.map((rival, i) => ({ ...rival, episode: episodes[i] }));
      this.arrivals = episodes[0].arrivals;
      const scores = ({ episode: { score } }) => score >= LEAST;
      const rest = rivals.filter((rival) => !scores(rival));
      this.rivals = [...(shared ? [this.target] : []), ...rivals.filter(scores)];
      this.best = rivals.reduce((a, b) => (a.episode.score >= b.episode.score ? a : b));
      this.setting = rivals.find(({ key }) => key === "best_static")?.episode.action;
      this.isConstant = !task.static && this.lanesOf.every((name) => new Set(this.best.episode.action[name]).size === 1);
      if (this.isConstant) this.introduction = `${this.introduction.replace(MOVE_REPLICAS, "")} ${this.constantly()}`;
      this.scale += ` Programs race too. The best policy here, ${this.best.called}, has ${shownScore(this.best.episode.score)}.${this.best.episode.score > episode.score + GAIN ? "" : " There is little to win: other tasks have more."}`;
      const why = task.max_replicas ? "in this task, where the number of replicas has to follow the load" : "in this task";
      this.leftOut.textContent = rest.length ? `Left out, because they score 0 ${why}: ${rest.map(({ label }) => label).join(", ")}.` : "";
      this.buildBoard();
      this.draw();
      if (kept?.phase === "over") await this.finish(generation);
      await this.replayed;
    } catch (error) {
      if (generation !== this.generation) return;
      const lost = error.status === 0;
      fill(this.trouble, problem(lost ? { message: error.message, next: "check the connection; the page tries again by itself" } : error));
      this.updateButtons();
      if (lost && this.phase === "idle" && await this.reconnected(generation)) await this.choose(shared, kept);
    }
  }

  /** Write the address of this race, by which the tab knows it again. */
  write(params) {
    address.write("race", params);
    this.at = location.hash;
  }

  /** Empty the first screen while another episode loads. */
  clear() {
    this.goal.textContent = "Loading the race …";
    for (const box of [this.about, this.versus, this.scoreBox, this.lead, this.parts]) fill(box);
    this.rows = null;
  }

  /** Why nobody has to adapt on this traffic. */
  constantly() {
    return `On ${this.seed === today() ? "today's load" : "this load"} a constant setting wins, that of ${this.best.called}: nobody has to adapt.`;
  }

  /** Play the run of a link: its score so far is drawn as it comes, and its score replaces the one that the link claims. */
  async replay(run, actions, generation) {
    Object.assign(run, newRun(await post("reset", { task_id: this.task.id, seed: this.seed })));
    while (run.reward.length < this.length) {
      const second = run.reward.length + 1;
      try {
        await this.play(run, second, actions[second - 1] ?? actions.at(-1));
      } catch (error) {
        if (error.status !== 0) throw error;
        await sleep(RETRY_MS);
      }
      if (generation !== this.generation) return;
      if (second % 20 === 0) this.draw();
    }
    Object.assign(run, await post("grader", { session_id: run.session }));
    if (generation !== this.generation) return;
    this.nameTarget();
    this.scoreChart.limit([{ value: run.score, label: "to beat" }]);
    this.draw();
  }

  /** Put the sliders where they were on the first visit of the task. */
  useDefaults() {
    this.knobs.hold(this.defaults.action);
    this.knobs.set(this.defaults.action);
    this.startsAs = this.defaults.text;
    if (this.phase === "idle" && this.rows) this.tellScores();
  }

  /** How many replicas the sliders ask for, in words, if they are not those that run; "" in tasks that do not scale. */
  asksFor({ replicas }) {
    return replicas && replicas[0] !== this.task.n_replicas ? ` and ask for ${counted(replicas[0], "replica")}` : "";
  }

  /** Name the score to beat, and draw its line. */
  showTarget() {
    const { label, called, episode, colour } = this.target;
    const traffic = this.seed === today() ? "today's traffic" : "this seed";
    this.nameTarget();
    const kind = this.task.difficulty === "easy" ? "A warm-up: nearly every setting scores this much. " : this.task.static ? "Static: a well-tuned constant setting scores as much as policies that adapt. " : "";
    const { floods: known } = this.task;
    const bands = known ? `At second ${known.first_at_s}, a flood brings ${this.flood()} the load.` : this.task.max_replicas ? `${MOVE_REPLICAS} Late requests can cost the whole score.` : floods(this.phases).length ? "Requests come in floods: be ready for them." : "";
    const replicas = this.task.n_replicas, untouched = this.isUntouched = !this.shared && Object.entries(episode.action).every(([name, column]) => column.every((value) => value === this.defaults.action[name]));
    const scores = untouched ? `Touch nothing and you score ${shownScore(episode.score)} on ${traffic}.` : `${called[0].toUpperCase()}${called.slice(1)} ${this.shared ? "scored" : "scores"} this on ${traffic}.`;
    this.introduction = `You run ${replicas > 1 ? `${replicas} LLM servers` : "an LLM server"}${this.task.max_replicas ? " at first" : ""}. ${scores} ${kind}${bands}`;
    const row = (player) => {
      const bar = el("meter", { min: 0, max: 1, value: 0, class: `ink-${player.colour}`, "aria-hidden": "true" }), value = el("span", { class: "value", text: "–" });
      return { bar, value, nodes: [el("span", { class: `chip ink-${player.colour}`, text: player.label }), bar, value] };
    };
    this.rows = [row(YOU), row({ label, colour })];
    fill(this.versus, ...this.rows.flatMap(({ nodes }) => nodes));
    this.scoreChart?.destroy();
    this.scoreChart = new TimeChart({ title: "Score so far", series: [YOU, { ...this.target, width: 2 }], height: matchMedia("(max-width: 560px)").matches ? 100 : 170, limits: episode.score === undefined ? [] : [{ value: episode.score, label: "to beat" }] });
    fill(this.scoreBox, this.scoreChart.figure, this.shared && this.sharedStrip());
    this.draw();
  }

  /** Write the score to beat. */
  nameTarget() {
    const { called, episode: { score }, colour } = this.target;
    fill(this.goal, "Beat ", el("strong", { class: `ink-${colour}`, text: score === undefined ? called : shownScore(score) }));
  }

  /** What the run of a link decides, second by second. */
  sharedStrip() {
    const strip = new Strip(`${SHARED.label}'s sliders`, SHARED.colour, this.lanes(), this.length, this.tiers, this.task.max_replicas);
    strip.set(columnsOf(Array.from({ length: this.length }, (_, i) => this.shared[i] ?? this.shared.at(-1))), this.length);
    return strip.node;
  }

  /** The lanes of a strip: sliders and their titles. */
  lanes() {
    return this.lanesOf.map((name) => [name, titleOf(name)]);
  }

  buildBoard() {
    const players = [YOU, ...this.rivals];
    for (const chart of Object.values(this.charts ?? {})) chart.destroy();
    const sync = "race";
    this.charts = {
      arrivals: new TimeChart({ title: "Arrivals", unit: "requests/s", series: [{ key: "traffic", label: "Arrivals", colour: "ink", width: 1 }], sync, stepped: true }),
      queue: new TimeChart({ title: "Queue", unit: "requests", series: players, sync }),
      ttft: new TimeChart({ title: "Time to first token", unit: "ms, log", series: players, log: true, sync,
        limits: [{ value: this.task.slo_target_ms, label: "time limit" }], tools: this.ttftChoice() }),
      memory: new TimeChart({ title: "Memory per GPU", unit: "GB", series: players, sync,
        limits: [this.memoryLimit === Infinity ? { value: this.task.oom_above_gb, label: "out of memory" } : { value: this.memoryLimit, label: "limit" }] }),
      throughput: new TimeChart({ title: "Throughput", unit: "tokens/s", series: players, sync }),
      ...(this.task.max_replicas ? { replicas: new TimeChart({ title: "Replicas requested", unit: "loading and in service", series: players, sync, stepped: true, limits: [{ value: this.task.max_replicas, label: "maximum" }] }) } : {}),
      cost: new TimeChart({ title: "Cost so far", unit: "% of the budget", series: players, sync, limits: [{ value: 100, label: "budget" }] }),
    };
    fill(this.board, ...Object.values(this.charts).map((chart) => chart.figure));
    this.stripOf = new Map(players.map((player) => [player.key, new Strip(player.label, player.colour, this.lanes(), this.length, this.tiers, this.task.max_replicas)]));
    fill(this.strips, ...[...this.stripOf.values()].map((strip) => strip.node));
    this.who.hidden = false;
    fill(this.who, el("summary", { text: "Who are they?" }), el("dl", {}, ...this.rivals.filter(({ title }) => title).flatMap(({ label, title }) => [el("dt", { text: label }), el("dd", { text: title })])));
    fill(this.legend, ...players.map((player) => this.legendEntry(player)), floods(this.phases).length ? el("span", { class: "chip flood", text: "flood" }) : null);
    this.hide();
    this.board.classList.remove("stale");
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
    for (const [key, strip] of this.stripOf) strip.node.hidden = this.hidden.has(key) || (key !== "you" && !this.finished.has(this.task.id));
  }

  // ---------------------------------------------------------------- drawing

  /** Draw the seconds that were played, or before the race the policies' whole episodes. */
  draw() {
    const until = this.phase === "idle" ? this.length : this.mine.reward.length;
    const x = Array.from({ length: this.length }, (_, i) => i + 1);
    const cut = (column) => x.map((_, i) => (i < until ? column[i] ?? null : null));
    const span = [0, this.length];
    const { key, episode } = this.target;
    // Floods that the task does not announce are shaded once they have come.
    const shaded = floods(this.task.floods ? this.phases : this.phases.slice(0, this.mine.reward.length));
    this.scoreChart.shade(shaded);
    this.scoreChart.set(x, { you: cut(this.mine.score_so_far), [key]: cut(episode.score_so_far) }, span);
    this.clock.max = this.length;
    this.clock.value = this.mine.reward.length;
    this.tellScores(until);
    this.coach();
    this.tellReadings();
    if (this.built !== this.generation) return; // the other players are still on their way
    const everyone = (pick) => Object.fromEntries([["you", cut(pick(this.mine))], ...this.rivals.map((rival) => [rival.key, cut(pick(rival.episode))])]);
    // Observation 0 is that of the reset, before the first second.
    const seen = (name) => (run) => run.observation[name].slice(1);
    const measured = (name) => (run) => run.metrics[name];
    for (const chart of Object.values(this.charts)) chart.shade(shaded);
    this.charts.arrivals.set(x, { traffic: cut(this.arrivals) }, span);
    this.charts.queue.set(x, everyone(seen("queue_depth")), span);
    this.charts.ttft.set(x, everyone(measured(this.ttft)), span);
    this.charts.memory.set(x, everyone(measured("gpu_memory_gb")), span);
    this.charts.throughput.set(x, everyone(measured("tokens_per_sec")), span);
    this.charts.cost.set(x, everyone((run) => seen("cost_so_far")(run).map((cost) => 100 * cost / this.task.cost_budget)), span);
    this.charts.replicas?.set(x, everyone((run) => run.action.replicas), span);
    // What the others decide shows after the visitor's own first race: before, it would be the answer.
    this.decisions.hidden = this.mine.reward.length === 0;
    for (const [key, run] of [["you", this.mine], ...this.rivals.map((rival) => [rival.key, rival.episode])]) {
      this.stripOf.get(key).set(run.action, Math.min(this.mine.reward.length, run.reward.length));
    }
  }

  /** Both scores after `until` seconds, and who is ahead. */
  tellScores(until = this.mine.reward.length) {
    const scores = [this.mine, this.target.episode].map(({ score_so_far: column, score }) => column[until - 1] ?? (this.phase === "idle" ? score : undefined));
    scores.forEach((value, i) => {
      this.rows[i].value.textContent = value === undefined ? "–" : shownScore(value);
      this.rows[i].bar.value = value ?? 0;
    });
    const parts = this.mine.parts?.[until - 1], before = this.mine.parts?.[until - 1 - TREND_S];
    const trend = (name) => (!before || Math.abs(parts[name] - before[name]) < 0.005 ? "" : parts[name] > before[name] ? " ↑" : " ↓");
    // A server on the same machine is a little late too, so only a half counts as slow.
    const slow = this.phase === "running" && this.speed <= FOLLOWED && this.pace < this.speed / 2 ? `Running at ${compact(this.pace, 2)}×: the server or the connection allows no more. ` : "";
    this.parts.textContent = parts ? `${slow}So far: ` + Object.entries(parts).map(([name, value]) => `${words(name)} ${shownScore(value)}${trend(name)}`).join(" · ") : this.scale;
    const [you, other] = scores, by = Math.abs(you - other);
    if (Number.isNaN(by)) this.lead.textContent = this.startsAs;
    else this.lead.textContent = by < 0.0005 ? "Level." : `You are ${shownScore(by)} ${you > other ? "ahead" : "behind"}.`;
  }

  /** A flood's load as a multiple of the usual one, such as "10 times". */
  flood() {
    return `${compact(this.task.floods.arrival_rate_rps / this.task.arrival_rate_rps, 2)} times`;
  }

  /** During a race: when the next flood comes, and which slider to move. */
  coach() {
    const played = this.mine.reward.length, { floods: known } = this.task;
    if (!played) {
      this.about.textContent = this.introduction;
      this.knobs.point(this.advised?.name);
      return;
    }
    let clock = "", soon = false;
    if (known) {
      const since = played - known.first_at_s, into = since % known.every_s, next = since < 0 ? -since : known.every_s - into;
      const on = since >= 0 && into < known.lasts_s;
      soon = on || next <= NOTICE_S;
      clock = on ? `Flood: ${known.lasts_s - into} s left. ` : played + next < this.length ? `Flood in ${next} s: ${this.flood()} the load. ` : "The last flood is over. ";
    }
    const worst = this.overloads().at(-1), on = played - worst?.to < RELIEVED_S, tip = this.hinted ?? (on && !this.lost && this.relief());
    this.knobs.point(tip?.name);
    const advice = on && this.lost ? "From here even the best policy ends at 0: press Start over." : tip?.text ?? (!this.settled ? "" : this.task.max_replicas ? NO_MOVE : NO_MOVE_LEFT);
    if (this.lesson && (advice || this.seeking)) fill(this.about, el("strong", { class: "soon", text: "Paused: the flood is here. " }), `${percent(this.mine.observation.slo_violation_rate.at(-1))} of the requests are late. ${advice ? `${advice} Then press Resume.` : "Looking for the slider that helps most …"}`);
    else if (this.lesson) fill(this.about, el("strong", { text: "Now press Resume" }), ` and watch your score leave that of ${this.target.called}.`);
    else {
      fill(this.about, el("strong", { class: soon || on ? "soon" : "", text: `${clock}${on ? this.warning(worst) : ""}` }), advice);
    }
  }

  /** The move that relieves an overload of a fleet that scales, unless replicas are loading or there are no more. */
  relief() {
    const { max_replicas: most } = this.task, action = this.knobs.action(), { replicas, replicas_ready: ready } = this.mine.fleet;
    if (!most || action.replicas > ready.at(-1) || replicas.at(-1) > ready.at(-1)) return undefined;
    const planned = this.built === this.generation ? this.best.episode.action.replicas[this.mine.reward.length] ?? 0 : 0;
    const [move] = hints(action, { ...action, replicas: Math.min(most, Math.max(action.replicas + 1, planned)) }, this.task);
    return move && { ...move, text: this.withValue(move) };
  }

  /** A move in words, with the value to reach. */
  withValue({ name, value, text }) {
    return text.replace(":", ` (${shown(name, value, this.tiers)}):`);
  }

  /** An overload that goes on, in words. */
  warning({ from, to, cost }) {
    const { replicas, replicas_ready: ready } = this.mine.fleet, loading = replicas.at(-1) - ready.at(-1);
    const price = cost >= LEAST ? `, which has cost ${shownScore(cost)} of your score so far` : "";
    return `Overloaded for ${to - from} s: ${percent(this.mine.observation.slo_violation_rate.at(-1))} of the requests are late${price}. ${loading > 0 ? `Loading: ${counted(loading, "replica")}. ` : ""}`;
  }

  /** Stretches in which many requests were late: seconds `from` + 1 to `to`, the share that was `late`, and their `cost` in score. */
  overloads() {
    const { parts, metrics: { slo_violations: violations }, observation } = this.mine, found = [];
    const late = observation.slo_violation_rate.slice(1), costs = costOf(violations, parts, this.task, this.length);
    late.forEach((share, i) => {
      if (share <= LATE) return;
      if (i - found.at(-1)?.to < TREND_S) found.at(-1).to = i + 1;
      else found.push({ from: i, to: i + 1 });
    });
    return found.map(({ from, to }) => ({ from, to, late: mean(late.slice(from, to)), cost: costs(sum(violations.slice(from, to))) }));
  }

  /** Whether the hint's slider is on its way, and not there yet. */
  follows() {
    if (!this.hinted) return false;
    const { name, value, from } = this.hinted, now = this.knobs.action();
    return (value - now[name]) * (now[name] - from[name]) > 0 && Object.keys(now).every((other) => other === name || now[other] === from[other]);
  }

  /** Ask the server for a hint: the move to make now. */
  async seek() {
    const { mine, generation } = this, action = this.knobs.action(), asked = JSON.stringify(action);
    const played = rows(mine.action), held = Math.min(Math.round(REACTION_S * this.speed), this.length - played.length - 1);
    this.seeking = true;
    const found = await this.bestNow(action, played, held).catch(() => undefined); // what cannot be checked is not advised
    this.seeking = false;
    if (generation !== this.generation || mine !== this.mine || asked !== JSON.stringify(this.knobs.action())) return;
    this.settled = found === null;
    const text = found && `${this.withValue(found)}${found.worth ?? ""}`;
    const again = this.hinted?.name === found?.name && this.hinted?.value === found?.value;
    this.hinted = found && { ...found, text, from: action, freshUntil: again ? this.hinted.freshUntil : played.length + held };
  }

  /**
   * The move that gains most by the end of the episode, at once and after `held` seconds too; null if none does. All move towards one
   * constant setting, so that no hint takes back another, and say what they are `worth`. Tasks that scale have no such setting: there
   * a move is compared with none until the next hint can be followed, and both go on as the best policy, so that replicas which are
   * removed for a lull come back.
   */
  async bestNow(action, before, held) {
    if (this.built !== this.generation || before.length >= this.length) return undefined; // the other players are still on their way
    const scales = this.task.max_replicas, plan = rows(this.best.episode.action).slice(before.length), moves = this.moves(action, scales ? plan[held] : action);
    if (!moves.length) return undefined;
    const until = scales ? Math.round(this.length / HINTS) + 2 * held : Infinity, [stay, ...moved] = trials(action, moves);
    const run = (setting, from) => plan.map((planned, i) => (i >= until ? planned : i < from ? action : setting));
    const [none, ...courses] = await this.coursesOf([run(stay, 0), ...[0, held].flatMap((from) => moved.map((setting) => run(setting, from)))], before);
    const least = none.at(-1), scores = courses.map((course) => course.at(-1));
    this.lost = scales && Math.max(least, ...scores) < LEAST;
    const worse = moves.map((_, i) => Math.min(scores[i], scores[moves.length + i])), best = bestMove(moves, worse, least, scales ? SCALING_GAIN : GAIN);
    if (!best || scales) return best ?? null;
    const dips = courses[moves.indexOf(best.move)].findLastIndex((score, i) => score < none[i] - LEAST) + 1;
    return { ...best, worth: dips > before.length ? ` Your score falls until second ${dips}; by the end you gain ${shownScore(best.score - least)}.` : ` By the end you gain ${shownScore(best.score - least)}.` };
  }

  /** Moves of one slider: towards the best constant setting and what is `planned`, and in tasks that scale to a few replicas more or fewer. */
  moves(action, planned = action) {
    if (this.built !== this.generation) return []; // the other players are still on their way
    const towards = this.setting ? first(this.setting) : action, { max_replicas: most } = this.task;
    const counts = most ? [-2, -1, 1, 2].map((more) => action.replicas + more).filter((count) => count >= 1 && count <= most) : [];
    const all = [this.knobs.reach(towards), this.knobs.reach(planned), ...counts.map((replicas) => ({ ...action, replicas }))].flatMap((goal) => hints(action, goal, this.task));
    return [...new Map(all.map((move) => [`${move.name} ${move.value}`, move])).values()];
  }

  tellReadings() {
    const at = this.mine.reward.length - 1;
    const last = (column) => (at < 0 ? undefined : column.at(-1));
    const missed = last(this.mine.observation.slo_violation_rate), used = last(this.mine.metrics.gpu_memory_gb);
    const over = last(this.mine.metrics.oom) ? ", out of memory" : used > this.memoryLimit ? `, over the limit of ${this.memoryLimit} GB` : "";
    const entries = [
      ["Second", `${at + 1} of ${this.length}`, false],
      ["Queue", at < 0 ? "–" : compact(Math.round(last(this.mine.observation.queue_depth))), false],
      ["First token", at < 0 ? "–" : `${compact(last(this.mine.metrics.ttft_p50_ms))} ms`, last(this.mine.metrics.ttft_p50_ms) > this.task.slo_target_ms],
      ["Late now", at < 0 ? "–" : percent(missed), missed > 0.1],
      ["Memory", at < 0 ? "–" : `${used.toFixed(1)} GB${over}`, over],
      ["Cost", at < 0 ? "–" : `${percent(last(this.mine.observation.cost_so_far) / this.task.cost_budget)} of the budget`, last(this.mine.observation.cost_so_far) > this.task.cost_budget],
    ];
    if (this.task.max_replicas) entries.push(["Replicas", at < 0 ? "–" : `${last(this.mine.fleet.replicas_ready)} of ${last(this.mine.fleet.replicas)} ready`, false]);
    fill(this.readings, ...entries.map(([name, value, bad]) => el("div", { class: bad ? "bad" : "" }, el("dt", { text: name }), el("dd", { text: value }))));
  }

  setSpeed(times) {
    this.speed = Number(times);
    this.speedSelect.value = String(times);
  }

  // ---------------------------------------------------------------- playing

  press() {
    this.lesson = false;
    if (this.phase === "running") this.phase = "paused";
    else if (this.phase === "over") this.choose(this.shared).then(() => this.press());
    else if (this.phase === "paused" && this.looping === this.generation) this.phase = "running"; // its last second is still being played
    else if (this.phase === "paused") this.run(this.generation);
    else this.begin();
    this.updateButtons();
  }

  /** Play the rest as fast as possible. */
  skip() {
    this.speed = SKIPPING;
    if (this.phase === "paused") this.press();
    this.updateButtons();
  }

  updateButtons() {
    this.node.dataset.phase = this.phase;
    this.startButton.textContent = { idle: this.startButton.disabled && !this.trouble.firstChild ? "Loading the race …" : "Start the race", running: this.mine.reward.length ? "Pause" : "Starting …", paused: this.waiting ? "Try now" : "Resume", over: "Race again" }[this.phase];
    this.againButton.hidden = this.phase === "idle" || this.phase === "over";
    // A race is thrown away by "Start over" alone.
    const on = this.phase === "running" || this.phase === "paused";
    this.skipButton.hidden = !on || !this.mine.reward.length || this.speed > FOLLOWED;
    this.fixed.hidden = !on;
    for (const control of [this.taskSelect, this.seedInput, this.daily, this.dice]) control.disabled = on;
  }

  /** Called when another tab is opened: the race waits. */
  leave() {
    if (this.phase !== "running") return;
    this.phase = "paused";
    this.updateButtons();
  }

  async begin() {
    const generation = this.generation;
    this.phase = "running";
    this.speed = Number(this.speedSelect.value); // the last race may have been skipped to its end
    fill(this.trouble);
    this.duel.scrollIntoView({ block: "nearest" }); // after a race, the window may be far below
    try {
      const begun = await post("reset", { task_id: this.task.id, seed: this.seed });
      if (generation !== this.generation) return;
      this.mine = newRun(begun);
      this.lost = this.settled = false;
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
    this.waiting = false;
    this.looping = generation;
    this.updateButtons();
    let due = performance.now(), drawn = 0;
    const played = []; // when each of the last seconds was
    try {
      while (this.phase === "running" && generation === this.generation && this.mine.reward.length < this.length) {
        await this.second();
        if (generation !== this.generation) return;
        if (this.mine.reward.length === 1) {
          this.updateButtons();
          this.draw();
          if (matchMedia("(max-width: 560px)").matches) this.node.scrollIntoView(); // a phone has no room for the tabs
        }
        await this.teach();
        if (this.phase !== "running") break;
        const [before, late] = this.mine.observation.slo_violation_rate.slice(-2), overloaded = before <= LATE && late > LATE;
        if (overloaded) announce(`Second ${this.mine.reward.length}: overloaded, ${percent(late)} of the requests are late.`);
        if (this.speed <= FOLLOWED && !this.seeking && (overloaded || this.mine.reward.length % Math.round(this.length / HINTS) === 1)) this.seek();
        played.push(performance.now());
        if (played.length > PACE_SECONDS) played.shift();
        this.pace = played.length < 5 ? this.speed : 1000 * (played.length - 1) / (played.at(-1) - played[0]);
        if (performance.now() - drawn > 30) {
          this.draw();
          drawn = performance.now();
        }
        const slowed = this.speed <= FOLLOWED && this.mine.reward.length < this.hinted?.freshUntil;
        if (slowed) played.length = 0;
        due = Math.max(due + 1000 / (slowed ? Math.min(HINTED, this.speed) : this.speed), performance.now());
        const wait = due - performance.now();
        if (wait > 1) await sleep(wait);
      }
      if (generation !== this.generation) return;
      this.draw();
      if (this.lesson) announce(this.about.textContent);
      if (this.mine.reward.length >= this.length) await this.finish(generation);
    } catch (error) {
      this.stopped(generation, error);
    } finally {
      if (this.looping === generation) this.looping = null;
    }
    this.updateButtons();
  }

  /** Stop in the first flood to show what sliders do: for a visitor who has moved none, in the task that is open first, where one slider wins. */
  async teach() {
    const flooded = this.task === this.first && this.mine.reward.length > this.task.floods?.first_at_s && this.mine.observation.slo_violation_rate.at(-1) > LATE;
    if (!flooded || this.taught || this.speed > FOLLOWED) return;
    this.taught = this.lesson = true;
    this.phase = "paused";
    this.updateButtons();
    const sought = this.seek();
    this.draw();
    await sought;
  }

  stopped(generation, error) {
    if (generation !== this.generation) return;
    this.phase = this.mine.reward.length ? "paused" : "idle";
    this.waiting = error.status === 0 && this.phase === "paused";
    fill(this.trouble, problem(this.waiting ? { message: error.message, next: "check the connection; the race goes on by itself when the server answers" } : error));
    this.updateButtons();
    if (error.status === 0) this.reconnect(generation);
  }

  /** Go on as soon as the server can be reached again, unless the visitor has done something else meanwhile. */
  async reconnect(generation) {
    if (!await this.reconnected(generation)) return;
    fill(this.trouble);
    if (this.phase === "paused") this.run(generation);
  }

  /** Wait until the server can be reached again; false if the visitor has done something else meanwhile. */
  async reconnected(generation) {
    const notice = this.trouble.firstChild;
    do {
      await sleep(RETRY_MS);
      if (generation !== this.generation || this.trouble.firstChild !== notice) return false;
    } while (!(await get("health").then(() => true, () => false)));
    return generation === this.generation && this.trouble.firstChild === notice;
  }

  /** Play the next second. */
  async second() {
    const number = this.mine.reward.length + 1;
    await this.play(this.mine, number, this.knobs.action());
    const { slo_violation_rate: missed } = this.mine.observation;
    if (number % 25 === 0) announce(`Second ${number}: score ${shownScore(this.mine.score_so_far.at(-1))}, ${percent(missed.at(-1))} were late.`);
  }

  /** Play a second of a run. */
  async play(run, step, action) {
    const answer = await post("step", { session_id: run.session, action, step });
    append(run.observation, answer.observation);
    append(run.metrics, answer.info.metrics);
    append(run.fleet, answer.info.fleet);
    append(run.action, answer.info.action_applied);
    run.score_so_far.push(answer.info.grade_so_far.score);
    run.parts.push(answer.info.grade_so_far.breakdown);
    run.reward.push(answer.reward);
  }

  // ---------------------------------------------------------------- a reload

  /** Keep the run for a reload. */
  keep() {
    const { task, seed, aim, shared, phase, taught, startsAs, mine } = this;
    keep(KEPT, this.at, mine?.reward.length ? { task: task.id, seed, aim, shared: shared && address.packActions(shared), phase, speed: this.speedSelect.value, taught, action: this.knobs.action(), startsAs, mine } : null);
  }

  /** Take up the run that was kept. */
  takeUp({ mine, action, startsAs, speed, phase, taught }) {
    this.mine = oldRun(mine);
    this.knobs.set(action);
    this.taught = taught;
    this.startsAs = startsAs;
    this.setSpeed(speed);
    this.phase = "paused";
    this.draw();
    if (phase === "over") return; // its result needs the other players
    this.updateButtons();
    if (phase === "running") this.run(this.generation);
  }

  async finish(generation) {
    const [grade] = await Promise.all([this.mine.grade ?? post("grader", { session_id: this.mine.session }), this.loaded, this.replayed]);
    if (generation !== this.generation) return;
    this.mine.grade = grade;
    this.phase = "over";
    this.finished.add(this.task.id);
    this.hide();
    this.knobs.point();
    this.advised = this.hinted = null;
    const { called, episode } = this.target;
    const score = shownScore(grade.score), toBeat = shownScore(episode.score), won = Number(score) > Number(toBeat);
    const params = { ...(this.task === this.first ? {} : { task: this.task.id }), seed: this.seed, beat: score, you: address.packActions(rows(this.mine.action)) };
    this.write(params);
    const log = JSON.stringify({ task_id: this.task.id, seed: this.seed, episode_log: logOf(this.mine) });
    const places = [{ ...YOU, ...grade }, ...this.rivals.map((rival) => ({ ...rival, ...rival.episode }))].sort((a, b) => b.score - a.score);
    const verdict = score === toBeat ? `Level with ${called}.` : won ? `You beat ${called} (${toBeat}).` : `Not yet: ${called} has ${toBeat}.`;
    const next = places.findLast((rival) => Number(shownScore(rival.score)) > Number(score) && rival.key !== "shared");
    const url = new URL(address.link("race", params), location.href).href;
    const share = el("button", { type: "button", text: "Challenge a friend" }), copied = el("small", { class: "copied", hidden: true });
    share.addEventListener("click", () => {
      copied.textContent = `I scored ${score} at running an LLM fleet, against the ${toBeat} of ${this.shared ? "my challenger" : called}.\n${this.squares()} (a tenth of the race each; 🟩 90% or more in time, 🟨 more than half, 🟥 less)\nBeat me on the same traffic: ${url}`;
      copied.hidden = false;
      copy(copied.textContent, share);
    });
    const onward = (won || (score === toBeat && !this.isUntouched)) && next ? el("button", { type: "button", class: "main", text: `Next: beat ${next.called}, ${shownScore(next.score)}`, on: { click: () => this.raceAgainst(next.key) } }) : null;
    const advice = el("p");
    this.advise(grade).then((text) => text && fill(advice, el("strong", { text: "Next time: " }), text), () => {}); // what cannot be checked is not advised
    this.result.className = `result ${won || placeOf(grade, places) === 1 ? "won" : score === toBeat ? "level" : ""}`;
    fill(this.result,
      el("h2", {}, el("strong", { text: score }), " ", el("span", { text: verdict })),
      el("p", { text: `Place ${placeOf(grade, places)} of ${places.length}. ${this.why(grade)}${this.isConstant && grade.score <= this.best.episode.score ? this.constantly() : ""}` }), advice);
    fill(this.onward, share, onward, copied);
    fill(this.places, scoreBoard(places), el("div", { class: "buttons" },
      el("button", { type: "button", text: "Download the log", on: { click: () => download(`inferencegym-task-${this.task.id}-seed-${this.seed}.json`, log) } }),
      el("button", { type: "button", text: "Verify it", on: { click: () => verify(log) } })));
    announce(`Your score is ${score}. ${verdict}`);
    this.updateButtons();
    this.duel.scrollIntoView({ block: "nearest" });
  }

  /**
   * What to do in the next race, which begins with the sliders where they are now: the first slider whose move gains, as the server
   * plays this episode with it; and what the best policy does that no slider that stays can.
   */
  async advise({ score }) {
    const action = this.knobs.action(), moves = this.moves(action), [stay, ...scores] = (await this.coursesOf(trials(action, moves).map((setting) => Array(this.length).fill(setting)))).map((course) => course.at(-1));
    const move = bestMove(moves, scores, stay);
    const found = move?.score > score + GAIN ? move : stay > score + GAIN ? { text: "leave your sliders where they are now from the first second on", score: stay } : undefined;
    this.advised = found?.name ? found : undefined;
    const reached = found?.score ?? score;
    const start = found?.name && ` Start with the other sliders as they are now and ${titleOf(found.name)} at ${bare(found.name, found.value, this.tiers)}, and move none`;
    const slider = found ? `${found.text.replace("Move", "move")}${start ?? ""}: you score ${shownScore(reached)} here.` : "";
    const { called, episode } = this.best, settings = (name) => new Set(episode.action[name]).size;
    const moved = this.lanesOf.reduce((a, b) => (settings(a) >= settings(b) ? a : b));
    const adapts = episode.score > reached + GAIN && settings(moved) > 1 && (!slider || this.task.max_replicas);
    return [slider, adapts ? `${slider ? "Still better" : "to score more"}, move ${titleOf(moved)} during the race, as ${called} does (${shownScore(episode.score)}): see Decisions below.` : ""].filter(Boolean).join(" ");
  }

  /** What each run's actions, after the actions `before`, have added to the score by each second of this episode, as the server plays them. */
  async coursesOf(runs, before = []) {
    const seconds = [...before.map((action) => runs.map(() => action)), ...runs[0].map((_, i) => runs.map((run) => run[i]))];
    const { session_id } = await post("reset/batch", { task_id: this.task.id, seeds: runs.map(() => this.seed), config: { reward: "score" } });
    const courses = runs.map(() => []);
    try {
      for (const held of inRuns(seconds.map((row) => row.map(address.numbers)), Math.floor(BATCH_SECONDS / runs.length))) {
        const { rewards } = await post("step/batch", { session_id, ...held, last: true });
        for (const row of rewards) row.forEach((reward, i) => courses[i].push((courses[i].at(-1) ?? 0) + reward));
      }
    } finally {
      await post("close/batch", { session_id });
    }
    return courses;
  }

  /** Why the score is not higher: the worst overload and when to prepare for it, the parts where they add up to nothing, and on what else most was lost. */
  why(grade) {
    const told = [];
    const overloads = this.overloads().filter(({ from, to }) => to - from >= TREND_S).sort((a, b) => b.cost - a.cost || b.to - b.from - (a.to - a.from));
    const [worst, ...others] = overloads, lost = mostLost({ ...this.mine, ...grade }, this.best.episode, this.task);
    if (worst) {
      const { from, to, late, cost } = worst, rest = others.length ? ` (${counted(others.length, "other overload")} cost less)` : "";
      told.push(this.sooner(worst), `From second ${from + 1} to ${to}, ${percent(late)} of the requests were late${cost >= LEAST ? `: that cost ${shownScore(cost)} of the score${rest}` : ""}.`);
    }
    if (grade.score < LEAST) told.push(summed(grade.breakdown, this.task.grade));
    if (lost && grade.score < this.best.episode.score && !(worst && lost.part === "slo")) told.push(`${lost.text} of ${this.best.called}.`);
    return told.filter(Boolean).map((sentence) => `${sentence} `).join("");
  }

  /** By when the best policy had more replicas for an overload than the visitor, in words; "" if it had no more. */
  sooner({ from, to }) {
    if (!this.task.max_replicas) return "";
    const { called, episode: { action: { replicas } } } = this.best, most = Math.max(...replicas.slice(from, to));
    let second = replicas.indexOf(most, from);
    while (replicas[second - 1] >= most) second--;
    const had = Math.min(...this.mine.action.replicas.slice(second, Math.max(second, from) + 1));
    return had < most ? `Raise Replicas to ${most} by second ${second + 1}, as ${called} does: you had ${had}.` : "";
  }

  /** How a race went, in ten squares: green where at most one request in ten was late, red where half of them were. */
  squares() {
    const late = this.mine.observation.slo_violation_rate.slice(1), step = late.length / 10;
    return Array.from({ length: 10 }, (_, i) => mean(late.slice(Math.round(i * step), Math.round((i + 1) * step)))).map((share) => (share <= 0.1 ? "🟩" : share < 0.5 ? "🟨" : "🟥")).join("");
  }

  /** Prepare a race against another policy on the same traffic. */
  async raceAgainst(key) {
    this.aim = key;
    this.startsAs = `Set your sliders, then start. ${this.advised?.text ?? ""}`;
    await this.choose();
  }
}

/** Pass a log to the Verify tab. */
function verify(log) {
  handed.text = log;
  location.hash = "verify?log=handed";
}

/** Settings in which one move each was made, after the one without any. */
const trials = (action, moves) => [action, ...moves.map(({ name, value }) => ({ ...action, [name]: value }))];

/** The move that scores most, with its `score` and the `move` itself, if it gains on `stay`; else undefined. */
function bestMove(moves, scores, stay, gain = GAIN) {
  const score = Math.max(...scores);
  const move = moves[scores.indexOf(score)];
  return score > stay + gain ? { ...move, score, move } : undefined;
}

/** What a function answers for each of a list, one at a time. */
async function inTurn(list, answer) {
  const answers = [];
  for (const each of list) answers.push(await answer(each));
  return answers;
}

/** A number of things, such as "2 replicas". */
const counted = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;
