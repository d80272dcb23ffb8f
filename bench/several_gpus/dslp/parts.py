"""The parts of a run, and what its rows have in common."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.timing.rows import Row
from bench.papers.osdi_text import LAYER_TOKENS
from model.named import make_config
from runtime.engine import EngineConfig
from runtime.planning.config import ExecutionConfig
from runtime.profiling.engine_speed import EngineTimer, Load

from ...e2e.ours import Ours, spin
from ..crossing import crossed
from ..turns import Open, Part, prompt
from ..ways import Way, count_gpus, on_first
from .depth import Depth
from .prompts import CPU_MOST, Prompts
from .volume import volumes


def parts_of(
    ours: Ours,
    execution: ExecutionConfig,
    ways: Sequence[Way],
    lengths: tuple[int, ...],
    prompts: Prompts,
) -> list[Part]:
    """The parts that are timed, one after the other."""

    def opener(of: Ours, load: Load) -> Open:
        def opened(way: Way) -> EngineTimer:
            runner = of.runner(load, way.execution, prompts.budget, way.planned)
            timer = EngineTimer(runner, config=EngineConfig(**way.engine))
            spin(of.pool, "cuda")
            return timer

        return opened

    def part(of: Ours, some: Sequence[Way], tokens: Sequence[int]) -> Part:
        cases = [prompt(each, layers=of.layers) for each in tokens]
        return Part(some, cases, opener(of, Load(max(tokens), 2)), crossed)

    parts = [part(ours, ways, lengths)]
    if prompts.thin is not None:
        parts.append(part(ours.thinned(prompts.thin), ways, lengths))
    if prompts.cpu and (short := [tokens for tokens in lengths if tokens <= CPU_MOST]):
        parts.append(part(ours, [Way("CPU", on_first(execution, prefill="cpu"))], short))
    return parts


def head_of(
    ours: Ours,
    arch: str | None,
    execution: ExecutionConfig,
    lengths: tuple[int, ...],
    thin: int | None,
) -> Row:
    """What rows have in common; of a part of a known shape also what the whole of it has."""
    whole = ours.layers
    if arch is not None:
        whole = max(whole, make_config(arch).num_hidden_layers)
    timed = dict.fromkeys((ours.layers, thin or ours.layers))
    depth = Depth.of(ours.decoder.layers, whole, tuple(timed))
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
