"""Figures 11 and 12: prompts and decoding of three models."""

from __future__ import annotations

from ..cells import ABOUT, Cell
from ..on import run
from . import told

PROMPTS = (32, 512, 2048, 8192)


def figure11() -> list[Cell]:
    """Prompts, all experts on the CPU."""
    found = []
    for name, arch, fmt, machine, _ in told.MODELS:
        for tokens in PROMPTS:
            prompt = run(arch, fmt, machine, system=told.KT, prompt=tokens, way="cpu").prompt
            known = (name, fmt, tokens) == ("DS-3", "int4", 2048)
            found.append(
                Cell(
                    "Figure 11",
                    f"{name} {fmt}, prompt of {tokens}",
                    "tok/s prompt",
                    told.INT4_PROMPT_TOK_S if known else None,
                    prompt.tok_s,
                    says=ABOUT if known else "",
                )
            )
    return found


def figure12() -> list[Cell]:
    """Decoding, without and with deferral."""
    paper = {("DS-3", "bf16", 0): told.BF16_TOK_S, ("DS-3", "int4", 6): told.INT4_TOK_S}
    found, gains = [], []
    for name, arch, fmt, machine, most in told.MODELS:
        speeds = []
        for defer in (0, most):
            speed = run(arch, fmt, machine, system=told.KT, defer=defer).decode_tok_s
            speeds.append(speed)
            what = f"{name} {fmt}" + (f", {defer} deferred" if defer else "")
            value = paper.get((name, fmt, defer))
            given = (name, fmt, defer) == ("DS-3", "bf16", 0)
            says = ABOUT if value and not given else ""
            found.append(Cell("Figure 12", what, "tok/s", value, speed, says=says, given=given))
        gains.append(speeds[1] / speeds[0])
    most_gained = Cell(
        "Figure 12", "most that deferral gains", "x", told.MOST_DEFERRED_GAIN, max(gains)
    )
    return [*found, most_gained]
