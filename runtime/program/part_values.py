"""What a part of a weight has of a stored tensor: some of its rows, in an order, and changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .weight_spec import Part

CHANGES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    # The weight of a norm that is stored without its 1.
    "plus one": lambda x: x.float() + 1,
    # A decay's rate, of which the logarithm is stored.
    "minus exp": lambda x: -x.float().exp(),
    # A convolution's, a row for each place of its window: [C, 1, K] -> [K, C].
    "by places": lambda x: x.flatten(1).T,
}
"""What becomes of stored numbers while they are loaded, by ``Part.change``."""


def taken(values: torch.Tensor, part: Part) -> torch.Tensor:
    """The rows of a stored tensor that a part takes, in their order."""
    if not part.rows:
        return values
    return torch.cat([values[first:last] for first, last in part.rows])


def part_values(values: torch.Tensor, part: Part) -> torch.Tensor:
    """What a part has of a stored tensor, in the shape and the order of the weight."""
    values = CHANGES[part.change](taken(values, part))
    return (values.T if part.transposed else values).reshape(part.shape).contiguous()


def stored_shape(part: Part) -> tuple[int, ...]:
    """The shape of the tensor that a part is all of."""
    if part.change == "by places":
        K, C = part.shape
        return C, 1, K
    return part.shape
