"""Which tokens of a step are of which sequence, as attention reads it on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pykernels.shapes import Ragged

from .blocks import Shape

NEVER = 1 << 40
"""Tokens of a sequence in one step: more than any has."""
_BY_CHUNK = ("query_starts", "query_lengths", "key_lengths", "key_starts")


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


class HostMetadata:
    """Writes the ``Sequences`` of each step on the host.

    By the prefill kernels attend all sequences behind the leading ones of one token each; where
    there are latents, those with ``expand_from`` tokens or more.

    Args:
        staged: int32 arrays of ``metadata_shapes``, in the block that is copied to the GPUs.
        chunk: tokens of a chunk at most.
        expand_from: None where there are no latents; ``NEVER`` where none are expanded.
        expansion: gets what launches read on the host.
    """

    def __init__(
        self,
        staged: Mapping[str, NDArray[np.int32]],
        chunk: int,
        expand_from: int | None,
        expansion: Expansion,
    ) -> None:
        self._staged, self._chunk, self._expand_from = staged, chunk, expand_from
        self._expansion = expansion

    def arrange(
        self,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Fills in who attends how; the arguments are those of the step's sequences and tokens."""
        staged, T, S = self._staged, len(positions), len(counts)
        if self._expand_from is None:
            others = counts != 1
            chunk = np.arange(S) >= (int(np.argmax(others)) if others.any() else S)
        else:
            chunk = counts >= self._expand_from
        pad(staged["decode_lengths"], np.where(chunk, 0, lengths))
        pad(staged["token_rows"], np.repeat(np.arange(S), counts)[:T])
        pad(staged["token_lengths"], np.where(np.repeat(chunk, counts)[:T], 0, positions + 1))
        self._cut(np.flatnonzero(chunk), starts, counts, lengths)
        rest = np.flatnonzero(~chunk)
        tokens = int(starts[rest[-1]] + counts[rest[-1]]) if len(rest) else 0
        self._expansion.tokens = tokens

    def _cut(
        self,
        chunks: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Fills in the pieces of these sequences. A piece's tokens are the last of its keys."""
        staged = self._staged
        starts, counts, lengths = starts[chunks], counts[chunks], lengths[chunks]
        pieces = -(-counts // self._chunk)
        of = np.repeat(np.arange(len(chunks)), pieces)
        first = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * self._chunk
        queries = np.minimum(counts[of] - first, self._chunk)
        keys = lengths[of] - counts[of] + first + queries
        order = np.argsort(-keys, kind="stable")
        of, queries, keys = of[order], queries[order], keys[order]
        pad(staged["query_starts"], starts[of] + first[order])
        pad(staged["query_lengths"], queries)
        pad(staged["key_lengths"], keys)
        pad(staged["key_starts"], np.cumsum(keys) - keys)
        table = staged["chunk_table"]
        table[: len(of)] = staged["table"][chunks[of]]
        table[len(of) :] = 0
        self._expansion.queries, self._expansion.keys = int(queries.max(initial=0)), int(keys.sum())


def metadata_shapes(T: int, S: int, pages: int, chunks: int | None) -> dict[str, Shape]:
    """The tensors of ``Sequences``; ``chunks``: of a step, at most, None: in decode steps."""
    shapes: dict[str, tuple[int, ...]] = {"decode_lengths": (S,), "table": (S, pages)}
    if chunks is not None:
        shapes |= dict.fromkeys(_BY_CHUNK, (chunks,))
        shapes |= {"token_rows": (T,), "token_lengths": (T,), "chunk_table": (chunks, pages)}
    return {name: (shape, torch.int32) for name, shape in shapes.items()}


def most_chunks(T: int, S: int, chunk: int) -> int:
    """The most chunks of S sequences of T tokens together."""
    return min(T, S + (T // chunk if chunk < T else 0))


def pad(staged: NDArray[np.int32], values: NDArray[np.int64], padding: int = 0) -> None:
    """``values``, then ``padding``."""
    staged[: len(values)] = values
    staged[len(values) :] = padding
