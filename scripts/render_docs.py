"""Fill the generated blocks of the documents: ``python scripts/render_docs.py [--check]``.

A block stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. Some come from the code (tables of fields,
tasks, settings, paths), some from files that a benchmark wrote under ``benchmarks/results/``. With ``--check`` nothing
is written, and the exit status is 1 if any block is out of date.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from inferencegym.models import Field

DOCUMENTS = (
    "README.md",
    "ENVIRONMENT.md",
    "TASK_AUTHORING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
)
RESULTS = ROOT / "benchmarks" / "results"
OPENENV_PATHS = ("list_environments", "metadata", "schema", "mcp")
DETAILS = "<!-- details -->"
"""Line of a result file; documents have what stands before it, and a link to the rest."""
BLOCK = re.compile(r"(<!-- begin: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end: (?P=name) -->)", re.DOTALL)


def action_table() -> str:
    """The five knobs with type, range, default and meaning."""
    from inferencegym.models import ACTION_FIELDS

    types = {"kv_budget": "float", "spec_length": "int", "batch_size": "int", "prefill_disagg": "bool"}
    lines = ["| field | type | allowed | default | unit | meaning |", "|---|---|---|---|---|---|"]
    for f in ACTION_FIELDS.values():
        kind = types.get(f.name, "enum")
        default = {"prefill_disagg": "false", "quant_tier": "0 (FP16)"}.get(f.name, f"{f.default:g}")
        lines.append(f"| `{f.name}` | {kind} | {f.allowed()} | {default} | {f.unit} | {f.description} |")
    return "\n".join(lines)


def observation_table() -> str:
    """The fourteen numbers with range, unit and meaning."""
    from inferencegym.models import OBSERVATION_FIELDS

    return _columns(OBSERVATION_FIELDS)


def agent_columns() -> str:
    """The numbers that an agent gets of an episode: observation, knobs in force, replicas where the task scales."""
    from inferencegym.models import FLEET_FIELDS, OBSERVATION_FIELDS, SCALING_FIELDS

    return _columns({**OBSERVATION_FIELDS, **FLEET_FIELDS, **SCALING_FIELDS})


def _columns(fields: Mapping[str, Field]) -> str:
    lines = ["| # | field | range | unit | meaning |", "|---|---|---|---|---|"]
    for i, f in enumerate(fields.values()):
        name = f"priority_distribution[{i - 9}]" if f.name.startswith("priority_") else f.name
        high = "∞" if f.high == float("inf") else f"{f.high:g}"
        lines.append(f"| {i} | `{name}` | {f.low:g} to {high} | {f.unit} | {f.description} |")
    return "\n".join(lines)


def task_table() -> str:
    """Every registered task: traffic, fleet, objectives and knobs, and what adapting gains."""
    from inferencegym.tasks import list_tasks

    lines = [
        "| id | name | Gymnasium id | difficulty | arrivals/s | surges | replicas at the start | objective TTFT "
        "| knobs offered | adaptive gap |",
        "|" + "---|" * 10,
    ]
    for t in list_tasks(include_recorded=True):
        burst = "none"
        if t.burst is not None:
            burst = (
                f"{t.burst.rate_rps:g}/s for {t.burst.duration_steps} s every {t.burst.interval_steps} s"
                f" from {t.burst.offset_steps} s"
            )
        knobs = ", ".join(f"`{a}`" for a in t.active_actions)
        difficulty = "warm-up" if t.difficulty == "easy" else t.difficulty
        gap = "" if t.adaptive_gap is None else adaptive_gap(t.adaptive_gap, bool(t.static))
        rate = "recorded" if t.recorded else f"{t.arrival_rate_rps:g}"
        lines.append(
            f"| `{t.task_id}` | {t.name} | `{t.gym_id}` | {difficulty} | {rate} | {burst} | {t.fleet.n_replicas} |"
            f" {t.slo_target_ms:g} ms | {knobs} | {gap} |"
        )
    return "\n".join(lines)


def quality_reports() -> list[dict[str, Any]]:
    """Reports of `inferencegym quality all --json`."""
    reports: list[dict[str, Any]] = json.loads((RESULTS / "quality.json").read_text(encoding="utf-8"))
    return reports


def adaptive_gap(gain: float, static: bool) -> str:
    """An adaptive gap in tables."""
    return f"{gain:.4f}" + " (static)" * static


def quality() -> str:
    """What each task rewards: a row per report, with the timetable of the longest search that was run (*)."""
    from benchmarks.policies.tasks import searched_long, timetables

    timetable, longer = timetables(), searched_long()
    lines = [
        "| task | random | naive | vLLM's defaults | rules | best constant, chosen on these seeds "
        "| best timetable | best policy that observes, chosen on validation seeds | adaptive gap "
        "| foresight's lead over the best policy, two seeds | serves few: score, unserved |",
        "|" + "---|" * 11,
    ]
    for report in quality_reports():
        separation, floor, game = report["difficulty_separation"], report["adversarial_floor"], report["gameability"]
        policies = (
            floor["random"],
            separation["naive"],
            game["vllm_defaults"],
            separation["rules"],
            game["best_constant"],
            {"score": timetable[str(report["task"])]},
            report["adaptive_gap"]["policy"],
        )
        few = floor["serves_few"]
        refusing = "none" if few is None else f"{few['score']['mean']:.3f}, {few['unserved_share']:.0%}"
        cells = [f"{each['score']['mean']:.3f}" for each in policies]
        cells[3] += f" ({separation['rules']['policy']})" * (separation["rules"]["policy"] != "heuristic")
        cells[5] += "\\*" * (str(report["task"]) in longer)
        cells[-1] += f" ({policies[-1]['policy']})"
        gap = report["adaptive_gap"]
        cells += [adaptive_gap(gap["over_constant"]["mean"], gap["static"]), f"{report['headroom']['gap']:.3f}"]
        cells.append(f"**{refusing}**" if game["refusing_pays"] else refusing)
        lines.append(f"| `{report['task']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


QUESTIONS = {
    "autoscale-mix": "Does a learner beat an autoscaler under an unpredictable load? (it sets only the replicas)",
    "fleet-mix": "Does it also generalise to another mix of requests? (no policy is near the best possible score)",
    "autoscale-azure": "Does it work on recorded traffic? (a single hour)",
    "autoscale": "Does my learner work at all? (PPO beats the best constant within a minute or two)",
    "3": "Does it set five knobs at once? (announced surges: a timetable scores more than any policy that observes)",
    "sharegpt-served": "Which search finds the best settings? (static: the best constant nearly suffices)",
}


def choosing() -> str:
    """Which task answers which question, with the room that stored results leave on it."""
    from inferencegym.tasks import get_task

    reports = {str(report["task"]): report for report in quality_reports()}
    lines = [
        "| question | task | Gymnasium id | best constant | rule | best policy that observes | foresight's lead |",
        "|" + "---|" * 7,
    ]
    for name, question in QUESTIONS.items():
        report = reports[name]
        chosen = (report["difficulty_separation"]["rules"], report["adaptive_gap"]["policy"])
        cells = [f"`{get_task(name).gym_id}`", f"{report['gameability']['best_constant']['score']['mean']:.3f}"]
        cells += [f"{each['score']['mean']:.3f} ({each['policy']})" for each in chosen]
        lines.append(f"| {question} | `{name}` | {' | '.join(cells)} | {report['headroom']['gap']:.3f} |")
    return "\n".join(lines)


def calibration_table() -> str:
    """The calibrated constants of each task."""
    from inferencegym.tasks import DATA_DIR

    entries = json.loads((DATA_DIR / "calibration.json").read_text(encoding="utf-8"))["tasks"]
    lines = ["| task | floor tokens/s | optimal tokens/s | MAX_THROUGHPUT | price |", "|---|---|---|---|---|"]
    for name, c in entries.items():
        tps = f"{c['floor_tps']:.1f} | {c['optimal_tps']:.1f} | {c['max_throughput_tps']:.1f}"
        lines.append(f"| `{name}` | {tps} | {c['price']:.6f} |")
    return "\n".join(lines)


def profiles() -> dict[str, Any]:
    """Constants of model, memory, cards and engines."""
    from inferencegym.tasks import DATA_DIR

    loaded: dict[str, Any] = json.loads((DATA_DIR / "profiles.json").read_text(encoding="utf-8"))
    return loaded


def cards() -> str:
    """The cards that tables can be built for."""
    lines = ["| card | memory bandwidth, GB/s | memory budget, GB | memory limit, GB |", "|---|---|---|---|"]
    for name, card in profiles()["hardware"].items():
        sizes = " | ".join(f"{card[key]:g}" for key in ("bandwidth_gb_s", "memory_budget_gb", "memory_limit_gb"))
        lines.append(f"| `{name}` | {sizes} |")
    return "\n".join(lines)


def catalogue() -> str:
    """The shipped tables, with the shares of their decode and prefill time that measurements support."""
    from inferencegym.tasks import table_index

    parts = ("decode", "prefill")
    lines = [
        f"| table | cards | precisions | {' | '.join(f'{part}, measured or interpolated' for part in parts)} |",
        "|" + "---|" * 5,
    ]
    for name, entry in table_index().items():
        shares, tiers = entry["time_shares"], entry["tiers"]
        if f"{tiers[0]} decode" not in shares:
            continue  # tables built from the measured files count cells, in a block of their own
        supported = (
            ", ".join(
                f"{share['measured'] + share['interpolated']:.0%}"
                for share in (shares[f"{tier} {part}"] for tier in tiers)
            )
            for part in parts
        )
        lines.append(f"| `{name}` | {entry['cards_per_replica']} | {', '.join(tiers)} | {' | '.join(supported)} |")
    return "\n".join(lines)


def held_back() -> str:
    """Deployments that are refused, and warnings, each with its reason."""
    from simulator.hardware.catalogue import hardware_data

    lines = ["| what | | why |", "|---|---|---|"]
    for kind, verdict in (("held_back", "refused"), ("warnings", "warning")):
        for rule in hardware_data()[kind]:
            kinds = [rule.get(key, []) for key in ("systems", "models", "tiers", "engines")]
            words = [", ".join(names) for names in kinds if names and names != ["*"]]
            if "min_tp" in rule:
                words.append(f"{rule['min_tp']} cards and more")
            lines.append(f"| {'; '.join(words)} | {verdict} | {rule['reason']} |")
    return "\n".join(lines)


def engines() -> str:
    """The engine profiles: overheads, GEMM scale and scheduling."""
    columns = {
        "step_overhead_ms": "o0, ms",
        "sequence_overhead_ms": "o1, ms",
        "gemm_scale": "GEMM scale",
        "ttft_offset_ms": "TTFT offset, ms",
        "output_delay": "output delay, iterations",
        "scheduler": "scheduler",
        "max_batched_tokens": "prompt tokens per iteration",
        "async_scheduling": "asynchronous scheduling",
        "request_ms": "server, ms per request",
        "token_ms": "ms per output",
    }
    lines = ["| engine | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, engine in profiles()["engines"].items():
        engine = {**engine, "async_scheduling": "yes" if engine.get("async_scheduling") else "no"}
        lines.append(f"| `{name}` | " + " | ".join(str(engine.get(key, 0.0)) for key in columns) + " |")
    return "\n".join(lines)


def memory() -> str:
    """Constants of the memory formula."""
    known = profiles()
    lines = ["| constant | GB |", "|---|---|"]
    lines += [f"| weights, {tier} | {size:g} |" for tier, size in known["model"]["weights_gb"].items()]
    titles = {
        "activations_gb": "activations and CUDA context",
        "workspace_gb": "workspace kept free",
        "per_sequence_gb": "per sequence of `batch_size`",
        "speculation_gb": "draft model, if drafting",
    }
    lines += [f"| {title} | {known['memory'][key]:g} |" for key, title in titles.items()]
    return "\n".join(lines)


def commands() -> str:
    """Options of every command, as its ``--help`` prints them."""
    from cli.main import COMMANDS

    lines: list[str] = []
    for name, line in COMMANDS.items():
        said = command_help(name)
        lines += [f"## {name}", "", f"{line[0].upper()}{line[1:]}.", ""]
        for action in re.findall(r"(?m)^    ([a-z-]+)  ", said):
            lines += [f"### {name} {action}", "", *fenced(command_help(name, action)), ""]
        if f"### {name} " not in "\n".join(lines):
            lines += [*fenced(said), ""]
    return "\n".join(lines).rstrip()


def command_help(*command: str) -> str:
    """What ``--help`` prints below the description."""
    from cli.main import main

    out = io.StringIO()
    width = mock.patch.dict(os.environ, COLUMNS="110")
    with width, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    below = re.search(r"(?ms)^(?:positional arguments|options):.*", out.getvalue())
    assert below is not None, command
    return re.sub(r"(?m)^  -h, --help .*\n", "", below.group())


def fenced(text: str) -> list[str]:
    return ["```text", text.rstrip(), "```"]


def settings() -> str:
    """The server's settings with default, range and meaning."""
    from server.settings import describe_settings

    rows = describe_settings()
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row[c].replace("|", "\\|") for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def metrics() -> str:
    """What GET /metrics reports."""
    from server.metrics import METRICS

    lines = ["| metric | type | meaning |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `inferencegym_{name}` | {kind} | {text} |" for name, (kind, text) in METRICS.items())]
    )


def endpoints() -> str:
    """Paths of the HTTP interface, from the server's openapi.json."""
    from env.families import FAMILIES, SERVING
    from server.app import create_app
    from server.settings import Settings

    described = create_app(Settings(store_url="memory://")).openapi()["paths"]
    others = [f"/{name}" for name in FAMILIES if name != SERVING]
    lines = ["| method | path | what it does | also under |", "|---|---|---|---|"]
    for path, methods in described.items():
        # OpenEnv's own interface is documented by OpenEnv.
        if "{env_name}" in path or path.rsplit("/", 1)[1] in OPENENV_PATHS or path.startswith(tuple(others)):
            continue
        also = ", ".join(f"`{other}`" for other in others if other + path in described)
        lines += [f"| {method.upper()} | `{path}` | {told['summary']} | {also} |" for method, told in methods.items()]
    return "\n".join(lines)


def task_keys() -> str:
    """Every key of a task file's entry with what is allowed and its default; the keys of an object follow it."""
    from pydantic import BaseModel

    from inferencegym.messages import allowed_words, inner_models
    from inferencegym.task_files import CalibrationEntry, TaskEntry

    lines = ["| key | allowed | default |", "|---|---|---|"]

    def add(model: type[BaseModel], loc: tuple[int | str, ...], at: str = "", note: str = "") -> None:
        for name, field in model.model_fields.items():
            here, default = (*loc, name), field.default
            if isinstance(default, BaseModel):
                default = default.model_dump(exclude_none=True) or None
            shown = "required" if field.is_required() else "" if default is None else f"`{json.dumps(default)}`"
            allowed = allowed_words(TaskEntry, here)
            if allowed.startswith("[lowest, highest]"):
                allowed += f"; each {allowed_words(TaskEntry, (*here, 0))}"
            if name != "kind":
                lines.append(f"| `{at}{name}`{note} | {allowed} | {shown} |")
            # The measured constants are not written by hand.
            for inner in inner_models(field.annotation) if field.annotation != CalibrationEntry | None else ():
                kind = get_args(inner.model_fields["kind"].annotation) if field.discriminator else ()
                entry = (0,) if allowed.startswith("an array") else ()
                within = f"{at}{name}{'[]' * len(entry)}."
                add(inner, (*here, *kind, *entry), within, "".join(f" (`{each}`)" for each in kind))

    add(TaskEntry, ())
    return "\n".join(lines)


def traffic_tasks() -> str:
    """The traffic controller's tasks: load and grade."""
    from env.traffic.tasks import list_traffic_tasks

    lines = ["| id | task | steps | base load | segments, in requests/s | grade |", "|---|---|---|---|---|---|"]
    for t in list_traffic_tasks():
        segments = []
        for part in t.pattern.segments:
            end = "" if part.end_rps == part.rps else f" to {part.end_rps:g}"
            segments.append(f"{part.start_step}-{part.end_step}: {part.rps:g}{end}")
        base = f"{t.pattern.base_rps:g}/s"
        lines.append(
            f"| `{t.task_id}` | {t.name} | {t.episode_length} | {base} | {'; '.join(segments)} | `{t.grade.kind}` |"
        )
    return "\n".join(lines)


def traffic_scores() -> str:
    """Final score and return of every traffic controller and of the exact optimum."""
    from env.traffic.report import compare_traffic
    from env.traffic.tasks import list_traffic_tasks

    results = [compare_traffic(task.task_id) for task in list_traffic_tasks()]
    lines = [
        "| policy | " + " | ".join(f"`{r['task']}` score | return" for r in results) + " |",
        "|---|" + "---|---|" * len(results),
    ]
    for rows in zip(*(r["agents"] for r in results), strict=True):
        cells = [part for row in rows for part in (exact(row, "final_score"), exact(row, "return"))]
        lines.append(f"| {rows[0]['agent']} | " + " | ".join(cells) + " |")
    best = [f"{r['optimum'][key]:.4f}" for r in results for key in ("final_score", "return")]
    return "\n".join([*lines, "| exact optimum | " + " | ".join(best) + " |"])


def exact(row: dict[str, Any], key: str) -> str:
    """A number, with the half width of its interval if it has one."""
    half = row[f"{key}_ci95"]
    return f"{row[key]:.4f}" + (f" ± {half:.4f}" if half else "")


def ppo_settings() -> str:
    """Hyperparameters of PPO's runs, one column for tasks 1 to 3 and one for tasks that scale."""
    tasks = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))["tasks"]
    columns = [tasks["3"]["settings"], tasks["autoscale-mix"]["settings"]]
    titles = {
        "hidden": "hidden layers",
        "n_envs": "environments",
        "rollout_steps": "steps of a rollout, all environments",
        "n_minibatches": "minibatches of a rollout",
        "n_epochs": "epochs",
        "gamma_per_second": "discount per second",
        "gae_lambda": "GAE lambda",
        "learning_rate": "learning rate at first",
        "final_learning_rate": "learning rate at the end of the schedule",
        "clip_range": "clip range",
        "reward_scale": "rewards times",
        "schedule_steps": "steps of the schedule",
    }
    lines = ["| setting | tasks 1 to 3 | tasks that scale |", "|---|---|---|"]
    for key, title in titles.items():
        lines.append(f"| {title} | {' | '.join(_value(settings[key]) for settings in columns)} |")
    of_stages = {"hold": "seconds of a step", "share": "share of the schedule", "ent_coef": "entropy bonus"}
    for key, title in of_stages.items():
        cells = (", ".join(f"{stage[key]:g}" for stage in settings["stages"]) for settings in columns)
        lines.append(f"| {title}, in three stages | {' | '.join(cells)} |")
    return "\n".join(lines)


def _value(value: float | list[int]) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else f"{value:,}"


def written(name: str) -> Callable[[], str]:
    """Block with the text of a benchmark's result file, up to its details."""

    def read() -> str:
        path = RESULTS / f"{name}.md"
        text, cut, _ = path.read_text(encoding="utf-8").partition(DETAILS)
        more = f"\n\n[Further tables](../{path.relative_to(ROOT)}) are in the results file." if cut else ""
        return text.strip() + more

    return read


BENCHMARKS = (
    "autoscalers", "card_split", "ceilings", "fidelity", "grpo", "hardware_fidelity", "integrations", "learning",
    "live_drafts", "live_drafts_clients", "live_drafts_gpu", "live_first_come", "live_policies", "live_real_text",
    "neighbours", "open_fidelity", "performance", "plain_learners", "planned_engine", "policy_fidelity", "ray",
    "rollouts", "rollouts_policies", "routers", "transfer",
)  # fmt: skip
"""Result files that a block of the same name shows, with dashes."""

BLOCKS: dict[str, Callable[[], str]] = {
    "action-table": action_table,
    "observation-table": observation_table,
    "agent-columns": agent_columns,
    "task-table": task_table,
    "calibration-table": calibration_table,
    "quality": quality,
    "choosing": choosing,
    "cards": cards,
    "catalogue": catalogue,
    "held_back": held_back,
    "engines": engines,
    "memory": memory,
    "commands": commands,
    "settings": settings,
    "endpoints": endpoints,
    "metrics": metrics,
    "task-keys": task_keys,
    "traffic-tasks": traffic_tasks,
    "traffic-scores": traffic_scores,
    "ppo-settings": ppo_settings,
    "results": written("tasks"),
    "openenv-speed": written("openenv"),
    **{name.replace("_", "-"): written(name) for name in BENCHMARKS},
}


def render(text: str) -> str:
    """Fill the blocks of a document."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match['name']]()}\n{match[4]}", text)


def main() -> int:
    """Render or check all documents; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a block is out of date")
    arguments = parser.parse_args()
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = render(text)
        if new != text:
            stale.append(name)
            if not arguments.check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(("out of date: " if arguments.check else "rendered: ") + ", ".join(stale))
        if arguments.check:
            print("`python scripts/render_docs.py` writes them anew")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
