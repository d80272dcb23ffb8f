"""Steps whose tokens are dealt over GPUs (OSDI'26 3.2): what each of them reads, and their results
in the order of the step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ...passes.shard.stripes import (
    BLOCK_SLOTS,
    BY_SEQUENCE,
    deal,
    of_all,
    of_rank,
    places,
    stripe_tokens,
)
from ...planning.compile import Compiled
from ...program import Program
from ...program.op_table.collectives import ALL_TOKENS
from ...runner.sampling import SamplingBatch
from ..gpus import Gpus
from .step.executable import CudaExecutable
from .step.inputs import BY_TOKEN, Bucket, StepInputs

_ROWS, _SLOTS = of_all("logits_indices"), of_all("slot_mapping")
_OTHERS = {_ROWS: 0, _SLOTS: -1, of_all("is_prompt"): 0, BLOCK_SLOTS: 0}
"""Inputs of all ranks' tokens, and what padding has."""


class StripedInputs:
    """Memory for the inputs of all ranks, by GPU; see ``StepInputs``.

    Args:
        arrays: of the whole step; ``sampling``: how its rows are sampled, on the first GPU.
        gpus: by rank.
    """

    def __init__(
        self, arrays: Mapping[str, torch.Tensor], sampling: SamplingBatch, gpus: Gpus
    ) -> None:
        self.step = {
            name: tensor.numpy() for name, tensor in arrays.items() if tensor.dtype == torch.int64
        }
        T, S, R = (len(arrays[name]) for name in ("tokens", "lengths", "logits_indices"))
        room = stripe_tokens(T, len(gpus))
        self.ranks: dict[str, StepInputs] = {}
        for rank, (gpu, device) in enumerate(gpus.items()):
            sizes = dict.fromkeys((*BY_TOKEN, BLOCK_SLOTS), room)
            sizes |= dict.fromkeys(BY_SEQUENCE, S + 1)
            sizes |= dict.fromkeys((_SLOTS, of_all("is_prompt")), len(gpus) * room)
            sizes |= {_ROWS: R, "logits_indices": R}
            own = {
                name: torch.zeros(n, dtype=torch.int64, device="cpu") for name, n in sizes.items()
            }
            own[BLOCK_SLOTS][:] = torch.arange(room, dtype=torch.int64, device="cpu")
            own["page_table"] = arrays["page_table"]
            columns = None if rank else sampling
            self.ranks[gpu] = StepInputs(own, columns, {gpu: device}, others=_OTHERS)

    def bucket(self, compiled: Compiled) -> StripedBucket:
        """The inputs of what was compiled."""
        return StripedBucket(self, compiled)


class StripedBucket:
    """The inputs of a program's steps on all ranks; see ``Bucket``.

    Attributes:
        on: by GPU, tensors by the program's names.
    """

    def __init__(self, owner: StripedInputs, compiled: Compiled) -> None:
        self._step, room = owner.step, compiled.program.sizes["T"]
        self._room, self._count = room, len(owner.ranks)
        self._buckets: list[Bucket] = []
        self._arrays: list[dict[str, np.ndarray]] = []
        self._out: dict[str, np.ndarray] = {}
        self.on: dict[str, dict[str, torch.Tensor]] = {}
        for rank, (gpu, inputs) in enumerate(owner.ranks.items()):
            bucket = Bucket(inputs, compiled.parts[gpu], of_rank(rank, ""))
            self._buckets.append(bucket)
            self._arrays.append(inputs.arrays)
            self.on |= bucket.on
            for name in (*BY_TOKEN, *BY_SEQUENCE):
                own = inputs.arrays[name]
                self._out[of_rank(rank, name)] = own[:room] if name in BY_TOKEN else own
        first = self._arrays[0]
        self._out[_ROWS] = first[_ROWS]
        for name in (_SLOTS, of_all("is_prompt")):
            self._out[name] = first[name][: room * self._count]

    def send(self, T: int, S: int, R: int) -> None:
        """Deals a step's inputs, and copies each rank's to its GPU."""
        deal(self._step, self._count, T, S, R, self._room, self._out)
        for bucket, arrays in zip(self._buckets, self._arrays, strict=True):
            for name in (_SLOTS, of_all("is_prompt")):
                if arrays is not self._arrays[0]:
                    arrays[name][: len(self._out[name])] = self._out[name]
            lengths = arrays["query_lengths"]
            bucket.send(int(lengths.sum()), int(np.count_nonzero(lengths)), R)

    def pretend(self) -> None:
        """See ``Bucket``."""
        for bucket in self._buckets:
            bucket.pretend()


class StripedExecutable(CudaExecutable):
    """A step that several GPUs share, as whoever runs it sees it.

    Attributes:
        program: of the whole step, before it was dealt; ``joined``: of all ranks.
        outputs: by name, of the whole step's tokens in their order.
    """

    def deal_back(self, program: Program, sizes: torch.Tensor) -> StripedExecutable:
        """Itself, with the outputs of ``program``, that of the whole step.

        Args:
            sizes: of the step to come.
        """
        self.joined, self.program, self._step = self.program, program, sizes
        self._ranks = len(self.gpus)
        gathered = {
            name: tensor
            for name, tensor in self.outputs.items()
            if self.joined.buffers[name].shape[0] == ALL_TOKENS
        }
        dealt = {
            name: torch.zeros(program.shape(name), dtype=value.dtype, device="cpu")
            for name, value in gathered.items()
        }
        self.outputs = {**self.outputs, **dealt}
        # By NumPy: torch took up to 80 ms, with all its threads for a little copy each.
        self._gathered = [(gathered[name].numpy(), dealt[name].numpy()) for name in dealt]
        return self

    def result(self) -> None:
        super().result()
        T = int(self._step[0])
        room = self.joined.sizes["T"]
        at = places(np.arange(T), T, self._ranks, room)
        for rows, target in self._gathered:
            rows.take(at, axis=0, out=target[:T], mode="clip")  # "raise" would copy once more
