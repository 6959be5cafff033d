/** Hints during a race and advice after it: which slider to move, as the server plays this very episode with it. */

import * as address from "./address.js";
import { post } from "./api.js";
import { el } from "./dom.js";
import { compact, counted, percent, score as shownScore } from "./format.js";
import { hints, titleOf } from "./knobs.js";
import { FOLLOWED } from "./players.js";
import { inRuns, rowAt, rows } from "./runs.js";
import { LATE, LEAST, overloads } from "./score.js";
import { bare } from "./strip.js";

export const GAIN = 0.02; // in score: advice after a race that gains less is not given
const HINT_GAIN = 0.005; // the same for hints
const SCALING_GAIN = 0.001; // and in tasks that scale, where many add up
const TOLD = 0.005; // in score: the cost of an overload
const NOTICE_S = 15; // before a surge, hints prepare for it
const RELIEVED_S = 3; // after an overload, its warning goes
const HINTS = 20; // times in a race that the server is asked which slider to move
const REACTION_S = 1; // a visitor takes so long to move a slider, at the chosen speed: a hint gains after it too
const HINTED = 5; // times the clock at most meanwhile, so that there is time to read a hint
const STILL_MS = 300; // sliders that rest so long are played to the end
const BATCH_SECONDS = 4096; // of all episodes of a batch, in a request

export class Coach {
  /** `race` is read whenever something is said. */
  constructor(race) {
    this.race = race;
    this.state = el("p", { class: "state" });
    this.advice = el("p", { class: "advice" });
    this.node = el("div", { class: "coach" }, this.state, this.advice);
    this.taught = new Set(); // ids of the tasks in which the visitor has moved a slider, or was shown how
    this.begin();
  }

  /** A race begins. */
  begin() {
    this.hinted = null;
    this.lost = this.lesson = false;
    this.compares = false; // whether the best policy's sliders are shown: once there was no hint, until the race is over
    this.ends = this.gained = this.asked = undefined; // the score if the sliders stay as they are, what their last move added to it, and where they are
  }

  /** The visitor has moved a slider. */
  moved() {
    this.taught.add(this.race.task.id);
    if (!this.follows()) this.hinted = null; // a hint that was followed to its end goes
    clearTimeout(this.resting);
    if (!this.race.task.max_replicas) this.resting = setTimeout(() => this.seek(), STILL_MS);
  }

  /** Say in a line what happens now, and in another which slider to move. */
  tell() {
    const { mine, task, target, knobs, length, best } = this.race, played = mine.reward.length, tip = this.hinted;
    const overload = overloads(mine, task, length).at(-1), on = played - overload?.to < RELIEVED_S;
    knobs.point(tip?.name);
    knobs.mark(this.compares && played < length ? this.planned() : null, best);
    const late = percent(mine.observation.slo_violation_rate.at(-1));
    if (this.lesson && (tip || this.seeking)) this.say(task.max_replicas ? "Paused: the load rises." : `Paused: the surge is here, ${late} late.`, true, tip ? `${tip.text} Then press Resume.` : "Looking for the slider that helps most …");
    else if (this.lesson) this.say("Now press Resume.", true, `Watch your score leave that of ${target.called}.`);
    else {
      const cost = overload?.cost >= TOLD ? `, score −${overload.cost.toFixed(2)}` : "";
      const { left, next } = this.surge(), now = left ? `Surge, ${left} s left` : on ? `Overloaded, ${overload.to - overload.from} s` : "";
      const coming = next ? `Surge in ${next} s: ${surgeOf(task)}` : task.floods ? "The last surge is over" : `${late} late now`;
      this.say(on ? `${now}: ${late} late${cost}` : now || coming, left || on || next <= NOTICE_S, this.advise());
    }
  }

  advise() {
    const { replicas, replicas_ready: ready } = this.race.mine.fleet, loading = replicas.at(-1) - ready.at(-1);
    if (this.lost) return "From here even the best policy ends at 0: press Start over.";
    if (this.hinted) return this.hinted.text;
    if (loading > 0) return `Wait: ${counted(loading, "replica")} loading.`;
    return this.compares ? this.compared() : "";
  }

  /** What the best policy does when there is no hint: where its sliders are decided by the load; else what the visitor's own moves gain. */
  compared() {
    const { best: { label, episode }, mine, knobs, task, tiers } = this.race, at = mine.reward.length, action = knobs.action();
    const by = episode.score_so_far[at - 1] - mine.score_so_far[at - 1], ahead = Math.abs(by) < LEAST ? "level with you" : `${shownScore(Math.abs(by))} ${by < 0 ? "behind" : "ahead of"} you`;
    if (!task.max_replicas) return `${Math.abs(this.gained) >= LEAST ? `Your last move: ${signed(this.gained)} by the end.` : "No hint now."} Pause and try sliders: the line below says where you end. The marks on the sliders show ${label}, ${ahead}.`;
    const others = hints(action, knobs.reach(this.planned()), task).map(({ name, value }) => `${titleOf(name)} at ${bare(name, value, tiers)} (you: ${bare(name, action[name], tiers)})`);
    return `${label} in ${this.reaction} s: ${others.join(", ") || "the same settings as you"}. It is ${ahead}.`;
  }

  /** Where the best policy has its sliders in the seconds that a visitor takes to move one. */
  planned() {
    const { best: { episode }, mine, length } = this.race;
    return rowAt(episode.action, Math.min(mine.reward.length + this.reaction, length - 1));
  }

  get reaction() {
    return Math.round(REACTION_S * Math.min(this.race.speed, FOLLOWED));
  }

  say(state, alarm, advice) {
    this.state.textContent = state;
    this.state.classList.toggle("soon", Boolean(alarm));
    this.advice.textContent = advice;
  }

  /** For how many seconds an announced surge still lasts (`left`), or in how many the next one comes (`next`); empty if none is announced. */
  surge() {
    const { mine, task: { floods: known }, length } = this.race, played = mine.reward.length;
    if (!known) return {};
    const since = played - known.first_at_s, into = since % known.every_s, next = since < 0 ? -since : known.every_s - into;
    return since >= 0 && into < known.lasts_s ? { left: known.lasts_s - into } : { next: played + next < length ? next : undefined };
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
    // A visitor who has moved no slider is stopped where one helps: by the first surge in the task that is open first, and before the load needs more replicas.
    const surge = task === easiest && played > task.floods?.first_at_s && mine.observation.slo_violation_rate.at(-1) > LATE;
    this.lesson = !this.taught.has(task.id) && (surge || (this.hinted?.name === "replicas" && this.hinted.value > this.hinted.from.replicas));
    if (this.lesson) this.taught.add(task.id);
    else if (!this.seeking && (overloaded || played % Math.round(length / HINTS) === 1)) this.seek();
    return this.lesson;
  }

  /** How many times the clock a race may run now, so that there is time to read a hint that is new. */
  pace(speed) {
    return speed <= FOLLOWED && this.race.mine.reward.length < this.hinted?.freshUntil ? Math.min(HINTED, speed) : speed;
  }

  /** Ask the server for the move to make now, and where the sliders end as they are. */
  async seek() {
    const { mine, generation, knobs, speed, length } = this.race, action = knobs.action(), asked = JSON.stringify(action);
    const played = rows(mine.action), held = Math.min(Math.round(REACTION_S * speed), length - played.length - 1);
    if (!played.length || held < 0 || speed > FOLLOWED) return;
    this.seeking = true;
    const found = await this.bestNow(action, played, held).catch(() => undefined); // what cannot be checked is not advised
    this.seeking = false;
    if (!found || generation !== this.race.generation || mine !== this.race.mine || asked !== JSON.stringify(knobs.action())) return;
    const { move, ends, lost } = found, text = move && `${this.withValue(move)}${move.worth ?? ""}`;
    if (asked !== this.asked) this.gained = ends - this.ends;
    Object.assign(this, { asked, ends, lost, compares: this.compares || !move });
    const again = this.hinted?.name === move?.name && this.hinted?.value === move?.value;
    this.hinted = move && { ...move, text, from: action, freshUntil: again ? this.hinted.freshUntil : played.length + held };
    this.race.tellScores();
    this.race.tellSliders();
  }

  /**
   * The `move` that gains most by the end of the episode, at once and up to `held` seconds later, with what it is `worth`, or null; the
   * score at which the visitor `ends` without a move; and whether all is `lost`. In tasks that scale, a move is compared with none until
   * the next hint can be followed, and both go on as the best policy, so that replicas which are removed for a lull come back.
   */
  async bestNow(action, before, held) {
    const { task, best, length, complete } = this.race;
    if (!complete || before.length >= length) return undefined;
    const scales = task.max_replicas, plan = rows(best.episode.action).slice(before.length), moves = this.moves(action, scales ? plan[held] : action);
    const until = scales ? Math.round(length / HINTS) + 2 * held : Infinity, [stay, ...moved] = trials(action, moves);
    const starts = [0, Math.round(held / 2), held];
    const run = (setting, from) => plan.map((planned, i) => (i >= until ? planned : i < from ? action : setting));
    const [none, ...courses] = await this.coursesOf([run(stay, 0), ...starts.flatMap((from) => moved.map((setting) => run(setting, from)))], before);
    const ends = none.at(-1), scores = courses.map((course) => course.at(-1)), lost = scales && Math.max(ends, ...scores) < LEAST;
    const worse = moves.map((_, i) => Math.min(...starts.map((_, late) => scores[late * moves.length + i])));
    const move = bestMove(moves, worse, ends, scales ? SCALING_GAIN : HINT_GAIN) ?? null;
    if (!move || scales) return { move, ends, lost };
    const pays = 2 + courses[moves.indexOf(move.move)].findLastIndex((score, i) => score < none[i] - LEAST);
    return { move: { ...move, worth: ` ${signed(move.score - ends)} by the end${pays > before.length + 1 ? `: it pays from second ${pays} on` : ""}.` }, ends, lost };
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

  /** Moves of one slider: towards the best constant setting and what is `planned`, to the positions beside, and in tasks that scale to a few replicas more or fewer. */
  moves(action, planned = action) {
    const { complete, setting, task, knobs } = this.race;
    if (!complete) return [];
    const towards = setting ? rowAt(setting, 0) : action, { max_replicas: most } = task;
    const beside = most ? [-2, -1, 1, 2].map((more) => ({ ...action, replicas: action.replicas + more })).filter(({ replicas }) => replicas >= 1 && replicas <= most) : knobs.beside();
    const all = [knobs.reach(towards), knobs.reach(planned), ...beside].flatMap((goal) => hints(action, goal, task));
    return [...new Map(all.map((move) => [`${move.name} ${move.value}`, move])).values()];
  }
}

/** A surge's load as a multiple of the usual one, such as "10 times the load". */
export const surgeOf = ({ floods, arrival_rate_rps: usual }) => `${compact(floods.arrival_rate_rps / usual, 2)} times the load`;

const signed = (gain) => `${gain < 0 ? "−" : "+"}${shownScore(Math.abs(gain))}`;

/** Settings in which one move each was made, after the one without any. */
const trials = (action, moves) => [action, ...moves.map(({ name, value }) => ({ ...action, [name]: value }))];

/** The move that scores most, with its `score` and the `move` itself, if it gains on `stay`; else undefined. */
function bestMove(moves, scores, stay, gain) {
  const score = Math.max(...scores), move = moves[scores.indexOf(score)];
  return score > stay + gain ? { ...move, score, move } : undefined;
}
