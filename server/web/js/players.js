/** The built-in policies of GET /policies as the page draws them. */

import { words } from "./format.js";

// Lines of the policies that ship; another one is drawn in ink and called by its name.
const LINES = {
  heuristic: { colour: "heuristic" },
  best_adaptive: { colour: "adaptive" },
  ppo: { label: "PPO", colour: "ppo", dash: [8, 3] },
  best_static: { colour: "static", dash: [3, 3] },
  random_search: { colour: "search", dash: [6, 2, 1, 2] },
  hill_climb: { label: "Hill climbing", colour: "climb" },
  vllm_defaults: { label: "vLLM's defaults", colour: "vllm", dash: [4, 4] },
  naive: { label: "Fixed-32", colour: "naive", dash: [1, 3] },
};

/** Key, label and line of a policy; `title` is what it does. */
export function player({ name, description = "" }) {
  const label = words(name).replace(/^./, (letter) => letter.toUpperCase());
  return { key: name, label, colour: "ink", title: description, ...LINES[name] };
}
