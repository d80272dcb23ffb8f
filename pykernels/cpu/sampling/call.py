"""A call of sampling from Python: its memory, its args, and its tasks one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import PykernelsError
from ...ref.sampling import MAX_LOGPROBS, Sampled, SamplingRequest
from ...ref.sampling.inputs import SamplingInputs, inputs_of
from ..moe.checks import check_dense, check_readable
from ..ops.serial import run_tasks
from .args import COLUMNS, SAMPLING, TABLES, sizes
from .draw import make_draw
from .finish import make_finish
from .scan import make_scan


def _arguments(requests: Sequence[SamplingRequest], V: int) -> dict[str, np.ndarray]:
    """By the names of fields of the args, what they are addresses of.

    Raises:
        PykernelsError: a penalty, mask, number or list that cannot be.
    """
    for request in requests:
        _check(request, V)
    given = vars(inputs_of(requests, V))
    found: dict[str, np.ndarray] = {}
    for name, kind in COLUMNS.items():
        if given[name] is None:
            found[name] = np.full(len(requests), -1 if name.endswith("_row") else 0, kind)
        else:
            found[name] = given[name].numpy().astype(kind)
    return found | {name: given[name].numpy() for name in TABLES if given[name] is not None}


def _check(request: SamplingRequest, V: int) -> None:
    def length(values: torch.Tensor | None) -> int:
        return 0 if values is None else len(values)

    if not request.repetition > 0:
        raise PykernelsError(f"repetition is {request.repetition}", "Give a positive number")
    if not -1 <= request.logprobs <= MAX_LOGPROBS:
        hint = f"Ask for {MAX_LOGPROBS} at most, or -1"
        raise PykernelsError(f"{request.logprobs} top logprobs", hint)
    if request.mask is not None and request.mask.shape != (V,):
        raise PykernelsError(f"a mask {tuple(request.mask.shape)}", f"Give it bool [{V}]")
    for ids, values in ((request.seen, request.counts), (request.bias_ids, request.bias)):
        if length(ids) != length(values):
            raise PykernelsError(
                f"{length(ids)} token ids with {length(values)} values", "Give each id its value"
            )


@dataclass(frozen=True)
class SamplingCall:
    """The args of one step and the memory that it has addresses of.

    Attributes:
        args: a ``SAMPLING`` record; ``address`` is what its tasks take.
        out: where they write.
        held: the rest.
    """

    args: np.ndarray
    out: Sampled
    held: list[Any]

    @property
    def address(self) -> int:
        return self.args.ctypes.data


def prepare(
    logits: torch.Tensor, requests: Sequence[SamplingRequest], workers: int = 1
) -> SamplingCall:
    """A call that tasks of up to ``workers`` workers can run; otherwise as `sample_requests`."""
    check_dense("logits", logits)
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1:
        given = f"{logits.dtype} {tuple(logits.shape)}"
        raise PykernelsError(f"logits are {given}", "Give float32 [R, V] in dense rows")
    check_readable("logits", logits)
    R, V = logits.shape
    if len(requests) != R:
        raise PykernelsError(f"{len(requests)} requests for {R} rows", "Give one a row")
    need, arguments = sizes(R, V, workers), _arguments(requests, V)
    held: list[Any] = [arguments]
    out = Sampled(
        torch.empty(R, dtype=torch.int64, device="cpu"),
        torch.empty(R, dtype=torch.float32, device="cpu"),
        torch.empty(R, MAX_LOGPROBS, dtype=torch.int64, device="cpu"),
        torch.empty(R, MAX_LOGPROBS, dtype=torch.float32, device="cpu"),
    )
    count, args = np.array([R], np.int64), np.zeros(1, SAMPLING)
    for name, array in arguments.items():
        args[name] = array.ctypes.data
    for name in ("adjusted", "maxima", "partials", "scratch"):
        held.append(np.empty(getattr(need, name), np.uint8))
        args[name] = held[-1].ctypes.data
    args["scratch_stride"] = need.scratch_stride
    args["count_at"], args["V"] = count.ctypes.data, V
    args["logits"], args["logits_stride"] = logits.data_ptr(), 4 * logits.stride(0)
    args["tokens"], args["logprobs_out"] = out.tokens.data_ptr(), out.logprobs.data_ptr()
    args["top_ids"], args["top_logprobs"] = out.top_ids.data_ptr(), out.top_logprobs.data_ptr()
    return SamplingCall(args, out, [*held, count, logits])


def make_ops() -> list[tuple[Any, Any]]:
    """The (setup, run) tasks of scan, draw and finish, in their order."""
    return [make_scan(), make_draw(), make_finish()]


def sample_requests(logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> Sampled:
    """One token a row, of requests that know nothing of each other, on the calling thread alone.

    The fast twin of ``ref.sampling.sample_requests``, where parameters and result are described.
    The same tokens are drawn, unless the two best draws differ by no more than rounding.

    Args:
        logits: float32 [R, V], dense rows.
        requests: R of them.

    Raises:
        PykernelsError: what does not fit.
    """
    call = prepare(logits, requests)
    for tasks in make_ops():
        run_tasks(tasks, call.address)
    return call.out


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
    """One token a row, as ``sample_requests`` draws it from the row's request.

    Args:
        logits: floats [R, V].
        inputs: of R rows.

    Raises:
        PykernelsError: what does not fit.
    """
    check_dense("logits", logits)
    if logits.ndim != 2 or not logits.is_floating_point():
        raise PykernelsError(
            f"logits are {logits.dtype} {tuple(logits.shape)}", "Give floats [R, V]"
        )
    R, V = logits.shape
    requests = [inputs.request(row, V) for row in range(R)]
    return sample_requests(logits.float().contiguous(), requests)
