"""What Triton 3.6 and 3.9 call by different names in Gluon."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

_shared = gl.shared_memory_descriptor
reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
