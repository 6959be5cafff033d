"""Adapters to training frameworks: Stable-Baselines3, RLlib, Ray, TRL, Inspect."""
