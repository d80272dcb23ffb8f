"""Figure 14: each stage alone, from PyTorch's experts to a CUDA graph, for prompts and decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime.devices.sim.machine import Cpu, Kernel, Machine
from runtime.devices.sim.routing import Routing

from ..cells import Cell, file_of
from ..on import System, run
from ..rows import RESULTS
from ..skew import measured_law
from . import told

FIGURE, TOKENS = "Figure 14", 8192
NAMES = {
    "v": "AVX-512 kernel",
    "m": "AMX kernel",
    "d": "dynamic scheduling",
    "n": "slices a socket",
    "c": "CUDA graph",
}
OWN = {
    "CUDA graph": "c",
    "AMX or AVX kernels": "m",
    "Expert Deferral": "deferral",
}
"""Our stages by the paper's letters, as far as it has them."""


@dataclass(frozen=True)
class Stage:
    """What a stage's program is: its launches, and what its machine's CPU does for it.

    Attributes:
        tflops: of its experts' kernel on two sockets; ``fiddler``: whether experts of one token
            take as long as section 2.3 measured.
        sliced: whether each socket reads its own slice; ``dealt``: whether each core has its
            experts from the beginning.
    """

    tflops: float
    fiddler: bool = False
    sliced: bool = False
    dealt: bool = False
    system: System = told.EAGER

    def change(self, law: Routing, experts: int, topk: int) -> Callable[[Machine], Machine]:
        """The machine on which it runs: what a core has not, its slowest one waits for."""
        wait = law.slowest(experts, topk, 72) if self.dealt else 1.0

        def changed(machine: Machine) -> Machine:
            cpu = machine.cpu
            kernel = Kernel(tflops=self.tflops / wait)
            cpu = replace(cpu, kernels={"default": kernel})
            return replace(machine, cpu=cpu if self.sliced else self._in_one_socket(cpu))

        return changed

    def _in_one_socket(self, cpu: Cpu) -> Cpu:
        """A layer's experts lie where they were first written: in the memory of one socket."""
        rate = cpu.read_gbps / cpu.sockets
        share = cpu.experts_share
        if self.fiddler:
            share = 8 * 3 * 7168 * 2048 * 2 / (told.FIDDLER_MOE_MS * 1e-3) / (rate * 1e9)
        return replace(cpu, read_gbps=rate, contended_gbps=rate, experts_share=share)


_AVX, _AMX = (2 * told.SOCKET_TFLOPS[name] for name in ("PyTorch, AVX-512", "KTransformers, AMX"))
BASE = Stage(2 * told.SOCKET_TFLOPS["PyTorch, AMX"], fiddler=True)
STAGES = {
    "prompt": {
        "": BASE,
        "v": Stage(_AVX, dealt=True),
        "m": Stage(_AMX, dealt=True),
        "d": Stage(_AMX),
        "n": Stage(_AMX, sliced=True),
        "c": Stage(_AMX, sliced=True, system=told.KT),
    },
    "decode": {
        "": BASE,
        "m": Stage(_AMX),
        "v": Stage(_AVX),
        "d": Stage(_AVX),
        "n": Stage(_AVX, sliced=True),
        "c": Stage(_AVX, sliced=True, system=told.KT),
    },
}
"""By phase and letter, each with all before it; "v" and "m" are of the baseline both."""
BEFORE = {"prompt": {"v": "", "m": ""}, "decode": {"v": "", "m": ""}}
"""Of which stage a gain is, where it is not the one before."""


def figure14() -> list[Cell]:
    """What each stage gains over the one before, of each model in BF16."""
    found: list[Cell] = []
    law = measured_law()
    for phase, stages in STAGES.items():
        gains: dict[str, list[float]] = {}
        totals = []
        for name, arch, fmt, machine, _ in told.MODELS[:3]:
            experts, topk = {"DS-3": (256, 8), "DS-2": (160, 6), "QW-2": (64, 8)}[name]
            took, before = dict[str, float](), ""
            for letter, stage in stages.items():
                change = stage.change(law if phase == "prompt" else Routing(), experts, topk)
                prompt = TOKENS if phase == "prompt" else 32
                done = run(
                    arch,
                    fmt,
                    machine,
                    system=stage.system,
                    change=change,
                    prompt=prompt,
                    way="cpu",
                )
                took[letter] = (done.prompt if phase == "prompt" else done.decode).seconds
                if letter:
                    base = BEFORE[phase].get(letter, before)
                    gain = took[base] / took[letter]
                    gains.setdefault(letter, []).append(gain)
                    what = f"{phase}, {letter}, {name}: {NAMES[letter]}"
                    found.append(Cell(FIGURE, what, "x", None, gain))
                before = letter
            totals.append(took[""] / took["c"])
        for letter, each in gains.items():
            paper = told.STAGES.get((phase, letter))
            what = f"{phase}, {letter}, the most: {NAMES[letter]}"
            found.append(Cell(FIGURE, what, "x", paper, max(each)))
        if phase == "decode":
            for what, paper, ours in zip(
                ("the least", "the most"),
                told.OVER_FIDDLER,
                (min(totals), max(totals)),
                strict=True,
            ):
                found.append(Cell(FIGURE, f"decode, all over Fiddler, {what}", "x", paper, ours))
    return [*found, *_measured()]


def _measured() -> list[Cell]:
    """The stages of our program on a lent machine."""
    folder = RESULTS / "nvidia-h200-with-16-emeraldrapids-cores"
    file = folder / "2026-11-26-ablation.json"
    rows = json.loads(file.read_text())["rows"]
    found = []
    for before, after in zip(rows, rows[1:], strict=False):
        name = after["stage"].lstrip("+ ")
        letter = next((OWN[known] for known in OWN if name.startswith(known)), "")
        shape = f"{after['model']}, {after['layers']} layers, {after['format']}"
        what = f"decode, {letter}, ours: {name}, {shape}"
        gain = after["tok_s"] / before["tok_s"]
        found.append(Cell(FIGURE, what, "x", measured=gain, file=file_of(file)))
    return found
