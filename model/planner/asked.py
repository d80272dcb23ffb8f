"""What a user asks of `pykernels plan`, as options."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.planning.option import option


@dataclass(frozen=True)
class Asked:
    """Requests, and what of the model is changed.

    Attributes:
        context, prompt, batch, answer, routing: see ``settings.Wanted``; None: as there, or as
            many as the model takes.
        format, layers, vocab: see ``inspection.subject.open_subject``.
    """

    context: int | None = option(
        None, "Tokens of a sequence while it decodes.", "N", kind=int, shown="512", least=1
    )
    prompt: int | None = option(None, "Tokens of a prompt.", "N", kind=int, shown="4096", least=1)
    batch: int = option(1, "Sequences that decode at once.", "N", kind=int, least=1)
    answer: int | None = option(
        None,
        "Tokens of an answer, by which gains are weighed.",
        "N",
        kind=int,
        shown="256",
        least=1,
    )
    routing: str = option(
        "even", "How unevenly tokens choose experts: by rank ** -S.", "even|zipf:S"
    )
    format: str | None = option(
        None, "Of all matrices, in place of their own.", "FORMAT", shown="as stored or released"
    )
    layers: int | None = option(
        None,
        "Of a shape or a config.json, in place of its own.",
        "N",
        kind=int,
        shown="its own",
        least=1,
    )
    vocab: int | None = option(None, "Likewise.", "N", kind=int, shown="its own", least=1)
