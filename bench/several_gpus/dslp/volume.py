"""Bytes that ranks send each other in a layer with routed experts (OSDI'26, Figure 6): by SmallEP,
and by standard expert parallelism."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from bench.harness.timing.rows import Row
from model.architectures.decoder import Decoder
from pykernels.errors import PykernelsError
from runtime.passes.shard import EXPERTS, sent_bytes, stripe
from runtime.program.sizes import StepSizes

STANDARD = "all_to_all"
_ATTENTION = ("send",)
"""What keys and values go round by: that is the same in both."""


def volumes(decoder: Decoder, tokens: int, ranks: int) -> list[Row]:
    """A row for each form: bytes that one rank sends for a layer's experts, of a step of so many
    tokens in all, counted in the programs' own dtypes. None where ranks cannot share the model."""
    layer = next(each for each in decoder.layers[::-1] if each.moe is not None)
    sizes = StepSizes(tokens=tokens)
    found = []
    for form in EXPERTS:
        try:
            one, two = (
                Counter(sent_bytes(stripe(made.lower(sizes), ranks, form)[0]))
                for made in (replace(decoder, layers=(layer,) * n) for n in (1, 2))
            )
        except PykernelsError:
            return []
        two.subtract(one)  # what is sent once, in front of the head, is no layer's
        by_op = {op: count for op, count in two.items() if op not in _ATTENTION and count}
        found.append(
            {"form": form, "tokens": tokens, "ranks": ranks, "by_op": by_op}
            | {"bytes": sum(by_op.values())}
        )
    return found
