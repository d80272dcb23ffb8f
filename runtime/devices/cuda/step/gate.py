"""Where a step may be parked: a flag that its stream waits for between layers.

The wait is a launch like others, in the graph of the step: the host only writes the flag, and the
GPU is never idle while nobody is to be served first. A parked step keeps all its buffers. What
crosses to it in another stream goes on until the ring is full, and waits there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from pykernels.gpu.common.stream_memory import wait_value

from ....program import Program
from ....program.ops import COPIES, OPS
from ..binders.dense import Launch

_OPEN, _CLOSED = 1, 0
_WORDS = 16
"""int32 words of a cache line."""
_POLL_S = 2e-4


class Gate:
    """Holds up steps while it is closed, which it is for a time that was given ahead: no step waits
    for ever, whatever becomes of who closed it.

    Args:
        pinned: whether a GPU reads the flag; else a thread plays its stream.
    """

    def __init__(self, pinned: bool) -> None:
        self._flag = torch.full(
            (_WORDS,), _OPEN, dtype=torch.int32, device="cpu", pin_memory=pinned
        )
        self._array = self._flag.numpy()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def close(self, seconds: float) -> None:
        """Steps wait at their next layer, for so long at most or until ``open``."""
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        with self._lock:
            self._cancel()
            self._timer, self._array[0] = timer, _CLOSED
        timer.start()

    def open(self) -> None:
        """Steps go on."""
        with self._lock:
            self._cancel()
            self._array[0] = _OPEN

    @property
    def closed(self) -> bool:
        """Whether steps wait."""
        return bool(self._array[0] != _OPEN)

    def launch(self, device: torch.device) -> Launch:
        """The wait, in the current stream of a device."""
        if device.type == "cuda":
            address = int(self._flag.data_ptr())
            return lambda: wait_value(address, _OPEN)
        return self._wait

    def before_layers(
        self, launches: Sequence[Launch], program: Program, device: torch.device
    ) -> list[Launch]:
        """The launches of a program's nodes, with the wait before each layer and before its routed
        experts."""
        wait, layer = self.launch(device), None
        found = list[Launch]()
        for node, launch in zip(program.nodes, launches, strict=True):
            if OPS[node.op].stream != COPIES and node.layer is not None:
                if node.layer != layer or node.role == "routed":
                    launch = _behind(wait, launch)
                layer = node.layer
            found.append(launch)
        return found

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread():
                self._timer, self._array[0] = None, _OPEN

    def _wait(self) -> None:
        while self._array[0] != _OPEN:
            time.sleep(_POLL_S)


def _behind(wait: Launch, launch: Launch) -> Launch:
    def both() -> None:
        wait()
        launch()

    return both
