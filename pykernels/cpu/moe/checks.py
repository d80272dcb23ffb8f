"""Whether tensors are what kernels can read: dense, somewhere in this machine's memory, and for
experts of shapes that fit."""

from __future__ import annotations

import torch

from ...errors import PykernelsError


def check_dense(name: str, given: object) -> None:
    """Whether it has a shape and strides; to be called before anything reads these.

    Raises:
        PykernelsError: it is no tensor, or a sparse, nested or otherwise opaque one.
    """
    if not isinstance(given, torch.Tensor):
        raise PykernelsError(f"{name} is {_kind(given)}, no torch tensor", "Give a tensor")
    if given.layout is not torch.strided or given.is_nested:
        layout = "nested" if given.is_nested else given.layout
        raise PykernelsError(f"{name} is {layout}", "Give it dense, as .to_dense() copies it")


def check_readable(name: str, given: torch.Tensor) -> None:
    """Whether its values lie on the CPU.

    Raises:
        PykernelsError: they lie elsewhere, or nowhere (fake tensors).
    """
    if not given.is_cpu:
        raise PykernelsError(
            f"{name} lies on {given.device}",
            "Give it on the CPU, as .cpu() copies it",
        )
    if given.numel() and not _has_memory(given):
        raise PykernelsError(
            f"{name} is a {type(given).__name__} without memory",
            "Call it outside of tracing, FakeTensorMode and torch.func",
        )


def check_call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, H: int) -> None:
    """Whether a call's inputs fit experts of H inputs, but for the numbers in ids.

    Raises:
        PykernelsError: what does not.
    """
    for name, given in (("x", x), ("ids", ids), ("weights", weights)):
        check_dense(name, given)
    if x.ndim != 2 or x.shape[1] != H or x.dtype not in (torch.bfloat16, torch.float32):
        raise PykernelsError(
            f"x is {x.dtype} {tuple(x.shape)}", f"Give bfloat16 or float32 of shape [T, {H}]"
        )
    same = ids.ndim == 2 and ids.shape == weights.shape and len(ids) == len(x)
    if ids.dtype != torch.int64 or not same:
        raise PykernelsError(
            f"ids are {ids.dtype} {tuple(ids.shape)}, weights {tuple(weights.shape)},"
            f" for {x.shape[0]} tokens",
            "Give int64 ids and weights of shape [T, topk]",
        )
    if weights.is_complex():
        raise PykernelsError(f"weights are {weights.dtype}", "Give real weights")
    for name, given in (("x", x), ("ids", ids), ("weights", weights)):
        check_readable(name, given)


def bad_routing(ids: torch.Tensor, E: int) -> PykernelsError:
    """The error of a routing that names an expert that there is not."""
    return PykernelsError(
        f"the routing names expert {int(ids.min())} .. {int(ids.max())} in a layer of {E}",
        "Expert ids must be 0 to E - 1, or -1 for one that is not here",
    )


def _has_memory(given: torch.Tensor) -> bool:
    try:
        return given.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper of torch.func, a zero that is nowhere
        return False


def _kind(given: object) -> str:
    return "None" if given is None else f"a {type(given).__module__}.{type(given).__name__}"
