"""A call's arrival: its inputs into the descriptor, in one compiled function.

A call begins right behind one that has read its weights through all caches, so whatever the driver
runs before the workers may begin comes from memory: each step in Python costs ten times what it
costs in a loop of empty calls. So what only depends on shapes and dtypes is in the descriptor
already (``MoECall.arrange``), and stays there for the next call of such inputs.
"""

from __future__ import annotations

from .intake import take_inputs
from .jit import inlined, kernel
from .job import job_at
from .routing import OK, sort_slots

BAD_EXPERT = -1


@inlined
def take_call(job_address, x, ids, weights, y):
    """Takes an arranged call's inputs and routing; copies x if no task will.

    Args:
        x, y: addresses of [T, H], as they were arranged.
        ids, weights: as in ``sort_slots``.

    Returns:
        the number of active experts, or BAD_EXPERT or ``raised.RAISED``.
    """
    job = job_at(job_address)
    job.y = y
    if sort_slots(job_address, ids, weights) != OK:
        return BAD_EXPERT
    take_inputs(job_address, x)
    return job.raised if job.raised != 0 else job.A


@kernel()
def arrive(job_address, x, ids, weights, y):
    """``take_call``, for who starts the call by other means."""
    return take_call(job_address, x, ids, weights, y)
