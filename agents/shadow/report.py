"""A shadow report as one HTML file: a table, figures as inline SVG, nothing loaded from anywhere."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

from agents.shadow.compare import FIXED, STATED_ERROR, ShadowReport
from agents.shadow.export import settings_of, vllm_config
from agents.shadow.replay import PolicyOutcome
from inferencegym.files import require_matplotlib, write_text
from simulator.tables import ServingTables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE: Final = Path(__file__).resolve().parents[1] / "data" / "shadow_report.html"
COLOURS: Final = ("#5b6472", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by colour-blind readers too (Okabe and Ito); grey is the fixed configuration."""

_COLUMNS: Final[tuple[tuple[str, str, str, float], ...]] = (
    ("SLO misses", "slo_miss_share", "{:.1f} %", 100.0),
    ("goodput /s", "goodput_rps", "{:.2f}", 1.0),
    ("TTFT p50 ms", "ttft_p50_ms", "{:,.0f}", 1.0),
    ("TTFT p99 ms", "ttft_p99_ms", "{:,.0f}", 1.0),
    ("TPOT ms", "tpot_mean_ms", "{:.1f}", 1.0),
    ("tokens /s", "tokens_per_s", "{:,.0f}", 1.0),
    ("GPU s / 1k tokens", "gpu_s_per_1k_tokens", "{:.2f}", 1.0),
    ("GPUs", "n_gpus", "{:.0f}", 1.0),
    ("restarts", "restarts", "{:.0f}", 1.0),
)
"""Heading, field, format and factor of the table's columns."""

_KNOBS: Final = (
    ("batch_size", "batch size", None),
    ("kv_budget", "KV budget", None),
    ("spec_length", "draft tokens", None),
    ("quant_tier", "precision", ()),
    ("prefill_disagg", "separate prefill", ("off", "on")),
)


def write_html(report: ShadowReport, tables: ServingTables, path: Path, title: str) -> Path:
    """Write the report; a reader sees the old file or the new one. Needs matplotlib (extra ``report``)."""
    return write_text(path, render_html(report, tables, title))


def render_html(report: ShadowReport, tables: ServingTables, title: str) -> str:
    """The report as one HTML document."""
    log = report.log
    lead = (
        f"{log['requests']:,} requests in {log['span_s']:,.0f} s ({log['rate_rps']:.2f}/s, peak {log['peak_rps']}/s), "
        f"prompts p50 {log['prompt_tokens_p50']:,.0f} and outputs p50 {log['output_tokens_p50']:,.0f} tokens, on "
        f"{report.n_gpus} GPU{'s' if report.n_gpus > 1 else ''} ({report.hardware}); objective: first token within "
        f"{report.slo_ms:g} ms. Your own configuration (fixed): {_action(report.fixed_action)}. Best constant of a "
        f"sweep: {_action(report.outcomes[1].action or {})}. {verdict(report)}"
    )
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        lead=escape(lead),
        head='<th scope="col">policy</th>' + "".join(f'<th scope="col">{escape(c[0])}</th>' for c in _COLUMNS),
        rows="\n".join(_row(o, report) for o in report.outcomes),
        latency=_svg(_latency_figure(report), "latency"),
        knobs=_svg(_knob_figure(report.outcomes, tables.tiers), "knobs"),
        export=escape(vllm_config(settings_of(report, tables))),
        footer=escape(_footer(report)),
    )


def _row(outcome: PolicyOutcome, report: ShadowReport) -> str:
    fixed = report.outcomes[0]
    cells = [f'<th scope="row">{escape(outcome.policy)}</th>']
    for _, name, form, factor in _COLUMNS:
        value, base = factor * getattr(outcome, name), factor * getattr(fixed, name)
        delta = "" if outcome is fixed else f' <span class="delta">{_signed(form, value - base)}</span>'
        cells.append(f"<td>{form.format(value)}{delta}</td>")
    kind = ' class="best"' if outcome is report.best() else ""
    return f"<tr{kind}>{''.join(cells)}</tr>".replace('<th scope="row">', "<td>").replace("</th>", "</td>")


def verdict(report: ShadowReport) -> str:
    """The recommendation in one sentence."""
    best, fixed, constant = report.best(), report.outcomes[0], report.outcomes[1]
    if best is fixed:
        return f"Nothing tried is better than your own configuration by more than {STATED_ERROR:.0%} of the requests."
    if best is constant:
        gain = report.gain(constant, fixed)
        return f"The best constant serves {gain:.1%} more requests in time than yours; adapting adds nothing certain."
    gain = report.gain(best, constant)
    return f"{best.policy} serves {gain:.1%} more of the requests in time than the best constant on the same GPUs."


def _signed(form: str, value: float) -> str:
    return form.replace("{:", "{:+").format(value)


def _action(action: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in action.items())


def _footer(report: ShadowReport) -> str:
    best = report.best()
    shares = ", ".join(f"{share:.0%} {level}" for level, share in best.support.items() if share > 0)
    return (
        f"Simulated on the table {report.table_sha256[:12]} ({report.hardware}). Seconds of {best.policy} by how well "
        f"measurements support them: {shares}. A policy is recommended where it serves more requests in time than the "
        f"best constant by more than the simulator's error ({STATED_ERROR:.0%} of the requests)."
    )


# ---------------------------------------------------------------- figures


def _figure(n_panels: int, height: float) -> tuple[Figure, Sequence[Any]]:
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "inferencegym", "font.size": 9})
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots(n_panels, 1, sharex=True)
    for ax in axes:
        ax.grid(True, color="#e4e8ef", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds since the first request")
    return figure, axes


def _latency_figure(report: ShadowReport) -> Figure:
    figure, (arrivals, queue, ttft) = _figure(3, 6.0)
    t = report.outcomes[0].timeline["t_s"]
    arrivals.plot(t, report.arrivals_per_s, color="#1c2330", linewidth=0.8)
    arrivals.set_ylabel("arrivals /s")
    for outcome, colour in _coloured(report.outcomes):
        queue.plot(t, outcome.timeline["queue_requests"], color=colour, linewidth=1.1, label=_short(outcome.policy))
        ttft.plot(t, outcome.timeline["ttft_p99_ms"], color=colour, linewidth=1.1)
    queue.set_ylabel("waiting requests")
    _legend(figure, queue)
    ttft.axhline(report.slo_ms, color="#1c2330", linewidth=0.8, linestyle="--")
    ttft.set_yscale("log")
    ttft.set_ylabel("TTFT p99, ms")
    return figure


def _knob_figure(outcomes: Sequence[PolicyOutcome], tiers: Sequence[str]) -> Figure:
    figure, axes = _figure(len(_KNOBS), 7.5)
    for ax, (name, label, names) in zip(axes, _KNOBS, strict=True):
        ticks = tiers if name == "quant_tier" else names
        for outcome, colour in _coloured(outcomes):
            width = 2.2 if outcome.policy == FIXED else 1.1
            line = outcome.timeline
            ax.step(line["t_s"], line[name], where="post", color=colour, linewidth=width, label=_short(outcome.policy))
        ax.set_ylabel(label)
        if ticks is not None:
            ax.set_yticks(range(len(ticks)), ticks)
            ax.set_ylim(-0.3, len(ticks) - 0.7)
    _legend(figure, axes[0])
    return figure


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", frameon=False, ncols=min(4, len(labels)))


def _coloured(outcomes: Sequence[PolicyOutcome]) -> list[tuple[PolicyOutcome, str]]:
    return [(o, COLOURS[i % len(COLOURS)]) for i, o in enumerate(outcomes)]


def _short(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element, without a date, so that the same report is the same file.

    Ids within it start with ``name``: several figures share a page.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    element = text[text.index("<svg") :]
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", element)
