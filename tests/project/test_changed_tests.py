"""`make test-changed` runs the tests nearest to what git says has changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import changed_tests
from scripts.changed_tests import changed, nearest_tests, sources

TEXTS = {
    "shop/till.py": "TAXES = 'taxes.json'\n",
    "shop/counter.py": "from shop import till\n",
    "shop/door.py": "def open():\n    from shop.counter import (\n        ring,\n        greet,\n    )\n",
    "shop/sign.py": "",
    "shop/web.py": 'PAGE = "window"\n',
    "tests/test_door.py": "import shop.door\n",
    "tests/test_counter.py": "from shop.counter import ring\n",
    "tests/test_web.py": "from shop.web import PAGE\n",
    "tests/test_line.py": 'run("sign")\n',
}


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("shop/door.py", ["door"]),
        ("shop/counter.py", ["counter"]),  # test_door is one import farther away
        ("shop/till.py", ["counter"]),  # no test imports it
        ("shop/sign.py", ["line"]),  # no module does either
        ("shop/taxes.json", ["counter"]),
        ("shop/window/light.js", ["web"]),
        ("tests/test_web.py", ["web"]),
        ("elsewhere/web.py", ["web"]),  # named after it, though the module is new
        ("docs/web.md", ["web"]),
        ("README.md", []),
    ],
)
def test_the_nearest_tests_of_a_file(file: str, tests: list[str]) -> None:
    assert nearest_tests(TEXTS, [file]) == [f"tests/test_{name}.py" for name in tests]


def test_of_the_tests_that_import_a_module_those_of_its_room_count_alone() -> None:
    texts = {f"tests/{folder}/test_{folder}.py": "from shop import door\n" for folder in ("shop", "street")}
    assert nearest_tests({"shop/door.py": "", **texts}, ["shop/door.py"]) == ["tests/shop/test_shop.py"]


def test_files_that_differ_from_a_commit_and_new_ones_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    (tmp_path / "old.py").write_text("", encoding="utf-8")
    (tmp_path / "same.py").write_text("", encoding="utf-8")
    git("add", "--all")
    git("commit", "--quiet", "--message", "first")
    (tmp_path / "old.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "new.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    assert sorted(changed("HEAD")) == ["new.py", "old.py"]
    with pytest.raises(SystemExit, match="git diff"):
        changed("no-such-commit")


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("inferencegym/models.py", "tests/env/test_golden_episodes.py"),
        ("simulator/kernel/step.py", "tests/server/test_interface.py"),
        ("server/web/js/race.js", "tests/server/test_page.py"),
    ],
)
def test_in_this_repository_what_golden_files_and_the_page_depend_on_selects_their_tests(file: str, test: str) -> None:
    assert test in nearest_tests(sources(), [file])


def test_in_this_repository_a_module_and_the_styles_of_the_page_have_tests_near_them() -> None:
    files = ["server/net/slots.py", "server/web/style.css"]
    found = nearest_tests(sources(), files)
    assert {"tests/server/test_slots.py", "tests/server/test_page_http.py"} <= set(found)
