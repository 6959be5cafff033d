"""Prometheus page of a policy beside an engine: what it saw, what is in force, what it would set, what it expects."""

from __future__ import annotations

from typing import Final, Self

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from live.observer import Advice

PARTS: Final = {
    "observation": "What the policy saw, by field of the observation",
    "in_force": "What the engine is set to, by knob",
    "wanted": "What the policy would set, by knob",
    "expected": "What the simulator expects of the wanted setting at the present load, by metric",
}


class AdvicePage:
    """HTTP server of the page, on this machine; a context manager. Port 0 takes a free one."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._registry = CollectorRegistry()
        self._gauges = {
            part: Gauge(f"inferencegym_live_{part}", text, ["name"], registry=self._registry)
            for part, text in PARTS.items()
        }
        self._asked = (port, address)
        self.port = port

    def __enter__(self) -> Self:
        self._server, self._thread = start_http_server(*self._asked, registry=self._registry)
        self.port = int(self._server.server_port)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, advice: Advice) -> None:
        """Serve this advice from now on."""
        for part, gauge in self._gauges.items():
            for name, value in getattr(advice, part).items():
                gauge.labels(name).set(value)
