"""Request logs of every format: read exactly, refused with file, line and column, packed and playable."""

from __future__ import annotations

import csv
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.main import main
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import QuantTier, ServeAction
from inferencegym.tasks import DATA_DIR, TASKS_ENV, get_calibration, get_task
from ops.log import reader
from ops.log.reader import import_log
from ops.trace_task import write_trace_task
from simulator.hardware.tables import load_tables
from simulator.load.prefix import CAPACITY_TOKENS, PUBLISHED_REUSE_HIT, PrefixReuse
from simulator.load.recorded import RecordedLoad, load_trace, save_trace
from simulator.load.requests import RequestLog
from simulator.whatif import serve_requests

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1600, "output_length": 20, "hash_ids": [0, 1, 3, 4]}
{"timestamp": 2600, "input_length": 700, "output_length": 10, "hash_ids": [5, 6]}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
6.5,ChatGPT,1087,230,1317,Conversation log
7,ChatGPT,300,0,300,API log
"""


def aiperf_record(start_s: float, prompt: int, output: int, error: object = None) -> str:
    metrics = {
        "input_sequence_length": {"value": prompt, "unit": "tokens"},
        "output_sequence_length": {"value": output, "unit": "tokens"},
    }
    record = {
        "metadata": {
            "request_start_ns": 1_759_813_207_000_000_000 + int(1e9 * start_s),
            "benchmark_phase": "profiling",
        },
        "metrics": {"error_isl": {"value": prompt, "unit": "tokens"}} if error else metrics,
        "error": error,
    }
    return json.dumps(record) + "\n"


CANCELLED = {"code": 499, "type": "RequestCancellationError", "message": "Request was cancelled after 0.000 seconds"}
AIPERF = aiperf_record(0.5, 550, 9) + aiperf_record(1.0, 60, 90) + aiperf_record(2.0, 550, 0, CANCELLED)
GUIDELLM = json.dumps(
    {
        "benchmarks": [
            {
                "requests": {
                    "successful": [
                        {"request_start_time": 100.0, "prompt_tokens": 256, "output_tokens": 128},
                        {"request_start_time": 101.5, "prompt_tokens": 300, "output_tokens": 64},
                    ],
                    "errored": [],
                }
            }
        ]
    }
)
VLLM = json.dumps(
    {
        "start_times": [10.0, 10.25],
        "input_lens": [11, 12],
        "output_lens": [5, 6],
        "errors": ["", ""],
        "ttfts": [0.1, 0.2],
    }
)
PLAIN = "arrival_s,prompt_tokens,output_tokens,class\n0,10,5,interactive\n2,20,6,batch\n1,30,7,2\n"


@pytest.mark.parametrize(
    ("format", "name", "text", "arrivals", "prompts", "outputs"),
    [
        ("azure", "a.csv", AZURE, [0.0, 4.314579, 4.541877], [374, 396, 879], [44, 109, 55]),
        ("mooncake", "m.jsonl", MOONCAKE, [0.0, 2.5, 2.6], [1100, 1600, 700], [50, 20, 10]),
        ("burstgpt", "b.csv", BURSTGPT, [0.0, 1.5, 2.0], [472, 1087, 300], [18, 230, 124]),
        ("aiperf", "p.jsonl", AIPERF, [0.0, 0.5], [550, 60], [9, 90]),
        ("guidellm", "g.json", GUIDELLM, [0.0, 1.5], [256, 300], [128, 64]),
        ("vllm", "v.json", VLLM, [0.0, 0.25], [11, 12], [5, 6]),
        ("table", "c.csv", PLAIN, [0.0, 1.0, 2.0], [10, 30, 20], [5, 7, 6]),
    ],
)
def test_each_format_is_recognised_and_read_exactly(
    tmp_path: Path, format: str, name: str, text: str, arrivals: list[float], prompts: list[int], outputs: list[int]
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    imported = import_log(path)
    assert imported.format == format
    np.testing.assert_allclose(imported.log.arrival_s, arrivals, atol=2e-6)
    assert imported.log.prompt_tokens.tolist() == prompts
    assert imported.log.output_tokens.tolist() == outputs


def test_a_benchmark_of_vllm_names_its_model_and_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    found = {**json.loads(VLLM), "model_id": "meta-llama/Llama-3.1-8B", "request_throughput": 2.0}
    path.write_text(json.dumps(found))
    assert import_log(path).model == "meta-llama/Llama-3.1-8B"
    for lost, told in (("start_times", "has no start_times"), ("input_lens", "holds totals, not requests")):
        del found[lost]
        path.write_text(json.dumps(found))
        with pytest.raises(DataFormatError, match=f"{told}.*--save-detailed"):
            import_log(path)


def test_a_request_follows_the_last_one_with_most_of_its_prompt_or_its_session(tmp_path: Path) -> None:
    blocks = tmp_path / "m.jsonl"
    # The third shares 512 of its 1,600 tokens with both others, the fourth 512 of 2,000, the last 1,024 of 1,100.
    rows = [(1100, [0, 1, 2]), (1600, [0, 1, 3, 4]), (1600, [0, 5, 6, 7]), (2000, [0, 8, 9, 10]), (1100, [0, 1, 11])]
    blocks.write_text(
        "".join(
            json.dumps({"timestamp": 1000 * i, "input_length": n, "output_length": 5, "hash_ids": ids}) + "\n"
            for i, (n, ids) in enumerate(rows)
        )
    )
    log = import_log(blocks).log
    assert log.follows.tolist() == [-1, 0, 1, -1, 1]
    # A part follows only requests that it still has.
    assert log.part(slice(1, 5), 1.0).follows.tolist() == [-1, 0, -1, 0]
    assert log.part(np.array([True, False, True, True, True]), 0.0).follows.tolist() == [-1, -1, -1, -1]
    sessions = tmp_path / "s.csv"
    sessions.write_text("time,prompt_tokens,output_tokens,conversation_id\n1,9,5,a\n2,9,5,b\n3,9,5,a\n4,9,5,\n5,9,5,\n")
    assert import_log(sessions).log.follows.tolist() == [-1, -1, 0, -1, -1]
    (tmp_path / "c.csv").write_text(PLAIN)
    assert not len(import_log(tmp_path / "c.csv").log.follows)


def test_requests_of_a_repeated_log_follow_others_of_the_same_lap_and_episode() -> None:
    log = RequestLog(np.arange(6) + 0.5, np.full(6, 9.0), np.full(6, 5.0), np.zeros(6, dtype=np.int64))
    log = replace(log, follows=np.array([-1, -1, 0, 1, 2, 3]))
    once = RecordedLoad(log, load_tables(), once=True).requests(0, 20).follows
    assert once is not None
    assert once.tolist() == log.follows.tolist()
    for seed in range(4):
        found = RecordedLoad(log, load_tables()).requests(seed, 12).follows
        assert found is not None
        # Two requests back, but for the first two of the episode and of each lap that begins within it.
        followed = np.flatnonzero(found >= 0)
        assert (followed - found[followed] == 2).all()
        begins = [k for k in range(2, 12) if found[k] < 0]
        assert set(found[:2]) == {-1}
        assert len(begins) in (2, 3, 4)


def test_failed_requests_are_demand_with_the_median_output_unless_they_are_to_be_left_out(tmp_path: Path) -> None:
    failed = json.dumps({**json.loads(VLLM), "output_lens": [0, 6], "errors": ["timeout", ""]})
    for name, text, output in (("b.csv", BURSTGPT, 124.0), ("v.json", failed, 6.0)):
        (tmp_path / name).write_text(text)
        imported = import_log(tmp_path / name)
        assert imported.log.output_tokens[-1 if name == "b.csv" else 0] == output
        assert imported.skipped == {}
        assert imported.notes[0].startswith("1 of the requests failed; they count as demand with the median output")
        skipped = import_log(tmp_path / name, skip_failed=True)
        assert len(skipped.log.arrival_s) == len(imported.log.arrival_s) - 1
        assert skipped.skipped == {"failed": 1}
        assert not any("failed" in note for note in skipped.notes)


def test_a_failed_request_without_a_prompt_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(AIPERF)
    assert import_log(tmp_path / "p.jsonl").skipped == {"failed": 1}


def test_requests_of_one_id_are_named_and_count(tmp_path: Path) -> None:
    rows = "a,0,10,5\n,1,10,5\nb,2,10,5\n,3,10,5\na,4,10,5\nb,5,10,5\n"
    (tmp_path / "c.csv").write_text("request_id,time,prompt_tokens,output_tokens\n" + rows)
    imported = import_log(tmp_path / "c.csv")
    assert len(imported.log.arrival_s) == 6
    told = "4 requests share their request_id with another one, the first on lines 2 and 6; all of them count"
    assert imported.describe()["notes"] == [f"{told} (--drop-duplicates keeps the first of each)"]
    once = import_log(tmp_path / "c.csv", drop_duplicates=True)
    assert (once.log.arrival_s.tolist(), once.skipped) == ([0, 1, 2, 3], {"repeated request_id": 2})
    records = [{"id": 7, "time": s, "prompt_tokens": 5, "output_tokens": 5} for s in range(2)]
    (tmp_path / "c.json").write_text(json.dumps(records))
    assert "places 0 and 1 of the list" in import_log(tmp_path / "c.json").notes[0]


def test_classes_of_a_plain_log_are_names_or_numbers(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(PLAIN)
    assert import_log(tmp_path / "c.csv").log.class_index.tolist() == [0, 2, 1]


def test_reused_tokens_are_the_leading_blocks_seen_before(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    log = import_log(tmp_path / "m.jsonl").log
    assert log.reused_tokens.tolist() == [0, 1024, 0]
    # Blocks 0 and 1 were last used with 3 blocks and 50 tokens behind them: a cache of 2,048 tokens still holds both.
    assert log.reuse_hit[CAPACITY_TOKENS == 2048].tolist() == [1.0]
    assert log.reuse_hit[CAPACITY_TOKENS == 1024].tolist() == [1.0]


def azure(rows: str) -> str:
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows


BAD: list[tuple[str, str | bytes, str]] = [
    ("x.csv", "", "is empty"),
    ("x.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "columns"),
    ("x.csv", azure(""), "holds no requests"),
    ("x.csv", azure("yesterday,3,4\n"), "line 2: TIMESTAMP='yesterday' is not a time"),
    (
        "x.csv",
        azure("2023-11-16 18:15:46,3,4\n2023-11-16 18:15:47,many,4\n"),
        "line 3: ContextTokens='many' is not a number",
    ),
    ("x.csv", azure("2023-11-16 18:15:46,-3,4\n"), "line 2: ContextTokens='-3' is not allowed"),
    ("x.csv", azure("2023-11-16 18:15:46,3\n"), "line 2: GeneratedTokens is missing"),
    ("x.csv", "arrival_s,prompt_tokens,output_tokens\n-1,3,4\n", "line 2: arrival_s='-1' is not allowed"),
    ("x.csv", "arrival_s,prompt_tokens,output_tokens\nnan,3,4\n", "line 2: arrival_s='nan' is not allowed"),
    ("x.csv", "arrival_s,prompt_tokens,output_tokens,class\n0,3,4,vip\n", "line 2: class='vip' is not allowed"),
    ("x.csv", "arrival_s,prompt_tokens\n0,3\n", "--columns output="),
    ("x.csv", "arrival_s,prompt_tokens,output_tokens\n0,3,4\n".encode("utf-16"), "not UTF-8"),
    ("x.csv", b"arrival_s,prompt_tokens,output_tokens\n0,3,4\n1,\xff,5\n", "byte 0xff near line"),
    ("x.csv", "Metric,avg,min\nRequest Latency (ms),5,4\n", "holds summaries, not requests"),
    ("x.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"timestamp": 3,', "line 2: is not JSON"),
    ("x.jsonl", '{"timestamp": 0, "input_length": 5}\n', "usual name for output"),
    ("x.jsonl", '{"timestamp": -5, "input_length": 5, "output_length": 2}\n', "line 1: timestamp=-5 is not allowed"),
    (
        "x.jsonl",
        '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": "a"}\n',
        "line 1: hash_ids='a' is not a list",
    ),
    ("x.jsonl", '{\n"a": 1}\n', "JSON of no known log"),
    ("x.json", '{"benchmarks": []}', "no benchmarks"),
    ("x.json", '{"benchmarks": [{}, {}]}', "choose one with --run 0 to 1"),
    ("x.json", '{"start_times": [1], "input_lens": [1, 2], "output_lens": [1]}', "lists of equal length"),
    ("x.json", '[{"timestamp": 0, "input_length": 5, "output_length": 2}, 7]', "is not a JSON object"),
    ("x.parquet", b"PAR1 but nothing else", "is not parquet"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[m for _, _, m in BAD])
def test_a_bad_file_is_refused_with_its_line_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | bytes, message: str
) -> None:
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["import-trace", str(path), "--id", "bad-trace", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert name in said
    assert not out.exists()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"absent\.csv"):
        import_log(tmp_path / "absent.csv")


def test_more_requests_than_a_log_may_hold_need_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_REQUESTS", 2)
    (tmp_path / "c.csv").write_text(PLAIN)
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "c.csv")
    assert refused.value.line == 4
    assert len(import_log(tmp_path / "c.csv", limit=2).log.arrival_s) == 2


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.log.source.MAX_LINE", 100)
    (tmp_path / "c.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "1" * 500)
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "c.csv")
    assert refused.value.line == 2


def test_a_window_starts_at_its_own_zero(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(PLAIN)
    log = import_log(tmp_path / "c.csv", start_s=0.5, end_s=1.5).log
    assert (log.arrival_s.tolist(), log.prompt_tokens.tolist()) == ([0.5], [30.0])
    with pytest.raises(DataFormatError, match=r"\b2 s$"):
        import_log(tmp_path / "c.csv", start_s=5, end_s=9)


def test_coarse_arrivals_are_spread_in_order_within_their_step() -> None:
    ticks = np.repeat([0.0, 3.0, 6.0, 9.0], 5)
    spread = reader.spread_ticks(ticks, reader.coarse_tick_s(ticks))
    assert reader.coarse_tick_s(ticks) == 3.0
    assert (np.diff(spread) >= 0).all()
    assert ((spread >= ticks) & (spread < ticks + 3.0)).all()
    assert np.array_equal(spread, reader.spread_ticks(ticks, 3.0))


def write_azure(path: Path, log: RequestLog) -> None:
    start = datetime(2023, 11, 16, 18, 15, 46)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for a, p, o in zip(log.arrival_s.tolist(), log.prompt_tokens.tolist(), log.output_tokens.tolist(), strict=True):
            writer.writerow([str(start + timedelta(seconds=a)) + ("" if a % 1 else ".000000"), int(p), int(o)])


def write_ticks(path: Path, log: RequestLog) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens", "reused_tokens"])
        for a, p, o, r in zip(log.arrival_s, log.prompt_tokens, log.output_tokens, log.reused_tokens, strict=True):
            writer.writerow([3 * int(a // 3), int(p), int(o), int(r)])


@pytest.mark.parametrize(
    ("name", "write"), [("azure_conv", write_azure), ("azure_code", write_azure), ("mooncake", write_ticks)]
)
def test_the_shipped_traces_are_what_the_importer_makes_of_their_source(
    tmp_path: Path, name: str, write: Callable[[Path, RequestLog], None]
) -> None:
    shipped, _ = load_trace(str(DATA_DIR / "traces" / f"{name}.npz"))
    write(tmp_path / "source.csv", shipped)
    again = import_log(tmp_path / "source.csv").log
    for column in ("prompt_tokens", "output_tokens", "class_index", "reused_tokens"):
        assert np.array_equal(getattr(again, column), getattr(shipped, column)), column
    moved = np.abs(again.arrival_s - shipped.arrival_s)
    if name == "mooncake":
        # The source's clock drifts by a millisecond, so a few arrivals near a tick are taken for its neighbour's here.
        assert (moved < 2e-3).mean() > 0.997
        assert moved.max() < 3.0
    else:
        assert moved.max() < 1e-4


# ---------------------------------------------------------------- the task


def test_an_imported_trace_is_a_task_that_plays_and_grades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents.search.solver import Budget
    from env.inference_env import InferenceEnv
    from grader.grader import GraderModule

    one = {"kv_budget": (0.9,), "spec_length": (0,), "batch_size": (32,), "prefill_disagg": (0,), "quant_tier": (1,)}
    small = Budget(
        grid=one | {"batch_size": (16, 64), "quant_tier": (0, 1)},
        coarse=one,
        stages=(one, one),
        seeds=range(2000, 2002),
        quick_seeds=range(2000, 2001),
        validation=range(3000, 3002),
        finalists=1,
        gates_kept=1,
        population=8,
        generations=1,
    )
    (tmp_path / "my.csv").write_text(azure_minute())
    short = {"episode_length": 40}
    imported = import_log(tmp_path / "my.csv")
    written = write_trace_task(imported, "my-trace", tmp_path / "out", settings=short, budget=small)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["my-trace.json", "my-trace.npz"]
    monkeypatch.setenv(TASKS_ENV, str(written.task_file))
    task = get_task("my-trace")
    assert task.recorded
    assert get_calibration("my-trace").price == pytest.approx(written.entry["calibration"]["price"])
    env = InferenceEnv(task_id="my-trace", seed=1)
    env.reset()
    while not env.done:
        env.step({"batch_size": 64})
    assert 0.0 < GraderModule().score("my-trace", env.episode_log)["score"] < 1.0


def azure_minute() -> str:
    rng = np.random.default_rng(5)
    moments = np.cumsum(rng.exponential(0.5, 120))
    start = datetime(2024, 5, 10)
    lines = [
        f"{start + timedelta(seconds=float(m))},{p},{o}"
        for m, p, o in zip(moments, rng.integers(50, 900, 120), rng.integers(5, 200, 120), strict=True)
    ]
    return azure("\n".join(lines) + "\n")


def test_an_id_that_is_taken_or_a_file_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(PLAIN)
    imported = import_log(tmp_path / "c.csv")
    for bad in ("mooncake", "My Trace", "../x", "7"):
        with pytest.raises(InvalidConfigError) as refused:
            write_trace_task(imported, bad, tmp_path, budget=None)
        assert refused.value.field == "id"
    write_trace_task(imported, "my-trace", tmp_path, budget=None)
    with pytest.raises(InvalidConfigError, match="my-trace"):
        write_trace_task(imported, "my-trace", tmp_path, budget=None)
    write_trace_task(imported, "my-trace", tmp_path, budget=None, force=True)


def test_an_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(PLAIN)
    imported, out = import_log(tmp_path / "c.csv"), tmp_path / "out"

    def stop(what: str, share: float) -> None:
        raise KeyboardInterrupt

    from agents.search.solver import QUICK

    with pytest.raises(KeyboardInterrupt):
        write_trace_task(imported, "my-trace", out, budget=QUICK, progress=stop)
    assert list(out.iterdir()) == []


# ---------------------------------------------------------------- prefix reuse


def conversations(n: int, rate: float, think_s: float, seed: int) -> list[tuple[float, int, int, list[int]]]:
    """Conversations as Mooncake records them: every turn's prompt repeats the turns before it, block by block."""
    rng = np.random.default_rng(seed)
    requests, next_id = [], 1
    for start in np.cumsum(rng.exponential(1 / rate, n)):
        when, ids, length = float(start), [0], int(rng.lognormal(np.log(4000), 1.0)) + 600
        for _ in range(1 + rng.geometric(0.25)):
            output, whole = int(rng.lognormal(np.log(250), 0.8)) + 1, length // 512
            while len(ids) < whole:
                ids.append(next_id)
                next_id += 1
            rest = [next_id] if length % 512 else []
            next_id += len(rest)
            requests.append((when, length, output, ids[:whole] + rest))
            when += rng.exponential(think_s) + 0.02 * output
            length += output + int(rng.lognormal(np.log(300), 1.2)) + 16
    return sorted(requests, key=lambda r: r[0])


def lru_hits(requests: list[tuple[float, int, int, list[int]]], pool_tokens: int) -> int:
    """Tokens found in an explicit cache: running requests pin their blocks; the oldest free block is evicted first."""
    import heapq

    free: OrderedDict[int, None] = OrderedDict()
    pinned: dict[int, int] = {}
    running: list[tuple[float, int, list[int]]] = []
    found, fresh = 0, 10**9
    for when, _, output, blocks in requests:
        while running and running[0][0] <= when:
            for block in reversed(heapq.heappop(running)[2]):
                pinned[block] -= 1
                if pinned[block] == 0:
                    del pinned[block]
                    free[block] = None
        hits = 0
        while hits < len(blocks) and (blocks[hits] in free or blocks[hits] in pinned):
            hits += 1
        found += hits
        mine = blocks + list(range(fresh, fresh + -(-output // 512)))
        fresh += len(mine)
        for block in mine:
            free.pop(block, None)
            pinned[block] = pinned.get(block, 0) + 1
        while len(free) + len(pinned) > pool_tokens // 512 and free:
            free.popitem(last=False)
        heapq.heappush(running, (when + 0.03 * output, fresh, mine))
    return 512 * found


@pytest.mark.parametrize("think_s", [60.0, 300.0])
def test_the_reuse_curve_agrees_with_an_explicit_block_cache(think_s: float) -> None:
    requests = conversations(500, 1.0, think_s, seed=3)
    reuse = PrefixReuse()
    repeated = sum(reuse.add(blocks, prompt, output) for _, prompt, output, blocks in requests)
    curve = reuse.hit_curve()
    for capacity in (2**17, 2**18, 2**19, 2**20, 2**21, 2**22):
        said = float(np.interp(np.log2(capacity), np.log2(CAPACITY_TOKENS), curve))
        assert said == pytest.approx(lru_hits(requests, capacity) / repeated, abs=0.05), capacity


def log_of(requests: list[tuple[float, int, int, list[int]]], known: bool = True) -> RequestLog:
    reuse = PrefixReuse()
    reused = [reuse.add(blocks, prompt, output) for _, prompt, output, blocks in requests]
    arrival, prompt, output, _ = (np.array(x, dtype=object) for x in zip(*requests, strict=True))
    return RequestLog(
        arrival.astype(float) - requests[0][0],
        prompt.astype(float),
        output.astype(float),
        np.zeros(len(requests), dtype=np.int64),
        np.array(reused, dtype=float),
        reuse.hit_curve() if known else np.zeros(0),
    )


def test_reuse_shortens_prefill_the_more_the_larger_the_pool() -> None:
    requests = conversations(60, 0.4, 20.0, seed=1)
    log, tables = log_of(requests), load_tables()
    without = RequestLog(log.arrival_s, log.prompt_tokens, log.output_tokens, log.class_index)

    def mean_ttft(of: RequestLog, kv_budget: float) -> float:
        return serve_requests(ServeAction(kv_budget, 0, 64, False, QuantTier.INT8), of, tables, 4).report().ttft_mean_ms

    assert mean_ttft(log, 1.0) < 0.9 * mean_ttft(without, 1.0)
    assert mean_ttft(log, 1.0) < mean_ttft(log, 0.4)


def test_a_log_of_counts_alone_is_judged_by_the_published_curve() -> None:
    tables = load_tables()
    requests = conversations(40, 0.4, 20.0, seed=2)
    action = ServeAction(1.0, 0, 64, False, QuantTier.INT8)
    told, untold = (
        serve_requests(action, log_of(requests, known), tables, 4).report().ttft_mean_ms for known in (True, False)
    )
    assert told != untold
    # 1,000 blocks of 512 tokens find 30 of the 50% that 50,000 blocks find.
    at = np.interp(np.log2([512_000, 25_600_000]), np.log2(CAPACITY_TOKENS), PUBLISHED_REUSE_HIT)
    assert at == pytest.approx([0.6, 1.0], abs=0.02)


def test_a_packed_trace_keeps_its_reuse_curve(tmp_path: Path) -> None:
    log = log_of(conversations(20, 1.0, 20.0, seed=4))
    kept, _ = load_trace(str(save_trace(tmp_path / "t.npz", log, {})))
    np.testing.assert_allclose(kept.reuse_hit, log.reuse_hit, atol=1e-6)
    assert kept.reused_tokens.tolist() == log.reused_tokens.tolist()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"arrival_s": [0.0, 2.0, 1.0]}, "arrival_s must not decrease"),
        ({"arrival_s": [-1.0, 0.0, 1.0]}, "arrival_s must be at least 0"),
        ({"arrival_s": [0.0, 1.0, np.inf]}, "arrival_s must be 3 finite numbers"),
        ({"arrival_s": []}, "0 requests: there must be 1 to"),
        ({"prompt_tokens": [5.0, 0.5, 5.0]}, "prompt and output tokens at least 1"),
        ({"output_tokens": [5.0, 0.0, 5.0]}, "prompt and output tokens at least 1"),
        ({"output_tokens": [5.0, 5.0]}, "output_tokens must be 3 finite numbers"),
        ({"class_index": [0, 3, 0]}, "class_index must be from 0 to 2"),
        ({"class_index": [0, -1, 0]}, "class_index must be from 0 to 2"),
        ({"reused_tokens": [0.0, 5.5, 0.0]}, "between 0 and the prompt's tokens"),
        ({"reused_tokens": [0.0, -1.0, 0.0]}, "between 0 and the prompt's tokens"),
        ({"reuse_hit": [0.0, 1.1]}, "shares between 0 and 1"),
        ({"reuse_hit": [-0.1, 1.0]}, "shares between 0 and 1"),
    ],
)
def test_requests_that_nobody_can_have_sent_are_refused(changed: dict[str, list[float]], said: str) -> None:
    columns = {
        "arrival_s": [0.0, 0.0, 1.0],
        "prompt_tokens": [5.0, 1.0, 5.0],
        "output_tokens": [5.0, 5.0, 1.0],
        "class_index": [0, 2, 1],
        "reused_tokens": [0.0, 1.0, 5.0],
        "reuse_hit": [0.0, 1.0],
    }
    RequestLog(**{name: np.array(values) for name, values in columns.items()})
    with pytest.raises(DataFormatError, match=said):
        RequestLog(**{name: np.array(values) for name, values in (columns | changed).items()})


def test_a_packed_trace_of_another_version_is_to_be_imported_again(tmp_path: Path) -> None:
    log = log_of([(0.0, 10, 5, [])], known=False)
    path = save_trace(tmp_path / "old.npz", log, {"version": 0})
    with pytest.raises(DataFormatError, match="trace version 0 is not 1; import it again"):
        load_trace(str(path))


class Opened:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_packed_trace_runs_no_code_of_whoever_made_it(tmp_path: Path) -> None:
    path, ran = tmp_path / "evil.npz", tmp_path / "ran"
    np.savez(path, arrival_s=np.array([Opened(ran)], dtype=object))
    with pytest.raises(DataFormatError, match="is not a packed trace"):
        load_trace(str(path))
    assert not ran.exists()


def test_a_window_takes_the_first_requests_up_to_its_limit() -> None:
    log = log_of([(float(s), 10 + s, 5, []) for s in range(6)], known=False)
    cut = reader.cut_log(log, 1.0, 5.0, limit=3)
    assert cut.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert cut.prompt_tokens.tolist() == [11.0, 12.0, 13.0]


def test_a_packed_trace_keeps_which_request_follows_which(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "time,prompt_tokens,output_tokens,session_id\n" + "".join(f"{i}.5,400,50,{i % 3}\n" for i in range(9))
    )
    log = import_log(tmp_path / "log.csv").log
    packed = import_log(save_trace(tmp_path / "log.npz", log, {})).log
    assert packed.follows.tolist() == log.follows.tolist() == [-1, -1, -1, 0, 1, 2, 3, 4, 5]
    for follows in ([0] * 9, [-2] * 9, [-1] * 8):
        with pytest.raises(DataFormatError, match="index of an earlier request or -1"):
            replace(log, follows=np.array(follows))
