"""Attempts at one request: repeated after a lost answer or a status that says to try later, for a minute.

:class:`Attempts` decides when the clients of HTTP and of WebSockets try again; :class:`Retries` sends over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from inferencegym.errors import InvalidConfigError, RemoteError, ServerUnavailableError

RETRY_S: Final = 60.0
"""Seconds of further attempts after the first failure: longer than a restart of the server takes."""
START_S: Final = 1.0
"""The same where no connection to the server has succeeded yet: its address is probably wrong."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
"""Longest pause, unless the server asks for a longer one."""
RETRIED_STATUSES: Final = frozenset({408, 429, 502, 503, 504})

log = logging.getLogger(__name__)


class Attempts:
    """Attempts at one request to the server at ``url``; after the first failure, more follow for ``retry_s``."""

    def __init__(self, url: object, retry_s: float) -> None:
        self.failed = 0
        self.retry_s = retry_s
        self.url, self._first = url, 0.0

    def pause_s(self, failure: object, asked_s: float | None = None) -> float | None:
        """Seconds until the next attempt after a failure; None when the time is up.

        ``asked_s`` is the pause that the server asked for; by default pauses grow, with random jitter.
        """
        now = time.monotonic()
        self.failed += 1
        if self.failed == 1:
            self._first = now
        left_s = self._first + self.retry_s - now
        if left_s <= 0:
            return None
        if self.failed == 3:
            log.warning("%s cannot answer now (%s); trying again for %.0f s", self.url, failure, left_s)
        # Jitter, so that clients that failed at the same time do not retry at the same time.
        grown_s = min(FIRST_PAUSE_S * 2.0 ** min(self.failed - 1, 10), LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
        return min(grown_s if asked_s is None else asked_s, left_s)

    def given_up(self, failure: object, advice: str) -> ServerUnavailableError:
        """The error for a server that is still not there when the time is up."""
        return ServerUnavailableError(
            f"{self.url} gave no answer in {self.failed} attempts over {self.retry_s:g} s, the last failed with "
            f"{failure}: does the server run, and is this its address? {advice}".rstrip()
        )


@dataclass(slots=True)
class Retries:
    """Retry policy: more attempts for ``retry_s`` after a lost answer or one of :data:`RETRIED_STATUSES`.

    By default that is :data:`RETRY_S`, and :data:`START_S` as long as no connection has ever succeeded. Only for
    requests that may be sent twice. ``advice`` ends the message of the error after the last attempt.
    """

    retry_s: float | None = None
    advice: str = ""
    _reached: bool = field(default=False, init=False)

    def send(self, client: httpx.Client, method: str, path: str, **content: Any) -> httpx.Response:
        """Send until an answer needs no retry; raises :class:`ServerUnavailableError` if the server gave none."""
        attempts = Attempts(client.base_url, self.retry_s or 0.0)
        while True:
            try:
                outcome: httpx.Response | httpx.TransportError = client.request(method, path, **content)
            except httpx.TransportError as error:
                outcome = error
            if (pause_s := self._pause_s(attempts, outcome)) is None:
                return self._final(attempts, outcome)
            time.sleep(pause_s)

    async def send_async(self, client: httpx.AsyncClient, method: str, path: str, **content: Any) -> httpx.Response:
        """:meth:`send` as a coroutine."""
        attempts = Attempts(client.base_url, self.retry_s or 0.0)
        while True:
            try:
                outcome: httpx.Response | httpx.TransportError = await client.request(method, path, **content)
            except httpx.TransportError as error:
                outcome = error
            if (pause_s := self._pause_s(attempts, outcome)) is None:
                return self._final(attempts, outcome)
            await asyncio.sleep(pause_s)

    def _pause_s(self, attempts: Attempts, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds until the next attempt; None if the outcome is final."""
        if isinstance(outcome, httpx.UnsupportedProtocol):
            allowed = "it must begin with http:// or https://, as in http://localhost:7860"
            raise InvalidConfigError(f"base_url={attempts.url} is not allowed: {allowed}") from outcome
        self._reached |= not isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout))
        if self.retry_s is None:
            attempts.retry_s = RETRY_S if self._reached else START_S
        if isinstance(outcome, httpx.TransportError):
            return attempts.pause_s(repr(outcome))
        if outcome.status_code not in RETRIED_STATUSES:
            return None
        asked = outcome.headers.get("retry-after", "")
        return attempts.pause_s(f"HTTP {outcome.status_code}", float(asked) if asked.isdigit() else None)

    def _final(self, attempts: Attempts, outcome: httpx.Response | httpx.TransportError) -> httpx.Response:
        """The last answer. Raises ServerUnavailableError if the server gave none; a proxy's error does not count."""
        if isinstance(outcome, httpx.TransportError):
            start = "retry_s=60 waits for a server that starts slowly"
            raise attempts.given_up(repr(outcome), self.advice if self._reached else start) from outcome
        if outcome.status_code in RETRIED_STATUSES and "json" not in outcome.headers.get("content-type", ""):
            raise attempts.given_up(f"HTTP {outcome.status_code}", self.advice)
        return outcome


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
