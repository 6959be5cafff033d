"""``inferencegym simulate``: sweeps over rates, objectives, a row for every request, readable numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cli.main import main
from cli.simulate import sweep_rates
from inferencegym.errors import InvalidConfigError
from inferencegym.models import ROUTERS, QuantTier, ServeAction
from ops.capacity import log_task, on_replicas, play_constant
from ops.objectives import margin, parse_objective
from ops.played import PlayedLoad
from ops.report import plain
from simulator.hardware.catalogue import table_path
from simulator.hardware.sources import operators_of
from simulator.hardware.tables import load_tables
from simulator.whatif import steady_requests

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *options: str) -> str:
    assert main(["simulate", *options]) == 0
    return capsys.readouterr().out


def test_latency_rises_with_throughput_until_the_fleet_is_full(tmp_path: Path, capsys: Capture) -> None:
    out, png = tmp_path / "curve.parquet", tmp_path / "curve.png"
    options = ["--sweep", "qps=1:40:5", "--output-cv", "0", "--objective", "ttft_p99=500", "--json"]
    answer = json.loads(said(capsys, *options, "--out", str(out), "--png", str(png)))
    rows = answer["sweep"]
    assert [row["qps"] for row in rows] == pytest.approx([1, 2.5149, 6.3246, 15.9054, 40], abs=1e-4)
    for name in ("output_tokens_per_s", "ttft_p99_ms", "tpot_p50_ms"):
        assert (np.diff([row[name] for row in rows]) > 0).all(), name
    met = [row["qps"] for row in rows if row["ttft_p99_ms"] <= 500]
    assert answer["highest_qps_within_objectives"] == max(met)
    assert len(met) < len(rows)
    assert pd.read_parquet(out)["ttft_p99_ms"].tolist() == [row["ttft_p99_ms"] for row in rows]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_point_of_a_sweep_is_the_same_load_simulated_alone(capsys: Capture) -> None:
    rows = json.loads(said(capsys, "--sweep", "qps=2:8:2", "--requests", "100", "--json"))["sweep"]
    alone = json.loads(said(capsys, "--qps", "8", "--requests", "100", "--json"))
    assert {name: rows[1][name] for name in alone} == alone


def test_a_drawn_load_is_long_enough_for_a_steady_state_or_the_answer_says_so(capsys: Capture) -> None:
    busy = ["simulate", "--qps", "60", "--gpus", "4", "--json"]
    assert main(busy) == 0
    whole, told = capsys.readouterr()
    assert (json.loads(whole)["n_requests"], told) == (18_000, "")
    assert main([*busy, "--requests", "300"]) == 0
    short, told = capsys.readouterr()
    assert "300 requests reach no steady state: give --requests 4100 or more" in told
    # They end before the fleet is full.
    assert json.loads(short)["tpot_p50_ms"] < 0.5 * json.loads(whole)["tpot_p50_ms"]
    assert json.loads(said(capsys, "--closed", "400", "--json"))["n_requests"] == 4_000


def test_a_log_is_played_faster_in_a_sweep(tmp_path: Path, capsys: Capture) -> None:
    rows = "".join(f"{i},200,50\n" for i in range(61))
    (tmp_path / "log.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    slow, fast = json.loads(said(capsys, "--trace", str(tmp_path / "log.csv"), "--sweep", "qps=1:4:2", "--json"))[
        "sweep"
    ]
    # 61 requests in 60 s are 1.017 a second: at 1 a second they last 61 s, at four 15.25 s, and then the last answer.
    last = slow["makespan_s"] - 61.0
    assert 0 < last < 2
    assert fast["makespan_s"] == pytest.approx(15.25 + last, abs=0.5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--trace", "log.csv", "--qps", "10"],
            "--qps is for drawn requests, and --trace gives recorded ones; --sweep",
        ),
        (["--trace", "log.csv", "--seed", "0"], "--seed is for drawn requests, and --trace gives recorded ones"),
        (["--trace", "log.csv", "--output-cv", "0.55"], "--output-cv is for drawn requests"),
        (["--closed", "4", "--qps", "5"], "--qps does not go with --closed"),
        (["--sweep", "qps=1:4:2", "--qps", "5"], "--qps does not go with --sweep"),
        (["--hardware", "h100,l40s"], "--hardware=h100,l40s is not allowed: this command plays on one table"),
        (["--closed", "0"], "--closed=0 is not allowed: it must be from 1 to"),
    ],
)
def test_an_option_that_the_load_would_ignore_is_refused(capsys: Capture, options: list[str], told: str) -> None:
    assert main(["simulate", *options]) == 2
    assert told in capsys.readouterr().err


def test_a_precision_is_known_in_any_case(capsys: Capture) -> None:
    options = ["--hardware", "h100", "--model", "llama-3.1-8b", "--requests", "20", "--json", "--quant"]
    assert said(capsys, *options, "fp8") == said(capsys, *options, "FP8")


@pytest.mark.parametrize("load", [["--qps", "6"], ["--qps", "60"], ["--closed", "40"]])
def test_every_request_is_written_and_adds_up_to_the_report(tmp_path: Path, capsys: Capture, load: list[str]) -> None:
    path = tmp_path / "requests.csv"
    report = json.loads(
        said(capsys, "--batch-size", "32", *load, "--requests", "200", "--per-request", str(path), "--json")
    )
    rows = pd.read_csv(path)
    assert len(rows) == report["completed"] == 200
    # A client gets the last token a network's delay after it was written.
    assert (rows["arrival_s"] + rows["latency_s"]).max() == pytest.approx(report["makespan_s"], abs=0.05)
    for quantity in ("ttft", "tpot"):
        for name, q in {"p50": 0.5, "p90": 0.9, "p99": 0.99}.items():
            assert rows[f"{quantity}_ms"].quantile(q) == pytest.approx(report[f"{quantity}_{name}_ms"])
    decode_s = rows["tpot_ms"] * (rows["output_tokens"] - 1) / 1000
    assert (rows["ttft_ms"] / 1000 + decode_s).tolist() == pytest.approx(rows["latency_s"].tolist())


def test_objectives_are_judged(capsys: Capture) -> None:
    options = ["--qps", "4", "--requests", "100", "--objective", "ttft_p99=500", "--objective", "tpot_mean=1", "--json"]
    assert json.loads(said(capsys, *options))["objectives"] == {"ttft_p99=500": True, "tpot_mean=1": False}
    told = said(capsys, *(each for each in options if each != "--json")).splitlines()
    assert told[-2:] == ["TTFT p99 <= 500 ms: met", "TPOT mean <= 1 ms: missed"]
    twice = ["--objective", "ttft_p99=500"] * 2
    assert said(capsys, "--qps", "4", "--requests", "5", *twice).count("TTFT p99 <= 500 ms: met") == 2


def test_an_objective_is_a_statistic_and_a_limit() -> None:
    objective = parse_objective("ttft_p99=500")
    assert (objective.figure, objective.share, objective.limit_ms) == ("ttft_p99_ms", 0.99, 500.0)
    assert parse_objective("tpot_mean_ms=40").figure == "tpot_mean_ms"
    assert margin(
        [objective, parse_objective("tpot_p50=50")], {"ttft_p99_ms": 250, "tpot_p50_ms": 60}
    ) == pytest.approx(-0.2)
    for wrong in ("ttft=500", "ttft_p98=500", "e2e=500", "ttft_p99=0", "ttft_p99=nan", "ttft_p99=1e99", "x"):
        with pytest.raises(InvalidConfigError) as refused:
            parse_objective(wrong)
        assert refused.value.field == "objective"


def test_a_sweep_that_is_none_is_refused() -> None:
    for wrong in ("qps=1", "qps=5:1", "qps=0:5", "rate=1:5", "qps=1:5:1", "qps=1:5:9:9", "qps=1:x", "qps=1:inf"):
        with pytest.raises(InvalidConfigError):
            sweep_rates(wrong)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path, capsys: Capture) -> None:
    for options in (
        ["--out", str(tmp_path / "x.csv")],
        ["--sweep", "qps=1:2", "--per-request", str(tmp_path / "x.csv")],
        ["--prefill-replicas", "0"],
        ["--sweep", "qps=1:2", "--out", str(tmp_path / "x.xlsx")],
    ):
        assert main(["simulate", *options]) == 2
        assert capsys.readouterr().err.startswith("inferencegym simulate: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(13740.0, "13,740"), (0.01234, "0.0123"), (3.14159, "3.14"), (25.04, "25.0"), (7, "7"), (float("nan"), "-")],
)
def test_numbers_are_written_without_exponents(value: float, text: str) -> None:
    assert plain(value) == text


def test_objectives_bound_whole_requests_and_gaps_between_tokens(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "requests.csv"
    objectives = ["--objective", "e2e_p99=20000", "--objective", "itl_p99=1"]
    report = json.loads(said(capsys, "--qps", "4", *objectives, "--per-request", str(path), "--json"))
    assert report["objectives"] == {"e2e_p99=20000": True, "itl_p99=1": False}
    rows = pd.read_csv(path)
    assert report["e2e_p99_ms"] == pytest.approx(1e3 * rows["latency_s"].quantile(0.99))
    # Gaps of all requests count alike, and they are counted to 1%.
    gaps = rows["output_tokens"] - 1
    assert report["itl_mean_ms"] == pytest.approx((rows["tpot_ms"] * gaps).sum() / gaps.sum(), rel=0.01)
    # Where no request is answered, no objective is met.
    impossible = ["--qps", "4", "--requests", "5", "--prompt-tokens", "1e6", "--json", *objectives]
    assert set(json.loads(said(capsys, *impossible))["objectives"].values()) == {False}


def test_simulate_gives_the_figures_of_plan_for_the_same_fleet() -> None:
    load, tables = steady_requests(12.0, 400, 900, 120, 0.6, 0.8), load_tables(table_path("h100-llama-3.1-8b"))
    for action, prefill in (
        (ServeAction(0.9, 0, 64, False, QuantTier.FP16), None),
        (ServeAction(0.9, 0, 64, True, QuantTier.FP16), None),
        (ServeAction(0.9, 0, 64, True, QuantTier.FP16), 1),
    ):
        simulated = PlayedLoad(action, load, tables, "shared", 2, prefill).figures()
        planned = play_constant(action, on_replicas(log_task(load, tables), 2), tables, "shared", prefill)
        for figure, value in planned.figures.items():
            assert simulated[figure] == value, figure
        assert simulated["gpu_seconds"] == pytest.approx(simulated["makespan_s"] * planned.n_gpus)


def test_the_wait_for_the_api_server_is_part_of_what_simulate_says(capsys: Capture) -> None:
    options = ["--hardware", "h100-llama-3.1-8b", "--prompt-tokens", "100", "--output-tokens", "2", "--output-cv", "0"]
    # Requests that arrive together are read in turn; the last of 64 waits for all others.
    load = ["--qps", "1e6", "--requests", "64", "--burst-s", "1", "--json"]
    report = json.loads(said(capsys, *options, *load))
    request_ms = operators_of(load_tables(table_path("h100-llama-3.1-8b")))[0].profile.request_ms
    assert request_ms > 0
    assert report["ttft_p99_ms"] > 64 * request_ms
    # Two replicas have two API servers.
    assert json.loads(said(capsys, *options, *load, "--gpus", "2"))["ttft_p99_ms"] < 0.7 * report["ttft_p99_ms"]


def test_clients_of_a_closed_loop_have_one_request_each_at_a_time(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "requests.csv"
    said(capsys, "--closed", "4", "--requests", "40", "--router", "round-robin", "--per-request", str(path))
    rows = pd.read_csv(path)
    assert (rows["arrival_s"] == 0).sum() == 4
    end_s = rows["arrival_s"] + rows["latency_s"]
    for at in rows["arrival_s"]:
        assert ((rows["arrival_s"] <= at) & (end_s > at + 1e-6)).sum() <= 4


def test_progress_is_the_share_of_the_requests_that_have_been_served() -> None:
    told: list[float] = []
    PlayedLoad(
        ServeAction(0.9, 0, 8, False, QuantTier.FP16),
        steady_requests(2.0, 60, 100, 50),
        load_tables(),
        "shared",
        progress=told.append,
    )
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert told[len(told) // 2] == pytest.approx(0.5, abs=0.2)


SESSIONS = "time,prompt_tokens,output_tokens,session_id\n" + "".join(f"{i}.5,400,50,{i % 3}\n" for i in range(12))


def test_a_router_plays_every_request_and_keeps_sessions_together(tmp_path: Path, capsys: Capture) -> None:
    log, out = tmp_path / "log.csv", tmp_path / "requests.csv"
    log.write_text(SESSIONS)
    options = ["--trace", str(log), "--gpus", "2", "--router", "prefix-affinity", "--per-request", str(out), "--json"]
    report = json.loads(said(capsys, *options))
    rows = pd.read_csv(out)
    assert (report["completed"], report["rejected"], len(rows)) == (12, 0, 12)
    assert rows["ttft_ms"].quantile(0.99) == pytest.approx(report["ttft_p99_ms"])
    assert rows["tpot_ms"].median() == pytest.approx(report["tpot_p50_ms"])
    assert (rows["arrival_s"] + rows["latency_s"]).max() == pytest.approx(report["makespan_s"], abs=0.1)
    assert report["gpu_seconds"] == pytest.approx(2 * report["makespan_s"])
    assert report["classes"]["interactive"]["served"] == 12
    assert sum(report["support"].values()) == pytest.approx(1.0)


def test_requests_that_no_engine_takes_are_counted_before_the_figures(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "log.csv"
    prompts = [45_000, 400, 400, 400] * 3
    rows = "".join(f"{i}.5,{prompt},50\n" for i, prompt in enumerate(prompts))
    log.write_text(f"time,prompt_tokens,output_tokens\n{rows}")
    # The pool of a B200 holds them; the model's context does not.
    hardware = ["--hardware", "b200-qwen3-32b"]
    printed = said(capsys, "--trace", str(log), *hardware).splitlines()
    why = "they are longer than the model's context, 40,960 tokens"
    at = printed.index(f"3 of 12 requests (25.0%) count as refused: {why}")
    assert printed[at + 1].startswith("9 of 12 requests answered, 3 refused, in ")
    # The dynamics of a task serve any length, so the task is not what an engine would do.
    asked = ["import-trace", str(log), "--id", "long-prompts", "--out", str(tmp_path), "--calibrate", "no", *hardware]
    assert main(asked) == 0
    served = "would be refused by an engine, but the task serves them"
    assert f"  3 of 12 requests (25.0%) {served}: {why}" in capsys.readouterr().out.splitlines()


def test_prefix_affinity_is_refused_for_a_log_without_sessions_or_blocks(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "log.csv"
    log.write_text(SESSIONS.replace("session_id", "note"))
    for command in (["simulate"], ["plan", "--objective", "ttft_p99=500", "--model", "llama-3.1-8b"]):
        assert main([*command, "--trace", str(log), "--router", "prefix-affinity"]) == 2
        assert "--columns session=NAME" in capsys.readouterr().err
    named = ["--columns", "session=note", "--router", "prefix-affinity", "--json"]
    assert json.loads(said(capsys, "--trace", str(log), *named))["completed"] == 12


def test_one_replica_gives_the_same_figures_under_every_router(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "log.csv"
    log.write_text(SESSIONS)
    one, *others = (said(capsys, "--trace", str(log), "--router", router, "--json") for router in ROUTERS)
    assert others == [one] * 4


def test_a_plans_batch_of_1024_is_played_as_the_plan_does(capsys: Capture) -> None:
    tables = load_tables(table_path("h100-llama-3.1-8b"))
    log = steady_requests(400.0, 2_000, 32.0, 200.0, 0.0)
    large, small = (ServeAction(0.9, 0, batch, False, QuantTier.FP16) for batch in (1024, 512))
    played = PlayedLoad(large, log, tables, "shared").figures()
    planned = play_constant(large, on_replicas(log_task(log, tables), 1), tables).figures
    assert played["ttft_p99_ms"] == pytest.approx(planned["ttft_p99_ms"])
    assert played["ttft_p99_ms"] < PlayedLoad(small, log, tables, "shared").figures()["ttft_p99_ms"]
    load = ["--hardware", "h100-llama-3.1-8b", "--kv-budget", "0.9", "--batch-size", "1024", "--qps", "400"]
    load += ["--requests", "2000", "--prompt-tokens", "32", "--output-tokens", "200", "--output-cv", "0", "--json"]
    assert json.loads(said(capsys, *load))["ttft_p99_ms"] == pytest.approx(played["ttft_p99_ms"])
    for hardware, most in (("h100-llama-3.1-8b", 1024), ("a100-40gb", 512)):
        assert main(["simulate", "--hardware", hardware, "--batch-size", str(most + 1)]) == 2
        assert f"an integer from 1 to {most}" in capsys.readouterr().err


def test_a_model_and_a_card_choose_a_table_and_the_others_are_named(capsys: Capture) -> None:
    load = ["simulate", "--qps", "2", "--burst-s", "5", "--json"]
    found = {}
    for chosen, table, others in (
        ("--hardware h100 --model meta-llama/Llama-3.1-8B-Instruct", "h100-llama-3.1-8b", ""),
        ("--hardware a100 --model llama-3.1-8b", "a100-40gb", "a100-80gb"),
        ("--hardware a100-80gb --model llama-3.1-8b", "a100-80gb", ""),
        ("--model qwen3-8b", "a100-qwen3-8b", ""),
        ("--hardware h100 --model llama-3.1-70b", "h100-llama-3.1-70b-tp2", "h100-llama-3.1-70b-tp4"),
    ):
        assert main([*load, *chosen.split()]) == 0
        told = capsys.readouterr()
        assert told.err == (f"playing on {table}; --hardware takes {others} too\n" if others else "")
        found[table] = told.out
        assert main([*load, "--hardware", table]) == 0
        assert capsys.readouterr().out == told.out
    assert len(set(found.values())) == 5
    assert said(capsys, "--qps", "2", "--requests", "5").startswith(
        "llama-3.1-8b on a100-40gb, replicas: 1; latencies as simulated"
    )
    fp8 = said(capsys, "--hardware", "b200", "--model", "Qwen/Qwen3-32B-FP8", *load[1:])
    assert fp8 == said(capsys, "--hardware", "b200-qwen3-32b", "--quant", "FP8", *load[1:])
    assert fp8 != said(capsys, "--hardware", "b200-qwen3-32b", *load[1:])
    assert main(["simulate", "--hardware", "l40s"]) == 2
    assert "model is missing: choose --model from llama-3.1-8b, gpt-oss-20b" in capsys.readouterr().err
    assert main(["simulate", "--model", "nonsense"]) == 2
    assert "model='nonsense' has no table on this hardware: there are llama-3.1-8b" in capsys.readouterr().err
    assert main(["simulate", "--table", "mine.parquet", "--model", "llama-3.1-8b"]) == 2
    assert "--model does not go with --table" in capsys.readouterr().err


def test_the_logs_model_chooses_the_table_where_the_options_do_not(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "log.csv"
    for model, options, played, told in (
        ("Qwen/Qwen3-8B", [], "qwen3-8b on a100_sxm", ""),
        ("Qwen/Qwen3-32B", ["--hardware", "b200"], "qwen3-32b on b200_sxm", ""),
        ("Qwen/Qwen3-32B", ["--model", "qwen3-8b"], "qwen3-8b on a100_sxm", ""),
        ("gpt-4o", [], "llama-3.1-8b on a100-40gb", "no table of the log's model gpt-4o: playing on a100-40gb\n"),
    ):
        rows = "".join(f"{i},200,50,{model}\n" for i in range(30))
        log.write_text(f"arrival_s,prompt_tokens,output_tokens,model\n{rows}")
        assert main(["shadow", "--trace", str(log), "--agent", "naive", "--gpus", "1", *options]) == 0
        said = capsys.readouterr()
        assert f"Simulated: {played}, table" in said.out
        assert said.err == told
    assert main(["simulate", "--trace", str(log), "--hardware", "b200"]) == 2
    assert "model is missing" in capsys.readouterr().err


def test_an_fp8_kv_cache_holds_more_requests_and_says_where_its_attention_was_not_measured(capsys: Capture) -> None:
    found = {}
    for table in ("l40s-llama-3.1-8b", "a100-qwen3-8b"):
        load = ["simulate", "--hardware", table, "--qps", "1", "--prompt-tokens", "6000", "--requests", "60", "--json"]
        for dtype in ("auto", "fp8"):
            assert main([*load, "--kv-cache-dtype", dtype]) == 0
            told = capsys.readouterr()
            found[table, dtype] = json.loads(told.out)
            assert ("computed with 16-bit timings" in told.err) == ((table, dtype) == ("a100-qwen3-8b", "fp8"))
        assert found[table, "fp8"]["peak_kv_occupancy"] < 0.8 * found[table, "auto"]["peak_kv_occupancy"]
    measured, computed = (
        found[table, "fp8"]["tpot_p50_ms"] / found[table, "auto"]["tpot_p50_ms"]
        for table in ("l40s-llama-3.1-8b", "a100-qwen3-8b")
    )
    assert measured < 0.95
    assert computed == 1.0
