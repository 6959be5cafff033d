/** Race tab: the visitor and the built-in policies run the same fleet through the same traffic, second by second. */

import * as address from "./address.js";
import { STARTS, asked, briefly } from "./ahead.js";
import { get, once, post, sleep } from "./api.js";
import { Board } from "./board.js";
import { TimeChart, floods } from "./charts.js";
import { Coach, GAIN, surgeOf } from "./coach.js";
import { announce, el, field, fill, problem, select } from "./dom.js";
import { changes, compact, counted, percent, score as shownScore, sum, words } from "./format.js";
import { Knobs, knobsOf, titleOf } from "./knobs.js";
import { keep, takeKept } from "./kept.js";
import { FOLLOWED, SHARED, SKIPPING, SPEEDS, YOU, player, presetSpeed } from "./players.js";
import { showResult } from "./result.js";
import { append, columnsOf, newRun, oldRun, rowAt, rows } from "./runs.js";
import { LATE, LEAST, duelRow, explained, rewarded } from "./score.js";
import { MAX_SEED, isSeed, seedOf, today } from "./seeds.js";

const PACE_SECONDS = 10; // over which the speed that the connection allows is taken
const TREND_S = 5; // over which a part of the score rises or falls
const RETRY_MS = 1000;
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
    this.finished = new Set(); // ids of the tasks that the visitor has raced to the end
    this.phase = "idle"; // idle, running, paused, over
    this.generation = 0;
    this.knobs = new Knobs(info.action.properties);
    this.knobs.node.addEventListener("input", () => {
      this.advised = null;
      this.coach.moved();
      this.tellSliders();
    });
    this.coach = new Coach(this);
    this.buildControls();
    this.buildDuel();
    this.board = new Board(this);
    this.places = el("section", { class: "places", "aria-label": "All scores" });
    this.sliders = el("small");
    this.defaultsButton = el("button", { type: "button", class: "quiet", text: "vLLM's defaults", on: { click: () => this.useDefaults() } });
    this.readings = el("dl", { class: "readings" });
    this.node = el("div", { class: "race" },
      this.duel,
      el("aside", { class: "side" }, el("h2", {}, "Your sliders ", this.sliders), this.knobs.node, this.defaultsButton),
      this.readings,
      el("div", { class: "stage" }, this.places, this.controls, this.fixed, this.story, el("details", {}, el("summary", { text: "How the score is computed" }), this.formula), this.board.node));
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
      el("div", { class: "duel-text" }, this.goal, this.about, this.coach.node, this.result, this.versus, this.lead, this.parts,
        el("div", { class: "buttons" }, this.startButton, this.skipButton, this.againButton, this.onward), this.trouble),
      this.scoreBox, this.clock);
  }

  buildControls() {
    const gloss = (description) => description.match(/^.*?(?=[.:](\s|$))/)[0].replace(/^./, (letter) => letter.toLowerCase());
    const named = (tasks) => tasks.map(({ id, name, description, difficulty, recorded }) => [id, `${name}${difficulty === "easy" ? " (warm-up)" : recorded ? " (recorded)" : ""}: ${gloss(description)}`]);
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
    if (task !== this.task) this.aim = kept?.aim;
    if (task !== this.task || (shared && shared !== this.from)) this.defaults = null;
    this.from = shared;
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
    this.board.wait();
    this.story.textContent = task.description;
    this.tiers = this.info.hardware[task.hardware].tiers;
    this.memoryLimit = /\bmemory\b/.test(task.score) ? task.memory_hard_limit_gb : Infinity; // beyond it the score falls
    this.lanesOf = knobsOf(task);
    if (!this.defaults) this.knobs.offer(task, this.tiers); // another episode of a task keeps the visitor's sliders
    this.mine = newRun();
    this.coach.begin();
    this.tellCourse();
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
      if (!this.ownSpeed) this.setSpeed(presetSpeed(this.length));
      this.formula.textContent = `The score adds up its parts, each at most 1, and is at least 0. ${explained(episode.breakdown, task.grade).replace(/^./, (letter) => letter.toUpperCase())}.`;
      this.parts.title = this.formula.textContent;
      this.phases = episode.phase;
      this.target = shared ? { ...SHARED, episode: { ...newRun(), score: this.claimed } } : { ...goal, episode };
      if (!this.defaults) {
        const vllm = base.key === "vllm_defaults", { action } = base === goal ? episode : await brief(base);
        if (generation !== this.generation) return;
        this.defaults = { action: rowAt(action, 0), text: vllm ? "at vLLM's defaults" : `where ${base.called} starts${this.asksFor(action)}`, vllm };
        this.defaultsButton.textContent = this.defaults.text.replace(/^at |, .*$/g, "").replace("where", "Where");
        this.defaultsButton.disabled = false;
        this.useDefaults();
      }
      this.board.hidden.delete(this.target.key);
      this.counted = episode.breakdown;
      this.scale = `What counts: ${rewarded(episode.breakdown)}.`;
      this.showTarget();
      // The race can start. Whole episodes of the policies follow one after the other, so that a slow connection can race meanwhile.
      this.loaded = inTurn(everyone, play);
      this.replayed = shared && this.replay(this.target.episode, shared, generation);
      this.startButton.disabled = false;
      this.updateButtons();
      if (kept) this.takeUp(kept);
      const episodes = await this.loaded;
      if (generation !== this.generation) return;
      const rivals = everyone.map((rival, i) => ({ ...rival, episode: episodes[i] }));
      this.arrivals = episodes[0].arrivals;
      this.idle = rivals.find(({ episode: played }) => this.stays(played))?.episode.score ?? 0; // the score of moving nothing, where it is known
      const scores = ({ episode: { score } }) => score >= LEAST;
      const rest = rivals.filter((rival) => !scores(rival));
      this.rivals = [...(shared ? [this.target] : []), ...rivals.filter(scores)];
      this.best = rivals.reduce((a, b) => (a.episode.score >= b.episode.score ? a : b));
      this.setting = rivals.find(({ key }) => key === "best_static")?.episode.action;
      this.isConstant = !task.static && this.lanesOf.every((name) => new Set(this.best.episode.action[name]).size === 1);
      this.scale += ` Built-in policies, programs that move the sliders, play too. The best here, ${this.best.called}, has ${shownScore(this.best.episode.score)}.`;
      const elsewhere = this.best.episode.score > episode.score + GAIN ? null : this.elsewhere();
      if (elsewhere) this.scale += " There is little to win here.";
      if (this.phase === "idle") fill(this.onward, elsewhere);
      const why = task.max_replicas ? "in this task, where the number of replicas has to follow the load" : "in this task";
      this.board.leftOut.textContent = rest.length ? `Left out, because they score 0 ${why}: ${rest.map(({ label }) => label).join(", ")}.` : "";
      this.built = generation;
      this.board.build();
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
    for (const box of [this.versus, this.scoreBox, this.lead, this.parts]) fill(box);
    this.advised = this.rows = null;
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

  /** Whether a run leaves the sliders where they are on the first visit of the task. */
  stays({ action }) {
    return Object.entries(this.defaults.action).every(([name, start]) => action[name].every((value) => Number(value) === Number(start)));
  }

  /** Put the sliders where they were on the first visit of the task. */
  useDefaults() {
    this.knobs.hold(this.defaults.action);
    this.knobs.set(this.defaults.action);
    this.tellSliders();
  }

  /** Whether the sliders are where they were on the first visit of the task. */
  get unmoved() {
    const action = this.knobs.action();
    return this.lanesOf.every((name) => Number(action[name]) === Number(this.defaults.action[name]));
  }

  /** Say where the sliders are, and what follows from it. */
  tellSliders() {
    if (!this.defaults) return; // the task is still on its way
    if (this.coach.compares) fill(this.sliders, el("span", { class: `mark ink-${this.best.colour}` }), `${this.best.label} in ${this.coach.reaction} s`);
    else this.sliders.textContent = this.unmoved ? this.defaults.text : "as you left them";
    if (this.phase === "idle" && this.rows) this.tellScores();
    if (this.phase !== "over") this.tellCourse();
  }

  /** How many replicas the sliders ask for, in words, if they are not those that run; "" in tasks that do not scale. */
  asksFor({ replicas }) {
    return replicas && replicas[0] !== this.task.n_replicas ? `, asking for ${counted(replicas[0], "replica")}` : "";
  }

  /** Name the score to beat, and draw its line. */
  showTarget() {
    const { label, called, episode, colour } = this.target;
    this.nameTarget();
    this.isUntouched = !this.shared && this.stays(episode);
    this.rows = [YOU, { label, colour }].map(duelRow);
    fill(this.versus, ...this.rows.flatMap(({ nodes }) => nodes));
    this.scoreChart?.destroy();
    this.scoreChart = new TimeChart({ title: "Score so far", series: [YOU, { ...this.target, width: 2 }], height: matchMedia("(max-width: 560px)").matches ? 100 : 240, limits: episode.score === undefined ? [] : [{ value: episode.score, label: "to beat" }] });
    fill(this.scoreBox, this.scoreChart.figure);
    this.draw();
  }

  /** Write the score to beat. */
  nameTarget() {
    const { called, episode: { score }, colour } = this.target;
    fill(this.goal, el("span", { class: "point", text: `${this.point()}.` }), " Beat ", el("strong", { class: `ink-${colour}`, text: score === undefined ? called : shownScore(score) }), score === undefined ? null : el("small", { text: " (score from 0 to 1)" }));
  }

  /** What the race is about. */
  point() {
    const { n_replicas: servers, max_replicas: most, floods: known } = this.task, fleet = servers > 1 ? `${servers} LLM servers` : "an LLM server";
    if (most) return `Run 1 to ${most} LLM servers as the load rises and falls`;
    const surges = known ? Math.ceil((this.length - known.first_at_s) / known.every_s) : floods(this.phases).length && 2;
    return `Keep ${fleet} fast${surges ? ` through ${surges > 1 ? "surges" : "a surge"}` : ""}`;
  }

  /** Whose score it is, and what comes. */
  introduction() {
    const { task, target: { called, episode: { score } }, defaults } = this, { floods: known, max_replicas: most } = task;
    const traffic = this.seed === today() ? "today's traffic" : "this seed", { unmoved } = this;
    const whose = this.shared ? this.challenge(unmoved) : this.isUntouched && unmoved ? `Touch nothing and you score ${shownScore(score)} on ${traffic}${defaults.vllm ? ": your sliders are at the defaults of vLLM, an LLM server" : ""}.` : `That is the score of ${called} on ${traffic}.`;
    const kind = task.difficulty === "easy" ? "A warm-up: nearly every setting scores this much." : task.static ? "Here one good setting is enough for the whole race." : "";
    const comes = known ? `At second ${known.first_at_s}, a surge brings ${surgeOf(task)}.` : most ? "Late requests can cost the whole score; replicas cost too. Hints are small moves that add up." : floods(this.phases).length ? "Surges come unannounced." : "";
    return [whose, kind, comes, this.complete && this.isConstant && this.constantly()].filter(Boolean).join(" ");
  }

  /** What the run of a link did, and how the friend starts: without any of the challenger's moves. */
  challenge(unmoved) {
    const moves = Object.values(columnsOf([...address.unpackActions(address.packActions([this.defaults.action])), ...this.shared])).map(changes).filter(Boolean), times = sum(moves);
    const moved = times ? `moved ${counted(moves.length, "slider")} ${times === 1 ? "once" : `${times} times`} (shown after your race)` : "moved no slider";
    return `Your challenger ${moved}.${unmoved ? ` You start ${this.defaults.text}.` : ""}`;
  }

  /** The lanes of a strip: sliders and their titles. */
  lanes() {
    return this.lanesOf.map((name) => [name, titleOf(name)]);
  }

  /** Whether the policies' whole episodes are there. */
  get complete() {
    return this.built === this.generation;
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
    this.tellCourse();
    this.tellReadings();
    if (this.complete) this.board.draw(x, cut, span, shaded);
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
    if (Number.isNaN(by)) this.lead.textContent = this.advised ? `Hint: ${this.advised.text}, from the start.` : this.task.max_replicas ? "Start, then move Replicas before the load changes." : `Start, then move sliders to ${"slo" in this.counted ? "answer in time" : "score more"}.`;
    else {
      const { ends } = this.coach, forecast = ends === undefined || this.task.max_replicas ? "" : ` Left like this, you end at ${shownScore(ends)}.`;
      this.lead.textContent = `${by < 0.0005 ? "Level" : `${shownScore(by)} ${you > other ? "ahead" : "behind"}`}.${forecast}`;
    }
  }

  /** Before the race what it is about, then what happens and which slider to move. */
  tellCourse() {
    const { length: played } = this.mine.reward;
    this.about.hidden = played > 0;
    this.coach.node.hidden = !played;
    if (played) this.coach.tell();
    else {
      this.about.textContent = this.rows ? this.introduction() : "";
      this.knobs.point(this.advised?.name);
      this.knobs.mark();
    }
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
    this.coach.lesson = false;
    if (this.phase === "idle") fill(this.onward);
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
    this.startButton.textContent = { idle: this.startButton.disabled && !this.trouble.firstChild ? "Loading the race …" : "Start the race", running: this.mine.reward.length ? "Pause" : "Starting …", paused: this.waiting ? "Try now" : "Resume", over: "Play again" }[this.phase];
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
        const [before, late] = this.mine.observation.slo_violation_rate.slice(-2), overloaded = before <= LATE && late > LATE;
        if (overloaded) announce(`Second ${this.mine.reward.length}: overloaded, ${percent(late)} of the requests are late.`);
        if (this.coach.watch(overloaded)) {
          this.phase = "paused";
          this.updateButtons();
          const sought = this.coach.seek();
          this.draw();
          await sought;
        }
        if (this.phase !== "running") break;
        played.push(performance.now());
        if (played.length > PACE_SECONDS) played.shift();
        this.pace = played.length < 5 ? this.speed : 1000 * (played.length - 1) / (played.at(-1) - played[0]);
        if (performance.now() - drawn > 30) {
          this.draw();
          drawn = performance.now();
        }
        const speed = this.coach.pace(this.speed);
        if (speed !== this.speed) played.length = 0;
        due = Math.max(due + 1000 / speed, performance.now());
        const wait = due - performance.now();
        if (wait > 1) await sleep(wait);
      }
      if (generation !== this.generation) return;
      this.draw();
      if (this.coach.lesson) announce(this.coach.node.textContent);
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
    const { task, seed, aim, shared, phase, coach: { taught }, mine } = this;
    keep(KEPT, this.at, mine?.reward.length ? { task: task.id, seed, aim, shared: shared && address.packActions(shared), phase, speed: this.speedSelect.value, taught: [...taught], action: this.knobs.action(), mine } : null);
  }

  /** Take up the run that was kept. */
  takeUp({ mine, action, speed, phase, taught }) {
    this.mine = oldRun(mine);
    this.knobs.set(action);
    this.coach.taught = new Set(taught);
    this.tellSliders();
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
    this.board.hide();
    this.knobs.point();
    this.advised = null;
    const params = { ...(this.task === this.first ? {} : { task: this.task.id }), seed: this.seed, beat: shownScore(grade.score), you: address.packActions(rows(this.mine.action)) };
    this.write(params);
    announce(`Your score is ${shownScore(grade.score)}. ${showResult(this, grade, params)}`);
    this.updateButtons();
    this.duel.scrollIntoView({ block: "nearest" });
  }

  /** A button to the task that offers the most knobs, or from there to the first one that scales; null where there is no other. */
  elsewhere(rank = "") {
    const task = this.task === this.first ? this.tasks.find(({ max_replicas: most }) => most) : this.first;
    return task && task !== this.task ? el("button", { type: "button", class: rank, text: `Race ${task.name}`, on: { click: () => {
      this.taskSelect.value = String(task.id);
      this.choose();
    } } }) : null;
  }

  /** Prepare a race against another policy on the same traffic. */
  async raceAgainst(key) {
    this.aim = key;
    await this.choose();
  }

  /** Play the same traffic with another setting from the start. */
  async tryAgain(setting) {
    this.knobs.hold(setting);
    this.knobs.set(setting);
    this.tellSliders();
    await this.choose(this.shared);
    this.press();
  }
}

/** What each of a list is answered, one at a time. */
async function inTurn(list, answer) {
  const answers = [];
  for (const each of list) answers.push(await answer(each));
  return answers;
}
