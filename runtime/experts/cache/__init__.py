"""Which experts a GPU's slots hold: decided by what routers chose, changed between steps."""

from .cache import BetweenSteps, CacheStats, ExpertCache, Filler, Move
from .policy import POLICIES, CachePolicy, Scores, Swap, plan

__all__ = [
    "POLICIES",
    "BetweenSteps",
    "CachePolicy",
    "CacheStats",
    "ExpertCache",
    "Filler",
    "Move",
    "Scores",
    "Swap",
    "plan",
]
