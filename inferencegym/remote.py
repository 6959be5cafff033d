"""JSON over HTTP to a server of ours or another, with what is worth trying again tried again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import httpx

from inferencegym.errors import RemoteError

ATTEMPTS: Final = 5
"""How often a request is sent before its failure is reported."""
FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 10.0
RETRY_STATUSES: Final = (429, 502, 503, 504)


class Server:
    """JSON over one pool of connections; what is worth trying again is tried again.

    A request that found no server, and an answer that says "later" (429 and 503, with ``Retry-After``), are repeated a
    few times. Everything else that is not a success raises :class:`RemoteError` with the server's own words.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 30.0, connections: int = 1) -> None:
        self.url = url.rstrip("/")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, limits=limits)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer to a GET."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON answer to a POST; the request must be one that may be sent twice."""
        return self._call("POST", path, body)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                if attempt == ATTEMPTS:
                    raise RemoteError(f"{self.url}{path}: no answer after {ATTEMPTS} attempts ({error!r})") from error
            else:
                if answer.is_success:
                    return dict(answer.json())
                if answer.status_code not in RETRY_STATUSES or attempt == ATTEMPTS:
                    raise RemoteError(f"{self.url}{path}: {answer.status_code}: {_said(answer)}", answer.status_code)
                pause_s = max(pause_s, _retry_after_s(answer))
            time.sleep(min(pause_s, MAX_PAUSE_S))
            pause_s *= 2.0
        raise AssertionError("the loop returns or raises")


def _said(answer: httpx.Response) -> str:
    """The server's message, with what to do next where it says so."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
    if isinstance(detail, Mapping):
        return " ".join(str(detail[key]) for key in ("message", "next") if detail.get(key))
    return str(detail)


def _retry_after_s(answer: httpx.Response) -> float:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
