"""SMOE: figure 10 and table I."""

from __future__ import annotations

from .cells import FIT, LESS, Cell
from .on import run

TITLE = "SMOE: dynamic expert caching"
ABOUT_IT = (
    "One efficiency is taken from the paper: the share of main memory's rate that"
    " ten cores reach, so"
    " that KTransformers decodes DeepSeek-V3 at 3.16 tok/s, the mean of table I."
    f" {FIT} Our program plays"
    " KTransformers (experts on the CPU), and SMOE (its split prompts; eight slots a layer).",
)
NODE = "smoe-4090"


def cells() -> list[Cell]:
    """All of them."""
    found = []
    for name, arch, ktrans, smoe, most in (
        ("DeepSeek-V3", "deepseek-v3", 3.163, 3.461, 8.68),
        ("Qwen3-235B", "qwen3-235b", 2.916, 3.160, 7.0),
    ):
        plain = run(arch, "q4_k", NODE)
        slots = run(arch, "q4_k", NODE, slots=8)
        found += [
            Cell(
                "Table I", f"{name}, experts on the CPU, mean", "tok/s", ktrans, plain.decode_tok_s
            ),
            Cell("Table I", f"{name}, 8 slots a layer, mean", "tok/s", smoe, slots.decode_tok_s),
        ]
        gains = []
        for tokens in (512, 1024, 2048, 4096, 8192):
            cpu = run(arch, "q4_k", NODE, prompt=tokens, way="cpu").prompt
            split = run(arch, "q4_k", NODE, prompt=tokens, way="auto").prompt
            gains.append(cpu.seconds / split.seconds)
            found.append(Cell("Figure 10", f"{name}, {tokens} tokens, CPU", "s", None, cpu.seconds))
            what = f"{name}, {tokens} tokens, {split.way or 'cpu'}"
            found.append(Cell("Figure 10", what, "s", None, split.seconds))
        found.append(
            Cell("Figure 10", f"{name}, most gained over the CPU", "x", most, max(gains), says=LESS)
        )
    return found
