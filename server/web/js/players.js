/** The built-in policies as the page draws them: label, colour and dash of their lines, in the order of legends. */

export const POLICIES = {
  heuristic: { label: "Heuristic", colour: "heuristic" },
  best_adaptive: { label: "Best adaptive", colour: "adaptive" },
  ppo: { label: "PPO", colour: "ppo", dash: [8, 3] },
  best_static: { label: "Best static", colour: "static", dash: [3, 3] },
  random_search: { label: "Random search", colour: "search", dash: [6, 2, 1, 2] },
  hill_climb: { label: "Hill climbing", colour: "you" },
  vllm_defaults: { label: "vLLM's defaults", colour: "vllm", dash: [4, 4] },
  naive: { label: "Plan's baseline", colour: "naive", dash: [1, 3] },
};
