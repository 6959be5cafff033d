/** Table of scores and their parts, with bars. */

import { el, scrolling } from "./dom.js";
import { changes, compact, mean, percent, score, sum, words } from "./format.js";

export const LEAST = 0.0005; // in score: less is shown as 0
export const LATE = 0.2; // of the requests: more is an overload
const TREND_S = 5; // so long an overload may stop and still be the same
const LOSS = 0.005; // in score: a smaller loss is not told

// What the parts of a score measure; all go up to 1.
const PARTS = {
  throughput: "tokens written per second",
  slo: "how few requests were late, each counted in every second of its delay",
  cost: "how much of the budget for GPU time per token is left",
  stability: "how little Batch size and KV cache were moved",
  ttft: "how soon first tokens came",
  memory: "whether the peak stayed below the memory limit",
  gpus: "how few replicas were paid",
  churn: "how seldom replicas were added or removed",
};
const BELOW = ["autoscaling", "objectives_memory"]; // grades whose part for violations goes below 0
const partsOf = (breakdown) => Object.keys(breakdown).filter((part) => part in PARTS);

/** What a score with these parts rewards, in a few words. */
export const rewarded = (breakdown) => partsOf(breakdown).map(words).join(", ");

/** The parts of a score in words, with their weights where they differ. */
export const explained = (breakdown, { weights = [], kind }) => partsOf(breakdown).map((part, i) => `${weights[i] ? `${percent(weights[i])} ` : ""}${words(part)}: ${PARTS[part]}${part === "slo" && BELOW.includes(kind) ? ", down to −1 if many were late" : ""}`).join("; ");

// What costs a part of a score.
const LOST = { throughput: "speed", slo: "late requests", cost: "cost", stability: "moves of Batch size and KV cache", ttft: "slow first tokens", memory: "memory", gpus: "replicas", churn: "changes of replicas" };

// What was seen of a run for each part, in words.
const SEEN = {
  throughput: ({ metrics }) => `${compact(mean(metrics.tokens_per_sec))} tokens/s`,
  slo: ({ metrics }) => `${compact(Math.round(sum(metrics.slo_violations)))} violations`,
  cost: ({ observation }, { cost_budget: budget }) => `${percent(observation.cost_so_far.at(-1) / budget)} of the budget spent`,
  stability: ({ action }) => `${changes(action.batch_size) + changes(action.kv_budget)} moves of Batch size and KV cache`,
  ttft: ({ metrics }) => `a mean of ${compact(mean(metrics.ttft_p50_ms))} ms`,
  memory: ({ metrics }, { memory_hard_limit_gb: limit }) => `a peak of ${Math.max(...metrics.gpu_memory_gb).toFixed(1)} GB (limit: ${limit} GB)`,
  gpus: ({ action }) => `${compact(mean(action.replicas))} replicas on average`,
  churn: ({ action }) => `${compact(sum(action.replicas.slice(1).map((count, i) => Math.abs(count - action.replicas[i]))))} replicas added or removed`,
};

/** The weight of each part of a score, by name. */
function weightsOf(breakdown, { weights }) {
  const parts = partsOf(breakdown);
  return Object.fromEntries(parts.map((part, i) => [part, weights?.[i] ?? 1 / parts.length]));
}

/** The part on which a run lost most to a better one, as `part`, `by` how much and, in words, `text`; undefined if it lost on none. */
export function mostLost(mine, { called, episode: theirs }, task) {
  const weights = weightsOf(mine.breakdown, task.grade), by = (part) => weights[part] * (theirs.breakdown[part] - mine.breakdown[part]);
  const part = Object.keys(weights).reduce((a, b) => (by(a) >= by(b) ? a : b));
  if (by(part) < LOSS) return undefined;
  return { part, by: by(part), text: `Most was lost on ${LOST[part]} (${by(part).toFixed(2)}): ${SEEN[part](mine, task)}; ${called}: ${SEEN[part](theirs, task)}.` };
}

/**
 * What a number of violations costs of the score of an episode of `length` seconds, as a function, from the parts of the score
 * after each second: 0 where the score does not count violations.
 */
function costOf(violations, parts, { grade }, length) {
  let count = 0;
  for (const [i, breakdown] of parts.entries()) {
    count += violations[i];
    if (!(breakdown.slo > 0 && breakdown.slo < 1)) continue; // at its ends the part does not say what one more costs
    const weight = weightsOf(breakdown, grade).slo, each = weight * (1 - breakdown.slo) * (i + 1) / count / length;
    return (number) => Math.min(each * number, BELOW.includes(grade.kind) ? 2 * weight : weight);
  }
  return () => 0;
}

/** Stretches in which many requests were late: seconds `from` + 1 to `to`, the share that was `late`, and their `cost` in score. */
export function overloads({ parts, metrics: { slo_violations: violations }, observation }, task, length) {
  const late = observation.slo_violation_rate.slice(1), costs = costOf(violations, parts, task, length), found = [];
  late.forEach((share, i) => {
    if (share <= LATE) return;
    if (i - found.at(-1)?.to < TREND_S) found.at(-1).to = i + 1;
    else found.push({ from: i, to: i + 1 });
  });
  return found.map(({ from, to }) => ({ from, to, late: mean(late.slice(from, to)), cost: costs(sum(violations.slice(from, to))) }));
}

/** Rank of a row, 1 for the best; scores that are shown as equal share their rank. */
export function placeOf(row, rows) {
  return 1 + rows.filter((other) => Number(score(other.score)) > Number(score(row.score))).length;
}

/** Rows of `{key, label, colour, score, breakdown}`, best first. */
export function scoreBoard(rows) {
  const parts = Object.keys(rows[0].breakdown);
  const alone = rows.length === 1;
  // Parts that are not shares of one, such as a latency, are shown as numbers without a bar.
  const shares = new Set(parts.filter((part) => part !== "crashed" && rows.every(({ breakdown }) => breakdown[part] <= 1)));
  const head = [...(alone ? [] : ["Place"]), "Policy", "Score", ...parts.map(words)];
  const body = rows.map((row) => el("tr", { class: row.key === "you" ? "you" : "" },
    alone ? null : el("td", { text: String(placeOf(row, rows)) }),
    el("th", { scope: "row" }, el("span", { class: `chip ink-${row.colour}`, title: row.title, text: row.label }), row.about && el("small", { text: row.about })),
    barCell(row.score, row.colour, true),
    ...parts.map((part) => {
      const value = row.breakdown[part];
      if (shares.has(part)) return barCell(value, row.colour);
      return el("td", { text: part === "crashed" ? (value ? "yes" : "no") : compact(value) });
    })));
  return scrolling("Scores", el("table", { class: "scores" },
    el("caption", { class: "unseen", text: "Scores and their parts" }),
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...body)));
}

function barCell(value, colour, strong = false) {
  const share = Math.max(0, Math.min(1, value));
  const bar = el("meter", { min: 0, max: 1, value: share, class: `ink-${colour}`, "aria-hidden": "true" });
  return el("td", { class: strong ? "strong" : "" }, el("span", { text: score(value) }), bar);
}

/** A row of a duel: a name, a bar and a value, of which the last two follow the score. */
export function duelRow({ label, colour }) {
  const bar = el("meter", { min: 0, max: 1, value: 0, class: `ink-${colour}`, "aria-hidden": "true" }), value = el("span", { class: "value", text: "–" });
  return { bar, value, nodes: [el("span", { class: `chip ink-${colour}`, text: label }), bar, value] };
}

/** How a score compares with that of the player `called` so, with the digits that are shown. */
export function verdictOn(mine, theirs, called) {
  const [shown, toBeat] = [score(mine), score(theirs)], level = shown === toBeat, won = Number(shown) > Number(toBeat);
  return { score: shown, toBeat, level, won, verdict: level ? `Level with ${called}.` : won ? `You beat ${called}: ${toBeat}.` : `Not yet: ${called} has ${toBeat}.` };
}
