"""Operator times of any card and model that NVIDIA's aiconfigurator-core knows (extra ``hardware``, build time only).

From measured times, the library evaluates single operators of an engine's model at any shape. Each term of an iteration
is a sum of such operators on all cards of a replica, all-reduces included. Only kernels are counted; launch gaps,
scheduler and sampler belong to the engine profile.

Several of its functions are not fully public, so the library's version is pinned exactly. Its label "silicon" includes
interpolated and extrapolated times: :mod:`simulator.hardware.raw_keys` looks for each shape in the raw data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import aiconfigurator_core as library
import numpy as np
from aiconfigurator_core.sdk.config_builders import apply_nextn, build_model_config
from aiconfigurator_core.sdk.engine import EngineHandle, build_engine_spec_json
from aiconfigurator_core.sdk.memory import KVCacheEstimator
from aiconfigurator_core.sdk.models import get_model
from aiconfigurator_core.sdk.perf_database import get_database_view

from inferencegym.errors import InvalidConfigError
from simulator.hardware.catalogue import hardware_data
from simulator.hardware.kernel_times import KernelModel, operator_lists
from simulator.hardware.operators import EXTRAPOLATED, INTERPOLATED, MEASURED, MODELLED, OperatorModel, Source
from simulator.hardware.profiles import EngineProfile, Hardware
from simulator.hardware.raw_keys import RawKeys

ENGINES: Final = ("vllm", "trtllm", "sglang")
KV_CACHE_DTYPES: Final = {"bf16": "bfloat16", "fp8": "fp8"}
"""The library's name for each KV cache data type."""
ACTIVATION_TOKENS: Final = 8192
"""Tokens per iteration for which activation memory is reserved: the token budget of the default profile."""
MIN_POOL_GB: Final = 8.0
"""KV pool (GB) below which a precision is left out, because it could serve hardly any request."""
SUPPORTED_SHARE: Final = 0.9
"""Share of a cell's time that must have the cell's support level or a better one."""
COVERAGE_GRID: Final = ((1, 8, 32, 128, 512), (128, 512, 2048, 8192))
"""Batch sizes, and contexts or prompts (tokens), over which shares of time are averaged."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on ``tp`` cards of a system, under one engine's kernels; names are those of ``hardware.json``.

    ``kv_cache_dtype`` is the precision of the KV cache, one of ``KV_CACHE_DTYPES``.
    """

    system: str
    model: str
    engine: str = "vllm"
    tp: int = 1
    tiers: tuple[str, ...] | None = None
    kv_cache_dtype: str = "bf16"

    def to_dict(self) -> dict[str, Any]:
        """Fields as table metadata states them; a 16-bit KV cache is the default and left out."""
        fields = asdict(self)
        if self.kv_cache_dtype == "bf16":
            del fields["kv_cache_dtype"]
        return fields


class _Terms(NamedTuple):
    """Indices of the operators that make up each term of an iteration."""

    linear: list[int]
    attention: list[int]
    head: list[int]


class Kernels:
    """Operators of one deployment in one precision, evaluated one shape at a time; milliseconds."""

    def __init__(self, deployment: Deployment, tier: str) -> None:
        data = hardware_data()
        path, gemm = data["models"][deployment.model], data["tiers"][tier]
        system, engine = deployment.system, deployment.engine
        sizes: dict[str, Any] = {
            "tp_size": deployment.tp,
            "pp_size": 1,
            "attention_dp_size": 1,
            "moe_tp_size": deployment.tp,
            "moe_ep_size": 1,
            "gemm_quant_mode": gemm,
            "kvcache_quant_mode": KV_CACHE_DTYPES[deployment.kv_cache_dtype],
        }
        with _quiet():
            database = get_database_view(system, engine, "current", database_mode="SILICON")
            if database is None:
                raise InvalidConfigError(f"no operator times of {engine} on {system}", "system")
            config = build_model_config(**sizes)
            apply_nextn(config, 0)
            model = get_model(path, config, engine)
            spec = build_engine_spec_json(
                model,
                model_path=path,
                system=system,
                backend=engine,
                backend_version=database.version,
                kv_block_size=None,
                systems_path=None,
                nextn=0,
                database=database,
            )
            memory = KVCacheEstimator.from_request(
                path, system, engine, "current", max_num_tokens=ACTIVATION_TOKENS, max_batch_size=256, **sizes
            ).breakdown
            self.handle = EngineHandle(bytes(library.engine_spec_bincode_from_json(spec)))
            _, context_attention, decode_attention = self.handle.mixed_step_breakdown_per_op(64, 2, 64, 2)
        self.version = str(database.version)
        self.gpu = dict(database.system_spec["gpu"])
        parts = ("weights", "activations", "comm_overhead")
        self.memory = {name: float(memory[f"{name}_bytes"]) / 1e9 for name in parts}
        tokens = int(data["kv_context_tokens"])
        self.kv_bytes_per_token = float(model.get_kvcache_bytes_per_sequence(tokens)) / tokens
        spec_ops = json.loads(spec)
        self.operators = {kind: _named(spec_ops[f"{kind}_ops"]) for kind in ("context", "generation")}
        self._context = _terms(self.operators["context"], {op[0] for op in context_attention})
        self._decode = _terms(self.operators["generation"], {op[0] for op in decode_attention})
        self.layers = round(
            sum(o["scale_factor"] for _, kind, o in self.operators["generation"] if kind == "GenerationAttention")
        )
        self._keys = RawKeys(system, engine, self.version)

    def linear(self, rows: int) -> float:
        """Everything but attention and LM head for ``rows`` tokens."""
        return _sum(self._linear(rows))

    def head(self, rows: int) -> float:
        """LM head for ``rows`` sampled tokens."""
        return _sum(self._head(rows))

    def decode_attention(self, n: int, context: int) -> float:
        """Attention of ``n`` decoding sequences at this context."""
        return _sum(self.handle.evaluate_generation_ops(self._decode.attention, batch_size=n, s=context))

    def prefill_attention(self, tokens: int, prefix: int, batch: int) -> float:
        """Attention of ``batch`` chunks of ``tokens`` tokens, each after a prefix of ``prefix`` tokens."""
        return _sum(
            self.handle.evaluate_context_ops(self._context.attention, batch_size=batch, s=tokens, prefix=prefix)
        )

    def support_ms(self, n_decode: int, context: int, rows: int, prompt: int) -> tuple[list[float], list[float]]:
        """Milliseconds of a decode iteration, and of a prompt alone, by support level."""
        decode = [*self._linear(rows), *self._head(rows)]
        attention = self.handle.evaluate_generation_ops(self._decode.attention, batch_size=n_decode, s=context)
        prefill = self.handle.evaluate_context_ops(self._context.linear, batch_size=1, s=prompt, x=prompt)
        first = self.handle.evaluate_context_ops(self._context.attention, batch_size=1, s=prompt)
        return (
            self._by_level("generation", [*decode, *attention], rows, n_decode, context),
            self._by_level("context", [*prefill, *first], prompt, 1, prompt),
        )

    def _linear(self, rows: int) -> list[tuple[str, float, float, str]]:
        return self.handle.evaluate_generation_ops(self._decode.linear, batch_size=rows, s=2, x=rows)

    def _head(self, rows: int) -> list[tuple[str, float, float, str]]:
        return self.handle.evaluate_generation_ops(self._decode.head, batch_size=rows, s=2, x=rows)

    def _by_level(
        self, kind: str, evaluated: Iterable[tuple[str, float, float, str]], rows: int, batch: int, tokens: int
    ) -> list[float]:
        shapes = {name: (op, fields) for name, op, fields in self.operators[kind]}
        total = [0.0] * 4
        for name, ms, _, source in evaluated:
            op, fields = shapes[name]
            level = MODELLED if source == "empirical" else self._keys.level(op, fields, rows, batch, tokens)
            total[level] += ms
        return total


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning that the library logs for each fallback; missing data still raises."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _named(operators: Sequence[dict[str, dict[str, Any]]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, kind and fields of each operator."""
    return [(fields["name"], kind, fields) for operator in operators for kind, fields in operator.items()]


def _terms(operators: Sequence[tuple[str, str, dict[str, Any]]], attention: set[str]) -> _Terms:
    split = _Terms([], [], [])
    for i, (name, _, _) in enumerate(operators):
        (split.attention if name in attention else split.head if "logits" in name else split.linear).append(i)
    return split


def _sum(evaluated: Iterable[tuple[str, float, float, str]]) -> float:
    return float(sum(ms for _, ms, *_ in evaluated))


@cache
def kernels(deployment: Deployment, tier: str) -> Kernels:
    """Operators of a deployment in one precision; raises :class:`InvalidConfigError` if the library has none."""
    try:
        return Kernels(deployment, tier)
    except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise InvalidConfigError(
            f"{deployment.model} in {tier} with {deployment.engine} and TP {deployment.tp} on {deployment.system}: "
            f"aiconfigurator-core has no measured times ({_first_line(error)})",
            "tiers",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


class AiconfiguratorSource(Source):
    """One deployment in the precisions that its card has, measured by NVIDIA.

    If ``deployment.tiers`` is None, it takes every precision of ``hardware.json`` that is measured, is not held back
    and leaves room for a KV pool. Raises :class:`InvalidConfigError` naming what is missing, or what is held back and
    why.
    """

    def __init__(self, deployment: Deployment) -> None:
        if isinstance(deployment.tiers, list):
            deployment = Deployment(**{**asdict(deployment), "tiers": tuple(deployment.tiers)})
        _check(deployment)
        data, chosen = hardware_data(), _tiers(deployment)
        bare = Deployment(**{**asdict(deployment), "tiers": None})
        self._kernels = {tier: kernels(bare, tier) for tier in chosen}
        first = next(iter(self._kernels.values()))
        memory = data["memory"]
        activations_gb = max(k.memory["activations"] + k.memory["comm_overhead"] for k in self._kernels.values())
        sixteen_bit_gb = first.memory["weights"] * (2.0 if chosen[0] != "BF16" else 1.0)
        super().__init__(
            model=deployment.model,
            card=_card(deployment.system, first.gpu),
            tiers=chosen,
            weights_gb={tier: round(k.memory["weights"], 3) for tier, k in self._kernels.items()},
            kv_bytes_per_token=first.kv_bytes_per_token,
            memory_gb={
                "activations_gb": round(memory["context_gb"] + activations_gb, 3),
                "workspace_gb": memory["workspace_gb"],
                "per_sequence_gb": memory["per_sequence_gb"],
                "speculation_gb": round(memory["draft_layers"] * sixteen_bit_gb / first.layers, 3),
            },
            cards_per_replica=deployment.tp,
        )
        self._deployment = Deployment(**{**asdict(deployment), "tiers": chosen})
        self._models: dict[tuple[str, EngineProfile], OperatorModel] = {}

    def operators(self, tier: str, profile: EngineProfile) -> OperatorModel:
        """The operator model of a tier under an engine profile, built once."""
        key = (self.check_tier(tier), profile)
        if key not in self._models:
            self._models[key] = KernelModel(tier, profile, self._kernels[tier])
        return self._models[key]

    def support(self, tier: str, n_decode: int, prompt_tokens: int, draft_tokens: int) -> int:
        """Best level that nine tenths of the time reach; with drafts no better than ``MODELLED``."""
        rows = n_decode * (draft_tokens + 1)
        parts = self._kernels[tier].support_ms(n_decode, prompt_tokens, rows, prompt_tokens)
        level = max(_level(part) for part in parts)
        return max(level, MODELLED) if draft_tokens else level

    def listed_operators(self) -> dict[str, Any]:
        """The operators of all precisions, because playing a table must not take this library."""
        return {"operators": operator_lists(list(self._kernels.values()))}

    def provenance(self, profile: EngineProfile) -> dict[str, Any]:
        """Library, deployment, engine version, profile, shares of time by support, and warnings."""
        found = hardware_data()["library"]
        return {
            "cards_per_replica": self.cards_per_replica,
            "aiconfigurator": {
                "library": found["name"],
                "version": version(found["name"]),
                "licence": "Apache-2.0",
                "deployment": self._deployment.to_dict(),
                "engine_version": next(iter(self._kernels.values())).version,
            },
            "profile": asdict(profile),
            "time_shares": self.time_shares(),
            "warnings": _warnings(self._deployment),
        }

    def time_shares(self) -> dict[str, dict[str, float]]:
        """Shares of decode and of prefill time by support level, mean over ``COVERAGE_GRID``, by tier and part."""
        batches, prompts = COVERAGE_GRID
        names = ("measured", "interpolated", "modelled", "extrapolated")
        found = {}
        for tier, each in self._kernels.items():
            shares = np.zeros((2, 4))
            for n in batches:
                for prompt in prompts:
                    for i, part in enumerate(each.support_ms(n, prompt, n, prompt)):
                        shares[i] += np.array(part) / sum(part)
            shares /= len(batches) * len(prompts)
            for part_name, row in zip(("decode", "prefill"), shares, strict=True):
                found[f"{tier} {part_name}"] = {
                    name: round(float(share), 4) for name, share in zip(names, row, strict=True)
                }
        return found


def _level(ms: Sequence[float]) -> int:
    total = sum(ms)
    if ms[MEASURED] == total:
        return MEASURED
    for level in (INTERPOLATED, MODELLED):
        if sum(ms[: level + 1]) >= SUPPORTED_SHARE * total:
            return level
    return EXTRAPOLATED


def _card(system: str, gpu: dict[str, Any]) -> Hardware:
    capacity_gb = round(float(gpu["mem_capacity"]) / 1e9, 2)
    data = hardware_data()
    return Hardware(
        name=system,
        bandwidth_gb_s=float(gpu["mem_bw"]) / 1e9,
        memory_budget_gb=round(data["memory"]["budget_share"] * capacity_gb, 2),
        memory_limit_gb=capacity_gb,
        memory_reported_gb=capacity_gb,
        engine=data["default_profile"],
        source=f"{data['systems'].get(system, system)}: capacity and bandwidth as aiconfigurator-core states them.",
    )


def _check(deployment: Deployment) -> None:
    data = hardware_data()
    for name, allowed in (("system", data["systems"]), ("model", data["models"])):
        value = getattr(deployment, name)
        if value not in allowed:
            raise InvalidConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(allowed)}", name)
    if deployment.engine not in ENGINES:
        raise InvalidConfigError(f"engine={deployment.engine!r} is unknown: one of {', '.join(ENGINES)}", "engine")
    if deployment.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise InvalidConfigError(
            f"kv_cache_dtype={deployment.kv_cache_dtype!r} is unknown: one of {', '.join(KV_CACHE_DTYPES)}",
            "kv_cache_dtype",
        )
    if deployment.tp not in (1, 2, 4, 8):
        raise InvalidConfigError(f"tp={deployment.tp} is not allowed: 1, 2, 4 or 8", "tp")
    for tier in deployment.tiers or ():
        if tier not in data["tiers"]:
            raise InvalidConfigError(f"tier={tier!r} is unknown: choose from {', '.join(data['tiers'])}", "tiers")
        reason = _held_back(deployment, tier)
        if reason:
            raise InvalidConfigError(f"{tier} is held back here: {reason}", "tiers")


def _held_back(deployment: Deployment, tier: str) -> str | None:
    """Reason why a precision of a deployment is unreliable; None without one."""
    return next((rule["reason"] for rule in hardware_data()["held_back"] if _applies(rule, deployment, tier)), None)


def _applies(rule: dict[str, Any], deployment: Deployment, tier: str) -> bool:
    return (
        any(fnmatchcase(deployment.system, p) for p in rule["systems"])
        and any(fnmatchcase(deployment.model, p) for p in rule.get("models", ["*"]))
        and any(fnmatchcase(deployment.engine, p) for p in rule.get("engines", ["*"]))
        and tier in rule.get("tiers", [tier])
        and deployment.tp >= rule.get("min_tp", 1)
    )


def _warnings(deployment: Deployment) -> list[str]:
    """Warnings about a deployment's times from published runs."""
    return [rule["reason"] for rule in hardware_data()["warnings"] if _applies(rule, deployment, "")]


def _tiers(deployment: Deployment) -> tuple[str, ...]:
    if deployment.tiers is not None:
        return deployment.tiers
    data = hardware_data()
    wanted = data["tiers_of_model"].get(deployment.model) or [tier for tier, mode in data["tiers"].items() if mode]
    found, refused = [], []
    for tier in wanted:
        reason = _held_back(deployment, tier)
        if reason is None:
            try:
                each = kernels(deployment, tier)
                pool_gb = data["memory"]["budget_share"] * each.gpu["mem_capacity"] / 1e9 - (
                    each.memory["weights"] + each.memory["activations"] + data["memory"]["context_gb"]
                )
                reason = None if pool_gb >= MIN_POOL_GB else f"only {pool_gb:.1f} GB would be left for the KV pool"
            except InvalidConfigError as error:
                reason = str(error)
        if reason is None:
            found.append(tier)
        else:
            refused.append(f"{tier}: {reason}")
    if not found:
        raise InvalidConfigError("no precision can be offered: " + "; ".join(refused), "tiers")
    return tuple(found[:3])
