"""Text that the embedded model's training never saw: files of Python's standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ..embedded.corpus import default_stdlib, find_sources, fingerprint, split


@dataclass(frozen=True)
class Heldout:
    """The beginnings of D files.

    Attributes:
        tokens: int64 [D, L] token ids.
        nbytes: int64 [D], bytes that each row's tokens but the first stand for.
        sha256: of the files that there are, see ``corpus.fingerprint``.
    """

    tokens: torch.Tensor
    nbytes: torch.Tensor
    sha256: str


def heldout(
    tokenizer: Any, tokens: int, length: int, stdlib: Path | None = None, least: int = 1
) -> Heldout:
    """Takes as many files as hold so many tokens.

    Args:
        tokens: that are scored, at least, where there are as many.
        length: tokens of each file; shorter files are left out.
        stdlib: folder of the standard library; None: the running Python's.
        least: tokens that there must be.

    Raises:
        PykernelsError: there are fewer than ``least``.
    """
    files = split(find_sources(stdlib or default_stdlib())).heldout
    rows, nbytes = _rows(tokenizer, [file.text for file in files], tokens, length)
    if (there := len(rows) * (length - 1)) < least:
        raise PykernelsError(
            f"{least} tokens asked for, the held-out files have {there} in pieces of {length}",
            "Ask for fewer with --tokens, or for shorter ones with --length",
        )
    ids, sizes = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in (rows, nbytes))
    return Heldout(ids, sizes, fingerprint(files))


def _rows(
    tokenizer: Any, texts: Sequence[str], tokens: int, length: int
) -> tuple[list[list[int]], list[int]]:
    rows: list[list[int]] = []
    nbytes = []
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        if len(ids) < length:
            continue
        begin, end = offsets[0][1], offsets[length - 1][1]
        rows.append(ids[:length])
        nbytes.append(len(text[begin:end].encode()))
        if len(rows) * (length - 1) >= tokens:
            break
    return rows, nbytes
