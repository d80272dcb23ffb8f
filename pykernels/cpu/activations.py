"""Which annotations of its input rows a kernel asks for."""

from __future__ import annotations

from ..quant import get_format
from ..quant.activations import DIGITS_K, GROUPS
from .packings import BIASES, INTEGERS, LIFTS
from .rows import Annotation
from .scales import SCALES


def annotation(fmt: str, activations: str, exact: str = "decoded") -> Annotation | None:
    """What ``annotate.make_annotate`` shall do for a format's tiles; None for nothing.

    bf16 activations need sums where weights have minima or are lifted, int8 ones codes, scales and
    sums, which a bias of the weights' codes makes integers.

    Args:
        exact: how integer weights meet bf16 activations (``products``): "decoded", "lifted" or as
            "digits".
    """
    scales = SCALES[fmt]
    if activations == "bf16" and exact == "digits" and fmt in INTEGERS:
        return Annotation("digits", DIGITS_K, scales.k, BIASES.get(fmt, 0), bool(scales.minimum))
    if activations == "bf16":
        wanted = scales.minimum or (exact == "lifted" and fmt in LIFTS)
        return Annotation("sums", 0, scales.k) if wanted else None
    kind = get_format(fmt).int8_kind
    assert kind is not None, "registry lets no other format pass"
    return Annotation(kind, GROUPS[kind], scales.k, BIASES.get(fmt, 0))
