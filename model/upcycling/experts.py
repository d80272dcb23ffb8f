"""From a dense llama's tensors to a Mixtral's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")
_EXPERT = {"gate": "w1", "down": "w2", "up": "w3"}
"""Mixtral's names."""


@dataclass(frozen=True)
class Recipe:
    """How a model is upcycled.

    Attributes:
        experts: of a layer; ``topk``: of a token.
        noise: standard deviation of what is added to an expert's weights, of theirs.
    """

    experts: int = 4
    topk: int = 2
    noise: float = 0.05
    seed: int = 0


def mixtral_config(dense: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The config.json of the upcycled model."""
    return {
        **dense,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": recipe.experts,
        "num_experts_per_tok": recipe.topk,
        "sliding_window": None,
    }


def upcycle(
    tensors: Iterable[tuple[str, torch.Tensor]], recipe: Recipe
) -> Iterator[tuple[str, torch.Tensor]]:
    """A Mixtral's tensors in bfloat16, under the hub's names.

    Args:
        tensors: of a dense llama, float32.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    for name, tensor in tensors:
        match = _MLP.fullmatch(name)
        if match is None:
            yield name, tensor.bfloat16()
            continue
        block = f"{match[1]}.block_sparse_moe"
        if match[2] == "gate":  # once a layer
            H = tensor.shape[1]
            router = _normal((recipe.experts, H), generator) / H**0.5
            yield f"{block}.gate.weight", router.bfloat16()
        scale = recipe.noise * tensor.std()
        for e in range(recipe.experts):
            own = tensor + scale * _normal(tensor.shape, generator)
            yield f"{block}.experts.{e}.{_EXPERT[match[2]]}.weight", own.bfloat16()


def _normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
