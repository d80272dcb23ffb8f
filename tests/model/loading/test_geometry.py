"""Sizes that fill no block in a GGUF file and in a packed cache: matrices stacked at 32-row blocks.

The right logits are those of transformers' own float32 model, on the values that are stored; in
``families`` are those of checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import model
from model.llm import LLM
from pykernels.errors import PykernelsError
from runtime.devices.ref.step import RefExecutable
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import allocate_inputs

from .. import tiny
from ..checkpoint.gguf import tiny_gguf
from ..checkpoint.gguf.tiny_gguf import Type
from ..checks import errors
from ..test_engine import BF16

ONE_KEY_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}


def host_logits(llm: LLM, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] of one sequence, in one step."""
    T, lowered = len(ids), llm.runner.model
    program = on_ref(lowered.lower(StepSizes(T, 1, T, 1, 1)))
    inputs = allocate_inputs(program) | {
        "tokens": ids,
        "positions": torch.arange(T),
        "slot_mapping": torch.arange(T),
        "logits_indices": torch.arange(T),
    }
    caches = {
        name: replace(part, dtype=torch.float32).zeros() for name, part in lowered.caches(1).items()
    }
    step = RefExecutable(Compiled.of(program), lowered.store, inputs, caches)
    step.sizes[:] = torch.tensor([T, 1, T])
    step.run()
    return step.outputs["logits"]


def some_ids(vocab_size: int) -> torch.Tensor:
    """int64 [30]."""
    return torch.randint(0, vocab_size, (30,), generator=torch.Generator().manual_seed(3))


def truth_of(made: tiny.Tiny, ids: torch.Tensor) -> torch.Tensor:
    made.reference.set_experts_implementation("eager")  # grouped products want multiples of 16
    with torch.no_grad():
        return made.reference(ids[None]).logits[0]


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
