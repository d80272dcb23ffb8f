"""Sizes that fill no block: matrices stacked at 32-row blocks, heads, experts and vocabularies.

The right logits are those of transformers' own float32 model, on the values that are stored.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.llm import LLM
from pykernels.errors import PykernelsError
from runtime.devices.ref.runner import on_ref
from runtime.devices.ref.step import RefExecutable
from runtime.step_inputs import allocate_inputs

from .. import tiny
from ..checkpoint.gguf import tiny_gguf
from ..checkpoint.gguf.tiny_gguf import Type
from ..test_engine import BF16, logits

ONE_KEY_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
ODD_DENSE = {"hidden_size": 45, "intermediate_size": 51, "vocab_size": 99}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dots1", {**ONE_KEY_HEAD, "attention_bias": True, "moe_intermediate_size": 19}),
    ("dots1", {**THREE_HEADS, **ODD_DENSE, "n_routed_experts": 6, "n_shared_experts": 3}),
    ("ernie4_5_moe", {**ONE_KEY_HEAD, "use_bias": True, "moe_intermediate_size": 19}),
    ("ernie4_5_moe", {**THREE_HEADS, **ODD_DENSE, "use_bias": True, "moe_num_experts": 7}),
    ("glm4_moe", {**ONE_KEY_HEAD, "attention_bias": True, "moe_intermediate_size": 17}),
    ("glm4_moe", {**THREE_HEADS, **ODD_DENSE, "n_routed_experts": 6, "n_shared_experts": 3}),
    ("gpt_oss", {**ONE_KEY_HEAD, "intermediate_size": 48}),
    ("gpt_oss", {**THREE_HEADS, "hidden_size": 72, "intermediate_size": 19}),
    ("minimax_m2", {**ONE_KEY_HEAD, "intermediate_size": 19, "num_local_experts": 7}),
    ("minimax_m2", {**NINE_HEADS, "hidden_size": 72, "vocab_size": 99}),
    ("mixtral", {**ONE_KEY_HEAD, "intermediate_size": 51, "num_local_experts": 5}),
    ("mixtral", {**THREE_HEADS, "hidden_size": 45, "vocab_size": 91}),
    ("olmoe", {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80}),
    ("olmoe", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
    ("qwen2_moe", {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80}),
    (
        "qwen2_moe",
        {
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 33,
            **ODD_DENSE,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 48,
        },
    ),
    ("qwen3_moe", {**ONE_KEY_HEAD, "attention_bias": True, "num_experts": 7}),
    ("qwen3_moe", {**THREE_HEADS, **ODD_DENSE, "moe_intermediate_size": 33}),
    ("qwen3_moe", {**NINE_HEADS, "tie_word_embeddings": True, "vocab_size": 97}),
    ("qwen3_moe", {**ONE_KEY_HEAD, "mlp_only_layers": [0, 2]}),
    (
        "deepseek_v2",
        {
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "n_routed_experts": 7,
            "topk_method": "greedy",
            "moe_intermediate_size": 21,
        },
    ),
    ("deepseek_v3", {"q_lora_rank": 17, "v_head_dim": 33}),
    (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "attention_bias": True,
            "qk_nope_head_dim": 24,
            **ODD_DENSE,
        },
    ),
    (
        "deepseek_v3",
        {
            "n_routed_experts": 9,
            "n_group": 3,
            "n_shared_experts": 3,
            "vocab_size": 77,
            "moe_intermediate_size": 11,
            "intermediate_size": 45,
        },
    ),
    (
        "glm4_moe_lite",
        {
            "q_lora_rank": 40,
            "v_head_dim": 24,
            "attention_bias": True,
            **ODD_DENSE,
        },
    ),
]
# Each size of a head is a kernel to compile on the CPU, where 16 stands for all of them.
ON_HOST_ONLY: list[tuple[str, dict[str, Any]]] = [
    *(("qwen3_moe", {**THREE_HEADS, "head_dim": D}) for D in (8, 24, 40, 48, 80)),
    ("deepseek_v3", {"q_lora_rank": 40, "kv_lora_rank": 40, "qk_rope_head_dim": 24}),
]


def host_logits(llm: LLM, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] of one sequence, in one step."""
    T, lowered = len(ids), llm.runner.model
    program = on_ref(lowered.lower(T, 1, T, 1, 1))
    inputs = allocate_inputs(program) | {
        "tokens": ids,
        "positions": torch.arange(T),
        "slot_mapping": torch.arange(T),
        "logits_indices": torch.arange(T),
    }
    caches = {
        name: replace(part, dtype=torch.float32).zeros() for name, part in lowered.caches(1).items()
    }
    step = RefExecutable(program, lowered.store, inputs, caches)
    step.sizes[:] = torch.tensor([T, 1, T])
    step.run()
    return step.outputs["logits"]


def some_ids(vocab_size: int) -> torch.Tensor:
    """int64 [30]."""
    return torch.randint(0, vocab_size, (30,), generator=torch.Generator().manual_seed(3))


def errors(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return (found - truth).norm(dim=-1) / truth.norm(dim=-1)


def truth_of(made: tiny.Tiny, ids: torch.Tensor) -> torch.Tensor:
    made.reference.set_experts_implementation("eager")  # grouped products want multiples of 16
    with torch.no_grad():
        return made.reference(ids[None]).logits[0]


@pytest.mark.parametrize(("family", "sizes"), [*CASES, *ON_HOST_ONLY])
def test_odd_sizes_are_exact_on_the_host(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    made = tiny.make(tmp_path, family, **sizes)
    ids = some_ids(made.reference.config.vocab_size)
    with model.load_engine(tmp_path, max_model_len=64, threads=1, device="ref") as llm:
        assert errors(host_logits(llm, ids), truth_of(made, ids)).max() < 1e-3


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_odd_sizes_are_within_bfloat16_on_the_cpu(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """A near-tie of the router moves a token, and what attends to it; so the best quarter counts,
    which a matrix that is read in the wrong place would move too."""
    made = tiny.make(tmp_path, family, **sizes)
    ids = some_ids(made.reference.config.vocab_size)
    with model.load_engine(tmp_path, max_model_len=64, threads=1, kernel="generic") as llm:
        assert errors(logits(llm, ids), truth_of(made, ids)).quantile(0.25) < BF16


def kinds(name: str) -> Type:
    """Queries, keys and values in a format each: three matrices in one buffer."""
    own = {"attn_q": Type.Q5_0, "attn_k": Type.Q8_0, "attn_v": Type.Q4_1}
    return next((kind for part, kind in own.items() if part in name), Type.Q8_0)


@pytest.mark.parametrize("type_of", [kinds, tiny_gguf.all_of(Type.Q8_0)])
def test_a_gguf_file_with_one_key_head(type_of: tiny_gguf.TypeOf, tmp_path: Path) -> None:
    """The package ``gguf`` dequantizes what transformers computes with."""
    file = tmp_path / "model.gguf"
    reference = tiny_gguf.write(file, "qwen3_moe", type_of, **ONE_KEY_HEAD, num_hidden_layers=2)
    ids = some_ids(96)
    with torch.no_grad():
        truth = reference(ids[None]).logits[0]
    with model.load_engine(file, max_model_len=64, threads=1, device="ref") as llm:
        # The router, float32 in the file, is packed as bfloat16.
        assert errors(host_logits(llm, ids), truth).median() < BF16


def test_a_packed_cache_with_one_key_head(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "source", "qwen3_moe", **ONE_KEY_HEAD, attention_bias=True)
    model.convert(tmp_path / "source", tmp_path / "packed", threads=1)
    ids = some_ids(96)
    with model.load_engine(tmp_path / "packed", max_model_len=64, threads=1, device="ref") as llm:
        assert errors(host_logits(llm, ids), truth_of(made, ids)).max() < 1e-3


def test_heads_that_the_kernels_cannot_have_are_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe", head_dim=24)
    with pytest.raises(PykernelsError, match="no heads of 24 numbers"):
        model.load_engine(tmp_path)
