"""Record the web page: an animated GIF of a race, a screenshot, both for the README, and the picture of link previews.

    python -m scripts.record_demo [--only card picture film]

It starts a server. Needs Chromium and the requirements for training (Pillow comes with them).
Frames are timed by the race's own clock, so the length of the film does not depend on the speed of the recording
machine.
"""

from __future__ import annotations

import argparse
import io
import itertools
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.report import FIGURES, ROOT
from benchmarks.speed.load import own_server

CHROMIUM_ARGUMENTS: Final = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
TASK, SEED = 3, 42
FILM_SIZE: Final = {"width": 1180, "height": 860}
PICTURE_SIZE: Final = {"width": 1280, "height": 1000}
CARD_SIZE: Final = {"width": 1200, "height": 630}
CARD: Final = ROOT / "server" / "web" / "img" / "card.png"
FILM_WIDTH: Final = 880
FILM_LIMIT_BYTES: Final = 5_000_000
PICTURE_LIMIT_BYTES: Final = 150_000
MS_PER_SECOND: Final = 90
"""Milliseconds of film per second of the race."""
END_MS: Final = 5_000
KINDS: Final = ("film", "picture", "card")

ORDER: Final = ("quant_tier", "batch_size", "kv_budget", "prefill_disagg", "spec_length")
"""Order in which the film moves the sliders, one every few seconds, towards the best known constant action."""
EVERY_S: Final = 4


def main() -> int:
    parser = argparse.ArgumentParser(description="Record a film and a screenshot of a race on the web page.")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="what to record")
    options = parser.parse_args()
    with own_server() as (url, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_ARGUMENTS))
        written = [
            *([film(browser, url, FIGURES / "race.gif")] if "film" in options.only else []),
            *([picture(browser, url, FIGURES / "page-desktop.png")] if "picture" in options.only else []),
            *([card(browser, url, CARD)] if "card" in options.only else []),
        ]
        browser.close()
    too_large = 0
    for path in written:
        size, limit = path.stat().st_size, FILM_LIMIT_BYTES if path.suffix == ".gif" else PICTURE_LIMIT_BYTES
        too_large += size > limit
        print(f"{path.name}: {size:,} bytes" + (f", more than {limit:,}" if size > limit else ""))
    return 1 if too_large else 0


def chromium() -> str:
    """Path of an installed Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        sys.exit("Chromium was not found: run scripts/install_test_servers.sh as root, or install it by hand")
    return path


# ---------------------------------------------------------------- the film


def film(browser: Browser, url: str, path: Path) -> Path:
    """Record a whole race as an animated GIF."""
    page = opened(browser, url, FILM_SIZE, "light")
    page.get_by_label("Speed").select_option("5")
    moves = best_moves(page, url)
    frames = [(0, page.screenshot())]
    page.get_by_role("button", name="Start the race").click()
    while (second := played(page)) < 200:
        while moves and second >= EVERY_S * (len(ORDER) - len(moves) + 1):
            knob, position = moves.pop(0)
            page.locator(f"#knob-{knob}").fill(position)
        if second > frames[-1][0]:
            frames.append((second, page.screenshot()))
    page.wait_for_selector(".result h2")
    frames.append((200, page.screenshot()))
    page.context.close()
    _write_film(frames, path)
    return path


def best_moves(page: Page, url: str) -> list[tuple[str, str]]:
    """Knobs and slider positions nearest to the best constant action, in the order in which they are moved."""
    body = {"task_id": TASK, "seed": SEED, "agent": "best_static"}
    answer = page.request.post(f"{url}/play", data=body).json()
    return [(knob, _nearest(page, knob, float(answer["action"][knob][0]))) for knob in ORDER]


def _nearest(page: Page, knob: str, value: float) -> str:
    slider = page.locator(f"#knob-{knob}")
    start = slider.input_value()
    distance: dict[str, float] = {}
    for position in range(int(slider.get_attribute("max") or 0) + 1):
        slider.fill(str(position))
        distance[str(position)] = abs(_value(slider.get_attribute("aria-valuetext") or "") - value)
    slider.fill(start)
    return min(distance, key=lambda position: distance[position])


def _value(text: str) -> float:
    """Value of a knob from the text of its slider."""
    named = {
        "none": 0.0,
        "FP16": 0.0,
        "INT8": 1.0,
        "INT4": 2.0,
        "shared GPUs": 0.0,
        "separate GPUs": 1.0,
    }
    if text in named:
        return named[text]
    number = float(re.sub(r"[^0-9.]", "", text))
    return number / 100 if "%" in text else number


def played(page: Page) -> int:
    """Seconds of the race played so far."""
    found = re.search(r"(\d+) of 200", page.locator(".readings").inner_text())
    assert found
    return int(found[1])


def _write_film(frames: Sequence[tuple[int, bytes]], path: Path) -> None:
    seconds = [second for second, _ in frames]
    durations = [(b - a) * MS_PER_SECOND for a, b in itertools.pairwise(seconds)]
    images = [Image.open(io.BytesIO(data)).convert("RGB") for _, data in frames]
    height = round(images[0].height * FILM_WIDTH / images[0].width)
    small = [image.resize((FILM_WIDTH, height), Image.Resampling.LANCZOS) for image in images]
    # One palette for all frames, so that pixels that do not change are not stored again.
    palette = small[-1].quantize(255, dither=Image.Dither.NONE)
    indexed = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in small]
    indexed[0].save(
        path, save_all=True, append_images=indexed[1:], duration=[1_000, *durations[1:], END_MS], loop=0, optimize=True
    )


# ---------------------------------------------------------------- the pictures


def picture(browser: Browser, url: str, path: Path) -> Path:
    """Screenshot of the end of a race on a desktop, in the dark theme."""
    page = opened(browser, url, PICTURE_SIZE, "dark")
    page.get_by_label("Speed").select_option("1000")
    for knob, position in best_moves(page, url):
        page.locator(f"#knob-{knob}").fill(position)
    page.get_by_role("button", name="Start the race").click()
    page.wait_for_selector(".result h2")
    page.evaluate("() => window.scrollTo(0, 0)")
    return _save(page, path)


def card(browser: Browser, url: str, path: Path) -> Path:
    """Picture of link previews: the first screen half-way through a race."""
    page = opened(browser, url, CARD_SIZE, "dark")
    page.get_by_label("Speed").select_option("25")
    for knob, position in best_moves(page, url):
        page.locator(f"#knob-{knob}").fill(position)
    page.get_by_role("button", name="Start the race").click()
    page.wait_for_function("() => document.querySelector('.duel progress').value >= 100")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    return _save(page, path)


def opened(browser: Browser, url: str, size: dict[str, int], scheme: str) -> Page:
    """The page with the race loaded."""
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{url}/web/#race?task={TASK}&seed={SEED}")
    page.wait_for_selector("#panel-race[data-ready=yes]")
    return page


def _save(page: Page, path: Path) -> Path:
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    page.context.close()
    return path


if __name__ == "__main__":
    sys.exit(main())
