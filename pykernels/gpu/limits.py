"""Sizes of kernels and of their scratch memory, for plans: importing this imports no Triton, so
that plans can be made on a machine without it."""

from __future__ import annotations

SUM_MEMBERS = 4
"""Most GPUs of an all-reduce (``collectives.one_shot``)."""
SUM_BLOCK, SUM_PROGRAMS = 2048, 64
"""Numbers of a program, and programs of a launch: all of them run at once on any GPU."""
DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""
UNPACK_SCRATCH = 256 << 20
"""Most bytes of unpacked weights at a time, or one expert's."""
RANKED_EXPERTS = 1023
"""Most experts that ``moe.rank_experts`` compares."""
