"""The step model: measured terms are reproduced exactly, and sums, scalings and laws hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencegym.errors import InvalidConfigError
from simulator.hardware import measured
from simulator.hardware.measured_model import MAX_ROWS, MeasuredModel, MeasuredSource, operator_model, support
from simulator.hardware.operators import EXTRAPOLATED, INTERPOLATED, MEASURED, MODELLED, Chunk
from simulator.hardware.profiles import engine, hardware, profiles

TIERS = MeasuredSource("a100-40gb").tiers
KERNELS_80GB = operator_model("a100-80gb", "FP16", "nofit")
KERNELS_40GB = operator_model("a100-40gb", "FP16", "nofit")


def test_the_measured_files_are_the_ones_recorded() -> None:
    assert measured.checksums() == measured.recorded_checksums()


def test_every_measured_file_is_named_with_its_licence() -> None:
    readme = (measured.MEASURED_DIR / "README.md").read_text(encoding="utf-8")
    assert [name for name in measured.checksums() if f"`{name}`" not in readme] == []


def test_a_single_token_costs_the_sum_of_its_measured_operators() -> None:
    # Vidur, one token: 5 + 33 + 4 + 25 + 5 + 142 + 11 + 76 + 2 microseconds in each of 32 layers, 3 for the embedding.
    assert KERNELS_80GB.linear_ms(1) == pytest.approx(32 * 0.303 + 0.003)


def test_decode_attention_returns_the_measurement_at_a_measured_shape() -> None:
    # Batch 16 at 512 cached tokens: 47.48 microseconds per layer.
    assert KERNELS_80GB.decode_attention_ms(16, 512) == pytest.approx(32 * 0.047482664386431374)


def test_decode_attention_is_linear_in_context_between_measurements() -> None:
    ends = [KERNELS_80GB.decode_attention_ms(64, context) for context in (512, 1024)]
    assert KERNELS_80GB.decode_attention_ms(64, 768) == pytest.approx(sum(ends) / 2)


def test_prefill_attention_of_one_prompt_is_the_measured_kernel() -> None:
    assert KERNELS_80GB.prefill_attention_ms([Chunk(2048)]) == pytest.approx(32 * 0.27292267481486004)


def test_prefill_attention_of_many_prompts_costs_less_than_one_launch_each() -> None:
    # 16 prompts of 128 tokens were measured together: 0.0778 ms; 16 launches alone would take 0.206 ms.
    together = KERNELS_80GB.prefill_attention_ms([Chunk(128)] * 16)
    assert 32 * 0.06 < together < 32 * 0.09


def test_chunks_of_a_prompt_add_up_to_its_attention() -> None:
    parts = KERNELS_80GB.prefill_attention_ms([Chunk(2048)]) + KERNELS_80GB.prefill_attention_ms([Chunk(2048, 2048)])
    assert parts == pytest.approx(KERNELS_80GB.prefill_attention_ms([Chunk(4096)]))


def test_the_lm_head_scales_with_the_vocabulary() -> None:
    assert KERNELS_80GB.head_ms(64) == pytest.approx(0.369 * 128256 / 65536, rel=0.1)
    assert KERNELS_80GB.head_ms(0) == 0.0


def test_one_token_of_gemm_scales_with_bandwidth_and_a_long_prefill_does_not() -> None:
    ratio = 2039 / 1555
    decode = KERNELS_40GB.linear_ms(1) / KERNELS_80GB.linear_ms(1)
    prefill = KERNELS_40GB.linear_ms(4096) / KERNELS_80GB.linear_ms(4096)
    assert 1.2 < decode <= ratio
    assert 1.0 < prefill < 1.05


def test_overheads_of_the_engine_are_added_per_step_and_per_sequence() -> None:
    profile = dataclasses.replace(engine("nofit"), step_overhead_ms=0.5, sequence_overhead_ms=0.1)
    model = MeasuredModel(hardware("a100-80gb"), "FP16", profile)
    assert model.decode_ms(8, 512) - KERNELS_80GB.decode_ms(8, 512) == pytest.approx(0.5 + 0.8)


def test_quantised_weights_make_small_batches_faster() -> None:
    fp16, int8, int4 = (operator_model("a100-40gb", tier, "nofit").decode_ms(1, 512) for tier in TIERS)
    assert fp16 > int8 > int4


def test_weight_only_int4_loses_its_advantage_in_prefill() -> None:
    fp16, int4 = (operator_model("a100-40gb", tier, "nofit").prefill_ms(2048) for tier in ("FP16", "INT4"))
    assert int4 > fp16


def test_a_short_prompt_hides_behind_the_weights_of_a_decoding_batch() -> None:
    model = operator_model("a100-40gb", "FP16", "a100_40")
    assert model.prefill_marginal_ms(64, 16, 512) < 0.2 * model.prefill_ms(64)


def test_prompts_in_a_crowd_cost_about_their_share_of_a_full_iteration() -> None:
    model = operator_model("a100-40gb", "FP16", "a100_40")
    extra = model.step_ms(32, 512, [Chunk(256)] * 7) - model.step_ms(32, 512)
    assert model.prefill_saturated_ms(256, 32, 512) == pytest.approx(extra / 7)


def test_drafting_costs_a_longer_verification_and_the_draft_passes() -> None:
    plain, drafted = KERNELS_40GB.decode_ms(8, 512), KERNELS_40GB.decode_ms(8, 512, draft_tokens=4)
    verify = KERNELS_40GB.linear_ms(40) + KERNELS_40GB.decode_attention_ms(8, 512) + KERNELS_40GB.head_ms(40)
    assert drafted == pytest.approx(verify + KERNELS_40GB.draft_ms(8, 512, 4))
    assert drafted > plain


@settings(max_examples=60)
@given(
    tier=st.sampled_from(TIERS),
    n=st.integers(1, 511),
    context=st.integers(16, 8191),
    draft=st.sampled_from([0, 1, 2, 4, 8]),
)
def test_more_sequences_or_longer_contexts_never_take_less_time(tier: str, n: int, context: int, draft: int) -> None:
    model = operator_model("a100-40gb", tier, "a100_40")
    time = model.decode_ms(n, context, draft)
    assert 0.0 < time <= model.decode_ms(n + 1, context, draft) * (1 + 1e-12)
    assert time <= model.decode_ms(n, context + 1, draft) * (1 + 1e-9)


@settings(max_examples=40)
@given(tier=st.sampled_from(TIERS), prompt=st.integers(1, 20000), n=st.integers(0, 512))
def test_prefill_times_are_positive_and_fusing_never_beats_doing_nothing(tier: str, prompt: int, n: int) -> None:
    model = operator_model("a100-40gb", tier, "a100_40")
    assert model.prefill_ms(prompt) > 0.0
    assert model.prefill_marginal_ms(prompt, n, 512) > 0.0
    assert model.prefill_saturated_ms(prompt, n, 512) > 0.0


def test_support_tells_measured_interpolated_modelled_and_extrapolated_apart() -> None:
    assert support("FP16", 16, 128, 128, 0) == MEASURED
    assert support("FP16", 16, 130, 130, 0) == INTERPOLATED
    assert support("INT8", 16, 128, 128, 0) == INTERPOLATED
    assert support("FP16", 16, 128, 128, 2) == MODELLED
    # The longest prompt whose attention was measured, and one that is longer by a token.
    assert [support("FP16", 1, 128, 16_384 + more, 0) for more in (0, 1)] == [INTERPOLATED, EXTRAPOLATED]
    assert support("FP16", 512, 8192, 8192, 0) == EXTRAPOLATED  # 549 GB of KV cache, which was never measured


def test_tokens_per_verify_step_are_the_measured_means() -> None:
    tokens = measured.spec_tokens_per_step()
    assert [round(tokens[k], 2) for k in (0, 1, 2, 4, 8)] == [1.0, 1.66, 2.04, 2.39, 2.61]


def test_the_first_draft_token_gains_the_most_in_every_measured_model() -> None:
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in measured.rows("inferencex_golden_acceptance.csv"):
        curves.setdefault((row["file"], row["mode"]), {})[int(row["k"])] = float(row["mean_tokens_per_step"])
    curves["ours", ""] = {k: v for k, v in measured.spec_tokens_per_step().items() if k}
    for name, curve in curves.items():
        k = sorted(curve)
        gain = np.diff([curve[i] for i in k]) / np.diff(k)
        assert gain[0] == gain.max(), name


def test_every_profile_says_where_its_numbers_come_from() -> None:
    entries = [*profiles()["engines"].values(), *profiles()["hardware"].values()]
    assert all(len(entry["source"]) > 40 for entry in entries)
    assert set(profiles()["engines"]) >= {"nofit", "vllm_v0", "a100_40", "vllm_v1"}


def test_unknown_names_are_refused_with_what_is_allowed() -> None:
    for look_up, name, field, known in (
        (hardware, "h100", "hardware", "a100-40gb"),
        (engine, "sglang", "engines", "vllm_v0"),
        (lambda tier: operator_model("a100-40gb", tier, "nofit"), "FP8", "tier", "INT8"),
    ):
        with pytest.raises(InvalidConfigError, match=known) as refused:
            look_up(name)
        assert refused.value.field == field
    with pytest.raises(InvalidConfigError):
        measured.spec_acceptance("nobody", "eagle")


def test_beyond_what_was_measured_times_grow_with_the_rows() -> None:
    most = MAX_ROWS
    assert KERNELS_80GB.linear_ms(2 * most) == pytest.approx(2 * KERNELS_80GB.linear_ms(most))
    assert KERNELS_80GB.linear_ms(most + most // 2) == pytest.approx(1.5 * KERNELS_80GB.linear_ms(most))


def test_beyond_the_largest_measured_batch_decode_attention_grows_with_the_batch() -> None:
    # On the measured card the bandwidth ratio is 1, so times above the launch floor do not change.
    largest = int(measured.columns("aic_a100_attn_generation.csv")["batch_size"].max())
    ratio = KERNELS_80GB.decode_attention_ms(2 * largest, 512) / KERNELS_80GB.decode_attention_ms(largest, 512)
    assert ratio == pytest.approx(2.0)
