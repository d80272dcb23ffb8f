"""Which experts each token used, by transformers' own routers; and ours, to be compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from runtime.engine import Completion, RoutedExperts


def of_transformers(lm: Any, tokens: list[int]) -> np.ndarray:
    """[T, L, E]: what each layer multiplies each expert's output by."""
    found: list[torch.Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        _, ids, weights = (*args, *kwargs.values())
        found.append(torch.zeros(len(ids), 8).scatter(1, ids, weights.float()))

    blocks = [layer.mlp.experts for layer in lm.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        lm(torch.tensor([tokens]))
    for one in hooks:
        one.remove()
    return torch.stack(found, 1).numpy()


def spread(routed: RoutedExperts) -> np.ndarray:
    """[N, L, E]"""
    found = np.zeros((*routed.ids.shape[:2], 8), np.float32)
    np.put_along_axis(found, routed.ids.astype(np.int64), routed.weights, 2)
    return found


def check_routed(pairs: Iterable[tuple[Completion, np.ndarray]]) -> None:
    """Each has the experts of all tokens that were computed: those behind the cached ones.

    Args:
        pairs: an output, and ``of_transformers`` of its prompt and its tokens, with the last one,
            which was only drawn.
    """
    same = []
    for output, truth in pairs:
        routed = output.routed_experts
        assert routed is not None and routed.first == output.stats.cached_tokens
        assert routed.first + len(routed.ids) == len(truth) - 1
        ours, theirs = spread(routed), truth[routed.first : -1]
        same.append(((ours != 0) == (theirs != 0)).all(-1))
        assert np.abs(ours - theirs)[same[-1]].max() < 0.1 * theirs.max()
    assert np.concatenate(same).mean() > 0.9  # near-ties may fall otherwise in bfloat16
