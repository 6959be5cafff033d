/** Agent sessions tab: the visitor caps the sessions in flight on one engine while they run, against a policy on the same sessions. */

import * as address from "./address.js";
import { get, once, post, sleep } from "./api.js";
import { TimeChart } from "./charts.js";
import { announce, challenge, el, field, fill, problem, select } from "./dom.js";
import { changes, compact, counted, mean, percent, score as shownScore, squares } from "./format.js";
import { keep, takeKept } from "./kept.js";
import { FOLLOWED, SEEKING, SHARED, SKIPPING, SPEEDS, YOU, player, presetSpeed } from "./players.js";
import { duelRow, placeOf, scoreBoard, verdictOn } from "./score.js";
import { MAX_SEED, isSeed, seedOf } from "./seeds.js";
import { FULL, ROOM, computedPerToken, curves, fitting, hitRate, misfits, packCaps, unpackCaps, why } from "./sessions.js";

const FIRST = "constant"; // whom to beat first, and whose cap the visitor starts with
const SHOWN = "fit"; // the policy in the charts besides the one to beat
const ORACLE = "oracle_constant"; // plays each episode many times, and a visitor would wait for it
const AFTER = "fit"; // the policy of POST /play, for which no second is left
const HINTS = 20; // times in a run that the server is asked what a cap would score
const SPOKEN = 5; // of them, after which a screen reader is told how the run stands
const MOVED_MS = 250; // after the last move of the slider, the server is asked
const SETTLED_S = 10; // of a run, before hints
const MOVES = [0.8, 1.25]; // times the cap: what a hint tries
const RELIEF = [1, 0.75, 0.5]; // times the sessions that fit now: what it tries where they do not fit
const CONSTANTS = [0.5, 0.65, 0.8, 0.95, 1.1, 1.3]; // times the sessions that filled the KV cache on average: what advice tries
const GAIN = 0.01; // in score: hints and advice that gain less are not given
const TOLD = [0.1, 0.5, 0.9]; // of an episode: when the sessions in flight of the best policy are told
const SPAN = 1.2; // times the episode to beat: the charts' width, until a run is longer
const PREVIEW_DRAWS = 50;
const PHONE = "(max-width: 560px)";
const KEPT = "rollouts";
const SEED = "42"; // a link without a task and a seed is of the first task and this one

export async function start(panel) {
  const { tasks } = await once("tasks", "rollouts");
  const tab = new Rollouts(tasks);
  fill(panel, tab.node);
  return tab;
}

/** A run of which nothing is played yet, with these columns. */
const newRun = (session, names) => ({ session, columns: Object.fromEntries(names.map((name) => [name, []])), caps: [], score: undefined });

class Rollouts {
  constructor(tasks) {
    this.tasks = tasks;
    this.generation = 0;
    this.phase = "idle"; // idle, running, paused, over
    this.buildControls();
    this.buildDuel();
    [this.readings, this.legend, this.board] = [el("dl", { class: "readings" }), el("div", { class: "legend buttons" }), el("div", { class: "charts" })];
    this.places = el("section", { class: "places", "aria-label": "All scores" });
    this.who = el("details", { hidden: true }); // until the policies are there
    this.node = el("div", { class: "race" },
      this.duel, el("aside", { class: "side" }, this.knob), this.readings,
      el("div", { class: "stage" }, this.places, this.controls, this.fixed, this.story, this.legend, this.board,
        el("p", { class: "note", text: "Score so far: the tokens that the agents have written, as a share of what the same engine would write in this time if its KV cache were unlimited; with users, the mean of this and of the turns answered in time. Computed twice: prompt tokens beyond those of the policy that computes fewest for each token written; an estimate until the end, because first prompts are all new." }), this.who));
    this.putCap();
    addEventListener("pagehide", () => this.keep());
  }

  buildControls() {
    this.taskSelect = select(this.tasks.map(({ task_id, name, difficulty }) => [task_id, `${name} (${difficulty})`]), this.tasks[0].task_id, () => this.choose());
    this.seedInput = el("input", { type: "number", min: "0", max: String(MAX_SEED), step: "1", value: SEED, on: { change: () => this.choose() } });
    this.speedSelect = select(SPEEDS, 10, (value) => { this.speed = this.ownSpeed = Number(value); });
    this.controls = el("div", { class: "controls" }, field("Task", this.taskSelect), field("Seed", this.seedInput), field("Speed", this.speedSelect));
    this.fixed = el("p", { class: "note", hidden: true, text: "Task and seed stay as they are until the run is over, or you press Start over." });
    this.story = el("p", { class: "story" });
    this.slider = el("input", { type: "range", id: "max-sessions", min: "1", max: "96", step: "1", value: "16", "aria-describedby": "max-sessions-hint", on: { input: () => this.moved() } });
    this.output = el("output", { for: "max-sessions" });
    this.knob = el("div", { class: "knob" },
      el("div", { class: "knob-head" }, el("label", { for: "max-sessions", text: "Session cap" }), this.output),
      this.slider,
      el("small", { id: "max-sessions-hint", text: "Most sessions in flight at a time; the others wait. Move it while the sessions run: as conversations grow, fewer of them fit." }));
  }

  /** The first screen: the score to beat, the scores so far, and the button; after the run, the result. */
  buildDuel() {
    this.goal = el("h2", { class: "goal", text: "Loading the sessions …" });
    this.about = el("p", { class: "about" });
    [this.state, this.advice] = [el("p", { class: "state" }), el("p", { class: "advice" })];
    this.coachBox = el("div", { class: "coach", hidden: true }, this.state, this.advice);
    this.result = el("section", { class: "result", "aria-label": "Result" });
    this.versus = el("div", { class: "versus" });
    this.lead = el("p", { class: "lead", text: " " });
    this.parts = el("p", { class: "note" });
    this.play = el("button", { type: "button", class: "main", text: "Start", on: { click: () => this.press() } });
    this.skipButton = el("button", { type: "button", text: "Skip to the end", hidden: true, on: { click: () => this.skip() } });
    this.again = el("button", { type: "button", text: "Start over", hidden: true, on: { click: () => this.choose(this.shared) } });
    this.onward = el("span", { class: "onward" });
    this.trouble = el("div", { class: "trouble" });
    this.scoreBox = el("div", { class: "score-chart" });
    this.clock = el("progress", { max: 96, value: 0, "aria-label": "Sessions finished" });
    this.duel = el("section", { class: "duel", "aria-label": "The score to beat" },
      el("div", { class: "duel-text" }, this.goal, this.about, this.coachBox, this.result, this.versus, this.lead, this.parts,
        el("div", { class: "buttons" }, this.play, this.skipButton, this.again, this.onward), this.trouble),
      this.scoreBox, this.clock);
  }

  async show(params) {
    if (this.task && location.hash === this.at) return; // back on this tab, with its run or its result as it was
    const kept = this.task ? null : takeKept(KEPT);
    if (kept) {
      this.at = location.hash;
      [this.taskSelect.value, this.seedInput.value] = [kept.task, kept.seed];
      this.choose(kept.shared && unpackCaps(kept.shared), kept);
      return;
    }
    const you = params.get("you"), task = params.get("task") ?? (you && this.tasks[0].task_id), seed = params.get("seed") ?? (you && SEED);
    if (this.task && !you && (!task || task === this.task.task_id) && (!seed || seed === this.seedInput.value)) return;
    if (this.tasks.some(({ task_id }) => task_id === task)) this.taskSelect.value = task;
    if (isSeed(seed ?? "")) this.seedInput.value = seed;
    const shared = you === null ? null : unpackCaps(you);
    const chosen = this.choose(shared); // not awaited: the tab is there at once, and its policies take some seconds to play
    if (task && task !== this.task.task_id) fill(this.trouble, problem({ message: `There is no task ${task.slice(0, 60)} here`, next: "choose one of the list" }));
    else if (seed !== null && !isSeed(seed)) fill(this.trouble, problem({ message: `The link's seed, ${seed.slice(0, 60)}, is not a whole number from 0 to ${MAX_SEED}: this is another one`, next: "ask for the link again, or enter the seed" }));
    else if (you !== null && !shared) chosen.then(() => fill(this.trouble, problem({ message: "The link does not contain a valid run", next: "press Start to play these sessions yourself" })));
  }

  /** Called when another tab is opened: the run waits. */
  leave() {
    if (this.phase === "running") this.setPhase("paused");
  }

  /** Start an episode, and play its policies; `shared` are the caps of a link, whose run is the one to beat; `kept` is the run that a reload takes up. */
  async choose(shared = null, kept = null) {
    const generation = ++this.generation, task = this.tasks.find(({ task_id }) => task_id === this.taskSelect.value), { task_id } = task;
    const isNew = task !== this.task || this.seedInput.value !== this.seed || (shared && shared !== this.shared);
    if (task !== this.task) [this.aim, this.ownSpeed] = [kept?.aim, null];
    [this.task, this.shared] = [task, shared];
    if (shared) this.at = location.hash;
    else if (!kept) this.write({ task: task_id, seed: this.seedInput.value });
    this.target = undefined; // until its episode is there
    this.setPhase("idle");
    this.story.textContent = task.description;
    this.slider.max = String(task.sessions);
    for (const part of [this.result, this.onward, this.trouble, this.places]) fill(part);
    this.board.classList.add("stale"); // until the charts are those of these sessions
    try {
      const seed = seedOf(this.seedInput);
      this.seed = this.seedInput.value;
      this.hinted = this.forecast = null;
      const ask = (agent, more) => post("play", { task_id, seed, agent, ...more }, "rollouts");
      const [begun, { policies }] = await Promise.all([kept ? null : post("reset", { task_id, seed }, "rollouts"), get(`policies?task_id=${task_id}`, "rollouts")]);
      const everyone = policies.filter(({ name }) => name !== ORACLE).map(player);
      const base = everyone.find(({ key }) => key === (this.aim ?? FIRST)), first = shared ? { ...SHARED } : base;
      const { metrics, action, ...graded } = await ask(shared ? AFTER : base.key, shared && { actions: Array.from({ length: task.episode_length }, (_, i) => shared[i] ?? shared.at(-1)) });
      if (generation !== this.generation) return;
      this.target = { ...first, ...graded, columns: metrics };
      this.hasUsers = "within_objective" in graded.breakdown;
      this.mine = kept?.mine ?? newRun(begun.session_id, Object.keys(metrics));
      if (isNew && !kept) this.slider.value = String(action.max_sessions[0]);
      if (kept) this.slider.value = String(kept.cap);
      this.putCap();
      this.untouched = !kept;
      this.startsAs = shared ? `Your challenger changed the cap ${counted(changes(shared), "time")}; you start where they did, at ${this.cap}.`
        : isNew && new Set(action.max_sessions).size === 1 ? `Your cap starts at ${this.cap}: leave it there and you score ${shownScore(graded.score)}.` : `Your cap is where you left it, at ${this.cap}.`;
      this.setSpeed(kept?.speed ?? this.ownSpeed ?? presetSpeed(metrics.time_s.length));
      this.least = computedPerToken(metrics);
      this.rivals = null; // until their episodes are there
      this.showTarget();
      this.setPhase(kept?.phase === "running" ? "paused" : kept?.phase ?? "idle");
      this.loaded = Promise.all(everyone.map(async (policy) => ({ ...policy, ...await ask(policy.key) })));
      if (kept?.phase === "running") this.run();
      const rivals = await this.loaded;
      if (generation !== this.generation) return;
      this.rivals = rivals.map(({ metrics: columns, ...rival }) => ({ ...rival, columns }));
      this.best = this.rivals.reduce((a, b) => (a.score >= b.score ? a : b));
      this.least = Math.min(...this.rivals.map(({ columns }) => computedPerToken(columns)));
      this.buildBoard();
      if (kept?.phase === "over") await this.finish();
      else if (this.phase === "idle") this.preview(generation);
    } catch (error) {
      if (generation !== this.generation) return;
      fill(this.trouble, problem(error));
      this.setPhase(this.phase);
    }
  }

  /** Write the address of this run, by which the tab knows it again. */
  write(params) {
    address.write("rollouts", params);
    this.at = location.hash;
  }

  /** Keep the run for a reload. */
  keep() {
    const { task, seed, aim, shared, phase, speed, cap, mine } = this;
    keep(KEPT, this.at, mine?.caps.length ? { task: task.task_id, seed, aim, shared: shared && packCaps(shared), phase, speed: Math.min(speed, FOLLOWED), cap, mine } : null);
  }

  // ---------------------------------------------------------------- drawing

  /** Name the score to beat, and draw its line. */
  showTarget() {
    const { target, task: { sessions } } = this, series = [YOU, { ...target, width: 2 }];
    fill(this.goal, el("span", { class: "point", text: this.hasUsers ? `Answer the users in time, and let ${sessions} agents work.` : `Finish ${sessions} agent sessions, fast.` }),
      " Beat ", el("strong", { class: `ink-${target.colour}`, text: shownScore(target.score) }), el("small", { text: " (score from 0 to 1)" }));
    this.about.textContent = "Each turn makes an agent's conversation longer. What does not fit into the KV cache (the GPU memory that holds the conversations) is thrown out and computed again. Cap the sessions in flight: too few leave the engine idle, too many evict each other.";
    this.rows = series.map(duelRow);
    fill(this.versus, ...this.rows.flatMap(({ nodes }) => nodes));
    this.scoreChart?.destroy();
    this.scoreChart = new TimeChart({ title: "Score so far", series, height: matchMedia(PHONE).matches ? 100 : 170, limits: [{ value: target.score, label: "to beat" }] });
    fill(this.scoreBox, this.scoreChart.figure);
    this.built = false;
    this.draw();
  }

  /** The other charts, which need all policies. */
  buildBoard() {
    const { target, task: { sessions } } = this, others = this.rivals.filter(({ key }) => key === SHOWN && key !== target.key), series = [YOU, target, ...others], sync = "rollouts";
    this.lines = others.map(({ key, columns }) => [key, columns]);
    for (const chart of Object.values(this.charts ?? {})) chart.destroy();
    this.charts = {
      pool: new TimeChart({ title: "KV cache", unit: "conversations in flight, 1 is full", series, sync, limits: [{ value: FULL, label: "full" }] }),
      flight: new TimeChart({ title: "Sessions in flight", series, sync }),
      finished: new TimeChart({ title: "Sessions finished", series, sync, limits: [{ value: sessions, label: `all ${sessions} sessions` }] }),
      hit: new TimeChart({ title: "Prefix-cache hit rate", unit: "share of prompt tokens, last 30 s", series, sync, limits: [{ value: 1, label: "all tokens" }] }),
      twice: new TimeChart({ title: "Computed twice", unit: "prompt tokens", series, sync }),
    };
    const [pool, ...figures] = Object.values(this.charts).map(({ figure }) => figure);
    if (matchMedia(PHONE).matches) figures.unshift(pool);
    else this.scoreBox.append(pool);
    fill(this.board, ...figures);
    fill(this.legend, ...series.map(({ label, colour }) => el("span", { class: `chip ink-${colour}`, text: label })));
    this.who.hidden = false;
    fill(this.who, el("summary", { text: "What each policy does" }), el("dl", {}, ...this.rivals.flatMap(({ label, title }) => [el("dt", { text: label }), el("dd", { text: title })])));
    this.board.classList.remove("stale");
    this.built = true;
    this.draw();
  }

  /** Draw the others' curves as they grow, until the visitor starts. */
  async preview(generation) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (let drawn = 1; drawn <= PREVIEW_DRAWS; drawn++) {
      this.draw(drawn / PREVIEW_DRAWS);
      await sleep(60);
      if (generation !== this.generation || this.phase !== "idle") return;
    }
  }

  /** Draw the visitor's run so far, and of the others as much; before the run, this share of their episodes. */
  draw(share = 1) {
    const { mine, target } = this, played = mine.caps.length, most = Math.max(played, Math.ceil(SPAN * target.columns.time_s.length));
    const until = played && this.phase !== "over" ? played : share * most;
    const drawn = [["you", mine.columns], [target.key, target.columns], ...(this.built ? this.lines : [])].map(([key, columns]) => [key, curves(columns, this.least, this.hasUsers)]);
    const x = Array.from({ length: most }, (_, i) => i + 1), columnsOf = (name) => Object.fromEntries(drawn.map(([key, columns]) => [key, x.map((_, i) => (i < until ? columns[name][i] : null) ?? null)]));
    this.scoreChart.set(x, columnsOf("score"), [0, most]);
    if (this.built) for (const [name, chart] of Object.entries(this.charts)) chart.set(x, columnsOf(name), [0, most]);
    const scores = this.phase === "over" ? [] : drawn.slice(0, 2).map(([, { score }]) => score[played - 1]);
    this.tell(played, ...scores);
    const now = (name) => mine.columns[name].at(-1) ?? 0, you = drawn[0][1], hit = this.phase === "over" ? hitRate(mine.columns) : you.hit.at(-1);
    this.clock.max = this.task.sessions;
    this.clock.value = now("sessions_finished");
    fill(this.readings, ...[
      ["Second", String(played)], ["Finished", `${now("sessions_finished")} of ${this.task.sessions}`],
      ["In flight", String(now("sessions_in_flight") + now("interactive_in_flight"))],
      ["KV cache filled", percent(now("context_share")), now("context_share") > FULL],
      ["Hit rate", typeof hit === "number" ? percent(hit) : "–", hit < 0.5], ["Computed twice", `${compact(Math.round(you.twice.at(-1) ?? 0))} tokens`],
    ].map(([name, value, bad]) => el("div", { class: bad ? "bad" : "" }, el("dt", { text: name }), el("dd", { text: value }))));
  }

  /** Say who is ahead, what happens, and what to do about it. */
  tell(played, you, other) {
    const { target, mine, phase } = this, on = phase === "running" || phase === "paused";
    [you ?? mine.score, other ?? target.score].forEach((value, i) => {
      this.rows[i].value.textContent = value === undefined ? "–" : shownScore(value);
      this.rows[i].bar.value = value ?? 0;
    });
    [this.about.hidden, this.coachBox.hidden] = [on, !on];
    const best = this.best && this.built ? ` The best policy here, ${this.best.called} (${this.best.title.replace(/\.$/, "").replace(/^./, (letter) => letter.toLowerCase())}), scores ${shownScore(this.best.score)}.` : "";
    this.parts.textContent = on ? "" : `A score of 1 is as fast as with an unlimited KV cache.${best}`;
    if (!on) {
      this.lead.textContent = this.startsAs;
      this.knob.classList.toggle("hinted", false);
      return;
    }
    const { sessions_finished: finished, context_share: shares } = mine.columns, theirs = target.columns.sessions_finished[Math.min(played, target.columns.sessions_finished.length) - 1] ?? 0;
    const full = played >= SETTLED_S && shares.at(-1) > FULL, by = Math.abs(you - (other ?? target.score));
    this.lead.textContent = !played ? "" : by < 0.0005 ? "Level." : `You are ${shownScore(by)} ${you > (other ?? target.score) ? "ahead" : "behind"}.`;
    this.parts.textContent = `Sessions finished: ${finished.at(-1) ?? 0} by you, ${theirs} by ${target.called}. The score so far is your speed until now; when all sessions are over, it is the score.`;
    const filled = `The conversations fill ${percent(shares.at(-1) ?? 0)} of the KV cache`;
    this.state.className = `state ${full ? "soon" : ""}`;
    this.state.textContent = `${this.lesson ? "Paused. " : ""}${filled}${full ? " and evict each other" : ""}.`;
    this.advice.textContent = `${this.hint(full)}${this.lesson && !this.seeking ? " Then press Resume." : ""}`;
  }

  /** What to do with the cap, and what the server has found it to score. */
  hint(full) {
    const { forecast, cap, hinted, mine: { columns } } = this, fits = fitting(columns), idle = columns.context_share.at(-1) < ROOM && columns.sessions_waiting.at(-1) > 0, known = forecast?.cap === cap ? forecast.score : undefined;
    const down = full && fits < cap, to = hinted && known !== undefined ? hinted.cap : down ? fits : undefined;
    this.knob.classList.toggle("hinted", to !== undefined);
    const keeping = known === undefined ? "" : `With the cap at ${cap} to the end you finish with ${shownScore(known)}`;
    if (hinted && known !== undefined) return `${to < cap ? "Lower" : "Raise"} the cap to ${to}: kept to the end, you finish with ${shownScore(hinted.score)}; at ${cap}, with ${shownScore(known)}.`;
    if (down) return `Lower the cap to about ${fits}. ${keeping && `${keeping}.`}`;
    return keeping && `${keeping}. ${idle ? "Much of the KV cache is empty while sessions wait: try more for now, and fewer once the conversations have grown." : ""}`;
  }

  // ---------------------------------------------------------------- playing

  setSpeed(times) {
    this.speed = Number(times);
    this.speedSelect.value = String(times);
  }

  /** Show what can be pressed and chosen in a phase. */
  setPhase(phase) {
    this.phase = phase;
    this.node.dataset.phase = phase;
    const on = phase === "running" || phase === "paused", ready = Boolean(this.target);
    this.play.disabled = !ready;
    this.play.textContent = ready || this.trouble.firstChild ? { idle: "Start", running: "Pause", paused: "Resume", over: "Play again" }[phase] : "Loading the sessions …";
    this.again.hidden = !on;
    this.skipButton.hidden = !on || this.speed > FOLLOWED;
    this.fixed.hidden = !on;
    for (const control of [this.taskSelect, this.seedInput]) control.disabled = on;
  }

  putCap() {
    this.cap = this.slider.valueAsNumber;
    this.output.textContent = String(this.cap);
    this.slider.setAttribute("aria-valuetext", counted(this.cap, "session"));
  }

  /** The visitor moves the slider. */
  moved() {
    this.putCap();
    this.untouched = this.lesson = false;
    this.hinted = null;
    clearTimeout(this.waiting);
    if (!this.target) return;
    if (this.phase === "idle") this.startsAs = `Your cap starts at ${this.cap}.`;
    else this.waiting = setTimeout(() => this.seek(), MOVED_MS);
    if (this.phase !== "over") this.draw();
  }

  /** The main button: start, pause, go on, or play the same sessions again, with the cap where it is. */
  async press() {
    this.lesson = false;
    if (this.phase === "running") this.setPhase("paused");
    else if (this.phase === "over") {
      await this.choose(this.shared);
      if (this.phase === "idle" && this.target) this.run();
    } else if (this.phase === "paused" && this.looping === this.generation) this.setPhase("running"); // its last second is still being played
    else this.run();
  }

  /** Play the rest at once, with the cap where it is. */
  skip() {
    this.speed = SKIPPING;
    if (this.phase === "paused") this.press();
    else this.setPhase(this.phase);
  }

  /** Play on until the visitor pauses or the episode ends. */
  async run() {
    const { generation, mine } = this;
    if (!mine.caps.length) this.speed = Number(this.speedSelect.value); // the last run may have been skipped to its end
    this.setPhase("running");
    this.looping = generation;
    fill(this.trouble);
    this.duel.scrollIntoView({ block: "nearest" });
    if (matchMedia(PHONE).matches) this.node.scrollIntoView(); // a phone has no room for the tabs
    let due = performance.now(), drawn = 0;
    try {
      while (this.phase === "running" && mine.score === undefined) {
        await (this.speed > FOLLOWED ? this.rest() : this.second());
        if (generation !== this.generation) return;
        const played = mine.caps.length, every = Math.ceil(this.target.columns.time_s.length / HINTS);
        if (played % every === 0 && this.speed <= FOLLOWED && mine.score === undefined) this.seek();
        if (performance.now() - drawn > 60) {
          this.draw();
          drawn = performance.now();
        }
        if (played % (SPOKEN * every) === 0) announce(`Second ${played}. ${this.state.textContent} ${this.lead.textContent}`);
        this.teach();
        due = Math.max(due + 1000 / this.speed, performance.now());
        const wait = due - performance.now();
        if (wait > 1) await sleep(wait);
      }
      if (generation !== this.generation) return;
      this.draw();
      if (mine.score !== undefined) await this.finish();
    } catch (error) {
      if (generation !== this.generation) return;
      this.setPhase("paused");
      fill(this.trouble, problem(error));
    } finally {
      if (this.looping === generation) this.looping = null;
    }
  }

  /** Stop when the conversations fit no more, for a visitor who has not moved the slider. */
  teach() {
    const { mine, task } = this, played = mine.caps.length;
    if (!this.untouched || this.taught || this.shared || task !== this.tasks[0] || this.speed > FOLLOWED || played < SETTLED_S || mine.columns.context_share.at(-1) <= FULL) return;
    this.taught = this.lesson = true;
    this.setPhase("paused");
    this.seek();
    announce(this.state.textContent);
  }

  /** Play the next second; the score comes with the last one. Repeating a step is safe, since it carries its number. */
  async second() {
    const { mine, cap } = this;
    const { observation, done, info: { score, breakdown, ...seen } } = await post("step", { session_id: mine.session, step: mine.caps.length + 1, action: { max_sessions: cap } }, "rollouts");
    mine.caps.push(cap);
    for (const [name, column] of Object.entries(mine.columns)) column.push({ ...observation, ...seen }[name]);
    if (done) Object.assign(mine, { score, breakdown });
  }

  /** Play the rest in one request, with the cap where it is. */
  async rest() {
    const { mine, cap } = this, { metrics, action, score, breakdown } = await this.played(cap, mine.caps);
    Object.assign(mine, { columns: metrics, caps: action.max_sessions, score, breakdown });
  }

  /** This episode, as the server plays it with the caps `before` and then with `cap` to the end. */
  played(cap, before, more) {
    const { task: { task_id, episode_length }, seed } = this, actions = [...before, ...Array(Math.max(0, episode_length - before.length)).fill(cap)];
    return post("play", { task_id, seed: Number(seed), agent: AFTER, actions, ...more }, "rollouts");
  }

  /** Scores of this episode with the caps `before`, then each of `caps` to the end. */
  scoresWith(caps, before = []) {
    return Promise.all(caps.map(async (cap) => (await this.played(cap, before, { brief: true })).score));
  }

  /** Ask the server what the cap scores if it stays, and whether a move scores more. */
  async seek() {
    const { mine, generation, cap, task } = this, fits = fitting(mine.columns);
    if (this.seeking || !mine.caps.length || mine.score !== undefined) return;
    this.seeking = true;
    const full = mine.columns.context_share.at(-1) > FULL, tried = (full ? RELIEF.map((times) => times * fits) : MOVES.map((times) => times * cap)).map(Math.round);
    const moves = [...new Set(tried)].filter((move) => move !== cap && move >= 1 && move <= task.sessions);
    const scores = await this.scoresWith([cap, ...moves], [...mine.caps]).catch(() => null); // what cannot be checked is not said
    this.seeking = false;
    if (!scores || generation !== this.generation) return;
    const [stay, ...moved] = scores, most = Math.max(...moved);
    if (cap === this.cap) {
      this.forecast = { cap, score: stay };
      this.hinted = most <= stay + GAIN ? null : { cap: moves[moved.indexOf(most)], score: most };
    } else this.waiting = setTimeout(() => this.seek(), MOVED_MS);
    if (this.phase !== "over") this.draw();
    if (this.lesson) announce(`${this.state.textContent} ${this.advice.textContent}`);
  }

  async finish() {
    const { generation, mine, target, task } = this;
    await this.loaded;
    if (generation !== this.generation || !this.rivals) return;
    this.setPhase("over");
    this.draw();
    const { score, toBeat, won, level, verdict } = verdictOn(mine.score, target.score, target.called);
    const params = { ...(task === this.tasks[0] ? {} : { task: task.task_id }), ...(this.seed === SEED ? {} : { seed: this.seed }), beat: score, you: packCaps(mine.caps) };
    this.write(params);
    const breakdown = ({ columns }) => ({ hit_rate: hitRate(columns), tokens_computed_twice: Math.round(curves(columns, this.least, this.hasUsers).twice.at(-1)), seconds: columns.time_s.length });
    const places = [{ ...YOU, ...mine }, ...(this.shared ? [target] : []), ...this.rivals].map((row) => ({ ...row, breakdown: breakdown(row) })).sort((a, b) => b.score - a.score);
    const advice = el("p", { text: SEEKING });
    this.result.className = `result ${won ? "won" : level ? "level" : ""}`;
    fill(this.result, el("h2", {}, el("strong", { text: score }), " ", el("span", { text: verdict })),
      el("p", { text: `Place ${placeOf(mine, places)} of ${places.length}. ${why(mine, won || level ? this.best : target)}` }), advice);
    const next = places.findLast((rival) => Number(shownScore(rival.score)) > Number(score) && rival.key !== SHARED.key);
    const onward = won && next ? el("button", { type: "button", class: "main", text: `Next: beat ${next.label}, ${shownScore(next.score)}`, on: { click: () => this.playAgainst(next.key) } }) : null;
    const [share, copied] = challenge(`I ran ${task.sessions} coding agents on one LLM engine and scored ${score}; ${this.shared ? "my challenger" : target.called}: ${toBeat}.\n${squares(misfits(mine.columns))}\n(🟩 the conversations fit into the KV cache, 🟥 they do not)\nBeat me on the same sessions: ${new URL(address.link("rollouts", params), location.href).href}`);
    fill(this.onward, share, onward, copied);
    fill(this.places, scoreBoard(places));
    announce(`Your score is ${score}. ${verdict}`);
    this.duel.scrollIntoView({ block: "nearest" });
    await this.advise(advice).catch(() => fill(advice)); // what cannot be checked is not advised
  }

  /** What to do next time: the best of some constant caps, as the server plays these sessions with it, and a button that plays it; else what the best policy does. */
  async advise(box) {
    const { mine, best, task } = this, fits = mean(mine.caps.map((_, i) => fitting(mine.columns, i)).filter(Boolean));
    const caps = [...new Set(CONSTANTS.map((times) => Math.round(times * fits)))].filter((cap) => cap >= 1 && cap <= task.sessions), scores = await this.scoresWith(caps);
    if (!box.isConnected) return; // another run has begun
    fill(box);
    const most = Math.max(...scores), cap = caps[scores.indexOf(most)], flying = best.columns.sessions_in_flight;
    const follow = `${best.called} (${shownScore(best.score)}) lets ${TOLD.map((share) => Math.round(share * flying.length)).map((second, i) => `${flying[second]}${i ? "" : " sessions run"} at second ${second}`).join(", ")}.`;
    if (most > mine.score + GAIN) {
      fill(box, el("strong", { text: "Next time: " }), `keep the cap at ${cap} from the first second on: ${shownScore(most)}. `,
        el("button", { type: "button", text: "Try this", on: { click: () => this.tryAgain(cap) } }));
    } else if (best.score > mine.score + GAIN) fill(box, el("strong", { text: "Next time: " }), `move the cap while the sessions run. ${follow.replace(/^./, (letter) => letter.toUpperCase())}`);
  }

  /** Play the same sessions again with this cap. */
  async tryAgain(cap) {
    this.slider.value = String(cap);
    this.putCap();
    await this.press();
  }

  /** Prepare a run against another policy on the same sessions. */
  async playAgainst(key) {
    this.aim = key;
    await this.choose();
  }
}
