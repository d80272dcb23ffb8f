"""Which tokens of a step are of which sequence, as attention reads it on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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

    A chunk is a sequence that attends by the prefill kernels, or a piece of one: up to C of them,
    those with the most keys first.

    Attributes:
        table: [S, pages], pages of each sequence.
        decode_lengths: [S], keys of a sequence whose one token attends by the decode kernel: token
            ``s`` of the step; 0 for other sequences and behind the last one.
        query_starts: [C], a chunk's first token in the step; this and what follows: None in decode
            steps.
        query_lengths: [C], its tokens; 0 behind the last chunk, as below.
        key_lengths: [C], its keys, those of its own tokens included.
        key_starts: [C], the row of its first key, where keys become rows.
        chunk_table: [C, pages], its pages.
        token_rows: [T], row of ``table`` of each token.
        token_lengths: [T], keys that a token attends to; 0 for tokens of chunks and padding.
        max_queries: no chunk has more tokens.
        expansion: changed in every step; launches that read it cannot be captured.
        lanes: the sequences of each lane, where a decode step has two.
    """

    table: torch.Tensor
    decode_lengths: torch.Tensor
    query_starts: torch.Tensor | None = None
    query_lengths: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    chunk_table: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    token_lengths: torch.Tensor | None = None
    max_queries: int = 0
    expansion: Expansion = field(default_factory=Expansion)
    lanes: Mapping[str, Sequences] = field(default_factory=dict)

    @property
    def S(self) -> int:
        return len(self.table)

    def of(self, lane: str) -> Sequences:
        """The sequences of a lane; "": all of them."""
        return self.lanes[lane] if lane else self

    def chunks(self) -> Ragged | None:
        """The chunks over pages, however many there are; None in decode steps."""
        if self.query_starts is None or self.query_lengths is None or self.key_lengths is None:
            return None
        return Ragged(
            self.query_starts,
            self.query_lengths,
            self.key_lengths,
            self.max_queries,
            page_table=self.chunk_table,
        )

    def expanded(self) -> Ragged | None:
        """This step's chunks over rows of keys; None where there are none."""
        over_pages = self.chunks()
        if over_pages is None or not self.expansion.keys:
            return None
        return replace(
            over_pages,
            max_queries=self.expansion.queries,
            k_starts=self.key_starts,
            page_table=None,
        )
