/** Agent sessions tab: the visitor caps the sessions in flight on one engine while they run, and sees the cliff. */

import * as address from "./address.js";
import { get, once, post, sleep } from "./api.js";
import { TimeChart } from "./charts.js";
import { announce, el, field, fill, problem, select } from "./dom.js";
import { compact, percent } from "./format.js";
import { player } from "./players.js";
import { scoreBoard } from "./score.js";

const YOU = { key: "you", label: "You", colour: "you", width: 2.5 };
const DRAWN = { fit: { colour: "heuristic" }, no_cap: { colour: "naive", dash: [1, 3] } };
const ORACLE = "oracle_constant"; // plays each episode many times, and a visitor would wait for it
const TICK_S = 10, PAUSE_MS = 60; // between two drawings
const WINDOW_S = 30, FIRST_CAP = 12; // the window is the hit rate's

export async function start(panel) {
  const { tasks } = await once("tasks", "rollouts");
  const tab = new Rollouts(tasks);
  fill(panel, tab.node);
  return tab;
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

/** Prompt tokens found in the prefix cache as a share of those looked up; null where none were. */
function hitRate(columns, from, to) {
  const queried = sum(columns.prefix_queried_tokens.slice(from, to));
  return queried > 0 ? sum(columns.prefix_hit_tokens.slice(from, to)) / queried : null;
}

/** Prompt tokens computed beyond `least` for each token written, in the first seconds of an episode. */
const wasted = (columns, least, until) => Math.max(0, sum(columns.computed_tokens.slice(0, until)) - least * sum(columns.generated_tokens.slice(0, until)));

/** Curves of an episode given as columns, a value every `TICK_S` seconds. */
function curves(columns, least) {
  const drawn = { hit: [], nothing: [], finished: [], pool: [] };
  for (let from = 0; from < columns.time_s.length; from += TICK_S) {
    const until = Math.min(columns.time_s.length, from + TICK_S);
    drawn.hit.push(hitRate(columns, Math.max(0, until - WINDOW_S), until));
    drawn.nothing.push(wasted(columns, least, until));
    drawn.finished.push(columns.sessions_finished[until - 1]);
    drawn.pool.push(columns.context_share[until - 1]);
  }
  return drawn;
}

class Rollouts {
  constructor(tasks) {
    this.tasks = tasks;
    this.generation = 0;
    this.taskSelect = select(tasks.map(({ task_id, name, difficulty }) => [task_id, `${name} (${difficulty})`]), tasks[0].task_id, () => this.choose());
    this.seedInput = el("input", { type: "number", min: "0", step: "1", value: "42", on: { change: () => this.choose() } });
    this.play = el("button", { type: "button", class: "main", text: "Start", on: { click: () => (this.playing ? this.pause() : this.run()) } });
    this.again = el("button", { type: "button", text: "Start over", on: { click: () => this.choose() } });
    this.slider = el("input", { type: "range", id: "max-sessions", min: "1", max: "96", step: "1", value: String(FIRST_CAP), "aria-describedby": "max-sessions-hint", on: { input: () => this.putCap() } });
    this.output = el("output", { for: "max-sessions" });
    [this.story, this.readings] = [el("p", { class: "story" }), el("dl", { class: "readings" })];
    [this.trouble, this.scores] = [el("div"), el("div")];
    this.out = el("section", { class: "result", "aria-label": "Result" });
    [this.board, this.legend] = [el("div", { class: "charts wide" }), el("div", { class: "legend" })];
    this.node = el("div", {},
      el("h2", { text: "How many agent sessions should one engine run at a time?" }),
      el("div", { class: "race" },
        el("div", { class: "controls" }, field("Task", this.taskSelect), field("Seed", this.seedInput), this.play, this.again),
        el("aside", { class: "side" }, this.story,
          el("div", { class: "knob" },
            el("div", { class: "knob-head" }, el("label", { for: "max-sessions", text: "Sessions in flight, at most" }), this.output),
            this.slider,
            el("small", { id: "max-sessions-hint", text: "Move it while the sessions run. With too few the engine idles; with too many they evict each other's contexts from the prefix cache." })),
          this.readings),
        el("div", { class: "stage" }, this.trouble, this.out, this.legend, this.board,
          el("p", { class: "note", text: "Computed for nothing: prompt tokens computed beyond what the most economical policy computes for each token written. During an episode this is an estimate, because first prompts are all new." }),
          this.scores)));
    this.putCap();
  }

  async show(params) {
    const task = params.get("task"), seed = params.get("seed");
    if (this.task && (!task || task === this.task.task_id) && (!seed || seed === this.seedInput.value)) return;
    if (this.tasks.some(({ task_id }) => task_id === task)) this.taskSelect.value = task;
    if (/^\d{1,15}$/.test(seed ?? "")) this.seedInput.value = seed;
    this.choose(); // not awaited: the tab is there at once, and its policies take some seconds to play
  }

  putCap() {
    this.cap = this.slider.valueAsNumber;
    this.output.textContent = String(this.cap);
    this.slider.setAttribute("aria-valuetext", `${this.cap} ${this.cap === 1 ? "session" : "sessions"}`);
  }

  /** Start an episode, and play its policies. */
  async choose() {
    const generation = ++this.generation;
    this.task = this.tasks.find(({ task_id }) => task_id === this.taskSelect.value);
    const { task_id, description, sessions } = this.task, seed = this.seedInput.valueAsNumber;
    address.write("rollouts", { task: task_id, seed: this.seedInput.value });
    this.pause("Start");
    this.play.disabled = true;
    this.story.textContent = description;
    this.slider.max = String(sessions);
    this.putCap();
    for (const part of [this.out, this.trouble, this.scores]) fill(part);
    announce("The policies play this seed.");
    try {
      const [begun, { policies }] = await Promise.all([post("reset", { task_id, seed }, "rollouts"), get(`policies?task_id=${task_id}`, "rollouts")]);
      const shown = policies.filter(({ name }) => name !== ORACLE);
      const episodes = await Promise.all(shown.map(({ name }) => post("play", { task_id, seed, agent: name }, "rollouts")));
      if (generation !== this.generation) return;
      this.session = begun.session_id;
      this.mine = Object.fromEntries(Object.keys(begun.observation).map((name) => [name, []]));
      this.least = Math.min(...episodes.map(({ metrics }) => sum(metrics.computed_tokens) / sum(metrics.generated_tokens)));
      this.rivals = shown.map((policy, i) => ({ ...player(policy), ...DRAWN[policy.name], score: episodes[i].score, columns: episodes[i].metrics }));
      this.buildBoard();
      this.rank();
      this.play.disabled = false;
    } catch (error) {
      if (generation === this.generation) fill(this.trouble, problem(error));
    }
  }

  buildBoard() {
    const lines = this.rivals.filter(({ key }) => key in DRAWN), series = [YOU, ...lines], sync = "rollouts";
    this.lines = lines.map(({ key, columns }) => [key, curves(columns, this.least)]);
    for (const chart of Object.values(this.charts ?? {})) chart.destroy();
    this.charts = {
      hit: new TimeChart({ title: "Prefix-cache hit rate", unit: `share of prompt tokens, last ${WINDOW_S} s`, series, sync, limits: [{ value: 1, label: "all" }] }),
      nothing: new TimeChart({ title: "Computed for nothing", unit: "tokens", series, sync }),
      finished: new TimeChart({ title: "Sessions finished", unit: "sessions", series, sync, limits: [{ value: this.task.sessions, label: "all" }] }),
      pool: new TimeChart({ title: "Conversations in flight", unit: "share of the KV pool", series, sync, limits: [{ value: 1, label: "KV pool" }] }),
    };
    fill(this.board, ...Object.values(this.charts).map(({ figure }) => figure));
    fill(this.legend, ...series.map(({ label, colour }) => el("span", { class: `chip ink-${colour}`, text: label })));
    this.draw();
  }

  draw() {
    const drawn = [["you", curves(this.mine, this.least)], ...this.lines];
    const x = Array.from({ length: Math.max(...drawn.map(([, { hit }]) => hit.length)) }, (_, i) => TICK_S * (i + 1));
    for (const [name, chart] of Object.entries(this.charts)) {
      chart.set(x, Object.fromEntries(drawn.map(([key, columns]) => [key, x.map((_, i) => columns[name][i] ?? null)])), [0, x.at(-1)]);
    }
    const now = (name) => this.mine[name].at(-1) ?? 0, second = this.mine.time_s.length;
    const hit = hitRate(this.mine, Math.max(0, second - WINDOW_S), second);
    fill(this.readings, ...[
      ["Second", String(second)], ["Hit rate", hit === null ? "–" : percent(hit), hit !== null && hit < 0.5],
      ["For nothing", compact(wasted(this.mine, this.least, second))], ["Finished", `${now("sessions_finished")} of ${this.task.sessions}`],
      ["In flight", String(now("sessions_in_flight") + now("interactive_in_flight"))],
      ["Share of pool", percent(now("context_share")), now("context_share") > 1],
    ].map(([name, value, bad]) => el("div", { class: bad ? "bad" : "" }, el("dt", { text: name }), el("dd", { text: value }))));
  }

  /** The table of scores, best first. */
  rank(...players) {
    const rows = [...players, ...this.rivals].map((row) => ({ ...row, breakdown: {
      hit_rate: hitRate(row.columns, 0) ?? 0, tokens_computed_for_nothing: Math.round(wasted(row.columns, this.least)), seconds: row.columns.time_s.length } }));
    fill(this.scores, scoreBoard(rows.sort((a, b) => b.score - a.score)));
  }

  pause(text = "Go on") {
    this.playing = false;
    this.play.textContent = text;
  }

  /** Play on until the visitor pauses or the episode ends. */
  async run() {
    this.playing = true;
    this.play.textContent = "Pause";
    fill(this.trouble);
    if (this.running) return; // after a short pause the last second may still be on its way: its loop goes on
    this.running = true;
    try {
      while (this.playing) {
        const { generation, session, mine } = this;
        const { observation, done, info } = await post("step", { session_id: session, step: mine.time_s.length + 1, action: { max_sessions: this.cap } }, "rollouts");
        if (generation !== this.generation) continue;
        for (const [name, value] of Object.entries(observation)) mine[name].push(value);
        if (done) this.finish(info);
        if (mine.time_s.length % TICK_S && this.playing) continue;
        this.draw();
        await sleep(PAUSE_MS);
      }
    } catch (error) {
      this.pause();
      fill(this.trouble, problem(error));
    } finally {
      this.running = false;
    }
  }

  finish({ score }) {
    this.pause("Over");
    this.play.disabled = true;
    this.rank({ ...YOU, score, columns: this.mine });
    fill(this.out, el("h2", { text: `Over after ${this.mine.time_s.length} seconds. Your score: ${score.toFixed(3)}` }));
    announce(this.out.textContent);
  }
}
