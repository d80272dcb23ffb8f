"""Expert Deferral against Expert Skipping on held-out text: SOSP'25 Figure 13 for one model.

The paper counts right answers of DeepSeek-V3 on LiveBench; here it is bits a byte of source files
that the embedded model's training never saw, and how often the likeliest next token stays the same.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError
from runtime.passes import defer, skip
from runtime.passes.layers import moe_layers

from ..llm import LLM
from .heldout import heldout
from .teacher import Scores, Teacher

METHODS = {"skipping": skip, "deferral": defer}


@dataclass(frozen=True)
class Row:
    """One method and number of affected experts.

    Attributes:
        change: of bits a byte against none affected, percent.
        error: standard error of ``change`` over the documents, percent.
        agreement: share of positions whose likeliest token is that of none affected.
        accuracy: share of positions whose likeliest token is the text's own.
    """

    method: str
    affected: int
    bits_per_byte: float
    change: float
    error: float
    agreement: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """What was evaluated, and its rows: none affected first, then each method by number."""

    model: str
    topk: int
    documents: int
    length: int
    tokens: int
    heldout_sha256: str
    python: str
    cpu: str
    kernel: str
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


TOKENS = 16000
"""Tokens of the text that is scored, if no number is given."""


def evaluate(
    llm: LLM,
    affected: Sequence[int],
    tokens: int | None,
    length: int = 512,
    stdlib: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Scores held-out files with each number of experts skipped, and deferred.

    Args:
        affected: numbers of experts a token; 0 is always scored, as what others are held against.
        tokens: of the text, at least; ``length`` of each file's beginning. None: ``TOKENS``, or as
            many as there are: versions of Python differ in their files.
        stdlib: folder of the standard library whose held-out files are read; None: the running
            Python's.

    Raises:
        PykernelsError: a model without tokenizer or routed experts, a number that leaves fewer than
            two experts in place, a text of more tokens than there are.
    """
    if llm.tokenizer is None:
        raise PykernelsError("this model has no tokenizer", "Use a checkpoint with tokenizer.json")
    from pykernels.target import detect

    text = heldout(llm.tokenizer, tokens or TOKENS, length, stdlib, tokens or 1)
    documents, nbytes = text.tokens, text.nbytes
    teacher = Teacher(llm, documents)
    numbers = sorted(set(affected) - {0})
    program = teacher.program()
    changed = [(method, N, METHODS[method](program, N)) for N in numbers for method in METHODS]
    D, L = documents.shape
    done, total = 0, D * (L - 1) * (1 + len(changed))

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    score = partial(teacher.score, progress=tell)
    base = score(program)
    rows = [_row("none", 0, base, base, documents, nbytes)]
    rows += [_row(method, N, score(p), base, documents, nbytes) for method, N, p in changed]
    return Result(
        model=llm.config.model_type,
        topk=min(layer.topk for layer in moe_layers(program)),
        documents=D,
        length=L,
        tokens=D * (L - 1),
        heldout_sha256=text.sha256,
        python=platform.python_version(),
        cpu=detect().cpu,
        kernel=llm.kernel,
        rows=tuple(rows),
    )


def _row(
    method: str, N: int, scores: Scores, base: Scores, documents: torch.Tensor, nbytes: torch.Tensor
) -> Row:
    total, was = scores.bits.sum(), base.bits.sum()
    D = len(documents)
    # Of the ratio of two sums over documents, by its linear expansion.
    change = total / was - 1
    residual = scores.bits.sum(1) - (1 + change) * base.bits.sum(1)
    error = (residual.square().sum() * D / max(1, D - 1)).sqrt() / was
    return Row(
        method=method,
        affected=N,
        bits_per_byte=round(float(total / nbytes.sum()), 5),
        change=round(100 * float(change), 3),
        error=round(100 * float(error), 3),
        agreement=round(float((scores.likeliest == base.likeliest).double().mean()), 5),
        accuracy=round(float((scores.likeliest == documents[:, 1:]).double().mean()), 5),
    )
