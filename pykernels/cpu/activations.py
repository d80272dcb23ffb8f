"""Which annotations of its input rows a kernel asks for."""

from __future__ import annotations

from ..quant import get_format
from ..quant.activations import GROUPS
from .rows import Annotation
from .scales import SCALES


def annotation(fmt: str, activations: str) -> Annotation | None:
    """What ``rows.make_annotate`` shall do for a format's tiles; None for nothing.

    bf16 activations need sums where weights have minima, int8 ones codes, scales and sums.
    """
    scales = SCALES[fmt]
    if activations == "bf16":
        return Annotation("sums", 0, scales.k) if scales.minimum else None
    kind = get_format(fmt).int8_kind
    assert kind is not None, "registry lets no other format pass"
    return Annotation(kind, GROUPS[kind], scales.k)
