"""KTransformers (SOSP 2025): figures 10, 11, 12 and 14."""

from __future__ import annotations

import json
from dataclasses import replace

from model.planner.machines import find_machine

from .cells import ABOUT, FIT, Cell
from .on import run
from .rows import RESULTS

TITLE = "KTransformers (SOSP 2025)"
ABOUT_IT = (
    "One efficiency is given: the share of main memory's rate that experts reach, 221 of 440 GB/s,"
    " which the OSDI 2026 paper works out of this one. Memories and links have their"
    " published rates."
    f" {FIT} The GPU's part is ours: fewer and fused kernels, so that the CPU is busier"
    " than in the paper, and deferral gains less. `v`, `m` and `d` are kernels of"
    " the baseline that we"
    " have not.",
)
A100, RTX = "sosp25-a100", "sosp25-4080"
MODELS = (
    ("DS-3", "deepseek-v3", "bf16", A100, 3),
    ("DS-2", "deepseek-v2.5", "bf16", A100, 4),
    ("QW-2", "qwen2-57b", "bf16", A100, 2),
    ("DS-3", "deepseek-v3", "int4", RTX, 6),
    ("DS-2", "deepseek-v2.5", "int8", RTX, 4),
    ("QW-2", "qwen2-57b", "int8", RTX, 4),
)
"""Name, shape, format, machine, and experts that section 6.3 defers."""
PROMPTS = (32, 512, 2048, 8192)


def cells() -> list[Cell]:
    """All of them."""
    return [*_figure10(), *_figure11(), *_figure12(), *_figure14(), *_measured()]


def _figure10() -> list[Cell]:
    name = "Figure 10"
    paper = {0: None, 2: 19.0, 3: 26.0, 4: 26.0}
    before = run("deepseek-v3", "bf16", A100)
    found = [
        Cell(name, "CPU busy, none deferred", "%", 74.0, 100 * before.decode.busy("cpu")),
        Cell(name, "GPU busy, none deferred", "%", 28.0, 100 * before.decode.busy("cuda:0")),
    ]
    for defer in (2, 3, 4):
        step = run("deepseek-v3", "bf16", A100, defer=defer)
        less = 100 * (1 - step.decode.seconds / before.decode.seconds)
        found.append(Cell(name, f"{defer} deferred: less time a layer", "%", paper[defer], less))
    three = run("deepseek-v3", "bf16", A100, defer=3)
    gain = before.decode.seconds / three.decode.seconds
    found.append(Cell(name, "3 deferred: decode faster", "x", 1.33, gain))
    return found


def _figure11() -> list[Cell]:
    found = []
    for name, arch, fmt, machine, _ in MODELS:
        for tokens in PROMPTS:
            prompt = run(arch, fmt, machine, prompt=tokens, way="cpu").prompt
            told = (name, fmt, tokens) == ("DS-3", "int4", 2048)
            found.append(
                Cell(
                    "Figure 11",
                    f"{name} {fmt}, prompt of {tokens}",
                    "tok/s prompt",
                    500.0 if told else None,
                    prompt.tok_s,
                    says=ABOUT if told else "",
                )
            )
    return found


def _figure12() -> list[Cell]:
    found, gains = [], []
    for name, arch, fmt, machine, defer in MODELS:
        plain, deferring = run(arch, fmt, machine), run(arch, fmt, machine, defer=defer)
        gains.append(plain.decode.seconds / deferring.decode.seconds)
        told = 16.0 if (name, fmt) == ("DS-3", "int4") else None
        what = f"{name} {fmt}"
        found.append(Cell("Figure 12", what, "tok/s", None, plain.decode_tok_s))
        found.append(
            Cell(
                "Figure 12",
                f"{what}, {defer} deferred",
                "tok/s",
                told,
                deferring.decode_tok_s,
                says=ABOUT if told else "",
            )
        )
    found.append(Cell("Figure 12", "most that deferral gains", "x", 1.45, max(gains)))
    return found


def _figure14() -> list[Cell]:
    found, machine = [], find_machine(A100)
    assert machine.gpu is not None
    graphless = replace(machine, gpu=replace(machine.gpu, launch_us=16.0))
    numa, graph, prompts = [], [], []
    for name, arch, fmt, where, _ in MODELS[:3]:
        full = run(arch, fmt, where, prompt=8192, way="cpu")
        mixed = run(arch, fmt, where, prompt=8192, way="cpu", on=machine.interleaved())
        eager = run(arch, fmt, where, on=graphless)
        numa.append(mixed.decode.seconds / full.decode.seconds)
        prompts.append(mixed.prompt.seconds / full.prompt.seconds)
        graph.append(eager.decode.seconds / full.decode.seconds)
        figure = "Figure 14"
        found.append(Cell(figure, f"n, {name} decode: slices a socket", "x", None, numa[-1]))
        found.append(Cell(figure, f"c, {name} decode: CUDA graph", "x", None, graph[-1]))
    found += [
        Cell("Figure 14", "n, most of decode", "x", 1.63, max(numa)),
        Cell("Figure 14", "n, most of a prompt of 8192", "x", 1.22, max(prompts)),
        Cell("Figure 14", "c, most of decode", "x", 1.23, max(graph)),
        Cell("Figure 14", "v, most of decode (a kernel of ours has no such baseline)", "x", 2.22),
        Cell("Figure 14", "m, most of a prompt", "x", 3.14),
        Cell("Figure 14", "d, most of a prompt", "x", 1.83),
    ]
    return found


def _measured() -> list[Cell]:
    """The same stages of our program on a lent machine."""
    folder = RESULTS / "nvidia-h200-with-16-emeraldrapids-cores"
    rows = json.loads((folder / "2026-11-26-ablation.json").read_text())["rows"]
    found = []
    for before, after in zip(rows, rows[1:], strict=False):
        what = f"{after['stage'].lstrip('+ ')}: Qwen3-30B, 24 layers, q4_k, H200, decode"
        gain = after["tok_s"] / before["tok_s"]
        found.append(Cell("Figure 14, our stages", what, "x", measured=gain))
    return found
