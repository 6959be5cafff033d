/** Scores with their parts, as a table with bars. */

import { el } from "./dom.js";
import { score, words } from "./format.js";

/** Rows of `{label, colour, score, breakdown}`, best first. */
export function scoreBoard(places) {
  const parts = Object.keys(places[0].breakdown);
  const head = ["Place", "Player", "Score", ...parts.map(words)];
  const rows = places.map((place, i) => el("tr", { class: place.key === "you" ? "you" : "" },
    el("td", { text: String(i + 1) }),
    el("th", { scope: "row" }, el("span", { class: `chip ink-${place.colour}`, text: place.label })),
    barCell(place.score, place.colour, true),
    ...parts.map((part) => barCell(place.breakdown[part], place.colour))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Scores" },
    el("table", { class: "scores" },
      el("caption", { class: "unseen", text: "Scores and their parts, all from 0 to 1" }),
      el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, ...rows)));
}

function barCell(value, colour, strong = false) {
  const share = Math.max(0, Math.min(1, value));
  const bar = el("meter", { min: 0, max: 1, value: share, class: `ink-${colour}`, "aria-hidden": "true" });
  return el("td", { class: strong ? "strong" : "" }, el("span", { text: score(value) }), bar);
}
