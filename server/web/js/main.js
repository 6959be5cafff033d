/** Entry point of the page: tabs, theme, and opening the tab that the address names. */

import * as address from "./address.js";
import { site } from "./ahead.js";
import { get } from "./api.js";
import { problem } from "./dom.js";
import { redrawAll } from "./charts.js";

const LOADERS = {
  race: () => import("./race.js"),
  verify: () => import("./verify.js"),
  trace: () => import("./trace.js"),
  plan: () => import("./plan.js"),
  fidelity: () => import("./fidelity.js"),
  code: () => import("./code.js"),
  rollouts: () => import("./rollouts.js"),
  traffic: () => import("./traffic.js"),
};

const tabs = [...document.querySelectorAll("[role=tab]")];
const opened = new Map();

// Ids of panels differ from the tabs' addresses: a browser would move the focus to the element that an address names.
const nameOf = (tab) => tab.id.replace("tab-", "");
const panelOf = (name) => document.getElementById(`panel-${name}`);

async function open(name, params) {
  for (const tab of tabs) {
    const on = nameOf(tab) === name;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    panelOf(nameOf(tab)).hidden = !on;
    if (on) tab.scrollIntoView({ block: "nearest", inline: "center" });
  }
  for (const [other, part] of opened) if (other !== name) part.then((left) => left?.leave?.(), () => {});
  const panel = panelOf(name);
  if (!opened.has(name)) {
    const missing = () => { throw { message: "This part of the page could not be loaded", next: "check the connection, then open the tab again" }; };
    opened.set(name, LOADERS[name]().catch(missing).then((module) => module.start(panel)));
  }
  try {
    const part = await opened.get(name);
    await part?.show?.(params);
    panel.dataset.ready = "yes";
  } catch (error) {
    opened.delete(name);
    panel.replaceChildren(problem(error));
  }
}

function followAddress() {
  const { tab, params } = address.read();
  if (tab in LOADERS) return open(tab, params);
  if (tab) params.set("lost", tab);
  // A server with another environment at its root shows that tab first.
  return open(site.env in LOADERS ? site.env : "race", params);
}

function chooseTab(tab) {
  tab.focus();
  const before = location.hash;
  location.hash = nameOf(tab);
  if (location.hash === before && !opened.has(nameOf(tab))) followAddress(); // it could not be loaded before
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => chooseTab(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    chooseTab(tabs[to % tabs.length]);
  });
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  open("race", new URLSearchParams()).then(() => panelOf("race").focus());
});
window.addEventListener("hashchange", followAddress);

// Local storage may be denied, as within a frame; the theme then follows the system on each visit.
function remembered(value) {
  try {
    if (value) localStorage.setItem("theme", value);
    return localStorage.getItem("theme");
  } catch {
    return value ?? null;
  }
}

function useTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  redrawAll();
}

const systemDark = matchMedia("(prefers-color-scheme: dark)");
systemDark.addEventListener("change", () => redrawAll());
document.getElementById("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light");
  useTheme(remembered(now === "dark" ? "light" : "dark") ?? (now === "dark" ? "light" : "dark"));
});
useTheme(remembered());

await followAddress();
get("health").then((health) => {
  if (health.version) document.getElementById("version").textContent = `version ${health.version}`;
}).catch(() => {});
