"""The inputs of ranks that share a step's tokens, copied from those of the step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..passes.shard.stripes import deal


def deal_inputs(
    whole: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    ranks: int,
    sizes: tuple[int, int, int],
    room: int,
) -> None:
    """Writes the inputs of all ranks' programs.

    Args:
        whole: by name, those of a step of T tokens, S sequences and R rows of logits, which are its
            ``sizes``.
        own: by name, those of the ranks, as far as their programs have them.
        room: places of each rank.
    """
    step = {name: value.numpy() for name, value in whole.items() if value.dtype == torch.int64}
    deal(step, ranks, *sizes, room, {name: value.numpy() for name, value in own.items()})
