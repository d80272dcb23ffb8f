"""Where a decoder's nodes and experts are to be, as a configuration asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runtime.passes.on_ref import REF
from runtime.planning.config import ExecutionConfig
from runtime.planning.placement import CPU, Placement
from runtime.program.sizes import StepSizes
from runtime.runner.paged_runner import Lowerable

from .choose import parse


def placement_of(
    config: ExecutionConfig,
    model: Lowerable,
    sizes: StepSizes,
    placed: Mapping[str, str] = MappingProxyType({}),
    by_layer: Mapping[int, str] | None = None,
) -> Placement:
    """The placement, before a weight is read.

    Args:
        sizes: of the largest step.
        placed, by_layer: what rules say, see ``placement.place``.

    Raises:
        PykernelsError: as ``place_hybrid``.
    """
    if config.on_gpu:
        from .hybrid import place_hybrid

        return place_hybrid(
            parse(config.gpu_experts),
            model,
            config.device,
            sizes,
            config.experts,
            placed,
            by_layer,
            cache=config.slots,
            prefill=config.prefill,
            dense=config.dense_gib,
            kv=config.kv_gpu_gib,
            gpu_gib=config.gpu_gib,
            gpus=config.gpus,
        )
    if config.device != REF:
        return Placement()
    placement = Placement(REF, CPU if config.experts == CPU else REF)
    if not config.slots:
        return placement
    from .hybrid import with_slots

    return with_slots(placement, model, config.slots)
