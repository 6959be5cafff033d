"""What the endpoints of one server share, and where each environment family is mounted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from env.family import Family
from inferencegym.families import SERVING
from server.net.limits import Callers, Limits
from server.net.metrics import Metrics
from server.sessions.manager import SessionManager
from server.settings import Settings


@dataclass(slots=True)
class Context:
    """What the endpoints of one server share."""

    settings: Settings
    sessions: SessionManager
    callers: Callers
    limits: Limits
    metrics: Metrics
    started: float
    """Of :func:`time.monotonic`."""

    @property
    def mounts(self) -> list[Mount]:
        """Where each family is served; see :func:`mounts`."""
        return mounts(self.sessions.families, self.settings.env)

    def caller(self, family: Family, scope: Scope) -> str:
        """Identity of a request's caller within one family: who plays several has a latest session in each."""
        return f"{family.name}:{self.callers.caller(scope)}"


@dataclass(frozen=True, slots=True)
class Mount:
    """An environment family at a prefix of the server's paths; the root has none."""

    family: Family
    prefix: str


def mounts(families: Mapping[str, Family], root: str) -> list[Mount]:
    """The family named ``root`` at the root, and every family below its own name.

    Only the serving fleet has no second place where it is at the root, as it always was.
    """
    named = [Mount(family, f"/{name}") for name, family in families.items() if name != root or name != SERVING]
    return [Mount(families[root], ""), *named]


def prefixes(families: Mapping[str, Family]) -> list[str]:
    """Every prefix that some setting may give a family."""
    return ["", *(f"/{name}" for name in families)]
