"""The sizes of experts of SMOE's models."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from model.inspection.subject import open_subject
from runtime.passes.layers import moe_layers

from . import told


@dataclass(frozen=True)
class Experts:
    """Says how many layers have experts, how many each layer and each token has, and how many
    numbers and bytes one takes."""

    layers: int
    E: int
    topk: int
    numbers: int
    nbytes: int


@functools.lru_cache(maxsize=4)
def experts_of(model: str) -> Experts:
    """Returns those of DeepSeek-V3 or Qwen3-235B."""
    program = open_subject(told.MODELS[model], told.FMT).decoder.lower()
    layers = moe_layers(program)
    spec = program.weight(layers[-1].experts, "experts")
    E, H, I = spec.shape  # noqa: E741
    return Experts(len(layers), E, layers[-1].topk, 3 * H * I, spec.bytes_per_expert)
