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

/** An action as the numbers of a batch. */
export const numbers = (action) => NAMES.filter((name) => name in action).map((name) => Number(action[name]));

/** Encode actions as a short text: only the seconds with a change, as `second.kv-spec-batch-disagg-tier`, and `-replicas` where the task scales. */
export function packActions(actions) {
  const parts = [];
  let last = "";
  actions.forEach((action, step) => {
    const values = [Math.round(1000 * action.kv_budget), action.spec_length, action.batch_size, Number(action.prefill_disagg), action.quant_tier, ...(action.replicas ? [action.replicas] : [])];
    const text = values.join("-");
    if (text !== last) parts.push(`${step}.${text}`);
    last = text;
  });
  return `${actions.length}_${parts.join("_")}`;
}

/** Decode a text of `packActions`; null if the text is malformed. */
export function unpackActions(text) {
  const [count, ...parts] = text.split("_");
  const changes = parts.map((part) => part.match(/^(\d+)\.(\d+)-(\d+)-(\d+)-([01])-([012])(?:-(\d{1,4}))?$/));
  if (!/^\d{1,4}$/.test(count) || changes.length === 0 || changes.some((change) => !change)) return null;
  const actions = [];
  let at = 0;
  for (let step = 0; step < Number(count); step++) {
    while (at + 1 < changes.length && Number(changes[at + 1][1]) <= step) at++;
    const values = changes[at].slice(2).filter((text) => text !== undefined).map(Number);
    actions.push({ ...Object.fromEntries(values.map((value, i) => [NAMES[i], value])), kv_budget: values[0] / 1000, prefill_disagg: values[3] === 1 });
  }
  return actions;
}
