"""A row of the results: flat, JSON's own types; the same on a CPU and on a GPU.

``op``, ``name``, sizes and formats; ``us_median``, ``us_p10``, ``us_p90``; ``nbytes``, ``flops``
and their rates; both roofs and the shares of them. Of each peer ``us_NAME``, ``x_NAME`` (how many
times faster ours is), or ``why_NAME``. A row that could not be timed has ``why`` and no figures.
The row of a peer that is timed for itself (it stores other bytes) has its ``engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

from pykernels.errors import PykernelsError

from .turns import Times, speedup

Row = dict[str, Any]

FIGURES = {
    "op",
    "name",
    "engine",
    "us_median",
    "us_p10",
    "us_p90",
    "nbytes",
    "flops",
    "gbps",
    "tflops",
    "read_roof_gbps",
    "compute_roof_tflops",
    "compute",
    "read_share",
    "compute_share",
    "bound",
    "roof_us",
    "roof_share",
    "captured",
    "calls",
    "why",
}
_OF_PEERS = ("us_", "x_", "captured_", "why_")


def figures(
    times: Times,
    nbytes: Sequence[float],
    flops: float,
    read_gbps: float,
    compute_tflops: float | None,
    compute: str = "bf16",
) -> Row:
    """Medians, rates of 1e9 bytes and 1e12 operations, shares of the roofs.

    ``roof_us`` is the larger of the bytes over the read roof and the operations over the compute
    roof; ``roof_share`` is that over the median.

    Args:
        nbytes: of each input set that calls rotate over.
        compute_tflops: of the instructions that it multiplies with; None: not known.
        compute: what these multiply: bf16, fp8, int8.
    """
    us = [1e6 * took for took in times.calls]
    tenths = quantiles(us, n=10) if len(us) > 1 else us * 9
    middle, moved = median(us), median(nbytes)
    gbps, tflops = times.rate([n / 1e9 for n in nbytes]), flops / middle / 1e6
    floors = {"memory": moved / read_gbps / 1e3}
    if compute_tflops:
        floors["compute"] = flops / compute_tflops / 1e6
    bound = max(floors, key=floors.__getitem__)
    return {
        "us_median": round(middle, 3),
        "us_p10": round(tenths[0], 3),
        "us_p90": round(tenths[-1], 3),
        "nbytes": round(moved),
        "flops": round(flops),
        "gbps": round(gbps, 2),
        "tflops": round(tflops, 4),
        "read_roof_gbps": round(read_gbps, 5),
        "compute_roof_tflops": round(compute_tflops, 3) if compute_tflops else None,
        "compute": compute,
        "read_share": round(gbps / read_gbps, 4),
        "compute_share": round(tflops / compute_tflops, 4) if compute_tflops else None,
        "bound": bound,
        "roof_us": round(floors[bound], 3),
        "roof_share": round(floors[bound] / middle, 4),
    }


def against(ours: Times, peers: dict[str, Times]) -> Row:
    """The columns of peers: time and ratio of each, or why it has none."""
    row: Row = {}
    for name, theirs in peers.items():
        if theirs.why:
            row[f"why_{name}"] = theirs.why
        else:
            row[f"us_{name}"] = round(1e6 * theirs.median, 3)
            row[f"x_{name}"] = round(speedup(ours, theirs), 3)
    return row


def params(row: Row) -> dict[str, Any]:
    """The sizes and formats among a row's columns."""
    return {k: v for k, v in row.items() if k not in FIGURES and not k.startswith(_OF_PEERS)}


def peers_of(row: Row) -> list[str]:
    """Peers that were timed beside a row."""
    return [key.removeprefix("x_") for key in row if key.startswith("x_")]


def title(row: Row) -> str:
    """Its name and sizes."""
    sizes = " ".join(f"{key}={value}" for key, value in params(row).items())
    return f"{row['name']} {sizes}".strip()


def attempt(part: Callable[[], Row]) -> Row:
    """A part's columns; where it fails ``why``, so that other rows go on."""
    try:
        return part()
    except Exception as error:
        return {"why": reason(error)}


def reason(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, PykernelsError) else f"{type(error).__name__}: "
    return (kind + text)[:300]
