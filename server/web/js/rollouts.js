/** Agent sessions tab: the visitor caps the sessions in flight on one engine while they run, against a policy on the same sessions. */

import * as address from "./address.js";
import { get, once, post, sleep } from "./api.js";
import { TimeChart } from "./charts.js";
import { announce, challenge, el, field, fill, problem, select } from "./dom.js";
import { counted, percent, score as shownScore, squares } from "./format.js";
import { keep, takeKept } from "./kept.js";
import { FOLLOWED, SEEKING, SHARED, SKIPPING, SPEEDS, YOU, player, presetSpeed } from "./players.js";
import { LEAST, duelRow, placeOf, scoreBoard, verdictOn } from "./score.js";
import { MAX_SEED, isSeed, seedOf } from "./seeds.js";
import { FULL, advised, capsOf, curves, hitRate, misfits, near, outline, packed, timetable, unpacked, why } from "./sessions.js";

const FIRST = "constant"; // whom to beat first, and whose cap the visitor starts with
const SHOWN = "fit"; // the policy in the charts besides the one to beat
const ORACLE = "oracle_constant"; // plays each episode many times, and a visitor would wait for it
const AFTER = "fit"; // the policy of POST /play, for which no second is left
const HINTS = 20; // times in a run that the server is asked what a cap would score
const SPOKEN = 5; // of them, after which a screen reader is told how the run stands
const RETRY_MS = 1000; // after the server could not be reached
const MOVED_MS = 250; // after the last move of the slider, the server is asked
const SETTLED_S = 10; // of a run, before hints
const ROUNDS = { running: 1, paused: 0, over: 6 }; // of the search for a better timetable: a pause is told of one cap, which is simple and soon there
const WIDE = [1.5, 0.2]; // its first moves: times a cap, and share of the time that is left; where none helps, the next are narrower
const GAIN = 0.01; // in score: hints and advice that gain less are not given
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

/** The last value by a second of a run, which may have ended before it. */
const at = (values, second) => values[Math.min(second, values.length) - 1] ?? 0;

class Rollouts {
  constructor(tasks) {
    this.tasks = tasks;
    this.generation = 0;
    this.phase = "idle"; // idle, running, paused, over
    this.buildControls();
    this.buildDuel();
    [this.readings, this.legend, this.board] = [el("dl", { class: "readings" }), el("div", { class: "legend buttons" }), el("div", { class: "charts" })];
    this.places = el("section", { class: "places", "aria-label": "All scores" });
    this.node = el("div", { class: "race" },
      this.duel, el("aside", { class: "side" }, this.knob), this.readings,
      el("div", { class: "stage" }, this.places, this.controls, this.fixed, this.story, this.legend, this.board));
    this.setCap(this.slider.valueAsNumber);
    addEventListener("pagehide", () => this.keep());
  }

  buildControls() {
    this.taskSelect = select(this.tasks.map(({ task_id, name, difficulty }) => [task_id, `${name} (${difficulty})`]), this.tasks[0].task_id, () => this.choose());
    this.seedInput = el("input", { type: "number", min: "0", max: String(MAX_SEED), step: "1", value: SEED, on: { change: () => this.choose() } });
    this.speedSelect = select(SPEEDS, 10, (value) => { this.speed = this.ownSpeed = Number(value); });
    this.controls = el("div", { class: "controls" }, field("Task", this.taskSelect), field("Seed", this.seedInput), field("Speed", this.speedSelect));
    this.fixed = el("p", { class: "note", hidden: true, text: "Task and seed stay as they are until the run is over, or you press Start over." });
    this.story = el("p", { class: "story" });
    this.slider = el("input", { type: "range", id: "max-sessions", min: "1", max: "96", step: "1", value: "16", "aria-describedby": "max-sessions-hint", on: { input: () => this.move(this.slider.valueAsNumber) } });
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
    [this.state, this.advice] = [el("p", { class: "state" }), el("span")];
    this.follow = el("button", { type: "button", text: "Do this", on: { click: () => this.obey() } });
    this.coachBox = el("div", { class: "coach", hidden: true }, this.state, el("p", { class: "advice" }, this.advice, " ", this.follow));
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
    this.duel = el("section", { class: "duel", "aria-label": "The score to beat" },
      el("div", { class: "duel-text" }, this.goal, this.about, this.coachBox, this.result, this.versus, this.lead, this.parts,
        el("div", { class: "buttons" }, this.play, this.skipButton, this.again, this.onward), this.trouble),
      this.scoreBox);
  }

  async show(params) {
    if (this.task && location.hash === this.at) return; // back on this tab, with its run or its result as it was
    const kept = this.task ? null : takeKept(KEPT);
    if (kept) {
      this.at = location.hash;
      [this.taskSelect.value, this.seedInput.value] = [kept.task, kept.seed];
      this.choose(kept.shared, kept);
      return;
    }
    const you = params.get("you"), task = params.get("task") ?? (you && this.tasks[0].task_id), seed = params.get("seed") ?? (you && SEED);
    if (this.task && !you && (!task || task === this.task.task_id) && (!seed || seed === this.seedInput.value)) return;
    if (this.tasks.some(({ task_id }) => task_id === task)) this.taskSelect.value = task;
    if (isSeed(seed ?? "")) this.seedInput.value = seed;
    const shared = you === null ? null : unpacked(you);
    const chosen = this.choose(shared); // not awaited: the tab is there at once, and its policies take some seconds to play
    if (task && task !== this.task.task_id) fill(this.trouble, problem({ message: `There is no task ${task.slice(0, 60)} here`, next: "choose one of the list" }));
    else if (seed !== null && !isSeed(seed)) fill(this.trouble, problem({ message: `The link's seed, ${seed.slice(0, 60)}, is not a whole number from 0 to ${MAX_SEED}: this is another one`, next: "ask for the link again, or enter the seed" }));
    else if (you !== null && !shared) chosen.then(() => fill(this.trouble, problem({ message: "The link does not contain a valid run", next: "press Start to play these sessions yourself" })));
  }

  /** Called when another tab is opened: the run waits. */
  leave() {
    if (this.phase === "running") this.setPhase("paused");
  }

  /** Start an episode, and play its policies; `shared` is the timetable of a link, whose run is the one to beat; `kept` is the run that a reload takes up. */
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
      [this.hinted, this.forecast] = [null, undefined];
      const ask = (agent, more) => this.persist(() => post("play", { task_id, seed, agent, ...more }, "rollouts"));
      const [begun, { policies }] = await this.persist(() => Promise.all([kept ? null : post("reset", { task_id, seed }, "rollouts"), get(`policies?task_id=${task_id}`, "rollouts")]));
      const everyone = policies.filter(({ name }) => name !== ORACLE).map(player);
      const base = everyone.find(({ key }) => key === (this.aim ?? FIRST)), first = shared ? { ...SHARED } : base;
      const { metrics, action, ...graded } = await ask(shared ? AFTER : base.key, shared && { actions: capsOf(shared, task.episode_length) });
      if (generation !== this.generation) return;
      this.target = { ...first, ...graded, columns: metrics };
      this.hasUsers = "within_objective" in graded.breakdown;
      this.mine = kept?.mine ?? newRun(begun.session_id, Object.keys(metrics));
      this.setCap(kept?.cap ?? (isNew ? Math.min(action.max_sessions[0], task.sessions) : this.cap), kept?.next);
      this.untouched = !kept;
      this.startsAs = shared ? `Your challenger changed the cap ${counted(shared.length - 1, "time")}; you start where they did, at ${this.cap}.`
        : isNew && new Set(action.max_sessions).size === 1 ? `Your cap starts at ${this.cap}: leave it there and you score ${shownScore(graded.score)}.` : `Your cap is where you left it, at ${this.cap}.`;
      this.setSpeed(kept?.speed ?? this.ownSpeed ?? presetSpeed(metrics.time_s.length));
      [this.rivals, this.best] = [null, this.target]; // until their episodes are there
      this.showTarget();
      this.setPhase(kept?.phase === "running" ? "paused" : kept?.phase ?? "idle");
      this.loaded = Promise.all(everyone.map(async (policy) => ({ ...policy, ...await ask(policy.key) })));
      if (kept?.phase === "running") this.run();
      if (kept) this.seek();
      const rivals = await this.loaded;
      if (generation !== this.generation) return;
      this.rivals = rivals.map(({ metrics: columns, ...rival }) => ({ ...rival, columns }));
      this.best = this.rivals.reduce((a, b) => (a.score >= b.score ? a : b));
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
    const { task, seed, aim, shared, phase, speed, cap, next, mine } = this;
    keep(KEPT, this.at, mine?.caps.length ? { task: task.task_id, seed, aim, shared, phase, speed: Math.min(speed, FOLLOWED), cap, next, mine } : null);
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
    this.raceChart?.destroy();
    this.raceChart = new TimeChart({ title: "Sessions finished", series, height: matchMedia(PHONE).matches ? 100 : 170, limits: [{ value: sessions, label: `all ${sessions} sessions` }] });
    fill(this.scoreBox, this.raceChart.figure);
    this.built = false;
    this.draw();
  }

  /** The other charts, which need all policies. */
  buildBoard() {
    const { target } = this, others = this.rivals.filter(({ key }) => key === SHOWN && key !== target.key), series = [YOU, target, ...others], sync = "rollouts";
    this.lines = others.map(({ key, columns }) => [key, columns]);
    for (const chart of Object.values(this.charts ?? {})) chart.destroy();
    this.charts = {
      pool: new TimeChart({ title: "KV cache", unit: "conversations in flight, 1 is full", series, sync, limits: [{ value: FULL, label: "full" }] }),
      flight: new TimeChart({ title: "Sessions in flight", series, sync }),
      ...(this.hasUsers ? { users: new TimeChart({ title: "Users answered in time", unit: "share of turns so far", series, sync, limits: [{ value: 1, label: "all" }] }) } : {}),
      hit: new TimeChart({ title: "Prefix-cache hit rate", unit: "share of prompt tokens, last 30 s", series, sync, limits: [{ value: 1, label: "all tokens" }] }),
    };
    const [pool, ...figures] = Object.values(this.charts).map(({ figure }) => figure);
    if (matchMedia(PHONE).matches) figures.unshift(pool);
    else this.scoreBox.append(pool);
    fill(this.board, ...figures);
    fill(this.legend, ...series.map(({ label, colour, title }) => el("span", {}, el("span", { class: `chip ink-${colour}`, text: label }), title && el("small", { text: ` ${title}` }))));
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
    const drawn = [["you", mine.columns], [target.key, target.columns], ...(this.built ? this.lines : [])].map(([key, columns]) => [key, curves(columns)]);
    const x = Array.from({ length: most }, (_, i) => i + 1), columnsOf = (name) => Object.fromEntries(drawn.map(([key, columns]) => [key, x.map((_, i) => (i < until ? columns[name][i] : null) ?? null)]));
    this.raceChart.set(x, columnsOf("finished"), [0, most]);
    if (this.built) for (const [name, chart] of Object.entries(this.charts)) chart.set(x, columnsOf(name), [0, most]);
    this.tell(...drawn.slice(0, 2).map(([, { finished, users }]) => ({ finished: at(finished, played), users: at(users, played) })));
    const now = (name) => mine.columns[name].at(-1) ?? 0, you = drawn[0][1], hit = this.phase === "over" ? hitRate(mine.columns) : you.hit.at(-1);
    fill(this.readings, ...[
      ["Second", String(played)], ["Finished", `${now("sessions_finished")} of ${this.task.sessions}`],
      ["In flight", String(now("sessions_in_flight") + now("interactive_in_flight"))],
      ["KV cache filled", percent(now("context_share")), now("context_share") > FULL],
      ["Hit rate", typeof hit === "number" ? percent(hit) : "–", hit < 0.5],
    ].map(([name, value, bad]) => el("div", { class: bad ? "bad" : "" }, el("dt", { text: name }), el("dd", { text: value }))));
  }

  /** Say who is ahead, what happens, and what to do about it; `now` is what the visitor and the player to beat have by this second. */
  tell(...now) {
    const { target, mine, phase, task: { sessions }, forecast, hinted, lesson, cap, next } = this, on = phase === "running" || phase === "paused";
    [mine, target].forEach(({ score }, i) => {
      const { finished } = now[i];
      this.rows[i].value.textContent = on ? `${finished} of ${sessions}` : score === undefined ? "–" : shownScore(score);
      this.rows[i].bar.value = on ? finished / sessions : score ?? 0;
    });
    [this.about.hidden, this.coachBox.hidden] = [on, !on];
    this.knob.classList.toggle("hinted", on && Boolean(hinted));
    if (!on) {
      const { called, score } = this.best;
      this.lead.textContent = this.startsAs;
      this.parts.textContent = `A score of 1 is as fast as with an unlimited KV cache.${this.rivals ? ` The best policy here, ${called}, scores ${shownScore(score)}.` : ""}`;
      return;
    }
    const by = Math.abs(forecast - target.score), ahead = by < LEAST ? "level" : `${shownScore(by)} ${forecast > target.score ? "ahead" : "behind"}`;
    this.lead.textContent = `With a cap of ${cap} ${next ? `until second ${next[0]}, then ${next[1]},` : "to the end"} you finish with ${forecast === undefined ? "…" : `${shownScore(forecast)}: ${ahead}.`}`;
    this.parts.textContent = this.hasUsers ? `Users answered in time so far: you ${percent(now[0].users)}, ${target.called} ${percent(now[1].users)}.` : "";
    const share = mine.columns.context_share.at(-1) ?? 0, full = share > FULL && mine.caps.length >= SETTLED_S;
    this.state.className = `state ${full ? "soon" : ""}`;
    this.state.textContent = `${lesson ? "Paused. " : ""}The KV cache is ${percent(share)} full${full ? ": conversations evict each other" : ""}.`;
    this.advice.textContent = hinted ? `${advised(cap, hinted.table)}: you finish with ${shownScore(hinted.score)}.` : lesson && this.seeking ? "Looking for a better cap …" : "";
    this.follow.hidden = !hinted;
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

  /** Set the slider, and the `[second, cap]` to which a timetable moves it next. */
  setCap(cap, next) {
    this.slider.value = String(cap);
    [this.cap, this.next] = [cap, next];
    this.output.textContent = String(cap);
    this.slider.setAttribute("aria-valuetext", counted(cap, "session"));
  }

  /** The visitor moves the slider, or follows a timetable. */
  move(cap, next) {
    this.setCap(cap, next);
    this.untouched = this.lesson = false;
    [this.hinted, this.forecast] = [null, undefined];
    clearTimeout(this.waiting);
    if (!this.target) return;
    if (this.phase === "idle") this.startsAs = `Your cap starts at ${this.cap}.`;
    else this.waiting = setTimeout(() => this.seek(), MOVED_MS);
    if (this.phase !== "over") this.draw();
  }

  /** Follow a timetable. */
  take([[, early], next]) {
    this.move(early, next[1] === early ? undefined : next);
  }

  /** Do what the hint says, and go on if the run stopped for it. */
  obey() {
    const { lesson } = this;
    this.take(this.hinted.table);
    if (lesson) this.press();
  }

  /** The main button: start, pause, go on, or play the same sessions again, with the cap where it is. */
  async press() {
    this.lesson = false;
    if (this.phase === "running") this.setPhase("paused");
    else if (this.phase === "over") await this.playAgain();
    else if (this.phase === "paused" && this.looping === this.generation) this.setPhase("running"); // its last second is still being played
    else this.run();
  }

  /** Play the same sessions again, after a timetable if there is one. */
  async playAgain(table) {
    await this.choose(this.shared);
    if (this.phase !== "idle" || !this.target) return;
    if (table) this.take(table);
    this.run();
  }

  /** Play the rest at once. */
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
        await this.persist(() => (this.speed > FOLLOWED ? this.rest() : this.second()));
        if (generation !== this.generation) return;
        const played = mine.caps.length, every = Math.ceil(this.target.columns.time_s.length / HINTS);
        if (this.hinted?.table[1][0] <= played) this.hinted = null; // too late for it
        if (played % every === 1 && this.speed <= FOLLOWED && mine.score === undefined) this.seek();
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

  /** The answer of `ask`, which is asked again and again while the server cannot be reached. */
  async persist(ask) {
    const { generation } = this;
    for (let notice = null; ; await sleep(RETRY_MS)) {
      try {
        const answer = await ask();
        notice?.remove();
        return answer;
      } catch (error) {
        if (error.status !== 0 || generation !== this.generation) throw error;
        if (!notice) fill(this.trouble, notice = problem({ message: error.message, next: "check the connection; the sessions go on by themselves when the server answers" }));
      }
    }
  }

  /** Stop when the conversations fit no more, for a visitor who has not moved the slider. */
  teach() {
    const { mine, task } = this, played = mine.caps.length;
    if (!this.untouched || this.taught || this.shared || task !== this.tasks[0] || this.speed > FOLLOWED || played < SETTLED_S || mine.columns.context_share.at(-1) <= FULL) return;
    this.taught = this.lesson = true;
    this.hinted = null; // of an earlier second
    this.setPhase("paused");
    this.seek();
    announce(this.state.textContent);
  }

  /** Play the next second; the score comes with the last one. Repeating a step is safe, since it carries its number. */
  async second() {
    if (this.next?.[0] <= this.mine.caps.length) this.setCap(this.next[1]);
    const { mine, cap } = this;
    const { observation, done, info: { score, breakdown, ...seen } } = await post("step", { session_id: mine.session, step: mine.caps.length + 1, action: { max_sessions: cap } }, "rollouts");
    mine.caps.push(cap);
    for (const [name, column] of Object.entries(mine.columns)) column.push({ ...observation, ...seen }[name]);
    if (done) Object.assign(mine, { score, breakdown });
  }

  /** Play the rest in one request. */
  async rest() {
    const { mine } = this, { metrics, action, score, breakdown } = await this.played(this.timetable());
    Object.assign(mine, { columns: metrics, caps: action.max_sessions, score, breakdown });
    this.setCap(mine.caps.at(-1));
  }

  /** The timetable of the cap from now on; one that stays has a change to the same cap, for the search to move. */
  timetable() {
    const { cap, next, mine: { caps: { length } }, best } = this;
    return [[length, cap], next ?? [length + Math.max(1, Math.round((best.columns.time_s.length - length) / 4)), cap]];
  }

  /** This episode, as the server plays it with the visitor's caps until a timetable begins. */
  played(table, more) {
    const { task: { task_id, episode_length }, seed, mine } = this, actions = [...mine.caps.slice(0, table[0][0]), ...capsOf(table, episode_length)];
    return post("play", { task_id, seed: Number(seed), agent: AFTER, actions, ...more }, "rollouts");
  }

  /** The best of the timetables `starts` and of those near them that a search plays, as `table` with its `score`; and the score of the first, `stay`. */
  async search(starts, rounds) {
    const { task: { sessions }, best: { columns } } = this, [[[from]]] = starts;
    const played = (tables) => Promise.all(tables.map(async (table) => ({ table, score: (await this.played(table, { brief: true })).score })));
    const better = (a, b) => (a.score >= b.score ? a : b), begun = await played(starts);
    let found = begun.reduce(better), [times, share] = WIDE;
    for (let round = 0; round < rounds; round++) {
      const by = Math.max(1, Math.round(share * (columns.time_s.length - from))), tried = (await played(near(found.table, times, by, sessions))).reduce(better);
      if (tried.score > found.score) found = tried;
      else [times, share] = [Math.sqrt(times), share / 2];
    }
    return { stay: begun[0].score, ...found };
  }

  /** Ask the server what the visitor's caps score if they stay, and whether another timetable scores more. */
  async seek() {
    const { mine, generation, cap, next, hinted, best } = this, second = mine.caps.length;
    if (this.seeking || !second || mine.score !== undefined) return;
    this.seeking = true;
    const known = hinted?.table[1][0] > second ? [[[second, hinted.table[0][1]], hinted.table[1]]] : [];
    const [[, early], [then]] = outline(best.columns, second);
    const found = await this.search([this.timetable(), [[second, early], [then, early]], ...known], ROUNDS[this.phase]).catch(() => null); // what cannot be checked is not said
    this.seeking = false;
    if (!found || generation !== this.generation) return;
    if (cap === this.cap && next === this.next && (this.phase === "running" || second === mine.caps.length)) {
      this.forecast = found.stay;
      this.hinted = found.score > found.stay + GAIN ? found : null;
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
    const params = { ...(task === this.tasks[0] ? {} : { task: task.task_id }), ...(this.seed === SEED ? {} : { seed: this.seed }), beat: score, you: packed(timetable(mine.caps)) };
    this.write(params);
    const breakdown = ({ columns }) => ({ hit_rate: hitRate(columns), seconds: columns.time_s.length });
    const places = [{ ...YOU, ...mine }, ...(this.shared ? [target] : []), ...this.rivals].map((run) => ({ ...run, about: run.title, breakdown: breakdown(run) })).sort((a, b) => b.score - a.score);
    const advice = el("p", { text: SEEKING });
    this.result.className = `result ${won ? "won" : level ? "level" : ""}`;
    fill(this.result, el("h2", {}, el("strong", { text: score }), " ", el("span", { text: verdict })),
      el("p", { text: `Place ${placeOf(mine, places)} of ${places.length}. ${why(mine, won || level ? this.best : target)}` }), advice);
    const next = places.findLast((rival) => Number(shownScore(rival.score)) > Number(score) && rival.key !== SHARED.key), other = this.tasks[this.tasks.indexOf(task) + 1];
    const go = (text, prepare) => el("button", { type: "button", class: "main", text, on: { click: () => { prepare(); this.choose(); } } });
    const onward = !won ? null : next ? go(`Next: beat ${next.label}, ${shownScore(next.score)}`, () => { this.aim = next.key; }) : other && go(`Next task: ${other.name}`, () => { this.taskSelect.value = other.task_id; });
    const [share, copied] = challenge(`I ran ${task.sessions} coding agents on one LLM engine and scored ${score}; ${this.shared ? "my challenger" : target.called}: ${toBeat}.\n${squares(misfits(mine.columns))}\n(🟩 the conversations fit into the KV cache, 🟥 they do not)\nBeat me on the same sessions: ${new URL(address.link("rollouts", params), location.href).href}`);
    fill(this.onward, share, onward, copied);
    fill(this.places, scoreBoard(places));
    announce(`Your score is ${score}. ${verdict}`);
    this.duel.scrollIntoView({ block: "nearest" });
    await this.advise(advice).catch(() => fill(advice)); // what cannot be checked is not advised
  }

  /** What to do next time: the best timetable that a search finds, and a button that plays it. */
  async advise(box) {
    const { mine, best } = this, { table, score } = await this.search([outline(best.columns, 0)], ROUNDS.over), [[, early], [then, late]] = table;
    if (!box.isConnected) return; // another run has begun
    fill(box);
    if (score > mine.score + GAIN) fill(box, el("strong", { text: "Next time: " }), `a cap of ${early}${late === early ? " from the first second on" : ` until second ${then}, then ${late}`}: ${shownScore(score)}. `,
      el("button", { type: "button", text: "Try this", on: { click: () => this.playAgain(table) } }));
  }
}
