/** Traffic controller tab: the visitor plays one server with four actions, one per second, against three policies. */

import * as address from "./address.js";
import { once, post } from "./api.js";
import { TimeChart } from "./charts.js";
import { announce, el, field, fill, problem, select } from "./dom.js";
import { compact, score as shownScore } from "./format.js";
import { scoreBoard } from "./score.js";

const YOU = { key: "you", label: "You", colour: "you", width: 2.5 };
const RIVALS = [
  { key: "adaptive", label: "Adaptive rule", colour: "heuristic" },
  { key: "planner", label: "Optimal plan", colour: "ppo", dash: [8, 3] },
  { key: "allow_all", label: "Admit all", colour: "naive", dash: [1, 3] },
];
const ACTIONS = [["allow_all", "Admit all", 1], ["throttle_70", "Admit 70%", 0.7], ["throttle_40", "Admit 40%", 0.4], ["drop_aggressive", "Admit 20%", 0.2]];

export async function start(panel) {
  const { tasks } = await once("tasks", "traffic");
  const tab = new Traffic(tasks);
  fill(panel, tab.node);
  return tab;
}

class Traffic {
  constructor(tasks) {
    this.tasks = tasks;
    this.generation = 0;
    this.taskSelect = select(tasks.map(({ id, difficulty }) => [id, difficulty.replace(/^./, (letter) => letter.toUpperCase())]), tasks[0].id, () => this.choose());
    this.buttons = ACTIONS.map(([name, text], i) => el("button", { type: "button", class: "main", text: `${i + 1}  ${text}`, "data-action": name, on: { click: () => this.act(name) } }));
    this.lead = el("p", { class: "lead" });
    this.again = el("button", { type: "button", text: "Start over", on: { click: () => this.choose() } });
    this.now = el("p", { class: "now", "aria-live": "polite" });
    this.story = el("p", { class: "story" });
    this.out = el("div", { class: "result" });
    this.trouble = el("div");
    this.board = el("div", { class: "charts wide" });
    this.strip = el("div", { class: "moves", role: "list", "aria-label": "Your decisions" });
    this.legend = el("div", { class: "legend" });
    this.node = el("div", {},
      el("h2", { text: "Decide how many requests one server admits" }),
      this.story, this.lead,
      el("div", { class: "controls" }, field("Task", this.taskSelect), this.again),
      this.now,
      el("div", { class: "buttons", role: "group", "aria-label": "Your action for the next second" }, ...this.buttons),
      this.strip, this.trouble, this.out, this.legend, this.board);
    document.addEventListener("keydown", (event) => {
      const chosen = ACTIONS[Number(event.key) - 1], shown = this.node.offsetParent, command = event.ctrlKey || event.metaKey || event.altKey;
      if (chosen && shown && !command && !["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) this.act(chosen[0]);
    });
  }

  async show(params) {
    const asked = params.get("task");
    if (this.task && (!asked || asked === this.task.id)) return;
    if (this.tasks.some(({ id }) => id === asked)) this.taskSelect.value = asked;
    await this.choose();
  }

  async choose() {
    const generation = ++this.generation;
    this.task = this.tasks.find(({ id }) => id === this.taskSelect.value);
    address.write("traffic", { task: this.task.id });
    this.story.textContent = this.task.description;
    for (const part of [this.out, this.trouble, this.lead]) fill(part);
    this.enable(false);
    try {
      const [begun, ...episodes] = await Promise.all([
        post("reset", { task_id: this.task.id }, "traffic"),
        ...RIVALS.map(({ key }) => post("play", { task_id: this.task.id, agent: key }, "traffic")),
      ]);
      if (generation !== this.generation) return;
      this.session = begun.session_id;
      this.config = begun.config;
      this.length = begun.max_steps;
      this.state = begun.state;
      this.mine = { incoming: [], allowed: [], latency: [], queue: [], load: [], action: [], reward: 0 };
      this.rivals = RIVALS.map((rival, i) => ({ ...rival, episode: episodes[i] }));
      const [adaptive, planner] = episodes.map(({ score }) => shownScore(score));
      this.lead.textContent = `Each press of a button, or of a key from 1 to 4, plays one second. The adaptive rule scores ${adaptive} of 1, the optimal plan ${planner}.`;
      this.buildBoard();
      this.draw();
      this.enable(true);
    } catch (error) {
      if (generation === this.generation) fill(this.trouble, problem(error));
    }
  }

  enable(on) {
    for (const button of this.buttons) button.disabled = !on;
  }

  buildBoard() {
    const players = [YOU, ...this.rivals], sync = "traffic";
    for (const chart of Object.values(this.charts ?? {})) chart.destroy();
    this.charts = {
      traffic: new TimeChart({ title: "Incoming and admitted", unit: "requests/s", sync, limits: [{ value: this.config.server_capacity, label: "capacity" }],
        series: [{ key: "incoming", label: "Incoming", colour: "ink" }, ...players] }),
      queue: new TimeChart({ title: "Queue", unit: "requests", series: players, sync }),
      latency: new TimeChart({ title: "Latency", unit: "ms, log", log: true, series: players, sync, limits: [{ value: 200, label: "penalty above" }] }),
      load: new TimeChart({ title: "CPU in use", unit: "share", series: players, sync, limits: [{ value: 1, label: "maximum" }] }),
    };
    fill(this.board, ...Object.values(this.charts).map(({ figure }) => figure));
    fill(this.legend, el("span", { class: "chip ink-ink", text: "Incoming" }), ...players.map(({ label, colour }) => el("span", { class: `chip ink-${colour}`, text: label })));
  }

  draw() {
    const until = this.mine.action.length, fresh = until === 0;
    const x = Array.from({ length: this.length }, (_, i) => i + 1);
    const shown = fresh ? this.length : until;
    const cut = (column) => x.map((_, i) => (i < shown ? column[i] ?? null : null));
    const everyone = (mine, theirs) => ({ you: cut(this.mine[mine]), ...Object.fromEntries(this.rivals.map(({ key, episode }) => [key, cut(episode.metrics[theirs])])) });
    // A crash ends an episode, so the longest episode shows the most of the incoming traffic.
    const whole = this.rivals.reduce((a, b) => (a.episode.steps >= b.episode.steps ? a : b)).episode;
    const span = [0, this.length];
    this.charts.traffic.set(x, { incoming: cut(whole.metrics.incoming_requests), ...everyone("allowed", "allowed_requests") }, span);
    this.charts.queue.set(x, everyone("queue", "queue_length"), span);
    this.charts.latency.set(x, everyone("latency", "avg_latency"), span);
    this.charts.load.set(x, everyone("load", "cpu_usage"), span);
    fill(this.strip, ...this.mine.action.map((name, i) => {
      const [, text, share] = ACTIONS.find(([action]) => action === name);
      return el("span", { role: "listitem", class: `move m${Math.round(100 * share)}`, title: `second ${i + 1}: ${text}`, "aria-label": `second ${i + 1}: ${text}` });
    }));
    const s = this.state;
    this.now.textContent = until >= this.length || s.crashed ? "" :
      `Second ${until + 1} of ${this.length}. Incoming: ${compact(s.request_rate)} requests/s (capacity ${compact(this.config.server_capacity)}, crash above ${compact(this.config.server_capacity * this.config.crash_load_ratio)}). Queue ${s.queue_length}, latency ${compact(s.avg_latency)} ms.`;
  }

  async act(name) {
    if (this.busy || this.buttons[0].disabled) return;
    this.busy = true;
    const generation = this.generation;
    try {
      const answer = await post("step", { action: name, session_id: this.session, step: this.mine.action.length + 1 }, "traffic");
      if (generation !== this.generation) return;
      const { info, state } = answer;
      this.mine.action.push(name);
      this.mine.incoming.push(info.incoming_requests);
      this.mine.allowed.push(info.allowed_requests);
      this.mine.latency.push(state.avg_latency);
      this.mine.queue.push(state.queue_length);
      this.mine.load.push(state.cpu_usage);
      this.mine.reward += answer.reward;
      this.state = state;
      this.draw();
      if (answer.done) await this.finish(info);
    } catch (error) {
      fill(this.trouble, problem(error));
    } finally {
      this.busy = false;
    }
  }

  async finish(info) {
    this.enable(false);
    const grade = await post("grader", { session_id: this.session }, "traffic");
    const places = [{ ...YOU, score: grade.score, breakdown: grade.breakdown ?? {} }, ...this.rivals.map((rival) => ({ ...rival, score: rival.episode.score, breakdown: rival.episode.breakdown ?? {} }))].sort((a, b) => b.score - a.score);
    const ending = info.crashed ? `The server crashed at second ${this.mine.action.length} of ${this.length}` : "The server stayed up", verdict = `${ending}. Your score: ${shownScore(grade.score)}`;
    fill(this.out, el("h2", { text: verdict }), info.crashed ? el("p", { text: "Next time, admit less before a spike: Incoming is the load of the second to come." }) : null, scoreBoard(places));
    announce(verdict);
  }
}
