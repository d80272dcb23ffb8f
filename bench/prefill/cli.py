"""`pykernels bench prefill`: a table, a plot and JSON of prompts by length and way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

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


@command
def prefill(
    chosen: Annotated[ModelOptions, Choose(but=("activations", "experts"))],
    execution: Annotated[
        ExecutionConfig,
        Choose(
            only=("device", "dense_gib", "kv_dtype", "threads", "kernel"),
            defaults={"device": "cuda:0"},
        ),
    ],
    lengths: Annotated[
        str, typer.Option(metavar="N,M", help="Tokens of the prompts.")
    ] = "64,512,4096",
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a step.", show_default="auto")
    ] = None,
    rounds: Annotated[int, count("Of each, after one that warms up.")] = 3,
    llama: Annotated[
        bool,
        typer.Option(
            "--llama", help="Also llama.cpp's CUDA build, experts on the CPU: default, best."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Tokens a second by length, drawn.")
    ] = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time prompts whose experts lie in main memory beside a GPU: computed by the CPU, by both at
    once (split), streamed to the GPU, and by whichever is fastest (--prefill auto)."""
    chosen.check()
    if execution.device == "cpu":
        raise PykernelsError("bench prefill is about a GPU", "Give --device cuda:0")
    if llama and chosen.arch is None:
        raise PykernelsError("--llama is for random weights", "Add --arch qwen3-30b")
    check_plot(plot)
    tokens = _parsed(lengths)
    check_gpu(execution, needed=True)
    execution = replace(settled(execution), experts="cpu")
    from .peer import WAYS, llama_rows
    from .run import MODES, plan, rows

    with (
        keeping("prefill", save, as_json, plot) as kept,
        err().status("", spinner_style="dim") as status,
    ):
        status.update(chosen.doing)
        ours = open_model(chosen, execution, settings="--lengths")
        try:
            step = lambda name: status.update(f"{name} …")  # noqa: E731
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "threads": ours.pool.threads,
                "gpu": gpu_name(execution.device),
            }
            kept.plan = plan(tokens, [*MODES, *(WAYS if llama else ())])
            for row in rows(ours, tokens, execution, budget, rounds, step):
                kept.add(row)
        finally:
            ours.close()
        if llama:
            assert chosen.arch is not None
            status.update("llama.cpp …")
            for row in llama_rows(chosen, tokens, ours.pool.threads):
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
