"""Fill an injected meta model from its checkpoint, one tensor or one expert at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError
from pykernels.quant import Weight, get_format
from pykernels.registry import resolve
from pykernels.target import detect

from ..modules.moe import FusedMoE, routed_experts
from .ahead import ahead
from .compressed_tensors import as_q8_0, unpack_int4
from .plan import Dense, Experts, Matrix, Plan
from .progress import Callback
from .safetensors import Checkpoint

Converted = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with the values of a matrix, and with those that it has in another format (float32)."""


def load(
    model: PreTrainedModel,
    plan: Plan,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    report: Callback,
) -> None:
    """Stream `plan` into `model`: experts packed in main memory, the rest on `device` in `dtype`.

    At most one tensor (or the matrices of one expert) is in memory besides the model itself.
    """
    warn_of(plan)
    total = sum(nbytes(checkpoint, item) for item in plan.items)
    done = 0
    for item in plan.items:
        if isinstance(item, Dense):
            tensor = matrix(checkpoint, item.source, item.dtype).to(device)
            _set_tensor(model, item.name, tensor)
            del tensor
            done += nbytes(checkpoint, item)
            report(done, total)
            continue
        module: Any = model.get_submodule(item.name)
        expert_bytes = nbytes(checkpoint, item) // len(item.experts)
        fill = _fill_packed if isinstance(module, FusedMoE) else _fill_fused
        for _ in fill(module, item, checkpoint, device, dtype):
            done += expert_bytes
            report(done, total)
    _finish(model, device)
    _warm_up(model)


def warn_of(plan: Plan) -> None:
    """Warns of experts that are not kept as they are stored."""
    if plan.lossy:
        warnings.warn(
            f"The experts are stored in {plan.lossy} and run in bfloat16, which keeps 8 bits of "
            "their mantissa.",
            stacklevel=4,
        )
    if plan.widened:
        warnings.warn(
            "The experts' int4 has float16 scales, which are kept exactly as q8_0, in twice the "
            "memory. A rule with format: int4 quantizes them anew instead.",
            stacklevel=4,
        )


def check_kernels(model: nn.Module, plan: Plan) -> None:
    """Raise `PykernelsError` for a kernel that is unknown or cannot run on this machine."""
    for item in plan.items:
        if isinstance(item, Experts):
            module = model.get_submodule(item.name)
            if isinstance(module, FusedMoE):
                fmt = module.packed_format(item.stored)
                resolve(module.kernel, fmt, detect(), module.activations)


def matrix(checkpoint: Checkpoint, source: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """A stored tensor in `dtype`: cast, or dequantized in float32 and rounded once.

    Raises `PykernelsError` for NaN or infinite values or scales.
    """
    if source.fmt is None:
        return checkpoint.read(source.data).to(dtype)
    fmt, weight = get_format(source.fmt), stored_weight(checkpoint, source)
    N, K = source.shape
    fmt.check(weight, N, K, source.data.name)
    return fmt.dequantize(weight).to(dtype)


def stored_weight(checkpoint: Checkpoint, source: Matrix) -> Weight:
    """A quantized matrix as it is stored, a `Weight` in `source.fmt`."""
    assert source.fmt is not None and source.scale is not None
    data, scale = checkpoint.read(source.data), checkpoint.read(source.scale)
    N, K = source.shape
    if source.fmt == "q8_0":
        return as_q8_0(unpack_int4(data, K), scale, source.data.name)
    if source.fmt.startswith("int4"):
        return Weight(unpack_int4(data, K), scale)
    if source.fmt.endswith("-channel"):
        scale = scale.view(-1, 1).expand(N, 1).contiguous()  # one for the tensor: for each output
    return Weight(data, scale.float())


def expert_weight(
    checkpoint: Checkpoint, source: Matrix, fmt: str, converted: Converted | None = None
) -> Weight:
    """A stored expert matrix as a `Weight` in `fmt`: as stored if that is `fmt`, else converted."""
    if fmt == source.fmt:
        return stored_weight(checkpoint, source)
    if fmt == "bf16" and (source.fmt is None or converted is None):
        return Weight(matrix(checkpoint, source, torch.bfloat16))
    values = matrix(checkpoint, source, torch.float32)
    weight = get_format(fmt).quantize(values)
    if converted is not None:
        converted(values, get_format(fmt).dequantize(weight))
    return weight


def expert_weights(
    checkpoint: Checkpoint, item: Experts, fmt: str, converted: Converted | None = None
) -> Iterator[tuple[Weight, ...]]:
    """(gate, up, down) of each expert in `fmt`, read and converted ahead of their use."""

    def one(e: int) -> tuple[Weight, ...]:
        with naming(item, e):
            return tuple(expert_weight(checkpoint, m, fmt, converted) for m in item.experts[e])

    return ahead(one, len(item.experts), nbytes(checkpoint, item) // len(item.experts))


@contextmanager
def naming(item: Experts, expert: int) -> Iterator[None]:
    """Puts the block and the expert before what is wrong with one of its matrices."""
    try:
        yield
    except PykernelsError as error:  # its message has the expert's number at most
        name = f"{item.name}.experts.{expert}"
        raise PykernelsError(f"{name}: {error.cause}", error.hint) from None


def _fill_packed(
    module: FusedMoE, item: Experts, checkpoint: Checkpoint, *_: object
) -> Iterator[int]:
    routed = module.allocate(item.stored)
    fmt = module.packed_format(item.stored)
    for e, weights in enumerate(expert_weights(checkpoint, item, fmt)):
        with naming(item, e):
            routed.load_expert(e, *weights)
        yield e


def _fill_fused(
    module: Any, item: Experts, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> Iterator[int]:
    for leaf, meta in list(module.named_parameters(recurse=False)):
        tensor = torch.empty(meta.shape, dtype=dtype, device=device)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    gate_up, down_all = module.gate_up_proj, module.down_proj  # [E, 2 I, H], [E, H, I]
    I = down_all.shape[2]  # noqa: E741
    for e, (gate, up, down) in enumerate(item.experts):
        gate_up[e, :I].copy_(matrix(checkpoint, gate, dtype))
        gate_up[e, I:].copy_(matrix(checkpoint, up, dtype))
        down_all[e].copy_(matrix(checkpoint, down, dtype))
        yield e


def _set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._parameters:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module._buffers[leaf] = tensor


def _finish(model: PreTrainedModel, device: torch.device) -> None:
    """Rebuild computed buffers, tie tied weights, and check that every tensor is loaded."""
    _rebuild_computed(model, device)
    model.tie_weights()
    model.requires_grad_(False)
    model.eval()
    for module in model.modules():
        if isinstance(module, FusedMoE) and (module.routed is None or module.routed.missing()):
            raise RuntimeError(f"{module.name}: experts were left out of the load plan")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if left := [name for name, tensor in tensors if tensor.is_meta]:
        raise RuntimeError(f"left out of the load plan: {left[:3]}")


def _warm_up(model: nn.Module) -> None:
    """Compile the model's kernels now, so that its first token does not wait for them."""
    seen: set[tuple[str, ...]] = set()
    for routed in routed_experts(model):
        kind = (routed.backend.name, routed.weights.fmt.name, routed.activations)
        if kind in seen:
            continue
        seen.add(kind)
        shape = routed.shape
        x = torch.zeros(1, shape.H, dtype=torch.bfloat16, device="cpu")
        weights = torch.zeros(1, shape.topk, dtype=torch.float32, device="cpu")
        routed(x, torch.arange(shape.topk, device="cpu")[None], weights)
        routed.counters.reset()


def _rebuild_computed(model: PreTrainedModel, device: torch.device) -> None:
    """Construct modules with computed buffers (rotary frequencies) again, off the meta device.

    Non-persistent buffers are in no checkpoint, and on meta their values were not computed.
    """
    for name, module in list(model.named_modules()):
        lost = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
        if not lost or not any(module._buffers[n].is_meta for n in lost):
            continue
        config = getattr(module, "config", None)
        if config is None or list(module.children()) or list(module.parameters()):
            raise PykernelsError(
                f"{name} ({type(module).__name__}) has computed values that cannot be rebuilt",
                "Use an architecture that has rules",
            )
        parent, _, leaf = name.rpartition(".")
        with torch.device("cpu"):  # the same bits for every device
            rebuilt = type(module)(config)
        setattr(model.get_submodule(parent), leaf, rebuilt.to(device))


def nbytes(checkpoint: Checkpoint, item: Dense | Experts) -> int:
    """Stored bytes of what a plan's item takes."""
    matrices = [item.source] if isinstance(item, Dense) else [m for e in item.experts for m in e]
    parts = [part for m in matrices for part in (m.data, m.scale) if part is not None]
    return sum(checkpoint.nbytes(part) for part in parts)
