"""Figures 3 and 7: kernels of experts by tokens an expert; figure 4: launches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from model.planner.machines import find_machine
from runtime.devices.sim.machine import Machine
from runtime.devices.sim.meetings import MEETS

from ..cells import ABOUT, MORE, Cell, file_of
from ..on import System, run
from ..rows import RESULTS
from . import told

TABLE = RESULTS / "intel-xeon-processor-emeraldrapids-16-cores" / "2026-11-23-table-6-formats.json"
"""Kernels of experts of DeepSeek-V3's sizes, on 16 cores with AMX; torch and kt-kernel beside."""
EXPERT = 3 * 7168 * 2048
"""Numbers of an expert of DeepSeek-V3."""
TOKENS = (1, 4, 16, 64, 256, 1024)
"""Of each expert."""
RUNS = {
    "ours, AMX": ("pykernels", "amx"),
    "ours, AVX-512": ("pykernels", "avx512"),
    "kt-kernel": ("kt-kernel", None),
    "PyTorch bf16": ("torch", None),
}
"""What the table has: engine and backend."""


def figure3() -> list[Cell]:
    """TFLOP/s of a socket by tokens an expert, of all 256 experts in BF16."""
    found = []
    cpu = find_machine(told.A100).cpu
    rate = cpu.read_gbps * cpu.experts_share / cpu.sockets
    for name, most in told.SOCKET_TFLOPS.items():
        for tokens in TOKENS:
            seconds = max(2 * EXPERT / (rate * 1e9), 2 * EXPERT * tokens / (most * 1e12))
            flops = 2 * EXPERT * tokens / seconds / 1e12
            last = tokens == TOKENS[-1]
            what = f"{name}, {tokens} tokens an expert"
            found.append(
                Cell("Figure 3", what, "TFLOP/s", most if last else None, flops, given=last)
            )
    for name, (engine, backend) in RUNS.items():
        for row in _rows(engine, backend):
            what = f"16 cores: {name}, {_each(row)} tokens an expert"
            found.append(_measured("Figure 3", what, "TFLOP/s", row["tflops"]))
    return found


def figure4() -> list[Cell]:
    """Launches of a token, and what they take of the GPU's time."""
    found = []
    for name, (launches, us, share) in told.LAUNCHES.items():
        found.append(Cell("Figure 4", f"{name}: launches of a token", "", launches, says=MORE))
        found.append(Cell("Figure 4", f"{name}: a launch", "us", us))
        system = System(launches / told.LAYERS, us)
        eager, none = (_gpu_seconds(system, launching) for launching in (True, False))
        what = f"{name}: launches, of the GPU's time"
        found.append(Cell("Figure 4", what, "%", share, 100 * (1 - none / eager)))
    return found


def _gpu_seconds(system: System, launching: bool) -> float:
    """What the GPU's kernels of a token take, with or without their launches."""

    def change(machine: Machine) -> Machine:
        assert machine.gpu is not None
        gone = replace(machine.gpu, launch_us=0.0, host_us=0.0)
        return machine if launching else replace(machine, gpu=gone)

    step = run("deepseek-v3", "bf16", told.A100, system=system, change=change).decode
    return sum(
        ran.cost.seconds for ran in step.ran if ran.lane[0] != "cpu" and ran.node.op not in MEETS
    )


def figure7() -> list[Cell]:
    """AVX-512 beside AMX: which is faster, and by how much."""
    peak = told.SOCKET_TFLOPS
    found = [
        Cell(
            "Figure 7",
            "AMX over AVX-512, 1024 tokens an expert",
            "x",
            told.AMX_OVER_AVX,
            peak["KTransformers, AMX"] / peak["PyTorch, AVX-512"],
            says=ABOUT,
        ),
        Cell("Figure 7", "AVX-512 over AMX, decoding, the most", "x", told.AVX_OVER_AMX),
    ]
    amx = {row["tokens"]: row for row in _rows("pykernels", "amx")}
    for row in _rows("pykernels", "avx512"):
        gain = row["us"] / amx[row["tokens"]]["us"]
        what = f"16 cores: AMX over AVX-512, {_each(row)} tokens an expert"
        found.append(_measured("Figure 7", what, "x", gain))
    return found


def _rows(engine: str, backend: str | None) -> Iterator[dict[str, Any]]:
    for row in json.loads(TABLE.read_text())["table"]:
        if row["format"] != "bf16" or row["engine"] != engine:
            continue
        if backend in (None, row.get("backend")) and row.get("backend") != "fp32":
            yield row


def _each(row: dict[str, Any]) -> str:
    """Tokens of each expert of 32, of which each token takes 8; few choose different ones."""
    return f"{row['tokens'] * 8 / 32:.0f}" if row["tokens"] > 8 else f"1 ({row['tokens']} a call)"


def _measured(figure: str, what: str, unit: str, value: float) -> Cell:
    return Cell(figure, what, unit, measured=value, file=file_of(TABLE))
