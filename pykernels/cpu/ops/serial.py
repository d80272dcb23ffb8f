"""A call of tasks from Python: its record, what it points at, its tasks one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import raised
from ..intrin.sync import call_task
from ..jit import kernel

Tasks = tuple[Any, Any]
"""(setup, run): tasks (``jit.TASK``), of which the first returns how many the second has."""

_LINE = 64


@kernel()
def _run(setup, run, args):
    tasks = call_task(setup, args, -1, 0)
    if tasks < 0:
        return tasks
    for index in range(tasks):
        status = call_task(run, args, index, 0)
        if status != 0:
            return status
    return 0


class Record:
    """Int64 fields as tasks read them.

    Args:
        kind: the dtype that ``intrin.descriptor`` has made.
        fields: the address of a tensor or an array, which is kept; the bits of a float as float32;
            None as 0; numbers as they are.
    """

    def __init__(self, kind: np.dtype, **fields: Any) -> None:
        self._words, self._held = np.zeros(1, kind), fields
        for name, value in fields.items():
            self._words[name] = _word(value)

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)


def _word(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, Record):
        return value.address
    if isinstance(value, float):
        return int(np.float32(value).view(np.uint32))
    return 0 if value is None else int(value)


def counted(count: int) -> np.ndarray:
    """What ``count_at`` points at."""
    return np.array([count], np.int64)


def scratch(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], 64-byte aligned, not cleared."""
    raw = torch.empty(nbytes + _LINE, dtype=torch.uint8, device="cpu")
    skip = -raw.data_ptr() % _LINE
    return raw[skip : skip + nbytes]


def run_tasks(tasks: Tasks, address: int) -> int:
    """Runs the tasks of one record on this thread.

    Returns:
        0, or the status of the first task that is not 0; those behind it are not run.

    Raises:
        Exception: what a kernel raised.
    """
    setup, run = tasks
    status = int(_run(setup.address, run.address, address))
    if status == raised.RAISED or raised.pending():
        raise raised.take() or RuntimeError("a kernel raised")
    return status
