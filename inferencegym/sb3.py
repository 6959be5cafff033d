"""Stable-Baselines3's ``VecEnv`` over a vector environment (:mod:`agents.integrations.sb3`); needs the extra ``rl``."""

from agents.integrations.sb3 import SB3VecEnv

__all__ = ["SB3VecEnv"]
