/** Table of scores and their parts, with bars. */

import { el, scrolling } from "./dom.js";
import { compact, percent, score, words } from "./format.js";

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
/** The parts of a score in words, with their weights where they differ. */
export const explained = (breakdown, { weights = [], kind }) => Object.keys(breakdown).filter((part) => part in PARTS).map((part, i) => `${weights[i] ? `${percent(weights[i])} ` : ""}${words(part)}: ${PARTS[part]}${part === "slo" && BELOW.includes(kind) ? ", down to −1 if many were late" : ""}`).join("; ");

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
  const head = [...(alone ? [] : ["Place"]), "Player", "Score", ...parts.map(words)];
  const body = rows.map((row) => el("tr", { class: row.key === "you" ? "you" : "" },
    alone ? null : el("td", { text: String(placeOf(row, rows)) }),
    el("th", { scope: "row" }, el("span", { class: `chip ink-${row.colour}`, text: row.label })),
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
