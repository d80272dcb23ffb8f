"""Random models of well-known shapes as GGUF files, for llama.cpp's programs.

As in ours (``model.random_model``), a matrix is 128 random rows again and again: only
shapes and bytes count. So a file of any type takes seconds: these rows are quantized, by our own
formats, which store them as GGUF does. All matrices have that type (`llama-quantize --pure`). There
is no tokenizer in it, only a size of the vocabulary; or, for servers, one of bytes and numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pykernels.quant import get_format

from . import gguf_delta_nets, gguf_short_convs

TYPES = {
    "bf16": ("BF16", "MOSTLY_BF16"),
    "f16": ("F16", "MOSTLY_F16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "q5_0": ("Q5_0", "MOSTLY_Q5_0"),
    "q5_1": ("Q5_1", "MOSTLY_Q5_1"),
    "iq4_nl": ("IQ4_NL", "MOSTLY_IQ4_NL"),
    "iq4_xs": ("IQ4_XS", "MOSTLY_IQ4_XS"),
    "iq2_xxs": ("IQ2_XXS", "MOSTLY_IQ2_XXS"),
    "iq2_xs": ("IQ2_XS", "MOSTLY_IQ2_XS"),
    "iq2_s": ("IQ2_S", "MOSTLY_IQ2_S"),
    "iq3_xxs": ("IQ3_XXS", "MOSTLY_IQ3_XXS"),
    "iq3_s": ("IQ3_S", "MOSTLY_IQ3_S"),
    "q2_k": ("Q2_K", "MOSTLY_Q2_K"),
    "q3_k": ("Q3_K", "MOSTLY_Q3_K_S"),
    "q4_k": ("Q4_K", "MOSTLY_Q4_K_S"),
    "q5_k": ("Q5_K", "MOSTLY_Q5_K_S"),
    "q6_k": ("Q6_K", "MOSTLY_Q6_K"),
}
"""Our formats that GGUF stores alike: its names of the type and of a file of it."""
FAMILIES = {
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    **gguf_delta_nets.ARCHITECTURES,
    **gguf_short_convs.ARCHITECTURES,
}
"""``model_type``s that are written, and llama.cpp's names for them."""
_ROWS = 128
_EXACT = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
"""Matrices that llama.cpp keeps in float32."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, outermost dimension first; vectors and routers are float32."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_float32(self) -> bool:
        exact = any(part in self.name for part in _EXACT)
        return len(self.shape) == 1 or exact


def tensors(config: Any) -> Iterator[Tensor]:
    """The tensors of a configuration, by llama.cpp's names."""
    s = _Sizes.of(config)
    yield Tensor("token_embd.weight", (s.V, s.H))
    short_convs = config.model_type in gguf_short_convs.ARCHITECTURES
    yield Tensor(f"{'token_embd_norm' if short_convs else 'output_norm'}.weight", (s.H,))
    if not config.tie_word_embeddings:
        yield Tensor("output.weight", (s.V, s.H))
    experts = {
        "ffn_gate_exps.weight": (s.E, s.I, s.H),
        "ffn_up_exps.weight": (s.E, s.I, s.H),
        "ffn_down_exps.weight": (s.E, s.H, s.I),
    }
    for layer in range(config.num_hidden_layers):
        if config.model_type in gguf_delta_nets.ARCHITECTURES:
            shapes = gguf_delta_nets.shapes(config, layer)
        elif short_convs:
            shapes = gguf_short_convs.shapes(config, layer)
        else:
            shapes = _attention_layer(s, config.model_type == "qwen3_moe")
        shapes |= experts if "ffn_gate_inp.weight" in shapes else {}
        for name, shape in shapes.items():
            yield Tensor(f"blk.{layer}.{name}", shape)


def _attention_layer(s: _Sizes, norms: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer but its experts; ``norms``: of queries and keys."""
    found: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (s.H,),
        "attn_q.weight": (s.NH * s.D, s.H),
        "attn_k.weight": (s.KVH * s.D, s.H),
        "attn_v.weight": (s.KVH * s.D, s.H),
        "attn_output.weight": (s.H, s.NH * s.D),
        "ffn_norm.weight": (s.H,),
        "ffn_gate_inp.weight": (s.E, s.H),
    }
    return found | ({f"attn_{part}_norm.weight": (s.D,) for part in "qk"} if norms else {})


def write_model(config: Any, fmt: str, path: Path, vocabulary: bool = False) -> None:
    """A file of a configuration's shapes, written tensor by tensor.

    Args:
        config: of transformers, its ``model_type`` one of ``FAMILIES``.
        fmt: of all matrices, one of ``TYPES``.
        vocabulary: whether tokens have texts.

    Raises:
        PykernelsError: a matrix that cannot have the format.
        OSError: it cannot be written.
    """
    import gguf

    s = _Sizes.of(config)
    w = gguf.GGUFWriter(str(path), FAMILIES[config.model_type])
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(s.H)
    if (size := getattr(config, "intermediate_size", None)) is not None:
        w.add_feed_forward_length(size)
    w.add_head_count(s.NH)
    short_convs = config.model_type in gguf_short_convs.ARCHITECTURES
    w.add_head_count_kv(gguf_short_convs.kv_heads(config) if short_convs else s.KVH)
    w.add_key_length(s.D)
    w.add_value_length(s.D)
    if config.model_type in gguf_delta_nets.ARCHITECTURES:
        gguf_delta_nets.add_metadata(w, config)
    else:
        w.add_rope_dimension_count(s.D)
    w.add_rope_freq_base(1e6)
    w.add_layer_norm_rms_eps(config.norm_eps if short_convs else config.rms_norm_eps)
    w.add_expert_count(s.E)
    w.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        w.add_expert_feed_forward_length(s.I)
    if short_convs:
        gguf_short_convs.add_metadata(w, config)
    w.add_vocab_size(s.V)
    if vocabulary:
        _add_vocabulary(w, s.V)
    else:
        w.add_tokenizer_model("no_vocab")
    kind, file_kind = TYPES[fmt]
    w.add_file_type(int(gguf.LlamaFileType[file_kind]))
    every, raw = list(tensors(config)), gguf.GGMLQuantizationType[kind]
    for tensor in every:
        shape, count = tensor.shape, int(np.prod(tensor.shape))
        if tensor.is_float32:
            w.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * count)
        else:  # of bytes, as the writer wants what it does not know
            shape = gguf.quant_shape_to_byte_shape(shape, raw)
            w.add_tensor_info(
                tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=raw
            )
    try:
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        for tensor in every:
            w.write_tensor_data(_data(tensor, fmt))
    finally:
        w.close()


def _add_vocabulary(writer: Any, V: int) -> None:
    """Bytes, an end token, one merge (llama.cpp wants some), and numbers, each with a space."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = [*letters, "<|end|>", "ab"]
    tokens += [f"\u0120{number}" for number in range(V - len(tokens))]
    types = [gguf.TokenType.NORMAL] * V
    types[len(letters)] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(letters))
    writer.add_add_bos_token(False)


def model_file(config: Any, fmt: str, folder: Path, name: str, vocabulary: bool = False) -> Path:
    """The file of a format in a folder; made unless it is there. Raises as ``write_model`` does."""
    path = folder / f"{name}-{fmt}.gguf"
    if path.exists():
        return path
    new = path.with_name(f"{path.name}.{os.getpid()}.new")  # another process may make it, too
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_model(config, fmt, new, vocabulary)
        new.replace(path)  # whole, or not there
    finally:
        new.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class _Sizes:
    V: int
    H: int
    I: int  # noqa: E741
    E: int
    NH: int
    KVH: int
    D: int

    @classmethod
    def of(cls, config: Any) -> _Sizes:
        mixtral = config.model_type == "mixtral"
        return cls(
            V=config.vocab_size,
            H=config.hidden_size,
            I=config.intermediate_size if mixtral else config.moe_intermediate_size,
            E=config.num_local_experts if mixtral else config.num_experts,
            NH=config.num_attention_heads,
            KVH=config.num_key_value_heads,
            D=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )


def _data(tensor: Tensor, fmt: str) -> Any:
    """Norms are ones; a matrix has variance 1 / K."""
    if len(tensor.shape) == 1:
        return np.full(tensor.shape, gguf_delta_nets.value_of(tensor.name), np.float32)
    K, rows = tensor.shape[-1], int(np.prod(tensor.shape[:-1]))
    random = np.random.default_rng(rows + K)
    base = random.standard_normal((min(rows, _ROWS), K), np.float32) / np.float32(K**0.5)
    if not tensor.is_float32:
        weight = get_format(fmt).quantize(torch.from_numpy(base))
        base = weight.data.view(torch.uint8).numpy()
    times = -(-rows // len(base))
    return np.tile(base, (times, 1))[:rows].reshape(*tensor.shape[:-1], -1)
