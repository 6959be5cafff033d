"""``inferencegym measure``: build a lookup table of your own engine from a short load that is played against it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from live.driver import EngineApi
    from live.measure import MeasureSettings
    from simulator.offline.engine_fit import MeasuredEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--engine", required=True, metavar="URL", help="address of the engine's OpenAI API")
    parser.add_argument(
        "--out", type=Path, default=Path("my-engine.parquet"), help="table to write (default my-engine.parquet)"
    )
    parser.add_argument("--name", default="measured", help="name of the engine in the table (default measured)")
    parser.add_argument("--model", help="served model (default: the first)")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="approximate length of the load in seconds (default 180)"
    )
    parser.add_argument("--clients", type=int, default=64, help="clients of the largest closed loop (default 64)")
    told = parser.add_argument_group("properties that the engine does not report")
    told.add_argument(
        "--kv-bytes-per-token",
        type=float,
        help="bytes of KV cache per token on a card (needed unless vLLM was started with --kv-cache-memory-bytes)",
    )
    told.add_argument("--kv-pool-tokens", type=int, help="tokens that the KV pool holds (default: as vLLM reports)")
    told.add_argument("--block-tokens", type=int, help="tokens per KV block (default: as vLLM reports)")
    told.add_argument(
        "--max-num-seqs", type=int, help="maximum number of running sequences (default: measured by the load)"
    )
    told.add_argument(
        "--max-batched-tokens", type=int, help="maximum prompt tokens per iteration (default: 2048, with a note)"
    )
    told.add_argument("--max-model-len", type=int, help="longest request in tokens (default: as the engine reports)")
    told.add_argument(
        "--weights-gb", type=float, default=0.0, help="GB of weights per card, for memory figures (default 0)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the table if there is one")
    parser.add_argument("--json", action="store_true", help="print the measurement as JSON, without a progress bar")


def run(args: argparse.Namespace) -> int:
    """Play the load, fit, print the errors and write the table."""
    from inferencegym.errors import InvalidConfigError
    from inferencegym.files import prepare_output
    from live.driver import EngineApi
    from live.measure import MeasureSettings

    if args.out.exists() and not args.force:
        raise InvalidConfigError(f"{args.out} exists already: name another with --out, or overwrite it with --force")
    prepare_output(args.out)  # fail before minutes of load
    settings = MeasureSettings(
        seconds=args.seconds,
        most_clients=args.clients,
        max_num_seqs=args.max_num_seqs,
        max_batched_tokens=args.max_batched_tokens,
        max_model_len=args.max_model_len,
        block_tokens=args.block_tokens,
        kv_pool_tokens=args.kv_pool_tokens,
        kv_bytes_per_token=args.kv_bytes_per_token,
        weights_gb=args.weights_gb,
    )
    measured = _measure(EngineApi(args.engine, model=args.model), settings, show=not args.json)
    report_engine(measured, args.name, args.out, args.json)
    return 0


def report_engine(measured: MeasuredEngine, name: str, out: Path | None, as_json: bool) -> None:
    """Print a measured engine, and write its table unless there is no ``out``."""
    from simulator.offline.table import build_table

    if as_json:
        print(json.dumps(measured.to_dict()))
    else:
        _print(measured)
    if out is None:
        return
    source, profile = measured.source(name), measured.profile(name)
    notes = {"measured": measured.to_dict()}
    path = build_table(out, source, profile, notes=notes, saturated=False)
    if not as_json:
        print_table_use(path)


def print_table_use(path: Path) -> None:
    """Say what to do with a table that was written."""
    print(f"wrote {path}; use it with --table {path} or INFERENCEGYM_TABLE={path}")
    print("tasks must be calibrated again on a new table: inferencegym calibrate --out FILE")


def _measure(api: EngineApi, settings: MeasureSettings, show: bool) -> MeasuredEngine:
    from live.measure import measure_engine

    if not show:
        return measure_engine(api, settings)
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("asking", total=1.0)
        return measure_engine(api, settings, lambda name, share: bar.update(task, description=name, completed=share))


def _print(measured: MeasuredEngine) -> None:
    from cli.figures import print_table

    facts, fit = measured.facts, measured.fit
    times = fit.times
    ramps = ", ".join(f"{ms:.4g} from {low:g}" for low, ms in zip(times.knots, times.ramp_ms, strict=True))
    bound = "unknown" if facts.max_num_seqs is None else facts.max_num_seqs
    print(f"{facts.model}: {facts.pool_blocks} KV blocks of {facts.block_tokens} tokens, at most {bound} sequences")
    print(f"  iteration {times.step_ms:.4g} ms, and per row of tokens, ms: {ramps}")
    print(f"  per sampled token {times.sequence_ms:.4g} ms, per 1000 tokens of context {1e3 * times.context_ms:.4g} ms")
    print(f"  per million attended pairs of a prompt {1e6 * times.attention_ms:.4g} ms")
    print(f"  way to the client and back {fit.ttft_offset_ms:.3g} ms")
    print(f"phases held out: error {fit.median_error:.1%} at the median, {fit.p90_error:.1%} at the 90th percentile")
    names = tuple(measured.replays[0].errors)
    print("errors of the simulator playing each phase (Poisson arrivals are not fitted):")
    rows = []
    for replayed in measured.replays:
        errors = (f"{replayed.errors[name]:+.1%}" if name in replayed.errors else "-" for name in names)
        rows.append([replayed.phase, replayed.requests, *errors])
    print_table(("phase", "requests", *names), rows)
    for note in (*measured.notes, *fit.warnings):
        print(f"note: {note}")
