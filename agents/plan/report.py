"""A plan as text, as a picture and as one HTML file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

from agents.plan.search import Plan, PlanReport
from agents.shadow.compare import STATED_ERROR
from agents.shadow.export import EXPORTS, MOST_MEMORY, EngineSettings, constant_drafts
from agents.shadow.scaling import scaling_note
from inferencegym.files import atomic_write, require_matplotlib, write_text
from inferencegym.models import ServeAction
from simulator.hardware.sources import reported_gb
from simulator.tables import ServingTables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE: Final = Path(__file__).resolve().parents[1] / "data" / "plan_report.html"
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b6472")
COLUMNS: Final = (
    *(
        "hardware",
        "GPUs",
        "TP",
        "replicas",
        "setting",
        "meets",
        "in time",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99 ms",
    ),
    *("margin", "GPU-h/Mtok", "cost/h", "cost/Mtok", "support"),
)


def row_of(plan: Plan) -> dict[str, Any]:
    """Cells of a plan by :data:`COLUMNS`."""
    figures = plan.figures
    best = max(plan.support, key=lambda level: plan.support[level])
    return {
        "hardware": plan.hardware,
        "GPUs": plan.n_gpus,
        "TP": plan.tensor_parallel,
        "replicas": plan.n_replicas,
        "setting": plan.policy if plan.action is None else setting_text(plan.action, plan.precision),
        "meets": "yes" if plan.meets else "no",
        "in time": f"{plan.share_in_time:.2%}",
        "TTFT p50": figures["ttft_p50_ms"],
        "TTFT p99": figures["ttft_p99_ms"],
        "TPOT p50": figures["tpot_p50_ms"],
        "TPOT p99 ms": figures["tpot_p99_ms"],
        "margin": _margin(plan),
        "GPU-h/Mtok": plan.gpu_hours_per_million_tokens,
        "cost/h": plan.cost_per_hour,
        "cost/Mtok": plan.cost_per_million_tokens,
        "support": f"{plan.support[best]:.0%} {best}",
    }


def _margin(plan: Plan) -> str:
    return f"{plan.margin:.0%}" if plan.margin >= -1.0 else "< -100%"


def setting_text(action: Mapping[str, Any], precision: str) -> str:
    """A constant setting in a few words."""
    drafts = f", {action['spec_length']} drafts" if action["spec_length"] else ""
    apart = ", prefill apart" if action["prefill_disagg"] else ""
    return f"{precision}, batch {action['batch_size']}, KV {action['kv_budget']:g}{drafts}{apart}"


def notes(report: PlanReport) -> list[str]:
    """What a reader of a plan must know, one sentence each."""
    errors = ", ".join(f"{name.upper()} {error:.1%}" for name, error in report.stated_errors.items())
    found = [
        f"Margin: distance from the nearest limit after the simulator's stated error ({errors}; measured on A100 "
        "and added on every card).",
        "Precisions below 16 bit change a model's answers; how much is not judged here.",
    ]
    if report.plans and any(plan.action and plan.action["spec_length"] for plan in report.plans):
        found.append(
            "Settings with drafts need a draft model (an EAGLE head) made for yours; how many drafts it accepts was "
            "measured with Llama-3.1-8B. --no-drafts leaves them out."
        )
    found += [f"{name}: {warning}." for name, warnings in report.warnings.items() for warning in warnings]
    found += [
        f"Nothing that was tried on {plan.hardware} meets the objectives: {plan.n_gpus} GPUs serve "
        f"{plan.share_in_time:.2%} in time, with a margin of {_margin(plan)}."
        for plan in report.unmet
    ]
    if report.left_out:
        found.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in report.left_out.items()) + ".")
    if report.searched_s < report.log["span_s"] - 1.0:
        whole = report.played_s >= report.log["span_s"] - 1.0
        played = "all of it" if whole else f"its busiest {report.played_s:,.0f} s"
        part = f"the busiest {report.searched_s:,.0f} s of the log"
        found.append(f"Searched on {part}, played on {played}; more traffic is judged on the busiest part.")
    if not report.currency:
        found.append("Without prices plans are ordered by GPUs and then by margin: a large card counts as a small one.")
    elif report.prices_from:
        found.append(f"Prices: {report.prices_from}.")
    if report.plans and not report.adaptive:
        found.append("Adaptive policies were not compared: they have precisions of their own to choose from.")
    elif report.plans:
        found.append(_adapting(report))
    if report.plans:
        found.append(scaling_note(report.autoscaling, report.played_s, "within the objectives"))
    else:
        found.append("No fleet that was tried meets the objectives: relax them, or allow more precisions and cards.")
    return found


def _adapting(report: PlanReport) -> str:
    saved, gain = report.adapting_saves_gpus, report.adapting_gain
    policies = " and ".join(dict.fromkeys(plan.policy for plan in report.adaptive))
    first = report.plans[0]
    if first.n_gpus == first.tensor_parallel:
        return "The first plan is a single replica: adapting the settings has no GPU to save."
    if not saved:
        return f"Adapting the settings ({policies}) saves no GPU against the first plan."
    told = f"Adapting the settings ({policies}) saves {saved} GPU{'s' if saved > 1 else ''} against the first plan"
    more = f"serving {gain:.1%} more of the requests in time than the best constant on as few"
    if gain > STATED_ERROR:
        return f"{told}, {more}."
    return f"{told} on paper, {more}: within the simulator's error ({STATED_ERROR:.0%}), so do not count on it."


def growth_lines(report: PlanReport) -> list[str]:
    """What more traffic does to the first plan."""
    lines = []
    for row in report.growth:
        state = "objectives met" if row["meets"] else f"not met, {row['share_in_time']:.1%} in time"
        needed = "more than were tried" if row["gpus_needed"] is None else row["gpus_needed"]
        gpus = f"{row['n_gpus']} GPU{'s' if row['n_gpus'] > 1 else ''}"
        lines.append(f"{row['traffic']:g}x the traffic: {gpus}: {state}; needed with these settings: {needed}")
    return lines


def engine_files(plan: Plan, tables: ServingTables, report: PlanReport) -> dict[str, str]:
    """The plan's settings as configuration files of engines."""
    assert plan.action is not None
    action = ServeAction.from_dict(plan.action)
    card_gb, tier = reported_gb(tables.meta), action.quant_tier.value
    static_gb = plan.memory_gb - float(tables.meta["memory_gb"]["activations_gb"])
    settings = EngineSettings(
        comments=(
            f"Plan: {plan.n_gpus} x {plan.hardware}, replicas: {plan.n_replicas}; {', '.join(report.objectives)}.",
        ),
        max_num_seqs=action.batch_size,
        memory_share=min(MOST_MEMORY, plan.memory_gb / card_gb),
        static_share=min(MOST_MEMORY, static_gb / card_gb),
        tier=tables.tiers[tier],
        drafts=constant_drafts(action.spec_length, action.batch_size),
        prefill_apart=action.prefill_disagg,
        max_batched_tokens=int(tables.meta["max_batched_tokens"]),
        prefix_caching=report.log["reused_share"] > 0,
        tensor_parallel=plan.tensor_parallel,
        n_replicas=plan.n_replicas,
    )
    return {name: write(settings) for name, write in EXPORTS.items()}


def pareto_figure(report: PlanReport) -> Figure:
    """Cost against the share of requests in time: all fleets tried, and the front."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    priced = bool(report.currency)

    def cost(plan: Plan) -> float:
        return float(plan.n_gpus) if plan.cost_per_hour is None else plan.cost_per_hour

    for i, name in enumerate(dict.fromkeys(plan.hardware for plan in report.tried)):
        mine = [plan for plan in report.tried if plan.hardware == name]
        x, y = [cost(p) for p in mine], [p.share_in_time for p in mine]
        axes.scatter(x, y, s=14, color=_COLOURS[i % len(_COLOURS)], label=name)
    lines = [""] if priced else list(dict.fromkeys(plan.hardware for plan in report.front))
    for name in lines:  # without prices each hardware has a front of its own
        front = [plan for plan in report.front if name in ("", plan.hardware)]
        axes.step(
            [cost(p) for p in front], [p.share_in_time for p in front], where="post", color="#1c2330", linewidth=0.9
        )
    axes.axhline(report.share_met, color="#5b6472", linewidth=0.8, linestyle="--")
    axes.set(xlabel=f"{report.currency} per hour" if priced else "GPUs", ylabel="share of requests in time")
    axes.grid(True, color="#e4e8ef", linewidth=0.6)
    axes.legend(frameon=False)
    return figure


def write_png(report: PlanReport, path: Path) -> Path:
    """Write the Pareto front as a picture."""
    figure = pareto_figure(report)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return path


def write_html(report: PlanReport, tables: Mapping[str, ServingTables], path: Path, title: str) -> Path:
    """Write the plan as one HTML file, nothing loaded from anywhere."""
    buffer = io.StringIO()
    pareto_figure(report).savefig(buffer, format="svg", metadata={"Date": None})
    picture = buffer.getvalue()
    log = report.log
    lead = (
        f"{log['requests']:,} requests in {log['span_s']:,.0f} s ({log['rate_rps']:.2f}/s). "
        f"Objectives: {', '.join(report.objectives)}; {report.share_met:.1%} of the first tokens in time."
    )
    plans = [row_of(plan) for plan in (*report.plans, *report.adaptive)]
    first = report.plans[0] if report.plans else None
    files = {} if first is None else engine_files(first, tables[first.hardware], report)
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        lead=escape(lead),
        head="".join(f'<th scope="col">{escape(name)}</th>' for name in COLUMNS),
        rows="".join(f"<tr>{''.join(f'<td>{escape(_cell(row[c]))}</td>' for c in COLUMNS)}</tr>" for row in plans),
        notes="".join(f"<li>{escape(line)}</li>" for line in (*growth_lines(report), *notes(report))),
        picture=picture[picture.index("<svg") :],
        files="".join(f"<h2>{escape(engine)}</h2><pre>{escape(text)}</pre>" for engine, text in files.items()),
    )
    return write_text(path, page)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
