"""A gate for agent and rollout loops on a running vLLM or SGLang (:mod:`live.session_gate`)."""

from live.session_gate import Session, SessionGate

__all__ = ["Session", "SessionGate"]
