"""Which experts the engine has on a GPU beside those of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pykernels.errors import PykernelsError
from runtime.devices.cuda.capacity import room_for_experts
from runtime.devices.cuda.runner import place_on
from runtime.devices.cuda.weights import gpu_bytes
from runtime.devices.runner import Lowerable
from runtime.passes.layers import moe_layers
from runtime.placement import CPU, Placement
from runtime.program import Program

from .choose import Block, choose
from .profile import Profile


def place_beside(
    asked: int | str | Profile | None,
    model: Lowerable,
    device: str,
    sizes: tuple[int, int, int, int, int],
    experts: str,
    placed: Mapping[str, str] = MappingProxyType({}),
) -> Placement:
    """``place_on``, and which experts the GPU is to have besides.

    Args:
        asked: see ``choose``; None or 0: none.
        sizes: of the largest step, arguments of ``lower``.
        placed: weights that rules place on another device, by name.
        experts: "auto", "cpu" or "gpu"; "auto" with a number or a profile is "cpu".

    Raises:
        PykernelsError: as ``experts_beside``; some experts beside all of them.
    """
    if not asked:
        return place_on(device, model, sizes[3], experts, placed)
    if experts == "gpu":
        raise PykernelsError("some experts on the GPU beside all of them", "Give one of both")
    placement = place_on(device, model, sizes[3], experts if asked == "auto" else CPU, placed)
    if placement.experts != CPU:  # all fit
        return placement
    room = room_for_experts(device, model, sizes, placement)
    chosen = experts_beside(asked, model.lower(*sizes), device, room)
    return replace(placement, cached=chosen)


def experts_beside(
    asked: int | str | Profile, program: Program, device: str, room: int
) -> dict[int, tuple[int, ...]]:
    """By layer, the experts that a GPU is to have; layers without any are left out.

    Args:
        asked: see ``choose``.
        program: any of the model's; no weight is read.
        room: bytes of the GPU that they may take.

    Raises:
        PykernelsError: no routed experts, or none that a GPU computes alike; as ``choose``.
    """
    layers, blocks = dict[str, int](), dict[str, Block]()
    for layer in moe_layers(program):
        node = layer.experts
        if (activations := node.attr("activations")) != "bf16":
            raise PykernelsError(
                f"{node.name} has {activations} activations, which the GPU's kernels do not take",
                "Take activations out of the rule, or leave out gpu_experts",
            )
        spec = program.weight(node, "experts")
        name = _block(spec.name)
        assert node.layer is not None
        layers[name] = node.layer
        blocks[name] = Block(spec.shape[0], gpu_bytes(spec.some([0])), device)
    if not blocks:
        raise PykernelsError(f"{program.name!r} has no routed experts", "Leave out gpu_experts")
    if isinstance(asked, Profile):
        counts = {_block(name): row for name, row in asked.counts.items()}
        asked = asked.model_copy(update={"counts": counts})
    chosen = choose(asked, blocks, {device: room})
    if asked and not any(chosen.values()):
        warnings.warn(
            f"{device} has room for no experts beside the rest: all of them are on the CPU",
            stacklevel=3,
        )
    return {layers[name]: tuple(experts) for name, experts in chosen.items() if experts}


def _block(name: str) -> str:
    """The name of a layer's MLP, of that of its experts."""
    return name.removesuffix(".experts")
