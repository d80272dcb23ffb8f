"""Table 1: kernels of one token, by format."""

from __future__ import annotations

import json

from model.planner.machines import find_machine

from .. import osdi_text as told
from ..cells import Cell, file_of
from ..rows import RESULTS
from .node import NODE

FIGURE = "Table 1"
FILE = RESULTS / "amd-epyc-znver5-2-cores" / "2026-11-20.json"
PEERS = {
    "OpenBLAS FP32": ("numpy", "fp32", "bf16"),
    "theirs (optimized) FP8": ("pykernels", "avx512", "fp8"),
}
"""Whose rows of our table tell of a row of the paper's: engine, its backend, and the table's
format. NumPy multiplies by OpenBLAS."""


def table1() -> list[Cell]:
    """GB/s, simulated with the share of the read roof that our table has on two cores."""
    found = []
    roof = find_machine(NODE).cpu.read_gbps
    rows = {
        (row["engine"], row.get("backend"), row["format"]): row
        for row in json.loads(FILE.read_text())["table"]
        if row["tokens"] == 1
    }
    for name, (us, gbps) in told.TABLE_1.items():
        ours = roof * rows[PEERS[name]]["read_share"] if name in PEERS else None
        found.append(Cell(FIGURE, name, "GB/s", gbps, ours))
        found.append(Cell(FIGURE, f"{name}: a product", "us", us))
    for (engine, backend, fmt), row in rows.items():
        if fmt not in ("fp8", "bf16") or (engine != "pykernels" and fmt == "fp8"):
            continue
        what = f"two cores of Zen 5: {engine} {backend}" + (
            f", {fmt}" if engine == "pykernels" else ""
        )
        found.append(Cell(FIGURE, what, "GB/s", measured=row["gbps"], file=file_of(FILE)))
        share = 100 * row["read_share"]
        found.append(Cell(FIGURE, what, "% of the read roof", measured=share, file=file_of(FILE)))
    return found
