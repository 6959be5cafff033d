/** Agent sessions tab: the visitor caps the sessions in flight on one engine while they run, and sees the cliff. */

import * as address from "./address.js";
import { get, once, post, sleep } from "./api.js";
import { TimeChart } from "./charts.js";
import { announce, copy, el, field, fill, problem, select } from "./dom.js";
import { compact, percent, score as shownScore, sum } from "./format.js";
import { keep, takeKept } from "./kept.js";
import { SHARED, player } from "./players.js";
import { scoreBoard } from "./score.js";
import { MAX_SEED, isSeed, seedOf } from "./seeds.js";

const YOU = { key: "you", label: "You", colour: "you", width: 2.5 };
const TARGET = "fit"; // whom to beat
const DRAWN = { fit: { colour: "heuristic" }, no_cap: { colour: "naive", dash: [1, 3] } };
const ORACLE = "oracle_constant"; // plays each episode many times, and a visitor would wait for it
const TICK_S = 10; // between two drawings
const PACES = [[10, "10×"], [30, "30×"], [160, "as fast as possible"]];
const WINDOW_S = 30, FIRST_CAP = 12; // the window is the hit rate's
const FULL = 1, ROOM = 0.5; // shares of the KV pool: above the one, a hint says down; below the other, much of it is idle
const QUESTION = "How many agent sessions should one engine run at a time?";
const ABOUT = "You run one LLM engine for many coding agents. Every turn makes their conversations longer; those that no longer fit into the cache are thrown out, and computed again when their agent comes back. So you limit how many run at once.";
const LOADING = "Loading the sessions …", PREVIEW_DRAWS = 50;
const KEPT = "rollouts";
const SEED = "42"; // a link without a task and a seed is of the first task and this one

export async function start(panel) {
  const { tasks } = await once("tasks", "rollouts");
  const tab = new Rollouts(tasks);
  fill(panel, tab.node);
  return tab;
}

/** Prompt tokens found in the prefix cache as a share of those looked up; null where none were. */
function hitRate(columns, from, to) {
  const queried = sum(columns.prefix_queried_tokens.slice(from, to));
  return queried > 0 ? sum(columns.prefix_hit_tokens.slice(from, to)) / queried : null;
}

/** Prompt tokens computed beyond `least` for each token written, in the first seconds of an episode. */
const wasted = (columns, least, until) => Math.max(0, sum(columns.computed_tokens.slice(0, until)) - least * sum(columns.generated_tokens.slice(0, until)));

/** Curves of an episode given as columns, a value every `TICK_S` seconds. */
function curves(columns, least) {
  const drawn = { hit: [], wasted: [], finished: [], pool: [] };
  for (let from = 0; from < columns.time_s.length; from += TICK_S) {
    const until = Math.min(columns.time_s.length, from + TICK_S);
    drawn.hit.push(hitRate(columns, Math.max(0, until - WINDOW_S), until));
    drawn.wasted.push(wasted(columns, least, until));
    drawn.finished.push(columns.sessions_finished[until - 1]);
    drawn.pool.push(columns.context_share[until - 1]);
  }
  return drawn;
}

/** Caps, one for each second, as a short text: `second.cap` of each change. */
export const packCaps = (caps) => caps.flatMap((cap, i) => (cap === caps[i - 1] ? [] : [`${i}.${cap}`])).join("_");

/** Caps of a text of `packCaps` up to the last change, which stays; null if the text is malformed. Older links begin with the number of seconds. */
export function unpackCaps(text) {
  if (!/^(\d{1,4}_)?0\.\d{1,4}(_\d{1,4}\.\d{1,4})*$/.test(text)) return null;
  const changes = text.split("_").filter((change) => change.includes(".")).map((change) => change.split(".").map(Number)), at = new Map(changes);
  const caps = [];
  for (let second = 0; second <= changes.at(-1)[0]; second++) caps.push(at.get(second) ?? caps.at(-1));
  return caps;
}

/** In which seconds of a run its cap was too high or too low, in words; an empty text if in few. */
function nextTime({ context_share: shares, sessions_waiting: waiting }) {
  const seconds = (is) => shares.filter(is).length, full = seconds((share) => share > FULL), idle = seconds((share, i) => share < ROOM && waiting[i] > 0);
  if (Math.max(full, idle) < shares.length / 10) return "";
  if (full > idle) return `lower the cap as soon as the share of the pool nears 100 %. For ${full} of ${shares.length} seconds the conversations did not fit.`;
  return `try a higher cap. For ${idle} of ${shares.length} seconds more than half of the pool was idle while sessions waited.`;
}

/** A run of which nothing is played yet, from the answer of POST /reset. */
const newRun = (begun) => ({ session: begun.session_id, columns: Object.fromEntries(Object.keys(begun.observation).map((name) => [name, []])), caps: [], score: undefined });

class Rollouts {
  constructor(tasks) {
    this.tasks = tasks;
    this.generation = 0;
    this.taskSelect = select(tasks.map(({ task_id, name, difficulty }) => [task_id, `${name} (${difficulty})`]), tasks[0].task_id, () => this.choose());
    this.seedInput = el("input", { type: "number", min: "0", max: String(MAX_SEED), step: "1", value: SEED, on: { change: () => this.choose() } });
    this.play = el("button", { type: "button", class: "main", text: "Start", on: { click: () => this.press() } });
    this.pace = select(PACES, 30);
    this.again = el("button", { type: "button", text: "Start over", on: { click: () => this.choose(this.shared) } });
    this.goal = el("h2", { class: "goal", text: QUESTION });
    this.slider = el("input", { type: "range", id: "max-sessions", min: "1", max: "96", step: "1", value: String(FIRST_CAP), "aria-describedby": "max-sessions-hint", on: { input: () => this.putCap() } });
    this.output = el("output", { for: "max-sessions" });
    this.lead = el("p", { class: "lead" });
    this.knob = el("div", { class: "knob" },
      el("div", { class: "knob-head" }, el("label", { for: "max-sessions", text: "Sessions in flight, at most" }), this.output),
      this.slider,
      el("small", { id: "max-sessions-hint", text: "Move it while the sessions run. With too few the engine idles; with too many they evict each other: keep the share of the pool below 100 %. Fewer fit later than at the start." }));
    [this.story, this.readings] = [el("p", { class: "story" }), el("dl", { class: "readings" })];
    [this.trouble, this.scores] = [el("div"), el("div")];
    this.who = el("details", { hidden: true, open: true }); // until the players are there
    this.out = el("section", { class: "result", "aria-label": "Result" });
    [this.board, this.legend] = [el("div", { class: "charts wide" }), el("div", { class: "legend" })];
    [this.about, this.onward, this.first] = [el("p", { text: ABOUT }), el("span", { class: "onward" }), el("div")]; // the last holds the first chart
    this.node = el("div", { class: "race" },
      el("section", { class: "duel", "aria-label": "The score to beat" },
        el("div", { class: "duel-text" }, this.goal, this.about, this.lead, this.out, el("div", { class: "buttons" }, this.play, this.again, this.onward), this.trouble),
        this.first),
      el("aside", { class: "side" }, this.knob, this.readings),
      el("div", { class: "stage" },
        el("div", { class: "controls" }, field("Task", this.taskSelect), field("Seed", this.seedInput), field("Pace", this.pace)), this.story,
        this.legend, this.board,
        el("p", { class: "note", text: "Wasted recomputation: prompt tokens that a policy with fewer evictions would have found in the cache. They are counted from the policy that computes the fewest prompt tokens per token written; during an episode this is an estimate, because first prompts are all new." }),
        this.scores, this.who));
    this.putCap();
    addEventListener("pagehide", () => keep(KEPT, this.at, this.mine?.caps.length ? { task: this.task.task_id, seed: this.seedInput.value, shared: this.shared && packCaps(this.shared), cap: this.cap, pace: this.pace.value, playing: this.playing, mine: this.mine, ghost: this.ghost } : null));
  }

  async show(params) {
    if (this.task && location.hash === this.at) return; // back on this tab, with its run or its result as it was
    const kept = this.task ? null : takeKept(KEPT);
    if (kept) {
      this.at = location.hash;
      [this.taskSelect.value, this.seedInput.value, this.pace.value] = [kept.task, kept.seed, kept.pace];
      this.choose(kept.shared && unpackCaps(kept.shared), kept);
      return;
    }
    const you = params.get("you"), task = params.get("task") ?? (you && this.tasks[0].task_id), seed = params.get("seed") ?? (you && SEED);
    if (this.task && !you && (!task || task === this.task.task_id) && (!seed || seed === this.seedInput.value)) return;
    if (this.tasks.some(({ task_id }) => task_id === task)) this.taskSelect.value = task;
    if (isSeed(seed ?? "")) this.seedInput.value = seed;
    this.claimed = /^[01]\.\d{1,3}$/.test(params.get("beat") ?? "") ? params.get("beat") : undefined;
    const shared = you === null ? null : unpackCaps(you);
    const chosen = this.choose(shared); // not awaited: the tab is there at once, and its policies take some seconds to play
    if (task && task !== this.task.task_id) fill(this.trouble, problem({ message: `There is no task ${task.slice(0, 60)} here`, next: "choose one of the list" }));
    else if (seed !== null && !isSeed(seed)) fill(this.trouble, problem({ message: `The link's seed, ${seed.slice(0, 60)}, is not a whole number from 0 to ${MAX_SEED}: this is another one`, next: "ask for the link again, or enter the seed" }));
    else if (you !== null && !shared) chosen.then(() => fill(this.trouble, problem({ message: "The link does not contain a valid run", next: "press Start to play these sessions yourself" })));
  }

  /** Called when another tab is opened. */
  leave() {
    if (this.playing) this.pause();
  }

  putCap() {
    this.cap = this.slider.valueAsNumber;
    this.output.textContent = String(this.cap);
    this.slider.setAttribute("aria-valuetext", `${this.cap} ${this.cap === 1 ? "session" : "sessions"}`);
  }

  /** Start an episode, and play its policies; `shared` are the caps of a link, which play beside the visitor's; `kept` is the run that a reload takes up. */
  async choose(shared = null, kept = null) {
    const generation = ++this.generation;
    this.shared = shared;
    this.task = this.tasks.find(({ task_id }) => task_id === this.taskSelect.value);
    const { task_id, description, sessions } = this.task;
    if (!shared && !kept) this.write({ task: task_id, seed: this.seedInput.value });
    this.pause(LOADING);
    this.play.disabled = true;
    this.story.textContent = description;
    this.slider.max = String(sessions);
    this.putCap();
    for (const part of [this.out, this.onward, this.trouble, this.scores, this.lead]) fill(part);
    this.goal.textContent = QUESTION;
    this.goal.hidden = this.about.hidden = this.lead.hidden = false;
    this.board.classList.add("stale"); // until the charts are those of these sessions
    try {
      const seed = seedOf(this.seedInput);
      announce("The policies play this seed.");
      const reset = () => post("reset", { task_id, seed }, "rollouts");
      const [begun, other, { policies }] = await Promise.all([kept ? null : reset(), shared && !kept ? reset() : null, get(`policies?task_id=${task_id}`, "rollouts")]);
      const shown = policies.filter(({ name }) => name !== ORACLE);
      const episodes = await Promise.all(shown.map(({ name }) => post("play", { task_id, seed, agent: name }, "rollouts")));
      if (generation !== this.generation) return;
      this.mine = kept?.mine ?? newRun(begun);
      this.ghost = kept?.ghost ?? (other && { ...newRun(other), ...SHARED });
      this.least = Math.min(...episodes.map(({ metrics }) => sum(metrics.computed_tokens) / sum(metrics.generated_tokens)));
      this.rivals = shown.map((policy, i) => ({ ...player(policy), ...DRAWN[policy.name], score: episodes[i].score, columns: episodes[i].metrics }));
      this.target = this.ghost ?? this.rivals.find(({ key }) => key === TARGET);
      const beaten = this.ghost ? this.claimed ?? "it" : shownScore(this.target.score);
      fill(this.goal, "Beat ", el("strong", { class: `ink-${this.target.colour}`, text: beaten }), this.ghost ? ", the score of your challenger on these sessions" : `, the score of ${this.target.called} on these sessions`);
      this.board.classList.remove("stale");
      this.buildBoard();
      this.rank();
      this.play.disabled = false;
      this.pause("Start");
      if (!kept) {
        this.preview(generation);
        return;
      }
      this.slider.value = String(kept.cap);
      this.putCap();
      if (kept.mine.score !== undefined) await this.finish();
      else if (kept.playing) this.run();
      else this.pause();
    } catch (error) {
      if (generation !== this.generation) return;
      this.pause("Start");
      fill(this.trouble, problem(error));
    }
  }

  /** Draw the policies' curves as they grow, until the visitor starts. */
  async preview(generation) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (let drawn = 1; drawn <= PREVIEW_DRAWS; drawn++) {
      this.draw(drawn / PREVIEW_DRAWS);
      await sleep(60);
      if (generation !== this.generation || this.playing) return;
    }
  }

  /** Write the address of this run, by which the tab knows it again. */
  write(params) {
    address.write("rollouts", params);
    this.at = location.hash;
  }

  buildBoard() {
    const lines = this.rivals.filter(({ key }) => key in DRAWN), series = [YOU, ...(this.ghost ? [SHARED] : []), ...lines], sync = "rollouts";
    this.lines = lines.map(({ key, columns }) => [key, curves(columns, this.least)]);
    for (const chart of Object.values(this.charts ?? {})) chart.destroy();
    this.charts = {
      hit: new TimeChart({ title: "Prefix-cache hit rate", unit: `share of prompt tokens, last ${WINDOW_S} s`, series, sync, limits: [{ value: 1, label: "all" }] }),
      wasted: new TimeChart({ title: "Wasted recomputation", unit: "tokens", series, sync }),
      finished: new TimeChart({ title: "Sessions finished", unit: "sessions", series, sync, limits: [{ value: this.task.sessions, label: "all" }] }),
      pool: new TimeChart({ title: "Conversations in flight", unit: "share of the KV pool", series, sync, limits: [{ value: 1, label: "KV pool" }] }),
    };
    const [first, ...others] = Object.values(this.charts).map(({ figure }) => figure);
    fill(this.first, first);
    fill(this.board, ...others);
    this.who.hidden = false;
    fill(this.who, el("summary", { text: "Who are they?" }), el("dl", {}, ...this.rivals.flatMap(({ label, title }) => [el("dt", { text: label }), el("dd", { text: title })])));
    fill(this.legend, ...series.map(({ label, colour }) => el("span", { class: `chip ink-${colour}`, text: label })));
    this.draw();
  }

  /** Draw the visitor's run so far, and this share of the policies' episodes. */
  draw(share = 1) {
    const drawn = [["you", curves(this.mine.columns, this.least)], ...(this.ghost ? [["shared", curves(this.ghost.columns, this.least)]] : []), ...this.lines];
    const x = Array.from({ length: Math.max(...drawn.map(([, { hit }]) => hit.length)) }, (_, i) => TICK_S * (i + 1));
    for (const [name, chart] of Object.entries(this.charts)) {
      chart.set(x, Object.fromEntries(drawn.map(([key, columns]) => [key, x.map((_, i) => (i <= share * x.length ? columns[name][i] : null) ?? null)])), [0, x.at(-1)]);
    }
    const mine = this.mine.columns, now = (name) => mine[name].at(-1) ?? 0, second = mine.time_s.length;
    const hit = hitRate(mine, Math.max(0, second - WINDOW_S), second);
    this.coach(second, now);
    fill(this.readings, ...[
      ["Second", String(second)], ["Hit rate", hit === null ? "–" : percent(hit), hit !== null && hit < 0.5],
      ["Wasted recomputation", compact(wasted(mine, this.least, second))], ["Finished", `${now("sessions_finished")} of ${this.task.sessions}`],
      ["In flight", String(now("sessions_in_flight") + now("interactive_in_flight"))],
      ["Share of pool", percent(now("context_share")), now("context_share") > 1],
    ].map(([name, value, bad]) => el("div", { class: bad ? "bad" : "" }, el("dt", { text: name }), el("dd", { text: value }))));
  }

  /** During a run: who has finished more sessions by now, and whether to move the cap down. There is no hint to move it up: that an idle pool is worth filling is not certain. */
  coach(second, now) {
    const { columns, label } = this.target, on = second > 0 && this.mine.score === undefined;
    const theirs = columns.sessions_finished[Math.min(second, columns.sessions_finished.length) - 1] ?? 0, share = now("context_share"), settled = on && second > WINDOW_S;
    const down = settled && share > FULL;
    this.knob.classList.toggle("hinted", down);
    const hint = down ? "Move the cap down: the conversations no longer fit into the KV pool and evict each other." : "";
    this.lead.textContent = on ? `${now("sessions_finished")} sessions finished, ${label} has ${theirs} at this second. ${hint}` : second ? "" : `${label}: ${this.target.title.replace(/^./, (letter) => letter.toLowerCase())}`;
  }

  /** The table of scores, best first. */
  rank(...players) {
    const rows = [...players, ...this.rivals].map((row) => ({ ...row, breakdown: {
      hit_rate: hitRate(row.columns, 0) ?? 0, wasted_recomputation_tokens: Math.round(wasted(row.columns, this.least)), seconds: row.columns.time_s.length } }));
    fill(this.scores, scoreBoard(rows.sort((a, b) => b.score - a.score)));
  }

  pause(text = "Go on") {
    this.playing = false;
    this.play.textContent = text;
    this.again.hidden = text !== "Go on";
  }

  /** The main button: pause, go on, or play the same sessions again, with the cap where it is. */
  async press() {
    if (this.playing) this.pause();
    else if (this.mine.score === undefined) this.run();
    else {
      await this.choose(this.shared);
      if (!this.play.disabled) this.run();
    }
  }

  /** Play on until the visitor pauses or the episode ends. */
  async run() {
    this.playing = true;
    this.play.textContent = "Pause";
    [this.about.hidden, this.again.hidden] = [true, false];
    fill(this.trouble);
    if (this.running) return; // after a short pause the last second may still be on its way: its loop goes on
    this.running = true;
    try {
      while (this.playing) {
        const { generation, mine, ghost, shared } = this;
        await this.second(mine, this.cap);
        if (ghost && ghost.score === undefined) await this.second(ghost, shared[ghost.caps.length] ?? shared.at(-1));
        if (generation !== this.generation) continue;
        if (mine.score !== undefined) await this.finish();
        if (mine.caps.length % TICK_S && this.playing) continue;
        this.draw();
        await sleep(1000 * TICK_S / Number(this.pace.value));
      }
    } catch (error) {
      this.pause();
      fill(this.trouble, problem(error));
    } finally {
      this.running = false;
    }
  }

  /** Play the next second of a run; its score comes with the last one. Repeating a step is safe, since it carries its number. */
  async second(run, cap) {
    const { observation, done, info } = await post("step", { session_id: run.session, step: run.caps.length + 1, action: { max_sessions: cap } }, "rollouts");
    run.caps.push(cap);
    for (const [name, value] of Object.entries(observation)) run.columns[name].push(value);
    if (done) run.score = info.score;
  }

  async finish() {
    const { generation, mine, ghost, shared, target, task } = this;
    while (ghost && ghost.score === undefined) {
      await this.second(ghost, shared[ghost.caps.length] ?? shared.at(-1));
      if (generation !== this.generation) return;
    }
    this.pause("Run again");
    const score = shownScore(mine.score), other = shownScore(target.score);
    const params = { ...(task === this.tasks[0] ? {} : { task: task.task_id }), ...(this.seedInput.value === SEED ? {} : { seed: this.seedInput.value }), beat: score, you: packCaps(mine.caps) };
    this.write(params);
    this.rank({ ...YOU, ...mine }, ...(ghost ? [ghost] : []));
    const called = target.called ?? target.label;
    const verdict = score === other ? `You are level with ${called}, with ${score}` : mine.score > target.score ? `You beat ${called} (${other}) with ${score}` : `Not yet: ${called} has ${other}, you finish with ${score}`;
    const share = el("button", { type: "button", text: `Challenge a friend: beat my ${score}` });
    share.addEventListener("click", () => copy(new URL(address.link("rollouts", params), location.href).href, share));
    const wastes = ({ columns }) => compact(wasted(columns, this.least)), hits = ({ columns }) => percent(hitRate(columns, 0) ?? 0);
    const said = `${verdict}, after ${mine.caps.length} seconds.`, advice = nextTime(mine.columns);
    this.goal.hidden = this.about.hidden = this.lead.hidden = true; // the verdict takes their place
    fill(this.onward, share);
    fill(this.out, el("h2", { text: said }),
      el("p", { text: `You found ${hits(mine)} of the prompt tokens in the cache and wasted ${wastes(mine)} tokens of recomputation; ${called} ${hits(target)} and ${wastes(target)}.` }), advice && el("p", {}, el("strong", { text: "Next time: " }), advice));
    announce(this.out.textContent);
  }
}
