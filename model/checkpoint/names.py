"""Stored tensors looked up by the names that the model uses, with the scales that they need."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from pykernels.errors import PykernelsError

from .gguf.types import format_of
from .quantized import compressed_tensors, nvfp4, zero_points
from .tensors.matrix import Matrix
from .tensors.safetensors import DTYPES, Checkpoint, TensorSlice, read_json
from .unneeded import Unneeded

FLOATS = ("BF16", "F16", "F32")
EXACT = {False: FLOATS, True: ("BF16", "F32")}
"""GGUF's types that are no format of `pykernels.quant`: of vectors, and of matrices."""
VECTORS = "Quantize the model again: llama-quantize leaves vectors in F32"
BLOCK = 128  # rows and columns that share one FP8 scale
Q4_0_BLOCK = 32  # inputs that share one float16 scale

_WORDS = "qweight|qzeros|scales|g_idx"
_EXPERT = re.compile(
    rf"(?P<block>.+\.experts)\.(?P<e>\d+)\.(?P<proj>\w+?)\.(?P<what>weight\w*|{_WORDS})$"
)
_PROJ = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Names:
    """The stored tensors by the model's names.

    `take` looks one up and marks it as used; `finish` complains about missing and unused ones.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = model.config
        renamings = [
            t
            for t in get_model_conversion_mapping(model, add_legacy=False)
            if isinstance(t, WeightRenaming)
        ]
        self.stored: dict[str, str] = {}
        for name in checkpoint.tensors:
            key = checkpoint.names.get(name, name)
            for renaming in renamings:
                key, _ = renaming.rename_source_key(key)
            key = _from_head(model, key)
            if match := _EXPERT.match(key):
                proj = _PROJ.get(match["proj"], match["proj"])
                key = f"{match['block']}.{match['e']}.{proj}.{match['what']}"
            if key in self.stored:
                raise PykernelsError(
                    f"{self.stored[key]} and {name} are two names of one tensor of the model",
                    checkpoint.mismatch,
                )
            self.stored[key] = name
        self.unused = set(self.stored)
        self.missing: list[str] = []
        self._unneeded = Unneeded(model)

    def take(self, key: str, shape: tuple[int, ...]) -> Matrix | None:
        """The tensor `key`, which must have `shape`, with its scales; None if missing (noted)."""
        if packed := self.stored.get(f"{key}_packed"):
            in_bytes = self.checkpoint.tensors[packed].dtype == "U8"
            return nvfp4.find(self, key, shape) if in_bytes else self._int4(key, shape)
        if f"{key.removesuffix('.weight')}.qweight" in self.stored:
            return zero_points.find(self, key.removesuffix(".weight"), shape)
        if key not in self.stored:
            self.missing.append(key)
            return None
        part = TensorSlice(self.stored[key])
        if not self.checkpoint.blocks and self.checkpoint.tensors[part.name].dtype == "U8":
            return nvfp4.find(self, key, shape)
        self.unused.discard(key)
        info = self.checkpoint.fitted(part.name, shape)
        if info.shape != shape:
            raise PykernelsError(
                f"{part.name} has the shape {list(info.shape)}, the model needs {list(shape)}",
                self.checkpoint.mismatch,
            )
        if info.dtype in FLOATS and f"{key}_scale" in self.stored:
            raise PykernelsError(
                f"{part.name} is {info.dtype} and has a scale: it was calibrated but never made"
                " codes of",
                "Get the compressed checkpoint, or save it again with save_compressed=True",
            )
        if info.dtype == "F8_E4M3":
            self._check_matrix(part, len(shape) >= 2)
            return self._fp8(key, part, shape)
        if info.dtype == "I8":
            self._check_matrix(part, len(shape) == 2)
            return self._int8(key, part, shape)
        if self.checkpoint.blocks and info.dtype not in EXACT[len(shape) >= 2]:
            fmt = format_of(info.dtype, part.name)
            self._check_matrix(part, len(shape) >= 2)
            whole = self.companion(key, "_scale_2") if f"{key}_scale_2" in self.stored else None
            return Matrix(part, shape, fmt=fmt, whole=whole)
        return Matrix(part, shape)

    @functools.cached_property
    def quantization(self) -> dict[str, Any]:
        """The checkpoint's `quantization_config`."""
        return read_json(self.checkpoint.folder / "config.json").get("quantization_config") or {}

    def _check_matrix(self, part: TensorSlice, fits: bool) -> None:
        """Raise `PykernelsError` unless quantized values are a matrix (`fits`), one a tensor."""
        info = self.checkpoint.tensors[part.name]
        if not fits:
            raise PykernelsError(
                f"{part.name} is {info.dtype} {list(info.shape)}, its codes are read as matrices"
                " [N, K], one a tensor",
                VECTORS if self.checkpoint.blocks else compressed_tensors.HINT,
            )

    def _fp8(self, key: str, part: TensorSlice, shape: tuple[int, ...]) -> Matrix | None:
        """E4M3 with DeepSeek's scales (`_scale_inv`) or those of compressed-tensors (`_scale`)."""
        *fused, N, K = shape
        formats = {(*fused, -(-N // BLOCK), -(-K // BLOCK)): "fp8"}
        suffix = "_scale_inv"
        if f"{key}_scale" in self.stored and not fused:
            suffix, formats = "_scale", {(N, 1): "fp8-channel", (1,): "fp8-channel", **formats}
        scale = self.companion(key, suffix)
        if scale is None:
            return None
        return Matrix(part, shape, scale, self._scale_format(scale, part, formats, FLOATS))

    def _int8(self, key: str, part: TensorSlice, shape: tuple[int, ...]) -> Matrix | None:
        """compressed-tensors' int8, with a scale per output or one for the tensor."""
        scale = self.companion(key, "_scale")
        if scale is None:
            return None
        N, _ = shape
        formats: dict[tuple[int, ...], str] = dict.fromkeys(((N, 1), (1,)), "int8-channel")
        return Matrix(part, shape, scale, self._scale_format(scale, part, formats, FLOATS))

    def _int4(self, key: str, shape: tuple[int, ...]) -> Matrix | None:
        """compressed-tensors' int4, eight to an int32, with scales per group or per output.

        Group scales are bfloat16, or float16, which q4_0 keeps exactly; those per output any float.
        """
        part = self.companion(key, "_packed")
        scale, own_shape = self.companion(key, "_scale"), self.companion(key, "_shape")
        if part is None or scale is None or own_shape is None:
            return None
        info = self.checkpoint.tensors[part.name]
        self._check_matrix(part, len(shape) == 2)
        N, K = shape
        needed = N, -(-K // 8)
        if info.shape != needed or info.dtype != "I32":
            raise PykernelsError(
                f"{part.name} is {info.dtype} {list(info.shape)}, the model's {list(shape)} needs "
                f"I32 {list(needed)}",
                self.checkpoint.mismatch,
            )
        self._check_own_shape(own_shape, part, shape)
        formats: dict[tuple[int, ...], str] = {
            (N, 1): "int4-channel",
            (N, -(-K // 128)): "int4-g128",
            (N, -(-K // 32)): "int4",
        }
        dtypes: tuple[str, ...] = ("F16", "BF16")
        stored = self.checkpoint.tensors[scale.name]
        if stored.shape == (N, 1) and stored.dtype != "BF16":
            formats, dtypes = {(N, 1): "int4-channel"}, FLOATS
        elif stored.dtype == "F16" and K % Q4_0_BLOCK == 0:
            formats = dict.fromkeys(formats, "q4_0")
        else:
            dtypes = ("BF16",)
        return Matrix(part, shape, scale, self._scale_format(scale, part, formats, dtypes))

    def _check_own_shape(self, own: TensorSlice, of: TensorSlice, shape: tuple[int, ...]) -> None:
        """Raise `PykernelsError` unless the shape stored beside packed int4 is the model's.

        It is read now, two numbers: the packed tensor alone does not determine K.
        """
        info = self.checkpoint.tensors[own.name]
        stored: Any = f"{info.dtype} {list(info.shape)}"
        if info.shape == (2,) and info.dtype in DTYPES:
            stored = self.checkpoint.read(own).tolist()
        if stored != list(shape):
            raise PykernelsError(
                f"{own.name} is {stored}, {of.name} is for the model's {list(shape)}",
                self.checkpoint.mismatch,
            )

    def companion(self, key: str, suffix: str) -> TensorSlice | None:
        """The tensor `key + suffix` that `key` needs; None if it is missing (noted)."""
        name = key + suffix
        if name not in self.stored:
            self.missing.append(name)
            return None
        self.unused.discard(name)
        return TensorSlice(self.stored[name])

    def _scale_format(
        self,
        scale: TensorSlice,
        of: TensorSlice,
        formats: dict[tuple[int, ...], str],
        dtypes: tuple[str, ...],
    ) -> str:
        """The format, by the shape of the scales; `PykernelsError` for another shape or dtype."""
        info = self.checkpoint.tensors[scale.name]
        if info.shape not in formats or info.dtype not in dtypes:
            needed = " or ".join(str(list(shape)) for shape in formats)
            raise PykernelsError(
                f"{scale.name} is {info.dtype} {list(info.shape)}, {of.name} needs {dtypes[-1]} "
                f"{needed}",
                self.checkpoint.mismatch,
            )
        return formats[info.shape]

    def finish(self) -> list[str]:
        """Notes of stored tensors that are left out.

        Raises `PykernelsError` for missing tensors, and for stored ones that no module uses.
        """
        if self.missing:
            raise PykernelsError(
                f"{len(self.missing)} tensors are missing in {self.checkpoint.folder}: "
                f"{_few(self.missing)}",
                self.checkpoint.mismatch,
            )
        extra = sorted(self.stored[key] for key in self.unused if not self._unneeded(self, key))
        if extra:
            raise PykernelsError(
                f"{self.checkpoint.folder} has {len(extra)} tensors that the model has no place "
                f"for: {_few(extra)}",
                self.checkpoint.mismatch,
            )
        return self._unneeded.notes_of(self.unused)


def _from_head(model: PreTrainedModel, key: str) -> str:
    """The name in a model with a head of a tensor that was saved from the base model alone, which
    leaves out its `base_model_prefix`; another one as it is."""
    key = re.sub(r"^model\.language_model\.", "model.", key)  # of a multimodal model
    base, first = model.base_model_prefix, key.partition(".")[0]
    outer = dict(model.named_children())
    if first in outer or first not in dict(outer[base].named_children() if base in outer else ()):
        return key
    return f"{base}.{key}"


def tied(model: PreTrainedModel, names: Names) -> tuple[set[str], dict[str, str]]:
    """Tied tensors: the names not to load, and `{source: target}` where only `target` is stored.

    There the source is loaded from the target's tensor. Tied in the config, but stored twice with
    different values, is an error: one of the two is wrong.
    """
    skip: set[str] = set()
    instead: dict[str, str] = {}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        skip.add(target)
        if target not in names.stored:
            continue
        if source not in names.stored:
            instead[source] = target
            continue
        names.unused.discard(target)
        _check_same(names.checkpoint, target, names.stored[target], source, names.stored[source])
    return skip, instead


def _check_same(checkpoint: Checkpoint, target: str, a: str, source: str, b: str) -> None:
    """Raise `PykernelsError` unless `a` and `b`, stored as `target` and `source`, are equal floats.

    Quantized ones never are: their codes alone are no values.
    """
    infos = checkpoint.tensors[a], checkpoint.tensors[b]
    if infos[0].shape == infos[1].shape and all(info.dtype in FLOATS for info in infos):
        values = {name: checkpoint.read(TensorSlice(name)) for name in (a, b)}
        if torch.equal(*values.values()):
            return
        for name, tensor in values.items():
            if tensor.isnan().any():  # NaN does not even equal itself
                raise PykernelsError(f"{name} holds NaN", "Download the checkpoint again")
    raise PykernelsError(
        f"The config ties {target} to {source}, the checkpoint stores two different ones",
        "Set tie_word_embeddings to false in config.json",
    )


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(name[:200] for name in names[:most]) + (" ..." if len(names) > most else "")
