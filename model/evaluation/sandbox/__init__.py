"""Programs that a model wrote, run where they can do little harm."""

from .run import Limits, Outcome, confinement, run_program

__all__ = ["Limits", "Outcome", "confinement", "run_program"]
