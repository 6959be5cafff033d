"""Reports of plans and comparisons, as printed text and as an HTML page, and their figures.

A page is one self-contained file: tables, sentences, figures as inline SVG, and engine settings. Figures need
matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

from agents.policies.vllm_defaults import vllm_defaults
from inferencegym.files import atomic_write, require_matplotlib, write_text
from ops import scaling
from ops.capacity import GRID
from ops.margins import LOADS
from ops.objectives import WINDOW_S, Objective, parse_objective
from ops.shadow import OWN_PRECISION
from simulator.hardware.catalogue import usual_name
from simulator.hardware.engine_times import TIER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ops.capacity import PolicyOutcome
    from ops.plan import Plan, PlanReport
    from ops.shadow import ShadowReport
    from simulator.hardware.tables import ServingTables

TEMPLATE: Final = Path(__file__).with_name("data") / "report.html"
COLOURS: Final = ("#5b6472", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that colour-blind readers can tell apart (Okabe and Ito)."""
SERVER_BOUND: Final = 0.8
"""Share of its time above which a replica's API server is said to bound it."""
SURE_REQUESTS: Final = 100
"""Requests beyond the percentile of an objective, below which the report calls the margin uncertain."""
FIRST_TOKEN: Final = parse_objective("ttft_p99=500")
"""Latency (with any limit) that a plan shows where no objective bounds it for a share of the requests."""
FP8_KV_NOTE: Final = (
    "The KV cache is in FP8: it holds twice as many tokens, and attention takes the times measured with such a cache, "
    "unless a table's note says otherwise."
)
_INK: Final = "#1c2330"


Rows = Sequence[Mapping[str, object]]
"""A table: the cells of each row by heading; :func:`plain` formats them."""


@dataclass(frozen=True, slots=True)
class Report:
    """An answer, its tables, by title (empty ones are not shown), and notes, one sentence per line.

    ``refused`` are sentences on requests that are too long to be served; they stand before the tables. ``details``
    come last, under their own heading.
    """

    lead: str
    tables: Mapping[str, Rows]
    lines: Sequence[str]
    refused: Sequence[str] = ()
    details: Report | None = None


def plain(value: object) -> str:
    """A value for human readers: no exponents, thousands separators, about three significant digits."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if value != value:
        return "-"
    size = abs(value)
    digits = 0 if float(value).is_integer() or size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 4
    return f"{value:,.{digits}f}"


def write_page(
    path: Path,
    title: str,
    read: Sequence[str],
    report: Report,
    figures: Mapping[str, Figure],
    files: Mapping[str, str],
) -> Path:
    """Write a report on a log as one HTML file, with ``figures`` by caption and settings ``files`` by engine.

    ``read`` says how the log was read, one line each.
    """
    parts = [f"<p><strong>{escape(report.lead)}</strong></p>", *_body(report)]
    for i, (caption, figure) in enumerate(figures.items()):
        parts.append(f"<figure>{_svg(figure, f'figure{i}')}<figcaption>{escape(caption)}</figcaption></figure>")
    if report.details:
        parts += [f"<h2>{escape(report.details.lead)}</h2>", *_body(report.details)]
    parts.append(_listed(read))
    parts += [f"<h2>{escape(engine)}</h2><pre>{escape(text)}</pre>" for engine, text in files.items()]
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(title=escape(title), body="\n".join(parts))
    return write_text(path, page)


def _body(report: Report) -> list[str]:
    parts = [f"<p>{escape(text)}</p>" for text in report.refused]
    for heading, rows in report.tables.items():
        if not rows:
            continue
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in rows[0])
        cells = [[f"<td>{escape(plain(cell))}</td>" for cell in row.values()] for row in rows]
        body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        parts += [f"<h2>{escape(heading)}</h2>", table]
    return [*parts, _listed(report.lines)]


def write_picture(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG or SVG, depending on the file's suffix."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return path


def _listed(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element whose ids start with ``name``, undated: equal reports give equal files."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "inferencegym"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text[text.index("<svg") :])


# ---------------------------------------------------------------- plans


def plan_report(report: PlanReport) -> Report:
    """A plan: the answer, the cheapest fleets, what may change the answer, and details."""
    if report.undecided:
        return Report(report.undecided, {}, [], refused_lines(report))
    chosen, scaled = report.recommended, _scaling_rows(report.autoscaling)
    if chosen is None:
        title = "nearest fleet of each hardware"
        shown = sorted(report.unmet, key=lambda plan: (-plan.share_in_time, -plan.margin))
    else:
        title = f"{'cheapest fleet' if report.currency else 'fewest GPUs'} of each hardware"
        title = title if chosen == report.plans[0] else f"recommended fleet, then the {title} that are likely enough"
        title += "" if report.currency else " (no prices: of equally many, the smallest card first)"
        shown = [chosen, *(plan for plan in report.plans if plan != chosen)]
    return Report(
        " ".join(answer(report)),
        {title: [_plan_cells(report, plan) for plan in shown]},
        cautions(report),
        refused_lines(report),
        Report("Details", {f"{_first_plan(report)}, its replicas set by an autoscaler": scaled}, details(report)),
    )


def _first_plan(report: PlanReport) -> str:
    """What the first plan is, on which policies and autoscalers were played."""
    recommended = report.plans and report.plans[0] == report.recommended
    return "the recommended fleet" if recommended else "the first fleet that is likely enough"


def notes(report: PlanReport) -> list[str]:
    """All that a report says in sentences."""
    return [*answer(report), *refused_lines(report), *cautions(report), *details(report)]


def _objectives(report: PlanReport) -> list[Objective]:
    return [parse_objective(text) for text in report.objectives]


def _expected(plan: Plan, objective: Objective) -> float:
    """The latency that an objective bounds, times the median error of measured runs (ms)."""
    return plan.figures[objective.figure] * plan.errors[objective.quantity].p50


def _plan_cells(report: PlanReport, plan: Plan) -> dict[str, object]:
    """Cells of a plan by heading."""
    answered = plan.tokens_per_s > 0.0  # without an answer there is no latency
    shown = [*_objectives(report), *([] if report.share_met else [FIRST_TOKEN])]
    return {
        "hardware": plan.hardware,
        "GPUs": plan.n_gpus,
        **({"for 90%": _for_90(report, plan)} if report.plans else {}),
        **({f"{report.currency}/h": plan.cost_per_hour} if report.currency else {}),
        "replicas": _replicas(plan),
        "setting": plan.policy if plan.action is None else _setting_text(plan.action, plan.precision),
        "verdict": _verdict(report, plan),
        **({"in time": f"{plan.share_in_time:.2%}"} if report.share_met else {}),
        **({} if plan.windows_met is None else {"windows": f"{plan.windows_met:.0%}"}),
        **{f"{o.label} ms": _expected(plan, o) if answered else None for o in shown},
        "margin": _margin(plan) if answered else None,
    }


def _for_90(report: PlanReport, plan: Plan) -> object:
    """GPUs of the fleet on this hardware that meets with 90%, and its precision if that is another one."""
    found = next((each for each in report.certain if each.hardware == plan.hardware), None)
    if found is None or found.precision == plan.precision:
        return None if found is None else found.n_gpus
    return f"{found.n_gpus} ({found.precision})"


def _verdict(report: PlanReport, plan: Plan) -> str:
    """The verdict, with its reason where no latency is the reason."""
    refused = plan.margin >= 0.0 and plan.share_in_time < report.share_met
    return f"{plan.verdict}: {1.0 - plan.share_in_time:.2%} late or refused" if refused else plan.verdict


def _margin(plan: Plan) -> str:
    return f"{plan.margin:.0%}" if plan.margin >= -1.0 else "< -100%"


def _replicas(plan: Plan) -> str:
    """Replicas of a fleet, those for prefill apart, and the GPUs of each if it has several."""
    each = f" of {plan.tensor_parallel} GPUs" if plan.tensor_parallel > 1 else ""
    apart = f"{plan.prefill_replicas} prefill : {plan.n_replicas} decode"
    return f"{apart if plan.prefill_replicas else plan.n_replicas}{each}"


def _setting_text(action: Mapping[str, Any], precision: str) -> str:
    """A constant setting in a few words, without the KV cache and the placement of prefill."""
    drafts = f", {action['spec_length']} drafts" if action["spec_length"] else ""
    return f"{precision}, batch {action['batch_size']}{drafts}"


def _cache_text(action: Mapping[str, Any], kv_cache_fp8: bool) -> str:
    return f"{'FP8 KV' if kv_cache_fp8 else 'KV'} {round(action['kv_budget'], 3):g}"


def _fleet(report: PlanReport, plan: Plan) -> str:
    """A fleet in words, with its setting and its cost."""
    assert plan.action is not None
    card = plan.card.removesuffix("_sxm").removesuffix("_server")
    parts = f", replicas: {_replicas(plan)}" if plan.prefill_replicas or plan.tensor_parallel > 1 else ""
    setting = f"{_setting_text(plan.action, plan.precision)}, {_cache_text(plan.action, plan.kv_cache_fp8)}"
    cost = "" if plan.cost_per_hour is None else f" at {report.currency} {plan.cost_per_hour:,.2f}/h"
    return f"{plan.n_gpus} x {card}{cost} ({setting}{parts})"


def answer(report: PlanReport) -> list[str]:
    """What to rent and how sure it is, or what comes nearest; one or two sentences."""
    if report.undecided:
        return [report.undecided]
    objectives = _objectives(report)
    asked = " and ".join(f"{o.label} <= {plain(o.limit_ms)} ms" for o in objectives)
    if report.share_met > max(o.share for o in objectives):
        asked += f", with {report.share_met:.2%} of the first tokens in time,"
    if report.windows_met is not None:
        asked += f" in {report.windows_met:.0%} of the windows of {WINDOW_S // 60} minutes"
    if not report.plans:
        tried = [plan for plan in report.tried if plan.tokens_per_s > 0.0]
        floors = [(o, min(tried, key=lambda plan: _expected(plan, o))) for o in objectives if tried]
        least = [
            f"the least {o.label} of any is {plain(_expected(plan, o))} ms, on {_fleet(report, plan)}"
            for o, plan in floors
            if _expected(plan, o) > o.limit_ms
        ]
        near = max(report.unmet, key=lambda plan: (plan.share_in_time, plan.margin))
        nearest = f"the nearest, {_fleet(report, near)}, serves {near.share_in_time:.2%} of the requests in time"
        return [f"No fleet tried meets {asked} with {report.model}: {'; '.join(least) or nearest}."]
    first = report.plans[0]
    if report.certain:
        chosen = report.certain[0]
        found = [f"Rent {_fleet(report, chosen)}: at least 90% certain to meet {asked} with {report.model}."]
        likely = f"Likely enough (50 to 90% certain): {_fleet(report, first)}."
        return found if first == chosen else [*found, likely]
    found = [f"Rent {_fleet(report, first)}: likely (50 to 90% certain) to meet {asked} with {report.model}."]
    if (requests := int(report.log["requests"])) < report.requests_for_90:
        share = max(report.share_met, *(o.share for o in objectives))
        return [
            *found,
            f"No fleet is called 90% certain: for the p{100 * share:g} that takes at least {report.requests_for_90:,} "
            f"requests, and the log has {requests:,}.",
        ]

    def left(plan: Plan) -> list[tuple[float, str]]:
        """Margin of each objective at the 90% bound, and its figure there."""
        rows = [(o, plan.figures[o.figure], plan.errors[o.quantity].p90) for o in objectives]
        return [(1.0 - ms * p90 / o.limit_ms, f"{o.label} {plain(ms * p90)} ms (x{p90:.1f})") for o, ms, p90 in rows]

    closest = max((plan for plan in report.tried if plan.meets), key=lambda p: min(left(p)))
    missed = " and ".join(figure for distance, figure in left(closest) if distance < 0.0) or "the worst windows"
    larger = [p for p in report.tried if p.hardware == closest.hardware and p.n_gpus > closest.n_gpus]
    most = max(plan.n_gpus for plan in report.tried)
    nearest = "this one" if closest == first else _fleet(report, closest)
    asked_of = {o.quantity for o in objectives}
    wider = any(p.errors[quantity].p90 > closest.errors[quantity].p90 for p in larger for quantity in asked_of)
    return [
        *found,
        f"No fleet tried (up to {most} GPUs) is 90% certain: {nearest} comes nearest, "
        f"but the simulator's 90% bound there is {missed}"
        f"{'; it is wider at the load of more GPUs' if wider else ''}. Relax the objectives that far, or test that "
        "fleet under your load before you rely on it.",
    ]


def refused_lines(report: PlanReport) -> list[str]:
    """Requests that are too long to be served, one sentence for each number of them."""
    tables: dict[str, list[str]] = {}
    for name, text in report.refused.items():
        tables.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}." for text, names in tables.items()]


def cautions(report: PlanReport) -> list[str]:
    """What may change the answer, a sentence each."""
    if not report.plans:
        return []
    first, found = report.recommended, [*_growth_lines(report)]
    assert first is not None
    requests = int(report.log["requests"])
    if not any(o.quantity in ("ttft", "e2e") for o in _objectives(report)):
        found.append(
            f"No objective bounds the wait for the first token: {FIRST_TOKEN.label} of this plan is "
            f"{plain(_expected(first, FIRST_TOKEN))} ms. Add one for TTFT."
        )
    share, label = max((o.share, o.label) for o in _objectives(report))
    if share and (slowest := max(1, round((1.0 - share) * requests))) < SURE_REQUESTS:
        found.append(
            f"{label} rests on the slowest {slowest} of {requests:,} requests: with fewer than {SURE_REQUESTS} the "
            "margin is uncertain by more than a few percent."
        )
    guessed = first.support["modelled"] + first.support["extrapolated"]
    if guessed >= 0.5:
        found.append(
            f"In {guessed:.0%} of the seconds a part of the kernel timings is modelled or extrapolated, not measured "
            "(docs/hardware.md)."
        )
    # gpt-oss is published in MXFP4.
    if first.precision not in (TIER, "MXFP4") and not first.precision.endswith("16"):
        found.append(
            f"{first.precision} changes the model's answers; how much is not measured here (--quant FP16,BF16 excludes "
            "it)."
        )
    if first.n_replicas == 1:
        found.append(
            f"A single replica ({first.hardware}) serves nothing while it fails or restarts: plan with two "
            "(--replicas-min 2)."
        )
    elif report.router == "shared":
        found.append(
            "The replicas share one queue. Behind a router latencies in bursts are longer: try --router round-robin or "
            "least-loaded."
        )
    if bound := [f"{p.hardware} {p.server_busy:.0%}" for p in report.plans if p.server_busy > SERVER_BOUND]:
        found.append(
            f"The API server, not the GPU, bounds a replica: sending tokens takes {', '.join(bound)} of its time. "
            "Its time per token was fitted to one machine; several server processes may need fewer GPUs."
        )
    if any(plan.action and plan.action["spec_length"] for plan in report.plans):
        found.append(
            "Settings with drafts need a draft model (an EAGLE head) for your model; acceptance was measured with "
            "Llama-3.1-8B. Leave out --drafts to exclude them."
        )
    return found


def details(report: PlanReport) -> list[str]:
    """How the plan was found, what was left out and why, and its terms."""
    found = [
        "Latencies (also for the share in time) are simulated, request by request, times the median of measured / "
        "simulated in benchmark runs. likely: these meet the objectives; meets with 90%: they do at the ratio "
        "that 90% of the runs stayed below. margin: distance of the nearest latency from its limit, as a share of it.",
        "TTFT: time to first token. TPOT: time per output token after it. p99: 99% of the requests are faster. KV 0.9: "
        "share of the GPU memory beside the weights for the KV cache. Batch: most requests at a time on a replica.",
        *_error_lines(report),
        *[f"{name}: {warning}." for name, warnings in report.warnings.items() for warning in warnings],
        *_support_lines(report),
    ]
    if any(plan.kv_cache_fp8 for plan in report.plans):
        found.append(FP8_KV_NOTE)
    if report.router != "shared":
        found.append(f"Each replica has a queue of its own; requests are routed {report.router}.")
    if any(plan.action and plan.action["batch_size"] > GRID["batch_size"][-1] for plan in report.plans):
        found.append(
            f"Batch sizes above {GRID['batch_size'][-1]:g} lie beyond the lookup tables: they are played with operator "
            "times, and seconds with that many requests count as extrapolated."
        )
    if report.unmet:
        told = [
            f"{p.hardware} ({p.n_gpus} GPUs: {p.share_in_time:.2%} in time, margin {_margin(p)})" for p in report.unmet
        ]
        found.append(f"No setting meets the objectives, and more GPUs hardly help, on {', '.join(told)}.")
    if report.left_out:
        found.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in report.left_out.items()) + ".")
    if report.searched_s < report.log["span_s"] - 1.0:
        whole = report.played_s >= report.log["span_s"] - 1.0
        played = "all of it" if whole else f"its busiest {report.played_s:,.0f} s"
        part = f"the busiest {report.searched_s:,.0f} s of the log"
        found.append(f"Searched on {part}, played on {played}; the line on more traffic uses the busiest part.")
    if not report.currency:
        found.append("Without prices, plans are sorted by GPUs, then memory of the card (smallest first), then margin.")
    elif report.prices_from:
        found.append(f"Prices: {report.prices_from}.")
    if report.plans and not report.adaptive:
        found.append(
            "Adaptive policies were not compared: they choose among all precisions, and these options exclude some."
        )
    elif report.plans:
        found.append(_adapting(report))
    if report.plans and report.plans[0].is_uneven:
        found.append("Autoscaling is not simulated for a plan with separate prefill and decode replicas.")
    elif report.plans:
        found.append(scaling.scaling_note(report.autoscaling, report.played_s, "within the objectives"))
    return [*found, f"Fleets shown: {len(report.tried)}; the search took {report.wall_s:.1f} s."]


def _error_lines(report: PlanReport) -> list[str]:
    """Errors that the verdicts of the plans allow for, by card and band of load, in one line."""
    told: dict[str, str] = {}
    for plan in report.plans or report.unmet:
        ratios = []
        for quantity, error in plan.errors.items():
            source = (
                f" (runs of {report.model})" if error.of_model else "" if error.own else " (largest of other cards)"
            )
            ratios.append(f"{quantity.upper()} x{error.p50:.2f}{source}, x{error.p90:.2f}")
        told[f"{plan.card} at {LOADS[plan.band]}"] = " and ".join(ratios)
    each = "; ".join(f"{load}: {ratios}" for load, ratios in told.items())
    return [f"Measured / simulated, median and 90% bound, by requests that a replica decodes at a time: {each}."]


def _support_lines(report: PlanReport) -> list[str]:
    """How well measurements cover the seconds of the recommended fleet."""
    if report.recommended is None:
        return []
    covered = levels(report.recommended.support)
    return [f"Kernel timings of the recommended fleet's seconds: {covered} (docs/hardware.md)."]


def levels(support: Mapping[str, float]) -> str:
    """Shares of the seconds by how well measurements cover them, such as "39% interpolated, 61% modelled"."""
    return ", ".join(f"{share:.0%} {level}" for level, share in support.items() if share > 0)


def _adapting(report: PlanReport) -> str:
    saved, gain = report.adapting_saves_gpus, report.adapting_gain
    policies = " and ".join(dict.fromkeys(plan.policy for plan in report.adaptive))
    first, named = report.plans[0], _first_plan(report)
    if first.n_gpus == first.tensor_parallel:
        return f"{named.capitalize()} is a single replica, so adapting the settings cannot save a GPU."
    if not saved:
        return f"Adapting the settings to the load (policies {policies}) saves no GPU compared with {named}."
    told = (
        f"Adapting the settings to the load (policies {policies}) saves {saved} GPU{'s' if saved > 1 else ''} compared "
        f"with {named}"
    )
    more = f"serving {gain:.1%} more of the requests in time than the best constant on the same GPUs"
    if gain > report.adapting_noise:
        return f"{told}, {more}."
    return f"{told} in this run, {more}. This may be chance ({report.adapting_noise:.1%}): do not count on it."


def _growth_lines(report: PlanReport) -> list[str]:
    """The first plan under more traffic, in one line."""
    told: dict[str, list[str]] = {}
    for row in report.growth:
        needed = "more GPUs than were tried" if row["gpus_needed"] is None else f"{row['gpus_needed']} GPUs"
        certainly = " for the same certainty" if report.certain else ""
        on = (
            "takes the same GPUs"
            if row["gpus_needed"] == row["n_gpus"]
            else f"takes {needed} with these settings{certainly}"
        )
        told.setdefault(on, []).append(f"{row['traffic']:g}")
    lines = [f"{' or '.join(factors)} times the traffic {on}" for on, factors in told.items()]
    return [f"{'; '.join(lines)}."] if lines else []


def plan_figure(report: PlanReport) -> Figure:
    """Cost against every latency that an objective bounds: all fleets tried, marked with their GPUs.

    A point is the latency times the median error of measured runs, the line above it reaches to the 90% bound.
    """
    objectives = [parse_objective(text) for text in report.objectives]
    unit = report.currency or "GPU hours"
    figure, panels = _axes(len(objectives), (7, 1 + 3.2 * len(objectives)), f"{unit} per million output tokens")
    hardware = list(dict.fromkeys(plan.hardware for plan in report.tried))
    for axes, objective in zip(panels, objectives, strict=True):
        for plan in report.tried:
            error, latency_ms = plan.errors[objective.quantity], plan.figures[objective.figure]
            if plan.tokens_per_s <= 0.0 or latency_ms <= 0.0:  # nothing was answered
                continue
            cost = plan.cost_per_million_tokens if report.currency else plan.gpu_hours_per_million_tokens
            colour = COLOURS[(hardware.index(plan.hardware) + 1) % len(COLOURS)]
            axes.plot((cost, cost), (latency_ms * error.p50, latency_ms * error.p90), color=colour, linewidth=0.9)
            fill = colour if plan.meets else "none"
            axes.scatter(cost, latency_ms * error.p50, s=22, facecolor=fill, edgecolor=colour, label=plan.hardware)
            at = {"xytext": (4, -8), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(str(plan.n_gpus), (cost, latency_ms * error.p50), **at)
        axes.axhline(objective.limit_ms, color=_INK, linewidth=0.8, linestyle="--")
        axes.set(xscale="log", yscale="log", ylabel=f"{objective.quantity.upper()} {objective.statistic}, ms")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: plain(value))
            axis.set_minor_formatter(lambda value, _: plain(value) if f"{value:.0e}"[0] in "25" else "")
    _legend(figure, panels[0])
    return figure


# ---------------------------------------------------------------- comparisons


def shadow_report(report: ShadowReport, tables: ServingTables) -> Report:
    """Report of a comparison: the policies, the best constant under autoscalers, and the recommendation."""
    best = report.best()
    rows = [
        {
            "policy": o.policy + (" *" if o is best and report.undecided() is None else ""),
            "GPUs": o.n_gpus,
            "replicas": o.n_replicas,
            "late": f"{o.slo_miss_share:.1%}",
            "in time/s": o.goodput_rps,
            "TTFT p50": o.ttft_p50_ms if o.completed else None,
            "p90": o.ttft_p90_ms if o.completed else None,
            "p99 ms": o.ttft_p99_ms if o.completed else None,
            "TPOT ms": o.tpot_mean_ms if o.completed else None,
            "tokens/s": o.tokens_per_s,
            "GPU-s": o.gpu_seconds,
            **({f"cost {report.currency}": report.cost(o)} if report.currency else {}),
            "GPU-s/1k tokens": o.gpu_s_per_1k_tokens if o.completed else None,
            "restarts": o.restarts,
        }
        for o in report.outcomes
    ]
    shown: dict[str, Rows] = {
        "what each policy would have done": rows,
        f"best_constant under an autoscaler, {scaling.WITHIN_MISSES}": _scaling_rows(report.autoscaling),
    }
    lines = [
        *(f"{o.policy}: {_shadow_setting(o.action, tables)}" for o in report.outcomes if o.action),
        "KV is the share of the KV pool that the setting uses; vLLM's own default comes to about 1.",
        "--export vllm writes the settings marked with *; `plan` finds out whether fewer GPUs would do.",
        scaling.scaling_note(report.autoscaling, report.log["span_s"], scaling.WITHIN_MISSES),
        f"Simulated: {usual_name(str(tables.meta['model']))} on {report.hardware}, table {report.table_sha256[:12]}; "
        "latencies are not corrected by measurements, as those of `plan` are.",
        f"Support by measurements of the seconds of {best.policy}: {levels(best.support)}.",
        *table_notes(tables),
    ]
    gpus = (
        f"Every policy has {report.n_gpus} x {report.hardware}; late: first token after more than {report.slo_ms:g} ms."
    )
    before = [f"{text}." for text in (report.refused, report.short) if text]
    told = verdict(report, tables)
    if len(report.objectives) > 1 and (missed := report.misses(best)):
        before.append(f"{best.policy} misses {', '.join(missed)}.")
    before += [note] if (note := precision_note(report, tables)) else []
    return Report(" ".join(told), shown, lines, [*before, gpus])


def precision_note(report: ShadowReport, tables: ServingTables) -> str:
    """Which outcomes use other precisions than the user's own setting, one sentence; empty if none does."""
    others = [o.policy for o in report.outcomes if _other_tiers(report, o, tables)]
    told = f"At other precisions than yours ({_own_tier(report, tables)}): {', '.join(others)}; answers may change."
    return told if others else ""


def table_notes(tables: ServingTables) -> list[str]:
    """Notes on the table that a comparison was played on."""
    warnings = [f"{warning}." for warning in tables.meta.get("warnings", ())]
    return [*warnings, FP8_KV_NOTE] if tables.kv_cache_fp8 else warnings


def _shadow_setting(action: Mapping[str, Any], tables: ServingTables) -> str:
    text = f"{_setting_text(action, tables.tiers[action['quant_tier']])}, {_cache_text(action, tables.kv_cache_fp8)}"
    return f"{text}, separate prefill" if action["prefill_disagg"] else text


def verdict(report: ShadowReport, tables: ServingTables) -> list[str]:
    """The recommendation: what to set, then why it and not another setting; a sentence each."""
    if undecided := report.undecided():
        return [undecided]
    best, (fixed, constant) = report.best(), report.outcomes[:2]
    own = "vLLM's defaults" if report.fixed_action == vllm_defaults(tables).to_dict() else "your configuration"
    late = f"{best.slo_miss_share:.1%} of the requests get their first token after {report.slo_ms:g} ms"
    if best is fixed:
        told = late if best.slo_miss_share else f"all requests get their first token within {report.slo_ms:g} ms"
        kept = f"Keep {own} ({_shadow_setting(report.fixed_action, tables)}): {told}."
        return [kept, *(_set_aside(report, tables) or [_why_not(report, constant, tables)])]
    asked = f"Set {_shadow_setting(best.action, tables)}" if best.action else f"Let {best.policy} set the knobs"
    changed = f" (not {_own_tier(report, tables)}: this changes the model's answers)" if best.action else ""
    if other := _other_tiers(report, best, tables):
        changed = changed or f" (it also uses {', '.join(other)}, which changes the model's answers)"
    beaten, rival = (fixed, own) if best.action else (constant, "the best constant")
    gain, chance = report.gain(best, beaten), report.noise(best, beaten)
    return [
        f"{asked}{changed if other else ''}: {late}, against {beaten.slo_miss_share:.1%} with {rival}.",
        f"The difference is real, not noise: 95% interval {gain - chance:.1%} to {gain + chance:.1%}.",
        *_in_own_precision(report, own, tables),
        *_set_aside(report, tables),
    ]


def _own_tier(report: ShadowReport, tables: ServingTables) -> str:
    return str(tables.tiers[report.fixed_action["quant_tier"]])


def _other_tiers(report: ShadowReport, outcome: PolicyOutcome, tables: ServingTables) -> list[str]:
    """Precisions that an outcome uses besides that of the user's own setting."""
    return [tables.tiers[tier] for tier in report.other_tiers(outcome)]


def _in_own_precision(report: ShadowReport, own: str, tables: ServingTables) -> list[str]:
    """What to set if the recommendation changes the precision and that must stay."""
    same = next((o for o in report.outcomes if o.policy == OWN_PRECISION), None)
    if same is None or same.action is None or not _other_tiers(report, report.best(), tables):
        return []
    setting = f"set {_shadow_setting(same.action, tables)}: {same.slo_miss_share:.1%} late"
    clear = report.clear(same, report.outcomes[0])
    return [
        f"If {_own_tier(report, tables)} must stay, {setting if clear else f'keep {own}: nothing is clearly better'}."
    ]


def _set_aside(report: ShadowReport, tables: ServingTables) -> list[str]:
    """What another precision would gain, if it clearly would and is not recommended because it is not needed."""
    best, other = report.best(), min(report.outcomes, key=lambda o: o.slo_miss_share)
    if not report.clear(other, best):
        return []
    name = f"The best constant ({_shadow_setting(other.action, tables)})" if other.action else other.policy.capitalize()
    return [
        f"{name} has {other.slo_miss_share:.1%} late, but {' and '.join(_other_tiers(report, other, tables))} changes "
        f"the model's answers, and {_own_tier(report, tables)} meets the objective without that."
    ]


def _why_not(report: ShadowReport, constant: PolicyOutcome, tables: ServingTables) -> str:
    """Why the best constant is not recommended in place of the user's own setting."""
    fixed, action = report.outcomes[0], constant.action
    assert action is not None
    if action == report.fixed_action:
        return "Of all constant settings tried it has the fewest late."
    if report.meets(fixed):
        return "This meets the objective, and no setting tried has clearly fewer late."
    gain, chance = report.gain(constant, fixed), report.noise(constant, fixed)
    noise = f"which may be noise (95% interval of the difference {gain - chance:.1%} to {gain + chance:.1%})"
    late = f"{constant.slo_miss_share:.1%} late, {noise}" if gain > 0.0 else "no fewer late"
    other = "".join(f"; but {tier} changes the model's answers" for tier in _other_tiers(report, constant, tables))
    return (
        f"The alternative is the best constant ({_shadow_setting(action, tables)}): {late}, TTFT p99 "
        f"{plain(constant.ttft_p99_ms)} ms instead of {plain(fixed.ttft_p99_ms)}, TPOT "
        f"{plain(constant.tpot_mean_ms)} ms instead of {plain(fixed.tpot_mean_ms)}{other}."
    )


_KNOBS: Final = (
    ("batch_size", "batch size", None),
    ("kv_budget", "KV budget", None),
    ("spec_length", "draft tokens", None),
    ("quant_tier", "precision", ()),
    ("prefill_disagg", "separate prefill", ("off", "on")),
)


def shadow_figures(report: ShadowReport, tiers: Sequence[str]) -> dict[str, Figure]:
    """Figures by caption: latency, and knobs; ``tiers`` names the precisions."""
    return {
        "Arrivals of the log; waiting requests and TTFT p99 under each policy. The dashed line is the "
        "objective.": _latency_figure(report),
        "What each policy set, second by second.": _knob_figure(report, tiers),
    }


def _latency_figure(report: ShadowReport) -> Figure:
    figure, (arrivals, queue, ttft) = _axes(3, (10, 6.0), "seconds since the first request")
    arrivals.plot(report.outcomes[0].timeline["t_s"], report.arrivals_per_s, color=_INK, linewidth=0.8)
    for i, outcome in enumerate(report.outcomes):
        line, style = outcome.timeline, {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.1}
        queue.plot(line["t_s"], line["queue_requests"], label=_short(outcome.policy), **style)
        ttft.plot(line["t_s"], line["ttft_p99_ms"], **style)
    ttft.axhline(report.slo_ms, color=_INK, linewidth=0.8, linestyle="--")
    ttft.set_yscale("log")
    for axes, label in ((arrivals, "arrivals /s"), (queue, "waiting requests"), (ttft, "TTFT p99, ms")):
        axes.set_ylabel(label)
    _legend(figure, queue)
    return figure


def _knob_figure(report: ShadowReport, tiers: Sequence[str]) -> Figure:
    figure, panels = _axes(len(_KNOBS), (10, 7.5), "seconds since the first request")
    for axes, (name, label, names) in zip(panels, _KNOBS, strict=True):
        for i, outcome in enumerate(report.outcomes):
            line, width = outcome.timeline, 1.1 if i else 2.2
            style = {"color": COLOURS[i % len(COLOURS)], "linewidth": width, "label": _short(outcome.policy)}
            axes.step(line["t_s"], line[name], where="post", **style)
        axes.set_ylabel(label)
        ticks = tiers if name == "quant_tier" else names
        if ticks is not None:
            axes.set_yticks(range(len(ticks)), ticks)
            axes.set_ylim(-0.3, len(ticks) - 0.7)
    _legend(figure, panels[0])
    return figure


# ---------------------------------------------------------------- shared by all reports


def curve_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Latency against throughput in a sweep over rates."""
    figure, (axes,) = _axes(1, (7, 4.5))
    x = [row["output_tokens_per_s"] for row in rows]
    for name, label, colour in (
        ("ttft_p50_ms", "TTFT p50", "#56b4e9"),
        ("ttft_p99_ms", "TTFT p99", "#0072b2"),
        ("tpot_p50_ms", "TPOT p50", "#d55e00"),
    ):
        axes.plot(x, [row[name] for row in rows], marker="o", markersize=3, color=colour, label=label)
    for row in rows:
        axes.annotate(f"{row['qps']:g}/s", (row["output_tokens_per_s"], row["ttft_p99_ms"]), fontsize=7)
    axes.set(xlabel="output tokens per second", ylabel="ms", yscale="log", title=title)
    axes.legend(frameon=False)
    return figure


def _scaling_rows(found: Sequence[scaling.Autoscaled]) -> Rows:
    """Autoscalers that save GPU-hours and still meet the condition; the note says if none does."""
    return [
        {
            "autoscaler": each.policy,
            "target": f"{each.target:.0%}",
            "replicas": f"{each.mean_replicas:.1f} of {each.max_replicas}",
            "GPU-hours": f"{each.gpu_seconds / 3600.0:.2f}",
            "saved": f"{each.saved_share:.0%}",
            "in time": f"{each.share_in_time:.2%}",
            "more late": f"{each.late_more:+.2%}",
            "TTFT p99 ms": f"{each.ttft_p99_ms:,.0f}",
        }
        for each in found
        if each.meets and each.saved_share >= scaling.LEAST_SAVED
    ]


def _axes(n_panels: int, size: tuple[float, float], below: str = "") -> tuple[Figure, Sequence[Any]]:
    """Stacked panels that share the x axis, which is labelled ``below``."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(n_panels, 1, sharex=True, squeeze=False)[:, 0])
    for axes in panels:
        axes.grid(True, color="#e4e8ef", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(below)
    return figure, panels


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once, loc="outside upper left", frameon=False, ncols=min(4, len(once)))


def _short(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"
