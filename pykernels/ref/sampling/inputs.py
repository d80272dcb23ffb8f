"""How the rows of a step are drawn, as arrays that a captured graph can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import Sampled, SamplingRequest, sample_requests


@dataclass(frozen=True, eq=False)
class SamplingInputs:
    """One entry per row of logits: the fields of `sampling.SamplingRequest`, in the same order.

    Tables of penalties and masks have a row a request; ``seen_row`` and ``mask_row`` say which is
    whose, -1: none. So a table may stay where it is while requests come and go.

    Attributes:
        temperature, top_p, min_p: float32 [R].
        top_k: int32 [R].
        seed: int64 [R], the key of Philox.
        draws: int64 [R], tokens drawn before this one.
        logprobs: int32 [R], top logprobs wanted, 0 .. ``MAX_LOGPROBS``; -1: not the token's own
            either.
        repetition, presence, frequency: float32 [R]; read where ``seen`` is given.
        seen: int32 [P, V], twice how often a token is in the output, and 1 more if it is in the
            prompt (see `count_tokens`); None: no row has penalties.
        seen_row: int32 [R], its row.
        bias_ids: int32 [N], the lists of all rows, each of distinct ids; None: no row has any.
        bias: float32 [N], added to their logits.
        bias_start, bias_count: int32 [R], where a row's list begins, and its length.
        mask: int32 [P, ceil(V / 32)], bit v % 32 of word v // 32 is set where token v may be drawn
            (xgrammar's layout); None: no row has one.
        mask_row: int32 [R], its row.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    draws: torch.Tensor
    logprobs: torch.Tensor
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    seen_row: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    bias_start: torch.Tensor | None = None
    bias_count: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_row: torch.Tensor | None = None

    def request(self, row: int, V: int) -> SamplingRequest:
        """What these say of one row."""
        fields: dict[str, object] = {
            name: getattr(self, name)[row].item()
            for name in ("temperature", "top_k", "top_p", "min_p", "seed", "draws", "logprobs")
        }
        if self.seen is not None and self.seen_row is not None and self.seen_row[row] >= 0:
            table = self.seen[int(self.seen_row[row])]
            fields["seen"] = seen = table.nonzero().flatten().int()
            fields["counts"] = table[seen.long()] >> 1
            for name in ("repetition", "presence", "frequency"):
                fields[name] = getattr(self, name)[row].item()
        if self.bias_ids is not None and self.bias is not None:
            assert self.bias_start is not None and self.bias_count is not None
            first = int(self.bias_start[row])
            at = slice(first, first + int(self.bias_count[row]))
            fields |= {"bias_ids": self.bias_ids[at], "bias": self.bias[at]}
        if self.mask is not None and self.mask_row is not None and self.mask_row[row] >= 0:
            v = torch.arange(V, dtype=torch.int64, device=self.mask.device)
            words = self.mask[int(self.mask_row[row])]
            fields["mask"] = (words[v // 32] >> (v % 32) & 1).bool()
        return SamplingRequest(**fields)  # type: ignore[arg-type]

    def rows(self, at: slice) -> SamplingInputs:
        """The inputs of some rows, over the same tables."""
        return SamplingInputs(
            **{
                name: value if value is None or name in TABLES else value[at]
                for name, value in vars(self).items()
            }
        )


TABLES = ("seen", "bias_ids", "bias", "mask")
"""Fields that are not columns of rows."""


def inputs_of(requests: Sequence[SamplingRequest], V: int) -> SamplingInputs:
    """Requests as arrays on the CPU; optional ones are there if any request wants them.

    Args:
        requests: R of them. Those with penalties or a mask have a row of their own in the tables.
    """

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        values = [getattr(request, name) for request in requests]
        return torch.tensor(values, dtype=dtype, device="cpu")

    columns = {
        **{name: column(name, torch.float32) for name in ("temperature", "top_p", "min_p")},
        **{name: column(name, torch.int32) for name in ("top_k", "logprobs")},
        **{name: column(name, torch.int64) for name in ("seed", "draws")},
    }
    seen = [(r.seen, r.counts) if r.seen is not None else None for r in requests]
    penalized = [pair for pair in seen if pair is not None]
    if penalized:
        table = torch.zeros(len(penalized), V, dtype=torch.int32, device="cpu")
        for row, (ids, counts) in zip(table, penalized, strict=True):
            assert counts is not None
            row[ids.long()] = torch.where(counts > 0, 2 * counts, 1).int()
        columns |= {"seen": table, "seen_row": _rows(seen)}
        for name in ("repetition", "presence", "frequency"):
            columns[name] = column(name, torch.float32)
    biases = [(r.bias_ids, r.bias) for r in requests]
    lists = [
        (ids.int(), bias.float()) for ids, bias in biases if ids is not None and bias is not None
    ]
    if lists:
        lengths = [0 if ids is None else len(ids) for ids, _ in biases]
        counts = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        columns |= {
            "bias_ids": torch.cat([ids for ids, _ in lists]),
            "bias": torch.cat([bias for _, bias in lists]),
            "bias_count": counts,
            "bias_start": counts.cumsum(0).int() - counts,
        }
    masks = [request.mask for request in requests if request.mask is not None]
    if masks:
        bits = torch.zeros(len(masks), -(-V // 32) * 32, dtype=torch.int64, device="cpu")
        bits[:, :V] = torch.stack(masks)
        shifts = torch.arange(32, dtype=torch.int64, device="cpu")
        words = (bits.view(len(masks), -1, 32) << shifts).sum(-1)
        columns |= {
            "mask": words.to(torch.int32),  # wraps
            "mask_row": _rows([request.mask for request in requests]),
        }
    return SamplingInputs(**columns)


def _rows(parts: Sequence[object]) -> torch.Tensor:
    """The place of each among those that are there, -1 for the others."""
    rows, count = [], 0
    for part in parts:
        rows.append(-1 if part is None else count)
        count += part is not None
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
    """One token a row, as `sample_requests` draws it from the row's request.

    Args:
        logits: [R, V].
        inputs: of R rows.
    """
    R, V = logits.shape
    return sample_requests(logits.float(), [inputs.request(row, V) for row in range(R)])


def count_tokens(tokens: torch.Tensor, seen_row: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Adds the tokens just drawn to what penalties count, in place: 2 each.

    Args:
        tokens: int64 [R]; -1: none was drawn.
        seen_row: int32 [R], distinct rows of ``seen``; -1: the row has no penalties.
        seen: int32 [P, V], as in `SamplingInputs`.

    Returns:
        ``seen``.
    """
    here = (seen_row >= 0) & (tokens >= 0)
    seen[seen_row[here].long(), tokens[here]] += 2
    return seen
