"""Settings of a policy or a plan as configuration files of serving engines: vLLM, SGLang and vLLM by its Helm chart.

=================== ============================================= ==================================================
knob                vLLM                                          SGLang
=================== ============================================= ==================================================
``batch_size``      ``max-num-seqs``                              ``max-running-requests``
``kv_budget``       ``gpu-memory-utilization``                    ``mem-fraction-static``
``spec_length``     ``speculative-config``                        ``speculative-num-steps``, ...
``quant_tier``      ``quantization``, ``dtype``                   ``quantization``, ``dtype``
``prefill_disagg``  ``kv-transfer-config``                        ``disaggregation-mode``
=================== ============================================= ==================================================

The batch limit is the largest value in use for at least 1% of the time; a controller may lower it. vLLM's share of
memory is everything that the replica takes (weights, activations, sequences, KV pool) over what the card reports;
SGLang's is only weights and KV pool. vLLM chooses the number of draft tokens by running requests
(``[[from, to, tokens], ...]``): the exported number is what the policy drafted there or, where it never ran, what is
fastest by the lookup table. SGLang always drafts the same number. Precision and placement are those in use for most of
the time; the precision has its name in the table (FP16 and BF16 are dtypes, the others are separate checkpoints).

``max-num-batched-tokens`` is that of the modelled engine; prefix caching stays on, as both engines have it by default.
vLLM refuses to start if the model's context is longer than the KV pool, so ``max-model-len: auto`` takes what fits. An
engine reads its flags at startup: if a policy changes precision or placement, the most used one is exported and a
comment states the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from agents.policies.vllm_defaults import MAX_NUM_SEQS, kv_budget_of
from agents.protocol import FloatArray
from inferencegym.errors import InvalidConfigError, short_repr
from inferencegym.messages import parse_json
from inferencegym.models import SPEC_LENGTHS
from ops.capacity import PolicyOutcome
from ops.plan import Plan, PlanReport, action_of
from ops.shadow import ShadowReport
from simulator.hardware.catalogue import checkpoint, precision_named, usual_name, without_precision
from simulator.hardware.engine_times import TIER
from simulator.hardware.sources import reported_gb
from simulator.hardware.tables import ServingTables

BATCH_RANGES: Final = ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512))
MINIMUM_SHARE: Final = 0.01
"""Smallest share of the time for which a setting counts as in use."""
VLLM_TAG: Final = "v0.32.0"
"""Image of the vLLM release whose parser checked the options."""
_CHART_FIELDS: Final = {
    "max-num-seqs": "maxNumSeqs",
    "gpu-memory-utilization": "gpuMemoryUtilization",
    "tensor-parallel-size": "tensorParallelSize",
    "dtype": "dtype",
}
"""Options for which vLLM's production-stack chart has values; it takes others as arguments."""
DRAFT_MODEL: Final = "YOUR-EAGLE-HEAD"
FILE: Final = "THIS-FILE"
"""Name of the exported file in its comments; whoever writes the file puts its name in the place."""
_QUANTIZATION: Final = {
    "vllm": {
        "INT8": "compressed-tensors",
        "INT4": "awq_marlin",
        "FP8": "fp8",
        "NVFP4": "modelopt_fp4",
        "MXFP4": "mxfp4",
    },
    "sglang": {"INT8": "w8a8_int8", "INT4": "awq_marlin", "FP8": "fp8", "NVFP4": "modelopt_fp4", "MXFP4": "mxfp4"},
}
_DTYPE: Final = {"FP16": "float16", "BF16": "bfloat16"}
_CHECKPOINT: Final = {"INT8": "W8A8", "INT4": "W4A16", "FP8": "FP8", "NVFP4": "NVFP4", "MXFP4": "MXFP4"}
_OWN_CHECKPOINT: Final = ("INT8", "INT4", "NVFP4")
"""Precisions that need another checkpoint than the model's own."""
_CHART_ROUTERS: Final = {"round-robin": "roundrobin", "prefix-affinity": "prefixaware"}
"""``routingLogic`` of vLLM's production-stack chart for a planned router."""
MOST_MEMORY: Final = 0.98
"""Largest exported share of a card's memory."""

Drafts = list[tuple[int, int, int, str]]
"""Draft tokens by running requests of a replica: from, to, tokens, and their source (``policy`` or ``table``)."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of each replica, independent of the engine; ``comments`` are lines for the reader of the file.

    ``prefill_replicas`` prefill for the others (0: replicas prefill themselves). ``memory_share`` is the share of the
    card's reported memory that the replica takes, ``static_share`` that of weights and KV pool only.
    """

    comments: tuple[str, ...]
    max_num_seqs: int
    memory_share: float
    static_share: float
    tier: str
    drafts: Drafts
    prefill_replicas: int
    max_batched_tokens: int
    tensor_parallel: int = 1
    n_replicas: int = 1
    kv_cache_fp8: bool = False
    model: str = "MODEL"
    router: str = "shared"

    @property
    def draft_tokens(self) -> int:
        """Largest number of draft tokens; 0 without drafting."""
        return max((k for _, _, k, _ in self.drafts), default=0)


def settings_of(
    report: ShadowReport, tables: ServingTables, policy: str | None = None, model: str | None = None
) -> EngineSettings:
    """Settings of a policy of a report (default: the recommended one), for the model of this name."""
    outcome = next((o for o in report.outcomes if o.policy == policy), None) if policy else report.best()
    if outcome is None:
        raise InvalidConfigError(
            f"policy {policy!r} is not in the report: one of {[o.policy for o in report.outcomes]}", "policy"
        )
    line = {name: np.array(values) for name, values in outcome.timeline.items()}
    tier = int(_most_used(line["quant_tier"]))
    most = int(max(_in_use(line["batch_size"])))
    mean_prompt = float(report.log["prompt_tokens_p50"])
    per_replica = line["running_requests"] / outcome.n_replicas
    return engine_settings(
        tables,
        outcome.peak_memory_gb,
        model,
        comments=_comments(report, outcome, line),
        max_num_seqs=most,
        tier=tables.tiers[tier],
        drafts=draft_schedule(line["spec_length"], per_replica, tables, tier, mean_prompt, most)
        if outcome.action is None
        else constant_drafts(int(outcome.action["spec_length"]), most),
        prefill_replicas=outcome.n_replicas if _most_used(line["prefill_disagg"]) else 0,
        n_replicas=outcome.n_replicas,
        kv_cache_fp8=tables.kv_cache_fp8,
    )


def engine_files(plan: Plan, tables: ServingTables, report: PlanReport, model: str | None = None) -> dict[str, str]:
    """Configuration files with the plan's settings, by engine, for the model of this name."""
    action = action_of(plan)
    settings = engine_settings(
        tables,
        plan.memory_gb,
        model,
        comments=(
            f"Plan: {plan.n_gpus} x {plan.hardware}, replicas: {plan.n_replicas}; {', '.join(report.objectives)}.",
            *([] if report.router == "shared" else [_router_comment(report.router)]),
        ),
        max_num_seqs=action.batch_size,
        tier=plan.precision,
        drafts=constant_drafts(action.spec_length, action.batch_size),
        prefill_replicas=plan.prefill_replicas,
        n_replicas=plan.n_replicas,
        kv_cache_fp8=plan.kv_cache_fp8,
        router=report.router,
    )
    return written(settings)


def engine_settings(
    tables: ServingTables, memory_gb: float, model: str | None, tier: str, comments: tuple[str, ...], **given: Any
) -> EngineSettings:
    """Settings ``given``, with those that follow from the table and from the memory in use.

    ``model`` is served if it is the table's and has an owner, else the catalogue's checkpoint of the table's model. A
    checkpoint of another precision is the user's to name. A comment says what the user has to fill in.
    """
    card_gb, static_gb = reported_gb(tables.meta), memory_gb - float(tables.meta["memory_gb"]["activations_gb"])
    of_table = str(tables.meta["model"])
    named = model is not None and "/" in model and usual_name(model) == usual_name(of_table)
    model = model if model is not None and named else checkpoint(of_table)
    stated = precision_named(model)
    if tier not in (TIER, stated) and (stated or tier in _OWN_CHECKPOINT):
        model = f"YOUR-{tier}-CHECKPOINT-OF-{without_precision(model).rpartition('/')[2]}"
    if "/" not in model:
        comments += (f"Put your checkpoint (a repository or a path) in the place of {model}.",)
    elif not named:
        comments += (f"No checkpoint was named: {model} has the planned shape. Name yours with --model OWNER/NAME.",)
    return EngineSettings(
        comments=comments,
        memory_share=min(MOST_MEMORY, memory_gb / card_gb),
        static_share=min(MOST_MEMORY, static_gb / card_gb),
        max_batched_tokens=int(tables.meta["max_batched_tokens"]),
        tensor_parallel=tables.cards_per_replica,
        model=model,
        tier=tier,
        **given,
    )


def written(settings: EngineSettings) -> dict[str, str]:
    """Configuration files by engine; none for Helm if prefill has GPUs of its own (:func:`helm_values`)."""
    return {name: write(settings) for name, write in EXPORTS.items() if name != "helm" or not settings.prefill_replicas}


def chosen_file(files: Mapping[str, str], engine: str) -> str:
    """The engine's file; :class:`InvalidConfigError` if it has none, as Helm with prefill on GPUs of its own."""
    if engine not in files:
        raise _cannot_write_prefill(engine)
    return files[engine]


def _cannot_write_prefill(engine: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"--export {engine} cannot write prefill on GPUs of its own: export vllm or sglang, whose files say how to "
        "start both parts",
        "export",
    )


def knobs_of_vllm(config: Mapping[str, Any], tables: ServingTables) -> tuple[dict[str, Any], list[str]]:
    """Knobs that a configuration of ``vllm serve`` sets (the inverse of :func:`vllm_options`), and the names of others.

    ``config`` has options by their names on the command line, with dashes.
    Options that it leaves out are not among the knobs; those that the simulator does not know, or that only repeat what
    it plays anyway, are named. Raises :class:`InvalidConfigError` for a value that no knob or table has.
    """
    given = dict(config)
    knobs: dict[str, Any] = {}
    if (seqs := given.pop("max-num-seqs", None)) is not None:
        knobs["batch_size"] = seqs
    width = given.pop("tensor-parallel-size", None)
    if width not in (None, tables.cards_per_replica):
        raise InvalidConfigError(
            f"tensor-parallel-size={short_repr(width)}: the table has {tables.cards_per_replica} GPUs per replica; "
            "choose another one with --hardware"
        )
    tier = _tier_of_vllm(given)
    if tier is not None:
        knobs["quant_tier"] = tables.tier_index(tier)
    given.pop("model", None)
    for name, value in (("max-num-batched-tokens", tables.meta["max_batched_tokens"]), ("max-model-len", "auto")):
        if given.get(name) == value:
            del given[name]
    if (share := given.pop("gpu-memory-utilization", None)) is not None:
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidConfigError(f"gpu-memory-utilization={short_repr(share)} must be above 0 and at most 1")
        seqs, tier_index = knobs.get("batch_size", MAX_NUM_SEQS), knobs.get("quant_tier", 0)
        knobs["kv_budget"] = kv_budget_of(share, seqs, tier_index, tables)
    if (drafts := _object(given.pop("speculative-config", None))) and "num_speculative_tokens" in drafts:
        knobs["spec_length"] = drafts["num_speculative_tokens"]
    if _object(given.get("kv-transfer-config")).get("kv_connector") == "NixlConnector":
        del given["kv-transfer-config"]
        knobs["prefill_disagg"] = True
    return knobs, sorted(given)


def _tier_of_vllm(given: dict[str, Any]) -> str | None:
    """Precision that the options name, which are taken out; None where they leave it to the checkpoint."""
    methods = {method: tier for tier, method in _QUANTIZATION["vllm"].items() if method != "compressed-tensors"}
    dtypes = {**{dtype: tier for tier, dtype in _DTYPE.items()}, "half": "FP16"}
    if tier := precision_named(str(given.get("model", ""))):
        given.pop("quantization", None)
        return tier
    if given.get("quantization") in methods:
        given.pop("dtype", None)
        return methods[given.pop("quantization")]
    return dtypes[given.pop("dtype")] if given.get("dtype") in dtypes else None


def _object(value: object) -> dict[str, Any]:
    """An option that is an object, in YAML or as JSON in a string; empty for anything else."""
    if isinstance(value, str):
        value = parse_json(value, InvalidConfigError)
    return value if isinstance(value, dict) else {}


def constant_drafts(spec_length: int, max_num_seqs: int) -> Drafts:
    """Draft tokens of a constant setting: the same at every load."""
    return [(1, max_num_seqs, spec_length, "policy")] if spec_length else []


def draft_schedule(
    spec_length: FloatArray,
    running: FloatArray,
    tables: ServingTables,
    tier: int,
    context_tokens: float,
    max_num_seqs: int = BATCH_RANGES[-1][1],
) -> Drafts:
    """Draft tokens by running requests per replica; empty if the policy never drafts.

    Ranges begin at 1 and end at ``max_num_seqs``; neighbouring ranges with the same number are merged.
    """
    if not (np.array(_in_use(spec_length)) > 0).any():
        return []
    found: Drafts = []
    for low, last in BATCH_RANGES:
        if low > max_num_seqs:
            break
        high = min(last, max_num_seqs)
        here = (running >= low - 0.5) & (running < high + 0.5)
        if here.mean() >= MINIMUM_SHARE:
            k, source = int(_most_used(spec_length[here])), "policy"
        else:
            k, source = fastest_draft(tables, tier, (low * high) ** 0.5, context_tokens), "table"
        if found and found[-1][2] == k and found[-1][3] == source:
            found[-1] = (found[-1][0], high, k, source)
        else:
            found.append((low, high, k, source))
    return found


def fastest_draft(tables: ServingTables, tier: int, running: float, context_tokens: float) -> int:
    """Draft length with the least time per token in the nearest cell of the lookup table."""
    batch = int(np.argmin(np.abs(np.log(tables.axes["batch_size"] / running))))
    context = int(np.argmin(np.abs(np.log(tables.axes["prompt_len_bucket"] / max(context_tokens, 1.0)))))
    per_token = tables.decode_ms[tier, :, batch, context] / tables.spec_tokens
    return int(SPEC_LENGTHS[int(np.argmin(per_token))])


@dataclass(frozen=True, slots=True)
class Option:
    """An option of an engine, its value (True: a flag), and a comment."""

    name: str
    value: str | int | float | bool
    why: str = ""

    @property
    def text(self) -> str:
        """The value as on a command line; an object becomes JSON."""
        if isinstance(self.value, bool):
            return "true"
        return f"{self.value:.2f}" if isinstance(self.value, float) else str(self.value)


def vllm_config(settings: EngineSettings, draft_model: str = DRAFT_MODEL) -> str:
    """A file for ``vllm serve MODEL --config FILE`` (YAML)."""
    return _written(settings, f"vllm serve {settings.model} --config {FILE}", vllm_options(settings, draft_model))


def sglang_config(settings: EngineSettings, draft_model: str = DRAFT_MODEL) -> str:
    """A file for ``python -m sglang.launch_server --model-path MODEL --config FILE`` (YAML)."""
    command = f"python -m sglang.launch_server --model-path {settings.model} --config {FILE}"
    return _written(settings, command, sglang_options(settings, draft_model))


def vllm_options(settings: EngineSettings, draft_model: str = DRAFT_MODEL) -> list[Option]:
    """Options of ``vllm serve``."""
    taken = "Share of the card's memory that was planned with: weights, activations and KV pool."
    options = [
        Option("max-num-seqs", settings.max_num_seqs),
        Option("gpu-memory-utilization", settings.memory_share, taken),
        Option("max-num-batched-tokens", settings.max_batched_tokens),
        Option("max-model-len", "auto", "Context: as much as the KV pool holds, at most the model's own."),
    ]
    if settings.tensor_parallel > 1:
        options.append(Option("tensor-parallel-size", settings.tensor_parallel))
    options += _precision(settings, "vllm")
    if settings.kv_cache_fp8:
        options.append(Option("kv-cache-dtype", "fp8"))
    if settings.draft_tokens:
        config: dict[str, Any] = {
            "method": "eagle",
            "model": draft_model,
            "num_speculative_tokens": settings.draft_tokens,
        }
        why = "Draft tokens at every load."
        if len(settings.drafts) > 1:
            told = ", ".join(f"{low}-{high} by the {source}" for low, high, _, source in settings.drafts)
            why = f"Draft tokens by running requests: {told}."
            config["num_speculative_tokens_per_batch_size"] = [[low, high, k] for low, high, k, _ in settings.drafts]
        options.append(Option("speculative-config", json.dumps(config), why))
    if settings.prefill_replicas:
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        why = (
            f"Start {settings.n_replicas} instances for decode and {settings.prefill_replicas} for prefill with this "
            "same file (NixlConnector has one role for both), each with a VLLM_NIXL_SIDE_CHANNEL_PORT of its own, and "
            "a router that sends each prompt to a prefill instance first, such as vllm-router."
        )
        options.append(Option("kv-transfer-config", json.dumps(config), why))
    return options


def sglang_options(settings: EngineSettings, draft_model: str = DRAFT_MODEL) -> list[Option]:
    """Options of SGLang's ``launch_server``."""
    options = [
        Option("max-running-requests", settings.max_num_seqs),
        Option("mem-fraction-static", settings.static_share),
        Option("chunked-prefill-size", settings.max_batched_tokens),
    ]
    if settings.tensor_parallel > 1:
        options.append(Option("tp-size", settings.tensor_parallel))
    options += _precision(settings, "sglang")
    if settings.kv_cache_fp8:
        options.append(Option("kv-cache-dtype", "fp8_e4m3"))
    if settings.draft_tokens:
        told = ", ".join(f"{low}-{high}: {k}" for low, high, k, _ in settings.drafts)
        why = f"Draft tokens by running requests would be {told}; SGLang drafts one number at every load."
        if len(settings.drafts) == 1:
            why = ""
        options += [
            Option("speculative-algorithm", "EAGLE", why),
            Option("speculative-draft-model-path", draft_model),
            Option("speculative-num-steps", settings.draft_tokens),
            Option("speculative-eagle-topk", 1),
            Option("speculative-num-draft-tokens", settings.draft_tokens + 1),
        ]
    if settings.prefill_replicas:
        why = (
            f"For {settings.n_replicas} decoding instances. Start {settings.prefill_replicas} more with this file and "
            "disaggregation-mode: prefill, and SGLang's router in front (--pd-disaggregation)."
        )
        options.append(Option("disaggregation-mode", "decode", why))
    return options


def helm_values(settings: EngineSettings, draft_model: str = DRAFT_MODEL) -> str:
    """Values of vLLM's production-stack chart (YAML); the user sets the model, CPU and memory of a pod.

    Raises :class:`InvalidConfigError` if prefill has GPUs of its own: the values would be half of a deployment.
    """
    if settings.prefill_replicas:
        raise _cannot_write_prefill("helm")
    options = vllm_options(settings, draft_model)
    model = {
        "name": "planned",
        "repository": "vllm/vllm-openai",
        "tag": VLLM_TAG,
        "modelURL": settings.model,
        "replicaCount": settings.n_replicas,
        "requestCPU": 6,
        "requestMemory": "16Gi",
        "requestGPU": settings.tensor_parallel,
    }
    comments = [
        *settings.comments,
        f"Simulated; measure before you rely on it. helm install NAME vllm/vllm-stack -f {FILE}",
    ]
    lines = [f"# {text}" for text in comments]
    if settings.router in _CHART_ROUTERS:
        lines += ["routerSpec:", f'  routingLogic: "{_CHART_ROUTERS[settings.router]}"']
    lines += ["servingEngineSpec:", "  modelSpec:"]
    for i, (name, value) in enumerate(model.items()):
        why = "  # not planned: set it for your nodes" if name in ("requestCPU", "requestMemory") else ""
        lines.append(f"{'    - ' if i == 0 else '      '}{name}: {json.dumps(value)}{why}")
    lines.append("      vllmConfig:")
    for option in options:
        if option.name in _CHART_FIELDS:
            value = round(option.value, 2) if isinstance(option.value, float) else option.value
            lines += [f"        # {option.why}"] * bool(option.why)
            lines.append(f"        {_CHART_FIELDS[option.name]}: {json.dumps(value)}")
    # The chart turns prefix caching off if this is missing.
    lines += ["        enablePrefixCaching: true", "        extraArgs:"]
    for option in options:
        if option.name not in _CHART_FIELDS:
            lines += [f"          # {option.why}"] * bool(option.why)
            lines += [f"          - {json.dumps(part)}" for part in (f"--{option.name}", option.text)]
    return "\n".join(lines) + "\n"


EXPORTS: Final = {"vllm": vllm_config, "sglang": sglang_config, "helm": helm_values}
"""Writers of configuration files, by engine; ``helm`` is vLLM in Kubernetes."""


def _written(settings: EngineSettings, command: str, options: Sequence[Option]) -> str:
    lines = [*settings.comments, f"Simulated; measure before you rely on it. {command}"]
    lines = [f"# {text}" for text in lines]
    for option in options:
        lines += [f"# {option.why}"] * bool(option.why)
        quoted = f"'{option.text}'" if option.text.startswith("{") else option.text
        lines.append(f"{option.name}: {quoted}")
    return "\n".join(lines) + "\n"


def _precision(settings: EngineSettings, engine: str) -> list[Option]:
    """Options for the precision; none for a measured engine, which has only one."""
    if settings.tier in (TIER, precision_named(settings.model)):  # the engine reads a checkpoint's own method
        return []
    if settings.tier in _DTYPE:
        return [Option("dtype", _DTYPE[settings.tier])]
    method, checkpoint = _QUANTIZATION[engine][settings.tier], _CHECKPOINT[settings.tier]
    why = (
        f"{settings.tier}: for a checkpoint in 16 bits, quantized at load. Leave this option out for an FP8 "
        "checkpoint, whose own method the engine reads: it refuses another one."
        if settings.tier == "FP8"
        else f"{settings.tier}: serve a {checkpoint} checkpoint of the model. Leave this option out if its own method "
        f"(quantization_config in config.json) is not {method}: the engine refuses another one."
    )
    return [Option("quantization", method, why)]


def _router_comment(router: str) -> str:
    logic = _CHART_ROUTERS.get(router, "none of roundrobin, session, prefixaware and kvaware")
    return f"Planned with a router {router}, which you set up: in vLLM's production-stack chart, {logic}."


def _comments(report: ShadowReport, outcome: PolicyOutcome, line: dict[str, FloatArray]) -> tuple[str, ...]:
    log, bounds = report.log, _in_use(line["batch_size"])
    texts = [
        f"What the policy {outcome.policy!r} set on {log['requests']} recorded requests ({log['rate_rps']:.2f}/s).",
        f"Replicas: {outcome.n_replicas}, on {outcome.n_gpus} GPUs ({report.hardware}).",
    ]
    if len(bounds) > 1:
        texts.append(f"The policy moves the batch bound ({_listed(bounds)}); the largest is the engine's.")
    if len(_in_use(line["quant_tier"])) > 1:
        texts.append("The policy changes precision on the way; the most used one is below.")
    if len(_in_use(line["prefill_disagg"])) > 1:
        texts.append("The policy turns disaggregated prefill on and off; the more used is below.")
    return tuple(texts)


def _listed(values: list[float]) -> str:
    whole = [int(v) for v in values]
    return ", ".join(map(str, whole)) if len(whole) <= 6 else f"{whole[0]} to {whole[-1]} in {len(whole)} values"


def _most_used(values: FloatArray) -> float:
    kinds, counts = np.unique(values, return_counts=True)
    return float(kinds[int(np.argmax(counts))])


def _in_use(values: FloatArray) -> list[float]:
    """Values that were used for at least ``MINIMUM_SHARE`` of the time, ascending, or else the most used one."""
    kinds, counts = np.unique(values, return_counts=True)
    kept = kinds[counts >= MINIMUM_SHARE * len(values)]
    return [float(v) for v in kept] if len(kept) else [_most_used(values)]
