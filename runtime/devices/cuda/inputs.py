"""The inputs of a step on a GPU: one pinned block, one copy for each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch

from ...kv_cache.layout import PAGE
from ...program.sizes import LANES, lane_name, lane_tokens
from ...program.step_inputs import IS_PROMPT
from ...runner.sampling import SamplingInputs
from ..gpus import Gpus
from .binders.sampling import SamplingColumns, SamplingTables
from .memory.blocks import Shape, block_bytes, views
from .memory.metadata import (
    Expansion,
    HostMetadata,
    Sequences,
    metadata_shapes,
    most_chunks,
    pad,
)

BY_TOKEN = {"tokens": 0, "positions": 0, IS_PROMPT: 0, "slot_mapping": -1}
"""Inputs [T] that nodes read by name, and what padding has."""
PIECE = 128
"""Tokens of a chunk's piece: a block of the prefill kernels, so that a launch which has room for
any mix of sequences has few blocks too many."""


class StepInputs:
    """Memory for the inputs of any bucket: copies of the engine's arrays, int32 where nodes read
    numbers of tokens. How rows are sampled comes first, at one place for all buckets.

    Args:
        arrays: by name, int64 CPU tensors that the engine writes before each step.
        sampling: how rows are sampled, on the last GPU; None: programs that sample nothing.
        piece: chunks of more tokens are cut into pieces; None: none is.

    Attributes:
        first: bytes of the block in front of a bucket's own.
        blocks: by GPU, its copy of the block ``host``; ``last``: the GPU that samples.
        tensors: by name, views on the last GPU of how rows are sampled, in their largest shape.
    """

    def __init__(
        self,
        arrays: Mapping[str, torch.Tensor],
        sampling: SamplingInputs | None,
        gpus: Gpus,
        piece: int | None = PIECE,
    ) -> None:
        self.piece, self.last = piece, list(gpus)[-1]
        self.arrays = {
            name: tensor.numpy() for name, tensor in arrays.items() if tensor.dtype == torch.int64
        }
        T, S, R = (len(arrays[name]) for name in ("tokens", "lengths", "logits_indices"))
        chunks = most_chunks(T, S, piece or T)
        columns = None if sampling is None else SamplingColumns(sampling, R)
        self._tables = None if sampling is None else SamplingTables(sampling, gpus[self.last])
        self._columns, self._rows = columns, {} if columns is None else columns.shapes
        self.first = block_bytes(self._rows)
        pages = arrays["page_table"].shape[1]
        # Lanes have room for a sequence a token.
        shapes = _shapes(T, S, R, pages, chunks), _shapes(T, T, R, pages, None)
        size = self.first + max(map(block_bytes, shapes))
        pinned = gpus[self.last].type == "cuda"
        self.host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.blocks = {
            name: torch.zeros(size, dtype=torch.uint8, device=device)
            for name, device in gpus.items()
        }
        self._staged = {n: x.numpy() for n, x in views(self.host, self._rows).items()}
        self.tensors: dict[str, torch.Tensor] = {}
        if columns is not None and self._tables is not None:
            columns_there = views(self.blocks[self.last], self._rows)
            self.tensors = {**columns_there, **self._tables.tensors}

    def stage_sampling(self) -> None:
        """Stages how the rows of the step to come are sampled, and sends its tables."""
        if self._columns is not None and self._tables is not None:
            self._columns.stage(self._staged)
            self._tables.send()

    def bucket(
        self, T: int, R: int, decode: bool, expand_from: int | None, lanes: bool = False
    ) -> Bucket:
        """The inputs of programs of these sizes. Arguments: see ``Bucket``."""
        return Bucket(self, T, R, decode, expand_from, lanes)


class OnGpu(NamedTuple):
    """The inputs of a bucket on one GPU: what nodes read, by name, and what attention reads."""

    tensors: dict[str, torch.Tensor]
    sequences: Sequences


class Bucket:
    """The inputs of a bucket; those of a short step are little to copy.

    Args:
        T, R: tokens and rows of logits.
        decode: every sequence of its steps has one token.
        expand_from: see ``HostMetadata``.
        lanes: whether its steps have two lanes: the second one's tokens and sequences begin at a
            row of their own, so that both are parts of the block.

    Attributes:
        on: by GPU, what is there.
    """

    def __init__(
        self,
        owner: StepInputs,
        T: int,
        R: int,
        decode: bool,
        expand_from: int | None,
        lanes: bool = False,
    ) -> None:
        self._arrays, self.T, self.decode = owner.arrays, T, decode
        S = T if lanes else min(T, len(owner.arrays["lengths"]))
        pages = owner.arrays["page_table"].shape[1]
        self._piece = min(T, owner.piece or T)
        shapes = _shapes(T, S, R, pages, None if decode else most_chunks(T, S, self._piece))
        self._owner, end = owner, owner.first + block_bytes(shapes)
        self._host = owner.host[:end]
        staged = views(self._host[owner.first :], shapes)
        self._staged = {name: view.numpy() for name, view in staged.items()}
        self._expansion = Expansion()
        self._metadata = HostMetadata(self._staged, self._piece, expand_from, self._expansion)
        self._second = lane_tokens(T)[0] if lanes else None
        self._blocks = {name: block[:end] for name, block in owner.blocks.items()}
        self.on = {
            name: self._views(views(block[owner.first :], shapes))
            for name, block in self._blocks.items()
        }
        self.on[owner.last].tensors.update(owner.tensors)

    def _views(self, tensors: Mapping[str, torch.Tensor]) -> OnGpu:
        """A GPU's inputs, as parts of its block."""
        own = {field.name for field in fields(Sequences)}
        lanes: dict[str, Sequences] = {}
        sequences = Sequences(
            **{name: tensor for name, tensor in tensors.items() if name in own},
            max_queries=self._piece,
            expansion=self._expansion,
            lanes=lanes,
        )
        tensors = {name: tensor for name, tensor in tensors.items() if name not in own}
        if self._second is not None:  # the second lane begins at that row
            for lane, rows in zip(
                LANES, (slice(0, self._second), slice(self._second, None)), strict=True
            ):
                tensors |= {lane_name(lane, name): tensors[name][rows] for name in BY_TOKEN}
                lanes[lane] = Sequences(sequences.table[rows], sequences.decode_lengths[rows])
        return OnGpu(tensors, sequences)

    def send(self, T: int, S: int, R: int) -> None:
        """Copies a step's inputs, padded to the bucket: slots of -1, no keys.

        The block is free again when the step's results are there.
        """
        staged, arrays = self._staged, self._arrays
        staged["logits_indices"][:R] = arrays["logits_indices"][:R]
        staged["logits_indices"][R:] = 0
        lengths = arrays["lengths"][:S]
        used = -(-int(lengths.max(initial=0)) // PAGE)  # pages of the longest sequence
        start = self._second
        if start is None:
            self._place(slice(0, self.T), slice(0, T), slice(0, S), used)
        else:
            first = lane_tokens(T)[0]
            self._place(slice(0, start), slice(0, first), slice(0, first), used)
            self._place(slice(start, self.T), slice(first, T), slice(first, T), used)
            rows = staged["logits_indices"][:R]
            rows[rows >= first] += start - first
        if not self.decode:
            starts, counts = arrays["query_starts"][:S], arrays["query_lengths"][:S]
            self._metadata.arrange(starts, counts, lengths, arrays["positions"][:T])
        self._copy()

    def _place(self, rows: slice, tokens: slice, sequences: slice, used: int) -> None:
        """Fills in what tokens and sequences have, in rows of the block, and pads the rest of the
        rows.

        Args:
            used: pages of the longest sequence.
        """
        staged, arrays = self._staged, self._arrays
        for name, padding in BY_TOKEN.items():  # what another bucket left here may be no id
            pad(staged[name][rows], arrays[name][tokens], padding)
        table = staged["table"][rows]
        S = sequences.stop - sequences.start
        table[:S, :used] = arrays["page_table"][arrays["page_rows"][sequences], :used]
        table[:S, used:] = 0
        table[S:] = 0
        if self.decode:
            pad(staged["decode_lengths"][rows], arrays["lengths"][sequences])

    def _copy(self) -> None:
        """To every GPU, on the current stream of each."""
        self._owner.stage_sampling()
        for block in self._blocks.values():
            block.copy_(self._host, non_blocking=True)

    def pretend(self) -> None:
        """Sends a step that compiles what other steps launch, and writes nothing to the cache: one
        chunk of all tokens, or one token of each sequence."""
        staged, T = self._staged, self.T
        for array in staged.values():
            array[:] = 0
        staged["slot_mapping"][:] = -1
        staged["decode_lengths"][:] = 1
        if not self.decode:
            n = min(T, staged["table"].shape[1] * PAGE)
            lengths = np.array([n], np.int64)
            self._metadata.arrange(np.zeros(1, np.int64), lengths, lengths, np.zeros(n, np.int64))
        self._copy()


def _shapes(T: int, S: int, R: int, pages: int, chunks: int | None) -> dict[str, Shape]:
    shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(BY_TOKEN, (T,)), "logits_indices": (R,)}
    return {
        **{name: (shape, torch.int32) for name, shape in shapes.items()},
        **metadata_shapes(T, S, pages, chunks),
    }
