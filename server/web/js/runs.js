/** Runs of an episode: its seconds as columns by name, rows, an episode log, and the actions of a batch. */

const HELD_S = 20; // actions that stay so long are sent once: a request more takes less time than to send them every second

/** A run of which nothing is played yet, from the answer of POST /reset. */
export function newRun(begun) {
  const run = { session: begun?.session_id, observation: columns(), metrics: columns(), fleet: columns(), action: columns(), reward: [], score_so_far: [], parts: [] };
  if (begun) append(run.observation, begun.observation);
  return run;
}

/** A run as JSON had it. */
export function oldRun(run) {
  const parts = ["observation", "metrics", "fleet", "action"];
  return { parts: [], ...run, ...Object.fromEntries(parts.map((name) => [name, columns(run[name])])) };
}

/** Object whose missing properties are created as empty arrays when they are read. */
function columns(known = {}) {
  return new Proxy(known, { get: (target, name) => (typeof name === "string" && name !== "toJSON" ? target[name] ??= [] : undefined) });
}

/** A batch's actions for every second as `actions` and `repeat` of at most `most` seconds each: those that stay are sent once. */
export function inRuns(seconds, most) {
  const texts = seconds.map((row) => JSON.stringify(row)), found = [];
  for (let from = 0, to = 0; from < texts.length; from = to) {
    while (texts[to] === texts[from] && to - from < most) to++;
    const listed = found.at(-1);
    if (to - from >= HELD_S) found.push({ actions: [seconds[from]], repeat: to - from });
    else if (listed?.repeat === 1 && listed.actions.length + to - from <= most) listed.actions.push(...seconds.slice(from, to));
    else found.push({ actions: seconds.slice(from, to), repeat: 1 });
  }
  return found;
}

/** Row `i` of columns by name. */
export const rowAt = (table, i) => Object.fromEntries(Object.entries(table).map(([name, column]) => [name, column[i]]));

/** An array of objects as columns by name. */
export const columnsOf = (table) => Object.fromEntries(Object.keys(table[0]).map((name) => [name, table.map((row) => row[name])]));

/** Columns by name as an array of objects. */
export function rows(table) {
  const names = Object.keys(table);
  return table[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, table[name][i]])));
}

/** The episode log of a run, as graders read it. */
export function logOf(run) {
  const metrics = rows(run.metrics);
  return rows(run.action).map((action, i) => ({ timestep: i + 1, action, reward: run.reward[i], metrics: metrics[i] }));
}

export function append(target, values) {
  for (const [name, value] of Object.entries(values)) target[name].push(value);
}
