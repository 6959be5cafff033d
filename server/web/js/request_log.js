/** What the tabs on a visitor's request log share: the box with the log, its example, and the settings for engines. */

import { ownText, post } from "./api.js";
import { announce, copy, download, el, field, fill, problem, select } from "./dom.js";
import { DropBox } from "./drop.js";
import { player } from "./players.js";

const EXAMPLE = "data/azure-conversation.csv";
const LOG_BYTES = 4_000_000;
const ENGINES = [["vllm", "vLLM"], ["sglang", "SGLang"], ["helm", "vLLM by Helm"]];

/** A box for a request log, with a button that fills in the example; `onProblem` is told what went wrong. */
export class LogBox extends DropBox {
  constructor({ label, hint, example, onProblem }) {
    super({
      label, hint, accept: ".csv,.json,.jsonl,.gz,text/csv,application/json", limitBytes: LOG_BYTES, rows: 9,
      placeholder: "arrival_s,prompt_tokens,output_tokens\n0.0,374,44\n4.3,396,109",
      onText: (text, name) => { if (name) this.name = this.called = name; }, onProblem,
    });
    this.name = "log.csv";
    this.called = "Your text"; // until a file is taken
    this.columns = el("input", { type: "text", maxlength: "1000", placeholder: "arrival=ts:ms" });
    this.repair = el("div"); // fields that appear where the log is refused, and stay with it
    this.chosen = []; // of them, the choices of columns: [quantity, label, select]
    this.skip = el("input", { type: "checkbox" });
    this.filter = el("input", { type: "text", maxlength: "1000", placeholder: "model=llama" });
    /** Fields that say how the log is read. */
    this.fields = [field("Columns of the log", this.columns, "Only for unusual names, or times without a unit."), field("Only rows with", this.filter, "One model, if the log has several.")];
    this.example = el("button", { type: "button", text: example, on: { click: () => this.takeExample() } });
  }

  async takeExample() {
    try {
      this.put(await ownText(EXAMPLE), "azure-conversation.csv");
    } catch (error) {
      this.onProblem(error);
    }
  }

  /** Another text: what was said of the last one and repaired there is forgotten. */
  put(text, name) {
    if (this.chosen.length) this.columns.value = "";
    this.chosen = [];
    this.skip.checked = false;
    fill(this.repair);
    this.onForget?.();
    super.put(text, name);
  }

  /** Throws an error that names the field, if the log is missing or a column is not chosen. */
  requireLog() {
    const [, label, missing] = this.chosen.find(([, , { value }]) => !value) ?? [];
    if (missing) throw { field: missing, message: `${label}: no column is chosen`, next: "choose one" };
    if (this.area.value.trim()) return;
    throw { field: this.area, ...(this.refused ? { message: `The file was refused: ${this.refused.message}`, next: this.refused.next } : { message: "There is no log yet", next: "drop a file, paste text, or load the example" }) };
  }

  /** Offer to choose the columns, as guessed from their names; the choices fill in Columns of the log. false where there are no names. */
  chooseColumns() {
    const [header = ""] = this.area.value.trimStart().split("\n", 1), names = namesIn(header).filter((name) => name && !/[,=]/.test(name));
    if (names.length < 3) return false;
    this.chosen = LOOKS.map(([quantity, label, looks]) => {
      const guess = looks.map((look) => names.find((name) => look.test(name))).find(Boolean);
      return [quantity, label, select([["", "choose"], ...names.map((name) => [name, name])], guess ?? "", () => write())];
    });
    const write = () => { this.columns.value = this.chosen.filter(([, , { value }]) => value).map(([quantity, , { value }]) => `${quantity}=${value}`).join(","); };
    write();
    fill(this.repair, el("div", { class: "controls small" }, ...this.chosen.map(([, label, choice]) => field(label, choice))));
    return true;
  }

  /** Offer to leave out the `bad` rows that cannot be read. */
  chooseRows(bad) {
    this.bad = bad;
    this.skip.checked = false;
    fill(this.repair, el("label", { class: "chip plain" }, this.skip, bad > 1 ? `Leave out the ${bad} rows that cannot be read` : "Leave out the row that cannot be read"));
  }

  /** The log as requests have it: its text, a name whose ending tells CSV from JSON, and how to read it. */
  get body() {
    const given = ({ value }) => value.trim() || undefined;
    return { log: this.area.value, name: /\.(csv|json|jsonl)$/i.test(this.name) ? this.name : `${this.name}.csv`, columns: given(this.columns), filter: given(this.filter), skip_bad: this.skip.checked ? this.bad : undefined };
  }
}

/** Names of columns in the first line of a table, or paths of fields in a record. */
function namesIn(header) {
  if (!/^[{[]/.test(header)) {
    const separator = [",", ";", "\t", "|"].reduce((best, each) => (header.split(each).length > header.split(best).length ? each : best));
    return header.split(separator).map((name) => name.trim().replace(/^"(.*)"$/, "$1"));
  }
  const paths = (record, before) => Object.entries(record).flatMap(([name, value]) => (value instanceof Object && !Array.isArray(value) ? paths(value, `${before}${name}.`) : [before + name]));
  try {
    return paths(JSON.parse(header), "");
  } catch {
    return [];
  }
}

// What names of columns look like, the surest first.
const LOOKS = [
  ["arrival", "Arrival time", [/arriv|start|time|date|when/i, /^ts|created|received/i]],
  ["prompt", "Prompt tokens", [/prompt|input|context/i, /in.?tok|tok.*in|^in|tok.?i/i]],
  ["output", "Output tokens", [/output|completion|generated|response/i, /out.?tok|tok.*out|^out|^gen|tok.?o/i]],
];

const IN_THE_FORM = [
  ["n_gpus", "GPUs"], ["prefill_disagg", "separate prefill"], ["replicas_min 2", "Replicas, at least: 2"], ["quant FP16,BF16", "Precisions: 16 bit only"], ["Leave out drafts to exclude them", "Draft tokens: none excludes them"],
  [": try router round-robin or least-loaded", ""], ["meets with 90%", "90% certain"], [" (failed skip leaves them out)", ""], [" (drop_duplicates keeps the first of each)", ""],
  ["the unit: columns ", "the unit under Columns of the log: "], [" or columns arrival=", " or arrival="], ["with filter ", "under Only rows with: "],
  ["columns=", "Columns of the log: "], ["them with columns ", "them under Columns of the log: "], ["it with columns ", "it under Columns of the log: "], ["filter=", "Only rows with: "], ["from_s, to_s", "From second, To second"],
];

/** A text of the server with the labels of the form in place of fields and options. */
export const inTheForm = (text) => IN_THE_FORM.reduce((told, [name, label]) => told.replaceAll(name, label), text);

// What to change in the form where a message says so of the log; nothing where the message has told it.
const REMEDIES = [
  [/; [\d,]+ rows? cannot be read/, "leave out such rows, or correct the file"], [/: no column '/, "name another one under Columns of the log"], [/: holds no requests with /, "change Only rows with"],
  [/: no request (between|from) /, "change From second or To second"], [/Columns of the log|Only rows with|From second/, ""],
];

/** An error of a form, or of the API in the form's words; `box` has the log that it is about. */
function refusal({ message, code = "", next = "" }, box) {
  const told = inTheForm(message), remedy = REMEDIES.find(([said]) => said.test(told))?.[1] ?? (code.startsWith("invalid_") ? "" : undefined);
  return { message: told.replaceAll(box.body.name, box.called).replace(/(not allowed: )\w+ must/, "$1it must").replace(/, and skip_bad allows .*/, ""), next: (remedy ?? next).replace("the file", box.called === box.name ? "the file" : "the text") };
}

/**
 * A form's alert, to stand under the button that sends the form: `show` puts an error there, in view, and marks the field at fault.
 * Where the log is at fault and the page can repair how it is read, the fields for that come next, then a button that starts again.
 */
export class Alert {
  constructor(box, button) {
    Object.assign(this, { box, button, said: el("div"), after: el("div") });
    this.node = el("div", { class: "trouble" }, this.said, box.repair, this.after);
    box.onForget = () => this.clear(box.node);
  }

  show(error, ...nodes) {
    const told = refusal(error, this.box), [, bad] = error.message.match(/; ([\d,]+) rows? cannot be read/) ?? [];
    const again = el("button", { type: "button", class: "main", text: "Start again", on: { click: () => this.button.click() } });
    if (/no column (with a usual name|')|no row can be read/.test(error.message) && this.box.chooseColumns()) {
      fill(this.said, problem({ message: "Which column is which? Check the guesses, then start again" }));
      fill(this.after, again, folded("What is wrong", el("p", { text: told.message })));
    } else {
      if (bad) this.box.chooseRows(Number(bad.replaceAll(",", "")));
      fill(this.said, problem(told));
      fill(this.after, ...nodes, bad ? again : null);
    }
    error.field?.setAttribute("aria-invalid", "true");
    error.field?.addEventListener("input", () => error.field.removeAttribute("aria-invalid"), { once: true });
    error.field?.focus({ preventScroll: true });
    this.node.scrollIntoView({ block: "nearest" });
  }

  /** Say that the work was cancelled, beside the form. */
  cancelled(text) {
    fill(this.said, el("p", { class: "cancelled", text }));
    this.node.scrollIntoView({ block: "nearest" });
    this.button.scrollIntoView({ block: "nearest" });
    announce(text);
  }

  /** Forget the last error, of a form within `form`. */
  clear(form) {
    fill(this.said);
    fill(this.after);
    for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  }
}

/**
 * The answer to a long request: `out` says what the server is doing and for how long, and has a button that cancels it. undefined if
 * the visitor cancels; the server then stops the work, `out` shows again what it showed before, and `alert` tells it.
 */
export async function waitFor(alert, out, doing, path, body) {
  const hangUp = new AbortController(), began = performance.now();
  const elapsed = () => `${Math.floor((performance.now() - began) / 1000)} s`;
  const before = [...out.childNodes];
  const clock = el("span", { role: "timer", "aria-live": "off", text: "0 s" });
  const ticking = setInterval(() => { clock.textContent = elapsed(); }, 250);
  const cancelled = new Promise((resolve) => hangUp.signal.addEventListener("abort", () => resolve()));
  fill(out, el("p", { text: doing }), el("div", { class: "buttons" }, el("progress"), clock, el("button", { type: "button", text: "Cancel", on: { click: () => hangUp.abort() } })));
  out.scrollIntoView({ block: "nearest" });
  announce(doing);
  const answer = post(path, body, "serving", hangUp.signal);
  answer.catch(() => {}); // nobody waits for it once it is cancelled
  try {
    return await Promise.race([answer, cancelled]);
  } finally {
    clearInterval(ticking);
    if (hangUp.signal.aborted) {
      fill(out, ...before);
      alert.cancelled(`Cancelled after ${elapsed()}.${before.some((node) => node.matches(".verdict")) ? " The result shown is the one from before." : ""}`);
    }
  }
}

/** A line that says how many rows of the log were left out and why; null if all of them count. */
export function leftOut({ skipped }) {
  const told = Object.entries(skipped).map(([why, n]) => `${n} (${why})`);
  return told.length ? el("p", { text: `Rows of the log that were left out: ${told.join(", ")}.` }) : null;
}

/** A part of a result that is folded up. */
export const folded = (title, ...nodes) => el("details", { class: "fold" }, el("summary", { text: title }), ...nodes);

/** A card in words: "H100 SXM" for `h100_sxm`. */
export const cardName = (card) => card.replace(/[-_]/g, " ").toUpperCase().replace("SERVER", "Server").replace(/(\d)GB$/, "$1 GB");

/** A table of the catalogue in words. */
export const tableName = ({ card, cards_per_replica: each }) => `${cardName(card)}${each > 1 ? `, ${each} GPUs per replica` : ""}`;

const NAMED = ["heuristic", "hill_climb", "hpa", "planner", "ppo", "best_adaptive"]; // policies in sentences

/** A function for texts of the server: it puts the page's names in the place of tables, cards and policies. */
export function namer(catalogue) {
  const tables = Object.entries(catalogue);
  const names = new Map([...tables.flatMap(([, { card }]) => [card, card.replaceAll("_", "-").replace(/-(sxm|server)$/, "")].map((name) => [name, cardName(card)])), ...tables.map(([name, table]) => [name, tableName(table)]), ...NAMED.map((name) => [name, player({ name }).called]), ["best_constant", "the best constant"]]);
  const known = new RegExp(`(?<![\\w-])(${[...names.keys()].sort((a, b) => b.length - a.length).join("|")})(?![\\w-])`, "g");
  return (text) => text.replace(known, (name) => names.get(name));
}

/** A setting in words. */
export const setting = ({ batch_size: batch, kv_budget: kv, spec_length: drafts, prefill_disagg: apart }, precision) =>
  `${precision}, batch ${batch}, KV ${Number(kv.toFixed(2))}${drafts ? `, ${drafts} drafts` : ""}${apart ? ", separate prefill" : ""}`;

/** Settings for an engine to copy or download, to be folded up. `textOf(engine)` is shown, its comments as `tell` words them; `choices` are further controls, whose changes `show` follows. */
export class EngineSettings {
  constructor({ title, label, engineLabel, downloadLabel, textOf, tell, choices = [], report: { text, name, data } }) {
    this.textOf = (engine) => textOf(engine).replaceAll("THIS-FILE", `${engine}.yaml`).replace(/^#.*$/gm, tell);
    this.code = el("code");
    this.engine = select(ENGINES, "vllm", () => this.show());
    const copyButton = el("button", { type: "button", text: "Copy" });
    copyButton.addEventListener("click", () => copy(this.code.textContent, copyButton));
    this.node = folded(title,
      el("div", { class: "controls" }, ...choices, field(engineLabel, this.engine), copyButton,
        el("button", { type: "button", text: downloadLabel, on: { click: () => download(`${this.engine.value}.yaml`, this.code.textContent, "text/yaml") } }),
        el("button", { type: "button", text, on: { click: () => download(name, JSON.stringify(data)) } })),
      el("pre", { tabindex: "0", role: "region", "aria-label": label }, this.code));
    this.show();
  }

  show() {
    this.code.textContent = this.textOf(this.engine.value);
  }
}
