"""Which tokens of a step are of which sequence, as attention reads it on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pykernels.shapes import Ragged


@dataclass
class Expansion:
    """What the host knows of the sequences whose keys and values are expanded in this step.

    Attributes:
        tokens: all tokens of other sequences are among so many first ones.
        queries: most tokens of one such sequence; 0: there is none.
        keys: of all of them.
    """

    tokens: int = 0
    queries: int = 0
    keys: int = 0


@dataclass(frozen=True)
class Sequences:
    """int32 tensors of a bucket of T tokens and up to S sequences, in the order of the batch.

    Attributes:
        table: [S, pages], pages of each sequence.
        decode_lengths: [S], keys of a sequence whose one token attends by the decode kernel: token
            ``s`` of the step; 0 for other sequences and behind the last one.
        query_starts: [S], first token in the step; this and what follows: None in decode steps.
        query_lengths: [S], tokens of a chunk, a sequence that attends by the prefill kernels; 0 for
            others.
        key_lengths: [S], keys of a chunk, those of this step included; 0 for others.
        key_starts: [S], the first row of a chunk's keys, where keys become rows.
        token_rows: [T], row of ``table`` of each token.
        token_lengths: [T], keys that a token attends to; 0 for tokens of chunks and padding.
        expansion: changed in every step; launches that read it cannot be captured.
    """

    table: torch.Tensor
    decode_lengths: torch.Tensor
    query_starts: torch.Tensor | None = None
    query_lengths: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    token_lengths: torch.Tensor | None = None
    expansion: Expansion = field(default_factory=Expansion)

    @property
    def S(self) -> int:
        return len(self.table)

    def chunks(self, max_queries: int) -> Ragged | None:
        """The chunks over pages, any number of them up to S; None in decode steps."""
        if self.query_starts is None or self.query_lengths is None or self.key_lengths is None:
            return None
        return Ragged(
            self.query_starts,
            self.query_lengths,
            self.key_lengths,
            max_queries,
            page_table=self.table,
        )

    def expanded(self) -> Ragged:
        """This step's chunks over rows of keys."""
        assert self.query_starts is not None and self.query_lengths is not None
        assert self.key_lengths is not None
        return Ragged(
            self.query_starts,
            self.query_lengths,
            self.key_lengths,
            self.expansion.queries,
            k_starts=self.key_starts,
        )
