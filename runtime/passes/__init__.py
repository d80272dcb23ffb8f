"""Passes: functions Program -> Program, each one idea of the papers, one a file."""

from .defer import defer, fewest_deferred
from .keep_routing import keep_routing
from .offload import offload
from .skip import skip

__all__ = ["defer", "fewest_deferred", "keep_routing", "offload", "skip"]
