/** What the seconds of a run of agent sessions show, from its columns; and timetables: a cap for the first second, then `[second, cap]` of each change. */

import { mean, percent, score as shownScore, sum } from "./format.js";

export const FULL = 1; // share of the KV cache: above it, conversations evict each other
const ROOM = 0.5; // share of the KV cache: below it, much of it is idle
const WINDOW_S = 30; // of the hit rate
const TOLD = 0.1; // of the seconds of a run
const ASIDE = 1.1; // times the tokens of another run: less is not told

/** Prompt tokens found in the prefix cache as a share of those looked up; 0 where none were. */
export const hitRate = (columns) => sum(columns.prefix_hit_tokens) / Math.max(1, sum(columns.prefix_queried_tokens));

/** Prompt tokens computed for each token written. */
const computedPerToken = (columns) => sum(columns.computed_tokens) / Math.max(1, sum(columns.generated_tokens));

/** Curves of a run, a value for each second. */
export function curves(columns) {
  const [hit, queried] = ["prefix_hit_tokens", "prefix_queried_tokens"].map((name) => totals(columns[name]));
  const lately = (total, i) => total[i] - (total[i - WINDOW_S] ?? 0);
  return {
    pool: columns.context_share,
    flight: columns.sessions_in_flight,
    finished: columns.sessions_finished,
    users: columns.turns_judged.map((judged, i) => (judged + columns.turns_overdue[i] ? columns.turns_within[i] / (judged + columns.turns_overdue[i]) : 1)),
    hit: hit.map((_, i) => (lately(queried, i) > 0 ? lately(hit, i) / lately(queried, i) : null)),
  };
}

function totals(column) {
  let total = 0;
  return column.map((value) => (total += value));
}

/** Why a run scores less than another, or what it shows, in a sentence. */
export function why(run, other) {
  const { context_share: shares, sessions_waiting: waiting } = run.columns, seconds = shares.length, full = shares.filter((share) => share > FULL).length;
  const idle = shares.filter((share, i) => share < ROOM && waiting[i] > 0).length, times = computedPerToken(run.columns) / computedPerToken(other.columns);
  const again = times > ASIDE ? `, so you computed ${times.toFixed(1)} times as many prompt tokens as ${other.called}` : "";
  if (full > TOLD * seconds && full >= idle) return `For ${full} of ${seconds} seconds, from second ${shares.findIndex((share) => share > FULL) + 1} on, the conversations did not fit into the KV cache${again}.`;
  if (idle > TOLD * seconds) return `For ${idle} of ${seconds} seconds more than half of the KV cache was empty while sessions waited.`;
  const { speed, within_objective: within } = run.breakdown, theirs = other.breakdown;
  if (within !== undefined) return `Agents' speed: ${shownScore(speed)}, ${other.called} ${shownScore(theirs.speed)}. Users answered in time: ${percent(within)}, ${other.called} ${percent(theirs.within_objective)}.`;
  return `The conversations fitted nearly all the time. You took ${seconds} seconds, ${other.called} ${other.columns.time_s.length}.`;
}

/** For each second, 1 where the conversations did not fit. */
export const misfits = ({ context_share: shares }) => shares.map((share) => Number(share > FULL));

/** The timetable of caps, one for each second. */
export const timetable = (caps) => caps.flatMap((cap, i) => (cap === caps[i - 1] ? [] : [[i, cap]]));

/** Caps for the seconds from the beginning of a timetable until an episode of `length` seconds ends. */
export const capsOf = (table, length) => table.flatMap(([second, cap], i) => Array(Math.max(0, (table[i + 1]?.[0] ?? length) - second)).fill(cap));

/** A timetable as a short text. */
export const packed = (table) => table.map((change) => change.join(".")).join("_");

/** The timetable of a text of `packed`; null if it is malformed. Older links begin with the number of seconds. */
export function unpacked(text) {
  if (!/^(\d{1,4}_)?0\.\d{1,4}(_\d{1,4}\.\d{1,4})*$/.test(text)) return null;
  return text.split("_").filter((change) => change.includes(".")).map((change) => change.split(".").map(Number));
}

/** A timetable of two caps after a run: the sessions that it has in flight in the first quarter of the time that is left after `from`, and later. */
export function outline({ sessions_in_flight: flying }, from) {
  const then = from + Math.max(1, Math.round((flying.length - from) / 4)), about = (part) => Math.max(1, Math.round(mean(part.length ? part : flying)));
  return [[from, about(flying.slice(from, then))], [then, about(flying.slice(then))]];
}

/** Timetables near one of two caps: either cap or both `times` as high or as low, or the change between them `by` seconds sooner or later. */
export function near([[from, early], [then, late]], times, by, most) {
  const up = (cap) => Math.min(most, Math.max(cap + 1, Math.round(cap * times))), down = (cap) => Math.max(1, Math.min(cap - 1, Math.round(cap / times)));
  return [[up(early), then, up(late)], [down(early), then, down(late)], [up(early), then, late], [down(early), then, late], [early, then, up(late)], [early, then, down(late)], [early, then + by, late], [early, Math.max(from + 1, then - by), late]]
    .map(([first, second, next]) => [[from, first], [second, next]]);
}

/** What to do with a cap to follow a timetable of two caps, such as "Raise the cap to 26, then set it to 14 at second 146". */
export function advised(cap, [[, early], [then, late]]) {
  const move = (from, to) => `${to < from ? "Lower" : "Raise"} the cap to ${to}`;
  if (cap === early) return `${move(cap, late)} at second ${then}`;
  return `${move(cap, early)}${late === early ? "" : `, then set it to ${late} at second ${then}`}`;
}
