"""Gymnasium environments, and their ids: importing this module registers them (:mod:`env.gym`)."""

from env.gym import EpisodeGymEnv, EpisodeVectorEnv, InferenceGymEnv, register_envs
from env.traffic.gym import TrafficGymEnv, VectorTrafficGymEnv
from env.vector import VectorInferenceEnv
from inferencegym.client.gym import REMOTE_ID, HTTPGymEnv, HTTPVectorEnv
from inferencegym.seeds import episode_seed
from inferencegym.vector_env import registered_id

__all__ = [
    "REMOTE_ID",
    "EpisodeGymEnv",
    "EpisodeVectorEnv",
    "HTTPGymEnv",
    "HTTPVectorEnv",
    "InferenceGymEnv",
    "TrafficGymEnv",
    "VectorInferenceEnv",
    "VectorTrafficGymEnv",
    "episode_seed",
    "register_envs",
    "registered_id",
]
