"""Fill an injected meta model from its checkpoint, one tensor or one expert at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError
from pykernels.registry import resolve
from pykernels.target import detect

from ..modules.linear import linears
from ..modules.moe import FusedMoE, routed_experts
from .plan import Plan, PlannedDense, PlannedExperts
from .progress import Callback
from .read import expert_weights, matrix, naming, nbytes, weight_in
from .tensors.safetensors import Checkpoint

_ON_ENGINE = "Run it on the engine, without --eager"


def load(
    model: PreTrainedModel,
    plan: Plan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    report: Callback,
) -> None:
    """Stream `plan` into `model`: experts and our linears packed, the rest in `dtype`.

    At most one tensor (or the matrices of one expert) is in memory besides the model itself.
    """
    warn_of(plan)
    total = sum(nbytes(checkpoint, item) for item in plan.items)
    done, ours = 0, linears(model)
    check_whole(model, plan)
    for item in plan.items:
        if isinstance(item, PlannedDense) and item.name in ours:
            fmt = ours[item.name].packed_format(item.source.fmt or "bf16")
            ours[item.name].load(fmt, weight_in(fmt, checkpoint, item.source))
            done += nbytes(checkpoint, item)
            report(done, total)
            continue
        if isinstance(item, PlannedDense):
            tensor = matrix(checkpoint, item.source, item.dtype)
            _set_tensor(model, item.name, tensor)
            del tensor
            done += nbytes(checkpoint, item)
            report(done, total)
            continue
        module: Any = model.get_submodule(item.name)
        expert_bytes = nbytes(checkpoint, item) // len(item.experts)
        fill = _fill_packed if isinstance(module, FusedMoE) else _fill_fused
        for _ in fill(module, item, checkpoint, dtype):
            done += expert_bytes
            report(done, total)
    _finish(model)
    _warm_up(model)


def check_whole(model: PreTrainedModel, plan: Plan) -> None:
    """Raises PykernelsError for a GGUF file whose matrices transformers' own model cannot have."""
    own = {
        name
        for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    }
    for item in plan.items:
        if isinstance(item, PlannedDense) and item.name not in own:
            raise PykernelsError(
                f"{item.source.data.name} is a part of a matrix that transformers' model has whole",
                _ON_ENGINE,
            )
    if getattr(model.config, "tiled_value_heads", False):
        raise PykernelsError(
            "the file has the value heads of its gated delta nets in another order than"
            " transformers' model",
            _ON_ENGINE,
        )


def warn_of(plan: Plan) -> None:
    """Warns of experts that are not kept as they are stored, and of what is left out."""
    for note in plan.notes:
        warnings.warn(note, stacklevel=4)
    if plan.lossy:
        warnings.warn(
            f"The experts are stored in {plan.lossy} and run in bfloat16, which keeps 8 bits of "
            "their mantissa.",
            stacklevel=4,
        )


def check_kernels(model: nn.Module, plan: Plan) -> None:
    """Raise `PykernelsError` for a kernel that is unknown or cannot run on this machine."""
    for item in plan.items:
        if isinstance(item, PlannedExperts):
            module = model.get_submodule(item.name)
            if isinstance(module, FusedMoE):
                for fmt in item.packed(module):
                    resolve(module.kernel, fmt, detect(), module.activations)


def _fill_packed(
    module: FusedMoE, item: PlannedExperts, checkpoint: Checkpoint, *_: object
) -> Iterator[int]:
    module.allocate(item.stored, item.down_stored)
    for e, (weights, biases) in enumerate(expert_weights(checkpoint, item, module)):
        with naming(module, e):
            module.load_expert(e, *weights, biases)
        yield e


def _fill_fused(
    module: Any, item: PlannedExperts, checkpoint: Checkpoint, dtype: torch.dtype
) -> Iterator[int]:
    for leaf, meta in list(module.named_parameters(recurse=False)):
        tensor = torch.empty(meta.shape, dtype=dtype, device="cpu")
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


def _finish(model: PreTrainedModel) -> None:
    """Rebuild computed buffers, tie tied weights, and check that every tensor is loaded."""
    _rebuild_computed(model)
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
        formats = routed.weights.fmt.name, routed.weights.down_fmt.name
        kind = (routed.backend.name, routed.down_backend.name, *formats, routed.activations)
        if kind in seen:
            continue
        seen.add(kind)
        shape = routed.shape
        x = torch.zeros(1, shape.H, dtype=torch.bfloat16, device="cpu")
        weights = torch.zeros(1, shape.topk, dtype=torch.float32, device="cpu")
        ids = torch.arange(shape.topk, dtype=torch.int64, device="cpu")
        routed(x, ids[None], weights)
        routed.read_bytes, routed.read_seconds = 0, 0.0


def _rebuild_computed(model: PreTrainedModel) -> None:
    """Construct modules with computed buffers (rotary frequencies) again, off the meta device.

    Non-persistent buffers are in no checkpoint, and on meta their values were not computed.
    """
    for name, module in list(model.named_modules()):
        lost = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
        if not lost or not any(module._buffers[n].is_meta for n in lost):
            continue
        scale = getattr(module, "scalar_embed_scale", None)
        if lost == ["embed_scale"] and scale is not None:  # Gemma's embedding
            module._buffers["embed_scale"] = torch.tensor(scale, dtype=torch.float32, device="cpu")
            continue
        config = getattr(module, "config", None)
        if config is None or list(module.children()) or list(module.parameters()):
            raise PykernelsError(
                f"{name} ({type(module).__name__}) has computed values that cannot be rebuilt",
                "Use an architecture that has rules",
            )
        parent, _, leaf = name.rpartition(".")
        with torch.device("cpu"):
            setattr(model.get_submodule(parent), leaf, type(module)(config))
