"""GGUF files of every family on the engine, against transformers' own float32 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import model
from runtime.engine import Engine, SamplingParams

from ....cpu.kernels import only_with_all
from ....runners import ref_runner
from ...checks import errors
from ...test_engine import BF16, logits
from . import tiny_gguf
from .tiny_gguf import Type, all_of

LFM2: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_scaling": tiny_gguf.LLAMA3,
    },
    "mixtral": {},
    "mixtral in nvfp4": {"type_of": tiny_gguf.nvfp4},
    "mixtral in mxfp4": {"type_of": tiny_gguf.gpt_oss},
    "qwen2_moe in 32s": {"type_of": tiny_gguf.blocks_of_32},
    "qwen3_moe in low bits": {"type_of": tiny_gguf.low_bits},
    "qwen3_moe by grids": {"type_of": tiny_gguf.by_grids},
    "qwen3_moe by trits": {"type_of": tiny_gguf.by_trits},
    "qwen3_moe in q5_k": {"type_of": all_of(Type.Q5_K)},
    "qwen3_next": {"linear_num_value_heads": 8},
    "qwen3_5_moe_text": {"linear_num_value_heads": 8},
    "deepseek_v2": {"rope_scaling": tiny_gguf.ROPE},
    "deepseek_v3": {},
    "deepseek_v3 of unlike types": {"type_of": tiny_gguf.unlike},
    "deepseek_v3 with kv_b": {"split_kv_b": False},
    "lfm2": {**LFM2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**LFM2, "num_hidden_layers": 3, "num_experts": 8, "num_dense_layers": 1},
    "gemma4_text in 32s": {"type_of": tiny_gguf.blocks_of_32},
    "glm4_moe in f16": {"type_of": all_of(Type.F16)},
}


EXACT, ROUNDED = 5e-4, 1e-2
BY_BFLOAT16 = ("deepseek_v3 of unlike types", "deepseek_v3 with kv_b")
"""Cases with matrices that loading dequantizes, and rounds to bfloat16."""
ALIKE = ("qwen3_moe in q5_k", "glm4_moe in f16")
"""Cases that show little more than others on the CPU, and compile kernels of their own."""


def as_published(model: PreTrainedModel) -> None:
    """Rounds to bfloat16, so that what loading rounds to that is exact."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, "ref") for case in CASES),
        *(pytest.param(c, "cpu", marks=only_with_all if c in ALIKE else ()) for c in CASES),
    ],
)
def test_logits_are_those_of_the_dequantized_model(case: str, device: str, tmp_path: Path) -> None:
    file, family = tmp_path / "model.gguf", case.split()[0]
    prepare = as_published if device == "ref" else lambda model: None
    reference = tiny_gguf.write(file, family, prepare=prepare, **CASES[case])
    ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        truth = reference(ids[None]).logits[0]
    with model.load_engine(file, device=device, max_model_len=64) as llm:
        error = errors(logits(llm, ids), truth)
    if device == "ref":
        assert error.max() < (ROUNDED if case in BY_BFLOAT16 else EXACT), error
        return
    # A near-tie that routes a token otherwise may move it further; which ones, the CPU's order of
    # sums decides.
    assert error.median() < BF16 and (error < 2 * BF16).float().mean() > 0.8, error


def test_weights_stay_as_they_are_stored(tmp_path: Path) -> None:
    """Of a split set, found by its folder: experts of two formats, a mixed qkv, the embedding."""
    reference = tiny_gguf.write(tmp_path / "m.gguf", "qwen3_moe", files=3)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    with model.load_engine(tmp_path, max_model_len=64) as llm:
        decoder: Any = llm.runner.model
        layer = decoder.layers[0]
        experts = layer.mlp.experts
        assert (experts.fmt, experts.down_fmt) == ("q4_k", "q6_k")
        assert [part.fmt for part in layer.attention.qkv.parts] == ["q4_k", "q6_k"]
        assert (decoder.table.fmt, decoder.head.fmt) == ("q8_0", "q6_k")
        ids = llm.encode("ab")
        assert ids[0] == 0 and len(llm.generate(ids, max_tokens=4).token_ids) <= 4
        exact = Engine(
            ref_runner(decoder, 64, max_num_batched_tokens=16, max_num_seqs=1), threaded=False
        )
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (found,) = exact.generate([ids], params)
    truth = reference.generate(
        torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert list(found.token_ids) == truth[0, len(ids) :].tolist()


def test_eagerly(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    reference = tiny_gguf.write(file, "mixtral")
    ids = torch.randint(0, 96, (1, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        got = model.from_pretrained(file, dtype="float32")(ids).logits
        assert errors(got, reference(ids).logits).max() < 0.02
