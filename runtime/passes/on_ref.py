"""A program on the ref device: the reference ops in float32."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..program import Program

REF = "ref"
_EXACT = {torch.bfloat16: torch.float32}


def exact(dtype: torch.dtype) -> torch.dtype:
    """What the ref device keeps for a cache of ``dtype``: float32 for bfloat16."""
    return _EXACT.get(dtype, dtype)


def on_ref(program: Program) -> Program:
    """The program with every node on the ref device."""
    return with_exact_caches(program.on(REF))


def with_exact_caches(program: Program) -> Program:
    """The program with float32 for bfloat16 in the cache."""
    buffers = {
        name: replace(buffer, dtype=exact(buffer.dtype)) for name, buffer in program.buffers.items()
    }
    return replace(program, buffers=buffers).check()
