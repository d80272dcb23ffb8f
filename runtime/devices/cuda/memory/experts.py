"""Fills slots on a GPU with experts of the CPU's tiles, in parallel with the steps that it
computes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue

import torch

from pykernels.gpu.moe.experts import GpuExperts
from pykernels.gpu.moe.tiles.staging import ExpertTiles, copy_expert
from pykernels.quant import PackedExperts
from pykernels.quant.split import SplitExperts

from ....experts.cache import Move
from ....program.weight_spec import WeightSpec
from ....runner.batch import DeviceLost
from .weights import place_expert

STAGED = 16
"""Experts that are brought into the GPU's layout at a time, at most."""
STAGING = 128 << 20
"""Bytes of GPU memory in which they lie as they came, about; one expert at the least."""


@dataclass(frozen=True)
class ExpertSlotLayer:
    """A layer's slots.

    Attributes:
        spec: of the slots; ``tiles``: all experts of the layer in main memory; ``slots``: on the
            GPU.
    """

    spec: WeightSpec
    tiles: PackedExperts | SplitExperts
    slots: GpuExperts


def experts_per_copy(spec: WeightSpec) -> int:
    """Experts that are staged at a time."""
    return max(1, min(STAGED, spec.shape[0], STAGING // spec.bytes_per_expert))


def staging_bytes(spec: WeightSpec) -> int:
    """GPU memory that filling a layer's slots takes, besides them."""
    return experts_per_copy(spec) * spec.bytes_per_expert


class ExpertSlotFiller:
    """See ``experts.cache.Filler``.

    On a GPU by a thread and a stream of its own, so that neither the engine nor a step waits, also
    where the tiles are not pinned; in Triton's interpreter between the steps.

    Args:
        layers: of the GPU ``device``, by the number that moves have.

    Raises:
        DeviceLost: in ``finished``: a copy has failed, so nobody knows what is in the slots.
    """

    def __init__(self, layers: Mapping[int, ExpertSlotLayer], device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._done: deque[Move] = deque()
        self._queue: SimpleQueue[Sequence[Move] | None] = SimpleQueue()
        self._error: BaseException | None = None
        needed = max((_bytes(layer) for layer in layers.values()), default=0)
        self._staging = torch.empty(needed, dtype=torch.uint8, device=device)
        self._thread: threading.Thread | None = None

    def warm(self) -> None:
        """Compiles what filling takes: experts come into slots that no table names yet."""
        kinds = {
            (layer.spec.fmt, layer.spec.down_fmt, layer.spec.shape): i
            for i, layer in self._layers.items()
        }
        self._fill([Move(i, 0, 0) for i in kinds.values()])

    def begin(self, moves: Sequence[Move]) -> None:
        self._queue.put(list(moves))
        if self._device.type == "cuda" and self._thread is None:
            self._thread = threading.Thread(
                target=_run,
                args=(weakref.ref(self), self._queue, self._device),
                name="expert slots",
                daemon=True,
            )
            weakref.finalize(self, self._queue.put, None).atexit = False
            self._thread.start()

    def finished(self) -> Sequence[Move]:
        if self._device.type != "cuda":
            while not self._queue.empty():
                self.take(self._queue.get())
        if self._error is not None:
            why = (str(self._error) or type(self._error).__name__).splitlines()[0]
            raise DeviceLost(
                f"no expert can be brought to {self._device}: {why}",
                "Load the model without expert_cache",
            ) from self._error
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def take(self, moves: Sequence[Move] | None, ended: torch.cuda.Event | None = None) -> None:
        """Does what ``begin`` was asked for; with an event, waits until it is done."""
        if moves is None:
            return
        self._fill(moves)
        if ended is not None:
            ended.record()
            ended.synchronize()
        self._done.extend(moves)

    def fail(self, error: BaseException) -> None:
        """Has ``finished`` raise it, in the engine's thread."""
        self._error = error

    def _fill(self, moves: Sequence[Move]) -> None:
        for number, group in groupby(sorted(moves), lambda move: move.layer):
            layer, own = self._layers[number], list(group)
            if isinstance(layer.tiles, SplitExperts):  # a slice on each NUMA node
                for move in own:
                    place_expert(layer.slots, layer.spec, layer.tiles, move.expert, move.slot)
                continue
            count = experts_per_copy(layer.spec)
            for first in range(0, len(own), count):
                self._unpack(layer, layer.tiles, own[first : first + count])

    def _unpack(self, layer: ExpertSlotLayer, tiles: PackedExperts, moves: Sequence[Move]) -> None:
        from pykernels.gpu.moe.from_tiles import unpack_tiles  # plans need no Triton

        shape, fmt, down_fmt = tiles.shape, tiles.fmt, tiles.down_fmt
        staging = ExpertTiles.within(self._staging, shape, fmt, down_fmt, len(moves))
        for i, move in enumerate(moves):
            copy_expert(tiles, move.expert, staging, i)
        slots = torch.tensor([move.slot for move in moves], dtype=torch.int32, device="cpu")
        unpack_tiles(staging, layer.slots, slots.to(self._device))


def _run(
    owner: weakref.ref[ExpertSlotFiller],
    queue: SimpleQueue[Sequence[Move] | None],
    device: torch.device,
) -> None:
    """The thread of a filler, which it holds while it fills only: then it ends with its model."""
    try:
        with ExitStack() as around:
            around.enter_context(torch.cuda.device(device))
            around.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            around.enter_context(torch.inference_mode())
            ended = torch.cuda.Event()
            while (moves := queue.get()) is not None and (filler := owner()) is not None:
                filler.take(moves, ended)
                del filler
    except BaseException as error:
        if (filler := owner()) is not None:
            filler.fail(error)


def _bytes(layer: ExpertSlotLayer) -> int:
    tiles = layer.tiles
    if isinstance(tiles, SplitExperts):
        return 0
    count = experts_per_copy(layer.spec)
    return ExpertTiles.bytes_needed(tiles.shape, tiles.fmt, tiles.down_fmt, count)
