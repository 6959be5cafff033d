"""The policies of a package's family (:mod:`agents.families`), for its entry point ``inferencegym.players``."""

from agents.families import Players

__all__ = ["Players"]
