"""Cloud-grade SLOs on local machines (OSDI 2026): figures 3 and 13 to 18, and table 1."""

from __future__ import annotations

from ..cells import FIT, Cell
from .concurrent import figure18
from .decode import figure15, figure16, figure17
from .kernels import table1
from .prompts import figure3, figure13, figure14

TITLE = "Cloud-grade SLOs for local MoE inference (OSDI 2026)"
ABOUT_IT = (
    "One efficiency is taken from the paper: the share of main memory's rate that experts reach, of"
    " the 450 us that those of a layer take (section 3.3.1)."
    f" {FIT} DeepSeek-R1 has DeepSeek-V3's shapes. Our program plays the paper's: its own kernels a"
    " layer on the GPU are as many as llama.cpp's are by SOSP 2025, 3,000 a token; a prompt is one"
    " step, since the paper keeps the experts of one layer on the GPU and loads dense weights as it"
    " goes; two GPUs have stripes of the tokens and half of the experts each, and send through main"
    " memory, over the links that bring experts. A prompt beside decoding takes its part of main"
    " memory.",
)
UNEXPLAINED = (
    "Figure 18: 1P+2D delays the prompt by 18 % in the paper; at the rates that it gives, memory of"
    " 1,100 GB/s serves both, so that nothing waits here.",
    "Figure 16: the paper's gains beyond a batch of two are smaller than bytes and operations make"
    " them.",
    "Figure 13: SLP's most is at 20,000 tokens here, where the link and the GPU take as long as"
    " each other and overlap without a gap.",
    "Figure 13: the paper's prompts on the CPU take two and a half times as long as kernels of many"
    " rows would on its cores.",
    "Figures 13 and 14: four of our layers on an H200, of which one has experts, take twice as"
    " long as simulated: attention and dense layers of 20,480 tokens are slower than the GPU's"
    " rates say. Each layer more takes 193 ms, as long as its experts over the link.",
    "Table 1: OpenBLAS reaches less of two sockets' memory than NumPy's of two cores' here.",
)


def cells() -> list[Cell]:
    """All of them."""
    parts = figure3, figure13, figure14, figure15, figure16, figure17, figure18, table1
    return [cell for part in parts for cell in part()]
