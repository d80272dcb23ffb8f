"""Which experts the engine has on a GPU beside those of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pykernels.errors import PykernelsError
from runtime.devices.cuda.capacity import Sizes, room_for_experts
from runtime.devices.cuda.gpus import gpus_of
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
    sizes: Sizes,
    experts: str,
    placed: Mapping[str, str] = MappingProxyType({}),
    by_layer: Mapping[int, str] | None = None,
) -> Placement:
    """``place_on``, and which experts the GPUs are to have besides.

    Args:
        asked: see ``choose``; None or 0: none.
        device: one GPU or several, as ``gpus_of`` reads them.
        sizes: of the largest step, arguments of ``lower``.
        experts: "auto", "cpu" or "gpu"; "auto" with a number or a profile is "cpu".
        placed, by_layer: as ``placement.place``.

    Raises:
        PykernelsError: as ``experts_beside``; some experts beside all of them.
    """
    gpus, rules = gpus_of(device), (placed, by_layer)
    if not asked:
        return place_on(gpus, model, sizes[3], experts, *rules)
    if experts == "gpu":
        raise PykernelsError("some experts on the GPU beside all of them", "Give one of both")
    placement = place_on(gpus, model, sizes[3], experts if asked == "auto" else CPU, *rules)
    if placement.experts != CPU:  # all fit
        return placement
    room = room_for_experts(model, gpus, sizes, placement)
    chosen = experts_beside(asked, model.lower(*sizes), placement, room)
    return replace(placement, cached=chosen)


def experts_beside(
    asked: int | str | Profile, program: Program, placement: Placement, room: Mapping[str, int]
) -> dict[int, tuple[int, ...]]:
    """By layer, the experts that its GPU is to have; layers without any are left out.

    Args:
        asked: see ``choose``.
        program: any of the model's; no weight is read.
        placement: of its layers.
        room: bytes of each GPU that they may take.

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
        gpu = placement.by_layer.get(node.layer, placement.device)
        blocks[name] = Block(spec.shape[0], gpu_bytes(spec.some([0])), gpu)
    if not blocks:
        raise PykernelsError(f"{program.name!r} has no routed experts", "Leave out gpu_experts")
    if isinstance(asked, Profile):
        counts = {_block(name): row for name, row in asked.counts.items()}
        asked = asked.model_copy(update={"counts": counts})
    chosen = choose(asked, blocks, room)
    if asked and not any(chosen.values()):
        warnings.warn(
            f"{', '.join(room)}: no room for experts beside the rest, all of them are on the CPU",
            stacklevel=3,
        )
    return {layers[name]: tuple(experts) for name, experts in chosen.items() if experts}


def _block(name: str) -> str:
    """The name of a layer's MLP, of that of its experts."""
    return name.removesuffix(".experts")
