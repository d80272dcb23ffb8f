"""Options that say which model, and how it is sampled from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.planning.option import option

from ... import EMBEDDED
from ...hub import local
from .options import Choose

MODEL_METAVAR = "DIR|FILE.gguf|OWNER/NAME"
MODEL_HELP = "Checkpoint, or its name on the Hugging Face hub (a GGUF file's: OWNER/NAME:Q4_K_M)."
Model = Annotated[
    Path | None,
    typer.Option(
        metavar=MODEL_METAVAR,
        help=MODEL_HELP,
        show_default="the embedded model",
    ),
]
Rules = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|SET,SET",
        help="Injection rules: a file, or shipped ones (int4, gpu ...) before the architecture's."
        " KTransformers' names of classes and arguments are accepted.",
        show_default="those of the architecture",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="bfloat16|float16|float32",
        help="Of the dense part.",
        show_default="the config's",
    ),
]
Eager = Annotated[
    bool,
    typer.Option(
        "--eager",
        help="Hugging Face's own forward with our experts, on the CPU, instead of the engine; what"
        " --dtype uses anyway.",
    ),
]
DRAFTS = Choose(only=("draft", "draft_tokens"))
"""Of ``EngineConfig``, what is for one output at a time, too."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and how many; None: as the checkpoint says."""

    max_new_tokens: int = option(128, "Stop after N tokens.", "N", kind=int, least=1)
    temperature: float | None = option(
        None,
        "0 takes the likeliest token.",
        "T",
        kind=float,
        shown="the checkpoint's, else 0.8",
        least=0.0,
    )
    top_p: float | None = option(
        None,
        "Sample from this much probability.",
        "P",
        kind=float,
        shown="the checkpoint's, else 0.95",
        least=0.0,
        most=1.0,
    )
    top_k: int | None = option(
        None,
        "Sample from the K likeliest tokens; 0: all.",
        "K",
        kind=int,
        shown="the checkpoint's, else 0",
        least=0,
    )
    seed: int = option(0, "The same seed gives the same text.", "N", kind=int, least=0)

    def as_dict(self) -> dict[str, Any]:
        """The arguments of ``generate_stream``."""
        return asdict(self)


def model_path(model: Path | None) -> Path:
    """Where the model is, see ``hub.local``; call it before torch is imported, so that a mistyped
    name is refused at once, and before `prepare_threads`, which hides the bars of a download."""
    return EMBEDDED if model is None else local(model)
