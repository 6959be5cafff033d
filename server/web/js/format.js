/** Formatting of numbers and names as text. */

export function compact(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1_000_000) return `${Number((value / 1_000_000).toFixed(1))}M`;
  if (size >= 10_000) return `${Number((value / 1000).toFixed(size >= 100_000 ? 0 : 1))}k`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return String(Number(value.toPrecision(digits)));
}

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;

export const score = (value) => value.toFixed(3);

export const sum = (values) => values.reduce((total, value) => total + value, 0);

export const mean = (values) => (values.length ? sum(values) / values.length : 0);

/** How a run went, in ten squares: red where more than a fifth of the `missed` is 1. */
export function squares(missed) {
  const step = missed.length / 10;
  return Array.from({ length: 10 }, (_, i) => mean(missed.slice(Math.round(i * step), Math.round((i + 1) * step)))).map((share) => (share <= 0.2 ? "🟩" : "🟥")).join("");
}

/** How often a value differs from the one before it. */
export const changes = (values) => values.filter((value, i) => i > 0 && value !== values[i - 1]).length;

// The parts of a score: what each rewards.
const PARTS = { throughput: "fast", slo: "in time", ttft: "quick to begin", cost: "cheap", stability: "steady", memory: "within memory", gpus: "few replicas", churn: "few changes" };

/** A field name as words: `mean_ttft_ms` becomes `mean ttft ms`, and a part of a score what it rewards. */
export const words = (name) => PARTS[name] ?? name.replaceAll("_", " ");

/** A number of things, such as "2 replicas". */
export const counted = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;
