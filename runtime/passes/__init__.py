"""Passes: functions Program -> Program, each one idea of the papers, one a file."""

from .defer import defer, fewest_deferred
from .gpu_experts import gpu_experts
from .offload import offload
from .skip import skip

__all__ = ["defer", "fewest_deferred", "gpu_experts", "offload", "skip"]
