/** What the seconds of a run of agent sessions show, from its columns; and caps as the text of a link. */

import { mean, percent, score as shownScore, sum } from "./format.js";

export const FULL = 1; // share of the KV cache: above it, conversations evict each other
export const ROOM = 0.5; // share of the KV cache: below it, much of it is idle
const WINDOW_S = 30; // of the hit rate
const TOLD = 0.1; // of the seconds of a run
const ASIDE = 1.1; // times the tokens of another run: less is not told

/** Prompt tokens found in the prefix cache as a share of those looked up; 0 where none were. */
export const hitRate = (columns) => sum(columns.prefix_hit_tokens) / Math.max(1, sum(columns.prefix_queried_tokens));

/** Prompt tokens computed for each token written. */
export const computedPerToken = (columns) => sum(columns.computed_tokens) / Math.max(1, sum(columns.generated_tokens));

/** Curves of a run, a value for each second. Of the prompt tokens, those beyond `least` for each token written were computed twice. */
export function curves(columns, least, hasUsers) {
  const [hit, queried, computed, written] = ["prefix_hit_tokens", "prefix_queried_tokens", "computed_tokens", "generated_tokens"].map((name) => totals(columns[name]));
  const lately = (total, i) => total[i] - (total[i - WINDOW_S] ?? 0);
  return {
    score: scoresSoFar(columns, hasUsers),
    pool: columns.context_share,
    flight: columns.sessions_in_flight,
    finished: columns.sessions_finished,
    hit: hit.map((_, i) => (lately(queried, i) > 0 ? lately(hit, i) / lately(queried, i) : null)),
    twice: computed.map((total, i) => Math.max(0, total - least * written[i])),
  };
}

/** The score if a run had ended, for each second: tokens written, as a share of what the engine with an unlimited KV cache writes in that time; with users, the mean of this and of their turns in time. */
function scoresSoFar({ elapsed_s: elapsed, batch_tokens: written, ideal_tokens_per_s: ideal, turns_within: within, turns_judged: judged, turns_overdue: overdue }, hasUsers) {
  return elapsed.map((seconds, i) => {
    const speed = Math.min(1, written[i] / (ideal[i] * seconds)), turns = judged[i] + overdue[i];
    return hasUsers ? mean([speed, turns > 0 ? within[i] / turns : 1]) : speed;
  });
}

function totals(column) {
  let total = 0;
  return column.map((value) => (total += value));
}

/** Sessions that fill the KV cache at the present length of the conversations; undefined if there are none. */
export function fitting({ context_share: shares, sessions_in_flight: flying, interactive_in_flight: users }, i = shares.length - 1) {
  const inFlight = flying[i] + users[i];
  return shares[i] > 0 ? Math.max(1, Math.floor(inFlight / shares[i] - users[i])) : undefined;
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

/** Caps, one for each second, as a short text: `second.cap` of each change. */
export const packCaps = (caps) => caps.flatMap((cap, i) => (cap === caps[i - 1] ? [] : [`${i}.${cap}`])).join("_");

/** Caps of a text of `packCaps` up to the last change, which stays; null if the text is malformed. Older links begin with the number of seconds. */
export function unpackCaps(text) {
  if (!/^(\d{1,4}_)?0\.\d{1,4}(_\d{1,4}\.\d{1,4})*$/.test(text)) return null;
  const moves = text.split("_").filter((move) => move.includes(".")).map((move) => move.split(".").map(Number)), at = new Map(moves);
  const caps = [];
  for (let second = 0; second <= moves.at(-1)[0]; second++) caps.push(at.get(second) ?? caps.at(-1));
  return caps;
}
