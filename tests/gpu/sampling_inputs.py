"""Requests as the arrays that `sample` takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pykernels.ref.sampling import SamplingRequest
from pykernels.ref.sampling.inputs import SamplingInputs


def inputs_of(requests: Sequence[SamplingRequest], V: int) -> SamplingInputs:
    """On the CPU. A request with penalties or a mask has a row of its own in their tables, which
    are there if any request has."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(request, name) for request in requests], dtype=dtype)

    columns = {
        **{name: column(name, torch.float32) for name in ("temperature", "top_p", "min_p")},
        **{name: column(name, torch.int32) for name in ("top_k", "logprobs")},
        **{name: column(name, torch.int64) for name in ("seed", "draws")},
    }
    penalized = [request for request in requests if request.seen is not None]
    if penalized:
        table = torch.zeros(len(penalized), V, dtype=torch.int32)
        for row, request in zip(table, penalized, strict=True):
            counts = request.counts
            row[request.seen.long()] = torch.where(counts > 0, 2 * counts, 1)  # type: ignore
        columns |= {"seen": table, "seen_row": _rows([r.seen for r in requests])}
        for name in ("repetition", "presence", "frequency"):
            columns[name] = column(name, torch.float32)
    biased = [request for request in requests if request.bias_ids is not None]
    if biased:
        B = max(len(request.bias_ids) for request in biased)  # type: ignore[arg-type]
        ids = torch.full((len(requests), B), -1, dtype=torch.int32)
        values = torch.zeros(len(requests), B)
        for row, request in enumerate(requests):
            if request.bias_ids is not None and request.bias is not None:
                ids[row, : len(request.bias_ids)] = request.bias_ids
                values[row, : len(request.bias)] = request.bias
        columns |= {"bias_ids": ids, "bias": values}
    masks = [request.mask for request in requests if request.mask is not None]
    if masks:
        bits = torch.zeros(len(masks), -(-V // 32) * 32, dtype=torch.int64)
        bits[:, :V] = torch.stack(masks)
        words = (bits.view(len(masks), -1, 32) << torch.arange(32)).sum(-1)
        columns |= {
            "mask": words.to(torch.int32),  # wraps
            "mask_row": _rows([r.mask for r in requests]),
        }
    return SamplingInputs(**columns)


def _rows(parts: list[torch.Tensor | None]) -> torch.Tensor:
    """The place of each among those that are there, -1 for the others."""
    rows, count = [], 0
    for part in parts:
        rows.append(-1 if part is None else count)
        count += part is not None
    return torch.tensor(rows, dtype=torch.int32)
