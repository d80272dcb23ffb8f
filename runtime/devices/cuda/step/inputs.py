"""The inputs of a step on a GPU: one pinned block, one copy for each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from ....kv_cache.layout import PAGE
from ....passes.gpu.metadata import MAX_CHUNK, most_chunks
from ....planning.compile import Compiled
from ....program import Node, Program
from ....program.sizes import MICROBATCHES, microbatch_name, microbatch_tokens
from ....program.step_inputs import (
    HAS_STATE,
    HEAD_LENGTHS,
    IS_PROMPT,
    SAVED_SLOTS,
    STATE_SLOTS,
    TAIL_LENGTHS,
    TAIL_STARTS,
    WINDOW_SLOTS,
    WINDOW_TABLE,
)
from ....runner.sampling import SamplingBatch
from ...gpus import Gpus
from ..binders.sampling import SamplingColumns, SamplingTables
from ..memory.blocks import Shape, block_bytes, views
from ..memory.metadata import HostMetadata, pad

BY_TOKEN = {"tokens": 0, "positions": 0, IS_PROMPT: 0, "slot_mapping": -1}
"""Inputs [T] that nodes read by name, and what padding has."""
BY_SEQUENCE = {"query_starts": 0, "query_lengths": 0, STATE_SLOTS: -1, HAS_STATE: 0}
"""Likewise [S], of programs whose nodes read states."""
BY_TAIL = {HEAD_LENGTHS: 0, TAIL_STARTS: 0, TAIL_LENGTHS: 0, SAVED_SLOTS: -1}
"""Likewise, of those that save some on their way."""
_TABLES = {"table": "page_table", "window_table": WINDOW_TABLE}
"""Pages of sequences, and the arrays that they are in."""
_OF_DECODES = (*_TABLES, "decode_lengths")
"""All that attention reads in decode steps."""


class StepInputs:
    """Memory for the inputs of any bucket: copies of the engine's arrays, int32 where nodes read
    numbers of tokens. How rows are sampled comes first, at one place for all buckets.

    Args:
        arrays: by name, int64 CPU tensors that the engine writes before each step.
        sampling: how rows are sampled, on ``sampler``; None: programs that sample nothing.
        max_chunk: tokens of a chunk of its programs, where any are cut.
        others: names of further arrays that programs may read, each with what padding has.
        sampler: the GPU that samples; "": the last one.

    Attributes:
        first: bytes of the block in front of a bucket's own.
        blocks: by GPU, its copy of the block ``host``.
        tensors: by name, views on that GPU of how rows are sampled, in their largest shape.
    """

    def __init__(
        self,
        arrays: Mapping[str, torch.Tensor],
        sampling: SamplingBatch | None,
        gpus: Gpus,
        max_chunk: int = MAX_CHUNK,
        others: Mapping[str, int] = MappingProxyType({}),
        sampler: str = "",
    ) -> None:
        self.sampler, self.others = sampler or list(gpus)[-1], others
        self.arrays = {
            name: tensor.numpy() for name, tensor in arrays.items() if tensor.dtype == torch.int64
        }
        T, S, R = (len(arrays[name]) for name in ("tokens", "lengths", "logits_indices"))
        columns = None if sampling is None else SamplingColumns(sampling, R)
        self._tables = None if sampling is None else SamplingTables(sampling, gpus[self.sampler])
        self._columns, self._rows = columns, {} if columns is None else columns.shapes
        self.first = block_bytes(self._rows)
        pages = arrays["page_table"].shape[1]
        sizes: dict[str, Shape] = {n: (tuple(arrays[n].shape), torch.int32) for n in others}
        windows = WINDOW_TABLE in arrays
        size = self.first + _most_bytes(T, S, R, pages, max_chunk, windows) + block_bytes(sizes)
        pinned = gpus[self.sampler].type == "cuda"
        self.host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.blocks = {
            name: torch.zeros(size, dtype=torch.uint8, device=device)
            for name, device in gpus.items()
        }
        self._staging = {n: x.numpy() for n, x in views(self.host, self._rows).items()}
        self.tensors: dict[str, torch.Tensor] = {}
        if columns is not None and self._tables is not None:
            columns_there = views(self.blocks[self.sampler], self._rows)
            self.tensors = {**columns_there, **self._tables.tensors}

    def bucket(self, compiled: Compiled) -> Bucket:
        """The inputs of what was compiled."""
        return Bucket(self, compiled.program)

    def stage_sampling(self) -> None:
        """Stages how the rows of the step to come are sampled, and sends its tables."""
        if self._columns is not None and self._tables is not None:
            self._columns.stage(self._staging)
            self._tables.send()


class Bucket:
    """The inputs of a program's steps; those of a short step are little to copy.

    Args:
        program: with ``passes.gpu.metadata``. If it has two microbatches the second one's tokens
            and sequences begin at a row of their own, so that both are parts of the block.
        prefix: what the names of its inputs by token and by sequence begin with.

    Attributes:
        on: by GPU, tensors by the program's names.
    """

    def __init__(self, owner: StepInputs, program: Program, prefix: str = "") -> None:
        self._owner, self._arrays, self.T = owner, owner.arrays, program.sizes["T"]
        self._prefix = prefix
        self._others = {n: pad for n, pad in owner.others.items() if n in program.buffers}
        microbatches = any(node.microbatch for node in program.nodes)
        self._second = microbatch_tokens(self.T)[0] if microbatches else None
        writes = [node for node in program.nodes if node.op == "attention_metadata"]
        windows = any("window_table" in node.outputs for node in writes)
        self._by_token = {**BY_TOKEN, **({WINDOW_SLOTS: -1} if windows else {})}
        shapes: dict[str, Shape] = dict.fromkeys(self._by_token, ((self.T,), torch.int32))
        self._by_sequence = {
            **(BY_SEQUENCE if _reads(program, STATE_SLOTS) else {}),
            **(BY_TAIL if _reads(program, SAVED_SLOTS) else {}),
        }
        S = self.T if microbatches else min(self.T, program.sizes["S"])
        shapes |= dict.fromkeys(self._by_sequence, ((S,), torch.int32))
        shapes |= {
            "logits_indices": ((program.sizes["R"],), torch.int32),
            **_shapes(program, writes),
            **{name: (program.shape(name), torch.int32) for name in self._others},
        }
        end = owner.first + block_bytes(shapes)
        self._host = owner.host[:end]
        staging = views(self._host[owner.first :], shapes)
        self._staging = {name: view.numpy() for name, view in staging.items()}
        expansion = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._metadata: HostMetadata | None = None  # in decode steps there is nothing to find out
        if any(port not in _OF_DECODES for node in writes for port in node.outputs):
            outputs = {**self._staging, "expansion": expansion.numpy()}
            own = {port: outputs[port] for port in writes[0].outputs}
            attrs = writes[0].attr("expand_from"), writes[0].attr("chunk")
            self._metadata = HostMetadata(own, *attrs)
        self._blocks = {name: block[:end] for name, block in owner.blocks.items()}
        self.on: dict[str, dict[str, torch.Tensor]] = {}
        for gpu, block in self._blocks.items():
            there = views(block[owner.first :], shapes) | {"expansion": expansion}
            self.on[gpu] = self._named(there, [node for node in writes if node.device == gpu])
        self.on[owner.sampler].update(owner.tensors)

    def _named(
        self, tensors: Mapping[str, torch.Tensor], writes: Sequence[Node]
    ) -> dict[str, torch.Tensor]:
        """A GPU's inputs by the program's names, those of microbatches as parts."""
        own = *self._by_token, *self._by_sequence
        named = {self._prefix + name: tensors[name] for name in own}
        named |= {name: tensors[name] for name in ("logits_indices", *self._others)}
        rows = {"": slice(None)}
        if self._second is not None:  # the second microbatch begins at that row
            rows |= zip(
                MICROBATCHES, (slice(0, self._second), slice(self._second, None)), strict=True
            )
        for microbatch in rows if self._second is not None else ():
            named |= {
                microbatch_name(microbatch, name): tensors[name][rows[microbatch]] for name in own
            }
        for node in writes:
            named |= {
                name: tensors[port][rows[node.microbatch]] for port, name in node.outputs.items()
            }
        return named

    def send(self, T: int, S: int, R: int) -> None:
        """Copies a step's inputs, padded to the bucket: slots of -1, no keys.

        The block is free again when the step's results are there.
        """
        staging, arrays = self._staging, self._arrays
        staging["logits_indices"][:R] = arrays["logits_indices"][:R]
        staging["logits_indices"][R:] = 0
        lengths = arrays["lengths"][:S]
        used = -(-int(lengths.max(initial=0)) // PAGE)  # pages of the longest sequence
        start = self._second
        if start is None:
            self._place(slice(0, self.T), slice(0, T), slice(0, S), used)
        else:
            first = microbatch_tokens(T)[0]
            self._place(slice(0, start), slice(0, first), slice(0, first), used)
            self._place(slice(start, self.T), slice(first, T), slice(first, T), used)
            rows = staging["logits_indices"][:R]
            rows[rows >= first] += start - first
        for name in self._others:
            staging[name][:] = arrays[name][: len(staging[name])]
        if self._metadata is not None:
            starts, counts = arrays["query_starts"][:S], arrays["query_lengths"][:S]
            self._metadata.write(starts, counts, lengths, arrays["positions"][:T])
        self._copy()

    def _place(self, rows: slice, tokens: slice, sequences: slice, used: int) -> None:
        """Fills in what tokens and sequences have, in rows of the block, and pads the rest of the
        rows.

        Args:
            used: pages of the longest sequence.
        """
        staging, arrays = self._staging, self._arrays
        for name, padding in self._by_token.items():  # what another bucket left here may be no id
            pad(staging[name][rows], arrays[name][tokens], padding)
        for name, padding in self._by_sequence.items():
            first = (
                tokens.start if name == "query_starts" else 0
            )  # which is counted in the microbatch
            pad(staging[name][rows], arrays[name][sequences] - first, padding)
        if "table" not in staging:  # nothing attends
            return
        S = sequences.stop - sequences.start
        for port in _TABLES.keys() & staging.keys():
            table = staging[port][rows]
            table[:S, :used] = arrays[_TABLES[port]][arrays["page_rows"][sequences], :used]
            table[:S, used:] = 0
            table[S:] = 0
        if self._metadata is None:
            pad(staging["decode_lengths"][rows], arrays["lengths"][sequences])

    def _copy(self) -> None:
        """Copies the block to every GPU, on the current stream of each."""
        self._owner.stage_sampling()
        for block in self._blocks.values():
            block.copy_(self._host, non_blocking=True)

    def pretend(self) -> None:
        """Sends a step that compiles what other steps launch, and writes nothing to the cache: one
        chunk of all tokens, or one token of each sequence."""
        staging, T = self._staging, self.T
        for array in staging.values():
            array[:] = 0
        for name, padding in {**self._by_token, **self._by_sequence, **self._others}.items():
            staging[name][:] = padding
        if "decode_lengths" in staging:
            staging["decode_lengths"][:] = 1
        if self._metadata is not None:
            n = min(T, staging["table"].shape[1] * PAGE)
            lengths = np.array([n], np.int64)
            self._metadata.write(np.zeros(1, np.int64), lengths, lengths, np.zeros(n, np.int64))
        self._copy()


def _reads(program: Program, port: str) -> bool:
    return any(port in node.inputs for node in program.nodes)


def _shapes(program: Program, writes: Sequence[Node]) -> dict[str, Shape]:
    """Shapes of the metadata of one GPU's attention in the block, by port; both microbatches' lie
    one behind the other."""
    shapes: dict[str, Shape] = {}
    for node in writes:
        if node.device != writes[0].device:
            continue
        for port in node.outputs.keys() - {"expansion"}:
            rows, *rest = program.shape(node.outputs[port])
            before = shapes[port][0][0] if port in shapes else 0
            shapes[port] = (before + rows, *rest), torch.int32
    return shapes


def _most_bytes(T: int, S: int, R: int, pages: int, max_chunk: int, windows: bool) -> int:
    """Bytes that a bucket takes, at most; microbatches have room for a sequence a token."""
    C, tables = most_chunks(T, S, max_chunk), 1 + windows
    tokens = ((T,),) * (len(BY_TOKEN) + 2 + windows)
    n = 2 + len(BY_SEQUENCE) + len(BY_TAIL)
    by_chunk = (*((C,),) * 4, *((C, pages),) * tables)
    mixed = (*tokens, (R,), *((S,),) * n, *((S, pages),) * tables, *by_chunk)
    microbatches = (*tokens, (R,), *((T,),) * n, *((T, pages),) * tables)
    return max(
        block_bytes({str(i): (shape, torch.int32) for i, shape in enumerate(shapes)})
        for shapes in (mixed, microbatches)
    )
