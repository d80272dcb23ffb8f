"""From turns to the figures of one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pykernels.shapes import MoEShape
from runtime.profiling.roofline import Roofs

from .turns import Seen

Row = dict[str, Any]


def missing(head: Row, engine: str, backend: str, why: str) -> Row:
    """A row without figures, with the reason."""
    return {**head, "engine": engine, "backend": backend, "why": why}


def figures(
    head: Row,
    engine: str,
    backend: str,
    seen: Seen,
    touched: Sequence[int],
    bytes_per_expert: float,
    shape: MoEShape,
    roofs: Roofs,
    compute_roof: float | None,
) -> Row:
    """A row with figures: medians, GB/s of 1e9 bytes, TFLOP/s of 1e12.

    Args:
        head: format, tokens and threads.
        touched: distinct experts of each routing; only their bytes are counted.
        compute_roof: TFLOP/s of the instructions that this engine multiplies with, if known.
    """
    gbps = seen.rate([bytes_per_expert * n / 1e9 for n in touched])
    tflops = 2 * head["tokens"] * shape.topk * shape.weights / seen.median / 1e12
    return {
        **head,
        "engine": engine,
        "backend": backend,
        "us": round(seen.median * 1e6, 1),
        "gbps": round(gbps, 2),
        "tflops": round(tflops, 4),
        "read_roof": round(roofs.read, 2),
        "read_share": round(gbps / roofs.read, 4),
        "compute_roof": round(compute_roof, 3) if compute_roof else None,
        "compute_share": round(tflops / compute_roof, 4) if compute_roof else None,
    }
