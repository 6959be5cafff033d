"""Shared objects of the server's endpoints, and the mount of each environment family."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from env.families import SERVING
from env.family import Family
from server.metrics import Metrics
from server.net.cpu import CpuBudget
from server.net.jobs import Jobs
from server.net.limits import Limits, caller_of
from server.sessions.manager import SessionManager
from server.settings import Settings


@dataclass(slots=True)
class Context:
    """Objects that the endpoints of one server share."""

    settings: Settings
    sessions: SessionManager
    limits: Limits
    cpu: CpuBudget
    metrics: Metrics
    started: float
    """Of :func:`time.monotonic`."""
    jobs: Jobs

    @property
    def mounts(self) -> list[Mount]:
        """Mounts: the family that the settings name at the root, and every family under ``/<name>``.

        Exception: the serving fleet has no second mount when it is at the root.
        """
        families, root = self.sessions.families, self.settings.env
        named = [Mount(family, f"/{name}") for name, family in families.items() if name != root or name != SERVING]
        return [Mount(families[root], ""), *named]

    def caller(self, family: Family, scope: Scope) -> str:
        """Identity of a request's caller within one family, so that a caller has a latest session in each."""
        return f"{family.name}:{caller_of(scope)}"


@dataclass(frozen=True, slots=True)
class Mount:
    """An environment family at a prefix of the server's paths; the root has none."""

    family: Family
    prefix: str
