"""Which annotations of its input rows a kernel asks for."""

from __future__ import annotations

from .rows import Annotation
from .scales import Scales

ACTIVATIONS = ("bf16", "int8")
"""What inputs are rounded to: bfloat16 (exact products), or 8 bits for each token and 128 or 256
inputs (faster, with many tokens above all)."""


def annotation(scales: Scales, activations: str) -> Annotation | None:
    """What ``rows.make_annotate`` shall do for a format with these scales; None for nothing.

    K-quants take ggml's Q8_K, the other integers one scale a token and 128 inputs.
    """
    if activations == "bf16":
        return Annotation("sums", 0, scales.k) if scales.minimum else None
    if scales.superblock:
        return Annotation("q8_k", 256, scales.k)
    return Annotation("q8", 128, scales.k)
