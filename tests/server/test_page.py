"""The page in a real browser, used as a person would use it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Route, expect, sync_playwright

from tests.programs import program
from tests.servers import RunningServer, running_server

pytestmark = [
    pytest.mark.slow,
    # Playwright's own event loop leaves its subprocess transport to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# A test machine has neither a sandbox for root nor a network: the browser must not wait for either.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 800}
PATIENCE_MS = 240_000  # a busy machine draws races slowly
SOON_MS = 60_000  # and all else takes it longer than Playwright's 5 seconds
expect.set_options(timeout=SOON_MS)
TABS = ("race", "rollouts", "traffic", "verify", "trace", "plan", "fidelity", "code")
REFUSED = "the server responded with a status of 422"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium"), args=ARGUMENTS)
        yield browser
        browser.close()


class Visitor:
    """A browser window on the page that records errors and requested addresses."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.page: Page = context.new_page()
        self.page.set_default_timeout(SOON_MS)
        self.errors: list[str] = []
        self.allowed_errors: list[str] = []
        self.strangers: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._on_request(request.url))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _on_request(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.strangers.append(url)

    def open(self, tab: str = "", wait_for: str | None = None) -> Page:
        self.page.goto(f"{self.url}/web/{'#' + tab if tab else ''}")
        name = wait_for or (tab.split("?")[0] or "race")
        self.page.wait_for_selector(f"#panel-{name}[data-ready=yes]")
        return self.page

    def check(self) -> None:
        unexpected = [e for e in self.errors if not any(allowed in e for allowed in self.allowed_errors)]
        assert unexpected == []
        assert self.strangers == []


Visit = Callable[..., Visitor]


@pytest.fixture
def visit(browser: Browser, server: RunningServer) -> Iterator[Visit]:
    """Creates visitors; at the end, none of them may have seen an error or contacted another host."""
    visitors: list[Visitor] = []
    contexts: list[BrowserContext] = []

    def make(**options: Any) -> Visitor:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        visitors.append(Visitor(context, server.url))
        return visitors[-1]

    yield make
    for visitor in visitors:
        visitor.check()
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("tab", "task"), [("", "3"), ("race?task=autoscale&seed=4", "autoscale"), ("code", None)])
def test_what_a_race_needs_is_asked_for_once_while_its_modules_load(visit: Visit, tab: str, task: str | None) -> None:
    visitor, asked, held = visit(), [], []
    page = visitor.page
    page.on("request", lambda request: asked.append(request.url.removeprefix(visitor.url)))
    page.route("**/race.js", lambda route: held.append(route))
    needed = ["/tasks?all=true", "/info", f"/policies?task_id={task}", "/play"] if task else []

    def of_the_race() -> list[str]:
        return [path for path in asked if path.split("?")[0] in ("/tasks", "/info", "/policies", "/play")]

    if task:
        with page.expect_request("**/play"):
            page.goto(f"{visitor.url}/web/#{tab}")
    else:
        visitor.open(tab)
    assert of_the_race() == needed
    for route in held:
        route.continue_()
    if task:
        start = page.get_by_role("button", name="Start the race")
        expect(start).to_be_enabled()
        assert [path for path in of_the_race() if path != "/play"] == needed[:3]


def test_the_race_starts_before_the_chart_library_and_the_players_episodes_are_there(visit: Visit) -> None:
    visitor = visit()
    page, held = visitor.page, []
    page.route("**/uPlot*.js", lambda route: held.append(route))

    def hold(route: Route) -> None:
        if route.request.post_data_json.get("brief"):
            route.continue_()
        else:
            held.append(route)

    page.route("**/play", hold)
    page.goto(f"{visitor.url}/web/#race?task=3&seed=5")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".readings")).to_contain_text(re.compile("[2-9] of 200"))
    expect(page.locator("#panel-race canvas")).to_have_count(0)
    assert len(held) == 2  # the library, and the first of the players: the others wait for it
    page.unroute("**/play")
    for route in held:
        route.continue_()
    expect(page.locator("#panel-race .stage figure.chart canvas")).to_have_count(6, timeout=PATIENCE_MS)
    expect(page.locator(".score-chart canvas")).to_have_count(1)


def race_to_the_end(page: Page) -> float:
    """Press start, wait for the verdict, and return the score it names."""
    page.get_by_label("Speed").select_option("1000")
    page.get_by_role("button", name="Start the race").click()
    verdict = page.locator(".result h2")
    expect(verdict).to_be_visible(timeout=PATIENCE_MS)
    return float(verdict.locator("strong").inner_text())


# ---------------------------------------------------------------- the race


def test_a_stranger_sees_charts_of_real_episodes_before_touching_anything(visit: Visit, server: RunningServer) -> None:
    page = visit().open()
    expect(page.locator("#panel-race .stage figure.chart canvas")).to_have_count(6)
    policies = server.get("/policies", task_id=3)["policies"]
    expect(page.locator("#panel-race .strip")).to_have_count(1 + len(policies))
    expect(page.locator("#panel-race .legend label")).to_have_count(1 + len(policies))
    assert "Heuristic: now" in page.locator("#panel-race .stage figure.chart p.unseen").nth(1).text_content()


def test_a_race_is_played_with_the_keyboard_alone_and_scored_by_the_server(visit: Visit, server: RunningServer) -> None:
    page = visit().open("race?task=3&seed=5")
    page.get_by_label("Speed").select_option("25")
    slider = page.get_by_label("Batch size")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", "448")
    start = page.get_by_role("button", name="Start the race")
    start.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".readings")).to_contain_text(re.compile(r"[5-9] of 200|\d\d of 200"))
    page.get_by_label("Precision").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_label("Speed").select_option("1000")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Resume").press("Enter")
    expect(page.locator(".result h2")).to_be_visible(timeout=PATIENCE_MS)
    rivals = {name: float(score) for name, score in _scores(page).items()}
    assert rivals["Heuristic"] == _rounded(server, "heuristic", 3, 5)
    assert rivals["Best constant"] == _rounded(server, "best_static", 3, 5)
    assert rivals["Searched policy"] == _rounded(server, "best_adaptive", 3, 5)
    assert "INT8" in page.locator(".strip").first.inner_text()


def test_arrivals_are_drawn_as_they_came_and_not_as_an_average(visit: Visit, server: RunningServer) -> None:
    page = visit().open("race?task=3&seed=5")
    arrivals = server.post("/play", {"task_id": 3, "seed": 5, "agent": "heuristic"})["arrivals"]
    said = page.locator("#panel-race .stage figure.chart p.unseen").first
    expect(said).to_contain_text(f"Arrivals: now {arrivals[-1]:.0f}, highest {max(arrivals):.0f}")


def test_a_task_that_scales_has_a_sixth_slider_and_a_chart_of_replicas(visit: Visit) -> None:
    page = visit().open("race?task=autoscale&seed=5")
    replicas = page.locator("#panel-race .stage figure.chart", has_text="Replicas requested")
    expect(replicas.locator("p.unseen")).to_contain_text("Searched policy: now")
    slider = page.get_by_label("Replicas", exact=True)
    expect(slider).to_have_attribute("aria-valuetext", "3")
    expect(page.locator(".goal")).to_contain_text("Run 1 to 6 LLM servers as the load rises and falls.")
    expect(page.locator(".side h2")).to_have_text("Your sliders where Kubernetes' HPA starts, asking for 3 replicas")
    cache = page.get_by_label("KV cache")
    start = cache.get_attribute("aria-valuetext")
    for key, at in (("ArrowLeft", "95%"), ("ArrowRight", start)):
        cache.press(key)
        expect(cache).to_have_attribute("aria-valuetext", at)
    slider.fill("3")
    expect(slider).to_have_attribute("aria-valuetext", "4")
    score = race_to_the_end(page)
    expect(page.locator(".readings")).to_contain_text("4 of 4 ready")
    expect(replicas.locator("p.unseen")).to_contain_text("You: now 4, highest 4")
    link = page.url
    page.locator("#panel-race").get_by_label("Task").select_option("3")
    expect(slider).to_be_hidden()
    expect(replicas).to_have_count(0)
    again = visit().page
    again.goto(link)
    race_to_the_end(again)
    assert float(_scores(again)["Challenger"]) == score


LOOKS = "chips => chips.map((chip) => getComputedStyle(chip, '::before').borderTop)"


def test_an_autoscaling_race_is_against_autoscalers_and_names_those_that_score_nothing(
    visit: Visit, server: RunningServer
) -> None:
    page = visit().open("race?task=autoscale&seed=20261125")
    legend = page.locator("#panel-race .legend")
    for label in ("HPA", "KPA", "Planner"):
        expect(legend.get_by_label(label)).to_have_count(1)
    expect(page.locator(".goal strong")).to_have_text(f"{_rounded(server, 'hpa', 'autoscale', 20261125):.3f}")
    assert _rounded(server, "heuristic", "autoscale", 20261125) == 0.0
    expect(legend.get_by_label("Heuristic")).to_have_count(0)
    expect(legend.get_by_label("HPA")).to_be_checked()
    looks = legend.locator("label").evaluate_all(LOOKS)
    assert len(looks) == len(set(looks))
    expect(page.get_by_text("Left out, because they score 0")).to_contain_text("Heuristic")


def test_the_first_screen_names_the_score_to_beat_and_starts_with_knobs_that_serve_in_time(
    visit: Visit, server: RunningServer
) -> None:
    page = visit().open()
    seed = int(datetime.now(UTC).strftime("%Y%m%d"))
    to_beat = f"{_rounded(server, 'vllm_defaults', 3, seed):.3f}"
    point = f"Keep 6 LLM servers fast through surges. Beat {to_beat} (score from 0 to 1)"
    expect(page.locator(".goal")).to_have_text(point)
    touch_nothing = (
        f"Touch nothing and you score {to_beat} on today's traffic: your sliders are at the defaults of vLLM"
    )
    expect(page.locator(".about")).to_contain_text(touch_nothing)
    for part in (".goal", ".versus", ".score-chart canvas", "#knob-batch_size"):
        expect(page.locator(part)).to_be_in_viewport()
    expect(page.get_by_role("button", name="Start the race")).to_be_in_viewport()
    policies = [each["name"] for each in server.get("/policies", task_id=3)["policies"]]
    best = max(_rounded(server, name, 3, seed) for name in policies)
    expect(page.locator(".duel .note").first).to_have_text(
        re.compile(rf"fast, in time, cheap, steady\. .* The best here, [\w ()]+, has {best:.3f}\.$"),
        timeout=PATIENCE_MS,
    )
    page = visit().open("race?task=3&seed=5")
    page.get_by_label("Speed").select_option("25")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".readings")).to_contain_text(re.compile(r"2\d of 200"))
    page.get_by_role("button", name="Pause").click()
    missed = page.locator(".readings div", has_text="Late now").locator("dd").inner_text()
    assert int(missed.rstrip("%")) <= 10
    expect(page.locator(".lead")).to_have_text(re.compile(r"^Level\.( Left like this, you end at 0\.\d{3}\.)?$"))


def test_the_race_counts_down_to_surges_and_names_one_slider_to_move_in_lines_of_their_own(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=5")
    state, advice, batch = page.locator(".state"), page.locator(".advice"), page.get_by_label("Batch size")
    expect(page.locator(".about")).to_contain_text("At second 30, a surge brings 10 times the load.")
    expect(page.locator(".duel .note").first).to_contain_text("The best here", timeout=PATIENCE_MS)
    batch.fill("11")
    height = page.locator(".duel").bounding_box()["height"]  # type: ignore[index]
    page.get_by_role("button", name="Start the race").click()
    worth = r"\+0\.[12]\d\d by the end(: it pays from second \d+ on)?\."
    tip = re.compile(rf"^Move Batch size up \(\d+\): fewer requests wait\. {worth}$")
    expect(advice).to_have_text(tip, timeout=PATIENCE_MS)
    batch.press("ArrowRight")  # on its way, so the tip stays
    assert tip.search(advice.inner_text())
    expect(state).to_have_text(re.compile(r"^Surge in 1?\d s: 10 times the load$"), timeout=PATIENCE_MS)
    expect(state).to_have_text(re.compile(r"^Surge, 1?\d s left"), timeout=PATIENCE_MS)
    assert page.locator(".duel").bounding_box()["height"] == height  # type: ignore[index]


def test_the_page_says_where_a_move_of_a_slider_ends(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=6")
    expect(page.locator(".duel .note").first).to_contain_text("The best here", timeout=PATIENCE_MS)
    batch, marks = page.get_by_label("Batch size"), page.locator(".track .mark")
    batch.press("End")
    page.get_by_label("Precision").press("ArrowRight")
    expect(marks.locator("visible=true")).to_have_count(0)
    page.get_by_label("Speed").select_option("2")
    page.get_by_role("button", name="Start the race").click()
    lead, ends = page.locator(".lead"), r"Left like this, you end at (0\.\d{3})\.$"
    expect(lead).to_have_text(re.compile(ends), timeout=PATIENCE_MS)
    page.get_by_role("button", name="Pause").click()
    before = lead.inner_text()
    batch.press("Home")
    expect(lead).not_to_have_text(before)
    page.locator(".buttons").get_by_role("button", name="Skip to the end").click()
    forecast = re.search(ends, lead.inner_text())
    assert forecast
    expect(page.locator(".result h2 strong")).to_have_text(forecast[1], timeout=PATIENCE_MS)


def test_a_race_without_a_hand_on_the_sliders_ends_level_with_the_score_to_beat(
    visit: Visit, server: RunningServer
) -> None:
    page = visit().open("race?task=3&seed=5")
    assert race_to_the_end(page) == _rounded(server, "vllm_defaults", 3, 5)
    expect(page.locator(".result h2")).to_contain_text("Level with vLLM's defaults.")


def test_the_first_surge_stops_a_visitor_who_moved_nothing_and_the_slider_it_names_wins(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=5")
    expect(page.locator(".duel .note").first).to_contain_text("The best here", timeout=PATIENCE_MS)
    page.get_by_label("Speed").select_option("25")
    page.get_by_role("button", name="Start the race").click()
    state, advice = page.locator(".state"), page.locator(".advice")
    expect(state).to_have_text(re.compile(r"^Paused: the surge is here, \d+% late\.$"), timeout=PATIENCE_MS)
    expect(advice).to_have_text(re.compile(r"^Move Batch size up \(\d+\): .* Then press Resume\.$"))
    expect(page.locator("#announcer")).to_have_text(re.compile("^Paused: the surge is here"))
    expect(page.locator(".knob.hinted")).to_have_text(re.compile("^Batch size"))
    page.get_by_label("Batch size").press("End")
    expect(state).to_have_text("Now press Resume.")
    expect(page.locator(".knob.hinted")).to_have_count(0)
    page.locator(".buttons").get_by_role("button", name="Skip to the end").click()
    result = page.locator(".result.won")
    expect(result).to_contain_text("You beat vLLM's defaults", timeout=PATIENCE_MS)
    expect(result).to_contain_text("Next time, from the start: Precision at INT8")
    mine, defaults = (float(text) for text in page.locator(".versus .value").all_inner_texts())
    assert mine > defaults + 0.1
    page.get_by_role("button", name=re.compile("^Next: beat")).click()
    expect(page.locator(".lead")).to_have_text("Hint: Precision at INT8, from the start.")
    expect(page.locator(".knob.hinted")).to_have_text(re.compile("^Precision"))
    start = page.get_by_role("button", name="Start the race")
    expect(start).to_be_enabled(timeout=PATIENCE_MS)
    page.get_by_label("Speed").select_option("25")
    start.click()
    expect(page.locator(".readings")).to_contain_text(re.compile(r"[4-9]\d of 200"), timeout=PATIENCE_MS)


# Before each second the race waits for the hint that is being sought; the one that is shown is obeyed, once
# `window.obeyed` is an array. So a race depends on its own clock alone, however slow the machine is.
OBEY = """
() => {
  let sought = 0;
  const obey = () => {
    const knob = document.querySelector(".knob.hinted"), advice = document.querySelector(".advice").textContent;
    const [hint, way, value] = advice.match(/Move [A-Z][a-zA-Z ]* (up|down) \\((.*?)\\)/) ?? [];
    if (!knob || !hint) return;
    const slider = knob.querySelector("input"), output = knob.querySelector("output");
    for (let moved = 0; output.textContent !== value && moved < 99; moved++) {
      slider.value = String(slider.valueAsNumber + (way === "up" ? 1 : -1));
      slider.dispatchEvent(new Event("input", { bubbles: true }));
    }
    window.obeyed.push(hint);
  };
  const ask = window.fetch;
  window.fetch = async (url, options) => {
    if (url.endsWith("/reset/batch")) sought++;
    while (url.endsWith("/step") && sought) await new Promise((resume) => setTimeout(resume, 5));
    if (url.endsWith("/step") && window.obeyed) obey();
    const answer = await ask(url, options);
    if (url.endsWith("/close/batch")) sought--;
    return answer;
  };
}
"""


@pytest.mark.parametrize(
    ("task", "seed", "gain"),
    [
        ("autoscale", 20261128, 0.85),
        ("autoscale-azure", 20261126, 0.5),
        ("fleet-mix", 20261202, 0.3),
        ("2", 5, 0.1),
        ("3", 5, 0.1),
    ],
)
def test_a_visitor_who_obeys_every_hint_beats_the_score_to_beat_and_one_who_moves_nothing(
    visit: Visit, task: str, seed: int, gain: float
) -> None:
    page = visit().open(f"race?task={task}&seed={seed}")
    page.evaluate(OBEY)
    untouched = race_to_the_end(page)
    to_beat = float(page.locator(".goal strong").inner_text())
    page.evaluate("() => { window.obeyed = []; }")
    page.get_by_role("button", name="Play again").click()
    page.get_by_label("Speed").select_option("25")
    expect(page.locator(".result h2")).to_have_count(0)
    expect(page.locator(".result h2")).to_be_visible(timeout=PATIENCE_MS)
    score = float(page.locator(".result h2 strong").inner_text())
    assert score > to_beat
    assert score >= untouched + gain
    obeyed = page.evaluate("() => window.obeyed")
    assert obeyed
    if gain < 0.3:  # tasks that do not scale: each slider is moved once, and no hint takes back another
        sliders = [re.match(r"Move (.*?) (up|down) ", hint)[1] for hint in obeyed]  # type: ignore[index]
        assert len(sliders) == len(set(sliders))


def test_a_race_warns_of_an_overload_while_it_lasts(visit: Visit) -> None:
    page = visit().open("race?task=autoscale&seed=20261126")
    expect(page.locator(".duel .note").first).to_contain_text("The best here", timeout=PATIENCE_MS)
    page.get_by_label("Speed").select_option("25")
    page.get_by_label("Replicas", exact=True).fill("0")
    page.get_by_role("button", name="Start the race").click()
    warning = re.compile(r"^Overloaded, \d+ s: \d+% late, score −0\.\d\d$")
    expect(page.locator(".state")).to_have_text(warning, timeout=PATIENCE_MS)
    expect(page.locator("#announcer")).to_contain_text("of the requests are late.")
    tip = r"(Move Replicas up \(\d\): the load needs|From here even the best policy ends at 0: press Start)"
    expect(page.locator(".advice")).to_have_text(re.compile(tip), timeout=PATIENCE_MS)


@pytest.mark.parametrize(
    ("task", "knob", "told"),
    [
        (
            "1",
            {"Batch size": "3"},
            r"Most was lost on speed \(0\.\d+\): [\d.]+k? tokens/s; the .*: [\d.]+k? tokens",
        ),
        (
            "2",
            {"Batch size": "18"},
            r"Most was lost on slow first tokens \(0\.\d+\): a mean of \d+ ms; the .*: a mean of \d+ ms\.",
        ),
        ("3", {}, r"From second \d+ to \d+, \d+% of the requests were late \(score −0\.\d+\)\."),
    ],
)
def test_a_result_says_on_what_most_of_the_score_was_lost(
    visit: Visit, task: str, knob: dict[str, str], told: str
) -> None:
    page = visit().open(f"race?task={task}&seed=5")
    for name, position in knob.items():
        page.get_by_label(name).fill(position)
    race_to_the_end(page)
    assert re.search(told, page.locator(".result").inner_text())


def test_hints_send_what_stays_once(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=5")
    expect(page.locator(".duel .note").first).to_contain_text("The best here", timeout=PATIENCE_MS)
    page.get_by_label("Speed").select_option("25")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or "") if "/step/batch" in request.url else None)
    with page.expect_request("**/close/batch"):
        page.get_by_role("button", name="Start the race").click()
    assert max(json.loads(body)["repeat"] for body in sent) > 20
    assert sum(map(len, sent)) < 20_000  # every second's actions of all runs take more than 50,000


def test_nobody_races_against_a_score_of_nothing(visit: Visit, server: RunningServer) -> None:
    assert server.post("/play", {"task_id": "fleet-mix", "seed": 20261202, "agent": "hpa"})["score"] == 0
    kpa = server.post("/play", {"task_id": "fleet-mix", "seed": 20261202, "agent": "kpa"})["score"]
    page = visit().open("race?task=fleet-mix&seed=20261202")
    expect(page.locator(".goal strong")).to_have_text(f"{kpa:.3f}")
    expect(page.locator(".about")).to_contain_text("That is the score of Knative's KPA")


def test_a_load_on_which_nobody_has_to_adapt_is_named(visit: Visit) -> None:
    page = visit().open("race?task=fleet-mix&seed=20261126")
    told = re.compile("load a constant setting wins, that of vLLM's defaults: nobody has to adapt")
    expect(page.locator(".about")).to_contain_text(told, timeout=PATIENCE_MS)
    expect(page.locator(".about")).not_to_contain_text("move Replicas before")
    race_to_the_end(page)
    expect(page.locator(".result")).to_contain_text(told)


def test_going_back_finds_the_result_as_it_was(visit: Visit) -> None:
    page = visit().open("race?task=1&seed=6")
    race_to_the_end(page)
    result = page.locator(".result").inner_text()
    page.get_by_role("button", name="Verify it").click()
    expect(page.locator("#panel-verify h2.good")).to_be_visible(timeout=PATIENCE_MS)
    page.go_back()
    expect(page.locator(".result")).to_be_visible()
    assert page.locator(".result").inner_text() == result
    assert "Challenger" not in _scores(page)
    expect(page.get_by_role("button", name="Download the log")).to_be_visible()


def test_a_task_that_could_not_be_loaded_is_loaded_when_the_server_is_back(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed_errors.append("net::ERR_INTERNET_DISCONNECTED")
    page = visitor.open("race?task=3&seed=5")
    page.context.set_offline(True)
    page.get_by_label("Task").select_option("h200-70b")
    expect(page.get_by_role("alert")).to_contain_text("the page tries again by itself")
    expect(page.locator(".goal")).to_have_text("Loading the race …")
    expect(page.locator(".about")).to_be_empty()
    page.context.set_offline(False)
    expect(page.get_by_role("button", name="Start the race")).to_be_enabled(timeout=PATIENCE_MS)
    expect(page.locator(".goal")).to_contain_text("Beat 0.")
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("task=3&seed=99999999999999999999", "seed, 99999999999999999999, is not a whole number from 0 to"),
        ("task=3&seed=5&beat=0.9", "names a score but no run that has it"),
    ],
)
def test_a_link_that_is_not_followed_says_so(visit: Visit, link: str, told: str) -> None:
    page = visit().open(f"race?{link}")
    expect(page.get_by_role("alert")).to_contain_text(told)


FLOODED = """
() => {
  const canvas = document.querySelector(".score-chart canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const [r, g, b] = [0xfd, 0xec, 0xcd];
  let found = 0;
  for (let i = 0; i < data.length; i += 4) found += data[i] === r && data[i + 1] === g && data[i + 2] === b;
  return found;
}
"""


def test_only_floods_that_a_task_announces_are_shaded_before_they_come_and_a_score_of_0_is_explained(
    visit: Visit, server: RunningServer, tmp_path: Path
) -> None:
    assert "burst" in server.post("/play", {"task_id": "autoscale", "seed": 20261126, "agent": "hpa"})["phase"]
    page = visit().open("race?task=3&seed=5")
    assert page.evaluate(FLOODED) > 0
    visitor = visit()
    visitor.allowed_errors.append("Canvas2D: Multiple readback operations")
    page = visitor.open("race?task=autoscale&seed=20261126")
    assert page.evaluate(FLOODED) == 0
    assert race_to_the_end(page) == 0.0
    assert page.evaluate(FLOODED) > 0
    expect(page.locator(".result")).to_contain_text(
        re.compile(r"Next time, from the start: Replicas at \d, the others")
    )
    expect(page.get_by_role("button", name="Challenge a friend")).to_have_count(0)  # there is nothing to beat
    # 4,050 violations, a tenth of the load, cost half of the score, and as many again the other half.
    told = page.locator(".result").inner_text()
    behind = (
        r"Place \d+ of \d+, behind .+: late requests cost more than everything else earned, as the table below shows\."
    )
    assert re.search(behind, told)
    late = re.search(r"From second (\d+) to (\d+), (\d+)% of the requests were late \(score −([\d.]+)\)\.", told)
    assert late
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download the log").click()
    waiting.value.save_as(tmp_path / "log.json")
    seconds = json.loads((tmp_path / "log.json").read_text())["episode_log"][int(late[1]) - 1 : int(late[2])]
    violations = sum(entry["metrics"]["slo_violations"] for entry in seconds)
    assert float(late[4]) == pytest.approx(min(1.0, 0.5 * violations / 4_050), abs=0.01)
    raised = re.search(r"Do first: ask for (\d) replicas by second (\d+), as the [\w ]+ did; you had (\d)\.", told)
    assert raised
    assert int(raised[1]) > int(raised[3])
    assert int(raised[2]) <= int(late[2])


@pytest.mark.parametrize("tab", ["race", "rollouts"])
def test_a_seed_that_is_none_is_refused_when_its_field_is_left(visit: Visit, tab: str) -> None:
    page = visit().open(f"{tab}?seed=5")
    panel = page.locator(f"#panel-{tab}")
    start = panel.locator("button.main").first
    expect(start).to_be_enabled(timeout=PATIENCE_MS)
    panel.get_by_label("Seed", exact=True).fill("-5")
    page.keyboard.press("Tab")
    expect(page.get_by_role("alert")).to_contain_text("The seed must be a whole number from 0 to 9007199254740991.")
    expect(start).to_be_disabled()
    panel.get_by_label("Seed", exact=True).fill("6")
    page.keyboard.press("Tab")
    expect(start).to_be_enabled(timeout=PATIENCE_MS)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_start_button_says_why_it_is_not_ready(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    held: list[Route] = []
    released = False
    page.route("**/play", lambda route: route.continue_() if released else held.append(route))
    page.goto(f"{visitor.url}/web/")
    button = page.locator(".duel .main")
    expect(button).to_have_text("Loading the race …")
    page.wait_for_selector("#panel-race .controls")
    expect(button).to_have_text("Loading the race …")
    expect(button).to_be_disabled()
    released = True
    for route in held:
        route.continue_()
    expect(button).to_have_text("Start the race", timeout=PATIENCE_MS)
    expect(button).to_be_enabled()


def test_the_score_so_far_of_both_players_is_the_servers(visit: Visit, server: RunningServer) -> None:
    page = visit().open("race?task=1&seed=5")
    score = race_to_the_end(page)
    you, other = page.locator(".versus .value").all_inner_texts()
    played = server.post("/play", {"task_id": 1, "seed": 5, "agent": "vllm_defaults"})
    assert (float(you), float(other)) == (score, round(played["score_so_far"][-1], 3))
    assert played["score_so_far"][-1] == pytest.approx(played["score"], abs=1e-9)


def test_a_reload_takes_the_run_up_where_it_was(visit: Visit) -> None:
    page = visit().open("race?task=1&seed=6")
    page.get_by_label("Batch size").fill("13")
    sessions: list[str] = []
    page.on("request", lambda r: sessions.append(r.post_data_json["session_id"]) if r.url.endswith("/step") else None)
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".readings")).to_contain_text(re.compile(r"\d\d of 200"))
    page.reload()
    page.wait_for_selector("#panel-race[data-ready=yes]")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.get_by_label("Batch size")).to_have_attribute("aria-valuetext", "192")
    page.get_by_label("Speed").select_option("1000")
    expect(page.locator(".result h2")).to_be_visible(timeout=PATIENCE_MS)
    assert len(set(sessions)) == 1
    page.get_by_role("button", name="Verify it").click()
    expect(page.locator("#panel-verify h2.good")).to_contain_text("Verified: all 200 seconds")


def test_a_reload_keeps_the_result_the_opponent_and_what_is_said_of_the_sliders(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=6")
    page.get_by_label("Batch size").press("End")
    score = race_to_the_end(page)
    result = page.locator(".result")
    expect(result).to_contain_text("Next time, from the start: ", timeout=PATIENCE_MS)
    before = result.inner_text(), page.locator(".places").inner_text()
    page.reload()
    expect(result).to_contain_text("Next time, from the start: ", timeout=PATIENCE_MS)
    assert (result.inner_text(), page.locator(".places").inner_text()) == before
    assert "Challenger" not in _scores(page)
    page.get_by_role("button", name=re.compile("^Next: beat")).click()
    goal = page.locator(".goal")
    start = page.get_by_role("button", name="Start the race")
    expect(start).to_be_enabled(timeout=PATIENCE_MS)
    to_beat = goal.inner_text()
    assert float(goal.locator("strong").inner_text()) > score
    page.get_by_label("Speed").select_option("2")
    start.click()
    expect(page.locator(".readings")).to_contain_text(re.compile("[2-9] of 200"))
    page.reload()
    expect(page.get_by_role("button", name="Pause")).to_be_visible(timeout=PATIENCE_MS)
    expect(goal).to_have_text(to_beat)
    page.get_by_role("button", name="Start over").click()
    expect(page.locator(".side h2")).to_have_text("Your sliders as you left them")
    expect(goal).to_have_text(to_beat)


def test_advice_after_a_race_gains_what_it_says_if_it_is_followed(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=6")
    page.get_by_label("Batch size").press("End")
    score = race_to_the_end(page)
    result = page.locator(".result")
    expect(result).to_contain_text("Precision at INT8, the others as now", timeout=PATIENCE_MS)
    advice = re.search(r"Precision at INT8, the others as now \(score (0\.\d{3})\)\.", result.inner_text())
    assert advice
    page.get_by_label("Precision").press("ArrowRight")
    page.get_by_role("button", name="Play again").click()
    expect(result).to_be_empty()
    expect(result).to_contain_text("Next time, from the start: ", timeout=PATIENCE_MS)
    assert float(result.locator("h2 strong").inner_text()) == float(advice[1]) > score
    page = visit().open("race?task=1&seed=6")
    with page.expect_response("**/close/batch"):
        race_to_the_end(page)
    expect(page.locator(".result")).not_to_contain_text("Next time")


SLOW_STEPS = """
const real = window.fetch;
window.fetch = async (...call) => {
  if (String(call[0]).endsWith("step")) await new Promise((resolve) => setTimeout(resolve, 300));
  return real(...call);
};
"""


def test_racing_again_keeps_the_sliders_and_a_button_brings_the_defaults_back(visit: Visit) -> None:
    page = visit().open("race?task=1&seed=6")
    batch = page.get_by_label("Batch size")
    batch.fill("13")
    race_to_the_end(page)
    page.get_by_role("button", name="Play again").click()
    with page.expect_request("**/step") as sent:
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
    assert sent.value.post_data_json["action"]["batch_size"] == 192
    expect(batch).to_have_attribute("aria-valuetext", "192")
    page.get_by_role("button", name="vLLM's defaults").click()
    expect(batch).to_have_attribute("aria-valuetext", "256")
    batch.fill("13")
    page.locator("#panel-race").get_by_label("Task").select_option("3")
    expect(page.locator(".side h2")).to_have_text("Your sliders at vLLM's defaults")
    expect(batch).to_have_attribute("aria-valuetext", "256")


@pytest.mark.parametrize("size", [{"width": 1024, "height": 768}, PHONE], ids=["small desktop", "phone"])
def test_after_a_race_the_score_and_the_next_one_are_in_view_wherever_one_has_scrolled(
    visit: Visit, size: dict[str, int]
) -> None:
    page = visit(viewport=size).open("race?task=1&seed=6")
    race_to_the_end(page)
    again = page.get_by_role("button", name="Play again")
    expect(page.locator(".result h2 strong")).to_be_in_viewport(ratio=1)
    expect(again).to_be_in_viewport(ratio=1)
    page.evaluate("() => scrollTo(0, document.body.scrollHeight)")
    again.evaluate("button => button.click()")  # a pointer or a key would scroll to it
    for part in (".goal", ".versus", ".score-chart canvas"):
        expect(page.locator(part)).to_be_in_viewport(ratio=1)


def test_going_on_while_a_second_is_still_on_its_way_plays_each_second_once(visit: Visit) -> None:
    visitor = visit()
    visitor.page.add_init_script(SLOW_STEPS)
    page = visitor.open("race?task=3&seed=5")
    steps: list[int] = []
    page.on("request", lambda request: steps.append(request.post_data_json["step"]) if "/step" in request.url else None)
    page.get_by_label("Speed").select_option("1000")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".readings")).to_contain_text(re.compile("Second ?[1-9]"))
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".readings")).to_contain_text(re.compile(r"Second ?\d\d"))
    page.get_by_role("button", name="Pause").click()
    assert len(steps) >= 10
    assert steps == sorted(set(steps))


def _scores(page: Page) -> dict[str, str]:
    rows = page.locator(".places tbody tr")
    return {
        rows.nth(i).locator("th").inner_text().strip(): rows.nth(i).locator("td.strong span").inner_text()
        for i in range(rows.count())
    }


def _rounded(server: RunningServer, agent: str, task_id: int | str, seed: int) -> float:
    return round(float(server.post("/play", {"task_id": task_id, "seed": seed, "agent": agent})["score"]), 3)


def test_the_page_says_what_it_is_on_a_phone_too(visit: Visit) -> None:
    page = visit(viewport=PHONE).open()
    expect(page.locator("header")).to_contain_text("Train and test policies that run simulated LLM servers")
    expect(page.locator(".brand p")).to_be_visible()


def test_a_race_and_its_verdict_name_sliders_and_parts_of_the_score_in_words(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=5")
    race_to_the_end(page)
    page.get_by_text("How the score is computed").click()
    weighed = "40% fast: tokens written per second; 30% in time: how few requests were late"
    expect(page.get_by_text(weighed)).to_be_visible()
    for part in (".duel .note", ".places"):
        assert "in time" in page.locator(part).first.text_content()
    for part in (".duel .note", ".places", ".result"):
        text = page.locator(part).first.inner_text()
        assert not re.search(r"\bslo\b|batch_size|kv_budget", text)


def test_memory_is_red_only_where_the_score_counts_it_and_then_names_the_limit(visit: Visit) -> None:
    def memory(task: int) -> str:
        page = visit().open(f"race?task={task}&seed=5")
        page.get_by_label("Batch size").fill("18")
        race_to_the_end(page)
        row = page.locator(".readings div", has_text="Memory")
        return f"{row.get_attribute('class')} {row.locator('dd').inner_text()}"

    assert re.fullmatch(r"bad \d+\.\d GB, over the limit of 36 GB", memory(2))
    assert re.fullmatch(r"( \d+\.\d GB|bad \d+\.\d GB, out of memory)", memory(3))


def test_a_friend_who_gets_the_link_to_a_run_plays_against_it(visit: Visit, server: RunningServer) -> None:
    first = visit().open("race?task=1&seed=8")
    first.get_by_label("Batch size").fill("6")
    score = race_to_the_end(first)
    link = first.url
    assert "task=1&" in link
    assert link.endswith("you=0a913-0-24-0-0")
    assert link.count("beat=") == 1
    preview = httpx.get(link).text
    assert f'property="og:title" content="Beat my {score:.3f} at' in preview
    second = visit().page
    second.goto(link)
    expect(second.locator(".goal strong")).to_have_text(f"{score:.3f}")
    expect(second.locator(".about")).to_contain_text(
        "Your challenger moved 1 slider once (shown after your race). You start at vLLM's defaults."
    )
    expect(second.get_by_label("Batch size")).to_have_attribute("aria-valuetext", "256")
    expect(second.locator(".versus .value").last).to_have_text(f"{score:.3f}")
    curve = second.locator(".score-chart p.unseen")
    expect(curve).to_contain_text(f"Challenger: now {score:.3g}", timeout=PATIENCE_MS)
    second.get_by_label("Batch size").fill(second.get_by_label("Batch size").get_attribute("max") or "")
    assert race_to_the_end(second) > score
    expect(second.locator(".result h2")).to_contain_text(f"You beat your challenger: {score:.3f}.")
    assert float(_scores(second)["Challenger"]) == score


def test_a_friend_sees_the_moves_of_the_challenger_after_the_race_alone(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=1&you=0.913-0-320-0-0_20.--512_60.----1_90.--384")
    told = "Your challenger moved 2 sliders 4 times (shown after your race). You start at vLLM's defaults."
    expect(page.locator(".about")).to_contain_text(told)
    expect(page.get_by_label("Batch size")).to_have_attribute("aria-valuetext", "256")
    moves = page.locator(".strip", has_text="Challenger")
    page.get_by_label("Speed").select_option("25")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".strip", has_text="You")).to_be_visible(timeout=PATIENCE_MS)
    expect(moves).to_be_hidden()
    page.get_by_label("Speed").select_option("1000")
    expect(moves).to_be_visible(timeout=PATIENCE_MS)


def test_a_forged_score_of_a_link_gives_way_to_what_its_run_scores(visit: Visit) -> None:
    first = visit().open("race?task=3&seed=8")
    score = race_to_the_end(first)
    assert first.url.endswith("#race?seed=8&you=0a913-0-256-0-0")  # the first task, and no slider was moved
    second = visit().page
    second.goto(re.sub(r"beat=[\d.]+", "beat=0.300", first.url))
    expect(second.locator(".goal strong")).to_have_text(f"{score:.3f}", timeout=PATIENCE_MS)
    assert race_to_the_end(second) == score
    expect(second.locator(".score-chart p.unseen")).to_contain_text(f"to beat {score:.3g}")
    mine, theirs = (second.locator(".places tr", has_text=name).locator("td").first for name in ("You", "Challenger"))
    assert mine.inner_text() == theirs.inner_text()


def test_a_result_names_one_slider_to_move_and_is_shared_with_the_link(visit: Visit) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"]).open("race?task=3&seed=8")
    race_to_the_end(page)
    result, friend = page.locator(".result"), page.get_by_role("button", name="Challenge a friend")
    expect(result).to_contain_text("Next time, from the start: Batch size at ")
    main = page.locator(".duel button.main:not(:text('Play again'))")
    expect(main).to_have_text("Try this")
    expect(friend).to_have_count(0)  # a friend who moves nothing would be level
    main.click()
    expect(result.locator("h2")).to_be_visible(timeout=PATIENCE_MS)
    score = float(result.locator("h2 strong").inner_text())
    expect(main).to_have_text(re.compile("^Next: beat "))
    friend.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    expect(page.locator(".copied .square")).to_have_count(12)
    shared = page.evaluate("() => navigator.clipboard.readText()")
    assert f"I scored {score:.3f} at running a fleet of LLM servers" in shared
    assert re.search("[🟩🟥]{10}", shared)
    assert page.url in shared
    assert "\n(🟩 in time, 🟥 late)\n" in shared
    expect(page.locator(".copied")).to_contain_text(page.url)


def test_a_race_that_a_slow_connection_holds_back_says_how_fast_it_runs(visit: Visit) -> None:
    visitor = visit()
    visitor.page.add_init_script(SLOW_STEPS.replace("300", "1000"))
    page = visitor.open("race?task=3&seed=5")
    page.get_by_role("button", name="Start the race").click()
    note = page.locator(".duel .note").first
    expect(note).to_have_text(
        re.compile(r"^Running at 0\.\d+×: the server or the connection allows no more\. "), timeout=PATIENCE_MS
    )
    page.get_by_role("button", name="Pause").click()
    expect(note).not_to_contain_text("Running at")


def test_a_link_that_holds_no_run_says_so(visit: Visit) -> None:
    page = visit().open("race?task=1&seed=8&you=nonsense")
    expect(page.get_by_role("alert")).to_contain_text("does not contain a valid run")


def test_the_page_says_which_tasks_are_static(visit: Visit) -> None:
    page = visit().open("race?task=2&seed=3")
    expect(page.locator(".about")).to_contain_text("Here one good setting is enough for the whole race.")
    tasks = page.locator("#panel-race").get_by_label("Task")
    adaptive, static = (tasks.locator("optgroup").nth(i).locator("option").all_text_contents() for i in range(2))
    assert {"Bursty ShareGPT", "Azure Code (recorded)", "Static Uniform (warm-up)"} <= {
        each.split(":")[0] for each in static
    }
    assert "Adversarial Multi-Tenant: three tenants on one fleet" in adaptive


def test_the_log_of_a_race_is_downloaded_and_verified(visit: Visit, tmp_path: Path) -> None:
    page = visit().open("race?task=2&seed=3")
    score = race_to_the_end(page)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download the log").click()
    waiting.value.save_as(tmp_path / "log.json")
    log = json.loads((tmp_path / "log.json").read_text())
    assert (log["task_id"], log["seed"], len(log["episode_log"])) == (2, 3, 200)
    page.get_by_role("button", name="Verify it").click()
    expect(page.locator("#panel-verify h2.good")).to_contain_text("Verified: all 200 seconds")
    expect(page.locator("#panel-verify td.strong")).to_contain_text(f"{score:.3f}")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_lost_server_is_reported_and_the_race_goes_on_by_itself_when_it_is_back(
    visit: Visit, size: dict[str, int]
) -> None:
    visitor = visit(viewport=size)
    visitor.allowed_errors.append("ERR_FAILED")
    page = visitor.open("race?task=1&seed=1")
    page.get_by_label("Speed").select_option("25")

    def cut(route: Route) -> None:
        route.abort()

    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".readings")).to_contain_text(re.compile(r"[1-9] of 200"))
    page.route("**/*", cut)
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(page.get_by_role("alert")).to_be_in_viewport()
    expect(page.get_by_role("alert")).to_contain_text("the race goes on by itself")
    expect(page.get_by_role("button", name="Try now")).to_be_visible()
    page.get_by_label("Speed").select_option("1000")
    page.unroute("**/*", cut)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".result h2")).to_be_visible(timeout=PATIENCE_MS)


def test_a_line_is_hidden_with_its_strip(visit: Visit) -> None:
    page = visit().open()
    shown = page.locator("#panel-race .strip:visible")
    expect(shown).to_have_count(0)
    page.get_by_role("button", name="Start the race").click()
    expect(shown).to_have_count(1)  # the others' decisions would be the answer
    page.get_by_label("Speed").select_option("1000")
    expect(page.locator(".result h2")).to_be_visible(timeout=PATIENCE_MS)
    before = shown.count()
    assert before > 1
    page.locator("#panel-race .legend summary").click()
    page.locator("#panel-race .legend").get_by_label("Heuristic").uncheck()
    expect(shown).to_have_count(before - 1)


# ---------------------------------------------------------------- verify


def test_a_forged_log_is_shown_where_it_breaks(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open("verify")
    page.get_by_role("button", name="A forged log").click()
    expect(page.locator("#panel-verify h2.bad")).to_have_text("Forged: first difference at second 101")
    expect(page.locator("#panel-verify mark")).to_have_count(1)
    said = re.compile(
        r"^metrics\.tokens_per_sec is 6144 in the log\. Replaying its actions gives 5119\.88\. All numbers"
    )
    expect(page.locator("#panel-verify p", has_text=said)).to_have_count(1)
    expect(page.locator("#panel-verify figure.chart")).to_have_count(3)
    page.locator("#panel-verify textarea").fill('{"task_id": 3, "seed": 1, "episode_log": [{"timestep": 1}]}')
    page.get_by_role("button", name="Replay and grade").click()
    expect(page.locator("#panel-verify h2.bad")).to_have_text("Refused")
    expect(page.locator("#panel-verify figure.chart")).to_have_count(0)


def test_a_genuine_log_is_verified_from_a_file(visit: Visit, server: RunningServer, tmp_path: Path) -> None:
    played = server.post("/play", {"task_id": 3, "seed": 4, "agent": "best_adaptive", "log": True})
    log = tmp_path / "log.json"
    log.write_text(json.dumps({"task_id": 3, "seed": 4, "episode_log": played["episode_log"]}))
    page = visit().open("verify")
    page.locator("#panel-verify input[type=file]").set_input_files(log)
    expect(page.locator("#panel-verify textarea")).to_have_value(re.compile("episode_log"))
    page.get_by_role("button", name="Replay and grade").click()
    expect(page.locator("#panel-verify h2.good")).to_contain_text("every number agrees")
    expect(page.locator("#panel-verify td.strong")).to_contain_text(f"{played['score']:.3f}")


def test_a_traffic_log_is_verified_too(visit: Visit, server: RunningServer) -> None:
    played = server.post("/traffic/play", {"task_id": "task_medium", "agent": "adaptive", "log": True})
    page = visit().open("verify")
    text = json.dumps({"task_id": "task_medium", "seed": played["seed"], "episode_log": played["episode_log"]})
    page.locator("#panel-verify textarea").fill(text)
    page.get_by_role("button", name="Replay and grade").click()
    expect(page.locator("#panel-verify h2.good")).to_contain_text("all 40 seconds")


def test_a_log_of_a_task_that_the_server_does_not_have_says_so(visit: Visit) -> None:
    page = visit().open("verify")
    page.locator("#panel-verify textarea").fill('{"task_id": 99, "seed": 4, "episode_log": [{"timestep": 1}]}')
    page.get_by_role("button", name="Replay and grade").click()
    expect(page.get_by_role("alert")).to_contain_text("The log is of task 99, which this server does not have")


def test_text_that_is_not_a_log_is_refused_in_words(visit: Visit) -> None:
    page = visit().open("verify")
    page.locator("#panel-verify textarea").fill("Hello")
    page.get_by_role("button", name="Replay and grade").click()
    expect(page.get_by_role("alert")).to_contain_text("This is not an episode log")


# ---------------------------------------------------------------- your trace


def unfold(page: Page) -> None:
    """Open the folded parts of a result."""
    for summary in page.locator("[role=tabpanel]:visible .fold > summary").all():
        summary.click()


def test_a_dropped_log_gets_a_report_and_settings_for_an_engine(visit: Visit, tmp_path: Path) -> None:
    rows = "".join(f"{0.4 * i:.1f},{150 + i},{60},{i // 2}\n" for i in range(60))
    log = tmp_path / "mine.csv"
    log.write_text("arrival_s,prompt_tokens,output_tokens,request_id\n" + rows)
    page = visit().open("trace")
    page.locator("#panel-trace input[type=file]").set_input_files(log)
    page.get_by_label("Fixed batch size").fill("4")
    page.get_by_role("button", name="Compare policies").click()
    # One policy, the visitor's configuration and the best constants in any precision and in the visitor's.
    names = page.locator("#panel-trace table").first.locator("tbody th")
    # Policies with the same figures share a row.
    expect(names.locator(".chip")).to_have_count(4, timeout=PATIENCE_MS)
    expect(names.filter(has_text=re.compile(r"in INT\d, not your FP16$")).first).to_contain_text("Best constant")
    expect(names.filter(has_text="Best constant in your precision")).to_have_count(1)
    figures = page.locator("#panel-trace table").first.locator("tbody tr").all_inner_texts()
    assert len({figure.partition("\t")[2] for figure in figures}) == len(figures)
    expect(page.locator("#panel-trace")).to_contain_text("60 requests in 24 s")
    expect(page.locator("#panel-trace details[open]")).to_have_count(0)
    unfold(page)
    expect(page.locator("#panel-trace figure.chart canvas")).to_have_count(4)
    twice = re.compile("^60 requests share their request_id with another one, .*; all of them count$")
    expect(page.locator("#panel-trace .fold p", has_text=twice)).to_have_count(1)
    page.get_by_label("Policy", exact=True).select_option("fixed")
    expect(page.locator("#panel-trace pre")).to_contain_text("max-num-seqs: 4")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download", exact=True).click()
    assert "max-num-seqs: 4" in Path(waiting.value.path()).read_text()


def test_the_example_is_played_on_the_fleet_of_a_task_with_its_stored_policies(visit: Visit) -> None:
    page = visit().open("trace")
    page.get_by_role("button", name="Load an example").click()
    expect(page.locator("#panel-trace textarea")).to_have_value(re.compile("arrival_s"))
    page.get_by_label("Fleet and objectives").select_option("azure-conv")
    page.locator("#panel-trace fieldset").get_by_label("Best constant").check()
    page.get_by_role("button", name="Compare policies").click()
    expect(page.locator("#panel-trace table").first).to_contain_text("Best constant", timeout=PATIENCE_MS)
    unfold(page)
    assert objections(page) == []


@pytest.mark.parametrize(
    ("batch", "first", "against"),
    [
        (
            "4",
            r"Set FP16, batch \d+, KV [\d.]+: [\d.]+% of the requests get their first token after ",
            "with your configuration.",
        ),
        (
            "64",
            r"Keep your configuration \(FP16, batch 64, KV 1\): all requests get their first token within ",
            "500 ms.",
        ),
    ],
)
def test_a_comparison_begins_with_the_setting_to_choose(visit: Visit, batch: str, first: str, against: str) -> None:
    rows = "".join(f"{0.1 * i:.1f},{150 + i},{60}\n" for i in range(200))
    page = visit().open("trace")
    page.locator("#panel-trace textarea").fill("arrival_s,prompt_tokens,output_tokens\n" + rows)
    page.get_by_label("Fixed batch size").fill(batch)
    page.get_by_label("KV cache").fill("1")
    page.get_by_role("button", name="Compare policies").click()
    verdict = page.locator("#panel-trace .verdict")
    expect(verdict).to_contain_text(re.compile("^" + first), timeout=PATIENCE_MS)
    expect(verdict).to_contain_text(against)
    why = "The difference is real, not noise: 95% interval " if first.startswith("Set") else "This meets the objective"
    expect(verdict.locator("+ p")).to_contain_text(why)


def test_a_form_that_was_not_edited_compares_with_vllms_defaults_and_says_so(visit: Visit) -> None:
    rows = "".join(f"{0.5 * i:.1f},{150 + 5 * i},{60 + i}\n" for i in range(200))
    page = visit().open("trace")
    page.locator("#panel-trace textarea").fill("arrival_s,prompt_tokens,output_tokens\n" + rows)
    page.locator("#panel-trace fieldset").get_by_label("Hill climbing").check()
    with page.expect_request("**/shadow") as sent:
        page.get_by_role("button", name="Compare policies").click()
    assert "fixed" not in sent.value.post_data_json
    verdict = page.locator("#panel-trace .verdict")
    expect(verdict).to_contain_text("vLLM's defaults", timeout=PATIENCE_MS)
    assert "your configuration" not in verdict.inner_text()
    rows_shown = page.locator("#panel-trace table").first.locator("tbody tr")
    expect(rows_shown.first.locator(".chip").first).to_have_text("vLLM's defaults")
    # Hill climbing leaves requests unanswered: its percentile is that of the others, and says so.
    late, unfinished, p99 = rows_shown.filter(has_text="Hill climbing").locator("td").all_inner_texts()[:3]
    assert float(late.rstrip("%")) > 1
    assert float(unfinished.rstrip("%")) > 1
    assert re.fullmatch(r"[\d.]+k?, if answered", p99)


def test_a_log_that_cannot_be_read_is_refused_with_line_and_column(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open("trace")
    page.locator("#panel-trace textarea").fill("arrival_s,prompt_tokens,output_tokens\n0,10,10\nsoon,10,10\n")
    page.get_by_role("button", name="Compare policies").click()
    said = "Your text, line 3: arrival_s='soon' is not a number"
    expect(page.get_by_role("alert")).to_contain_text(said, timeout=PATIENCE_MS)


@pytest.mark.parametrize(("tab", "path", "start"), [("plan", "plan", "Make a plan"), ("trace", "shadow", "Compare")])
def test_rows_that_cannot_be_read_are_left_out_by_a_box_and_the_result_counts_them(
    visit: Visit, tab: str, path: str, start: str
) -> None:
    visitor = visit(viewport=PHONE, is_mobile=True, has_touch=True)
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open(tab)
    panel = page.locator(f"#panel-{tab}")
    rows = "".join(f"{0.5 * i:.1f},100,20\n" for i in range(60))
    panel.locator("textarea").fill("arrival_s,prompt_tokens,output_tokens\n0,ten,-1\nsoon,10,10\n" + rows)
    panel.get_by_role("button", name=start).click()
    said = re.compile(
        r"^Your text, line 2: prompt_tokens='ten' .*; output_tokens='-1' .*; 2 rows cannot be read\. What"
    )
    expect(page.get_by_role("alert")).to_have_text(said, timeout=PATIENCE_MS)
    for box in panel.locator("fieldset.cards [type=checkbox]").all():
        box.set_checked(box.input_value() == "a100-80gb")
    panel.get_by_label("Leave out the 2 rows that cannot be read").check()
    with page.expect_request(f"**/{path}") as sent:
        panel.get_by_role("button", name="Start again").click()
    assert sent.value.post_data_json["skip_bad"] == 2
    left_out = "Rows of the log that were left out: 2 (cannot be read)."
    expect(panel.locator(".verdict ~ p", has_text=left_out)).to_be_visible(timeout=PATIENCE_MS)
    # Another log is read in full again.
    log = {"name": "b.csv", "mimeType": "text/csv", "buffer": b"arrival_s,prompt_tokens,output_tokens\n0,1,1\n"}
    panel.locator("input[type=file]").set_input_files(log)
    expect(panel.get_by_label("Leave out the 2 rows")).to_have_count(0)
    with page.expect_request(f"**/{path}") as sent:
        panel.get_by_role("button", name=start).click()
    assert "skip_bad" not in sent.value.post_data_json


def test_a_log_is_played_on_the_chosen_hardware_with_all_five_knobs_of_ones_own(visit: Visit) -> None:
    page = visit().open("trace")
    page.get_by_role("button", name="Load an example", exact=True).click()
    expect(page.locator("#panel-trace textarea")).to_have_value(re.compile("arrival_s"))
    mine = page.locator("#panel-trace fieldset", has_text="Your configuration")
    expect(mine.get_by_label("Precision").locator("option")).to_have_text(["FP16", "INT8", "INT4"])
    page.get_by_label("Hardware").select_option("h100-llama-3.1-8b")
    expect(mine.get_by_label("Precision").locator("option")).to_have_text(["BF16", "FP8"])
    mine.get_by_label("Precision").select_option("FP8")
    mine.get_by_label("Fixed batch size").fill("24")
    mine.get_by_label("KV cache").fill("0.8")
    mine.get_by_label("Draft tokens").select_option("2")
    mine.get_by_label("Prefill").select_option("separate GPUs")
    page.get_by_label("Policies may draft").select_option("yes")
    with page.expect_request("**/shadow") as sent:
        page.get_by_role("button", name="Compare policies").click()
    body = sent.value.post_data_json
    assert body["hardware"] == "h100-llama-3.1-8b"
    assert body["drafts"] is True
    knobs = {"batch_size": 24, "kv_budget": 0.8, "spec_length": 2, "prefill_disagg": True, "quant_tier": 1}
    assert body["fixed"] == knobs
    first = page.locator("#panel-trace table").first.locator("tbody tr").first
    expect(first).to_contain_text("Your configuration", timeout=PATIENCE_MS)
    expect(page.locator("#panel-trace p.note")).to_contain_text("2 × H100 SXM for every policy")
    strip = page.locator("#panel-trace .strip").first
    expect(strip).to_contain_text("KV 80% · speculate 2 · batch 24 · separate prefill · FP8")


def test_a_log_of_which_nothing_is_answered_has_dashes_in_place_of_latencies(visit: Visit) -> None:
    page = visit().open("trace")
    log = "".join(f"{second},400000,10\n" for second in range(30))
    page.locator("#panel-trace textarea").fill("arrival_s,prompt_tokens,output_tokens\n" + log)
    page.locator("#panel-trace").get_by_label("GPUs").fill("1")  # a fleet is not sized to a log that fits nowhere
    page.get_by_role("button", name="Compare policies").click()
    first = page.locator("#panel-trace table").first.locator("tbody tr").first.locator("td")
    expect(first).to_have_text(["100.0%", "100.0%", "–", "–"], timeout=PATIENCE_MS)


# ---------------------------------------------------------------- plan


def test_a_log_gets_a_plan_with_costs_a_picture_and_settings(visit: Visit) -> None:
    page = visit().open("plan")
    page.get_by_role("button", name="Load an example log").click()
    expect(page.locator("#panel-plan textarea")).to_have_value(re.compile("arrival_s"))
    for card, price in (("A100 40 GB", "1.20"), ("A100 80 GB", "1.80")):
        page.get_by_label(f"Price of {card} per GPU hour").fill(price)
    page.get_by_role("button", name="Make a plan").click()
    verdict = page.locator("#panel-plan .verdict")
    fleet = r"Rent 1 × A100 40 GB at USD 1\.20/h \(INT8, batch \d+, KV [\d.]+\): likely \(50 to 90% certain\) to meet"
    meets = r"TTFT p99 ≤ 500 ms and TPOT p50 ≤ 50 ms with llama-3\.1-8b\."
    expect(verdict).to_have_text(re.compile(f"^{fleet} {meets}$"), timeout=PATIENCE_MS)
    expect(verdict.locator("+ p")).to_have_text(
        re.compile(r"^No fleet tried \(up to \d+ GPUs\) is 90% certain: .* A100 .* GB at USD ")
    )
    rows = page.locator("#panel-plan table").first.locator("tbody tr")
    assert [text.split("\t")[-1] for text in rows.all_inner_texts()] == ["1.20", "1.80"]
    expect(rows.first).to_contain_text(re.compile(r"1 × A100 40 GBINT8, batch \d+, KV [\d.]+likelynone up to \d"))
    offer = page.locator("#panel-plan .choice")
    expect(offer).to_contain_text("Cheapest that should do")
    expect(offer).to_contain_text("USD 1.20 per hour, USD 876 per month.")
    expect(page.locator("#panel-plan details[open]")).to_have_count(0)
    unfold(page)
    expect(page.locator("#panel-plan .scroll").nth(1)).to_contain_text("USD per million tokens")
    expect(page.locator("#panel-plan li", has_text="plan with two (Replicas, at least: 2)")).to_have_count(1)
    missed = re.compile(r"With 1\.5 times .* no longer meets TTFT p99 ≤ 500 ms \(it would be 5\d\d ms\): that")
    expect(page.locator("#panel-plan li", has_text=missed)).to_have_count(1)
    notes = page.locator("#panel-plan .fold li").all_inner_texts()
    assert any(
        note.startswith("Measured / simulated, median and 90% bound, ") and "A100 40 GB at " in note for note in notes
    )
    assert [note for note in notes if re.search(r"--[a-z]|[a-z]_[a-z]|a100-40gb", note)] == []
    assert page.locator("#panel-plan svg circle").count() > 3
    page.get_by_label("For the engine").select_option("sglang")
    settings = page.locator("#panel-plan pre")
    expect(settings).to_contain_text("max-running-requests")
    expect(settings).to_contain_text("Plan: 1 x A100 40 GB, replicas: 1; TTFT p99 ≤ 500 ms, TPOT p50 ≤ 50 ms.")
    expect(settings).to_contain_text("--config sglang.yaml")
    assert objections(page) == []


def test_a_plan_without_prices_shows_latencies_and_what_may_change_it_beside_a_form_that_stays(visit: Visit) -> None:
    page = visit().open("plan")
    rows = "".join(f"{0.1 * i:.1f},{150 + i},{60}\n" for i in range(200))
    area = page.locator("#panel-plan textarea")
    area.fill("arrival_s,prompt_tokens,output_tokens\n" + rows)
    for box in page.locator("#panel-plan fieldset [type=checkbox]").all():
        box.set_checked(box.input_value() in ("a100-40gb", "a100-80gb"))
    place = "node => [node.getBoundingClientRect().left, node.clientWidth, node.clientHeight]"
    before = area.evaluate(place)
    page.get_by_role("button", name="Make a plan").click()
    plan = page.locator("#panel-plan")
    expect(plan.locator(".verdict")).to_contain_text("Rent 1 × A100 40 GB", timeout=PATIENCE_MS)
    assert area.evaluate(place) == before
    table = plan.locator("table").first
    head = ["Fleet", "Certainty", "GPUs for 90% certainty", "TTFT p99 ≤ 500 ms", "TPOT p50 ≤ 50 ms"]
    expect(table.locator("thead th")).to_have_text(head)
    small, large = (
        [float(text.split()[0]) for text in row.locator("td").all_inner_texts()[2:]]
        for row in table.locator("tbody tr").all()
    )
    assert large < small  # the larger card is the faster one
    said = plan.locator("ul:visible")
    expect(plan.locator("p.note").first).to_contain_text("of equally many the card with the least memory.")
    expect(said).to_contain_text("2 cards need equally few GPUs: enter your prices to compare them by cost.")
    expect(said).to_contain_text("A single replica serves nothing while it fails or restarts: set Replicas, at least")
    assert objections(page) == []


def test_objectives_that_no_fleet_meets_are_told_with_the_nearest_fleet_and_impossible_ones_at_once(
    visit: Visit,
) -> None:
    visitor = visit()
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open("plan")
    page.locator("#panel-plan textarea").fill(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{second},1000,60\n" for second in range(30))
    )
    page.get_by_label("TTFT p99 (ms)").fill("")
    page.get_by_label("TPOT p50 (ms)").fill("")
    page.get_by_label("End to end p99 (ms)").fill("1000")
    page.get_by_label("Precisions").select_option("16 bit only")
    for box in page.locator("#panel-plan fieldset [type=checkbox]").all():
        box.set_checked(box.input_value() == "l40s")
    page.get_by_role("button", name="Make a plan").click()
    said = re.compile(r"^No fleet tried meets E2E p99 ≤ 1,000 ms with llama-3.1-8b: the least E2E p99 of any is \d")
    expect(page.locator("#panel-plan .verdict")).to_have_text(said, timeout=PATIENCE_MS)
    expect(page.locator("#panel-plan table").first.locator("tbody tr")).to_have_count(1)
    page.get_by_label("End to end p99 (ms)").fill("")
    page.get_by_label("TPOT p50 (ms)").fill("1")
    page.get_by_role("button", name="Make a plan").click()
    said = re.compile(
        r"^TPOT p50 ≤ 1 ms is impossible: .* already [\d.]+ ms on the fastest card here \(L40S, BF16\)\. "
    )
    expect(page.get_by_role("alert")).to_have_text(said, timeout=PATIENCE_MS)


def test_a_plan_is_read_on_a_phone_and_stays_when_the_next_one_is_cancelled(visit: Visit) -> None:
    page = visit(viewport=PHONE, is_mobile=True, has_touch=True).open("plan")
    rows = "".join(f"{0.1 * i:.1f},{150 + i},{60}\n" for i in range(240))
    page.locator("#panel-plan textarea").fill("arrival_s,prompt_tokens,output_tokens\n" + rows)
    page.get_by_label("TTFT p99 (ms)").fill("300")
    page.get_by_role("button", name="Make a plan").click()
    verdict = page.locator("#panel-plan .verdict")
    either = r"^Rent 1 × A100 40 GB in FP16, which should meet TTFT p99 ≤ 300 ms and .*, or 1 × .* is 90% certain to\.$"
    expect(verdict).to_have_text(re.compile(either), timeout=PATIENCE_MS)
    said, first = verdict.inner_text(), page.locator("#panel-plan .stacked").first
    assert first.evaluate("node => [...node.querySelectorAll('*')].every((each) => each.scrollWidth <= innerWidth)")
    for cell in first.locator("tbody tr").first.locator("td").all():
        assert cell.evaluate("node => node.getBoundingClientRect().right <= innerWidth")
    page.route("**/plan", lambda route: None)
    page.get_by_role("button", name="Make a plan").click()
    expect(verdict).to_have_count(0)
    page.get_by_role("button", name="Cancel").click()
    expect(verdict).to_have_text(said)
    cancelled = page.locator("#panel-plan .cancelled")
    expect(cancelled).to_contain_text("The result shown is the one from before.")
    expect(cancelled).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("button", name="Make a plan")).to_be_in_viewport(ratio=0.9)


def test_a_plan_offers_the_cheapest_fleet_and_a_certain_one_and_settings_follow_the_choice(visit: Visit) -> None:
    page = visit().open("plan")
    rows = "".join(f"{0.1 * i:.1f},{150 + i},{60}\n" for i in range(300))
    page.locator("#panel-plan textarea").fill("arrival_s,prompt_tokens,output_tokens\n" + rows)
    page.get_by_label("TTFT p99 (ms)").fill("300")
    page.get_by_label("Precisions").select_option("16 bit only")
    page.get_by_label("Price of A100 40 GB per GPU hour").fill("1")
    page.get_by_role("button", name="Make a plan").click()
    likely, sure = page.locator("#panel-plan .choice").first, page.locator("#panel-plan .choice").last
    expect(likely.get_by_role("radio")).to_be_checked(timeout=PATIENCE_MS)
    for text in (
        "Cheapest that should do",
        "1 × A100 40 GB",
        "USD 1.00 per hour, USD 730 per month.",
        "one to five miss",
    ):
        expect(likely).to_contain_text(text)
    more = "USD 2.00 per hour, USD 1,460 per month.", "USD 730 per month more than the other."
    for text in ("90% certain", "2 × A100 40 GB", *more, "at most one misses"):
        expect(sure).to_contain_text(text)
    title, settings = page.locator("#panel-plan summary").first, page.locator("#panel-plan pre")
    expect(title).to_have_text("Engine settings of 1 × A100 40 GB in FP16, to copy or download")
    expect(settings).to_contain_text("Plan: 1 x A100 40 GB")
    sure.get_by_role("radio").check()
    expect(title).to_have_text(re.compile(r"^Engine settings of 2 × A100 40 GB .*in FP16, to copy or download$"))
    expect(settings).to_contain_text("Plan: 2 x A100 40 GB")
    assert objections(page) == []


@pytest.mark.parametrize(
    ("tab", "path", "start"), [("plan", "plan", "Make a plan"), ("trace", "shadow", "Compare policies")]
)
def test_work_on_a_log_says_how_long_it_takes_and_is_cancelled(visit: Visit, tab: str, path: str, start: str) -> None:
    page = visit().open(tab)
    panel = page.locator(f"#panel-{tab}")
    panel.locator(".buttons button", has_text="Load an example").click()
    expect(panel.locator("textarea")).to_have_value(re.compile("arrival_s"))
    page.get_by_role("button", name=start).click()
    expect(panel.get_by_role("timer")).to_have_text(re.compile(r"^\d+ s$"))
    with page.expect_event("requestfailed", lambda request: request.url.endswith(f"/{path}")):
        page.get_by_role("button", name="Cancel").click()
    expect(panel).to_contain_text(re.compile(r"Cancelled after \d+ s\."))
    expect(page.get_by_role("button", name=start)).to_be_enabled()


def test_a_plan_searches_the_cards_that_are_chosen(visit: Visit) -> None:
    page = visit().open("plan")
    page.get_by_role("button", name="Load an example log").click()
    expect(page.locator("#panel-plan textarea")).to_have_value(re.compile("arrival_s"))
    cards = page.locator("#panel-plan fieldset [type=checkbox]")
    assert cards.count() > 3
    page.get_by_label("Model").select_option("gpt-oss-20b")
    expect(page.locator("#panel-plan fieldset")).not_to_contain_text("A100")
    page.get_by_label("Model").select_option("llama-3.1-8b")
    for box in cards.all():
        box.set_checked(box.input_value() == "a100-80gb")
    page.get_by_role("button", name="Make a plan").click()
    expect(page.locator("#panel-plan .verdict")).to_contain_text("× A100 80 GB", timeout=PATIENCE_MS)
    tried = page.locator("#panel-plan svg title").all_text_contents()
    assert tried
    assert all("A100 80 GB" in text for text in tried)


def test_a_plan_without_a_card_is_refused_in_words(visit: Visit) -> None:
    page = visit().open("plan")
    page.locator("#panel-plan textarea").fill("arrival_s,prompt_tokens,output_tokens\n0,10,10\n1,10,10\n")
    for box in page.locator("#panel-plan fieldset [type=checkbox]").all():
        box.uncheck()
    page.get_by_role("button", name="Make a plan").click()
    expect(page.get_by_role("alert")).to_contain_text("No card is chosen")


@pytest.mark.parametrize(
    ("label", "value", "said"),
    [
        ("Price of H100 SXM per GPU hour", "0", "hour: 0 is not allowed. What to do: enter a number from 0.01"),
        ("Currency", "", "The currency of the prices is missing"),
        ("TTFT p99 (ms)", "0", "TTFT p99 (ms): 0 is not allowed. What to do: enter a whole number from 1 to 999999"),
    ],
)
def test_a_mistake_in_the_plan_is_told_in_the_words_of_the_form(
    visit: Visit, label: str, value: str, said: str
) -> None:
    page = visit(viewport=PHONE).open("plan")
    page.get_by_role("button", name="Load an example log").click()
    expect(page.locator("#panel-plan textarea")).to_have_value(re.compile("arrival_s"))
    page.get_by_label("Price of A100 40 GB per GPU hour").fill("1.20")
    page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Make a plan").click()
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.get_by_role("alert")).to_be_in_viewport(ratio=1)
    expect(page.get_by_label(label)).to_be_focused()
    expect(page.get_by_label(label)).to_have_attribute("aria-invalid", "true")


@pytest.mark.parametrize(
    ("label", "value", "said"),
    [
        (
            "Columns of the log",
            "soon",
            "Columns of the log: 'soon' is not allowed: it must be pairs of a quantity and its",
        ),
        ("Only rows with", "soon", "Only rows with: 'soon' is not allowed: it must be a column and the values to keep"),
        (
            "Only rows with",
            "prompt_tokens=7",
            "Your text: holds no requests with prompt_tokens=7; values there: 10: 2. "
            "What to do: change Only rows with.",
        ),
        (
            "Columns of the log",
            "arrival=when",
            "Which column is which? Check the guesses, then start again.",
        ),
    ],
)
def test_the_server_refuses_how_a_log_is_read_in_the_words_of_the_form(
    visit: Visit, label: str, value: str, said: str
) -> None:
    visitor = visit()
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open("plan")
    page.locator("#panel-plan textarea").fill("arrival_s,prompt_tokens,output_tokens\n0,10,10\n1,10,10\n")
    page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Make a plan").click()
    expect(page.get_by_role("alert")).to_contain_text(said, timeout=PATIENCE_MS)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "time,prompt_tokens,output_tokens\n" + "".join(f"{100 * i},10,10\n" for i in range(12)),
            re.compile(r"Name the unit under Columns of the log: arrival=time:ms or arrival=time:s\.$"),
        ),
        (
            "t,model,prompt_tokens,output_tokens\n0,a,10,10\n1,b,10,10\n",
            re.compile(r"or several that one fleet serves under Only rows with: model=NAME,NAME\.$"),
        ),
        (
            "t,prompt_tokens,output_tokens\n0,ten,10\n1,1,1\n",
            "is not a number; 1 row cannot be read. What to do: leave out such rows, or correct the text.",
        ),
    ],
    ids=["unit", "models", "file"],
)
def test_a_refused_log_says_once_whether_to_change_the_form_or_the_file(
    visit: Visit, log: str, said: str | re.Pattern[str]
) -> None:
    visitor = visit()
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open("trace")
    page.locator("#panel-trace textarea").fill(log)
    page.get_by_role("button", name="Compare policies").click()
    expect(page.get_by_role("alert")).to_contain_text(said, timeout=PATIENCE_MS)


def test_a_compressed_log_is_read_and_a_refused_one_leaves_no_log_behind(visit: Visit, tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n0,10,10\n1,10,10\n"
    log = tmp_path / "mine.csv.gz"
    log.write_bytes(gzip.compress(text.encode()))
    page = visit().open("plan")
    box, chooser = page.locator("#panel-plan textarea"), page.locator("#panel-plan input[type=file]")
    chooser.set_input_files(log)
    expect(box).to_have_value(text)
    # Otherwise a browser does not tell the page that the same file, corrected, was chosen again.
    assert chooser.input_value() == ""
    for damaged, said in (
        (log.read_bytes()[:-9], "is not a complete gzip file"),
        (gzip.compress(b"0" * 5_000_000), "longer"),
    ):
        chooser.set_input_files(log)
        expect(box).to_have_value(text)
        chooser.set_input_files({"name": "other.csv.gz", "mimeType": "application/gzip", "buffer": damaged})
        expect(page.get_by_role("alert")).to_contain_text(said)
        expect(box).to_have_value("")
    chooser.set_input_files({"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"})
    expect(page.get_by_role("alert")).to_contain_text("photo.png is not text")
    expect(page.locator("#panel-plan .drop")).to_contain_text("photo.png was refused")
    page.get_by_role("button", name="Make a plan").click()
    expect(page.get_by_role("alert")).to_contain_text("The file was refused: photo.png is not text")


def test_columns_with_unusual_names_are_guessed_and_chosen_where_the_log_is_refused_for_them(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open("trace")
    trace = page.locator("#panel-trace")
    expect(trace.get_by_label("Arrival time")).to_have_count(0)
    rows = "".join(f"{0.5 * i:.1f},x,{100 + i},{20 + i % 9}\n" for i in range(60))
    trace.locator("textarea").fill("when_s,host,tok_in,generated\n" + rows)
    page.get_by_role("button", name="Compare policies").click()
    expect(trace.get_by_label("Arrival time")).to_have_value("when_s", timeout=PATIENCE_MS)
    expect(trace.get_by_label("Prompt tokens")).to_have_value("tok_in")
    expect(trace.get_by_label("Output tokens")).to_have_value("generated")
    expect(page.get_by_role("alert")).to_have_text("Which column is which? Check the guesses, then start again.")
    again, detail = (
        page.get_by_role("button", name="Start again"),
        "name them under Columns of the log: arrival=COLUMN,",
    )
    expect(trace.locator("details:not([open])", has_text=detail)).to_have_count(1)
    trace.get_by_label("Prompt tokens").select_option("")
    again.click()
    expect(page.get_by_role("alert")).to_contain_text("Prompt tokens: no column is chosen")
    trace.get_by_label("Prompt tokens").select_option("host")
    expect(trace.get_by_label("Columns of the log")).to_have_value("arrival=when_s,prompt=host,output=generated")
    trace.get_by_label("Prompt tokens").select_option("tok_in")
    with page.expect_request("**/shadow") as sent:
        page.get_by_role("button", name="Compare policies").click()
    assert sent.value.post_data_json["columns"] == "arrival=when_s,prompt=tok_in,output=generated"
    expect(trace.locator(".verdict")).to_be_visible(timeout=PATIENCE_MS)
    record = {"req": {"begun_at": 0, "tok_in": 100}, "generated": 20}
    trace.locator("input[type=file]").set_input_files(
        {"name": "a.jsonl", "mimeType": "application/json", "buffer": json.dumps(record).encode()}
    )
    expect(trace.get_by_label("Arrival time")).to_have_count(0)
    page.get_by_role("button", name="Compare policies").click()
    expect(trace.get_by_label("Prompt tokens")).to_have_value("req.tok_in", timeout=PATIENCE_MS)


# ---------------------------------------------------------------- the other tabs


def test_fidelity_shows_errors_and_what_each_cell_of_the_table_rests_on(visit: Visit) -> None:
    page = visit().open("fidelity")
    expect(page.locator("#panel-fidelity figure.chart canvas")).to_have_count(2)
    expect(page.locator("#panel-fidelity")).to_contain_text("vLLM, held out")
    short = re.compile(
        r"the median error is \d+% to \d+% for the time per token .* a single TTFT was off by up to \d+%\.$"
    )
    expect(page.locator("#panel-fidelity .verdict")).to_have_text(short)
    fp16 = page.locator("#panel-fidelity .heat .level0").count()
    page.get_by_label("Precision").select_option("INT4")
    page.locator("#panel-fidelity").get_by_label("Speculation").select_option("8 draft tokens")
    assert page.locator("#panel-fidelity .heat .level0").count() < fp16
    expect(page.locator("#panel-fidelity .heat tbody td")).to_have_count(72)


def test_code_names_this_server_and_is_copied_by_a_button(visit: Visit, server: RunningServer) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"]).open("code")
    pieces = page.locator("#panel-code pre")
    assert pieces.count() >= 6
    assert server.url in pieces.first.inner_text()
    page.get_by_role("button", name="Copy: curl").click()
    expect(page.get_by_role("button", name="Copy: curl")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == pieces.first.inner_text()


def test_the_traffic_controller_is_played_with_number_keys(visit: Visit) -> None:
    page = visit().open("traffic?task=task_easy")
    for second in range(30):
        expect(page.locator("#panel-traffic .now")).to_contain_text(f"Second {second + 1} of 30")
        page.keyboard.press("3" if 10 <= second < 15 else "1")
    expect(page.locator("#panel-traffic .result h2")).to_contain_text("Your score: 1.000")
    expect(page.locator("#panel-traffic .move")).to_have_count(30)


HINT = re.compile(
    r"(?:Lower|Raise) the cap to (\d+)(?:, then set it to (\d+))?(?: at second (\d+))?: you finish with (0\.\d{3})\."
)
COURSE = re.compile(r"With a cap of \d+ (to the end|until second \d+, then \d+,) you finish with 0\.\d{3}: ")
NEXT_TIME = re.compile(r"Next time: a cap of (\d+) until second (\d+), then (\d+): (0\.\d{3})\.")


def hit_rate(page: Page, percents: str) -> None:
    reading = page.locator("#panel-rollouts .readings div", has_text="Hit rate").locator("dd")
    expect(reading).to_have_text(re.compile(f"^{percents}%$"))


def ready_sessions(page: Page) -> Locator:
    """The tab of agent sessions, once its run can start."""
    panel = page.locator("#panel-rollouts")
    expect(panel.get_by_role("button", name="Start", exact=True)).to_be_enabled(timeout=PATIENCE_MS)
    return panel


def sessions_to_the_end(page: Page) -> float:
    """Play agent sessions from their start to their end; returns the score."""
    panel = ready_sessions(page)
    panel.get_by_role("button", name="Start", exact=True).click()
    panel.get_by_role("button", name="Skip to the end").click()
    score = panel.locator(".result h2 strong")
    expect(score).to_be_visible(timeout=PATIENCE_MS)
    return float(score.inner_text())


def with_cap(server: RunningServer, *caps: int) -> float:
    """The score of the first task's first episode: each second's cap, of which the last one stays."""
    actions = [*caps, *[caps[-1]] * (1800 - len(caps))]
    body = {"task_id": "rollout-batch", "seed": 42, "agent": "no_cap", "actions": actions, "brief": True}
    return round(float(server.post("/rollouts/play", body)["score"]), 3)


def test_agent_sessions_fall_off_the_cliff_when_the_cap_is_raised(visit: Visit, server: RunningServer) -> None:
    page = visit().open("rollouts?task=rollout-batch&seed=42")
    panel = ready_sessions(page)
    slider = page.get_by_label("Session cap")
    expect(slider).to_have_attribute("aria-valuetext", "16 sessions")
    slider.fill("12")
    held: list[Route] = []

    def hold(route: Route) -> None:
        if route.request.post_data_json["step"] in (61, 121):
            held.append(route)
        else:
            route.continue_()

    page.route("**/rollouts/step", hold)
    panel.get_by_role("button", name="Start", exact=True).press("Enter")
    expect(panel.locator(".readings")).to_contain_text(re.compile(r"Second ?(59|60)\D"), timeout=PATIENCE_MS)
    hit_rate(page, "[89]\\d")
    slider.focus()
    page.keyboard.press("End")
    expect(slider).to_have_attribute("aria-valuetext", "96 sessions")
    for _ in range(PATIENCE_MS // 50):  # the page has shown second 60 and may not have asked for the next one yet
        if not held:
            page.wait_for_timeout(50)
    held.pop().continue_()
    expect(panel.locator(".readings")).to_contain_text(re.compile(r"Second ?1(19|20)\D"), timeout=PATIENCE_MS)
    hit_rate(page, "[1-3]?\\d")
    expect(panel.locator(".readings")).to_contain_text(re.compile(r"KV cache filled ?[1-9]\d\d%"))
    expect(panel.locator(".state")).to_contain_text(re.compile(r"[1-9]\d\d% full: conversations evict each other"))
    expect(panel.locator(".advice")).to_have_text(HINT, timeout=PATIENCE_MS)
    expect(panel.locator(".lead")).to_have_text(COURSE, timeout=PATIENCE_MS)
    assert objections(page) == []


def test_the_forecast_of_a_cap_and_of_a_move_is_what_the_server_plays(visit: Visit, server: RunningServer) -> None:
    page = visit().open("rollouts?task=rollout-batch&seed=42")
    panel = ready_sessions(page)
    panel.get_by_role("button", name="Start", exact=True).click()
    # For a visitor who has not moved the slider, the run stops when the conversations do not fit.
    expect(panel.locator(".state")).to_contain_text("Paused.", timeout=PATIENCE_MS)
    expect(panel.locator(".advice")).to_have_text(HINT, timeout=PATIENCE_MS)
    stayed = with_cap(server, 16)
    expect(panel.locator(".lead")).to_have_text(f"With a cap of 16 to the end you finish with {stayed:.3f}: level.")
    move, moved = HINT.search(panel.locator(".advice").inner_text()).groups()[::3]  # type: ignore[union-attr]
    second = int(panel.locator(".readings dd").first.inner_text())
    assert float(moved) == with_cap(server, *[16] * second, int(move)) > stayed
    panel.get_by_role("button", name="Do this").click()
    expect(page.get_by_label("Session cap")).to_have_attribute("aria-valuetext", f"{move} sessions")
    ahead = f"With a cap of {move} to the end you finish with {moved}: {float(moved) - stayed:.3f} ahead."
    expect(panel.locator(".lead")).to_have_text(ahead, timeout=PATIENCE_MS)
    expect(panel.locator(".versus .value").first).to_have_text(re.compile(r"^\d+ of 96$"))
    panel.get_by_role("button", name="Skip to the end").click()
    verdict = panel.locator(".result h2")
    expect(verdict).to_contain_text(f"{moved} You beat a constant cap of 16: {stayed:.3f}.", timeout=PATIENCE_MS)
    assert panel.locator(".versus .value").all_inner_texts() == [moved, f"{stayed:.3f}"]
    expect(panel.locator(".onward .main")).to_have_text(re.compile(r"^Next: beat [\w -]+, 0\.\d{3}$"))


def test_sessions_that_change_are_advised_a_timetable_which_moves_the_slider(visit: Visit) -> None:
    page = visit().open("rollouts?task=rollout-shift&seed=42")
    panel = ready_sessions(page)
    panel.get_by_role("button", name="Start", exact=True).click()
    expect(panel.locator(".advice")).to_have_text(HINT, timeout=PATIENCE_MS)
    panel.get_by_role("button", name="Skip to the end").click()
    expect(panel.locator(".result")).to_contain_text(NEXT_TIME, timeout=PATIENCE_MS)
    early, then, late, score = NEXT_TIME.search(panel.locator(".result").inner_text()).groups()  # type: ignore[union-attr]
    assert int(early) > int(late)  # the long sessions come last
    page.get_by_label("Speed").select_option("25")
    panel.get_by_role("button", name="Try this").click()
    slider = page.get_by_label("Session cap")
    expect(slider).to_have_attribute("aria-valuetext", f"{early} sessions", timeout=PATIENCE_MS)
    course = f"With a cap of {early} until second {then}, then {late}, you finish with {score}: "
    expect(panel.locator(".lead")).to_contain_text(course, timeout=PATIENCE_MS)
    expect(slider).to_have_attribute("aria-valuetext", f"{late} sessions", timeout=PATIENCE_MS)
    panel.get_by_role("button", name="Skip to the end").click()
    expect(panel.locator(".result h2 strong")).to_have_text(score, timeout=PATIENCE_MS)


def test_agent_sessions_go_on_by_themselves_when_a_lost_server_is_back(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed_errors.append("ERR_FAILED")
    page = visitor.open("rollouts?task=rollout-batch&seed=42")
    panel = ready_sessions(page)
    page.get_by_label("Session cap").fill("9")
    panel.get_by_role("button", name="Start", exact=True).click()
    expect(panel.locator(".readings")).to_contain_text(re.compile(r"Second ?\d\d"), timeout=PATIENCE_MS)

    def cut(route: Route) -> None:
        route.abort()

    page.route("**/*", cut)
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(page.get_by_role("alert")).to_contain_text("go on by themselves when the server answers")
    second = int(panel.locator(".readings dd").first.inner_text())
    page.unroute("**/*", cut)
    expect(page.get_by_role("alert")).to_have_count(0)
    page.wait_for_function(
        "s => Number(document.querySelector('#panel-rollouts .readings dd').innerText) > s", arg=second
    )


def test_a_run_of_sessions_that_is_lost_says_why_and_plays_its_advice(visit: Visit, server: RunningServer) -> None:
    page = visit().open("rollouts?task=rollout-batch&seed=42")
    panel = ready_sessions(page)
    page.get_by_label("Session cap").fill("40")
    assert sessions_to_the_end(page) == with_cap(server, 40)
    result = panel.locator(".result")
    expect(result).to_contain_text("Not yet: a constant cap of 16 has 0.449.")
    expect(result).to_contain_text(re.compile(r"Place 7 of 8\. For \d+ of \d+ seconds, from second \d+ on"))
    expect(panel.locator(".scores tr", has_text="AIMD")).to_contain_text("One more session while the cache hits")
    expect(result).to_contain_text(NEXT_TIME, timeout=PATIENCE_MS)
    early, then, late, score = NEXT_TIME.search(result.inner_text()).groups()  # type: ignore[union-attr]
    panel.get_by_role("button", name="Try this").click()
    panel.get_by_role("button", name="Skip to the end").click()
    expect(result.locator("h2 strong")).to_have_text(score, timeout=PATIENCE_MS)
    assert float(score) == with_cap(server, *[int(early)] * int(then), int(late))
    assert float(score) > max(with_cap(server, cap) for cap in (8, 10, 12, 14, 16))


def test_the_rest_of_a_run_of_sessions_is_skipped_in_one_request(visit: Visit, server: RunningServer) -> None:
    page = visit().open("rollouts?task=rollout-batch&seed=42")
    panel = ready_sessions(page)
    page.get_by_label("Session cap").fill("12")
    panel.get_by_role("button", name="Start", exact=True).click()
    expect(panel.locator(".readings")).to_contain_text(re.compile(r"Second ?[2-9]\d"), timeout=PATIENCE_MS)
    steps: list[int] = []
    page.on("request", lambda r: steps.append(r.post_data_json["step"]) if r.url.endswith("/step") else None)
    panel.get_by_role("button", name="Skip to the end").click()
    expect(panel.locator(".result h2 strong")).to_have_text(f"{with_cap(server, 12):.3f}", timeout=PATIENCE_MS)
    assert len(steps) <= 2  # those on their way when the button was pressed
    expect(panel.locator(".readings")).to_contain_text("96 of 96")


def test_a_reload_takes_agent_sessions_up_where_they_were(visit: Visit) -> None:
    page = visit().open("rollouts?task=rollout-batch&seed=42")
    panel = ready_sessions(page)
    page.get_by_label("Session cap").fill("9")
    sessions: list[str] = []
    page.on("request", lambda r: sessions.append(r.post_data_json["session_id"]) if r.url.endswith("/step") else None)
    panel.get_by_role("button", name="Start", exact=True).click()
    expect(panel.locator(".readings")).to_contain_text(re.compile(r"Second ?[2-9]\d"), timeout=PATIENCE_MS)
    page.reload()
    panel.get_by_role("button", name="Skip to the end").click()
    expect(panel.locator(".result h2")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_label("Session cap")).to_have_attribute("aria-valuetext", "9 sessions")
    assert len(set(sessions)) == 1


def test_a_friend_plays_agent_sessions_against_the_run_of_a_link(visit: Visit, server: RunningServer) -> None:
    first = visit(permissions=["clipboard-read", "clipboard-write"]).open("rollouts?task=rollout-batch&seed=42")
    ready_sessions(first).get_by_label("Session cap").fill("20")
    score = sessions_to_the_end(first)
    first.get_by_role("button", name="Challenge a friend").click()
    message = first.locator("#panel-rollouts .copied").inner_text()
    copied = first.evaluate("() => navigator.clipboard.readText()")
    assert re.sub("[🟩🟥]", "", copied).split() == message.split()
    assert f"scored {score:.3f}; a constant cap of 16: 0.449." in message
    link = message.split()[-1]
    assert link == first.url
    assert link.endswith(f"?beat={score:.3f}#rollouts?you=0.20")  # the first task and its seed
    second = visit(viewport=PHONE).page
    second.goto(link)
    panel = ready_sessions(second)
    expect(panel.locator(".goal")).to_contain_text(f"Beat {score:.3f}")
    expect(panel.locator(".lead")).to_have_text(
        "Your challenger changed the cap 0 times; you start where they did, at 20."
    )
    expect(panel.locator(".score-chart .unseen").first).to_contain_text("Sessions finished. Challenger: now 96")
    second.get_by_label("Session cap").fill("12")
    assert sessions_to_the_end(second) == with_cap(server, 12) > score
    expect(panel.locator(".result h2")).to_contain_text(f"You beat your challenger: {score:.3f}.")
    row = panel.locator(".scores tbody tr", has_text="Challenger")
    expect(row.locator("td.strong")).to_contain_text(f"{score:.3f}")
    assert objections(second) == []
    panel.get_by_role("button", name="Play again").click()
    expect(second.get_by_role("button", name="Pause")).to_be_visible(timeout=PATIENCE_MS)


def test_a_link_that_holds_no_sessions_says_so(visit: Visit) -> None:
    page = visit().open("rollouts?task=rollout-batch&seed=42&you=nonsense")
    expect(page.get_by_role("alert")).to_contain_text("does not contain a valid run", timeout=PATIENCE_MS)


def test_letting_everything_in_crashes_the_server(visit: Visit) -> None:
    page = visit().open("traffic")
    button = page.get_by_role("button", name="1 Admit all")
    for second in range(11):
        expect(page.locator("#panel-traffic .now")).to_contain_text(f"Second {second + 1} of 30")
        button.click()
    expect(page.locator("#panel-traffic .result h2")).to_contain_text("crashed at second 11 of 30. Your score: 0.000")
    expect(button).to_be_disabled()


# ---------------------------------------------------------------- for everybody, everywhere


def test_tabs_are_walked_with_arrow_keys_and_named_in_the_address(visit: Visit) -> None:
    page = visit().open()
    page.locator("#tab-race").focus()
    for name in (*TABS[1:], TABS[0]):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{name}")).to_have_attribute("aria-selected", "true")
        expect(page.locator(f"#panel-{name}")).to_be_visible()
        assert f"#{name}" in page.url
    expect(page.locator("[role=tab][aria-selected=true]")).to_have_count(1)


def objections(page: Page) -> list[str]:
    """Violations that axe finds on the current page once nothing fades in any more: rule and first element."""
    page.evaluate("Promise.all(document.getAnimations().map((animation) => animation.finished.catch(() => {})))")
    found = Axe().run(page).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:120]} {v['nodes'][0]['any'][0]['message'][:160]}" for v in found]


def test_a_server_of_the_traffic_controller_opens_on_it_and_still_has_the_race(
    browser: Browser, tmp_path: Path
) -> None:
    with running_server(tmp_path, env="traffic") as server:
        visitor = Visitor(browser.new_context(viewport=DESKTOP), server.url)
        page = visitor.open(wait_for="traffic")
        expect(page.locator("#panel-traffic .now")).to_contain_text("Second 1 of 30")
        visitor.open("race?task=1&seed=3")
        race_to_the_end(page)
        page.context.close()
    visitor.check()


def test_a_browser_is_told_how_to_give_the_key_and_then_plays_with_it(browser: Browser, tmp_path: Path) -> None:
    with running_server(tmp_path, api_key="correct horse") as server:
        # Chromium without a window cannot show what a visitor sees who cancels its question for a password.
        refused = httpx.get(f"{server.url}/web")
        assert refused.status_code == 401
        assert "a browser takes the key as password" in refused.text
        known = browser.new_context(viewport=DESKTOP, http_credentials={"username": "me", "password": "correct horse"})
        visitor = Visitor(known, server.url)
        visitor.open("race?task=1&seed=3")
        race_to_the_end(visitor.page)
        known.close()
    visitor.check()


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_axe_finds_nothing_to_object_to(visit: Visit, size: dict[str, int], scheme: str) -> None:
    visitor = visit(viewport=size, color_scheme=scheme)
    found: dict[str, list[str]] = {}
    for tab in TABS:
        page = visitor.open(tab)
        found[tab] = objections(page)
    assert found == {tab: [] for tab in TABS}


def test_axe_finds_nothing_in_results_either(visit: Visit) -> None:
    visitor = visit(color_scheme="dark")
    visitor.allowed_errors.append(REFUSED)
    page = visitor.open("race?task=1&seed=2")
    race_to_the_end(page)
    assert objections(page) == []
    page = visitor.open("verify")
    page.get_by_role("button", name="A forged log").click()
    expect(page.locator("#panel-verify textarea")).to_have_value(re.compile("tokens_per_sec"))
    page.get_by_role("button", name="Replay and grade").click()
    expect(page.locator("#panel-verify h2.bad")).to_be_visible()
    assert objections(page) == []


@pytest.mark.parametrize("width", [360, 390])
def test_all_tabs_are_in_view_on_a_phone_and_leave_the_screen_to_the_race(visit: Visit, width: int) -> None:
    page = visit(viewport={"width": width, "height": 844}, is_mobile=True, has_touch=True).open()
    for tab in page.get_by_role("tab").all():
        expect(tab).to_be_in_viewport(ratio=1)
    assert page.locator("nav").evaluate("nav => nav.scrollWidth <= nav.clientWidth")
    main = page.locator("main").bounding_box()
    assert main
    assert main["y"] < 180


def test_nothing_is_wider_than_a_phone(visit: Visit) -> None:
    visitor = visit(viewport=PHONE, is_mobile=True, has_touch=True)
    for tab in TABS:
        page = visitor.open(tab)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], tab


OVERLAPS = """
() => {
  const text = "button, select, input, textarea, output, label, dt, dd, h2, p, small";
  const pieces = `${text}, .chart, .card, .side, .duel, .drop`;
  const shown = [...document.querySelectorAll(`main :is(${pieces})`)].filter((node) =>
    node.checkVisibility({ visibilityProperty: true }) && !node.closest(".unseen, .uplot"));
  const boxes = shown.map((node) => node.getBoundingClientRect());
  const name = (node) => `${node.tagName}.${node.className}: ${node.textContent.slice(0, 30)}`;
  const found = [];
  shown.forEach((a, i) => shown.forEach((b, j) => {
    const [p, q] = [boxes[i], boxes[j]];
    if (a.contains(b)) {
      if (q.left < p.left - 1 || q.right > p.right + 1) found.push(`${name(b)} leaves ${name(a)}`);
    } else if (i < j && !b.contains(a)) {
      const width = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const height = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (width > 1 && height > 1) found.push(`${name(a)} and ${name(b)} overlap`);
    }
  }));
  return found;
}
"""


LONG = """
() => {
  for (const value of document.querySelectorAll("#panel-race .readings dd")) value.textContent = "1234 of 5678 ready";
  const name = "A long name of a card and a model";
  for (const list of document.querySelectorAll("main select")) list.options[0].text = name;
}
"""


@pytest.mark.parametrize("width", [360, 768, 1024, 1440])
def test_no_box_lies_on_another_at_any_width(visit: Visit, width: int) -> None:
    visitor = visit(viewport={"width": width, "height": 900})
    for tab in ("race?task=autoscale&seed=5", *TABS[1:]):
        page = visitor.open(tab)
        page.evaluate(LONG)
        assert page.evaluate(OVERLAPS) == [], tab
    page = visitor.open("race?task=autoscale&seed=5")
    page.locator("#panel-race").get_by_label("Speed").select_option("25")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator("#panel-race .readings")).to_contain_text(re.compile(r"[1-9]\d of 900"))
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.evaluate("() => scrollTo(0, 0)")
    assert page.evaluate(OVERLAPS) == []


def test_a_table_says_that_it_scrolls_where_it_does(visit: Visit) -> None:
    for size in (PHONE, {"width": 1800, "height": 900}):
        page = visit(viewport=size).open("fidelity")
        tables = page.locator("#panel-fidelity .scroll")
        assert tables.count() == 3
        wide = [bool(table.evaluate("node => node.scrollWidth > node.clientWidth + 1")) for table in tables.all()]
        assert all(wide) == any(wide) == (size is PHONE)
        for hint, is_wide in zip(page.locator("#panel-fidelity .scroll-hint").all(), wide, strict=True):
            expect(hint).to_be_visible(visible=is_wide)


def test_what_each_slider_does_is_read_on_a_phone_without_a_pointer(visit: Visit) -> None:
    page = visit(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True).open("race?task=3&seed=1")
    hints = page.locator("#panel-race .knob small")
    shown = hints.locator("visible=true")
    expect(shown).to_have_count(5)
    for hint in shown.all():
        assert hint.evaluate("node => node.scrollWidth <= node.clientWidth")
        slider = page.locator(f"#panel-race [aria-describedby={hint.get_attribute('id')}]")
        assert hint.bounding_box()["y"] > slider.bounding_box()["y"]  # type: ignore[index]
    assert page.evaluate(OVERLAPS) == []
    # While the race is on, charts and sliders share the screen.
    page.get_by_role("button", name="Start the race").tap()
    expect(shown).to_have_count(0)
    page = visit(viewport={"width": 360, "height": 740}, is_mobile=True).open("rollouts")
    expect(page.locator("#panel-rollouts .knob small")).to_be_visible()


def test_a_race_waits_while_another_tab_is_open_and_is_not_thrown_away_by_accident(visit: Visit) -> None:
    page = visit().open("race?task=3&seed=1")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".readings")).to_contain_text(re.compile("[2-9] of 200"))
    fields = [page.locator("#panel-race").get_by_label(name, exact=True) for name in ("Task", "Seed")]
    fields += [page.get_by_role("button", name=name) for name in ("Today's seed", "Another seed")]
    for each in fields:
        expect(each).to_be_disabled()
    page.locator("#tab-code").click()
    page.locator("#tab-race").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_role("button", name="Start over").click()
    for each in fields:
        expect(each).to_be_enabled()


def test_a_challenge_on_a_phone_leaves_the_sliders_in_view(visit: Visit) -> None:
    page = visit(viewport=PHONE, is_mobile=True, has_touch=True).open("race?task=3&seed=1&you=200_0.913-0-256-0-0")
    page.get_by_role("button", name="Start the race").tap()
    page.get_by_role("button", name="Pause").tap()
    for name in ("KV cache", "Batch size", "Precision"):
        slider = page.get_by_label(name)
        before = slider.input_value()
        slider.tap()  # in its middle, which no other box may cover
        expect(slider).not_to_have_value(before)


def test_a_race_on_a_phone_keeps_pause_and_sliders_in_reach(visit: Visit) -> None:
    page = visit(viewport=PHONE, is_mobile=True, has_touch=True).open("race?task=3&seed=1")
    page.get_by_label("Batch size").fill("18")  # otherwise the first flood stops the race
    page.get_by_role("button", name="Start the race").tap()
    pause = page.get_by_role("button", name="Pause")
    expect(pause).to_be_visible()
    page.locator("#panel-race .stage figure.chart").nth(1).scroll_into_view_if_needed()
    expect(pause).to_be_in_viewport()
    page.get_by_label("Batch size").scroll_into_view_if_needed()
    expect(page.locator(".score-chart figure.chart")).to_be_in_viewport()


def test_the_theme_follows_the_system_until_it_is_chosen(visit: Visit) -> None:
    page = visit(color_scheme="dark").open()
    background = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Switch between light and dark").click()
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    page.wait_for_selector("#panel-race[data-ready=yes]")
    assert page.evaluate(background) == light


def test_the_page_works_in_a_frame_and_only_where_it_is_allowed(visit: Visit, server: RunningServer) -> None:
    visitor = visit()
    page = visitor.page
    page.goto(f"{server.url}/health")
    page.evaluate("() => { document.body.innerHTML = '<iframe width=1200 height=800 src=\"/web/\"></iframe>'; }")
    inside = page.frame_locator("iframe")
    inside.get_by_label("Task").select_option("1")
    inside.get_by_label("Speed").select_option("1000")
    inside.get_by_role("button", name="Start the race").click()
    expect(inside.locator(".result h2")).to_be_visible(timeout=PATIENCE_MS)

    stranger = visit()
    stranger.page.route(
        "http://elsewhere.test/",
        lambda route: route.fulfill(content_type="text/html", body=f'<iframe src="{server.url}/web/"></iframe>'),
    )
    stranger.page.goto("http://elsewhere.test/")
    # The browser's own page about a refused frame stands where ours would be.
    expect(stranger.page.frame_locator("iframe").locator("#main-frame-error")).to_have_count(1)
    stranger.strangers.clear()
