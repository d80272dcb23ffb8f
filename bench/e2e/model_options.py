"""Options that several benchmarks of whole models have: which model, and of random weights what."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import typer

from model.cli.shared.options import Choose
from model.hub import local
from pykernels.errors import PykernelsError
from runtime.planning.option import option

ARCHS = "qwen3-30b|qwen3.6-35b|qwen3-next-80b|gemma4-26b|mixtral-8x7b|deepseek-v2-lite|deepseek-v3"
HOW_EXPERTS = Choose(names={"experts": "expert_device"}, defaults={"defer": "off"})
"""``ExecutionConfig`` beside ``ModelOptions``, in which ``--experts`` is how many there are."""


def count(help: str) -> typer.models.OptionInfo:
    return typer.Option(min=1, metavar="N", help=help)


@dataclass(frozen=True)
class ModelOptions:
    """A checkpoint, or random weights of a well-known shape; None: as it is."""

    model: Path | None = option(
        None, "A checkpoint.", "DIR|OWNER/NAME", kind=Path, shown="the embedded model"
    )
    arch: str | None = option(None, "Random weights of that shape instead.", ARCHS)
    layers: int | None = option(None, "Of --arch: so many of its layers.", "N", kind=int, least=1)
    format: str | None = option(None, "Weight format:", "NAME", shown="q4_k")
    activations: str | None = option(None, "Inputs of the experts.", "bf16|int8", shown="bf16")
    experts: int | None = option(None, "Of --arch: in a layer.", "N", kind=int, least=1)
    vocab: int | None = option(None, "Of --arch: tokens of the vocabulary.", "N", kind=int, least=1)

    def check(self) -> None:
        """Before torch is imported and the bars of a download are hidden. Raises PykernelsError for
        options that contradict each other, or no such checkpoint."""
        if self.model is not None and self.arch is not None:
            raise PykernelsError("--model and --arch are both given", "Leave one of them out")
        for name in [each.name for each in fields(self)][2:]:
            if self.arch is None and getattr(self, name) is not None:
                raise PykernelsError(
                    f"--{name} is for random weights; a checkpoint has its own",
                    "Add --arch qwen3-30b, or leave it out",
                )
        if self.model is not None:
            local(self.model)

    @property
    def doing(self) -> str:
        """Says for the status line how the weights come to be."""
        return "filling random weights …" if self.arch else "reading, packing …"
