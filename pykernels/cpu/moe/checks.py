"""Whether a tensor is what kernels can read: dense, and somewhere in this machine's memory."""

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


def _has_memory(given: torch.Tensor) -> bool:
    try:
        return given.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper of torch.func, a zero that is nowhere
        return False


def _kind(given: object) -> str:
    return "None" if given is None else f"a {type(given).__module__}.{type(given).__name__}"
