"""Passes: functions Program -> Program, each one idea of the papers, one a file."""

from .defer import defer
from .dual_batch import dual_batch
from .expert_cache import expert_cache
from .gpu_experts import gpu_experts
from .keep_routing import keep_routing
from .offload import offload
from .skip import skip
from .split_experts import split_experts
from .stream_dense import stream_dense
from .stream_weights import stream_weights

__all__ = [
    "defer",
    "dual_batch",
    "expert_cache",
    "gpu_experts",
    "keep_routing",
    "offload",
    "skip",
    "split_experts",
    "stream_dense",
    "stream_weights",
]
