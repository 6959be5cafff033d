/** Asks for what the race needs while its modules are still loading; api.js takes the answers. Not where another tab opens. */

const [tab, query] = location.hash.slice(1).split("?");
const task = new URLSearchParams(query).get("task") ?? "3"; // the race's first one
const paths = ["tasks?all=true", "info"];
// Without a tab the server may open on another environment, which has no such task.
if (tab === "race") paths.push(`policies?task_id=${encodeURIComponent(task)}`);
globalThis.ahead = new Map(tab && tab !== "race" ? [] : paths.map((path) => [`../${path}`, fetch(`../${path}`)]));
for (const answer of globalThis.ahead.values()) answer.catch(() => {}); // whoever takes it is told
