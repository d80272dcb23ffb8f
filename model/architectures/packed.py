"""Weights of a packed cache: what a file has of each, and reading them from mapped files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from pykernels.errors import PykernelsError
from pykernels.quant import Format, PackedExperts, PackedHeads, PackedMatrix, Weight, get_format
from pykernels.quant.matrix import pack_alone
from pykernels.quant.split import SplitExperts
from pykernels.registry import resolve
from pykernels.target import detect
from runtime.program.weight_spec import WeightSpec
from runtime.program.weights import Expert, Ready, WeightSource, unpacked, unpacked_experts

from ..checkpoint.packed.manifest import AGAIN
from ..checkpoint.packed.mapped import MappedFile, PackedFolder
from ..modules.linear import linears
from ..modules.moe import FusedMoE
from .schema import Schema


def object_key(spec: WeightSpec, layout: str) -> str:
    """What a weight in one of the CPU's layouts is called in a cache."""
    return f"{layout} {spec.name}"


def stored_object(value: Ready) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """How a cache describes a weight in one of the CPU's layouts, and its tensors by their parts;
    those without elements are left out."""
    if isinstance(value, torch.Tensor):
        return {}, {"data": value}
    assert not isinstance(value, SplitExperts), "a cache is made on one node"
    if isinstance(value, PackedExperts):
        formats = {"format": value.fmt.name, "down_format": value.down_fmt.name}
        return formats, {"arena": value.arena}
    tensors = {"blocks": _rows(value.blocks), "scales": _rows(value.scales)}
    return {"format": value.fmt.name}, {n: x for n, x in tensors.items() if x.numel()}


class CacheWeights(WeightSource):
    """Weights as they are mapped: nothing is read, copied or packed.

    Args:
        report: called with the bytes of what is given.
    """

    def __init__(
        self, folder: PackedFolder, report: Callable[[int], None] = lambda _: None
    ) -> None:
        self._folder, self._report = folder, report

    @property
    def is_mapped(self) -> bool:
        return True

    def tensor(self, spec: WeightSpec) -> torch.Tensor:
        return self._numbers(spec, "vector")

    def matrices(self, spec: WeightSpec) -> Iterator[Weight]:
        if object_key(spec, "packed") not in self._folder.objects:
            yield Weight(self._numbers(spec, "rows"))
            return
        yield from unpacked(self._packed(spec), spec)

    def experts(self, spec: WeightSpec) -> Iterator[Expert]:
        packed = self._packed(spec)
        assert isinstance(packed, PackedExperts)
        return unpacked_experts(packed)

    def ready(self, spec: WeightSpec, layout: str) -> Ready:
        stored = self._numbers(spec, layout) if layout == "rows" else self._packed(spec)
        self._report(stored.nbytes)
        return stored

    def _numbers(self, spec: WeightSpec, layout: str) -> torch.Tensor:
        file, key = self._find(spec, layout)
        tensor = file.tensor(f"{key}.data")
        dtype = torch.bfloat16 if layout == "rows" else torch.float32
        self._check(tuple(tensor.shape) == spec.shape and tensor.dtype == dtype, key)
        return tensor

    def _packed(self, spec: WeightSpec) -> PackedMatrix | PackedHeads | PackedExperts:
        file, key = self._find(spec, "packed")
        fmt = get_format(spec.fmt)
        if spec.moe is not None:

            def arena(nbytes: int) -> torch.Tensor:
                arena_bytes = file.tensor(f"{key}.arena")
                self._check(arena_bytes.nbytes == nbytes, key)
                return arena_bytes

            down_fmt = get_format(spec.down_fmt)
            experts = PackedExperts(spec.moe, fmt, arena, pack_alone, down_fmt)
            experts.packed = [True] * spec.moe.E
            return experts

        def allocate(fmt: Format, K: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                self._blocks(file, key, "blocks", blocks, fmt.block_bytes(K)),
                self._blocks(file, key, "scales", blocks, fmt.scale_bytes(K)),
            )

        if spec.kind == "heads":
            G, N, K = spec.shape
            return PackedHeads(fmt, (G, N, K), allocate)
        return PackedMatrix(fmt, spec.shapes, allocate)

    def _blocks(
        self, file: MappedFile, key: str, part: str, blocks: int, nbytes: int
    ) -> torch.Tensor:
        """uint8 [blocks, nbytes]."""
        if not nbytes:
            return torch.zeros(blocks, 0, dtype=torch.uint8, device="cpu")
        tensor = file.tensor(f"{key}.{part}")
        self._check(tuple(tensor.shape) == (blocks, nbytes), key)
        return tensor

    def _find(self, spec: WeightSpec, layout: str) -> tuple[MappedFile, str]:
        key = object_key(spec, layout)
        if key not in self._folder.objects:
            raise PykernelsError(f"{self._folder.folder} has no {key}", AGAIN)
        return self._folder.objects[key][0], key

    def _check(self, right: bool, key: str) -> None:
        if not right:
            raise _other_shape(self._folder, key)


def check_cache(folder: PackedFolder, model: nn.Module, schema: Schema) -> None:
    """Holds a cache against the model that its config and the rules make.

    Raises:
        PykernelsError: a tensor of another shape than the model's, a format that a rule does not
            want, or one that its kernel does not have.
    """
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    for name, tensor in named:
        if name in schema.tensors and schema.tensors[name].shape != tuple(tensor.shape):
            raise _other_shape(folder, name)
    for name, linear in linears(model).items():
        if name in schema.tensors:
            _obey(folder, linear.format, [schema.tensors[name].linear], name)
    for module in model.modules():
        if not isinstance(module, FusedMoE):
            continue
        if module.name not in schema.experts:
            raise PykernelsError(f"{folder.folder} has no experts of {module.name}", AGAIN)
        formats = schema.experts[module.name]
        _obey(folder, module.format, formats, f"the experts of {module.name}")
        for fmt in formats:
            resolve(module.kernel, fmt, detect(), module.activations)


def _obey(folder: PackedFolder, rule: str, formats: Iterable[str], what: str) -> None:
    """Raises PykernelsError where a rule wants another format than the cache has."""
    if rule != "auto" and (other := [fmt for fmt in formats if fmt != rule]):
        raise PykernelsError(
            f"{folder.folder} has {what} in {other[0]}, a rule wants {rule}",
            "Convert the checkpoint with that rule, or leave it out",
        )


def _other_shape(folder: PackedFolder, what: str) -> PykernelsError:
    return PykernelsError(
        f"{folder.folder} has {what} in another shape than its config.json says", AGAIN
    )


def _rows(blocks: torch.Tensor) -> torch.Tensor:
    """[..., blocks, bytes] -> [all blocks, bytes]."""
    return blocks.reshape(blocks.shape[:-1].numel(), blocks.shape[-1])
