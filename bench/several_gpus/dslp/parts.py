"""The parts of a run, and what its rows have in common."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.timing.rows import Row
from bench.papers.osdi_text import LAYER_TOKENS
from model.named import make_config
from runtime.planning.config import ExecutionConfig
from runtime.profiling.engine_speed import EngineTimer, Load

from ...e2e.ours import Ours, spin
from ..ways import Way, count_gpus, on_first
from .depth import Depth
from .prompts import CPU_MOST, Prompts
from .run import Open, Part
from .volume import volumes


def parts_of(
    ours: Ours,
    execution: ExecutionConfig,
    ways: Sequence[Way],
    lengths: tuple[int, ...],
    prompts: Prompts,
) -> list[Part]:
    """What is timed, one part after the other."""

    def opener(of: Ours, load: Load) -> Open:
        def opened(way: Way) -> EngineTimer:
            timer = of.timer(load, way.execution, prompts.budget)
            spin(of.pool, "cuda")
            return timer

        return opened

    load = Load(max(lengths), 2)
    parts = [Part(ways, lengths, ours.layers, opener(ours, load))]
    if prompts.thin is not None:
        thin = ours.thinned(prompts.thin)
        parts.append(Part(ways, lengths, thin.layers, opener(thin, load)))
    short = tuple(tokens for tokens in lengths if tokens <= CPU_MOST)
    if prompts.cpu and short:
        cpu = Way("CPU", on_first(execution, prefill="cpu"))
        parts.append(Part([cpu], short, ours.layers, opener(ours, Load(max(short), 2))))
    return parts


def head_of(
    ours: Ours,
    arch: str | None,
    execution: ExecutionConfig,
    lengths: tuple[int, ...],
    timed: Sequence[int],
) -> Row:
    """What rows have in common; of a part of a known shape also what the whole of it has."""
    whole = ours.layers
    if arch is not None:
        whole = max(whole, make_config(arch).num_hidden_layers)
    depth = Depth.of(ours.decoder.layers, whole, tuple(dict.fromkeys(timed)))
    of_layer = min(lengths, key=lambda tokens: abs(tokens - LAYER_TOKENS))
    return {
        "model": ours.name,
        "format": ours.fmt,
        "layers": ours.layers,
        "threads": ours.pool.threads,
        "device": execution.device,
        "kv_dtype": execution.kv_dtype,
        "depth": {
            "moe": {str(layers): count for layers, count in depth.moe.items()},
            "whole": depth.whole,
            "whole_moe": depth.whole_moe,
        },
        "volumes": volumes(ours.decoder, of_layer, count_gpus(execution.device)),
    }
