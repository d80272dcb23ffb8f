"""The rows of the op table that layers need whose branches are normed before and behind (Gemma)."""

from __future__ import annotations

from .op import Attr, Op, Port

NORMS = ("rms_norm", "post_norm")
"""Ops that norm a sum of branches' results (``add``)."""
_LOGITS = Port("float32", ("R", "V"))

SANDWICH: dict[str, Op] = {
    # (x + the norm of add0 + add1 + ...) times `scale`: what a branch gives to the residual stream.
    "post_norm": Op(
        inputs={
            "x": Port("float32", ("T", "H"), optional=True),
            "add": Port("activation", ("T", "H"), repeated=True),
        },
        outputs={"out": Port("float32", ("T", "H"))},
        weights={"weight": Port("", ("H",)), "scale": Port("", ("1",), optional=True)},
        attrs={"eps": Attr(float)},
    ),
    # cap * tanh(x / cap), in place.
    "softcap": Op(inputs={"x": _LOGITS}, outputs={"x": _LOGITS}, attrs={"cap": Attr(float)}),
}
