"""Shipped tables other than the default one: their index, and tasks played on them."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from agents.search.calibration import measure_price
from cli.main import main
from env.families import FAMILIES
from env.inference_env import InferenceEnv
from env.vector import VectorInferenceEnv
from inferencegym.errors import InvalidActionError, InvalidConfigError, TableError, UnknownTaskError
from inferencegym.tasks import (
    HARDWARE_CALIBRATION_FILE,
    Calibration,
    get_calibration,
    get_task,
    list_tasks,
    table_index,
)
from scripts.build_catalogue import described, files
from simulator.hardware.catalogue import table_path
from simulator.hardware.sources import operators_of
from simulator.hardware.tables import ARCHIVE, load_tables, read_columns, tables_of
from simulator.trace_sim import TraceSimulator

NEUTRAL = Calibration(0.0, 1.0, 1.0, 1.0)
B200 = "b200-llama-3.1-8b"
ONE_TIER = "l40s-gpt-oss-20b"
FOUR_CARDS = "h100-llama-3.1-70b-tp4"


def env_on(hardware: str, task_id: int = 3) -> InferenceEnv:
    env = InferenceEnv(task_id=task_id, calibration=NEUTRAL)
    env.reset(seed=5, config={"hardware": hardware})
    return env


def test_the_index_describes_the_tables_that_lie_beside_it() -> None:
    assert table_index() == {name: described(file) for name, file in files().items()}
    assert {path.name for path in table_path(B200).parent.glob("*.parquet")} == {
        Path(entry["file"]).name for entry in table_index().values() if entry["file"].startswith("tables/")
    }


@pytest.mark.parametrize("name", table_index())
def test_the_archive_holds_each_table_as_its_parquet_file_does(name: str) -> None:
    """Else: python -m scripts.build_catalogue --index."""
    columns, meta = read_columns(str(table_path(name)))
    with np.load(ARCHIVE) as archive:
        digest = hashlib.sha256(table_path(name).read_bytes()).hexdigest()
        assert {key for key in archive.files if key.startswith(digest)} == {
            f"{digest}/{column}" for column in (*columns, "meta")
        }
        assert json.loads(archive[f"{digest}/meta"].tobytes()) == meta
        for column, values in columns.items():
            assert np.array_equal(archive[f"{digest}/{column}"], values)


@pytest.mark.parametrize("name", table_index())
def test_the_reference_plays_a_shipped_table_without_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else: python -m scripts.build_catalogue --operators."""
    monkeypatch.setitem(sys.modules, "simulator.hardware.aiconfigurator", None)
    tables = tables_of(name)
    models = operators_of(tables)
    assert [model.tier for model in models] == list(tables.tiers)
    contexts = tables.axes["prompt_len_bucket"]
    for t, model in enumerate(models):
        assert model.step_ms(8, contexts[3]) == pytest.approx(tables.decode_ms[t, 0, 2, 3], rel=1e-4)


def test_every_listed_task_has_constants_of_every_table() -> None:
    """Else: python -m scripts.build_catalogue --constants."""
    stored = json.loads(HARDWARE_CALIBRATION_FILE.read_text(encoding="utf-8"))["tasks"]
    for name in list(table_index())[1:]:
        for task in list_tasks():
            assert stored[f"{task.task_id}@{name}"]["table_sha256"] == table_index()[name]["sha256"]
    own = [task for task in list_tasks(include_recorded=True) if task.hardware is not None]
    assert {str(task.task_id) for task in own} == {key for key in stored if "@" not in key}
    for task in own:
        assert stored[str(task.task_id)]["table_sha256"] == table_index()[str(task.hardware)]["sha256"]


def test_a_score_of_a_task_with_hardware_of_its_own_depends_on_the_bytes_of_its_table() -> None:
    task = get_task("h100-chat-8b")
    table = table_path(str(task.hardware)).read_bytes()
    constants = FAMILIES["serving"].constants(task.task_id)
    assert constants["hardware"] == hashlib.sha256(table).hexdigest()
    assert "hardware" not in FAMILIES["serving"].constants(1)  # on the table in use, which has a checksum of its own


def test_a_score_of_a_task_with_a_trace_depends_on_the_bytes_of_the_trace() -> None:
    trace = Path(str(get_task("azure-code").trace)).read_bytes()
    assert FAMILIES["serving"].constants("azure-code")["trace"] == hashlib.sha256(trace).hexdigest()
    assert FAMILIES["serving"].constants(1)["trace"] is None


@pytest.mark.parametrize("task_id", [1, 2, 3])
def test_the_constants_of_a_task_on_another_table_are_those_of_the_task_as_it_is(task_id: int) -> None:
    """Else: python -m scripts.build_catalogue --constants."""
    task = get_task(f"{task_id}@l40s-llama-3.1-8b")
    assert measure_price(task) == pytest.approx(get_calibration(task.task_id).price, rel=1e-9)
    found = get_calibration(task.task_id)
    assert 0 < found.floor_tps < found.optimal_tps <= found.max_throughput_tps


def test_the_default_table_is_the_first_and_measured_on_an_a100() -> None:
    assert next(iter(table_index())) == "a100-40gb"
    assert load_tables().path == str(table_path("a100-40gb"))
    # calibrations and stored policies depend on this
    assert load_tables().sha256.startswith("913c5b01800bcf2162a4cc350e43cd291e796bd40ed7d78c1a5570a5838f6809")


@pytest.mark.parametrize("name", list(table_index()))
def test_more_sequences_and_longer_contexts_never_take_less_time_on_any_table(name: str) -> None:
    tables = load_tables(table_path(name))
    assert (np.diff(tables.iteration_ms, axis=2) >= -1e-5).all()
    assert (np.diff(tables.iteration_ms, axis=3) >= -1e-5).all()
    assert (np.diff(tables.prefill_ms, axis=1) > 0).all()
    pool_gb = tables.meta["memory_budget_gb"] - tables.weights_gb
    assert (pool_gb > 5).all()


def test_fewer_bits_take_fewer_gigabytes_and_the_fewest_decode_fastest() -> None:
    for name, entry in table_index().items():
        tables = load_tables(table_path(name))
        n = len(entry["tiers"])
        assert (np.diff(tables.weights_gb[:n]) < 0).all()
        # One sequence streams the weights.
        assert n == 1 or tables.decode_ms[n - 1, 0, 0, 0] < 0.8 * tables.decode_ms[0, 0, 0, 0], name


def test_a_table_of_one_precision_repeats_it_and_refuses_the_others_by_name() -> None:
    tables = load_tables(table_path(ONE_TIER))
    assert (tables.tiers, tables.n_tiers, len(tables.decode_ms)) == (("MXFP4",), 1, 3)
    assert (tables.decode_ms[0] == tables.decode_ms[2]).all()
    env = env_on(ONE_TIER)
    with pytest.raises(InvalidActionError) as refused:
        env.step({"quant_tier": 1})
    assert refused.value.field == "quant_tier"
    assert "MXFP4" in str(refused.value)
    assert env.actions == []


def test_the_array_interface_takes_the_nearest_precision_that_there_is() -> None:
    env = VectorInferenceEnv(1, 3, config={"hardware": ONE_TIER}, calibration=NEUTRAL)
    env.reset(seed=1)
    env.batch.write_knobs(np.array([[0.9, 0.0, 64.0, 0.0, 2.0]]))
    assert env.batch.fleet.tier[0] == 0
    wider = VectorInferenceEnv(1, 3, config={"hardware": B200}, calibration=NEUTRAL)
    wider.batch.write_knobs(np.array([[0.9, 0.0, 64.0, 0.0, 2.0]]))
    assert wider.batch.fleet.tier[0] == 2


def test_a_task_on_other_hardware_is_a_task_of_its_own() -> None:
    env = env_on(B200)
    assert env.task_id == f"3@{B200}"
    assert env.task is get_task(f"3@{B200}")
    assert env.config_dict() == get_task(3).config().to_dict()
    env.reset(seed=5, config={"hardware": ONE_TIER})
    assert env.task_id == f"3@{ONE_TIER}"
    env.reset(seed=5, task_id=3)
    assert env.task_id == 3


def test_an_episode_is_the_same_however_its_hardware_is_named() -> None:
    logs = []
    for task_id, config in ((3, {"hardware": B200}), (f"3@{B200}", None)):
        env = InferenceEnv(task_id=1, calibration=NEUTRAL)
        env.reset(seed=5, task_id=task_id, config=config)
        for _ in range(5):
            env.step({"batch_size": 64, "quant_tier": 2})
        logs.append(env.episode_log)
    assert logs[0] == logs[1]


def test_a_replica_of_four_cards_costs_four_times_its_price() -> None:
    env = env_on(FOUR_CARDS, task_id=1)
    for _ in range(30):
        _, _, _, info = env.step({"batch_size": 64})
    metrics = info["metrics"]
    # One replica: price 1 x 4 cards over thousands of tokens per second.
    assert metrics["cost_per_1k"] == pytest.approx(4.0 * 1000.0 / metrics["tokens_per_sec"])
    assert tables_of(FOUR_CARDS).cards_per_replica == 4


@pytest.mark.parametrize("name", ["nope", "../a100", "", "H100"])
def test_hardware_that_is_not_in_the_catalogue_is_refused(name: str) -> None:
    env = InferenceEnv(calibration=NEUTRAL)
    with pytest.raises(InvalidConfigError):
        env.reset(config={"hardware": name})
    with pytest.raises((InvalidConfigError, UnknownTaskError)):
        InferenceEnv(calibration=NEUTRAL).reset(task_id=f"1@{name}")
    with pytest.raises(UnknownTaskError):
        get_task(f"99@{B200}")


def test_operator_times_alone_are_no_saturated_engine() -> None:
    with pytest.raises(TableError, match="--saturated"):
        TraceSimulator(table_path(B200))


def test_out_of_memory_is_judged_by_the_tables_own_card() -> None:
    from inferencegym.models import QuantTier, ServeAction, WorkloadState

    simulator = TraceSimulator(table_path("a100-80gb"))
    load = WorkloadState(10.0, 512.0, 3, 0, [1.0, 0.0, 0.0], False, "steady")
    found = simulator.simulate(ServeAction(1.0, 0, 512, False, QuantTier.FP16), load)
    # 76.6 GB of budget and 0.52 GB of sequences beside it: above 40 GB, within 80.
    assert 76 < found.gpu_memory_gb < 80
    assert not found.oom


def test_simulate_plays_on_a_table_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "40", "--qps", "5", "--json"]
    seconds = {}
    for hardware, tier in (("a100-40gb", "FP16"), (B200, "NVFP4"), (FOUR_CARDS, "FP8")):
        assert main(["simulate", "--hardware", hardware, "--quant", tier, *load]) == 0
        seconds[hardware] = json.loads(capsys.readouterr().out)
    assert seconds[B200]["tpot_p50_ms"] < 0.5 * seconds["a100-40gb"]["tpot_p50_ms"]
    four = seconds[FOUR_CARDS]
    assert four["gpu_seconds"] == pytest.approx(4.0 * four["makespan_s"])
    assert main(["simulate", "--hardware", B200, "--quant", "INT8", *load]) == 2
    assert "NVFP4" in capsys.readouterr().err
    assert main(["simulate", "--hardware", "nope", *load]) == 2


def test_the_catalogue_is_listed_without_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(table_index())
    assert main(["hardware"]) == 0
    assert B200 in capsys.readouterr().out
