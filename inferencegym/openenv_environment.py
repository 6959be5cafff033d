"""OpenEnv environments in process (:mod:`agents.integrations.openenv_environment`)."""

from agents.integrations.openenv_environment import (
    FamilyEnvironment,
    GradeRubric,
    InferenceGymEnvironment,
    PartRubric,
    TrafficControllerEnvironment,
)

__all__ = [
    "FamilyEnvironment",
    "GradeRubric",
    "InferenceGymEnvironment",
    "PartRubric",
    "TrafficControllerEnvironment",
]
