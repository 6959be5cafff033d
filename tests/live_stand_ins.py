"""Stand-ins for engines over real HTTP: vLLM's and SGLang's series and endpoints, without a model."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from live.engines.vllm_server import PLUGIN

Answer = tuple[int, Any]
"""Status, and JSON or parts of a stream."""


class StandIn:
    """HTTP server with the model ``m``, a metrics page of ``series`` (name -> value) and further endpoints."""

    def __init__(self, series: dict[str, float], post: Callable[[str, Any], Answer] | None = None) -> None:
        self.series = series
        self.documents: dict[str, Any] = {"/v1/models": {"data": [{"id": "m", "max_model_len": 1024}]}}
        self.posted: list[tuple[str, Any]] = []
        self.down = False
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if stand_in.down:
                    self.reply(503, b"down")
                elif self.path == "/metrics":
                    self.reply(200, stand_in.page().encode())
                else:
                    known = stand_in.documents.get(self.path)
                    self.reply(404 if known is None else 200, json.dumps(known).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.posted.append((self.path, body))
                status, answer = (404, {}) if post is None else post(self.path, body)
                if not isinstance(answer, Iterator):
                    self.reply(status, json.dumps(answer).encode())
                    return
                self.send_response(status)
                self.end_headers()
                with suppress(ConnectionError):  # whoever asked may have gone
                    self.wfile.writelines(answer)

            def reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def page(self) -> str:
        return "".join(f"{name} {value}\n" for name, value in self.series.items())

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


VLLM_SERIES: Final = {
    "vllm:num_requests_waiting": 0.0,
    "vllm:num_requests_running": 0.0,
    "vllm:kv_cache_usage_perc": 0.0,
    "vllm:request_success_total": 0.0,
    "vllm:request_prompt_tokens_sum": 0.0,
    "vllm:generation_tokens_total": 0.0,
    "vllm:num_preemptions_total": 0.0,
    "vllm:iteration_tokens_total_count": 0.0,
    **{f'vllm:time_to_first_token_seconds_bucket{{le="{edge}"}}': 0.0 for edge in ("0.1", "0.5", "1.0", "+Inf")},
    **{f'vllm:request_time_per_output_token_seconds_bucket{{le="{edge}"}}': 0.0 for edge in ("0.05", "+Inf")},
}


class BlockPool:
    """The part of vLLM's block pool that the scheduler class uses."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.free = num_gpu_blocks - 1

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, n: int) -> list[object]:
        assert n <= self.free
        self.free -= n
        return [object() for _ in range(n)]

    def free_blocks(self, blocks: list[object]) -> None:
        self.free += len(blocks)


class FakeScheduler:
    """What the scheduler class extends: the attributes of vLLM's, and one iteration that does nothing."""

    def __init__(self) -> None:
        self.max_num_running_reqs = self.max_num_active_reqs = 64
        self.max_num_scheduled_tokens = 2048
        self.num_spec_tokens = 4
        self.dynamic_sd_lookup: list[int] | None = None
        self.block_size = 16
        self.kv_cache_manager = types.SimpleNamespace(block_pool=BlockPool(101))
        self.vllm_config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(data_parallel_size=1))

    def schedule(self) -> None:
        pass

    def make_stats(self) -> Any:
        return types.SimpleNamespace(kv_cache_usage=0.0)


@contextmanager
def scheduler_module(control_file: Path, version: str = "0.32.0") -> Iterator[Any]:
    """The scheduler class's module as an engine loads it, on stand-ins for vLLM's classes."""
    names = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched")
    fakes = {name: types.ModuleType(name) for name in names}
    vars(fakes["vllm"])["__version__"] = version
    for name, kind in (("scheduler", "Scheduler"), ("async_scheduler", "AsyncScheduler")):
        module = types.ModuleType(f"vllm.v1.core.sched.{name}")
        vars(module)[kind] = FakeScheduler
        fakes[module.__name__] = module
    before = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)
    os.environ["INFERENCEGYM_CONTROL_FILE"] = str(control_file)
    try:
        spec = importlib.util.spec_from_file_location("inferencegym_scheduler", PLUGIN / "inferencegym_scheduler.py")
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        yield loaded
    finally:
        del os.environ["INFERENCEGYM_CONTROL_FILE"]
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
