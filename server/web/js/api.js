/** Client of the public HTTP API: every request of the page goes through this module. */

import { early, site, withBody } from "./ahead.js";

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = detail.code ?? "http_error";
    this.next = detail.next;
  }
}

const MAX_WAITS = 3;

async function request(url, body, signal) {
  const options = body === undefined ? {} : { ...withBody(body), signal };
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
    const key = url + (options.body ?? ""), answer = early.get(key);
    early.delete(key);
    return await (answer ?? fetch(url, options));
  } catch {
    throw new ApiError(0, { message: "The server cannot be reached", next: "check the connection and try again" });
  }
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export const get = (path, environment = "serving") => request(site[environment] + path);
export const post = (path, body, environment = "serving", signal = undefined) => request(site[environment] + path, body, signal);

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
