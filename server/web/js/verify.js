/** Verify tab: the server replays and grades a log; for a forged one the first difference is shown. */

import { once, post } from "./api.js";
import { TimeChart } from "./charts.js";
import { announce, el, field, fill, problem, select, table } from "./dom.js";
import { DropBox } from "./drop.js";
import { handed } from "./kept.js";
import { scoreBoard } from "./score.js";

/** Fields of a log that are drawn, by environment. */
const CHARTED = {
  serving: [["tokens_per_sec", "Throughput", "tokens/s"], ["ttft_p50_ms", "Time to first token", "ms"], ["gpu_memory_gb", "Memory per GPU", "GB"]],
  traffic: [["allowed_requests", "Admitted", "requests/s"], ["avg_latency", "Latency", "ms"], ["queue_length", "Queue", "requests"]],
};

export async function start(panel) {
  const [serving, traffic, info] = await Promise.all([once("tasks?all=true"), once("tasks", "traffic"), once("info")]);
  const tab = new Verify(serving.tasks, traffic.tasks, info.limits.max_log_bytes);
  fill(panel, tab.node);
  return tab;
}

/** A value as text, a number to six digits. */
const brief = (value) => (/^-?[\d.]+(e[+-]?\d+)?$/i.test(value) ? String(Number(Number(value).toPrecision(6))) : String(value));

/** Two values as text, in brief unless that makes them equal. */
const apart = (one, other) => (brief(one) === brief(other) ? [one, other] : [brief(one), brief(other)]);

class Verify {
  constructor(serving, traffic, limitBytes) {
    this.family = new Map([...serving.map(({ id }) => [String(id), "serving"]), ...traffic.map(({ id }) => [String(id), "traffic"])]);
    this.first = serving[0].id;
    this.charts = [];
    this.box = new DropBox({
      label: "Episode log (JSON)", accept: ".json,application/json", limitBytes, rows: 12,
      placeholder: '{"task_id": 3, "seed": 42, "episode_log": [{"timestep": 1, "action": {...}, "reward": ..., "metrics": {...}}, ...]}',
      hint: "An array of steps, or an object with task_id, seed, config and episode_log, as downloaded from the race.",
      onText: (text) => this.read(text), onProblem: (error) => this.tell(problem(error)),
    });
    const tasks = [["Race", serving.map(({ id, name }) => [id, name])], ["Traffic controller", traffic.map(({ id, difficulty }) => [id, difficulty.replace(/^./, (letter) => letter.toUpperCase())])]];
    this.task = select(tasks, serving[0].id);
    this.seed = el("input", { type: "number", min: "0", step: "1", value: "42" });
    this.button = el("button", { type: "button", class: "main", text: "Replay and grade", on: { click: () => this.verify() } });
    const example = (text, forge) => el("button", { type: "button", text, on: { click: () => this.example(forge) } });
    this.out = el("div", { "aria-live": "polite" });
    this.node = el("div", {},
      el("h2", { text: "Was a score really played? Verify an episode log by replay" }),
      el("p", { text: "Task, seed, settings and actions determine every number of an episode. The server plays the log's actions again and compares all numbers. It refuses a log with a changed number, and you see the first difference." }),
      el("div", { class: "columns" },
        el("div", {}, this.box.node,
          el("div", { class: "controls" }, field("Task", this.task), field("Seed", this.seed), this.button),
          el("div", { class: "buttons" }, el("span", { class: "note", text: "Examples:" }), example("A genuine log", false), example("A forged log", true))),
        this.out));
  }

  /** Called whenever the tab is opened: a log may come from another tab. */
  async show() {
    if (!handed.text) return;
    this.box.put(handed.text);
    handed.text = "";
    await this.verify();
  }

  tell(...nodes) {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
    fill(this.out, ...nodes);
    if (nodes.length) nodes[0].scrollIntoView({ block: "nearest" });
  }

  read(text) {
    this.config = this.unknown = undefined;
    let given;
    try {
      given = JSON.parse(text);
    } catch {
      return null;
    }
    if (Array.isArray(given)) return given;
    if (!given || !Array.isArray(given.episode_log)) return null;
    this.unknown = given.task_id !== undefined && !this.family.has(String(given.task_id)) ? given.task_id : undefined;
    if (this.family.has(String(given.task_id))) this.task.value = String(given.task_id);
    if (Number.isInteger(given.seed)) this.seed.value = String(given.seed);
    this.config = given.config ?? undefined;
    return given.episode_log;
  }

  async example(forge) {
    this.button.disabled = true;
    try {
      const { task_id, seed, episode_log } = await post("play", { task_id: this.first, agent: "heuristic", seed: 42, log: true });
      if (forge) {
        const half = episode_log[Math.floor(episode_log.length / 2)];
        half.metrics.tokens_per_sec = Math.round(1.2 * half.metrics.tokens_per_sec);
      }
      this.box.put(JSON.stringify({ task_id, seed, episode_log }, null, 1));
      await this.verify();
    } catch (error) {
      this.tell(problem(error));
    }
    this.button.disabled = false;
  }

  async verify() {
    const log = this.read(this.box.area.value);
    if (!log) {
      this.tell(problem({ message: "This is not an episode log", next: "paste the JSON of a log, or load one of the examples" }));
      return;
    }
    if (!log.length) {
      this.tell(problem({ message: "This log has no steps", next: "paste the log of an episode, or load one of the examples" }));
      return;
    }
    if (this.unknown !== undefined) {
      this.tell(problem({ message: `The log is of task ${JSON.stringify(this.unknown)}, which this server does not have`, next: "write the id of one of its tasks into the log; they are those of the list Task" }));
      return;
    }
    this.button.disabled = true;
    const family = this.family.get(this.task.value);
    const body = { task_id: family === "serving" && /^\d+$/.test(this.task.value) ? Number(this.task.value) : this.task.value, episode_log: log, seed: Number(this.seed.value), verify: true };
    if (this.config) body.config = this.config;
    try {
      const grade = await post("grader", body, family);
      const row = { key: "log", label: "This log", colour: "heuristic", score: grade.score, breakdown: grade.breakdown ?? {} };
      this.tell(
        el("h2", { class: grade.verified ? "good" : "", text: grade.verified ? `Verified: all ${log.length} seconds replayed, every number agrees` : "Graded, not verified" }),
        el("p", { text: grade.feedback ?? "" }), scoreBoard([row]));
      this.drawLog(log, family);
      announce(`Verified, score ${grade.score.toFixed(3)}`);
    } catch (error) {
      if (error.code === "forged_log" || error.code === "malformed_log") this.showDifference(error, log, family);
      else this.tell(problem(error));
    }
    this.button.disabled = false;
  }

  /** Show the first number that differs between the log and its replay. */
  showDifference(error, log, family) {
    const found = error.message.match(/step (\d+): (\S+) is (.*) in the log, and (.*) when its actions are replayed/s);
    if (!found) {
      this.tell(el("h2", { class: "bad", text: "Refused" }), problem(error));
      return;
    }
    const [, at, name] = found, step = Number(at), [claimed, replayed] = apart(found[3], found[4]);
    const value = (entry) => name.split(".").reduce((inner, key) => inner?.[key], entry);
    const rows = log.slice(Math.max(0, step - 2), step + 3).map((entry, i) => {
      const index = Math.max(0, step - 2) + i;
      return [index + 1, index === step ? el("mark", { text: claimed }) : brief(value(entry)), index === step ? replayed : index < step ? "the same" : "not compared"];
    });
    this.tell(
      el("h2", { class: "bad", text: `Forged: first difference at second ${step + 1}` }),
      el("p", { text: `${name} is ${claimed} in the log. Replaying its actions gives ${replayed}. All numbers before this one agree.` }),
      table("Seconds around the first difference", ["Second", `${name} in the log`, "replayed"], rows));
    this.drawLog(log, family, { x: step + 1, label: "differs here" });
    announce(`Forged: first difference at second ${step + 1}`);
  }

  drawLog(log, family, mark) {
    const x = log.map((_, i) => i + 1);
    this.charts = CHARTED[family].map(([key, title, unit]) => {
      const chart = new TimeChart({ title, unit, series: [{ key, label: "In the log", colour: "heuristic" }], sync: "verify" });
      chart.column = log.map((entry) => { const v = entry?.metrics?.[key]; return Number.isFinite(v) ? v : null; });
      return chart;
    });
    this.out.append(el("div", { class: "charts" }, ...this.charts.map((chart) => chart.figure)));
    for (const chart of this.charts) {
      if (mark) chart.mark([mark]);
      chart.set(x, { [chart.series[0].key]: chart.column }, [0, log.length]);
    }
  }
}
