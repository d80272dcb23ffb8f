"""Where weights are read from: a checkpoint's own tensors, or a loaded model's parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import groupby

import torch
from torch import nn

from pykernels.quant import Biases, Weight, get_format
from runtime.program.weight_spec import WeightPart, WeightSpec, part_values, taken
from runtime.program.weights import Expert, Ready, WeightSource

from ..checkpoint.plan import Plan, PlannedDense, PlannedExperts
from ..checkpoint.read import Changed, expert_weights, nbytes, stored_weight
from ..checkpoint.read import matrix as read_matrix
from ..checkpoint.tensors.floats import floats
from ..checkpoint.tensors.matrix import Matrix
from ..checkpoint.tensors.safetensors import Checkpoint, TensorSlice
from ..modules.moe import FusedMoE
from .schema import Schema
from .specs import BLOCK, scales_by_rows


class MatrixSource(WeightSource):
    """A source that reads one stored matrix at a time."""

    @abstractmethod
    def matrix(self, name: str, index: int | None, fmt: str) -> tuple[str, Weight]:
        """(format, weight) of a stored matrix [N, K]; converted, if the schema says so.

        Args:
            index: of a stack [heads, N, K], which one.
            fmt: of the weight that it becomes a part of.
        """

    def matrices(self, spec: WeightSpec) -> Iterator[Weight]:
        for (name, index), parts in groupby(spec.parts, lambda part: (part.name, part.index)):
            whole = _in_format(*self.matrix(name, index, spec.fmt), spec.fmt)
            for part in parts:
                yield _cut(whole, part, spec.fmt) if part.rows else whole

    def experts(self, spec: WeightSpec) -> Iterator[Expert]:
        """An MLP, as the one expert of its layer."""
        assert spec.moe is not None
        formats = spec.fmt, spec.fmt, spec.down_fmt
        gate, up, down = (
            _in_format(*self.matrix(part.name, None, fmt), fmt)
            for part, fmt in zip(spec.parts, formats, strict=False)
        )
        biases = None
        if spec.moe.spec.bias:
            given = {part.name.split(".")[-2]: part for part in spec.parts[3:]}
            sizes = {"gate_proj": spec.moe.I, "up_proj": spec.moe.I, "down_proj": spec.moe.H}
            biases = Biases(*(self._bias(given.get(proj), N) for proj, N in sizes.items()))
        yield (gate, up, down), biases

    def _bias(self, part: WeightPart | None, N: int) -> torch.Tensor:
        if part is None:
            return torch.zeros(N, dtype=torch.float32, device="cpu")
        return self.tensor(WeightSpec.tensor(part.name, *part.shape))


class CheckpointWeights(MatrixSource):
    """The weights of a checkpoint, read when they are asked for.

    Args:
        model: injected, on the meta device; its modules say what experts become.
        plan: of ``model.checkpoint.plan``; ``schema``: of both.
        report: called with the bytes of what was read.
        changed: called with the name, the values and the new values of a matrix that is converted,
            all experts under the name "experts".
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        checkpoint: Checkpoint,
        schema: Schema,
        report: Callable[[int], None] = lambda _: None,
        changed: Callable[[str, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        self._items = {item.name: item for item in plan.items if isinstance(item, PlannedDense)}
        self._experts: dict[str, tuple[FusedMoE, PlannedExperts]] = {}
        for item in plan.items:
            if isinstance(item, PlannedExperts):
                module = model.get_submodule(item.name)
                assert isinstance(module, FusedMoE)
                self._experts[module.stored_name] = module, item
        self._checkpoint, self._schema = checkpoint, schema
        self._report, self._changed = report, changed

    def tensor(self, spec: WeightSpec) -> torch.Tensor:
        out = torch.zeros(spec.shape, dtype=torch.float32, device="cpu")
        for part in spec.parts:
            item = self._items[part.name]
            self._report(nbytes(self._checkpoint, item))
            values = read_matrix(self._checkpoint, item.source, item.dtype)
            out[part.at : part.at + part.shape[0]] = part_values(values, part)
        return out

    def matrix(self, name: str, index: int | None, fmt: str) -> tuple[str, Weight]:
        source, schema = self._items[name].source, self._schema.tensors[name]
        if index is not None:
            stored = TensorSlice(source.data.name, index)
            source = Matrix(stored, source.shape[1:], fmt=source.fmt)
        self._report(sum(self._checkpoint.nbytes(part) for part in source.parts))
        found, weight = source.fmt or "bf16", self._stored(source, name)
        wanted = schema.linear if fmt == schema.linear else schema.fmt
        if wanted == found:
            return found, weight
        values = get_format(found).dequantize(weight)
        converted = get_format(wanted).quantize(values)
        if self._changed is not None:
            self._changed(name, values, get_format(wanted).dequantize(converted))
        return wanted, converted

    def experts(self, spec: WeightSpec) -> Iterator[Expert]:
        if spec.name not in self._experts:
            yield from super().experts(spec)
            return
        module, item = self._experts[spec.name]
        each = nbytes(self._checkpoint, item) // len(item.experts)
        for expert in expert_weights(self._checkpoint, item, module, self._experts_changed()):
            yield expert
            self._report(each)

    def _experts_changed(self) -> Changed | None:
        changed = self._changed
        if changed is None:
            return None
        return lambda values, converted: changed("experts", values, converted)

    def _stored(self, source: Matrix, name: str) -> Weight:
        if source.fmt is None:
            return Weight(floats(self._checkpoint, source.data).to(torch.bfloat16))
        weight = stored_weight(self._checkpoint, source)
        N, K = source.shape
        get_format(source.fmt).check(weight, N, K, name)
        return weight


class LoadedWeights(MatrixSource):
    """The weights of a loaded model: matrices count as bfloat16, routed experts are packed."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensors.update(model.named_parameters(remove_duplicate=False))
        self._tensors.update(model.named_buffers())
        blocks = (module for module in model.modules() if isinstance(module, FusedMoE))
        self._routed = {block.stored_name: block.routed for block in blocks}

    def tensor(self, spec: WeightSpec) -> torch.Tensor:
        out = torch.zeros(spec.shape, dtype=torch.float32, device="cpu")
        for part in spec.parts:
            values = self._tensors[part.name].detach()
            out[part.at : part.at + part.shape[0]] = part_values(values, part)
        return out

    def matrix(self, name: str, index: int | None, fmt: str) -> tuple[str, Weight]:
        values = self._tensors[name].detach()
        return "bf16", Weight((values if index is None else values[index]).to(torch.bfloat16))

    def ready(self, spec: WeightSpec, layout: str) -> Ready | None:
        routed = self._routed.get(spec.name)
        return None if routed is None else routed.weights


def _in_format(stored: str, weight: Weight, fmt: str) -> Weight:
    """A weight in its own format, or in bfloat16."""
    if stored == fmt:
        return weight
    assert fmt == "bf16", f"{stored} does not become {fmt} here"
    return Weight(get_format(stored).dequantize(weight).to(torch.bfloat16))


def _cut(weight: Weight, part: WeightPart, fmt: str) -> Weight:
    """Rows of a matrix in bfloat16 or FP8, or of one whose rows have scales of their own."""
    if weight.scale is None:
        data = taken(weight.data, part)
        return Weight((data.T if part.transposed else data).contiguous())
    codes = taken(weight.data.view(torch.uint8), part)
    spans = part.rows
    if not scales_by_rows(fmt):
        spans = tuple((first // BLOCK, (last - 1) // BLOCK + 1) for first, last in spans)
    scale = torch.cat([weight.scale[first:last] for first, last in spans])
    if part.transposed:
        codes, scale = codes.T, scale.T
    return Weight(codes.contiguous().view(weight.data.dtype), scale.contiguous())
