"""What a package's family is made of (:mod:`env.family`), for its entry point ``inferencegym.families``."""

from env.family import Entry, EpisodeEnv, Family, Grade, GymCodec, Policy, TaskEntry, outcome

__all__ = ["Entry", "EpisodeEnv", "Family", "Grade", "GymCodec", "Policy", "TaskEntry", "outcome"]
