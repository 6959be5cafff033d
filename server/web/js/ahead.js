/** Asks for what the race needs while its other modules are still loading; api.js takes the answers. Not where another tab opens. */

import { isSeed, today } from "./seeds.js";

/** Whom to beat first, and whose first action is the visitor's: the first of these that plays the task. */
export const STARTS = ["hpa", "vllm_defaults", "naive"];

/** Body of POST /play for the scores and actions of an episode. */
export const briefly = (task_id, seed, agent) => ({ task_id, seed, agent, brief: true });

/** Paths of the environments, relative to the page, and `env`, the one at the server's root: "serving", "traffic" or "rollouts". */
export const site = JSON.parse(document.documentElement.dataset.site);

/** Options of a request with a body. */
export const withBody = (body) => ({ method: "POST", headers: { "content-type": "application/json" }, body: typeof body === "string" ? body : JSON.stringify(body) });

/** Answers on their way, by URL and body. */
export const early = new Map();

function ask(path, options) {
  const url = site.serving + path, answer = fetch(url, options);
  answer.catch(() => {}); // whoever takes it is told
  early.set(url + (options?.body ?? ""), answer);
  return answer;
}

async function askAhead() {
  const [tab, query] = location.hash.slice(1).split("?"), params = new URLSearchParams(query);
  if (tab ? tab !== "race" : site.env !== "serving") return;
  for (const path of ["tasks?all=true", "info"]) ask(path);
  const listed = await ask(`policies?task_id=${encodeURIComponent(params.get("task") ?? "3")}`); // the race's first task
  const { task_id, policies } = await listed.clone().json();
  const agent = STARTS.find((start) => policies.some(({ name }) => name === start));
  const seed = params.get("seed") ?? "";
  ask("play", withBody(briefly(task_id, isSeed(seed) ? Number(seed) : today(), agent)));
}

/** Settled once all is asked for. */
export const asked = askAhead().catch(() => {});
