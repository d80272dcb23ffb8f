"""KTransformers (SOSP 2025): figures 3, 4, 7, 10, 11, 12 and 14, and table 2."""

from __future__ import annotations

from ..cells import FIT, Cell
from .accuracy import table2
from .deferral import figure10
from .kernels import figure3, figure4, figure7
from .speeds import figure11, figure12
from .stages import figure14

TITLE = "KTransformers (SOSP 2025)"
ABOUT_IT = (
    "One efficiency is taken from the paper: the share of main memory's rate that its experts"
    " reach, from 5.87 tok/s of DeepSeek-V3 in BF16, in which the CPU is busy for 74 %. Memories"
    f" and links have their published rates. {FIT} Our program plays KTransformers' with as many"
    " kernels a layer on the GPU as figure 4 counts for PyTorch's modules, 7,000 a token, since it"
    " injects modules into the same model. Without slices a socket, all cores read a layer's"
    " experts where they were first written, in one socket's memory, as section 2.3 has it for"
    " Fiddler (two sockets are 16 % faster than one). How unevenly prompts choose experts is measured of our"
    " embedded model. The caption of figure 14 has the letters v, m, d, n and c.",
)
UNEXPLAINED = (
    "CUDA graph (c): with 7,000 launches of 16 us a graph would gain more than the paper says; with"
    " llama.cpp's 3,000 it would gain 1.33 at most, but then the GPU is busy for less, and deferral"
    " saves half of what figure 10 has. KTransformers' own number is not published.",
    "AVX-512 experts over PyTorch's (v): 5.8 ms a layer, which section 2.3 measured of DeepSeek-V3,"
    " are 1.3 times what the kernel takes at the same memory's rate, so that Fiddler's time beside"
    " the experts must shrink too, which the text does not say; the smaller models' is not told.",
    "Deferral's gain is largest where GPU and CPU take as long as each other, so that an error of"
    " either one shows there twice.",
    "Table 2's scores are of models of 57 to 671 billion parameters, ours of one of ten million: it"
    " has the same form, and no more.",
)


def cells() -> list[Cell]:
    """All of them."""
    parts = figure3, figure4, figure7, figure10, figure11, figure12, table2, figure14
    return [cell for part in parts for cell in part()]
