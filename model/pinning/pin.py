"""Pins experts of an injected model on its GPUs, as many as their free memory holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pykernels.errors import PykernelsError

from ..checkpoint.plan import Experts, Plan
from ..modules.moe import FusedMoE
from ..modules.pinned import Formats, PinnedExperts
from ..modules.placement import Placement
from .choose import Block, Wanted, choose, parse

SPARE = 2 << 30
"""Bytes of a GPU that are left for activations, the KV cache and what kernels need."""


def pin(
    model: nn.Module, plan: Plan, placement: Placement, wanted: Wanted, needs: Mapping[str, int]
) -> None:
    """Tells each block of a planned model which of its experts it gets on its device.

    Args:
        needs: bytes that the rest of the model takes on each device.

    Raises:
        PykernelsError: no GPU to pin them on, or as ``choose``.
    """
    asked = parse(wanted)
    if asked is None or asked == 0:
        return
    found: dict[str, tuple[FusedMoE, Formats]] = {}
    for item in plan.items:
        module = model.get_submodule(item.name) if isinstance(item, Experts) else None
        if isinstance(item, Experts) and isinstance(module, FusedMoE):
            found[item.name] = module, item.packed(module)
    devices = {name: placement.of(name) for name in found}
    if not found or "cpu" in devices.values():
        raise PykernelsError(
            "Experts can be kept on a GPU only where the layer is on one",
            "Add --device cuda:0, or leave out --gpu-experts",
        )
    blocks = {
        name: Block(module.shape.E, PinnedExperts.size(module.shape, fmt), devices[name])
        for name, (module, fmt) in found.items()
    }
    free = {
        device: torch.cuda.mem_get_info(device)[0] - needs.get(device, 0) - SPARE
        for device in {*devices.values()}
    }
    for name, experts in choose(asked, blocks, free).items():
        module, fmt = found[name]
        if experts:
            module.pinned = PinnedExperts(module.shape, experts, fmt, devices[name])
