"""Figures 3, 13 and 14: prompts whose experts are streamed to one GPU, and to two."""

from __future__ import annotations

import json
from typing import Any

from runtime.devices.sim.terms import PEER

from .. import osdi_text as told
from ..cells import ABOUT, LESS, MORE, Cell, file_of
from ..on import run, streamed
from ..rows import RESULTS
from .node import ARCH, FMT, NODE

LENGTHS = (4096, 8192, 16384, 20480, 24576, 32768, 45056, 65536)
SHORT = (256, 1024, 2048, 4096)
"""Of prompts whose experts the CPU computes."""
GPUS = {1: "SLP", 2: "DSLP"}
FILE = (
    RESULTS
    / "2-nvidia-h200-with-32-emeraldrapids-cores"
    / "2026-11-28-dslp-deepseek-v3-8-layers-fp8.json"
)


def _seconds(tokens: int, gpus: int) -> float:
    return streamed(ARCH, FMT, NODE, tokens, gpus=gpus).seconds


def figure13() -> list[Cell]:
    """Tokens a second."""
    figure, unit, found = "Figure 13", "tok/s prompt", []
    speeds = {gpus: {T: T / _seconds(T, gpus) for T in LENGTHS} for gpus in GPUS}
    cpu = run(ARCH, FMT, NODE, prompt=8192, way="cpu").prompt
    found.append(Cell(figure, "AVX, 8192 tokens", unit, None, cpu.tok_s))
    for gpus, name in GPUS.items():
        for tokens, speed in speeds[gpus].items():
            found.append(Cell(figure, f"{name}, {tokens} tokens", unit, None, speed))
    most = {gpus: max(each.values()) for gpus, each in speeds.items()}
    found += [
        Cell(figure, "SLP, the most", unit, told.SLP_MOST_TOK_S, most[1], says=ABOUT),
        Cell(figure, "DSLP, the most", unit, told.DSLP_MOST_TOK_S, most[2], says=MORE),
    ]
    for tokens in (20480, 32768):
        gain = speeds[2][tokens] / speeds[1][tokens]
        found.append(Cell(figure, f"DSLP over SLP, {tokens} tokens", "x", told.DSLP_OVER_SLP, gain))
    slow = run(ARCH, FMT, NODE, prompt=20480, way="cpu").prompt
    gain = speeds[1][20480] / slow.tok_s
    found.append(
        Cell(figure, "SLP over AVX, 20480 tokens", "x", told.SLP_OVER_AVX, gain, says=MORE)
    )
    for row in _measured():
        if row["gpus"] == 2:
            what = f"two H200, {row['layers']} layers: two GPUs over one, {row['tokens']} tokens"
            one, two = (_there(row | {"gpus": gpus}) for gpus in (1, 2))
            ours = one / two if one and two else None
            gain = row["x_first"]
            found.append(Cell(figure, what, "x", None, ours, gain, file=file_of(FILE)))
    return found


def figure14() -> list[Cell]:
    """Seconds to the first token."""
    figure, found = "Figure 14", []
    for tokens in SHORT:
        prompt = run(ARCH, FMT, NODE, prompt=tokens, way="cpu").prompt
        found.append(Cell(figure, f"AVX, {tokens} tokens", "s", None, prompt.seconds))
    for gpus, name in GPUS.items():
        for tokens in LENGTHS:
            known = tokens == (32768, 45056)[gpus - 1]
            limit = told.TTFT_LIMIT_S if known else None
            seconds = _seconds(tokens, gpus)
            says = LESS if known else ""
            found.append(Cell(figure, f"{name}, {tokens} tokens", "s", limit, seconds, says=says))
    for gpus, name in GPUS.items():
        what = f"{name}: tokens within {told.TTFT_LIMIT_S:.0f} s"
        most = told.WITHIN_LIMIT[gpus]
        found.append(Cell(figure, what, "tokens", most, _within(gpus), says=ABOUT))
    for row in _measured():
        what = f"two H200, {row['layers']} layers: {row['way']}, {row['tokens']} tokens"
        found.append(Cell(figure, what, "s", None, _there(row), row["seconds"], file=file_of(FILE)))
    return found


def _there(row: dict[str, Any]) -> float | None:
    """A measured prompt, simulated on its own machine; None: it had several steps."""
    gpus, layers, tokens = row["gpus"], row["layers"], row["tokens"]
    if row["steps"] > 1:
        return None
    return streamed(ARCH, FMT, "h200-x2-32-cores", tokens, gpus=gpus, layers=layers).seconds


def _within(gpus: int) -> float:
    """The longest prompt, in steps of 1,024 tokens, whose first token comes in time."""
    low, high = 8, 80
    while high - low > 1:
        middle = (low + high) // 2
        fits = _seconds(1024 * middle, gpus) <= told.TTFT_LIMIT_S
        low, high = (middle, high) if fits else (low, middle)
    return 1024.0 * low


def figure3() -> list[Cell]:
    """A layer's time on two GPUs, by how they share experts."""
    figure, tokens = "Figure 3", told.LAYER_TOKENS // 1024 * 1024 + 1024
    one = streamed(ARCH, FMT, NODE, tokens)
    two = {
        form: streamed(ARCH, FMT, NODE, tokens, gpus=2, exchange=form)
        for form in ("all_to_all", "small_ep")
    }
    standard, small = two["all_to_all"], two["small_ep"]
    sent = {form: step.bounds[PEER] / step.seconds for form, step in two.items()}
    layers = 61
    found = [
        Cell(figure, f"{name}, {tokens} tokens", "ms a layer", None, 1e3 * step.seconds / layers)
        for name, step in (("one GPU", one), ("CP2+EP2", standard), ("CP2+SmallEP2", small))
    ]
    found += [
        Cell(
            figure, "CP2+EP2 over one GPU", "x", told.EP_LAYER_TIME, standard.seconds / one.seconds
        ),
        Cell(
            figure,
            "CP2+SmallEP2 over CP2+EP2",
            "x",
            told.SMALL_EP_OVER_EP,
            small.seconds / standard.seconds,
        ),
        Cell(
            figure,
            "CP2+EP2: sent, of a layer's time",
            "%",
            100 * told.EP_SHARE_SENT,
            100 * sent["all_to_all"],
        ),
        Cell(figure, "CP2+SmallEP2: sent, of a layer's time", "%", None, 100 * sent["small_ep"]),
    ]
    near = [row for row in _measured() if row["tokens"] == tokens]
    layers = max(row["layers"] for row in near)
    rows = {row["gpus"]: row for row in near if row["layers"] == layers}
    what = f"two H200, {layers} layers, {tokens} tokens: SmallEP on two GPUs over one"
    share = rows[2]["seconds"] / rows[1]["seconds"]
    paper = told.EP_LAYER_TIME * told.SMALL_EP_OVER_EP  # no value of its own: it counts above
    ours = small.seconds / one.seconds
    found.append(Cell(figure, "CP2+SmallEP2 over one GPU", "x", None, ours))
    found.append(Cell(figure, what, "x", paper, measured=share, file=file_of(FILE)))
    sizes = {each["form"]: each["bytes"] for each in json.loads(FILE.read_text())["volumes"]}
    what = "bytes of SmallEP over standard EP, in our programs"
    ratio = sizes["small_ep"] / sizes["all_to_all"]
    found.append(
        Cell(
            figure,
            what,
            "x",
            told.SMALL_EP_BYTES,
            measured=ratio,
            says=ABOUT,
            file=file_of(FILE),
        )
    )
    return found


def _measured() -> list[dict[str, Any]]:
    return list(json.loads(FILE.read_text())["rows"])
