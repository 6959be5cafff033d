/** Hints during a race and advice after it: which slider to move, as the server plays this very episode with it. */

import * as address from "./address.js";
import { post } from "./api.js";
import { el, fill } from "./dom.js";
import { compact, counted, percent, score as shownScore } from "./format.js";
import { hints, titleOf } from "./knobs.js";
import { FOLLOWED } from "./players.js";
import { first, inRuns, rows } from "./runs.js";
import { LATE, LEAST, overloads } from "./score.js";
import { bare } from "./strip.js";

export const GAIN = 0.02; // in score: advice that gains less is not given
const SCALING_GAIN = 0.001; // the same for hints in tasks that scale, of which many add up
const TOLD = 0.005; // in score: the cost of an overload
const NOTICE_S = 15; // before a surge, hints prepare for it
const RELIEVED_S = 3; // after an overload, its warning goes
const HINTS = 20; // times in a race that the server is asked which slider to move
const REACTION_S = 1; // a visitor takes so long to move a slider, at the chosen speed: a hint gains after it too
const HINTED = 5; // times the clock at most meanwhile, so that there is time to read a hint
const BATCH_SECONDS = 4096; // of all episodes of a batch, in a request

export class Coach {
  /** `race` is read whenever something is said; `skip` plays the rest at once. */
  constructor(race, skip) {
    this.race = race;
    this.state = el("p", { class: "state" });
    this.advice = el("p", { class: "advice" });
    this.skipLink = el("button", { type: "button", class: "link", text: "Skip to the end", on: { click: skip } });
    this.node = el("div", { class: "coach" }, this.state, this.advice);
    this.taught = false; // whether the visitor has moved a slider, or was shown how
    this.begin();
  }

  /** A race begins. */
  begin() {
    this.hinted = this.later = null;
    this.lost = this.settled = this.lesson = false;
    this.said = null;
  }

  /** The visitor has moved a slider. */
  moved() {
    this.taught = true;
    this.settled = false;
    if (!this.follows()) this.hinted = null; // a hint that was followed to its end goes
  }

  /** Say in a line what happens now, and in another which slider to move. */
  tell() {
    const { mine, task, target, knobs, length } = this.race, played = mine.reward.length;
    const overload = overloads(mine, task, length).at(-1), on = played - overload?.to < RELIEVED_S;
    const tip = this.hinted ?? (on && !this.lost && this.relief());
    knobs.point(tip?.name);
    const late = percent(mine.observation.slo_violation_rate.at(-1));
    if (this.lesson && (tip || this.seeking)) this.say(`Paused: the surge is here, ${late} late.`, true, tip ? `${tip.text} Then press Resume.` : "Looking for the slider that helps most …");
    else if (this.lesson) this.say("Now press Resume.", true, `Watch your score leave that of ${target.called}.`);
    else {
      const cost = overload?.cost >= TOLD ? `, score −${overload.cost.toFixed(2)}` : "";
      const { left, next } = this.surge(), now = left ? `Surge, ${left} s left` : on ? `Overloaded, ${overload.to - overload.from} s` : "";
      const coming = next ? `Surge in ${next} s: ${surgeOf(task)}` : task.floods ? "The last surge is over" : `${late} late now`;
      this.say(on ? `${now}: ${late} late${cost}` : now || coming, left || on || next <= NOTICE_S, ...this.advise(tip, on));
    }
  }

  /** The advice, and whether the rest may be skipped. */
  advise(tip, overloaded) {
    const { replicas, replicas_ready: ready } = this.race.mine.fleet, loading = replicas.at(-1) - ready.at(-1);
    if (overloaded && this.lost) return ["From here even the best policy ends at 0: press Start over."];
    if (tip) return [tip.text];
    if (loading > 0) return [`Wait: ${counted(loading, "replica")} loading.`];
    if (!this.settled) return [""];
    if (this.race.task.max_replicas) return ["Leave your sliders: no single move helps now."];
    const { later } = this;
    return [`No one slider gains much now: left as they are, you end at ${shownScore(this.ends)}.${later ? ` Next time, from the start: ${later.text} (${shownScore(later.score)}).` : ""} `, true];
  }

  /** Write both lines where they have changed: a link that is written anew under the pointer takes no click. */
  say(state, alarm, advice, skippable = false) {
    const said = JSON.stringify([state, alarm, advice, skippable]);
    if (said === this.said) return;
    this.said = said;
    this.state.textContent = state;
    this.state.classList.toggle("soon", Boolean(alarm));
    if (this.advice.firstChild?.textContent !== advice) fill(this.advice, advice, skippable && advice ? this.skipLink : null);
  }

  /** Seconds that an announced surge still lasts, as `left`, or until the `next` one comes; neither if there is none. */
  surge() {
    const { mine, task: { floods: known }, length } = this.race, played = mine.reward.length;
    if (!known) return {};
    const since = played - known.first_at_s, into = since % known.every_s, next = since < 0 ? -since : known.every_s - into;
    return since >= 0 && into < known.lasts_s ? { left: known.lasts_s - into } : { next: played + next < length ? next : undefined };
  }

  /** The move that relieves an overload of a fleet that scales, unless replicas are loading or there are no more. */
  relief() {
    const { task, knobs, mine, best, complete } = this.race, action = knobs.action(), { replicas, replicas_ready: ready } = mine.fleet;
    if (!task.max_replicas || action.replicas > ready.at(-1) || replicas.at(-1) > ready.at(-1)) return undefined;
    const planned = complete ? best.episode.action.replicas[mine.reward.length] ?? 0 : 0;
    const [move] = hints(action, { ...action, replicas: Math.min(task.max_replicas, Math.max(action.replicas + 1, planned)) }, task);
    return move && { ...move, text: this.withValue(move) };
  }

  /** A move in words, with the value to reach. */
  withValue({ name, value, text }) {
    return text.replace(":", ` (${bare(name, value, this.race.tiers)}):`);
  }

  /** Whether the hint's slider is on its way, and not there yet. */
  follows() {
    if (!this.hinted) return false;
    const { name, value, from } = this.hinted, now = this.race.knobs.action();
    return (value - now[name]) * (now[name] - from[name]) > 0 && Object.keys(now).every((other) => other === name || now[other] === from[other]);
  }

  /** After a second was played: stop for the lesson, or ask for a hint now and then. True if the race has to pause. */
  watch(overloaded) {
    const { task, first: easiest, mine, speed, length } = this.race, played = mine.reward.length;
    if (speed > FOLLOWED) return false;
    // The first surge stops a visitor who has moved no slider, in the task that is open first, where one slider wins.
    this.lesson = !this.taught && task === easiest && played > task.floods?.first_at_s && mine.observation.slo_violation_rate.at(-1) > LATE;
    if (this.lesson) this.taught = true;
    else if (!this.seeking && (overloaded || played % Math.round(length / HINTS) === 1)) this.seek();
    return this.lesson;
  }

  /** How many times the clock a race may run now, so that there is time to read a hint that is new. */
  pace(speed) {
    return speed <= FOLLOWED && this.race.mine.reward.length < this.hinted?.freshUntil ? Math.min(HINTED, speed) : speed;
  }

  /** Ask the server for a hint: the move to make now, or what would have helped from the start. */
  async seek() {
    const { mine, generation, knobs, speed, length } = this.race, action = knobs.action(), asked = JSON.stringify(action);
    const played = rows(mine.action), held = Math.min(Math.round(REACTION_S * speed), length - played.length - 1);
    const unlessLost = (answer) => answer.catch(() => undefined); // what cannot be checked is not advised
    this.seeking = true;
    const found = await unlessLost(this.bestNow(action, played, held));
    const later = found !== null || this.race.task.max_replicas ? null : this.settled ? this.later : await unlessLost(this.fromStart(this.ends));
    this.seeking = false;
    if (generation !== this.race.generation || mine !== this.race.mine || asked !== JSON.stringify(knobs.action())) return;
    this.settled = found === null;
    this.later = later;
    const text = found && `${this.withValue(found)}${found.worth ?? ""}`;
    const again = this.hinted?.name === found?.name && this.hinted?.value === found?.value;
    this.hinted = found && { ...found, text, from: action, freshUntil: again ? this.hinted.freshUntil : played.length + held };
  }

  /**
   * The move that gains most by the end of the episode, at once and up to `held` seconds later; null if none does. All move towards one
   * constant setting, so that no hint takes back another, and say what they are `worth`. Tasks that scale have no such setting: there
   * a move is compared with none until the next hint can be followed, and both go on as the best policy, so that replicas which are
   * removed for a lull come back.
   */
  async bestNow(action, before, held) {
    const { task, best, length, complete } = this.race;
    if (!complete || before.length >= length) return undefined;
    const scales = task.max_replicas, plan = rows(best.episode.action).slice(before.length), moves = this.moves(action, scales ? plan[held] : action);
    const until = scales ? Math.round(length / HINTS) + 2 * held : Infinity, [stay, ...moved] = trials(action, moves);
    const starts = [0, Math.round(held / 2), held];
    const run = (setting, from) => plan.map((planned, i) => (i >= until ? planned : i < from ? action : setting));
    const [none, ...courses] = await this.coursesOf([run(stay, 0), ...starts.flatMap((from) => moved.map((setting) => run(setting, from)))], before);
    const least = none.at(-1), scores = courses.map((course) => course.at(-1));
    this.ends = least;
    this.lost = scales && Math.max(least, ...scores) < LEAST;
    const worse = moves.map((_, i) => Math.min(...starts.map((_, late) => scores[late * moves.length + i]))), move = bestMove(moves, worse, least, scales ? SCALING_GAIN : GAIN);
    if (!move || scales) return move ?? null;
    const dips = courses[moves.indexOf(move.move)].findLastIndex((score, i) => score < none[i] - LEAST) >= before.length;
    return { ...move, worth: ` +${(move.score - least).toFixed(2)} by the end${dips ? ", after a dip" : ""}.` };
  }

  /** The setting that scores most if it is kept from the first second on: the sliders' own, or one slider from it; undefined if it gains little on `score`. */
  async fromStart(score) {
    const { knobs, length, tiers } = this.race, action = knobs.action(), moves = this.moves(action), settings = trials(action, moves);
    const [stay, ...scores] = (await this.coursesOf(settings.map((setting) => Array(length).fill(setting)))).map((course) => course.at(-1));
    const move = bestMove(moves, scores, stay, GAIN);
    if (move?.score > score + GAIN) return { name: move.name, score: move.score, setting: { ...action, [move.name]: move.value }, text: `${titleOf(move.name)} at ${bare(move.name, move.value, tiers)}` };
    return stay > score + GAIN ? { score: stay, setting: action, text: "the sliders as they are now" } : undefined;
  }

  /** What each run's actions, after the actions `before`, have added to the score by each second of this episode, as the server plays them. */
  async coursesOf(runs, before = []) {
    const { task, seed } = this.race, seconds = [...before.map((action) => runs.map(() => action)), ...runs[0].map((_, i) => runs.map((run) => run[i]))];
    const { session_id } = await post("reset/batch", { task_id: task.id, seeds: runs.map(() => seed), config: { reward: "score" } });
    const courses = runs.map(() => []);
    try {
      for (const held of inRuns(seconds.map((row) => row.map(address.numbers)), Math.floor(BATCH_SECONDS / runs.length))) {
        const { rewards } = await post("step/batch", { session_id, ...held, last: true });
        for (const row of rewards) row.forEach((reward, i) => courses[i].push((courses[i].at(-1) ?? 0) + reward));
      }
    } finally {
      await post("close/batch", { session_id });
    }
    return courses;
  }

  /** Moves of one slider: towards the best constant setting and what is `planned`, and in tasks that scale to a few replicas more or fewer. */
  moves(action, planned = action) {
    const { complete, setting, task, knobs } = this.race;
    if (!complete) return [];
    const towards = setting ? first(setting) : action, { max_replicas: most } = task;
    const counts = most ? [-2, -1, 1, 2].map((more) => action.replicas + more).filter((count) => count >= 1 && count <= most) : [];
    const all = [knobs.reach(towards), knobs.reach(planned), ...counts.map((replicas) => ({ ...action, replicas }))].flatMap((goal) => hints(action, goal, task));
    return [...new Map(all.map((move) => [`${move.name} ${move.value}`, move])).values()];
  }
}

/** A surge's load as a multiple of the usual one, such as "10 times the load". */
export const surgeOf = ({ floods, arrival_rate_rps: usual }) => `${compact(floods.arrival_rate_rps / usual, 2)} times the load`;

/** Settings in which one move each was made, after the one without any. */
const trials = (action, moves) => [action, ...moves.map(({ name, value }) => ({ ...action, [name]: value }))];

/** The move that scores most, with its `score` and the `move` itself, if it gains on `stay`; else undefined. */
function bestMove(moves, scores, stay, gain) {
  const score = Math.max(...scores), move = moves[scores.indexOf(score)];
  return score > stay + gain ? { ...move, score, move } : undefined;
}
