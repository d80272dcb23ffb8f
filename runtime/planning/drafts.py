"""Which models can check drafts: what is rejected must be taken back."""

from __future__ import annotations

from .execution import ExecutionPlan
from .lowerable import Lowerable


def why_no_drafts(plan: ExecutionPlan, model: Lowerable) -> str:
    """Why no step of a model that runs by a plan may check drafts, as a clause; "": each may."""
    if model.states:
        return f"layers of {model.name} keep a state, from which no token can be taken back"
    if plan.prefill == "stream" and plan.streaming is not None:
        return "drafts are checked as prompts are read, and all experts would cross for them"
    if plan.passes:
        return "passes rewrite decode steps, and drafts are checked by the steps of prompts"
    return ""
