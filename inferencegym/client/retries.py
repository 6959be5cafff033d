"""HTTP requests with retries: repeated after a lost answer or a status that says to try later."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from inferencegym.errors import RemoteError, ServerUnavailableError

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 10.0
RETRIED_STATUSES: Final = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Retries:
    """Retry policy: up to ``most`` more attempts after a lost answer or one of :data:`RETRIED_STATUSES`.

    Only for requests that may be sent twice. ``advice`` ends the message of the error after the last attempt.
    """

    most: int = 5
    advice: str = ""

    def send(self, client: httpx.Client, method: str, path: str, **content: Any) -> httpx.Response:
        """Send until an answer needs no retry; raises :class:`ServerUnavailableError` if the last attempt had none."""
        attempt = 0
        while True:
            answer, lost = None, None
            try:
                answer = client.request(method, path, **content)
            except httpx.TransportError as error:
                lost = error
            attempt += 1
            if answer is not None and self._is_final(attempt, answer):
                return answer
            time.sleep(self._pause_s(client.base_url, attempt, answer, lost))

    async def send_async(self, client: httpx.AsyncClient, method: str, path: str, **content: Any) -> httpx.Response:
        """:meth:`send` as a coroutine."""
        attempt = 0
        while True:
            answer, lost = None, None
            try:
                answer = await client.request(method, path, **content)
            except httpx.TransportError as error:
                lost = error
            attempt += 1
            if answer is not None and self._is_final(attempt, answer):
                return answer
            await asyncio.sleep(self._pause_s(client.base_url, attempt, answer, lost))

    def _is_final(self, attempt: int, answer: httpx.Response) -> bool:
        return answer.status_code not in RETRIED_STATUSES or attempt > self.most

    def _pause_s(
        self, url: httpx.URL, attempt: int, answer: httpx.Response | None, lost: httpx.TransportError | None
    ) -> float:
        """Seconds until the next attempt: the server's ``Retry-After``, or else exponential backoff."""
        if answer is None and attempt > self.most:
            reason = f"{url} did not answer in {attempt} attempts ({lost!r}): is a server running there?"
            raise ServerUnavailableError(f"{reason} {self.advice}".rstrip()) from lost
        asked = "" if answer is None else answer.headers.get("retry-after", "")
        # Random jitter, so that clients that failed at the same time do not retry at the same time.
        grown = FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
        return min(float(asked) if asked.isdigit() else grown, LONGEST_PAUSE_S)


class Server:
    """JSON client of any HTTP server; errors are :class:`RemoteError` with the server's own message."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)
        self._retries = Retries()

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET; returns the JSON answer."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a POST, which must be safe to send twice; returns the JSON answer."""
        return self._call("POST", path, body)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        answer = self._retries.send(self._http, method, path, json=body)
        if not answer.is_success:
            raise RemoteError(f"{self.url}{path}: {answer.status_code}: {_message(answer)}", answer.status_code)
        return dict(answer.json())


def _message(answer: httpx.Response) -> str:
    """Error message of an answer, with what to do next if the server says it."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
    if isinstance(detail, Mapping):
        return " ".join(str(detail[key]) for key in ("message", "next") if detail.get(key))
    return str(detail)
