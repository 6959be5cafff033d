"""Scheduler classes for vLLM whose limits follow a control file: knobs change while the engine runs.

The engine loads this file by itself (``--scheduler-cls inferencegym_scheduler.LiveAsyncScheduler``, this folder on its
``PYTHONPATH``), so it imports vLLM and the standard library only. ``INFERENCEGYM_CONTROL_FILE`` names a JSON file that
is looked at before every iteration: ``{"set": {...}, "until": unix seconds, "then": {...}}``. An order without
``until`` is the user's setting. An order with one is a controller's: ``then`` is the user's setting, which returns
after ``until``, and at once when the file vanishes or cannot be read. ``FILE.state`` says what is in force, what the
user's setting is, the limits of both, the number of errors and the last one.

No error of this class reaches vLLM's scheduler: the engine serves on with the user's setting. vLLM calls its scheduler
a private interface, hence the check of the version.
"""

import contextlib
import json
import logging
import math
import os
import stat
import tempfile
import time
from pathlib import Path

from vllm import __version__ as vllm_version
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

TESTED = ("0.32.",)
ALLOW_UNTESTED = "INFERENCEGYM_ALLOW_UNTESTED"
PROTOCOL = 2
KNOBS = ("batch_size", "kv_budget", "spec_length", "prefill_tokens")
CONTROL_FILE = Path(os.environ.get("INFERENCEGYM_CONTROL_FILE", "inferencegym-control.json"))
STATE_FILE = Path(f"{CONTROL_FILE}.state")
MAX_BYTES = 65_536
NEEDED = ("max_num_active_reqs", "max_num_running_reqs", "max_num_scheduled_tokens", "num_spec_tokens",
          "dynamic_sd_lookup", "kv_cache_manager")  # fmt: skip

# Below "vllm", whose handler prints to the engine's log.
logger = logging.getLogger("vllm.inferencegym")


class FollowsFile:
    """Mixin: re-reads the control file before each iteration."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_version([name for name in NEEDED if not hasattr(self, name)])
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
        self.user = {name: high for name, (_, high) in self.limits.items()}
        self.in_force = dict(self.user)
        self.file_version, self.ordered, self.until = None, {}, None
        self.errors, self.problem, self.failure, self.written_at = 0, "", None, -math.inf
        self.write_state()

    def schedule(self, *args, **kwargs):
        try:
            self.follow_file()
            self.hold_blocks()
        except Exception as error:  # noqa: BLE001 - an error of a file, or ours, must not end the engine
            self.fall_back(error)
        return super().schedule(*args, **kwargs)

    def make_stats(self, *args, **kwargs):
        stats = super().make_stats(*args, **kwargs)
        try:
            offered = self.usable_blocks - len(self.held_blocks)
            if stats is not None and offered > 0:
                free = self.kv_cache_manager.block_pool.get_num_free_blocks()
                stats.kv_cache_usage = (offered - free) / offered
        except Exception as error:  # noqa: BLE001 - as above
            self.fall_back(error)
        return stats

    def follow_file(self):
        """Apply what the control file orders now; raises what is wrong with the file, once per version of it."""
        version = version_of_file()
        changed = version != self.file_version
        if changed:
            self.file_version = version
            self.ordered, self.until, then = read_orders(self.limits)
            self.user.update(self.ordered if self.until is None else then)
            self.problem = ""
        ended = self.until is not None and time.time() > self.until
        if ended:
            self.ordered, self.until = {}, None
        if changed or ended:
            self.apply({**self.user, **self.ordered})

    def fall_back(self, error):
        """Count an error and return to the user's setting."""
        self.errors += 1
        self.problem = f"{type(error).__name__}: {error}"[:500]
        self.ordered, self.until = {}, None
        failure = (self.problem, self.file_version)
        if failure != self.failure:
            logger.warning("inferencegym_scheduler returns to %s: %s", self.user, self.problem)
        elif time.monotonic() - self.written_at < 1.0:
            return  # an error of every iteration is written once a second
        self.failure = failure
        self.apply(dict(self.user))

    def apply(self, setting):
        """Put all knobs in force."""
        self.in_force = setting
        self.max_num_active_reqs = int(setting["batch_size"])
        self.max_num_scheduled_tokens = int(setting["prefill_tokens"])
        self.held_target = round((1.0 - setting["kv_budget"]) * self.usable_blocks)
        if self.num_spec_tokens:
            drafts = int(setting["spec_length"])
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
        """Replace the state file, following no link; a state that cannot be written is counted."""
        self.written_at = time.monotonic()
        state = {
            "protocol": PROTOCOL,
            "vllm": vllm_version,
            "pid": os.getpid(),
            "limits": self.limits,
            "in_force": self.in_force,
            "user": self.user,
            "file_version": self.file_version,
            "until": self.until,
            "kv_blocks": self.usable_blocks,
            "block_tokens": self.block_size,
            "errors": self.errors,
            "problem": self.problem,
        }
        fresh = None
        try:
            handle, fresh = tempfile.mkstemp(dir=STATE_FILE.parent, prefix=f".{STATE_FILE.name}-")
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(state))
                os.fchmod(handle, 0o644)
            Path(fresh).replace(STATE_FILE)
        except OSError as error:
            self.errors += 1
            logger.warning("inferencegym_scheduler cannot write %s: %s", STATE_FILE, error)
            if fresh is not None:
                with contextlib.suppress(OSError):
                    Path(fresh).unlink(missing_ok=True)


def check_version(missing):
    """Refuse a vLLM that lacks what this class needs, and one that it was not tested with unless the user allows it."""
    tested = " and ".join(f"{version}x" for version in TESTED)
    if missing:
        raise RuntimeError(
            f"inferencegym_scheduler was tested with vLLM {tested}, and this is {vllm_version} without "
            f"{', '.join(missing)}: install vLLM {tested}, or leave --scheduler-cls out"
        )
    if vllm_version.startswith(TESTED):
        return
    if os.environ.get(ALLOW_UNTESTED) != "1":
        raise RuntimeError(
            f"inferencegym_scheduler was tested with vLLM {tested}, and this is {vllm_version}: install vLLM {tested}, "
            f"set {ALLOW_UNTESTED}=1 to run it here untested, or leave --scheduler-cls out"
        )
    logger.warning("inferencegym_scheduler was tested with vLLM %s and runs untested on %s", tested, vllm_version)


def version_of_file():
    """A value that changes whenever the control file is replaced or written; None without a control file."""
    try:
        found = os.lstat(CONTROL_FILE)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_ino]


def read_orders(limits):
    """Knobs, end and user's setting of the control file; opens it without waiting and follows no link."""
    handle = os.open(CONTROL_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{CONTROL_FILE} is not a regular file")
        content = os.read(handle, MAX_BYTES + 1)
    finally:
        os.close(handle)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{CONTROL_FILE} is larger than {MAX_BYTES} bytes")
    orders = json.loads(content.decode("utf-8"))
    if not isinstance(orders, dict) or "set" not in orders:
        raise ValueError('orders must be an object with "set"')
    until = orders.get("until")
    if until is not None and not is_number(until):
        raise ValueError(f"until={until!r:.80} must be a number of seconds")
    return checked(orders["set"], limits), until, checked(orders.get("then", {}), limits)


def checked(knobs, limits):
    """The knobs of a control file, each cut to its limits; ValueError for an unknown name or what is no number."""
    if not isinstance(knobs, dict):
        raise ValueError(f"knobs must be an object, not {knobs!r:.80}")
    found = {}
    for name, value in knobs.items():
        if name not in KNOBS or not is_number(value):
            raise ValueError(f"{name:.80}={value!r:.80} is not allowed: knobs are numbers, named {', '.join(KNOBS)}")
        low, high = limits[name]
        found[name] = min(max(value, low), high)
    return found


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class LiveScheduler(FollowsFile, Scheduler):
    """For engines that draft: vLLM's asynchronous scheduling does not read the draft length anew."""


class LiveAsyncScheduler(FollowsFile, AsyncScheduler):
    """For all others."""
