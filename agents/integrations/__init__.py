"""Adapters to training frameworks: Stable-Baselines3, RLlib, Ray, TRL, SkyRL, verifiers, OpenEnv's harness, Inspect."""
