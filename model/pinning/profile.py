"""How often text takes each expert of each layer: counted, written to a file, read again."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from torch import nn
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError

from ..modules.moe import FusedMoE


class Profile(BaseModel):
    """Tokens that took each expert.

    Attributes:
        tokens: of the text; ``topk``: experts that each takes in a layer.
        counts: of every expert, by the name of its block.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    tokens: int
    topk: int
    counts: dict[str, list[int]]

    @field_validator("counts")
    @classmethod
    def _are_counts(cls, value: dict[str, list[int]]) -> dict[str, list[int]]:
        if not value or any(not row or min(row) < 0 for row in value.values()):
            raise ValueError("a layer has no counts, or one below 0")
        return value

    def coverage(self, share: float) -> float:
        """Part of all choices that went to this share of a layer's experts, its most used ones."""
        hits = [sum(sorted(row, reverse=True)[: round(share * len(row))]) for row in self.rows]
        return sum(hits) / max(1, sum(map(sum, self.rows)))

    @property
    def rows(self) -> list[list[int]]:
        """Counts by layer, in order."""
        return list(self.counts.values())


def blocks(model: nn.Module) -> dict[str, FusedMoE]:
    """MoE blocks of ours, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, FusedMoE)}


def count(
    model: PreTrainedModel,
    ids: Sequence[int],
    length: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Profile:
    """Runs token ids through a loaded model in pieces of ``length`` and counts what its routers
    choose.

    Args:
        progress: called with the tokens of each piece.

    Raises:
        PykernelsError: no tokens, or a model without MoE blocks of ours.
    """
    blocks_by_name = blocks(model)
    if not blocks_by_name:
        raise PykernelsError("This model has no experts of ours", "Give an MoE model")
    if not ids:
        raise PykernelsError("There is no text to count", "Give files with some text")
    counts = {
        n: torch.zeros(b.shape.E, dtype=torch.int64, device="cpu")
        for n, b in blocks_by_name.items()
    }

    def hook(name: str, gate: nn.Module, args: Any, output: Any) -> None:
        counts[name] += torch.bincount(output[2].flatten().cpu(), minlength=len(counts[name]))

    handles = [
        block.gate.register_forward_hook(functools.partial(hook, name))
        for name, block in blocks_by_name.items()
    ]
    try:
        with torch.no_grad():
            for start in range(0, len(ids), length):
                piece = torch.tensor(
                    [ids[start : start + length]], dtype=torch.int64, device=model.device
                )
                model(piece, use_cache=False, logits_to_keep=1)
                progress(piece.shape[1])
    finally:
        for handle in handles:
            handle.remove()
    topk = next(iter(blocks_by_name.values())).shape.topk
    return Profile(
        model_type=model.config.model_type,
        tokens=len(ids),
        topk=topk,
        counts={name: row.tolist() for name, row in counts.items()},
    )


def write(profile: Profile, file: Path) -> None:
    """Writes JSON, a layer a line; `PykernelsError` if it cannot be written."""
    head = profile.model_dump(exclude={"counts"})
    lines = (f"    {json.dumps(name)}: {row}" for name, row in profile.counts.items())
    rows = ",\n".join(lines)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "counts": {\n' + rows + "\n  }\n}\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PykernelsError(
            f"{file} cannot be written: {error.strerror}", "Give another --out"
        ) from None


def read(file: Path) -> Profile:
    """A profile from a file; `PykernelsError` names what is wrong with it."""
    try:
        return Profile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise PykernelsError(
            f"The profile {file} cannot be read: {error.strerror}",
            "Give a number, auto, or a file of pykernels profile experts",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise PykernelsError(
            f"{file} is no profile of experts: {where}: {first['msg']}",
            "Write one with pykernels profile experts",
        ) from None
