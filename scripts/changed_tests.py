"""Print the test files nearest to what git says has changed: ``python -m scripts.changed_tests [--base main]``.

They are the files that import a changed module, and those named after it (``test_policies.py`` after ``policies.py``).
Where no test imports it, those of the modules that import it count, and so on; where nothing does, as with commands,
the tests that have its name in quotes. :data:`ALSO` names tests that depend on a folder without importing it, such as
those of golden files. A file that is no module, such as a task file, counts as the modules whose text
names it, or its folder. Of those that import a module, the tests of its own room count alone where there are any:
``tests/agents`` for ``agents``. This finds what most probably fails, in a minute or two, or more after a change
of what many tests import; `make test-fast` finds all that does.

Tools that trace which lines a test runs find nothing here: they see neither compiled modules nor servers that tests
start.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
IMPORT: Final = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)
NAME: Final = re.compile(r"\w+")
CHECKED_OTHERWISE: Final = {".md", ".png", ".gif", ".svg"}
"""Documents and pictures: `make documents` checks them."""
_GOLDEN: Final = ("tests/env/test_golden_episodes.py", "tests/server/test_interface.py")
ALSO: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("simulator/", "env/", "grader/", "inferencegym/models.py"), _GOLDEN),
    "server/web/": ("tests/server/test_page.py",),
}
"""Tests of what a file's path starts with, whatever they import."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="HEAD", help="commit to compare with (default: HEAD)")
    options = parser.parse_args()
    print("\n".join(nearest_tests(sources(), changed(options.base))))
    return 0


def changed(base: str) -> list[str]:
    """Files that differ from a commit, new ones included."""
    return _git("diff", "--name-only", "--relative", base) + _git("ls-files", "--others", "--exclude-standard")


def sources() -> dict[str, str]:
    """Text of every Python file of the repository, by path."""
    paths = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths if (ROOT / path).exists()}


def nearest_tests(texts: Mapping[str, str], files: Iterable[str]) -> list[str]:
    """The test files nearest to some changed files, given the text of every Python file by path."""
    importers = _importers(texts)
    found: set[str] = set()
    for file in files:
        start = {file} if file.endswith(".py") else _naming(texts, file)
        found |= {path for path in start if _is_test(path) and path in texts}
        found |= {path for path in texts if _is_test(path) and Path(path).stem == f"test_{Path(file).stem}"}
        near = _first_tests(importers, {path for path in start if not _is_test(path)}) or _quoting(texts, file)
        room = f"tests/{Path(file).parts[0]}/"
        found |= {path for path in near if file.endswith(".py") and path.startswith(room)} or near
        if Path(file).suffix not in CHECKED_OTHERWISE:
            found |= {path for prefix, paths in ALSO.items() if file.startswith(prefix) for path in paths}
    return sorted(found)


def _first_tests(importers: Mapping[str, set[str]], start: set[str]) -> set[str]:
    """Tests among the nearest importers, direct or not, of some modules; empty if no test is among them."""
    seen, level = set(start), start
    while level:
        level = {importer for path in level for importer in importers[path]} - seen
        seen |= level
        if tests := {path for path in level if _is_test(path)}:
            return tests
    return set()


def _quoting(texts: Mapping[str, str], file: str) -> set[str]:
    """Tests that have the name of a module in quotes."""
    name = f'"{Path(file).stem}"'
    return {path for path, text in texts.items() if file.endswith(".py") and _is_test(path) and name in text}


def _importers(texts: Mapping[str, str]) -> Mapping[str, set[str]]:
    """Paths of the files that import a file, by its path."""
    paths = {_module(path): path for path in texts}
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for name in _imports(text):
            if name in paths:
                found[paths[name]].add(path)
    return found


def _imports(text: str) -> set[str]:
    """Names that a source imports, in functions too; ``from a import b`` may mean the module ``a`` or ``a.b``."""
    names: set[str] = set()
    for module, imported, plain in IMPORT.findall(text):
        names |= {module, *(f"{module}.{name}" for name in NAME.findall(imported))} if module else {plain}
    return names


def _naming(texts: Mapping[str, str], file: str) -> set[str]:
    """Modules whose text names a file that is no module, or the nearest of its folders that any names in quotes."""
    path = Path(file)
    if path.suffix in CHECKED_OTHERWISE:
        return set()
    if path.suffix == ".pxd":
        return {str(path.with_suffix(".py"))}
    named = [re.escape(path.name), *(f'"{re.escape(folder.name)}"' for folder in path.parents if folder.name)]
    for name in named:
        pattern = re.compile(rf"(?<![\w.-]){name}(?!\w)")
        if found := {source for source, text in texts.items() if pattern.search(text)}:
            return found
    return set()


def _is_test(path: str) -> bool:
    return Path(path).name.startswith("test_")


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
