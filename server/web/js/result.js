/** The result of a race: the verdict, why, what to try next, and the message to a friend. */

import * as address from "./address.js";
import { GAIN } from "./coach.js";
import { challenge, download, el, fill } from "./dom.js";
import { percent, score as shownScore, squares } from "./format.js";
import { handed } from "./kept.js";
import { titleOf } from "./knobs.js";
import { SEEKING, SHARED, YOU } from "./players.js";
import { logOf } from "./runs.js";
import { LEAST, mostLost, overloads, placeOf, scoreBoard, verdictOn } from "./score.js";

const WORTH_TELLING_S = 5; // an overload

/** Show the visitor's `grade` in `race`; `link` are the parameters of an address with the visitor's run. Returns the verdict. */
export function showResult(race, grade, link) {
  const { score, won, level, verdict } = verdictOn(grade.score, race.target.episode.score, race.target.called);
  const places = [{ ...YOU, ...grade }, ...race.rivals.map((rival) => ({ ...rival, ...rival.episode }))].sort((a, b) => b.score - a.score);
  const advice = el("p", { text: SEEKING });
  race.result.className = `result ${won || placeOf(grade, places) === 1 ? "won" : level ? "level" : ""}`;
  fill(race.result, el("h2", {}, el("strong", { text: score }), " ", el("span", { text: verdict })), el("p", { text: `${standing(grade, places)} ${why(race, grade)}` }), advice);
  const next = places.findLast((rival) => Number(shownScore(rival.score)) > Number(score) && rival.key !== SHARED.key);
  const onward = !next ? race.elsewhere("main") : won || (level && !race.isUntouched) ? el("button", { type: "button", class: "main", text: `Next: beat ${next.label}, ${shownScore(next.score)}`, on: { click: () => race.raceAgainst(next.key) } }) : null;
  advise(race, grade, advice, onward ? "link" : "main").catch(() => fill(advice)); // what cannot be checked is not advised
  const dared = !race.stays(race.mine) && Number(score) > Number(shownScore(race.idle)); // a friend who moves nothing may not be level
  fill(race.onward, onward, ...(dared ? sharing(race, score, link) : []));
  const log = JSON.stringify({ task_id: race.task.id, seed: race.seed, episode_log: logOf(race.mine) });
  fill(race.places, scoreBoard(places), el("div", { class: "buttons" },
    el("button", { type: "button", text: "Download the log", on: { click: () => download(`inferencegym-task-${race.task.id}-seed-${race.seed}.json`, log) } }),
    el("button", { type: "button", text: "Verify it", on: { click: () => verify(log) } })));
  return verdict;
}

/** The place among all, who is next, and who is best. */
function standing(grade, places) {
  const place = placeOf(grade, places), named = ({ label, score }) => `${label} (${shownScore(score)})`, [leader] = places, rival = places[place - 2];
  const alone = places.filter((each) => placeOf(each, places) === 1).length === 1 ? ", ahead of everybody" : "";
  const behind = !rival ? alone : rival === leader ? `, behind ${named(leader)}` : `, behind ${named(rival)}; the best is ${named(leader)}`;
  return `Place ${place} of ${places.length}${behind}${grade.score < LEAST && grade.breakdown.slo < 0 ? ": late requests cost more than everything else earned, as the table below shows" : ""}.`;
}

/** Why the score is not higher, in a sentence: that nobody has to adapt, the worst overload, or on what else most was lost. */
function why(race, grade) {
  if (race.isConstant && grade.score <= race.best.episode.score) return race.constantly();
  const { mine, best, task, length } = race, lost = grade.score < best.episode.score && mostLost({ ...mine, ...grade }, best, task);
  const [worst] = overloads(mine, task, length).filter(({ from, to }) => to - from >= WORTH_TELLING_S).sort((a, b) => b.cost - a.cost || b.to - b.from - (a.to - a.from));
  if (worst && (!lost || lost.part === "slo" || worst.cost >= lost.by)) return `From second ${worst.from + 1} to ${worst.to}, ${percent(worst.late)} of the requests were late${worst.cost >= LEAST ? ` (score −${worst.cost.toFixed(2)})` : ""}.`;
  return lost ? lost.text : "";
}

/** What to do before the first overload: by when the best policy had asked for more replicas than the visitor; "" if it had not. */
function sooner({ task, best: { called, episode: { action: { replicas } } }, mine, length }) {
  const [overload] = task.max_replicas ? overloads(mine, task, length) : [], count = replicas?.[overload?.from];
  if (!(count > mine.action.replicas[overload?.from])) return "";
  let second = overload.from;
  while (replicas[second - 1] >= count) second--;
  return `Do first: ask for ${count} replicas by second ${second + 1}, as ${called} did; you had ${mine.action.replicas[second]}. `;
}

/** What to do in the next race: the setting that gains most from the first second on, with a button of this `rank` that plays it; else what the best policy does. */
async function advise(race, { score }, box, rank) {
  const { best: { called, episode }, lanesOf, board } = race, found = await race.coach.fromStart(score), settings = (name) => new Set(episode.action[name]).size;
  if (!box.isConnected) return; // another race has begun
  race.advised = found;
  fill(box);
  if (found) {
    fill(box, sooner(race), el("strong", { text: "Next time, from the start: " }), `${found.text}${found.name ? ", the others as now" : ""} (score ${shownScore(found.score)}). `,
      el("button", { type: "button", class: rank, text: "Try this", on: { click: () => race.tryAgain(found.setting) } }));
    return;
  }
  const moved = lanesOf.reduce((a, b) => (settings(a) >= settings(b) ? a : b));
  if (race.isConstant || episode.score <= score + GAIN || settings(moved) === 1) return;
  fill(box, sooner(race) || `To score more, move ${titleOf(moved)} during the race as ${called} does (${shownScore(episode.score)}). `,
    el("button", { type: "button", class: "link", text: "See its decisions", on: { click: () => board.decisions.scrollIntoView() } }));
}

/** The button that copies the message to a friend, and the message. */
function sharing(race, score, link) {
  const url = new URL(address.link("race", link), location.href).href, { called, episode } = race.target, late = race.mine.observation.slo_violation_rate.slice(1);
  return challenge(`I scored ${score} at running a fleet of LLM servers; ${race.shared ? "my challenger" : called}: ${shownScore(episode.score)}.\n${squares(late)}\n(🟩 in time, 🟥 late)\nBeat me on the same traffic: ${url}`);
}

/** Pass a log to the Verify tab. */
function verify(log) {
  handed.text = log;
  location.hash = "verify?log=handed";
}
