"""Figure 18: a prompt on one GPU beside sequences that another one and the CPU decode."""

from __future__ import annotations

import json
from dataclasses import dataclass

from runtime.devices.sim.step import SimulatedStep

from .. import osdi_text as told
from ..cells import Cell, file_of
from ..on import decoding, streamed
from ..rows import RESULTS
from .node import ARCH, ENGINE, FMT, NODE

FIGURE = "Figure 18"
LOADS = {"1P": (1, 0), "1D": (0, 1), "1P+1D": (1, 1), "2D": (0, 2), "1P+2D": (1, 2)}
"""By name: prompts and sequences that decode."""
CONTEXT = told.DECODE_PROMPT + told.DECODE_TOKENS // 2
FILE = (
    RESULTS
    / "2-nvidia-h200-with-32-emeraldrapids-cores"
    / "2026-11-28-disagg-streams-qwen3-30b-24-layers-q4_k.json"
)


@dataclass(frozen=True)
class Times:
    """Holds a load's seconds to the prompt's first token, for a token of an answer, and in all."""

    ttft: float
    tpot: float

    @property
    def total(self) -> float:
        """Until the last request is complete."""
        return max(self.ttft, told.DECODE_TOKENS * self.tpot)


def figure18() -> list[Cell]:
    """Each over its first load, and seconds."""
    times = {name: _times(*load) for name, load in LOADS.items()}
    found = []
    for name, each in times.items():
        if each.ttft:
            over, paper = each.ttft / times["1P"].ttft, told.TTFT_OVER.get(name)
            found.append(Cell(FIGURE, f"{name}: first token", "s", None, each.ttft))
            if name != "1P":
                found.append(Cell(FIGURE, f"{name}: first token over 1P", "x", paper, over))
    for name, each in times.items():
        if each.tpot:
            over = each.tpot / times["1D"].tpot
            found.append(Cell(FIGURE, f"{name}: a token", "ms", None, 1e3 * each.tpot))
            if name != "1D":
                what = f"{name}: a token over 1D"
                paper = told.TPOT_MOST if name == "1P+2D" else None
                found.append(Cell(FIGURE, what, "x", paper, over))
    for name, each in times.items():
        if name != "1P":
            what, over = f"{name}: all requests over 1P", each.total / times["1P"].total
            paper = told.TOTAL_MOST if name == "1P+2D" else None
            found.append(Cell(FIGURE, what, "x", paper, over))
    return [*found, *_measured()]


def _times(prompts: int, sequences: int) -> Times:
    """Both at once slow each other where main memory is too slow for them together."""
    alone = streamed(ARCH, FMT, NODE, told.PREFILL_TOKENS) if prompts else None
    if not sequences:
        assert alone is not None
        return Times(alone.seconds, 0.0)
    options = {"system": ENGINE, "context": CONTEXT, "batch": sequences, "dual": sequences > 1}
    step = decoding(ARCH, FMT, NODE, **options)  # type: ignore[arg-type]
    if alone is None:
        return Times(0.0, step.seconds)
    prompt = streamed(ARCH, FMT, NODE, told.PREFILL_TOKENS, beside_gbps=_read_gbps(step))
    beside = decoding(ARCH, FMT, NODE, **options, beside_gbps=_read_gbps(alone))  # type: ignore[arg-type]
    return Times(prompt.seconds, beside.seconds)


def _read_gbps(step: SimulatedStep) -> float:
    """1e9 bytes a second that a step reads of main memory, on average."""
    end = max(ran.end for ran in step.ran)
    return sum(ran.cost.main_bytes for ran in step.ran) / end / 1e9


def _measured() -> list[Cell]:
    data = json.loads(FILE.read_text())
    shape = f"two H200, {data['model']}, {data['layers']} layers, {data['format']}"
    rows = {row["batch"]: row for row in data["rows"] if row["way"] == "2 GPUs"}
    found = []
    for batch, row in rows.items():
        over = row["beside_itl_mean_ms"] / row["itl_mean_ms"]
        what = f"{shape}: 1P+{batch}D: a token over {batch}D"
        found.append(Cell(FIGURE, what, "x", measured=over, file=file_of(FILE)))
    over = rows[4]["prompt_s"] / rows[1]["prompt_s"]
    what = f"{shape}: 1P+4D: first token over 1P+1D"
    found.append(Cell(FIGURE, what, "x", measured=over, file=file_of(FILE)))
    return found
