"""Benchmark results become an engine profile: every format is read, and errors on held-out runs shrink."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.main import main
from inferencegym.errors import DataFormatError, InvalidConfigError
from ops.bench_fit import BenchError, Setup, fit_engine, nearest_table
from ops.log.bench import BenchRun, read_runs
from simulator.events.fleet import Fleet
from simulator.events.requests import Outcome, Requests
from simulator.events.simulation import serve, serve_closed
from simulator.hardware.engine_times import EngineSource
from simulator.hardware.measured_model import MeasuredModel, MeasuredSource
from simulator.hardware.memory import kv_capacity_tokens
from simulator.hardware.operators import OperatorModel
from simulator.hardware.profiles import engine, hardware
from simulator.hardware.sources import source_of
from simulator.hardware.tables import load_tables
from simulator.offline import table
from simulator.offline.table import build_table
from tests.engine_standin import serve_virtually


def made_up_engine() -> OperatorModel:
    """An engine that no profile describes: slow iterations, slow kernels, a slow network."""
    profile = dataclasses.replace(
        engine("vllm_v1"), step_overhead_ms=3.0, sequence_overhead_ms=0.03, gemm_scale=1.25, ttft_offset_ms=40.0
    )
    return MeasuredModel(hardware("a100-40gb"), "FP16", profile)


def benchmark(rate: float | None, clients: int, n: int, seed: int) -> dict[str, Any]:
    """The output of `vllm bench serve --save-result` for the made-up engine, served iteration by iteration."""
    rng = np.random.default_rng(seed)
    prompt = np.maximum(8, rng.lognormal(np.log(450), 0.5, n)).astype(np.int64)
    output = np.maximum(4, rng.lognormal(np.log(110), 0.5, n)).astype(np.int64)
    fleet = Fleet(made_up_engine(), 256, kv_capacity_tokens(MeasuredSource("a100-40gb"), "FP16", 1.0, 0))
    out: Outcome
    if rate is None:
        out = serve_closed(fleet, prompt, output, clients)
    else:
        out = serve(fleet, Requests(np.cumsum(rng.exponential(1.0 / rate, n)), prompt, output))
    ttft, tpot, seconds = out.ttft_ms(), out.tpot_ms(), out.makespan_s()
    return {
        "date": "20260101-000000",
        "backend": "vllm",
        "model_id": "llama3-8b",
        "num_prompts": n,
        "request_rate": "inf" if rate is None else rate,
        "max_concurrency": clients or None,
        "duration": seconds,
        "completed": n,
        "total_input_tokens": int(prompt.sum()),
        "total_output_tokens": int(output.sum()),
        "request_throughput": n / seconds,
        "output_throughput": float(output.sum()) / seconds,
        "mean_ttft_ms": float(ttft.mean()),
        "median_ttft_ms": float(np.median(ttft)),
        "p99_ttft_ms": float(np.quantile(ttft, 0.99)),
        "mean_tpot_ms": float(np.nanmean(tpot)),
        "median_tpot_ms": float(np.nanmedian(tpot)),
        "input_lens": prompt.tolist(),
        "output_lens": output.tolist(),
        "start_times": (1000.0 + out.arrival_s).tolist(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("results")
    loads = [(1.0, 0, 40), (3.0, 0, 80), (6.0, 0, 120), (9.0, 0, 150), (None, 4, 24), (None, 24, 100), (None, 64, 200)]
    for i, (rate, clients, n) in enumerate(loads):
        (folder / f"run{i}.json").write_text(json.dumps(benchmark(rate, clients, n, seed=i)))
    return sorted(folder.iterdir())


def by_metric(errors: list[BenchError], group: str) -> dict[str, BenchError]:
    return {e.metric: e for e in errors if e.group == group}


def test_a_fit_shrinks_the_error_on_runs_that_it_never_saw(results: list[Path]) -> None:
    fit = fit_engine(
        [run for path in results for run in read_runs(path)],
        hardware_name="a100-40gb",
        start="vllm_v1",
        setup=Setup(256),
    )
    assert fit.kept
    assert len(fit.fitted) + len(fit.held_out) == 7
    assert len(fit.held_out) == 2
    held_out = by_metric(fit.errors, "held out")
    assert held_out["tpot_ms"].before_median > 0.25
    assert held_out["tpot_ms"].after_worst < 0.02
    assert held_out["output_tokens_per_s"].after_worst < 0.02
    assert held_out["ttft_p50_ms"].after_median < min(0.2, held_out["ttft_p50_ms"].before_median)
    # Parameters that the runs can separate come out near the truth.
    assert fit.engine.ttft_offset_ms == pytest.approx(40.0, abs=15.0)
    fitted = fit.source.operators("FP16", fit.engine)
    for batch in (1, 32, 96):
        assert fitted.decode_ms(batch, 600) == pytest.approx(made_up_engine().decode_ms(batch, 600), rel=0.07)


def test_one_run_alone_is_fitted_with_nothing_held_out(results: list[Path]) -> None:
    fit = fit_engine(read_runs(results[4]), "a100-40gb")
    assert (len(fit.fitted), fit.held_out) == (1, [])
    assert by_metric(fit.errors, "held out") == {}


def test_a_table_whose_pool_holds_less_than_a_request_is_not_fitted(results: list[Path]) -> None:
    (run,) = read_runs(results[4])
    longer = dataclasses.replace(run.requests, prompt_tokens=run.requests.prompt_tokens + 2_000_000)
    with pytest.raises(DataFormatError, match=r"has a request of 2,001,[0-9]{3} tokens, and the KV pool holds 163,238"):
        fit_engine([dataclasses.replace(run, requests=longer)], "a100-40gb")


def test_settings_out_of_range_are_refused(results: list[Path]) -> None:
    runs = read_runs(results[0])
    with pytest.raises(InvalidConfigError) as refused:
        fit_engine(runs, hold_out=0.9)
    assert refused.value.field == "hold_out"
    with pytest.raises(InvalidConfigError, match="max_num_seqs"):
        fit_engine(runs, setup=Setup(0))
    with pytest.raises(DataFormatError):
        fit_engine([])


def test_the_start_is_the_table_whose_predictions_are_nearest(results: list[Path]) -> None:
    runs = [run for path in results[2:5] for run in read_runs(path)]
    # Slower than any card of the catalogue but the one that it was made of.
    assert nearest_table(runs, Setup(256, "FP16")) == "a100-40gb"
    with pytest.raises(InvalidConfigError):
        nearest_table(runs, Setup(256, "FP64"))


def scaled(runs: list[BenchRun], factor: float) -> list[BenchRun]:
    """The runs of an engine that takes ``factor`` times as long for everything."""
    power = {"output_tokens_per_s": -1.0}
    return [
        dataclasses.replace(run, measured={m: v * factor ** power.get(m, 1.0) for m, v in run.measured.items()})
        for run in runs
    ]


def test_a_table_that_does_not_describe_the_engine_is_refused_with_what_says_so(results: list[Path]) -> None:
    runs = scaled(read_runs(results[4]), 3.0)
    with pytest.raises(DataFormatError) as refused:
        fit_engine(runs, "a100-40gb")
    assert "--hardware" in str(refused.value)


def test_a_fit_that_predicts_no_better_is_not_kept(results: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begin = engine("a100_40")

    def worse(model: object, runs: object) -> np.ndarray[Any, Any]:
        return np.array([0.0, 0.0, np.log(0.6), 0.0, 0.0])  # faster still, although the engine is slower

    monkeypatch.setattr("ops.bench_fit._least_squares", worse)
    runs = [run for path in results for run in read_runs(path)]
    fit = fit_engine(runs[:2], "a100-40gb", hold_out=0.5)
    assert not fit.kept
    assert (fit.engine.step_overhead_ms, fit.engine.gemm_scale) == (begin.step_overhead_ms, begin.gemm_scale)
    errors = by_metric(fit.errors, "held out")
    assert errors["tpot_ms"].after_median > errors["tpot_ms"].before_median


def test_a_table_is_not_overwritten_unasked(results: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "mine.parquet"
    out.write_bytes(b"precious")
    assert main(["import-bench", str(results[4]), "--out", str(out)]) == 2
    assert out.read_bytes() == b"precious"


# ---------------------------------------------------------------- formats


def status(mean: float, median: float, p99: float) -> dict[str, Any]:
    return {"successful": {"mean": mean, "median": median, "percentiles": {"p99": p99}}}


def guidellm_json() -> str:
    requests = [
        {"request_start_time": 100.0 + i, "prompt_tokens": 256, "output_tokens": 128, "request_id": str(i)}
        for i in range(3)
    ]
    metrics = {
        "time_to_first_token_ms": status(90.0, 80.0, 200.0),
        "inter_token_latency_ms": status(21.0, 20.0, 30.0),
        "output_tokens_per_second": status(500.0, 480.0, 600.0),
    }
    strategies = [{"type_": "constant", "rate": 1.0}, {"type_": "concurrent", "streams": 2}]
    benchmarks = [
        {"config": {"strategy": s}, "metrics": metrics, "requests": {"successful": requests, "errored": []}}
        for s in strategies
    ]
    return json.dumps({"metadata": {"version": 1}, "benchmarks": benchmarks})


def guidellm_csv() -> str:
    columns = [
        ("Benchmark", "Strategy", "", "concurrent"),
        ("Request Counts", "Successful", "", "50"),
        ("Request Latency", "Successful Sec", "Mean", "3.1"),
        ("Time to First Token", "Successful ms", "Median", "80"),
        ("Time to First Token", "Successful ms", "Percentiles", '"[1, 2, 3, 4, 5, 6, 7, 8, 9, 200, 300]"'),
        ("Inter Token Latency", "Successful ms", "Median", "20"),
        ("Server Throughput", "Successful Requests/Sec", "Mean", "2.5"),
        ("Server Throughput", "Successful Concurrency", "Mean", "7.8"),
        ("Token Metrics", "Successful Input Tokens", "Mean", "256"),
        ("Token Metrics", "Successful Output Tokens", "Mean", "128"),
        ("Token Throughput", "Successful Output Tokens/Sec", "Mean", "320"),
    ]
    return "\n".join(",".join(row) for row in zip(*columns, strict=True)) + "\n"


AIPERF_JSON = json.dumps(
    {
        "request_throughput": {"unit": "requests/sec", "avg": 2.0},
        "request_latency": {"unit": "ms", "avg": 4000.0, "p50": 3900.0},
        "time_to_first_token": {"unit": "ms", "avg": 90.0, "p50": 80.0, "p99": 200.0},
        "inter_token_latency": {"unit": "ms", "avg": 21.0, "p50": 20.0},
        "input_sequence_length": {"unit": "tokens", "avg": 550.0},
        "output_sequence_length": {"unit": "tokens", "avg": 128.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 256.0},
        "request_count": {"unit": "requests", "avg": 60.0},
        "input_config": {"loadgen": {"concurrency": 8}},
    }
)
AIPERF_CSV = """Metric,avg,min,max,p1,p50,p99,std
Time to First Token (ms),90.00,40.00,300.00,41.00,80.00,200.00,20.00
Inter Token Latency (ms),21.00,18.00,30.00,18.50,20.00,29.00,1.00
Request Latency (ms),4000.00,3000.00,5000.00,3100.00,3900.00,4900.00,300.00
Input Sequence Length (tokens),550.00,550.00,550.00,550.00,550.00,550.00,0.00
Output Sequence Length (tokens),128.00,128.00,128.00,128.00,128.00,128.00,0.00

Metric,Value
Output Token Throughput (tokens/sec),256.00
Request Count,60.00
Request Throughput (requests/sec),2.00
"""


def aiperf_jsonl() -> str:
    def record(start_s: float, ttft_ms: float) -> dict[str, Any]:
        start = 1_759_813_207_000_000_000 + int(start_s * 1e9)
        metrics = {
            "input_sequence_length": {"value": 550, "unit": "tokens"},
            "output_sequence_length": {"value": 101, "unit": "tokens"},
            "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
            "inter_token_latency": {"value": 20.0, "unit": "ms"},
        }
        metadata = {"request_start_ns": start, "request_end_ns": start + 2_080_000_000}
        return {"metadata": metadata, "metrics": metrics, "error": None}

    return "".join(json.dumps(record(s, t)) + "\n" for s, t in ((0.0, 70.0), (1.0, 80.0), (2.0, 90.0)))


@pytest.mark.parametrize(
    ("name", "text", "clients", "measured"),
    [
        (
            "g.json",
            guidellm_json(),
            [0, 2],
            {"ttft_p50_ms": 80, "ttft_p99_ms": 200, "tpot_ms": 20, "output_tokens_per_s": 500},
        ),
        (
            "g.csv",
            guidellm_csv(),
            [8],
            {"ttft_p50_ms": 80, "ttft_p99_ms": 200, "tpot_ms": 20, "output_tokens_per_s": 320},
        ),
        (
            "a.json",
            AIPERF_JSON,
            [8],
            {"ttft_p50_ms": 80, "ttft_p99_ms": 200, "tpot_ms": 20, "output_tokens_per_s": 256},
        ),
        ("a.csv", AIPERF_CSV, [8], {"ttft_p50_ms": 80, "ttft_p99_ms": 200, "tpot_ms": 20, "output_tokens_per_s": 256}),
        (
            "a.jsonl",
            aiperf_jsonl(),
            [0],
            {"ttft_p50_ms": 80, "ttft_p99_ms": 89.8, "tpot_ms": 20, "output_tokens_per_s": 303 / 4.08},
        ),
    ],
)
def test_each_tool_is_read_as_it_documents_its_results(
    tmp_path: Path, name: str, text: str, clients: list[int], measured: dict[str, float]
) -> None:
    (tmp_path / name).write_text(text)
    runs = read_runs(tmp_path / name)
    assert [run.clients for run in runs] == clients
    assert dict(runs[0].measured) == pytest.approx(measured)


def test_a_vllm_result_without_details_still_tells_its_load(tmp_path: Path) -> None:
    short = {
        k: v for k, v in benchmark(2.0, 0, 20, seed=1).items() if k not in ("input_lens", "output_lens", "start_times")
    }
    (tmp_path / "r.json").write_text(json.dumps(short))
    (run,) = read_runs(tmp_path / "r.json")
    assert run.clients == 0
    assert run.requests.prompt_tokens.sum() == pytest.approx(short["total_input_tokens"])


def test_appended_vllm_results_are_several_runs(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("\n".join(json.dumps(benchmark(None, c, 8, seed=c)) for c in (1, 2)))
    assert [run.clients for run in read_runs(tmp_path / "r.json")] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{", "is not JSON (Expecting property name enclosed in double quotes: line 1"),
        (b'{"a": 1}', "JSON of no known benchmark"),
        (b"a,b\n1,2\n", "CSV of no known benchmark"),
        (b'{"request_throughput": 1, "completed": "many"}', "completed='many' is not a number"),
        (b'{"request_throughput": 1, "completed": 5}', "no field 'total_input_tokens'"),
        (
            b'{"request_throughput": 1, "completed": 5, "input_lens": [1, -1], "output_lens": [1, 2]}',
            "input_lens[1]=-1 is not allowed: it must be from 0",
        ),
        (
            b'{"request_throughput": 1, "completed": 2, "input_lens": [1, 1], "output_lens": [1, 2]}',
            "states no latency",
        ),
        (b'{"benchmarks": [{"metrics": {}, "requests": {"successful": []}}]}', "fewer than two successful"),
        (b'{"time_to_first_token": {"avg": 5}}', "states no prompt tokens"),
        (b'{"time_to_first_token": 5, "input_sequence_length": 5}', "input_sequence_length=5 is not an object"),
        (b'{"benchmarks": [{"requests": {"successful": [1, 2]}}]}', "benchmarks[0].requests.successful[0]=1 is not"),
        (b'{"a":' + b"[" * 100_000, "is nested too deeply"),
        (guidellm_csv().replace("[1, 2", "[[1, 2").encode(), "is not JSON"),
        (
            guidellm_csv().replace('"[1, 2, 3, 4, 5, 6, 7, 8, 9, 200, 300]"', "[1]").encode(),
            "not a list of percentiles",
        ),
        (b'{"benchmarks": []}', "holds no finished run"),
        (aiperf_jsonl().splitlines()[0].encode(), "fewer than two successful"),
    ],
)
def test_a_bad_result_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], results: list[Path], text: bytes, message: str
) -> None:
    bad, out = tmp_path / "bad.json", tmp_path / "table.parquet"
    bad.write_bytes(text)
    assert main(["import-bench", str(results[0]), str(bad), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "bad.json" in said
    assert list(tmp_path.iterdir()) == [bad]


def test_a_document_longer_than_the_most_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.json").write_text(text := json.dumps(benchmark(None, 1, 8, seed=1)))
    monkeypatch.setattr("ops.log.source.MAX_DOCUMENT_CHARS", len(text))
    assert len(read_runs(tmp_path / "r.json")) == 1
    (tmp_path / "r.json").write_text(text + " ")
    with pytest.raises(DataFormatError, match=f"has more than {len(text):,} characters"):
        read_runs(tmp_path / "r.json")


# ---------------------------------------------------------------- the table


def test_a_fitted_engine_becomes_a_table_that_the_dynamics_read(
    tmp_path: Path, results: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = fit_engine(read_runs(results[4]), "a100-40gb", name="mine")
    monkeypatch.setattr(table, "BATCH_SIZES", (1, 4))
    monkeypatch.setattr(table, "PROMPT_TOKENS", (64, 128))
    monkeypatch.setattr(table, "KV_BUDGETS", (1.0,))
    monkeypatch.setattr(table, "SPEC_LENGTHS", (0, 1))
    path = build_table(
        tmp_path / "mine.parquet",
        fit.source,
        fit.engine,
        notes={"imported": fit.to_dict()},
    )
    tables = load_tables(path)
    assert tables.meta["engine"] == "mine"
    assert tables.meta["tau_ms"] == fit.engine.ttft_offset_ms
    assert tables.meta["imported"]["fitted"] == fit.fitted
    model = fit.source.operators("FP16", fit.engine)
    assert tables.decode_ms[0, 0, 1, 1] == pytest.approx(model.decode_ms(4, 128))


def test_a_table_that_fails_half_way_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: object) -> list[dict[str, float]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "slice_rows", fail)
    with pytest.raises(KeyboardInterrupt):
        build_table(tmp_path / "t.parquet", MeasuredSource("a100-40gb"), engine("a100_40"))
    assert list(tmp_path.iterdir()) == []


def detailed(clients: int, prompt: int, seed: int) -> dict[str, Any]:
    """A result of ``vllm bench serve --save-detailed``: a closed loop on an engine that is like no table's."""
    rng = np.random.default_rng(seed)
    n = max(6, 3 * clients)
    lengths = [(int(rng.integers(prompt // 2, 2 * prompt)), int(rng.integers(16, 64))) for _ in range(n)]
    served = serve_virtually(lambda b, _, prompts: (20 + 2 * b + 0.5 * sum(prompts)) / 1e3, lengths, clients, 0.004)
    first = [r.token_s[0] + 0.002 for r in served]
    return {
        **benchmark(None, clients, len(served), seed),
        "completed": len(served),
        "input_lens": [r.prompt for r in served],
        "output_lens": [r.goal for r in served],
        "start_times": [500.0 + r.sent_s for r in served],
        "ttfts": [at - r.sent_s for at, r in zip(first, served, strict=True)],
        "itls": [np.diff(r.token_s).tolist() for r in served],
    }


def test_an_engine_like_no_table_gets_iteration_times_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for i, (clients, prompt) in enumerate((n, p) for n in (1, 3, 8) for p in (40, 300)):
        files.append(tmp_path / f"run{i}.json")
        files[-1].write_text(json.dumps(detailed(clients, prompt, i)))
    out = tmp_path / "own.parquet"
    own = ["--kv-pool-tokens", "40000", "--kv-bytes-per-token", "1000", "--out", str(out)]
    assert main(["import-bench", *map(str, files), *own]) == 0
    assert "phases held out: error 0." in capsys.readouterr().out
    source = source_of(load_tables(out).meta)
    assert isinstance(source, EngineSource)
    assert source.facts.pool_tokens() == 40000
    assert source.times.step_ms == pytest.approx(20.0, rel=0.03)
    assert source.times.rows_ms(8) + 8 * source.times.sequence_ms == pytest.approx(16.0, rel=0.05)
    assert source.times.rows_ms(300) == pytest.approx(150.0, rel=0.05)
    # Without single tokens' times, or beside what starts from a table, it is refused with what to do.
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(benchmark(None, 4, 24, seed=1)))
    for wrong, hint in (
        ([str(plain), *own, "--force"], "--save-detailed"),
        ([str(files[0]), *own, "--force", "--hardware", "a100-40gb"], "leave --hardware"),
        ([str(files[0]), "--kv-pool-tokens", "9", "--fit-only"], "--kv-bytes-per-token"),
        ([str(files[0]), *own, "--force", "--block-tokens", "0"], "block_tokens"),
    ):
        assert main(["import-bench", *wrong]) == 2
        assert hint in capsys.readouterr().err
