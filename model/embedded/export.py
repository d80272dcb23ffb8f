"""Write and read the checkpoint: DeepSeek-V3's FP8 layout, name by name.

Every linear map of a layer is `<name>.weight` (float8_e4m3fn) with `<name>.weight_scale_inv`
(float32, one value per 128x128 block); each routed expert has its own three. Embedding, head, norms
and the routers' weights are bfloat16, the routers' `e_score_correction_bias` is float32.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .architecture import build_model, quantization_config
from .fp8 import dequantize_blocks, quantize_blocks
from .optimizer import is_layer_matrix

SHARD_BYTES = 12 * 2**20
INDEX = "model.safetensors.index.json"


def checkpoint_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors of a transformers state dict with fused experts, in its order."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(value.unflatten(1, (2, -1))):  # [2, I, H] each
                _add_fp8(out, name.replace("gate_up_proj", f"{e}.gate_proj.weight"), gate)
                _add_fp8(out, name.replace("gate_up_proj", f"{e}.up_proj.weight"), up)
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(value):  # [H, I]
                _add_fp8(out, name.replace("down_proj", f"{e}.down_proj.weight"), down)
        elif is_layer_matrix(name, value):
            _add_fp8(out, name, value)
        elif name.endswith("e_score_correction_bias"):
            out[name] = value.float()
        else:
            out[name] = value.bfloat16()
    return out


def _add_fp8(out: dict[str, Tensor], name: str, weight: Tensor) -> None:
    codes, scale = quantize_blocks(weight)
    out[name] = codes.contiguous()
    out[name + "_scale_inv"] = scale.contiguous()


def export(state: dict[str, Tensor], settings: dict[str, Any], folder: Path) -> None:
    """Write config.json, generation_config.json, the shards and their index into `folder`.

    `state` holds float32 masters and the routers' biases under transformers' names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = settings | {"dtype": "bfloat16", "quantization_config": quantization_config()}
    generation = {key: settings[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)

    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in checkpoint_tensors(state).items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / INDEX, index)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint as they are stored, in the index' order."""
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    out: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                out[name] = shard.get_tensor(name)
    return {name: out[name] for name in weight_map}


def fused_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `checkpoint_tensors` in float32: dequantized, experts fused."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(name + "_scale_inv")
        plain[name] = tensor.float() if scale is None else dequantize_blocks(tensor, scale)
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in plain.items():
        head, separator, tail = name.partition(".mlp.experts.")
        if not separator:
            out[name] = tensor
            continue
        number, projection, _ = tail.split(".")
        experts.setdefault(head + ".mlp.experts.", {}).setdefault(int(number), {})[projection] = (
            tensor
        )
    for prefix, by_number in experts.items():
        ordered = [by_number[e] for e in range(len(by_number))]
        out[prefix + "gate_up_proj"] = torch.stack(
            [torch.cat([e["gate_proj"], e["up_proj"]]) for e in ordered]
        )
        out[prefix + "down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    return out


def load_dequantized(
    folder: Path, dtype: torch.dtype = torch.float32, experts: str = "eager"
) -> PreTrainedModel:
    """transformers' own model on the dequantized weights of `folder`, on the CPU, in eval mode.

    Raises `RuntimeError` when a tensor is missing, unexpected or of a wrong shape.
    """
    settings = json.loads((folder / "config.json").read_text())
    model = build_model(settings, dtype, experts)
    model.load_state_dict(fused_state(read_tensors(folder)), strict=True)
    return model.eval()


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
