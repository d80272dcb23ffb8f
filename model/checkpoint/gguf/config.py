"""A GGUF file's metadata as what a config.json would hold.

Keys: ``gguf.constants.Keys``, and what llama.cpp's ``convert_hf_to_gguf.py`` writes under them.
"""

from __future__ import annotations

from pykernels.errors import PykernelsError

from ..tensors.floats import floats
from ..tensors.safetensors import TensorSlice
from . import hyperparameters
from .families import FAMILIES, Config
from .files import GGUF
from .metadata import Metadata, kv_heads
from .names import DELTA_NETS
from .rope import rope

_LATENT = "deepseek2"
"""Its heads have sizes of their own."""
_PROPORTIONAL = ("gemma4",)
"""Architectures whose ``rope_freqs.weight`` says which pairs of numbers turn at all."""
_PARTLY_TURNED = ("glm4moe", "minimax-m2", *DELTA_NETS)
"""Architectures whose rotary embedding may turn the first numbers of a head alone."""


def config_of(checkpoint: GGUF) -> Config:
    """What `CONFIG_MAPPING[model_type].from_dict` takes.

    Raises `PykernelsError` for an unknown architecture, and for metadata that is missing, wrong, or
    asks for what is not supported.
    """
    meta = checkpoint.hyperparameters
    if checkpoint.architecture not in FAMILIES:
        raise PykernelsError(
            f"The architecture {checkpoint.architecture!r} of {checkpoint.path} is not known",
            f"Use a file of one of {', '.join(FAMILIES)}",
        )
    hyperparameters.check(meta)
    tensors = checkpoint.tensors
    if "token_embd.weight" not in tensors:
        raise PykernelsError(f"{checkpoint.path} has no token_embd.weight", "Download it again")
    heads, hidden = meta.size("attention.head_count"), meta.size("embedding_length")
    config: Config = {
        "dtype": "bfloat16",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads(meta),
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": False,
        "stored_biases": _biases(checkpoint),
        **rope(meta, _frequency_factors(checkpoint, hidden // heads)),
    }
    if extra := meta.count("nextn_predict_layers", 0):
        if extra >= config["num_hidden_layers"]:
            raise meta.wrong("nextn_predict_layers", extra)
        config["num_hidden_layers"] -= extra
        config["num_nextn_predict_layers"] = extra
    if meta.has("feed_forward_length"):
        config["intermediate_size"] = meta.count("feed_forward_length")
    if checkpoint.architecture != _LATENT:
        config["head_dim"] = _head_dim(meta, hidden // heads)
    config |= FAMILIES[checkpoint.architecture](meta, config, checkpoint)
    if "rope_parameters" in config:  # of each kind of layers
        del config["rope_theta"], config["rope_scaling"]
    return config


def _head_dim(meta: Metadata, default: int) -> int:
    """Numbers of a key, and of a value. Raises `PykernelsError` where llama.cpp's forward does not
    run either: with values of another size, or keys that are turned in part."""
    size: int = meta.size("attention.key_length", default)
    if (value := meta.count("attention.value_length", size)) != size:
        raise meta.unsupported("attention.value_length", value, f"the keys' {size}")
    turned = meta.count("rope.dimension_count", size)
    if turned != size and (meta.architecture not in _PARTLY_TURNED or turned > size):
        raise meta.unsupported("rope.dimension_count", turned, f"the keys' {size}")
    return size


def _biases(checkpoint: GGUF) -> list[str]:
    """The model's linears that have a bias, by their names: each of them may have one in llama.cpp,
    while transformers has switches for some of them together, and Mixtral has none."""
    names = (checkpoint.names[name] for name in checkpoint.tensors)
    return [name.removesuffix(".bias") for name in names if name.endswith("_proj.bias")]


def _frequency_factors(checkpoint: GGUF, head: int) -> list[float] | None:
    """One for each pair of a head's numbers that turns; None if there are none."""
    info = checkpoint.tensors.get("rope_freqs.weight")
    if info is None or checkpoint.architecture in _PROPORTIONAL:
        return None
    meta = checkpoint.hyperparameters
    turned = meta.count("rope.dimension_count", meta.count("attention.key_length", head))
    if info.dtype != "F32" or info.shape != (turned // 2,):
        raise PykernelsError(
            f"{checkpoint.path} has rope_freqs.weight in {info.dtype} {list(info.shape)}, the model"
            f" needs F32 [{turned // 2}]",
            checkpoint.mismatch,
        )
    factors: list[float] = floats(checkpoint, TensorSlice("rope_freqs.weight")).flatten().tolist()
    return factors
