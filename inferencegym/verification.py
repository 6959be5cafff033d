"""Episode files: write one, read them, verify them by replay (:mod:`env.episode_files`)."""

from env.episode_files import EpisodeLog, read_episodes, saved, verify_episode

__all__ = ["EpisodeLog", "read_episodes", "saved", "verify_episode"]
