"""Passes: functions Program -> Program, each one idea of the papers, one a file."""

from .defer import defer, fewest_deferred
from .dual_batch import dual_batch
from .offload import offload
from .skip import skip

__all__ = ["defer", "dual_batch", "fewest_deferred", "offload", "skip"]
