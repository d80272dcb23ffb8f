"""What several test files do with a tiny checkpoint: change it, see it refused, compare logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import model
from model.modules.moe import FusedMoE
from pykernels.errors import PykernelsError
from runtime.engine import Result

from .tiny import Tiny

Checkpoints = Callable[..., Tiny]
Own = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def logits(lm: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return lm(ids).logits.float()


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """|got - want| / |want| of each token."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def logprob_error(result: Result, truth: torch.Tensor) -> float:
    """|got - want| / |want| of the likeliest tokens' logprobs, at the median over the prompt.

    Args:
        result: with prompt logprobs from the second token on.
        truth: float32 [T, V], log-softmax of the right logits.
    """
    scored = result.completions[0].prompt_logprobs
    assert len(scored) == len(truth) - 1
    found = []
    for row, one in zip(truth, scored, strict=False):
        tokens, logprobs = zip(*one.top, strict=True)
        found.append(errors(torch.tensor(logprobs), row[list(tokens)]))
    return float(torch.stack(found).median())


def moe_blocks(lm: torch.nn.Module) -> dict[str, Any]:
    """Blocks that are ours, or transformers' own around experts of ours."""
    ours = [m for m in lm.modules() if isinstance(m, FusedMoE)]
    names = [module.stored_name.removesuffix(".experts") for module in ours]
    return {name: lm.get_submodule(name) for name in names}


def fused_moe(cls: str, name: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """A rule that replaces modules of that class by `FusedMoE`."""
    match = {"class": cls} if name is None else {"class": cls, "name": name}
    return {"match": match, "replace": {"class": "FusedMoE", "kwargs": kwargs}}


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> Tensors:
    """Of a checkpoint in one shard; returns what is stored then."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def refused(message: str, folder: Path, **options: Any) -> None:
    """Loading raises one line with that cause and a hint."""
    with pytest.raises(PykernelsError, match=message) as raised:
        model.from_pretrained(folder, **options)
    assert "\n" not in str(raised.value)
    assert raised.value.cause and raised.value.hint


def byte_tokenizer(bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    """96 tokens: two special ones, and a byte each: the printable ones up to |, space, newline."""
    alphabet = [*map(chr, range(33, 125)), "Ġ", "Ċ"]  # as byte-level tokenizers write these two
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>")
