/** Client of the public HTTP API: every request of the page goes through this module. */

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = detail.code ?? "http_error";
    this.next = detail.next;
  }
}

const MAX_WAITS = 3;
let site;

/** URL of a path of an environment, relative to the page. */
async function urlOf(environment, path) {
  site ??= request("site.json");
  return (await site)[environment] + path;
}

/** The environment that the server has at its root: "serving", "traffic" or "rollouts". */
export async function atRoot() {
  site ??= request("site.json");
  return (await site).env;
}

async function request(url, body) {
  const options = body === undefined ? {} : {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: typeof body === "string" ? body : JSON.stringify(body),
  };
  for (let waited = 0; ; waited++) {
    const answer = await send(url, options);
    if (answer.ok) return answer.json();
    // A busy server says how long to wait; waiting keeps the visitor's run.
    if ((answer.status === 429 || answer.status === 503) && waited < MAX_WAITS) {
      await sleep(1000 * Number(answer.headers.get("retry-after") ?? 1));
      continue;
    }
    throw new ApiError(answer.status, (await answer.json().catch(() => ({}))).detail ?? {});
  }
}

async function send(url, options) {
  try {
    const early = options.method ? undefined : globalThis.ahead?.get(url);
    if (early) globalThis.ahead.delete(url);
    return await (early ?? fetch(url, options));
  } catch {
    throw new ApiError(0, { message: "The server cannot be reached", next: "check the connection and try again" });
  }
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export const get = async (path, environment = "serving") => request(await urlOf(environment, path));
export const post = async (path, body, environment = "serving") => request(await urlOf(environment, path), body);

/** A file of the page itself, as JSON or as text. */
export const own = (path) => request(path);
export const ownText = async (path) => (await send(path, {})).text();

/** Absolute URL of the API, for programs outside the page. */
export const baseUrl = () => new URL("..", document.baseURI).href.replace(/\/$/, "");

const kept = new Map();

/** GET a path once and keep the answer while the page is open. */
export function once(path, environment = "serving") {
  const key = `${environment} ${path}`;
  if (!kept.has(key)) {
    const answer = get(path, environment);
    kept.set(key, answer);
    answer.catch(() => kept.delete(key));
  }
  return kept.get(key);
}
