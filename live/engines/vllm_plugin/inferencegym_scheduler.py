"""Scheduler classes for vLLM whose limits follow a control file: knobs change while the engine runs.

The engine loads this file by itself (``--scheduler-cls inferencegym_scheduler.LiveAsyncScheduler``, this folder on its
``PYTHONPATH``), so it imports vLLM and the standard library only. ``INFERENCEGYM_CONTROL_FILE`` names a JSON file that
is looked at before every iteration: ``{"set": {...}, "until": unix seconds, "then": {...}}``. After ``until`` what
stands under ``then`` is in force, so a controller that dies leaves the engine as its user wants it. ``FILE.state`` says
what is in force, between which limits, and what was wrong with the file; a bad file changes nothing.

vLLM calls its scheduler a private interface, hence the check of the version.
"""

import json
import os
import time
from pathlib import Path

from vllm import __version__ as vllm_version
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

SUPPORTED = ("0.32.",)
PROTOCOL = 1
KNOBS = ("batch_size", "kv_budget", "spec_length", "prefill_tokens")
CONTROL_FILE = Path(os.environ.get("INFERENCEGYM_CONTROL_FILE", "inferencegym-control.json"))
STATE_FILE = Path(f"{CONTROL_FILE}.state")
NEEDED = ("max_num_active_reqs", "max_num_running_reqs", "max_num_scheduled_tokens", "num_spec_tokens",
          "dynamic_sd_lookup", "kv_cache_manager")  # fmt: skip


class FollowsFile:
    """Mixin: re-reads the control file before each iteration."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        missing = [name for name in NEEDED if not hasattr(self, name)]
        if not vllm_version.startswith(SUPPORTED) or missing:
            raise RuntimeError(
                f"inferencegym_scheduler knows vLLM {'x, '.join(SUPPORTED)}x, and this is {vllm_version}"
                f"{f' without {missing}' if missing else ''}: install that version, or leave --scheduler-cls out"
            )
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            raise RuntimeError("inferencegym_scheduler sets one engine: start one server per data-parallel rank")
        self.own_spec_lookup = self.dynamic_sd_lookup
        self.usable_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one is the null block
        self.held_blocks, self.held_target = [], 0
        self.limits = {
            "batch_size": [1, self.max_num_active_reqs],
            "kv_budget": [0.1, 1.0],
            "spec_length": [0, self.num_spec_tokens],
            "prefill_tokens": [max(16, self.max_num_running_reqs), self.max_num_scheduled_tokens],
        }
        self.in_force = {name: high for name, (_, high) in self.limits.items()}
        self.file_version, self.orders, self.fallback_at, self.problem = 0, {}, None, ""
        self.write_state()

    def schedule(self, *args, **kwargs):
        self.follow_file()
        self.hold_blocks()
        return super().schedule(*args, **kwargs)

    def make_stats(self, *args, **kwargs):
        stats = super().make_stats(*args, **kwargs)
        offered = self.usable_blocks - len(self.held_blocks)
        if stats is not None and offered > 0:
            free = self.kv_cache_manager.block_pool.get_num_free_blocks()
            stats.kv_cache_usage = (offered - free) / offered
        return stats

    def follow_file(self):
        """Apply what the control file orders now."""
        try:
            version = CONTROL_FILE.stat().st_mtime_ns
        except OSError:
            version = 0
        if version not in (0, self.file_version):
            self.file_version = version
            try:
                orders = json.loads(CONTROL_FILE.read_text())
                wanted, until = checked(orders["set"], self.limits), orders.get("until")
                self.orders = {"then": checked(orders.get("then", {}), self.limits)}
                self.fallback_at = None if until is None else float(until)
                self.problem = ""
            except (OSError, ValueError, TypeError, KeyError) as error:
                self.problem = repr(error)
                self.write_state()
                return
            self.apply(wanted)
        if self.fallback_at is not None and time.time() > self.fallback_at:
            self.fallback_at = None
            self.apply(self.orders["then"])

    def apply(self, wanted):
        """Put values in force; knobs that are not named stay."""
        self.in_force.update(wanted)
        self.max_num_active_reqs = int(self.in_force["batch_size"])
        self.max_num_scheduled_tokens = int(self.in_force["prefill_tokens"])
        self.held_target = round((1.0 - self.in_force["kv_budget"]) * self.usable_blocks)
        if self.num_spec_tokens:
            drafts = int(self.in_force["spec_length"])
            same = drafts == self.num_spec_tokens
            self.dynamic_sd_lookup = self.own_spec_lookup if same else [drafts] * (self.max_num_running_reqs + 2)
        self.write_state()

    def hold_blocks(self):
        """Take free KV blocks out of use, or give them back; what requests hold is left to them."""
        pool = self.kv_cache_manager.block_pool
        missing = self.held_target - len(self.held_blocks)
        if missing > 0:
            taken = min(missing, pool.get_num_free_blocks())
            if taken:
                self.held_blocks += pool.get_new_blocks(taken)
        elif missing < 0:
            back, self.held_blocks = self.held_blocks[self.held_target :], self.held_blocks[: self.held_target]
            pool.free_blocks(back)

    def write_state(self):
        state = {
            "protocol": PROTOCOL,
            "vllm": vllm_version,
            "pid": os.getpid(),
            "limits": self.limits,
            "in_force": self.in_force,
            "file_version": self.file_version,
            "fallback_at": self.fallback_at,
            "kv_blocks": self.usable_blocks,
            "block_tokens": self.block_size,
            "problem": self.problem,
        }
        fresh = Path(f"{STATE_FILE}.new")
        fresh.write_text(json.dumps(state))
        fresh.replace(STATE_FILE)


def checked(knobs, limits):
    """The knobs of a control file, each cut to its limits; ValueError for an unknown name or what is no number."""
    found = {}
    for name, value in knobs.items():
        if name not in KNOBS or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name}={value!r}: knobs are numbers named {', '.join(KNOBS)}")
        low, high = limits[name]
        found[name] = min(max(value, low), high)
    return found


class LiveScheduler(FollowsFile, Scheduler):
    """For engines that draft: vLLM's asynchronous scheduling does not read the draft length anew."""


class LiveAsyncScheduler(FollowsFile, AsyncScheduler):
    """For all others."""
