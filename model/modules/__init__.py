"""The operators that rules can put into a model."""

from .moe import FusedMoE

__all__ = ["FusedMoE"]
