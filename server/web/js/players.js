/** The built-in policies of GET /policies as the page draws them. */

import { words } from "./format.js";

// Lines of the policies that ship, and their names in a sentence; another one is drawn in ink and called by its name.
const LINES = {
  heuristic: { called: "the heuristic", colour: "heuristic" },
  best_adaptive: { label: "Searched policy", called: "the searched policy", colour: "adaptive" },
  ppo: { label: "PPO", called: "the neural network (PPO)", colour: "ppo", dash: [8, 3] },
  best_static: { label: "Best constant", called: "the best constant setting", colour: "static", dash: [3, 3] },
  random_search: { called: "random search", colour: "search", dash: [6, 2, 1, 2] },
  hill_climb: { label: "Hill climbing", called: "hill climbing", colour: "climb" },
  vllm_defaults: { label: "vLLM's defaults", colour: "vllm", dash: [4, 4] },
  naive: { label: "Fixed-32", colour: "naive", dash: [1, 3] },
  hpa: { label: "HPA", called: "Kubernetes' HPA", colour: "hpa" },
  kpa: { label: "KPA", called: "Knative's KPA", colour: "climb" },
  random: { colour: "random", dash: [6, 3] },
  aimd: { label: "AIMD", colour: "vllm" },
  kv_target: { label: "KV target", colour: "search" },
  constant: { label: "Constant cap of 16", called: "a constant cap of 16", colour: "static", dash: [3, 3] },
  fit: { label: "Cache-fitting cap", called: "the cache-fitting cap", colour: "heuristic" },
  no_cap: { called: "no cap", colour: "naive", dash: [1, 3] },
  budget: { colour: "climb" },
  planner: { called: "the capacity planner", colour: "planner", dash: [2, 3] },
};

/** The visitor. */
export const YOU = { key: "you", label: "You", colour: "you", width: 2.5 };

/** What stands in the place of the advice after a game, so that buttons do not move when it comes. */
export const SEEKING = "Looking for what scores more …";

/** The run of a link that the visitor followed. */
export const SHARED = { key: "shared", label: "Challenger", called: "your challenger", title: "The run of the link that you followed.", colour: "shared", dash: [7, 4], width: 2 };

/** Key, label and line of a policy; `called` is its name in a sentence, `title` what it does. */
export function player({ name, description = "" }) {
  const label = words(name).replace(/^./, (letter) => letter.toUpperCase());
  const line = { label, colour: "ink", ...LINES[name] };
  return { key: name, title: description, called: line.label, ...line };
}

export const SKIPPING = 1000; // times the clock: as fast as possible
export const FOLLOWED = 25; // times the clock: faster runs are not watched
export const SPEEDS = [[2, "2×"], [5, "5×"], [10, "10×"], [FOLLOWED, "25×"], [SKIPPING, "as fast as possible"]];
const RUN_S = 45; // a run lasts at most so long at its preset speed, or is played at the fastest that is followed

/** The speed with which a run of so many seconds begins. */
export const presetSpeed = (seconds) => SPEEDS.slice(1).find(([times]) => seconds / times <= RUN_S || times === FOLLOWED)[0];
