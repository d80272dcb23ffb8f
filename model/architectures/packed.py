"""Packed cache: writing (``IntoCache``) and reading (``FromCache``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import torch
from torch import nn

from pykernels.errors import PykernelsError
from pykernels.quant import Format, PackedExperts, Weight, get_format
from pykernels.quant.split import Experts
from pykernels.registry import resolve
from pykernels.shapes import ExpertSpec, MoEShape
from pykernels.target import detect
from runtime.matrix import Pack, PackedHeads, PackedMatrix, pack_nothing

from ..checkpoint.packed.errors import Errors
from ..checkpoint.packed.manifest import AGAIN
from ..checkpoint.packed.mapped import MappedFile, PackedFolder
from ..modules.linear import linears
from ..modules.moe import FusedMoE
from .packing import FromSource, Packing
from .weights import Source, meta_weight

ROUTERS = ("gate.weight", "router.weight")
"""Endings of the names of routers' matrices, which are never converted: they decide which experts a
token uses."""


@dataclass
class Objects:
    """The packed objects since the last ``take``.

    Attributes:
        tensors: by their names in a file.
        about: by key, what an object is.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, key: str, about: dict[str, Any], **tensors: torch.Tensor) -> None:
        """An object; tensors without elements are left out."""
        self.about[key] = about
        for part, tensor in tensors.items():
            if tensor.numel():
                self.tensors[f"{key}.{part}"] = tensor


class IntoCache(FromSource):
    """Packs the weights of a source, and keeps them until ``take``.

    Args:
        linears: format that matrices are converted to; None: none is. Where their inputs do not
            suit it they stay as they are, and so do routers, embeddings and single heads.
        errors: counts what that changes.
    """

    def __init__(self, source: Source, pack: Pack, linears: str | None, errors: Errors) -> None:
        super().__init__(source, pack)
        self._linears, self._errors = linears, errors
        self._objects = Objects()

    def take(self) -> Objects:
        """All objects since the last call."""
        objects, self._objects = self._objects, Objects()
        return objects

    def tensor(self, name: str) -> torch.Tensor | None:
        tensor = super().tensor(name)
        if tensor is None:
            self._objects.add(_key("tensor", name), {"absent": True})
        else:
            self._objects.add(_key("tensor", name), {}, data=tensor)
        return tensor

    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        table, key = super().table(name), _key("table", name)
        if isinstance(table, PackedMatrix):
            self._matrix(table, key)
        else:
            self._objects.add(key, {}, data=table)
        return table

    def runs(self, *names: str) -> list[PackedMatrix]:
        matrices, key = super().runs(*names), _key("matrix", *names)
        formats = [part.fmt.name for part in matrices for _ in part.starts]
        self._objects.add(key, {"formats": formats})
        for i, part in enumerate(matrices):
            self._matrix(part, f"{key}.{i}")
        return matrices

    def stack(self, name: str, shape: tuple[int, int, int]) -> PackedHeads | None:
        heads, key = super().stack(name, shape), _key("stack", name)
        if heads is None:
            self._objects.add(key, {"absent": True})
        else:
            self._matrix(heads, key)
        return heads

    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        packed = super().heads(name, rows, transposed)
        self._matrix(packed, _key("heads", name, *["transposed"] * transposed))
        return packed

    def mlp(self, gate: str, up: str, down: str) -> PackedExperts:
        return self._experts(super().mlp(gate, up, down), _key("mlp", gate, up, down))

    def experts(self, module: FusedMoE) -> PackedExperts:
        return self._experts(super().experts(module), _key("experts", module.name))

    def weight(self, name: str) -> tuple[str, Weight]:
        stored, weight = super().weight(name)
        fmt = get_format(self._linears or stored)
        _, K = get_format(stored).logical_shape(weight)
        if fmt.name == stored or name.endswith(ROUTERS) or K % fmt.k_multiple:
            return stored, weight
        values = get_format(stored).dequantize(weight)
        converted = fmt.quantize(values)
        self._errors.add_linear(name, values, fmt.dequantize(converted))
        return fmt.name, converted

    def _matrix(self, packed: PackedMatrix | PackedHeads, key: str) -> None:
        blocks, scales = _rows(packed.blocks), _rows(packed.scales)
        self._objects.add(key, {"format": packed.fmt.name}, blocks=blocks, scales=scales)

    def _experts(self, packed: Experts, key: str) -> PackedExperts:
        assert isinstance(packed, PackedExperts)  # on one node
        about = {"format": packed.fmt.name, "down_format": packed.down_fmt.name}
        self._objects.add(key, about, arena=packed.arena)
        return packed


class FromCache(Packing):
    """Objects of a mapped cache: nothing is read, copied or packed.

    What a model's modules are decides on every shape; a file that holds another one is an error.

    Args:
        model: injected, on the meta device.
    """

    def __init__(self, folder: PackedFolder, model: nn.Module) -> None:
        self._folder, self._linears = folder, linears(model)
        self._shapes: dict[str, tuple[int, ...]] = {}
        every = model.named_parameters(remove_duplicate=False), model.named_buffers()
        for name, tensor in chain(*every):
            self._shapes[name] = tuple(tensor.shape)

    def tensor(self, name: str) -> torch.Tensor | None:
        file, about, key = self._find("tensor", name)
        if about.get("absent"):
            return None
        tensor = file.tensor(f"{key}.data")
        self.check(tuple(tensor.shape) == self._shapes.get(name), key)
        return tensor

    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        file, about, key = self._find("table", name)
        if "format" in about:
            return self._matrix(str(about["format"]), [name], file, key)
        table = file.tensor(f"{key}.data")
        right = tuple(table.shape) == self._shapes[name] and table.dtype == torch.bfloat16
        self.check(right, key)
        return table

    def runs(self, *names: str) -> list[PackedMatrix]:
        file, about, key = self._find("matrix", *names)
        pairs = list(zip(about["formats"], names, strict=True))
        for fmt, name in pairs:
            if name in self._linears:
                self._obeys(self._linears[name].format, [fmt], name)
        parts = groupby(pairs, lambda pair: pair[0])
        return [
            self._matrix(fmt, [name for _, name in run], file, f"{key}.{i}")
            for i, (fmt, run) in enumerate(parts)
        ]

    def stack(self, name: str, shape: tuple[int, int, int]) -> PackedHeads | None:
        file, about, key = self._find("stack", name)
        if about.get("absent"):
            return None
        heads, N, K = shape
        return self._heads(about, [(N, K)] * heads, file, key)

    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        file, about, key = self._find("heads", name, *["transposed"] * transposed)
        K = self._shapes[name][1]
        sizes = [at.stop - at.start for at in rows]
        shapes = [(K, N) if transposed else (N, K) for N in sizes]
        return self._heads(about, shapes, file, key)

    def mlp(self, gate: str, up: str, down: str) -> PackedExperts:
        H, I = self._shapes[down]  # noqa: E741
        biases = [f"{name.removesuffix('weight')}bias" for name in (gate, up, down)]
        spec = ExpertSpec(bias=any(bias in self._shapes for bias in biases))
        shape = MoEShape(E=1, H=H, I=I, topk=1, spec=spec)
        return self._experts(shape, *self._find("mlp", gate, up, down))

    def experts(self, module: FusedMoE) -> PackedExperts:
        file, about, key = self._find("experts", module.name)
        formats = [str(about["format"]), str(about["down_format"])]
        self._obeys(module.format, formats, f"the experts of {module.name}")
        for fmt in formats:
            resolve(module.kernel, fmt, detect(), module.activations)
        return self._experts(module.shape, file, about, key)

    def _obeys(self, rule: str, formats: Iterable[str], what: str) -> None:
        """Raises PykernelsError where a rule wants another format than the cache has."""
        if rule != "auto" and (other := [fmt for fmt in formats if fmt != rule]):
            raise PykernelsError(
                f"{self._folder.folder} has {what} in {other[0]}, a rule wants {rule}",
                "Convert the checkpoint with that rule, or leave it out",
            )

    def _matrix(self, fmt: str, names: list[str], file: MappedFile, key: str) -> PackedMatrix:
        parts = [meta_weight(fmt, *self._shapes[name]) for name in names]
        return PackedMatrix(get_format(fmt), parts, pack_nothing, _MappedAllocate(self, file, key))

    def _heads(
        self, about: dict[str, Any], shapes: list[tuple[int, int]], file: MappedFile, key: str
    ) -> PackedHeads:
        fmt = str(about["format"])
        parts = [meta_weight(fmt, *shape) for shape in shapes]
        return PackedHeads(get_format(fmt), parts, pack_nothing, _MappedAllocate(self, file, key))

    def _experts(
        self, shape: MoEShape, file: MappedFile, about: dict[str, Any], key: str
    ) -> PackedExperts:
        def allocate(nbytes: int) -> torch.Tensor:
            arena = file.tensor(f"{key}.arena")
            self.check(arena.nbytes == nbytes, key)
            return arena

        fmt, down_fmt = get_format(str(about["format"])), get_format(str(about["down_format"]))
        packed = PackedExperts(shape, fmt, allocate, pack_nothing, down_fmt)
        packed.packed = [True] * shape.E
        return packed

    def _find(self, kind: str, *names: str) -> tuple[MappedFile, dict[str, Any], str]:
        key = _key(kind, *names)
        if key not in self._folder.objects:
            raise PykernelsError(f"{self._folder.folder} has no {key}", AGAIN)
        return *self._folder.objects[key], key

    def check(self, right: bool, key: str) -> None:
        """Raises PykernelsError unless an object has the shape that the model gives it."""
        if not right:
            raise PykernelsError(
                f"{self._folder.folder} has {key} in another shape than its config.json says",
                AGAIN,
            )


@dataclass(frozen=True)
class _MappedAllocate:
    """A ``matrix.Allocate`` that gives an object of a file."""

    cache: FromCache
    file: MappedFile
    key: str

    def __call__(self, fmt: Format, K: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = []
        for part, nbytes in (("blocks", fmt.block_bytes(K)), ("scales", fmt.scale_bytes(K))):
            tensor = torch.zeros(blocks, 0, dtype=torch.uint8, device="cpu")
            if nbytes:
                tensor = self.file.tensor(f"{self.key}.{part}")
                self.cache.check(tuple(tensor.shape) == (blocks, nbytes), self.key)
            tensors.append(tensor)
        return tensors[0], tensors[1]


def _key(kind: str, *names: str) -> str:
    return f"{kind} {' '.join(names)}"


def _rows(blocks: torch.Tensor) -> torch.Tensor:
    """[..., blocks, bytes] -> [all blocks, bytes]."""
    return blocks.reshape(blocks.shape[:-1].numel(), blocks.shape[-1])
