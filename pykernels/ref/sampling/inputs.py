"""How the rows of a step are drawn, as arrays that a captured graph can read."""

from __future__ import annotations

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
        bias_ids: int32 [R, B], distinct ids, ended by -1 where they are fewer; None: no row has
            any.
        bias: float32 [R, B], added to their logits.
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
            ends = (self.bias_ids[row] < 0).nonzero().flatten().tolist()
            count = ends[0] if ends else self.bias_ids.shape[1]
            fields |= {"bias_ids": self.bias_ids[row, :count], "bias": self.bias[row, :count]}
        if self.mask is not None and self.mask_row is not None and self.mask_row[row] >= 0:
            v = torch.arange(V, dtype=torch.int64, device=self.mask.device)
            words = self.mask[int(self.mask_row[row])]
            fields["mask"] = (words[v // 32] >> (v % 32) & 1).bool()
        return SamplingRequest(**fields)  # type: ignore[arg-type]


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
