"""Figures 15, 16 and 17: decoding, by context, batch and format."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.devices.sim.meetings import MEETS
from runtime.devices.sim.step import Ran

from .. import osdi_text as told
from ..cells import ABOUT, Cell
from ..on import run
from .node import ARCH, ENGINE, FMT, NODE


def figure15() -> list[Cell]:
    """Full precision, one sequence and two."""
    figure, found = "Figure 15", []
    for tokens in (1024, 8192, 32768):
        step = run(ARCH, FMT, NODE, system=ENGINE, context=tokens)
        paper = told.DECODE_TOK_S.get(tokens)
        what = f"DeepSeek-R1 fp8, context {tokens}"
        found.append(Cell(figure, what, "tok/s", paper, step.decode_tok_s))
        if tokens == 1024:
            found += _layer(step.decode.ran)
    step = run("kimi-k2", FMT, NODE, system=ENGINE, context=1024)
    found.append(
        Cell(figure, "Kimi-K2 fp8, context 1024", "tok/s", told.KIMI_TOK_S, step.decode_tok_s)
    )
    for tokens in (1024, 32768):
        step = run(ARCH, FMT, NODE, system=ENGINE, context=tokens, batch=2, dual=True)
        paper = told.TWO_STREAMS_TOK_S.get(tokens)
        what = f"DeepSeek-R1 fp8, two sequences in two microbatches, context {tokens}"
        found.append(Cell(figure, what, "tok/s", paper, step.decode_tok_s))
    return found


def _layer(ran: Iterable[Ran]) -> list[Cell]:
    """Section 3.3.1: what a layer's experts take, and its attention with all else on the GPU."""
    ran = list(ran)
    layers = {each.node.layer for each in ran if each.node.layer is not None}
    takes = {"cpu": 0.0, "cuda:0": 0.0}
    for each in ran:
        if each.node.layer is not None and each.node.op not in MEETS:
            takes[each.lane[0]] += 1e6 * each.cost.seconds / len(layers)
    figure = "Section 3.3.1"
    return [
        Cell(figure, "experts of a layer", "us", told.EXPERTS_US, takes["cpu"], given=True),
        Cell(figure, "a layer on the GPU", "us", told.ATTENTION_US, takes["cuda:0"], says=ABOUT),
    ]


def figure16() -> list[Cell]:
    """Tokens a second by batch, over one sequence's."""
    one = run(ARCH, FMT, NODE, system=ENGINE, context=1024).decode_tok_s
    found = []
    for batch, paper in told.BATCH_GAIN.items():
        if batch > 1:
            step = run(ARCH, FMT, NODE, system=ENGINE, context=1024, batch=batch, dual=True)
            what = f"batch {batch} over batch 1"
            found.append(Cell("Figure 16", what, "x", paper, step.decode_tok_s / one))
    return found


def figure17() -> list[Cell]:
    """Quantized, by context."""
    found = []
    for tokens in (1024, 8192, 32768, 131072):
        step = run(ARCH, "q4_k", NODE, system=ENGINE, context=tokens)
        what, paper = f"DeepSeek-R1 q4_k, context {tokens}", told.Q4_TOK_S.get(tokens)
        found.append(Cell("Figure 17", what, "tok/s", paper, step.decode_tok_s))
    return found
