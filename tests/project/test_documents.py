"""The documents do what they say: commands and snippets are run, numbers measured again.

``test_task_authoring.py`` and ``test_traffic_tasks.py`` follow TASK_AUTHORING.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import gymnasium
import pytest
import yaml

import inferencegym
from agents.episodes import run_episodes
from agents.evaluate import evaluate, interval
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS
from env.reference import ReferenceFleet
from env.traffic.report import compare_traffic
from env.traffic.tasks import list_traffic_tasks
from inferencegym import InferenceEnv
from inferencegym.models import MetricsSnapshot
from inferencegym.tasks import get_task
from setup import whole_source
from simulator.kernel.arrays import OVER_SECONDS
from simulator.kernel.serving import EngineParams
from tests.ops.test_import_bench import benchmark
from tests.servers import RunningServer, running_server

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))
RENDERED = ("README.md", "ENVIRONMENT.md", *CHAPTERS)
DOCUMENTS = (*RENDERED, "TASK_AUTHORING.md", "CONTRIBUTING.md")

FENCED = (
    r"(?m)(?:^ *<!-- test: (?P<note>.*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<body>(?:.*\n)*?)(?P=indent)```$"
)


@dataclass(frozen=True)
class Snippet:
    """One fenced block, and what the comment before it says about testing it.

    ``<!-- test: A => B -->`` plays ``A`` as ``B``: a shorter run, or a file of ours for a reader's own. Several are
    separated by ``;``.
    """

    document: str
    line: int
    language: str
    text: str
    note: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    def reduced(self) -> str:
        """The text as it is tested."""
        text = self.text
        for change in filter(None, map(str.strip, self.note.split(";"))):
            old, arrow, new = change.partition(" => ")
            assert arrow, f"{self.place}: {change!r} is not A => B"
            assert old in text, f"{self.place}: {change!r} changes nothing"
            text = text.replace(old, new)
        return text


def snippets(document: str) -> Iterator[Snippet]:
    text = (ROOT / document).read_text(encoding="utf-8")
    for match in re.finditer(FENCED, text):
        line = text.count("\n", 0, match.start("body"))
        yield Snippet(document, line, match["language"], textwrap.dedent(match["body"]), match["note"] or "")


def every(language: str, *documents: str) -> list[Snippet]:
    return [each for name in documents for each in snippets(name) if each.language == language]


def shell(script: str, folder: Path, **settings: str) -> str:
    """Run a script as a reader would, with our commands on the path; returns what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MINARI_DATASETS_PATH": str(folder), **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def python(script: str, folder: Path, **settings: str) -> str:
    file = folder / "snippet.py"
    file.write_text(script, encoding="utf-8")
    return shell("python snippet.py", folder, **settings)


# --- README ---------------------------------------------------------------------------------------------------------


def test_the_first_episode_prints_the_line_that_the_readme_shows(tmp_path: Path) -> None:
    first = every("python", "README.md")[0]
    shown = every("text", "README.md")[0]
    assert python(first.text, tmp_path) == shown.text


def test_the_quickstart_is_five_lines_and_ends_with_a_verified_score(server: RunningServer, tmp_path: Path) -> None:
    (block,) = (each for each in every("bash", "README.md") if "curl" in each.text)
    assert len(block.text.strip().splitlines()) == 5
    said = shell(block.text.replace("http://localhost:7860", server.url), tmp_path)
    graded = json.loads(said[said.rindex('{"score"') :])
    assert (graded["verified"], graded["done"], graded["steps"]) == (True, True, 200)
    played = evaluate('constant:{"batch_size": 128, "kv_budget": 0.9, "quant_tier": "INT8"}', get_task(3), [42])
    assert graded["score"] == pytest.approx(played.scores[0], abs=1e-6)


def test_the_quickstart_plays_on_a_server_with_a_key_and_prints_what_is_missing_without_it(tmp_path: Path) -> None:
    (block,) = (each for each in every("bash", "README.md") if "curl" in each.text)
    with running_server(tmp_path, api_key="correct horse", store_url="memory://") as server:
        # An interactive shell goes on after a command that failed.
        script = "set +e\n" + block.text.replace("http://localhost:7860", server.url)
        assert '"verified":true' in shell(script, tmp_path, INFERENCEGYM_API_KEY="correct horse")
        refused = shell(script.replace("seq 199", "seq 1"), tmp_path)
    assert refused.count('"code":"unauthorized","next":"set INFERENCEGYM_API_KEY') == 2, "of the step and of the grade"


def test_the_two_commands_of_the_readme_are_targets_of_make() -> None:
    (block,) = (each for each in every("bash", "README.md") if "make serve" in each.text)
    targets = re.findall(r"(?m)^make (\w+)", block.text)
    assert targets == ["serve", "test"]
    for target in targets:
        planned = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert planned.returncode == 0, planned.stderr


def test_the_plan_of_the_readme_prints_the_lines_that_it_shows() -> None:
    (command,) = (each.text for each in every("bash", "README.md") if "inferencegym plan" in each.text)
    shown = every("text", "README.md")[-1].text.splitlines()
    printed = shell(command, ROOT).splitlines()
    assert len(shown) == 9
    assert [line for line in shown if not any(each.startswith(line) for each in printed)] == []


def readme_commands() -> list[tuple[Snippet, str]]:
    (block,) = (each for each in every("bash", "docs/first-steps.md") if "inferencegym simulate" in each.text)
    lines = (line for line in block.reduced().splitlines() if line and not line.startswith("#"))
    return [(block, line.partition("  #")[0].strip()) for line in lines]


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that these commands use: a request log, results of an engine, an episode."""
    folder = tmp_path_factory.mktemp("reader")
    log = (ROOT / "server/web/data/azure-conversation.csv").read_text(encoding="utf-8").splitlines()
    (folder / "requests.csv").write_text("\n".join(log[:120]) + "\n", encoding="utf-8")
    (folder / "tasks").mkdir()
    (folder / "results").mkdir()
    for i, (rate, requests) in enumerate([(2.0, 30), (5.0, 50), (8.0, 60)]):
        result = benchmark(rate, 0, requests, seed=i)
        (folder / "results" / f"run{i}.json").write_text(json.dumps(result), encoding="utf-8")
    env = InferenceEnv(task_id=1, seed=7)
    env.reset()
    while not env.done:
        env.step({"batch_size": 64})
    played = {"task": 1, "seed": 7, "config": env.config_dict(), "steps": env.episode_log}
    (folder / "episode.json").write_text(json.dumps(played), encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for _, line in readme_commands()], ids=lambda line: line.split()[1])
def test_every_command_of_the_first_steps_does_what_it_says(command: str, readers_folder: Path) -> None:
    assert shell(command, readers_folder).strip()


# --- Running inference ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_of_the_chapter_on_operation_run_in_order_as_they_stand(tmp_path: Path) -> None:
    """In a folder with nothing but the clone's log, and what Envoy's log format and vLLM's benchmark write."""
    (tmp_path / "server").symlink_to(ROOT / "server")
    log = (ROOT / "server/web/data/azure-conversation.csv").read_text(encoding="utf-8").splitlines()
    (envoy,) = (json.loads(each.text) for each in every("json", "docs/operators.md"))
    lines = [json.dumps(envoy_line(envoy, 0.0, None, None) | {"path": "/v1/models", "model": None})]
    for arrival_s, prompt, output in (map(float, line.split(",")) for line in log[1:]):
        lines.append(json.dumps(envoy_line(envoy, arrival_s, int(prompt), int(output))))
    (tmp_path / "access.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = benchmark(5.0, 0, 200, seed=1) | {"model_id": "meta-llama/Llama-3.1-8B-Instruct"}
    (tmp_path / "bench.json").write_text(json.dumps(result), encoding="utf-8")
    ours = [block.reduced() for block in every("bash", "docs/operators.md")]
    script = re.sub(r"(?m)^vllm (?:.*\\\n)*.*\n", "", "".join(ours))
    assert script.count("inferencegym plan --trace access.jsonl") == 1
    printed = shell(script, tmp_path)
    assert "access.jsonl: table; " in printed
    assert printed.count("\nRent ") == script.count("inferencegym plan")
    shown = [line for each in every("text", "docs/operators.md") for line in each.text.splitlines()]
    assert [line for line in shown if line not in printed.splitlines()] == []


def envoy_line(format: dict[str, str], arrival_s: float, prompt: int | None, output: int | None) -> dict[str, object]:
    """What Envoy writes for one request: a value for each of its operators, null where it has none."""
    values = {
        "%START_TIME%": f"{datetime(2026, 1, 5, 9, tzinfo=UTC) + timedelta(seconds=arrival_s):%Y-%m-%dT%H:%M:%S.%fZ}",
        "%DURATION%": 1500,
        "%RESPONSE_CODE%": 200,
        "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%": "/v1/chat/completions",
        "%REQ(X-AI-EG-MODEL)%": "meta-llama/Llama-3.1-8B-Instruct",
        "%DYNAMIC_METADATA(PROMPT)%": prompt,
        "%DYNAMIC_METADATA(OUTPUT)%": output,
    }
    return {name: values[operator] for name, operator in format.items()}


# --- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("snippet", every("python", *RENDERED), ids=lambda s: s.place)
def test_every_python_snippet_runs(snippet: Snippet, server: RunningServer, tmp_path: Path) -> None:
    python(snippet.reduced().replace("http://localhost:7860", server.url), tmp_path)


# --- Commands that no test runs
# -----------------------------------------------------------------------------------------


def test_every_inferencegym_command_in_the_documents_exists_with_its_options() -> None:
    """Also commands in running text, which no test runs."""
    wrong = []
    helps: dict[str, str] = {}
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for line in re.findall(r"`(inferencegym [a-z-]+[^`\n]*)`", text) + re.findall(
            r"(?m)^ *(inferencegym .*)$", text
        ):
            command = line.split()[1]
            if command in ("live", "leaderboard") and len(line.split()) > 2:
                command += f" {line.split()[2]}"
            if command not in helps:
                done = subprocess.run(
                    [sys.executable, "-m", "inferencegym", *command.split(), "--help"],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                helps[command] = done.stdout if done.returncode == 0 else ""
            options = re.findall(r"(?<!\S)--[a-z-]+", line.partition("  #")[0])
            wrong += [f"{document}: {line}: {each}" for each in options if each not in helps[command]]
            if not helps[command]:
                wrong.append(f"{document}: {line}: no such command")
    assert wrong == []


def test_every_path_in_code_marks_exists() -> None:
    """``scripts/x.py``, ``simulator/data/y.json`` and the like: documents must not name files that no longer exist."""
    missing = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for name in re.findall(r"`(?:python )?((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|parquet|yaml|sh))\b", text):
            if not (ROOT / name).exists() and not name.startswith(("results/", "runs/", "build/")):
                missing.append(f"{document}: {name}")
    assert missing == []


def test_every_test_that_a_document_names_exists() -> None:
    """The laws of CONTRIBUTING.md name the tests that check them."""
    missing = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
            if f"def {name}(" not in source:
                missing.append(f"{document}: {file}::{name}")
    assert missing == []


def test_the_laws_are_numbered_without_gaps() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    numbers = [int(n) for n in re.findall(r"(?m)^\| (\d+) \|", text)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_environment_chapter_says_how_the_seconds_of_every_metric_add_up() -> None:
    text = (ROOT / "ENVIRONMENT.md").read_text(encoding="utf-8")
    paragraph = text.partition('- **`info["metrics"]`**: ')[2].partition("Violations in")[0]
    words = dict(zip(("mean", "sum", "max"), re.split("; (?:sums|maxima) of", paragraph), strict=True))
    said = {name: how for how, part in words.items() for name in re.findall(r"`(\w+)`", part)}
    assert said == {name: OVER_SECONDS[name] for name in get_type_hints(MetricsSnapshot)}


def prose(text: str) -> Iterator[str]:
    """Lines that can be wrapped: no generated block, table row, fenced code, comment, lone picture or link."""
    text = re.sub(r"(?s)<!-- begin: .*?<!-- end: [\w-]+ -->", "", text)
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", text)
    for line in text.splitlines():
        if not line.startswith(("|", "<!--")) and not re.fullmatch(r" *\[?!?\[.*\)", line):
            yield line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_of_prose_end_at_120_characters(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert [line for line in prose(text) if len(line) > 120] == []


def test_the_specification_is_short() -> None:
    assert len((ROOT / "ENVIRONMENT.md").read_text(encoding="utf-8").splitlines()) <= 300


def test_the_readme_names_every_chapter() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Documents\n")[1]
    assert [chapter for chapter in CHAPTERS if f"]({chapter})" not in table] == []


def test_the_citation_is_valid_and_names_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "InferenceGym contributors"}]
    assert citation["version"] == inferencegym.__version__


# --- Numbers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def render_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_docs", ROOT / "scripts" / "render_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_generated_blocks_are_what_code_and_measurements_give(document: str, render_docs: ModuleType) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert render_docs.render(text) == text, "run `python scripts/render_docs.py`"


def test_every_generated_block_stands_in_one_document(render_docs: ModuleType) -> None:
    texts = [(ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS]
    found = [match["name"] for text in texts for match in render_docs.BLOCK.finditer(text)]
    assert sorted(found) == sorted(render_docs.BLOCKS)


def test_the_tables_of_every_run_stay_in_the_results_file(render_docs: ModuleType) -> None:
    whole = (render_docs.RESULTS / "learning.md").read_text(encoding="utf-8")
    shown = render_docs.BLOCKS["learning"]()
    assert "| training seed |" in whole
    assert "| training seed |" not in shown
    assert shown.endswith("[Further tables](../benchmarks/results/learning.md) are in the results file.")


def test_the_constants_of_the_dynamics_are_those_of_the_engine() -> None:
    text = (ROOT / "docs/dynamics.md").read_text(encoding="utf-8")
    stated = {name: float(value) for name, value in re.findall(r"(?m)^\| `(\w+)`[^|]*\| ([\de.]+) \|", text)}
    source = whole_source(ROOT / "simulator/kernel/step.py")
    of_kernel = {name: float(value) for name, value in re.findall(r"(?m)^([A-Z]\w+) = ([\de.-]+)$", source)}
    assert stated == asdict(EngineParams()) | {name: of_kernel[name] for name in stated if name.isupper()}


def table_rows(document: str, block: str) -> dict[str, list[str]]:
    """Cells of a generated table's rows by their first cell."""
    text = (ROOT / document).read_text(encoding="utf-8")
    body = text.split(f"<!-- begin: {block} -->\n", 1)[1].split(f"<!-- end: {block} -->", 1)[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in body.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["naive", "heuristic"])
def test_the_scores_of_the_results_are_measured_again(agent: str, render_docs: ModuleType) -> None:
    """All 30 held-out seeds, five in the reference: the numbers must come out as printed, stricter than intervals."""
    shown = table_rows("docs/results.md", "results")[agent]
    references = json.loads((render_docs.RESULTS / "policy_fidelity.json").read_text(encoding="utf-8"))["tasks"]
    measured = []
    for task_id in (1, 2, 3):
        task = get_task(task_id)
        score = interval(evaluate(agent, task).scores)
        measured.append(f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]")
        played = run_episodes(task, make_agent(agent, task), HELD_OUT_SEEDS[:5], dynamics=ReferenceFleet)
        listed = references[str(task_id)]["agents"][agent]["reference"]["score"]
        assert f"{played.scores().mean():.3f}" == f"{listed:.3f}"
    assert measured == shown


def test_no_controller_of_the_documents_table_beats_the_exact_optimum() -> None:
    rows = table_rows("docs/traffic.md", "traffic-scores")
    best = [float(cell) for cell in rows.pop("exact optimum")]
    for name, cells in rows.items():
        earned = [float(cell.split(" ")[0]) for cell in cells]
        assert all(e <= b for e, b in zip(earned, best, strict=True)), name
    assert best == [
        round(number, 4)
        for result in (compare_traffic(task.task_id, ["planner"]) for task in list_traffic_tasks())
        for number in result["optimum"].values()
    ]


# --- An agent of your own -------------------------------------------------------------------------------------------


def test_the_policy_of_the_learning_chapter_scores_what_the_chapter_shows(tmp_path: Path) -> None:
    (block,) = (each for each in every("python", "docs/learning.md") if "class RateScaler" in each.text)
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "agents.py").write_text(block.text, encoding="utf-8")
    (command,) = (each.text for each in every("bash", "docs/learning.md") if "my_lab.agents:RateScaler" in each.text)
    (shown,) = every("text", "docs/learning.md")
    assert shell(command, tmp_path).startswith(shown.text)


def test_observations_have_the_sizes_that_the_learning_chapter_lists() -> None:
    text = (ROOT / "docs/learning.md").read_text(encoding="utf-8")
    ids = {
        "serving tasks": "AdversarialMultiTenant-v2",
        "`autoscale`": "AutoscaledChat-v2",
        "other tasks that": "AutoscaledChatMix-v2",
    }
    for row, env_id in ids.items():
        (line,) = (each for each in text.splitlines() if each.startswith(f"| {row}") and each.count("|") == 6)
        sizes = [int(number) for number in re.findall(r"\| (\d+)", line)]
        envs = [
            gymnasium.make(f"inferencegym.gym:InferenceGym/{env_id}", observation=form)
            for form in ("raw", "scheduled", "full")
        ]
        envs[0].reset(seed=0)
        own: Any = envs[0].unwrapped
        assert sizes == [*(env.observation_space.shape[0] for env in envs), own.agent_observation.shape[1]]
    for row, env_id in {
        "agent sessions | {} in": "RolloutMix-v1",
        "traffic controller | {} |": "TrafficHard-v1",
    }.items():
        (size,) = gymnasium.make(f"inferencegym.gym:InferenceGym/{env_id}").observation_space.shape
        assert f"| {row.format(size)}" in text
