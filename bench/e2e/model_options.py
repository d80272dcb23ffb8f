"""Options that several benchmarks of whole models have: which model, and of random weights what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ARCHS = "qwen3-30b|mixtral-8x7b|deepseek-v2-lite|deepseek-v3"


def count(help: str) -> typer.models.OptionInfo:
    return typer.Option(min=1, metavar="N", help=help)


Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="DIR|OWNER/NAME", help="A checkpoint.", show_default="the embedded model"),
]
Arch = Annotated[
    str | None, typer.Option(metavar=ARCHS, help="Random weights of that shape instead.")
]
Layers = Annotated[int | None, count("Of --arch: so many of its layers.")]
Format = Annotated[
    str | None, typer.Option(metavar="NAME", help="Weight format:", show_default="q4_k")
]
NumExperts = Annotated[int | None, count("Of --arch: in a layer.")]
Vocab = Annotated[int | None, count("Of --arch: tokens of the vocabulary.")]
ExpertDevice = Annotated[
    str, typer.Option(metavar="auto|cpu|gpu", help="With --device cuda:0: of routed experts.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
