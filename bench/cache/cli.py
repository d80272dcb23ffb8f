"""`pykernels bench cache`: hits of an expert cache by policy and size, and its gain on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from model.cli.shared.common import Debug, command, err
from model.cli.shared.execution import settled
from model.cli.shared.options import Choose
from model.extras import check_plot
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from ..e2e.cli import check_gpu, open_model
from ..e2e.model_options import ModelOptions, count
from ..harness.keeping.kept import AsJson, Save, keeping

if TYPE_CHECKING:
    from runtime.experts.cache.simulate import Recording

    from ..e2e.ours import Ours


_EXECUTION = Choose(
    only=("device", "prefill", "threads", "kernel"),
    help={"device": "cuda:0: also time the engine with such caches."},
)


@command
def cache(
    chosen: Annotated[ModelOptions, Choose(but=("activations", "experts"))],
    execution: Annotated[ExecutionConfig, _EXECUTION],
    shares: Annotated[
        str, typer.Option(metavar="P,P", help="Slots of a layer, in % of its experts.")
    ] = "10,25,50",
    texts: Annotated[int, count("Sequences that are recorded.")] = 8,
    prompt: Annotated[int, count("Tokens of each that are read at once.")] = 256,
    tokens: Annotated[int, count("Tokens of each behind that, decoded one by one.")] = 256,
    lengths: Annotated[
        str, typer.Option(metavar="N,M", help="With a GPU: tokens of the prompts.")
    ] = "512",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Hits and speeds, drawn.")
    ] = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What slots for experts on a GPU would hit, by policy and size: recorded choices of the
    model's routers, run through the engine's own cache.

    The embedded model and checkpoints read files of Python's library, models of random weights
    random tokens. With --device cuda:0 the engine is timed with such caches, too.
    """
    chosen.check()
    check_plot(plot)
    sizes = [number / 100 for number in _numbers("shares", shares, 99)]
    prompts = _numbers("lengths", lengths)
    check_gpu(execution)
    execution = settled(execution)
    from runtime.experts.cache import CachePolicy

    from .run import SWAPS, OnGpu, simulated, simulated_plan, slots_of

    with (
        keeping("cache", save, as_json, plot) as kept,
        err().status("", spinner_style="dim") as status,
    ):
        status.update(chosen.doing)
        ours = open_model(chosen, execution, settings="--prompt, --tokens or --lengths")
        try:
            status.update("recording what routers choose …")
            recordings = [*_recorded(ours, chosen, (texts, prompt, tokens), execution)]
            experts = _experts_of(ours)
            slots = slots_of(sizes, experts)
            status.update("simulating …")
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "experts": experts,
                "topk": int(recordings[0].ids.shape[2]),
                "threads": ours.pool.threads,
                "device": execution.device,
                "texts": texts,
                "prompt": prompt,
                "tokens": tokens,
            }
            policies = [CachePolicy(swaps=0), CachePolicy(), CachePolicy("lru-fixed", 2)]
            on_gpu = OnGpu(replace(execution, experts="cpu"), prompts, tokens)
            kept.plan = simulated_plan(slots, SWAPS)
            kept.plan += on_gpu.plan(slots, policies) if execution.on_gpu else []
            for row in simulated(recordings, experts, slots, SWAPS):
                kept.add(row)
            if execution.on_gpu:
                step = lambda name: status.update(f"{name} …")  # noqa: E731
                for row in on_gpu.rows(ours, experts, slots, policies, step):
                    kept.add(row)
        finally:
            ours.close()


def _recorded(
    ours: Ours,
    chosen: ModelOptions,
    sizes: tuple[int, int, int],
    execution: ExecutionConfig,
) -> Iterator[Recording]:
    from .record import random_texts, record, source_texts

    count, prompt, tokens = sizes
    if chosen.arch is not None:
        texts = random_texts(ours.decoder.vocab_size, count, prompt + tokens)
    else:
        import model as package

        texts = source_texts(chosen.model or package.EMBEDDED, count, prompt + tokens)
    return record(ours, texts, prompt, replace(execution, device="cpu", prefill="auto"))


def _experts_of(ours: Ours) -> int:
    from runtime.passes.layers import moe_layers

    program = ours.decoder.lower()
    return max(program.weight(layer.experts, "experts").shape[0] for layer in moe_layers(program))


def _numbers(option: str, text: str, most: int = 1 << 20) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= most for word in words):
        raise PykernelsError(f"--{option} {text}", f"Give numbers from 1 to {most}, such as 10,25")
    return tuple(map(int, words))
