"""Where lowering takes weights from: a loaded model's parameters, or a checkpoint's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from pykernels.quant import Weight, get_format
from pykernels.quant.split import Experts
from pykernels.shapes import MoEShape

from ..checkpoint import plan as plans
from ..checkpoint.matrix import Matrix
from ..checkpoint.plan import Dense, Plan
from ..checkpoint.read import Changed, expert_weights, naming, nbytes, stored_weight
from ..checkpoint.read import matrix as read_matrix
from ..checkpoint.safetensors import Checkpoint, Part
from ..modules.moe import FusedMoE

MakeExperts = Callable[[MoEShape, str, str], Experts]
"""(shape, format of gate and up, format of down) -> memory for the experts of a layer."""


class Source(Protocol):
    """A model's stored tensors by the names of its parameters."""

    def matrix(self, name: str) -> tuple[str, Weight]:
        """(format, weight) of a linear's matrix [N, K]."""

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        """(format, matrices) of a tensor [heads, N, K]; None if there is none of that name."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """Any other tensor as it is; None if there is none of that name."""

    def experts(self, module: FusedMoE, make: MakeExperts) -> Experts:
        """The routed experts of a block."""


class Loaded:
    """Experts of modules that hold them already."""

    def experts(self, module: FusedMoE, make: MakeExperts) -> Experts:
        assert module.routed is not None
        return module.routed.weights


class Parameters(Loaded):
    """Those of a loaded model: matrices count as bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensors.update(model.named_parameters(remove_duplicate=False))
        self._tensors.update(model.named_buffers())

    def matrix(self, name: str) -> tuple[str, Weight]:
        return "bf16", Weight(self._tensors[name].detach().to(torch.bfloat16))

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        return None

    def tensor(self, name: str) -> torch.Tensor | None:
        found = self._tensors.get(name)
        return None if found is None else found.detach()


class Stored:
    """Those of a checkpoint as they are stored, read when they are asked for.

    Args:
        plan: of ``model.checkpoint.plan``.
        checkpoint: open.
        report: called with the bytes of what was read.
        changed: called with what experts are, and with what they become in another format.
    """

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        report: Callable[[int], None] = lambda _: None,
        changed: Changed | None = None,
    ) -> None:
        self._items = {item.name: item for item in plan.items if isinstance(item, Dense)}
        self._experts = {item.name: item for item in plan.items if isinstance(item, plans.Experts)}
        self._checkpoint, self._report, self._changed = checkpoint, report, changed

    def matrix(self, name: str) -> tuple[str, Weight]:
        item = self._items[name]
        self._report(nbytes(self._checkpoint, item))
        return item.source.fmt or "bf16", self._weight(item.source, name)

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        if (item := self._items.get(name)) is None:
            return None
        self._report(nbytes(self._checkpoint, item))
        source = item.source
        heads = [
            Matrix(Part(source.data.name, h), source.shape[1:], fmt=source.fmt)
            for h in range(source.shape[0])
        ]
        return source.fmt or "bf16", [self._weight(head, name) for head in heads]

    def _weight(self, source: Matrix, name: str) -> Weight:
        if source.fmt is None:
            return Weight(self._checkpoint.read(source.data).to(torch.bfloat16))
        weight = stored_weight(self._checkpoint, source)
        N, K = source.shape
        get_format(source.fmt).check(weight, N, K, name)
        return weight

    def tensor(self, name: str) -> torch.Tensor | None:
        if (item := self._items.get(name)) is None:
            return None
        self._report(nbytes(self._checkpoint, item))
        return read_matrix(self._checkpoint, item.source, item.dtype)

    def experts(self, module: FusedMoE, make: MakeExperts) -> Experts:
        item = self._experts[module.name]
        packed = make(module.shape, *item.packed(module))
        each = nbytes(self._checkpoint, item) // len(item.experts)
        found = expert_weights(self._checkpoint, item, module, self._changed)
        for e, (weights, biases) in enumerate(found):
            with naming(module, e):
                packed.pack(e, *weights, biases=biases)
            self._report(each)
        return packed


class MetaWeights:
    """Shapes and formats alone, from a plan: no weight is read."""

    def __init__(self, plan: Plan) -> None:
        self._items = {item.name: item for item in plan.items if isinstance(item, Dense)}
        self._experts = {item.name: item for item in plan.items if isinstance(item, plans.Experts)}

    def matrix(self, name: str) -> tuple[str, Weight]:
        source = self._items[name].source
        fmt = source.fmt or "bf16"
        return fmt, meta_weight(fmt, *source.shape)

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        if (item := self._items.get(name)) is None:
            return None
        (heads, N, K), fmt = item.source.shape, item.source.fmt or "bf16"
        return fmt, [meta_weight(fmt, N, K)] * heads

    def tensor(self, name: str) -> torch.Tensor | None:
        item = self._items.get(name)
        if item is None:
            return None
        return torch.ones(item.source.shape, dtype=torch.float32, device="cpu")

    def experts(self, module: FusedMoE, make: MakeExperts) -> Experts:
        return make(module.shape, *self._experts[module.name].packed(module))


def meta_weight(fmt: str, N: int, K: int) -> Weight:
    """A matrix of that shape without its numbers."""
    chosen = get_format(fmt)
    scale = chosen.scale_shape(N, K)
    scales = None
    if scale is not None:
        ones = torch.ones(scale, dtype=torch.float32, device="cpu")
        scales = ones.to(chosen.scale_dtypes[0])
    data = torch.empty(chosen.data_shape(N, K), dtype=chosen.dtype, device="cpu")
    return Weight(data, scales)
