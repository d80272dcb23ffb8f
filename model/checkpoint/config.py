"""`config.json` to a transformers configuration; what cannot run is an error at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from pykernels.errors import PykernelsError

from ..modules.recognise import experts_per_token
from .gguf import GGUF, find_gguf
from .gguf.config import config_of
from .gguf.tokenizer import special_ids
from .quantized import auto_round, awq, compressed_tensors, gptq, mxfp4
from .tensors.safetensors import read_json

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Architectures that are another one under a new name.

transformers has no `kimi_k2`; under the old name its loader leaves every expert random.
"""

TEXT_PARTS = {"gemma4": "gemma4_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Multimodal architectures, of which the text part is run, and what that is called."""
VISION = ("text_config", "vision_config", "audio_config", "architectures", "model_type")
"""Entries of such a configuration that are not its text part's."""

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Names under which configurations have the number of a layer's experts."""

COUNTS = {
    "num_hidden_layers": (1, 10_000),
    "max_position_embeddings": (1, 1 << 40),
    "conv_L_cache": (2, 1000),
    **dict.fromkeys((*EXPERT_COUNTS, "moe_num_experts"), (0, 100_000)),
}
"""The least and the most that a configuration may say."""

SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
"""Architectures whose ``layer_types`` says which layers are one, and which attend."""

ROUTERS = ("greedy", "group_limited_greedy")
"""What transformers' DeepSeek-V2 routes by; with another `topk_method` its first token fails."""

METHODS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "compressed-tensors": compressed_tensors.check_config,
    "awq": awq.check_config,
    "gptq": gptq.check_config,
    "mxfp4": mxfp4.check_config,
    **dict.fromkeys(auto_round.METHODS, auto_round.check_config),
}
"""What checks a `quantization_config`, by its ``quant_method``."""

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def read_config(folder: Path) -> PretrainedConfig:
    """The model's configuration, its `quantization_config` checked and removed; a GGUF file's from
    its metadata.

    `load` dequantizes by itself: with the entry left in place, transformers would look for a
    quantizer of its own. Raises `PykernelsError` for an unknown architecture or weight format.
    """
    if (file := find_gguf(folder)) is not None:
        checkpoint = GGUF(file)
        data = {**config_of(checkpoint), **special_ids(checkpoint)}
        return _checked(data, str(data["model_type"]), file, file)
    if not folder.is_dir():
        raise PykernelsError(
            f"There is no folder {folder}", "Give the folder of a downloaded checkpoint"
        )
    file = folder / "config.json"
    data = read_json(file)
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise PykernelsError(f"{file} has no model_type", "Give the config.json of the checkpoint")
    model_type = ALIASES.get(model_type, model_type)
    if model_type in TEXT_PARTS:
        data, model_type = text_part(data, file), TEXT_PARTS[model_type]
    if model_type not in CONFIG_MAPPING:
        raise _unknown(model_type)
    check_quantization(data.pop("quantization_config", None), folder)
    data.pop("auto_map", None)  # no code from the checkpoint is ever run
    return _checked(data, model_type, file, folder)


def text_part(data: dict[str, Any], file: Path) -> dict[str, Any]:
    """The text part of a multimodal configuration, and what both share.

    Raises:
        PykernelsError: there is none.
    """
    text = data.get("text_config")
    if not isinstance(text, dict):
        raise PykernelsError(f"{file} has no text_config", "Give the config.json of the checkpoint")
    shared = {name: value for name, value in data.items() if name not in VISION}
    return {**shared, **text}


def _checked(data: dict[str, Any], model_type: str, file: Path, folder: Path) -> PretrainedConfig:
    """The configuration, with values that a model can run with; `file`: for errors."""
    check_counts(data, file)
    try:
        config = CONFIG_MAPPING[model_type].from_dict({**data, "model_type": model_type})
    except Exception as error:  # transformers validates with several exception types of its own
        raise PykernelsError(
            f"{file} is no valid {model_type} configuration: {str(error)[:300]}",
            f"Download {file.name} again",
        ) from error
    complete_rope(config)
    check_router(config, file)
    check_extra_layers(config, file)
    check_forward(config, file)
    config._name_or_path = str(folder)
    return config


def check_counts(data: dict[str, Any], file: Path) -> None:
    """Counts that a model can have: with others, building it would divide by zero or never end."""
    for name, (least, most) in COUNTS.items():
        value = data.get(name)
        if type(value) is int and not least <= value <= most:
            raise PykernelsError(
                f"{file} has the {name} {str(value)[:40]}, which no model runs with",
                f"Download {file.name} again",
            )


def complete_rope(config: PretrainedConfig) -> None:
    """MiniMax-M2's released ``rotary_dim``: transformers 5.17 turns whole heads instead."""
    rotary_dim = getattr(config, "rotary_dim", None)
    if config.model_type == "minimax_m2" and rotary_dim is not None:
        config.rope_parameters.setdefault("partial_rotary_factor", rotary_dim / config.head_dim)


def check_router(config: PretrainedConfig, file: Path) -> None:
    """The sizes of a grouped router (DeepSeek-V2, 2.2.2) are consistent.

    Otherwise the model would fail at its first token, after all weights were loaded.
    """
    method = getattr(config, "topk_method", None)
    if config.model_type == "deepseek_v2" and method not in ROUTERS:
        raise PykernelsError(
            f"{file} has the topk_method {method!r}, which is not known",
            f"Use a checkpoint with one of {', '.join(ROUTERS)}",
        )
    counts = (getattr(config, name, None) for name in EXPERT_COUNTS)
    experts = next((count for count in counts if count), None)
    topk = experts_per_token(config)
    if not isinstance(experts, int) or not isinstance(topk, int):  # none, or each layer's own
        return
    grouped = hasattr(config, "n_group") and method != "greedy"
    groups, open_groups = (config.n_group, config.topk_group) if grouped else (1, 1)
    whole = all(isinstance(n, int) and n > 0 for n in (groups, open_groups)) and topk > 0
    if (
        not whole
        or experts % groups
        or open_groups > groups
        or topk > experts // groups * open_groups
    ):
        within = f", in {open_groups} (topk_group) of {groups} groups (n_group)" if grouped else ""
        raise PykernelsError(
            f"{file} routes a token to {topk} of {experts} experts{within}, which cannot be",
            f"Download {file.name} again",
        )


def check_extra_layers(config: PretrainedConfig, file: Path) -> None:
    """The count of multi-token prediction layers, which are not loaded, is plausible."""
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    if not isinstance(extra, int) or not 0 <= extra <= config.num_hidden_layers:
        raise PykernelsError(
            f"{file} has {extra!r} num_nextn_predict_layers beside"
            f" {config.num_hidden_layers} layers",
            f"Download {file.name} again",
        )


def check_forward(config: PretrainedConfig, file: Path) -> None:
    """Values that transformers accepts, but whose forward or `generate` fails with them.

    They would be found only after all weights were loaded.
    """
    latent = getattr(config, "kv_lora_rank", None) or 0
    heads, kv_heads = (
        getattr(config, name, None) or 0 if latent else 0  # Gemma 4 has a number for each layer
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    types = getattr(config, "layer_types", None)
    convolves = config.model_type in SHORT_CONVOLUTIONS
    checks: tuple[tuple[bool, str, Any, str], ...] = (
        # MLA: every head has its own keys, expanded from the latent; none are repeated.
        (
            not latent or heads <= kv_heads,
            "num_key_value_heads",
            kv_heads,
            f"{heads}, as the heads",
        ),
        (
            not convolves or (types is not None and {*types} <= {"conv", "full_attention"}),
            "layer_types",
            types,
            "conv or full_attention for each layer",
        ),
        (bool(config.return_dict), "return_dict", config.return_dict, "true"),
        (not config.is_encoder_decoder, "is_encoder_decoder", True, "false"),
    )
    for good, name, value, wanted in checks:
        if not good:
            raise PykernelsError(
                f"{file} has the {name} {value!r}, which no model runs with",
                f"Set it to {wanted}",
            )
    check_ends(getattr(config, "eos_token_id", None), file)


def check_ends(value: Any, file: Path) -> None:
    """An `eos_token_id` is a token's number, some of them, or None. Of none at all transformers'
    `generate` reads the first one."""
    ends = value if isinstance(value, (list, tuple)) else [0 if value is None else value]
    if not ends or any(type(token) is not int for token in ends):
        raise PykernelsError(
            f"{file} has the eos_token_id {str(value)[:60]}, which no model runs with",
            "Set it to a token's number, or null for none",
        )


def check_quantization(quantization: Any, folder: Path) -> None:
    """Accept DeepSeek's FP8 (E4M3, one scale a 128x128 block, dynamic activations), what the
    modules of ``METHODS`` read, or none."""
    if not quantization:
        return
    if isinstance(quantization, dict) and (
        check := METHODS.get(str(quantization.get("quant_method")))
    ):
        check(quantization, folder)
        return
    wanted = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", "float8_e4m3fn", None),  # DeepSeek's word, MiniMax's
        "activation_scheme": ("dynamic", None),
        "weight_block_size": ([128, 128],),
    }
    for key, accepted in wanted.items():
        value = quantization.get(key) if isinstance(quantization, dict) else quantization
        if value not in accepted:
            raise PykernelsError(
                f"{folder} is quantized with {key} {value!r}, which cannot be read",
                compressed_tensors.HINT,
            )


def resolve_dtype(dtype: str | torch.dtype | None, config: PretrainedConfig) -> torch.dtype:
    """The dtype of everything but the experts: as asked, else the config's, else bfloat16."""
    chosen: Any = dtype if dtype is not None else config.dtype
    if chosen is None:
        return torch.bfloat16
    if isinstance(chosen, str):
        chosen = DTYPES.get(chosen, chosen)
    if not isinstance(chosen, torch.dtype) or chosen not in DTYPES.values():
        raise PykernelsError(
            f"The dtype {chosen} cannot be used", f"Use one of {', '.join(DTYPES)}"
        )
    return chosen


def _unknown(model_type: str) -> PykernelsError:
    from ..rules import known_architectures

    return PykernelsError(
        f"The architecture {model_type!r} is not known to transformers {transformers.__version__}",
        f"Use a checkpoint of one of {', '.join(known_architectures())}, or another transformers",
    )
