"""Files that llama.cpp writes or reads in more than one way, against transformers' float32 model.

Most of them are read into transformers' own modules, so that no kernel has a part in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import model
from pykernels.errors import PykernelsError

from ...checks import errors
from ...test_engine import BF16, logits
from . import tiny_gguf
from .tiny_gguf import Tensors, Type, all_of

IDS = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(3))


def same(file: Path, reference: PreTrainedModel) -> None:
    with torch.no_grad():
        found = model.from_pretrained(file, rules=[], dtype="float32")(IDS).logits
        assert errors(found, reference(IDS).logits).max() < 1e-3


LINEAR = {"rope_type": "linear", "factor": 4.0}
# llama.cpp's loader: without a type the scaling is linear, the key was rope.scale_linear once, and
# the factor 0 is that of no scaling; expert_weights_scale 0.0 is no scale either.
VALUES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("mixtral", {"llama.rope.scaling.factor": 4.0}, {"rope_scaling": LINEAR}),
    "old key": ("mixtral", {"llama.rope.scale_linear": 4.0}, {"rope_scaling": LINEAR}),
    "no scaling": (
        "mixtral",
        {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"},
        {},
    ),
    "factor 0": (
        "mixtral",
        {"llama.rope.scaling.factor": 0.0, "llama.rope.scaling.type": "yarn"},
        {},
    ),
    "scale 0": (
        "deepseek_v2",
        {"deepseek2.expert_weights_scale": 0.0},
        {"routed_scaling_factor": 1.0},
    ),
    "lists": (
        "mixtral",
        {
            "llama.attention.head_count": [4, 4, 4],
            "llama.attention.head_count_kv": [2, 2, 2],
            "llama.feed_forward_length": [256, 256, 256],
        },
        {},
    ),
    "sizes left out": (
        "qwen2_moe",
        {
            "qwen2moe.expert_feed_forward_length": None,
            "qwen2moe.feed_forward_length": 768,
            "qwen2moe.expert_shared_feed_forward_length": 0,
        },
        {"shared_expert_intermediate_size": 768},
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_metadata_in_other_words(case: str, tmp_path: Path) -> None:
    model_type, values, config = VALUES[case]
    file = tmp_path / "model.gguf"
    kind = all_of(Type.BF16)
    same(file, tiny_gguf.write(file, model_type, kind, split_kv_b=False, values=values, **config))


def test_linear_scaling_beside_frequency_factors(tmp_path: Path) -> None:
    """ggml's rope divides by the factors, and multiplies with the scale."""
    file = tmp_path / "model.gguf"
    values = {"llama.rope.scaling.factor": 4.0}
    reference: Any = tiny_gguf.write(file, "llama", rope_scaling=tiny_gguf.LLAMA3, values=values)
    reference.model.rotary_emb.inv_freq /= 4
    same(file, reference)


def without_ones(stored: Tensors) -> None:
    """As llama-quantize writes Ernie's [1, E]."""
    for name in [name for name in stored if "exp_probs_b" in name]:
        tensor, put = stored[name]
        stored[name] = tensor[0], lambda values, put=put: put(values[None])


def test_a_bias_without_its_dimension_of_1(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    same(file, tiny_gguf.write(file, "ernie4_5_moe", all_of(Type.BF16), change=without_ones))


def test_a_single_expert(tmp_path: Path) -> None:
    """ggml has no fourth dimension of 1 nor a third: all [1, N, K] are [N, K], [1, K] are [K]."""

    def change(stored: Tensors) -> None:
        for name, (tensor, put) in list(stored.items()):
            if tensor.shape[0] == 1:
                shape = tensor.shape
                stored[name] = tensor[0], lambda v, put=put, shape=shape: put(v.view(shape))

    file = tmp_path / "model.gguf"
    sizes = {"num_local_experts": 1, "num_experts_per_tok": 1}
    same(file, tiny_gguf.write(file, "mixtral", change=change, **sizes))


def fuse(stored: Tensors) -> None:
    """As convert_hf_to_gguf.py --fuse-gate-up-exps: the gate's rows first."""
    for name in [name for name in stored if "ffn_gate_exps" in name]:
        (gate, put_gate), (up, put_up) = stored.pop(name), stored.pop(name.replace("gate", "up"))
        halves = gate.shape[1]

        def put(values: torch.Tensor, gate: Any = put_gate, up: Any = put_up) -> None:
            gate(values[:, :halves])  # noqa: B023
            up(values[:, halves:])  # noqa: B023

        stored[name.replace("gate", "gate_up")] = torch.cat([gate, up], dim=1), put


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    same(file, tiny_gguf.write(file, "qwen3_moe", change=fuse))


def fuse_qkv(stored: Tensors) -> None:
    """As convert_hf_to_gguf.py --fuse-qkv."""
    for name in [name for name in stored if ".attn_q." in name]:
        parts = [stored.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        sizes = [len(tensor) for tensor, _ in parts]

        def put(values: torch.Tensor, parts: Any = parts, sizes: Any = sizes) -> None:
            for (_, back), rows in zip(parts, values.split(sizes), strict=True):
                back(rows)

        stored[name.replace("attn_q", "attn_qkv")] = torch.cat([t for t, _ in parts]), put


def test_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    """Of llama, whose queries' and keys' rows are permuted; weights and biases."""
    file = tmp_path / "model.gguf"
    prepare = give_biases(*QKV)
    same(file, tiny_gguf.write(file, "llama", all_of(Type.Q8_0), prepare=prepare, change=fuse_qkv))


def test_the_first_files_of_qwen3_next(tmp_path: Path) -> None:
    """In which a delta net's queries, keys, values and gates are one matrix in the model's order,
    and the queries of attention, with their gates, keys and values another one."""
    built: list[Any] = []

    def change(stored: Tensors) -> None:
        fuse_qkv(stored)
        for i, layer in enumerate(built[0].model.layers):
            if (net := getattr(layer, "linear_attn", None)) is not None:
                del stored[f"blk.{i}.attn_qkv.weight"], stored[f"blk.{i}.attn_gate.weight"]
                whole = net.in_proj_qkvz.weight.data
                stored[f"blk.{i}.ssm_in.weight"] = whole, whole.copy_

    file = tmp_path / "model.gguf"
    kind = all_of(Type.Q8_0)
    same(file, tiny_gguf.write(file, "qwen3_next", kind, prepare=built.append, change=change))


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_what_transformers_model_has_otherwise(model_type: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    tiny_gguf.write(file, model_type, all_of(Type.Q8_0), num_hidden_layers=2)
    with pytest.raises(PykernelsError, match="transformers' model.* Run it on the engine"):
        model.from_pretrained(file, rules=[])


def flat_halves(stored: Tensors) -> None:
    """As the first converters with halves wrote them: two-dimensional, the whole matrix beside."""
    for name in [name for name in stored if "_k_b." in name]:
        (k, put_k), (v, put_v) = stored[name], stored[name.replace("_k_b.", "_v_b.")]
        both = torch.cat([k.transpose(1, 2), v], dim=1).flatten(0, 1)  # [NH (nope + dv), L]
        stored[name.replace("_k_b.", "_kv_b.")] = both, lambda values: None
        for part, (tensor, put) in {"_k_b.": (k, put_k), "_v_b.": (v, put_v)}.items():
            back = lambda v, put=put, shape=tensor.shape: put(v.view(shape))  # noqa: E731
            stored[name.replace("_k_b.", part)] = tensor.flatten(0, 1), back


@pytest.mark.all  # test_logits has each alone
def test_halves_of_kv_b_beside_the_whole(tmp_path: Path) -> None:
    """The engine takes the halves, transformers' modules the whole."""
    file = tmp_path / "model.gguf"
    reference = tiny_gguf.write(file, "deepseek_v3", all_of(Type.BF16), change=flat_halves)
    same(file, reference)
    on_the_engine(file, reference)


def on_the_engine(file: Path, reference: PreTrainedModel) -> None:
    with torch.no_grad():
        truth = reference(IDS).logits[0]
    with model.load_engine(file, max_model_len=64) as llm:
        error = errors(logits(llm, IDS[0]), truth)
    assert error.median() < BF16 and (error < 2 * BF16).float().mean() > 0.9, error


def give_biases(*leaves: str) -> Any:
    """Biases for linears of transformers' model, in all layers but the last."""

    def prepare(made: PreTrainedModel) -> None:
        generator = torch.Generator().manual_seed(5)
        last = f".{made.config.num_hidden_layers - 1}."
        for name, linear in made.named_modules():
            if name.endswith(leaves) and last not in name:
                values = torch.randn(linear.out_features, generator=generator)
                linear.bias = nn.Parameter(values, requires_grad=False)

    return prepare


QKV = ("q_proj", "k_proj", "v_proj")
BIASES = {
    "llama on q, k, v": ("llama", QKV),
    "llama on some": ("llama", ("k_proj", "o_proj", "mlp.down_proj")),
    "mixtral": ("mixtral", (*QKV, "o_proj")),
    "qwen3_moe on q": ("qwen3_moe", ("q_proj",)),
}


@pytest.mark.parametrize("case", BIASES)
def test_biases_where_transformers_has_none(case: str, tmp_path: Path) -> None:
    model_type, leaves = BIASES[case]
    file = tmp_path / "model.gguf"
    prepare = give_biases(*leaves)
    same(file, tiny_gguf.write(file, model_type, all_of(Type.BF16), prepare=prepare))


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_such_biases_on_the_engine(model_type: str, tmp_path: Path) -> None:
    leaves = ("q_proj", "v_proj", "o_proj", "mlp.down_proj")
    file = tmp_path / "model.gguf"
    prepare = give_biases(*leaves)
    on_the_engine(file, tiny_gguf.write(file, model_type, all_of(Type.Q8_0), prepare=prepare))
    model.convert(file, tmp_path / "cache", threads=1)
    found = []
    for path in (file, tmp_path / "cache"):
        with model.load_engine(path, max_model_len=64) as llm:
            found.append(logits(llm, IDS[0]))
    assert torch.equal(*found)
