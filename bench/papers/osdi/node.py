"""The machine and the model of the paper, and what its program does otherwise than ours."""

from __future__ import annotations

from ..on import System
from ..sosp.told import LAUNCHES, LAYERS

NODE, ARCH, FMT = "osdi26-5090", "deepseek-v3", "fp8"
ENGINE = System(LAUNCHES["llama.cpp"][0] / LAYERS)
"""Attention of a layer takes 350 us of its GPU (section 3.3.1): what 3,000 launches a token take,
which SOSP 2025 counts for a program of fused kernels, beside reading the weights."""
