"""The repository's public address: one place, repeated the same everywhere, changed by one command."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.set_home import home, set_home
from tests.checkout import ROOT, copy_of_the_tree, tracked_files

OTHER = "/".join(("https://github.com", "someone-else", "their.gym-2"))  # split, or it would be replaced here too


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of the current tree."""
    copy_of_the_tree(tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
    return tmp_path


def contents(root: Path, names: list[str]) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in names}


def test_the_address_can_be_set_and_set_back(checkout: Path) -> None:
    before = home(checkout)
    names = [str(path.relative_to(ROOT)) for path in tracked_files()]
    old = contents(checkout, names)
    changed = set_home(OTHER, checkout)
    assert {"pyproject.toml", "CITATION.cff", "README.md", "notebooks/InferenceGym_Demo.ipynb"} <= set(changed)
    assert home(checkout) == OTHER
    owner_and_name = before.removeprefix("https://github.com/")
    left = [name for name, text in contents(checkout, names).items() if f"/{owner_and_name}".encode() in text]
    assert left == []
    with (checkout / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["name"] == "openenv-inferencegym"
    set_home(before, checkout)
    assert contents(checkout, names) == old


def test_the_notebooks_badge_and_the_citation_lead_to_the_same_place(checkout: Path) -> None:
    set_home(OTHER, checkout)
    place = OTHER.removeprefix("https://github.com/")
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    badge = re.search(r"https://colab\.research\.google\.com/github/(\S+?)/blob/main/(\S+?\.ipynb)", readme)
    assert badge is not None
    assert badge[1] == place
    assert (checkout / badge[2]).exists()
    assert f"repository-code: {OTHER}\n" in (checkout / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize("address", ["", "github.com/a/b", "https://example.org/a/b", "https://github.com/alone"])
def test_other_addresses_are_refused_and_nothing_changes(checkout: Path, address: str) -> None:
    before = home(checkout)
    with pytest.raises(ValueError, match="OWNER/NAME"):
        set_home(address, checkout)
    assert home(checkout) == before
