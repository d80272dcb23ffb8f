"""The format in which each matrix is stored, from a load plan or from a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

from ..architectures.schema import Schema
from ..checkpoint.packed.mapped import PackedFolder
from ..checkpoint.plan import Plan, PlannedDense
from ..checkpoint.quantized import auto_round
from ..checkpoint.unlike import unlike_pairs

EXPERTS = "experts"
Parts = tuple[tuple[str, int], ...]
"""Format and rows of each part of a matrix."""
_HALVES = "in_proj_qkv.weight", "in_proj_z.weight"
_WHOLE = "in_proj_qkvz.weight"
"""What GGUF files of Qwen3-Next have in place of one of the model's matrices."""


@dataclass(frozen=True)
class Formats:
    """Names of ``pykernels.quant``'s formats by parameter.

    Attributes:
        known: formats that a checkpoint stores; a block's name stands for gate and up of its
            experts.
        known_down: by block, that of its experts' down.
        parts: of a matrix that is stored in parts, the format and the rows of each.
        linear, experts: formats of all other linears and routed experts.
        ignored: names of linears that are bfloat16 for all that.
    """

    known: Mapping[str, str] = field(default_factory=dict)
    linear: str = "bf16"
    experts: str = "bf16"
    ignored: re.Pattern[str] | None = None
    known_down: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Parts] = field(default_factory=dict)

    def of_matrix(self, name: str) -> str:
        """The format of a linear's weight."""
        if name in self.known:
            return self.known[name]
        module = name.removesuffix(".weight")
        skipped = module == "lm_head" or (self.ignored and self.ignored.search(module))
        return "bf16" if skipped else self.linear

    def of_experts(self, block: str) -> tuple[str, str]:
        """The formats of a block's routed experts: gate's and up's, and down's."""
        fmt = self.known.get(block, self.experts)
        return fmt, self.known_down.get(block, fmt)


def planned(plan: Plan) -> Formats:
    """The formats of a checkpoint."""
    known = {
        item.name: (item.source.fmt or "bf16") if isinstance(item, PlannedDense) else item.stored
        for item in plan.items
    }
    down = {
        item.name: item.down_stored for item in plan.items if not isinstance(item, PlannedDense)
    }
    rows = {
        item.name: item.source.shape[0] for item in plan.items if isinstance(item, PlannedDense)
    }
    return Formats(_kept(known), known_down=down, parts=_in_parts(known, rows))


def cached(folder: PackedFolder) -> Formats:
    """The formats of a packed cache, from its manifest."""
    schema = Schema.from_json(folder.manifest.schema)
    known = {name: tensor.linear for name, tensor in schema.tensors.items()}
    experts = schema.experts.items()
    down = {block: formats[1] for block, formats in experts}
    parts = _in_parts(known, {name: tensor.shape[0] for name, tensor in schema.tensors.items()})
    known |= {block: formats[0] for block, formats in experts}
    return Formats(_kept(known), known_down=down, parts=parts)


def _kept(known: Mapping[str, str]) -> dict[str, str]:
    """The formats with bfloat16 for gate and up of an MLP that are stored in two."""
    return {**known, **{name: "bf16" for pair in unlike_pairs(known) for name in pair}}


def configured(quantization: Any) -> Formats:
    """The formats that a ``quantization_config`` stands for, which ``read_config`` has accepted."""
    if not quantization:
        return Formats()
    if auto_round.packed_as(quantization) is not None:
        whole = quantization.get("group_size", 128) % 128 == 0 or quantization["group_size"] < 0
        fmt = "int4-zp-g128" if whole else "int4-zp"
        return Formats(linear=fmt, experts=fmt, ignored=_pattern(_left_whole(quantization)))
    if quantization.get("quant_method") == "mxfp4":  # gpt-oss' experts alone
        return Formats(experts="mxfp4")
    if quantization.get("quant_method") != "compressed-tensors":  # DeepSeek's FP8
        skip = quantization.get("modules_to_not_convert") or []
        return Formats(linear="fp8", experts="fp8", ignored=_pattern(skip))
    group = next(iter(quantization["config_groups"].values()))
    weights = group["weights"]
    base = "fp8" if weights.get("type") == "float" else f"int{weights['num_bits']}"
    suffix = {"channel": "-channel", "tensor": "-channel"}.get(weights["strategy"], "")
    if weights["strategy"] == "group" and weights["group_size"] == 128:
        suffix = "-g128"
    fmt = base + suffix
    ignored = _pattern(quantization.get("ignore") or [])
    experts = (f"model.layers.9999.{mlp}.experts.0.up_proj" for mlp in ("mlp", "feed_forward"))
    skipped = ignored is not None and any(ignored.search(name) for name in experts)
    return Formats(linear=fmt, experts="bf16" if skipped else fmt, ignored=ignored)


def _left_whole(quantization: Any) -> list[str]:
    """Modules that AWQ, GPTQ or AutoRound do not quantize, as `_pattern` takes them."""
    dynamic, extra = quantization.get("dynamic") or {}, quantization.get("extra_config") or {}
    return [
        *(quantization.get("modules_to_not_convert") or []),
        *(f"re:{pattern[2:]}" for pattern in dynamic if pattern.startswith("-:")),
        *(name for name, change in extra.items() if change.get("bits", 4) != 4),
    ]


def _in_parts(known: Mapping[str, str], rows: Mapping[str, int]) -> dict[str, Parts]:
    """Matrices that are stored in parts, by the model's names of the whole ones."""
    first, second = _HALVES
    return {
        name.replace(first, _WHOLE): tuple(
            (known[part], rows[part]) for part in (name, name.replace(first, second))
        )
        for name in known
        if name.endswith(first)
    }


def _pattern(names: list[str]) -> re.Pattern[str] | None:
    """Regexes ("re:...") and names, of a module or of one around it."""
    if not names:
        return None
    names = [name.replace("model.language_model.", "model.") for name in names]
    parts = [n[3:] if n.startswith("re:") else rf"(?:^|\.){re.escape(n)}(?:\.|$)" for n in names]
    return re.compile("|".join(f"(?:{part})" for part in parts))


def check_sizes(file: Path, data: dict[str, Any]) -> None:
    """Raises PykernelsError for a configuration that leaves its sizes to transformers' defaults."""
    given = data.get("text_config", data)
    missing = [name for name in ("hidden_size", "num_hidden_layers") if name not in given]
    if missing:
        raise PykernelsError(
            f"{file} has no {' and no '.join(missing)}", "Give the whole config.json of the model"
        )
