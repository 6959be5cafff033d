"""Mutation testing: make small faults in the code, and count those that the quick tests notice (``make mutants``).

A mutant is the program with one fault: another operator, a number one off, a condition turned round, a statement left
out. A test that fails kills it; one that no test fails for has survived. A fresh random sample per area says how much
the tests notice; ``--again`` tries the survivors of the last sample once more.

1. The quick tests run once under coverage, which notes the lines that each test runs (kept in ``build/mutants`` until
   a source or a test changes).
2. Faults are drawn from each area's sources: the same ``--seed`` draws the same from the same sources.
3. For each, the tests that run the changed lines are run in a copy of the tree until one fails: the quickest first, and
   no more of them than take ``--seconds``; then others of the module, or of servers. What a test's processes ran counts
   as run by all tests of its file. A compiled module is compiled with its fault.

A survivor that changes nothing which a caller could observe is called equivalent, by a person: its entry in the file of
results gets the key ``equivalent`` with the reason, and the table (``--table`` writes it again) counts it apart.

The tools that exist did not fit (November 2026). mutmut 3.8.1, maintained, changes neither module-level code nor
functions with decorators (properties, validators, endpoints), and wraps the others in functions that choose the mutant
as they are called, so that compiled modules cannot have any; cosmic-ray 8.7.0, maintained, runs one and the same
command for each mutant, without a choice by coverage and without samples; mutatest 3.1.0 samples and chooses by
coverage, but had its last release in 2022 and changes byte code only.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkout import copy_of_the_tree

if TYPE_CHECKING:
    import coverage

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
RESULTS = ROOT / "benchmarks" / "results" / "mutants"
QUICK = "not slow and not soak and not engine"

AREAS = {
    "grader": ("grader",),
    "environment": ("env", "inferencegym/spaces", "inferencegym/gym.py", "inferencegym/vector_env.py"),
    "simulator": ("simulator",),
    "server": ("server",),
    "verification and tasks": (
        "inferencegym/verification.py",
        "inferencegym/tasks.py",
        "inferencegym/task_files.py",
        "inferencegym/task_registry.py",
        "inferencegym/traffic.py",
        "inferencegym/seeds.py",
        "inferencegym/models.py",
        "inferencegym/messages.py",
        "inferencegym/families.py",
        "inferencegym/files.py",
        "inferencegym/errors.py",
        "inferencegym/batch_format.py",
    ),
    "agents": ("agents",),
    "live": ("live",),
    "client": ("inferencegym/client",),
    "command line": ("inferencegym/cli",),
}
# They look at files, wheels, pages in a browser and documents, not at what the code computes.
NOT_OF_THE_CODE = (
    "test_documents", "test_notebook", "test_packaging", "test_page", "test_supply_chain", "test_wheel",
)  # fmt: skip


# --- Faults --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One fault: ``before`` at ``start`` of the file's text becomes ``after``."""

    area: str
    path: str
    line: int
    last_line: int
    start: int
    before: str
    after: str
    in_function: bool
    """Whether it runs when a function is called, not when the module is imported."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"


OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
CALLS = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any",
    "floor": "ceil", "ceil": "floor", "round": "", "sum": "max", "sorted": "list", "abs": "",
}  # fmt: skip
# Whether they are there changes nothing that a caller could notice, or they are for readers and type checkers.
SPEECH = {"debug", "info", "warning", "exception", "cast", "Field", "TypeVar", "getLogger", "add_argument"}


def faults(area: str, path: str, text: str) -> Iterator[Mutant]:
    """All mutants of one file."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        whole = text[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(whole.encode()[:column].decode())

    def end_of(node: ast.expr | ast.stmt) -> int:
        return at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    bodies = [n.body for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    called = {line for body in bodies for line in range(body[0].lineno, (body[-1].end_lineno or 0) + 1)}

    def changed(node: ast.expr | ast.stmt, after: str, start: int | None = None, stop: int | None = None) -> Mutant:
        start = at(node.lineno, node.col_offset) if start is None else start
        stop = end_of(node) if stop is None else stop
        line = text.count("\n", 0, start) + 1
        last = text.count("\n", 0, stop) + 1
        return Mutant(area, path, line, last, start, text[start:stop], after, line in called)

    def between(node: ast.expr, left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[Mutant]:
        old, new = OPERATORS.get(type(operator), ("", ""))
        start, stop = end_of(left), at(right.lineno, right.col_offset)
        if old and text.count(old, start, stop) == 1:
            where = text.index(old, start, stop)
            yield changed(node, new, where, where + len(old))

    for node in _code(tree):
        if isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between(node, left, right, operator)
        elif isinstance(node, ast.BinOp):
            yield from between(node, node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(node, left, right, node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield changed(node, "", stop=at(node.operand.lineno, node.operand.col_offset))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield changed(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield changed(node, str(node.value + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield changed(node, repr(node.value * 1.1 if node.value else 1.0))
        elif isinstance(node, ast.Call) and _called(node) in CALLS and node.args:
            name = node.func
            start = end_of(name) - len(_called(node))
            yield changed(node, CALLS[_called(node)], start, end_of(name))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, ast.Compare):
            yield changed(node.test, f"(not ({text[at(node.test.lineno, node.test.col_offset) : end_of(node.test)]}))")
        elif (
            isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete))
            or (isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)))
            or (isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)))
        ):
            yield changed(node, "pass")
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield changed(node, "return None")
        elif isinstance(node, ast.Continue):
            yield changed(node, "break")
        elif isinstance(node, ast.Break):
            yield changed(node, "continue")


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _code(tree: ast.AST) -> Iterator[Any]:
    """Nodes that do something when the program runs: no annotations, decorators, messages or docstrings."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            spoken = node.value if isinstance(node, (ast.Expr, ast.Assign)) else node
            if isinstance(spoken, ast.Call) and _called(spoken) in SPEECH:
                continue
            yield node
            yield from _code(node)


def sample(per_area: int, seed: int, areas: list[str]) -> list[Mutant]:
    """``per_area`` mutants of each area, drawn evenly from all that there are."""
    drawn = []
    for area in areas:
        paths = sorted(path for name in AREAS[area] for path in _python_files(ROOT / name))
        every = [
            mutant
            for path in paths
            for mutant in faults(area, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        ]
        random.Random(f"{seed} {area}").shuffle(every)
        chosen = list(itertools.islice(filter(_parses, every), per_area))
        drawn += sorted(chosen, key=lambda mutant: (mutant.path, mutant.start))
    return drawn


def _parses(mutant: Mutant) -> bool:
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    try:
        ast.parse(text[: mutant.start] + mutant.after + text[mutant.start + len(mutant.before) :])
    except SyntaxError:  # brackets that went with what stood before them
        return False
    return True


# The page's snippets are examples that a reader changes; slow tests run each as it is.
def _python_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else [path for path in place.rglob("*.py") if "snippets" not in path.parts]


# --- Which tests run which lines -----------------------------------------------------------------------------------

GUARDS = "tests/test_golden_episodes.py"
"""They notice every number of an episode that changes, within seconds: tried last, for whatever they run."""
SETUP = "::"
"""Ends the context of fixtures: what they run belongs to all tests of the file."""


class Recorder:
    """Pytest plugin: one coverage context per test, and how long each test takes."""

    def __init__(self) -> None:
        import coverage

        measuring = coverage.Coverage.current()
        assert measuring is not None
        self.measuring = measuring
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.with_server: set[str] = set()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.measuring.switch_context(item.nodeid.split("::")[0] + SETUP)

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.measuring.switch_context(item.nodeid)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self.measuring.switch_context(item.nodeid.split("::")[0] + SETUP)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            source = item.path.read_text(encoding="utf-8")
            if "tests.servers" in source or "server" in getattr(item, "fixturenames", ()):
                self.with_server.add(item.nodeid)


class Chooser:
    """Pytest plugin: runs the named tests only, in this order."""

    def __init__(self, named: list[str]) -> None:
        self.rank = {name: rank for rank, name in enumerate(named)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.rank), key=lambda item: self.rank[item.nodeid])


def record(test_file: str, destination: Path) -> int:
    """Run one test file under coverage and write which lines each test ran.

    Lines that processes of its own ran (servers, commands) belong to all tests of the file.
    """
    import coverage

    destination.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(ROOT / name) for name in _packages()]
    measuring = coverage.Coverage(data_file=None, source=sources)
    measuring.start()
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        of_processes = Path(folder) / "processes.ini"
        listed = "".join(f"\n    {source}" for source in sources)
        of_processes.write_text(
            f"[run]\ndata_file = {folder}/data\nparallel = true\nsigterm = true\nsource ={listed}\n", encoding="utf-8"
        )
        os.environ["COVERAGE_PROCESS_START"] = str(of_processes)
        status = pytest.main([test_file, "-q", "-m", QUICK, "-p", "no:cacheprovider"], plugins=[recorder])
        measuring.stop()
        lines = dict(_lines_of(measuring.get_data()))
        for path in Path(folder).glob("data.*"):
            data = coverage.CoverageData(str(path))
            data.read()
            for source, ran in _lines_of(data):
                for line in ran:
                    lines.setdefault(source, {}).setdefault(line, set()).add(f"tests/{Path(test_file).name}{SETUP}")
    kept = {
        "seconds": {name: round(took, 3) for name, took in recorder.seconds.items() if name not in recorder.failed},
        "failed": sorted(recorder.failed),
        "with_server": sorted(recorder.with_server),
        "lines": {source: {line: sorted(tests - {""}) for line, tests in ran.items()} for source, ran in lines.items()},
    }
    destination.write_text(json.dumps(kept), encoding="utf-8")
    return int(status)


def _lines_of(data: coverage.CoverageData) -> Iterator[tuple[str, dict[str, set[str]]]]:
    for path in data.measured_files():
        found = {str(line): set(contexts) for line, contexts in data.contexts_by_lineno(path).items()}
        yield Path(path).relative_to(ROOT).as_posix(), found


def _packages() -> list[str]:
    return sorted({name.split("/")[0] for names in AREAS.values() for name in names})


@dataclass
class Map:
    """Tests by the lines that they run."""

    lines: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]
    with_server: set[str]

    def tests_of(self, mutant: Mutant, limit_s: float, n_files: int) -> list[str]:
        """Tests that may notice the mutant, the quickest first, within the limit."""
        by_line = self.lines.get(mutant.path, {})
        found = set[str]()
        if mutant.in_function:
            found = found.union(*(by_line.get(line, ()) for line in range(mutant.line, mutant.last_line + 1)))
        if not found:  # it runs when the module is imported, which is before the tests or in whichever came first
            found = found.union(*by_line.values())
        if is_compiled(mutant.path) or not found:
            found = self._of_importers(mutant.path)
        chosen = self._within({name for name in found if not name.startswith(GUARDS)}, limit_s, n_files, mutant.path)
        chosen += sorted(name for name in found & set(self.seconds) if name.startswith(GUARDS))
        # What a function keeps for later is computed in whichever test came first, and what a real server runs is not
        # seen: with the time that is left, other tests of the module, or of servers.
        others = self.with_server if mutant.path.startswith("server/") else set[str]().union(*by_line.values())
        left = max(0.0, limit_s - sum(self.seconds[name] for name in chosen))
        return chosen + self._within(others - set(chosen), left, n_files, mutant.path)

    def _within(self, tests: set[str], limit_s: float, n_files: int, path: str) -> list[str]:
        """As many of the tests as the limit allows: of files that name the module, then of those that hold most.

        They are run file by file: another order would make the fixtures of a file again and again.
        """
        by_file: dict[str, list[str]] = {}
        for name in sorted(tests & set(self.seconds), key=lambda name: self.seconds[name]):
            by_file.setdefault(name.split("::")[0], []).append(name)
        stem, module = Path(path).stem, path.removesuffix(".py").replace("/", ".")
        ranked = sorted(
            by_file.items(),
            key=lambda file: (stem in file[0] or module in (ROOT / file[0]).read_text(encoding="utf-8"), len(file[1])),
            reverse=True,
        )
        likely = [names for _, names in ranked[:n_files]]
        share = limit_s / max(1, len(likely))
        chosen = []
        for names in sorted(likely, key=lambda names: sum(self.seconds[name] for name in names)):
            spent = list(itertools.accumulate(self.seconds[name] for name in names))
            chosen += [name for name, until in zip(names, spent, strict=True) if until <= share or name is names[0]]
        return chosen

    def _of_importers(self, path: str) -> set[str]:
        module = path.removesuffix(".py").replace("/", ".")
        package, _, name = module.rpartition(".")
        importers = [
            other
            for other in self.lines
            if (f"{module} " in (text := (ROOT / other).read_text(encoding="utf-8")))
            or f"from {package} import {name}" in text
        ]
        return set[str]().union(*(tests for other in importers for tests in self.lines[other].values()))


def read_map(jobs: int) -> Map:
    """Run the quick tests under coverage, or read what they ran if nothing changed since."""
    sources = hashlib.sha256()
    for path in sorted(path for name in _packages() for path in (ROOT / name).rglob("*.py")):
        sources.update(path.read_bytes())
    files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if path.stem not in NOT_OF_THE_CODE]
    kept = {}
    for path in files:
        digest = hashlib.sha256(sources.digest() + path.read_bytes()).hexdigest()[:16]
        kept[path] = WORK / "map" / f"{path.stem}-{digest}.json"
    missing = [path for path in files if not kept[path].exists()]
    if missing:
        print(f"recording which lines the tests of {len(missing)} files run", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        for path, (status, output) in zip(
            missing,
            pool.map(lambda path: _run([str(Path(__file__)), "--record", str(path), str(kept[path])], ROOT), missing),
            strict=True,
        ):
            if status not in (0, 5):
                print(f"{path.name} fails without any fault, and what failed is left out:\n{output[-1500:]}")
    lines: dict[str, dict[int, set[str]]] = {}
    seconds: dict[str, float] = {}
    with_server: set[str] = set()
    for path in files:
        found = json.loads(kept[path].read_text(encoding="utf-8"))
        seconds |= found["seconds"]
        with_server |= set(found["with_server"])
        for source, by_line in found["lines"].items():
            for line, tests in by_line.items():
                named = lines.setdefault(source, {}).setdefault(int(line), set())
                for test in tests:
                    named |= set(found["seconds"]) if test.endswith(SETUP) else {test}
    return Map(lines, seconds, with_server)


def _run(arguments: list[str], where: Path, limit_s: float = 3600) -> tuple[int, str]:
    # Nobody's server and nobody's settings: the tests start their own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INFERENCEGYM_")}
    extra = environment.get("PYTHONPATH", "").replace(str(ROOT), str(where))
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(where), extra])), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=where,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return TIMED_OUT, ""
    return process.returncode, output.decode(errors="replace")


TIMED_OUT = -1


# --- Trying --------------------------------------------------------------------------------------------------------


def is_compiled(path: str) -> bool:
    return (ROOT / path).with_suffix(".pxd").exists()


def fresh_tree(place: Path) -> Path:
    """A copy of the checkout with its present changes and its compiled modules."""
    shutil.rmtree(place, ignore_errors=True)
    copy_of_the_tree(place)
    for built in (path for name in _packages() for path in (ROOT / name).rglob("*.so")):
        shutil.copy2(built, place / built.relative_to(ROOT))
    return place


def attempt(mutant: Mutant, tests: list[str], expected_s: float, tree: Path) -> dict[str, Any]:
    """What the tests say of one mutant."""
    if not tests:
        return {"outcome": "survived", "by": "no test runs it"}
    source = tree / mutant.path
    original = source.read_text(encoding="utf-8")
    assert original.startswith(mutant.before, mutant.start), f"{mutant} is not what stands there"
    stop = mutant.start + len(mutant.before)
    compiled = {path: path.read_bytes() for path in source.parent.glob(f"{source.stem}.*.so")}
    try:
        source.write_text(original[: mutant.start] + mutant.after + original[stop:], encoding="utf-8")
        if compiled:
            status, output = _run(["setup.py", "--quiet", "build_ext", "--inplace"], tree)
            if status:
                return {"outcome": "does not build", "by": output.strip().splitlines()[-1] if output else ""}
        chosen = tree / "chosen-tests.json"
        chosen.write_text(json.dumps(tests), encoding="utf-8")
        # A fault may make a loop endless; a busy machine may make a test slow.
        status, output = _run(["scripts/mutants.py", "--only", str(chosen)], tree, limit_s=60 + 6 * expected_s)
    finally:
        source.write_text(original, encoding="utf-8")
        for path, content in compiled.items():
            path.write_bytes(content)
    if status == TIMED_OUT:
        return {"outcome": "killed", "by": "it never ends"}
    if status == 0:
        return {"outcome": "survived", "by": f"{len(tests)} tests pass"}
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        return {"outcome": "survived", "by": "no test runs it"}
    named = [line for line in output.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    failed = [line.split(" ", 1)[1].split(" - ")[0] for line in named]
    return {"outcome": "killed", "by": failed[0] if failed else "the program ends"}


def attempt_all(mutants: list[Mutant], known: Map, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Try all mutants in copies of the tree, one copy per job."""
    trees: SimpleQueue[Path] = SimpleQueue()
    for job in range(arguments.jobs):
        trees.put(fresh_tree(WORK / f"tree{job}"))

    def one(mutant: Mutant) -> dict[str, Any]:
        tests = known.tests_of(mutant, arguments.seconds, arguments.files)
        tree = trees.get()
        began = time.monotonic()
        try:
            said = attempt(mutant, tests, sum(known.seconds[name] for name in tests), tree)
        finally:
            trees.put(tree)
        print(f"{said['outcome']:9} {time.monotonic() - began:5.1f} s  {mutant}  ({said['by']})", flush=True)
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        place = {"text": text.splitlines()[mutant.line - 1].strip(), "column": _column(mutant, text)}
        return dataclasses.asdict(mutant) | place | said

    with ThreadPoolExecutor(arguments.jobs) as pool:
        return list(pool.map(one, mutants))


# --- The table -----------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """Mutants of each area, and how many the tests killed when the sample was drawn and after it was tried again.

    Where some are equivalent, they are counted, and the shares of the others follow.
    """
    counted = [one for one in results if one["outcome"] != "does not build"]
    heads = ["killed at first", "killed with the tests of today"]
    equivalent = any("equivalent" in one for one in counted)
    if equivalent:
        heads += ["equivalent", *(f"{head}, of the others" for head in heads)]
    lines = [f"| area | mutants | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for area in [*dict.fromkeys(one["area"] for one in counted), "all"]:
        tried = [one for one in counted if area in (one["area"], "all")]
        others = [one for one in tried if "equivalent" not in one]
        cells = _killed(tried)
        if equivalent:
            cells += [str(len(tried) - len(others)), *_killed(others)]
        lines.append(f"| {area} | {len(tried)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _killed(tried: list[dict[str, Any]]) -> list[str]:
    """How many were killed at first, and by the tests of today."""
    first = sum(one.get("first", one["outcome"]) == "killed" for one in tried)
    now = sum(one["outcome"] == "killed" for one in tried)
    return [f"{killed} ({killed / len(tried):.0%})" for killed in (first, now)]


def main() -> int:
    """Draw a sample and try it, or try the survivors of the last one again; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--area", action="append", choices=AREAS, help="this area only (may be given several times)")
    parser.add_argument("--per-area", type=int, default=25, help="mutants of each area (default: 25)")
    parser.add_argument("--seed", type=int, default=1, help="which sample is drawn (default: 1)")
    parser.add_argument("--seconds", type=float, default=60, help="tests to run per mutant, in seconds (default: 60)")
    parser.add_argument("--files", type=int, default=6, help="files they are taken from (default: 6)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (default: one a core)")
    parser.add_argument("--again", action="store_true", help="the survivors of the last sample, after new tests")
    parser.add_argument("--table", action="store_true", help="only write the table again, from the last results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the table, without its ending")
    parser.add_argument("--record", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        return record(arguments.record[0], Path(arguments.record[1]))
    if arguments.only:
        named = json.loads(arguments.only.read_text(encoding="utf-8"))
        files = sorted({name.split("::")[0] for name in named})
        return int(pytest.main([*files, "-x", "-q", "-p", "no:cacheprovider"], plugins=[Chooser(named)]))

    areas = arguments.area or list(AREAS)
    stored = arguments.out.with_suffix(".json")
    last = json.loads(stored.read_text(encoding="utf-8"))["mutants"] if stored.exists() else []
    if arguments.table:
        print(text := table(last))
        arguments.out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        return 0
    again = {}
    if arguments.again:
        survivors = (
            (index, one) for index, one in enumerate(last) if one["outcome"] == "survived" and "equivalent" not in one
        )
        again = {index: found for index, one in survivors if (found := _again(one))}
    mutants = list(again.values()) if arguments.again else sample(arguments.per_area, arguments.seed, areas)
    known = read_map(arguments.jobs)
    results = attempt_all(mutants, known, arguments)
    if arguments.again:
        new = dict(zip(again, results, strict=True))
        results = [{**new[index], "first": "survived"} if index in new else one for index, one in enumerate(last)]
    else:
        results = [*results, *(one for one in last if one["area"] not in areas)]
        results.sort(key=lambda one: list(AREAS).index(one["area"]))
    text = table(results)
    print(text)
    stored.write_text(json.dumps({"seed": arguments.seed, "mutants": results}, indent=1) + "\n", encoding="utf-8")
    arguments.out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    return 0


def _again(kept: dict[str, Any]) -> Mutant | None:
    """A mutant of the file of results, where it stands now; None if its line is no longer there."""
    text = (ROOT / kept["path"]).read_text(encoding="utf-8") if (ROOT / kept["path"]).exists() else ""
    lines = text.splitlines()
    same = [
        mutant
        for mutant in faults(kept["area"], kept["path"], text)
        if (mutant.before, mutant.after, lines[mutant.line - 1].strip())
        == (kept["before"], kept["after"], kept["text"])
    ]
    return min(same, key=lambda m: (abs(m.line - kept["line"]), abs(_column(m, text) - kept["column"])), default=None)


def _column(mutant: Mutant, text: str) -> int:
    return mutant.start - (text.rfind("\n", 0, mutant.start) + 1)


if __name__ == "__main__":
    sys.exit(main())
