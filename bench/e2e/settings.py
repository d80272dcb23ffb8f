"""What a run over whole models measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model.named import ARCHS
from pykernels.errors import PykernelsError
from pykernels.quant import get_format

from .ours import Shape
from .players import Case

PEERS = ("llama.cpp", "transformers")


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        layers: of each model; ``experts``, ``vocab``: in place of its own, None: as they are.
        prompts, tokens: of a prefill; decode steps.
        batches, contexts: every pair is a decode.
        rounds: turns of each engine.
        device: "cpu", or "cuda:N" for ours in all ``places`` and a llama.cpp that uses it too.
        keep: leave the GGUF files in ``folder``.
        minutes: no turn is begun beyond them; None: no limit.
    """

    archs: tuple[str, ...]
    formats: tuple[str, ...]
    layers: int
    experts: int | None
    vocab: int | None
    threads: int
    kernel: str
    prompt: int
    tokens: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rounds: int
    peers: tuple[str, ...]
    quick: bool
    keep: bool
    folder: Path
    device: str = "cpu"
    minutes: float | None = None

    def check(self) -> Settings:
        """Itself. Raises PykernelsError for what there is not."""
        for what, names, known in (
            ("architecture", self.archs, tuple(ARCHS)),
            ("peer", self.peers, PEERS),
        ):
            for name in names:
                if name not in known:
                    raise PykernelsError(f"there is no {what} {name!r}", f"Use {', '.join(known)}")
        for fmt in self.formats:
            get_format(fmt)
        if self.device != "cpu" and "transformers" in self.peers:
            raise PykernelsError("transformers is timed on the CPU alone", "Give --peers llama.cpp")
        numbers = (self.layers, self.prompt, self.tokens, self.rounds, *self.batches)
        if min((*numbers, *self.contexts)) < 1:
            raise PykernelsError("a number below 1", "Give counts from 1 on")
        if self.minutes is not None and not self.minutes > 0:
            raise PykernelsError(f"--minutes {self.minutes:g}", "Give a number above 0")
        return self

    @property
    def cases(self) -> list[Case]:
        """Engines in the order in which they are timed."""
        decodes = [
            Case("decode", self.tokens, batch, context)
            for batch in self.batches
            for context in self.contexts
        ]
        return [Case("prefill", self.prompt), *decodes]

    def shape(self, arch: str) -> Shape:
        """The shape of one of ``archs``."""
        return Shape(arch, self.layers, self.experts, self.vocab)
