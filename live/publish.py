"""Prometheus page of a policy on an engine: observations, current setting, wanted setting, expected result."""

from __future__ import annotations

from typing import Final, Self

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from live.observer import Advice

PARTS: Final = {
    "observation": "Observation of the policy, by field",
    "in_force": "Setting of the engine, by knob",
    "wanted": "Setting that the policy wants, by knob",
    "expected": "Simulated metrics of the wanted setting at the present load",
}


class AdvicePage:
    """HTTP server of the page, on this machine; a context manager. Port 0 chooses a free port."""

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges = {
            part: Gauge(f"inferencegym_live_{part}", text, ["name"], registry=self._registry)
            for part, text in PARTS.items()
        }
        self.port = port

    def __enter__(self) -> Self:
        self._server, self._thread = start_http_server(self.port, "127.0.0.1", registry=self._registry)
        self.port = int(self._server.server_port)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, advice: Advice) -> None:
        """Publish this advice from now on."""
        for part, gauge in self._gauges.items():
            for name, value in getattr(advice, part).items():
                gauge.labels(name).set(value)
