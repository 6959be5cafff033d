"""Time from an empty clone to a server that answers, by step of ``make serve``.

    python -m benchmarks.speed.first_start            with the caches of pip and uv as they are
    python -m benchmarks.speed.first_start --cold     with empty ones: everything is downloaded

Wall time depends on what else runs; processor time, of all processes of a step, hardly does.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from live.engines.vllm_server import free_port

ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "virtual environment": ".venv/bin/python",
    "Cython and uv, by pip": ".venv/.stamps/build",
    "packages of the server, by uv": ".venv/.stamps/server",
    "translation to C, compilation": ".venv/.stamps/package",
}
PATIENCE_S = 300.0


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall time and processor time (s) of what ``work`` starts and ends."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def serve(clone: Path, environment: dict[str, str]) -> None:
    """Start the server as ``make serve`` does, and end it as soon as it answers."""
    port = free_port()
    process = subprocess.Popen(
        ["make", "--silent", "serve", f"PORT={port}"],
        cwd=clone,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                return
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="with empty caches of pip and uv")
    args, load = parser.parse_args(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        clone, caches = Path(folder, "clone"), Path(folder, "caches")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("INFERENCEGYM_", "MAKE"))}
        environment = kept | {"INFERENCEGYM_DATA_DIR": str(Path(folder, "data"))}
        if args.cold:
            environment |= {"UV_CACHE_DIR": str(caches / "uv"), "PIP_CACHE_DIR": str(caches / "pip")}
        rows = {}
        for name, target in STEPS.items():
            command = ["make", "--silent", target]
            rows[name] = timed(lambda command=command: subprocess.run(command, cwd=clone, env=environment, check=True))
        rows["start, until /health answers"] = timed(lambda: serve(clone, environment))
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(f"{os.cpu_count()} processors, Python {platform.python_version()}, load {load:.1f} at the start\n")
    print("| step | s | processor s |\n|---|---:|---:|")
    for name, (wall, processor) in {**rows, "all": tuple(total)}.items():
        print(f"| {name} | {wall:.1f} | {processor:.1f} |")


if __name__ == "__main__":
    main()
