"""Adapters to training frameworks.

Stable-Baselines3, RLlib, Ray, TRL, SkyRL, verifiers, NeMo Gym, OpenEnv's harness, Inspect.
"""
