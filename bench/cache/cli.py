"""`pykernels bench cache`: hits of an expert cache by policy and size, and its gain on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from model.cli.shared.common import Debug, Kernel, Threads, command, err, prepare_threads
from model.cli.shared.session import Prefill, check_prefill
from model.extras import check_plot
from pykernels.errors import PykernelsError
from pykernels.registry import requested

from ..e2e.cli import check_gpu, check_options, open_model
from ..e2e.model_options import Arch, Checkpoint, Format, Layers, Vocab, count
from ..harness.keeping.kept import AsJson, Save, keeping

if TYPE_CHECKING:
    from runtime.experts.cache.simulate import Recording

    from ..e2e.ours import Ours


@command
def cache(
    model: Checkpoint = None,
    arch: Arch = None,
    layers: Layers = None,
    format: Format = None,
    vocab: Vocab = None,
    shares: Annotated[
        str, typer.Option(metavar="P,P", help="Slots of a layer, in % of its experts.")
    ] = "10,25,50",
    texts: Annotated[int, count("Sequences that are recorded.")] = 8,
    prompt: Annotated[int, count("Tokens of each that are read at once.")] = 256,
    tokens: Annotated[int, count("Tokens of each behind that, decoded one by one.")] = 256,
    device: Annotated[
        str,
        typer.Option(metavar="cpu|cuda:0", help="cuda:0: also time the engine with such caches."),
    ] = "cpu",
    lengths: Annotated[
        str, typer.Option(metavar="N,M", help="With a GPU: tokens of the prompts.")
    ] = "512",
    prefill: Prefill = "auto",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Hits and speeds, drawn.")
    ] = None,
    threads: Threads = None,
    kernel: Kernel = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What slots for experts on a GPU would hit, by policy and size: recorded choices of the
    model's routers, run through the engine's own cache.

    The embedded model and checkpoints read files of Python's library, models of random weights
    random tokens. With --device cuda:0 the engine is timed with such caches, too.
    """
    given = {"format": format, "layers": layers, "vocab": vocab, "experts": None}
    given["activations"] = None
    check_options(model, arch, given)
    check_plot(plot)
    sizes = [number / 100 for number in _numbers("shares", shares, 99)]
    prompts = _numbers("lengths", lengths)
    check_gpu(device, "auto")
    check_prefill(prefill, device)
    chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
    from runtime.experts.cache import CachePolicy

    from .run import SWAPS, OnGpu, simulated, simulated_plan, slots_of

    with (
        keeping("cache", save, as_json, plot) as kept,
        err().status("", spinner_style="dim") as status,
    ):
        status.update("filling random weights …" if arch else "reading, packing …")
        ours = open_model(model, arch, given, chosen_threads, chosen_kernel, "bf16")
        try:
            status.update("recording what routers choose …")
            recordings = [*_recorded(ours, model, arch, (texts, prompt, tokens), chosen_kernel)]
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
                "device": device,
                "texts": texts,
                "prompt": prompt,
                "tokens": tokens,
            }
            policies = [CachePolicy(swaps=0), CachePolicy(), CachePolicy("lru-fixed", 2)]
            on_gpu = OnGpu(device, prompts, tokens, chosen_kernel, chosen_threads, prefill)
            kept.plan = simulated_plan(slots, SWAPS)
            kept.plan += on_gpu.plan(slots, policies) if device != "cpu" else []
            for row in simulated(recordings, experts, slots, SWAPS):
                kept.add(row)
            if device != "cpu":
                step = lambda name: status.update(f"{name} …")  # noqa: E731
                for row in on_gpu.rows(ours, experts, slots, policies, step):
                    kept.add(row)
        finally:
            ours.close()


def _recorded(
    ours: Ours,
    model: Path | None,
    arch: str | None,
    sizes: tuple[int, int, int],
    kernel: str,
) -> Iterator[Recording]:
    from .record import random_texts, record, source_texts

    count, prompt, tokens = sizes
    if arch is not None:
        texts = random_texts(ours.decoder.vocab_size, count, prompt + tokens)
    else:
        import model as package

        texts = source_texts(model or package.EMBEDDED, count, prompt + tokens)
    return record(ours, texts, prompt, kernel)


def _experts_of(ours: Ours) -> int:
    from runtime.passes.layers import moe_layers

    program = ours.decoder.lower()
    return max(program.weight(layer.experts, "experts").shape[0] for layer in moe_layers(program))


def _numbers(option: str, text: str, most: int = 1 << 20) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= most for word in words):
        raise PykernelsError(f"--{option} {text}", f"Give numbers from 1 to {most}, such as 10,25")
    return tuple(map(int, words))
