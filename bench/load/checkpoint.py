"""Random checkpoints of well-known shapes, in files as the hub has them: one shard a layer.

As in ``model.random_model``, a matrix is 128 random rows again and again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.peers.gguf_files.types import TYPES
from bench.peers.gguf_files.write import FAMILIES, model_file
from model.pretrained import build_meta
from pykernels.errors import PykernelsError
from pykernels.quant import get_format

FORMATS = ("bf16", "fp8")
"""The formats of safetensors: plain, and DeepSeek's blocks."""
_ROWS = 128
_PLAIN = re.compile(r"embed_tokens|lm_head|mlp\.gate\.|shared_expert_gate|norm|bias")


def write_checkpoint(config: Any, fmt: str, folder: Path, name: str) -> Path:
    """The checkpoint of a configuration, unless it is there; returns its folder, or its GGUF file
    in another format than ``FORMATS``.

    Raises:
        PykernelsError: a format that is not written here.
        OSError: it cannot be written.
    """
    if fmt not in FORMATS:
        if config.model_type in FAMILIES and fmt in TYPES:
            return model_file(config, fmt, folder, name)
        raise PykernelsError(
            f"no checkpoint of {config.model_type} in {fmt} is written here",
            f"Use --format {' or '.join(FORMATS)}, and --convert {fmt}",
        )
    folder = folder / name
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    data = config.to_dict() | {"dtype": "bfloat16"}
    if fmt == "fp8":
        data["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
    (folder / "config.json").write_text(json.dumps(data))
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in _tensors(config):
        layer = re.search(r"layers\.(\d+)\.", name)
        shard = f"model-{'ends' if layer is None else layer[1]}.safetensors"
        shards.setdefault(shard, []).append((name, shape))
    weight_map: dict[str, str] = {}
    for shard, tensors in shards.items():
        held: dict[str, torch.Tensor] = {}
        for name, shape in tensors:
            held |= _values(name, shape, fmt)
        save_file(held, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, shard)
    index.write_text(json.dumps({"weight_map": weight_map}))  # last: it says that all is there
    return folder


def _tensors(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, one tensor an expert."""
    model = build_meta(config, torch.bfloat16)
    persistent = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in persistent:
            continue
        shape = tuple(tensor.shape)
        base, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            E, I2, H = shape
            for e in range(E):
                yield f"{base}.{e}.gate_proj.weight", (I2 // 2, H)
                yield f"{base}.{e}.up_proj.weight", (I2 // 2, H)
        elif leaf == "down_proj" and len(shape) == 3:
            E, H, I = shape  # noqa: E741
            for e in range(E):
                yield f"{base}.{e}.down_proj.weight", (H, I)
        else:
            yield name, shape


def _values(name: str, shape: tuple[int, ...], fmt: str) -> dict[str, torch.Tensor]:
    if len(shape) != 2:
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    N, K = shape
    rows = torch.randn(_ROWS, K, generator=torch.Generator().manual_seed(N + K)) / K**0.5
    times = -(-N // _ROWS)
    if fmt == "bf16" or _PLAIN.search(name):
        return {name: rows.bfloat16().repeat(times, 1)[:N]}
    weight = get_format(fmt).quantize(rows)
    assert weight.scale is not None
    codes = weight.data.view(torch.uint8).repeat(times, 1)[:N].contiguous()
    return {
        name: codes.view(torch.float8_e4m3fn),
        f"{name}_scale_inv": weight.scale.repeat(times, 1).contiguous(),
    }
