"""vLLM server as a child process, with the scheduler class whose knobs can change while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import httpx

from inferencegym.errors import InvalidConfigError, ServerUnavailableError

PLUGIN: Final = Path(__file__).parent / "vllm_plugin"
"""Folder that an engine needs on its PYTHONPATH for ``--scheduler-cls inferencegym_scheduler.LiveAsyncScheduler``."""
START_S: Final = 900.0


def free_port() -> int:
    """Port of this machine that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class VllmServer:
    """Runs ``vllm serve`` on a model folder on this machine; a context manager that waits until it answers.

    Requests are served by priority (:class:`live.driver.EngineApi` sends their class), as the simulator does. ``venv``
    is the environment that vLLM is installed in. ``options`` are further options of ``vllm serve``; ``drafts`` above 0
    turns on n-gram drafting of at most that many tokens; ``speculation`` are further settings of vLLM's for it. Without
    ``eager`` vLLM compiles the model and captures CUDA graphs, as it does by default. Output goes to ``log_file``.
    """

    def __init__(
        self,
        venv: Path,
        model: Path,
        control_file: Path,
        *,
        port: int,
        log_file: Path,
        max_num_seqs: int = 32,
        max_model_len: int = 1024,
        kv_blocks: int | None = None,
        drafts: int = 0,
        eager: bool = True,
        speculation: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.control_file = control_file
        self.log_file = log_file
        self._program = venv / "bin" / "vllm"
        scheduler = "LiveScheduler" if drafts else "LiveAsyncScheduler"
        self._command = [
            "nice", str(self._program), "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
            "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", str(max_model_len),
            "--max-num-seqs", str(max_num_seqs), "--scheduling-policy", "priority",
            "--scheduler-cls", f"inferencegym_scheduler.{scheduler}", *(["--enforce-eager"] if eager else []),
            *(["--num-gpu-blocks-override", str(kv_blocks)] if kv_blocks else []), *options,
        ]  # fmt: skip
        if drafts:
            ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4, **(speculation or {})}
            self._command += ["--no-async-scheduling", "--speculative-config", json.dumps(ngram)]
        self._environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(PLUGIN),
            "INFERENCEGYM_CONTROL_FILE": str(control_file.resolve()),
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not self._program.exists():
            raise InvalidConfigError(
                f"no vLLM at {self._program}: `make engine` or scripts/install_engine.sh installs one"
            )
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id of the server; it changes only if the server is restarted."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the server and its children."""
        if self._process is None:
            return
        for sign, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                break
        # Children of a server that was killed are still running.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerUnavailableError(f"vLLM ended as it started: {self._last_lines()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            time.sleep(0.5)
        raise ServerUnavailableError(f"vLLM did not answer within {START_S:g} s: {self._last_lines()}")

    def _last_lines(self) -> str:
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{' | '.join(lines[-5:])} (all of it: {self.log_file})"
