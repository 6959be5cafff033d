/** The page's address, which holds the tab and its parameters: `#race?task=3&seed=7&you=...` */

export function read() {
  const [tab, query = ""] = location.hash.slice(1).split("?");
  const params = new URLSearchParams(query), beat = new URLSearchParams(location.search).get("beat");
  if (params.has("you") && !params.has("beat") && beat) params.set("beat", beat);
  return { tab, params };
}

/** Change the address without a new entry in the browser's history. */
export function write(tab, params = {}) {
  history.replaceState(null, "", link(tab, params));
}

/** An address of the page. A score to beat goes before the `#`, because the server writes it into link previews. */
export function link(tab, { beat, ...params } = {}) {
  const query = new URLSearchParams(params).toString(), search = new URLSearchParams(location.search);
  search.delete("beat");
  if (beat) search.set("beat", beat);
  return `${location.pathname}${search.size ? `?${search}` : ""}#${tab}${query ? `?${query}` : ""}`;
}

const NAMES = ["kv_budget", "spec_length", "batch_size", "prefill_disagg", "quant_tier", "replicas"];

const LETTERS = "abcdef"; // of no dash to five

/** An action as the numbers of a batch. */
export const numbers = (action) => NAMES.filter((name) => name in action).map((name) => Number(action[name]));

/**
 * Encode actions as a short text: only the seconds with a change, as `second.kv-spec-batch-disagg-tier`, and `-replicas` where the
 * task scales. A value that stays is left out, and so are dashes at the end: `0.913-0-256-0-0_7.--512_17.----1`. A letter replaces
 * the dot and the dashes after it: `0a913-0-256-0-0_7c512_17e1`; older links have none.
 */
export function packActions(actions) {
  const parts = [];
  let last = [];
  actions.forEach((action, step) => {
    const values = [Math.round(1000 * action.kv_budget), action.spec_length, action.batch_size, Number(action.prefill_disagg), action.quant_tier, ...(action.replicas ? [action.replicas] : [])];
    const text = values.map((value, i) => (value === last[i] ? "" : value)).join("-").replace(/-+$/, "");
    if (text) parts.push(`${step}.${text}`);
    last = values;
  });
  return parts.join("_").replace(/\.(-*)/g, (_, dashes) => LETTERS[dashes.length]);
}

/** Decode a text of `packActions` as actions up to the last change, which stays; null if the text is malformed. */
export function unpackActions(text) {
  const actions = [];
  let last = [];
  for (const part of text.replace(/[a-f]/g, (letter) => `.${"-".repeat(LETTERS.indexOf(letter))}`).replace(/^\d+_/, "").split("_")) { // older links begin with the number of seconds
    const [, step, change] = part.match(/^(\d{1,4})\.([-\d]*)$/) ?? [], given = change?.split("-") ?? [];
    last = Array.from({ length: Math.max(last.length, given.length) }, (_, i) => (given[i] ? Number(given[i]) : last[i]));
    const [kv, spec, , disagg, tier] = last;
    if (!change || Number(step) < actions.length || (!actions.length && Number(step)) || last.length < 5 || last.length > 6 || last.includes(undefined) || kv > 1000 || spec > 8 || disagg > 1 || tier > 2) return null;
    while (actions.length && actions.length < Number(step)) actions.push(actions.at(-1));
    actions.push({ ...Object.fromEntries(last.map((value, i) => [NAMES[i], value])), kv_budget: kv / 1000, prefill_disagg: disagg === 1 });
  }
  return actions;
}
