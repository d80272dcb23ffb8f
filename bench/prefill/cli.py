"""`pykernels bench prefill`: a table, a plot and JSON of prompts by length and way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from model.cli.shared.common import Debug, Kernel, Threads, command, err, prepare_threads
from model.cli.shared.session import Device
from model.extras import check_plot
from pykernels.errors import PykernelsError
from pykernels.registry import requested

from ..e2e.cli import check_gpu, check_options, open_model
from ..e2e.model_options import Arch, Checkpoint, Format, Layers, Vocab, count
from ..harness.keeping.kept import AsJson, Save, keeping


@command
def prefill(
    model: Checkpoint = None,
    arch: Arch = None,
    layers: Layers = None,
    format: Format = None,
    vocab: Vocab = None,
    lengths: Annotated[
        str, typer.Option(metavar="N,M", help="Tokens of the prompts.")
    ] = "64,512,4096",
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a step.", show_default="auto")
    ] = None,
    rounds: Annotated[int, count("Of each, after one that warms up.")] = 3,
    device: Device = "cuda:0",
    llama: Annotated[
        bool,
        typer.Option(
            "--llama", help="Also llama.cpp's CUDA build, experts on the CPU: default, best."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Tokens a second by length, drawn.")
    ] = None,
    threads: Threads = None,
    kernel: Kernel = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time prompts whose experts lie in main memory beside a GPU: computed by the CPU, by both at
    once (split), streamed to the GPU, and by whichever is fastest (--prefill auto)."""
    given = {"format": format, "layers": layers, "vocab": vocab, "experts": None}
    given["activations"] = None
    check_options(model, arch, given)
    if device == "cpu":
        raise PykernelsError("bench prefill is about a GPU", "Give --device cuda:0")
    if llama and arch is None:
        raise PykernelsError("--llama is for random weights", "Add --arch qwen3-30b")
    check_plot(plot)
    tokens = _parsed(lengths)
    check_gpu(device, "auto")
    chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
    from .peer import WAYS, llama_rows
    from .run import MODES, plan, rows

    with (
        keeping("prefill", save, as_json, plot) as kept,
        err().status("", spinner_style="dim") as status,
    ):
        status.update("filling random weights …" if arch else "reading, packing …")
        ours = open_model(model, arch, given, chosen_threads, chosen_kernel, "bf16")
        try:
            step = lambda name: status.update(f"{name} …")  # noqa: E731
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "threads": ours.pool.threads,
                "gpu": gpu_name(device),
            }
            kept.plan = plan(tokens, [*MODES, *(WAYS if llama else ())])
            for row in rows(ours, tokens, device, chosen_kernel, budget, rounds, step):
                kept.add(row)
        finally:
            ours.close()
        if llama:
            assert arch is not None
            status.update("llama.cpp …")
            for row in llama_rows(arch, given, tokens, ours.pool.threads):
                kept.add(row)


def _parsed(lengths: str) -> tuple[int, ...]:
    words = [word.strip() for word in lengths.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise PykernelsError(f"--lengths {lengths}", "Give tokens, such as 64,512,4096")
    return tuple(map(int, words))


def gpu_name(device: str) -> str:
    """What the driver calls it; "interpreter" where Triton interprets."""
    import torch

    cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else "interpreter"
