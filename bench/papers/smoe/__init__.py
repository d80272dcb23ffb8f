"""SMOE: figures 3, 5, 6 and 10 to 14, and table I."""

from __future__ import annotations

from ..cells import FIT, Cell
from .choices import figure5, figure6
from .prefetch import figure3, figure12, figure13, figure14, table1
from .prompts import figures

TITLE = "SMOE: dynamic expert caching"
ABOUT_IT = (
    "One efficiency is taken from the paper: the share of main memory's rate that ten cores reach,"
    " so that KTransformers decodes DeepSeek-V3 at 3.16 tok/s, the mean of table I."
    f" {FIT} Our program plays KTransformers (experts on the CPU) and SMOE (Algorithm 1 in prompts,"
    " with as many experts on the GPU as balance it; eight slots a layer, some of them filled anew"
    " in every step), both without a CUDA graph and with 7,000 launches of 16 us a token, which"
    " SOSP 2025 counts for PyTorch's modules. The link has the 14 GB/s that figure 12 saw. How"
    " uneven choices are, and how often a predictor is right, is measured of our embedded model,"
    " whose 32 experts are 6 a token.",
    "",
    "Figures 5 and 6 are of what the embedded model's routers chose"
    " ([routing.json](routing.json), `python -m bench.papers routing`):",
    "",
    "![smoe-routing.png](smoe-routing.png)",
)
UNEXPLAINED = (
    "Figure 10: KTransformers' own prompts are only drawn. Here its ten cores compute as fast as"
    " those of Zen 2, by core. Qwen3's experts are small, and what SMOE takes for each beside the"
    " link's time is not told.",
    "Figure 12: the GPU counts as busy here while Python launches for it, and not while it waits"
    " for the CPU; how the paper counts is not told.",
    "Table I: the embedded model's next experts are predicted more often than the paper's gains"
    " suggest for larger models. HybriMoE and SMOE-Flex are not simulated.",
)


def cells() -> list[Cell]:
    """All of them."""
    parts = table1, figure3, figure5, figure6, figures, figure12, figure13, figure14
    return [cell for part in parts for cell in part()]
