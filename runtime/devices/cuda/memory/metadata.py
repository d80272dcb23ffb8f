"""``attention_metadata``: who attends how in a step, as the host finds it out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

NO_EXPANSION = 1 << 40
"""Tokens of a sequence in one step: more than any has."""


class HostMetadata:
    """Writes the outputs of a node of ``attention_metadata`` for each step.

    Args:
        outputs: by port, int32 arrays in the block that is copied to the GPUs; tables of sequences
            are written by whoever has the pages. "expansion", int64, stays on the host.
        expand_from, chunk: the node's.
    """

    def __init__(
        self, outputs: Mapping[str, NDArray[np.integer]], expand_from: int, chunk: int
    ) -> None:
        self._outputs, self._expand_from, self._chunk = outputs, expand_from, chunk
        self._latents = "token_rows" in outputs

    def write(
        self,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Writes which kernel takes which tokens. Prefill kernels take every sequence after the
        leading one-token ones; of latents those with ``expand_from`` tokens or more.

        Args:
            starts, counts, lengths: by sequence, its first token and its tokens in the step, and
                its keys; ``positions``: of the tokens.
        """
        outputs, T, S = self._outputs, len(positions), len(counts)
        if "key_lengths" in outputs:
            pad(outputs["key_lengths"], lengths)
        if self._latents:
            chunk = counts >= (self._expand_from or NO_EXPANSION)
            pad(outputs["token_rows"], np.repeat(np.arange(S), counts)[:T])
            kept = np.where(np.repeat(chunk, counts)[:T], 0, positions + 1)
            pad(outputs["token_lengths"], kept)
        else:
            others = counts != 1
            chunk = np.arange(S) >= (int(np.argmax(others)) if others.any() else S)
            pad(outputs["decode_lengths"], np.where(chunk, 0, lengths))
        if self._chunk:
            self._cut(np.flatnonzero(chunk), starts, counts, lengths)
        if "expansion" in outputs:
            rest = np.flatnonzero(~chunk)
            tokens = int(starts[rest[-1]] + counts[rest[-1]]) if len(rest) else 0
            queries, keys = counts[chunk].max(initial=0), lengths[chunk].sum()
            outputs["expansion"][:] = tokens, queries, keys

    def _cut(
        self,
        chunks: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Fills in the pieces of these sequences. A piece's tokens are the last of its keys."""
        outputs = self._outputs
        starts, counts, lengths = starts[chunks], counts[chunks], lengths[chunks]
        pieces = -(-counts // self._chunk)
        of = np.repeat(np.arange(len(chunks)), pieces)
        first = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * self._chunk
        queries = np.minimum(counts[of] - first, self._chunk)
        keys = lengths[of] - counts[of] + first + queries
        order = np.argsort(-keys, kind="stable")
        of, queries, keys = of[order], queries[order], keys[order]
        pad(outputs["chunk_starts"], starts[of] + first[order])
        pad(outputs["chunk_lengths"], queries)
        pad(outputs["chunk_keys"], keys)
        if "chunk_rows" in outputs:
            pad(outputs["chunk_rows"], np.cumsum(keys) - keys)
        for prefix in ("", *(("window_",) if "window_table" in outputs else ())):
            table = outputs[f"{prefix}chunk_table"]
            table[: len(of)] = outputs[f"{prefix}table"][chunks[of]]
            table[len(of) :] = 0


def pad(staging: NDArray[np.integer], values: NDArray[np.int64], padding: int = 0) -> None:
    """``values``, then ``padding``."""
    staging[: len(values)] = values
    staging[len(values) :] = padding
