"""What a node takes: seconds, bytes of what others take too, and which term is the largest."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY, COMPUTE, LINK, LAUNCH, HOP, HOST, PEER = (
    "main memory",
    "computing",
    "the link",
    "launches",
    "the way to the CPU and back",
    "Python",
    "the way between GPUs",
)
"""What a span is bound by."""
GPU_MEMORY = "GPU memory"


@dataclass(frozen=True)
class Cost:
    """What a node takes.

    Attributes:
        seconds: alone; ``main_bytes``: of main memory meanwhile; ``link_bytes``: that come over its
            GPU's link.
        bound: which term is the largest.
        weights: bytes of weights that it reads.
    """

    seconds: float = 0.0
    main_bytes: float = 0.0
    bound: str = LAUNCH
    weights: float = 0.0
    link_bytes: float = 0.0
