"""Tokenizers made of a file's metadata."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.checkpoint.gguf.pretokenizers import SPLITS
from model.checkpoint.gguf.tokenizer import tokenizer_of
from model.checkpoint.gguf.vocabulary import Vocabulary
from pykernels.errors import PykernelsError


def of(**values: Any) -> Any:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return SimpleNamespace(metadata=metadata, path=Path("m.gguf"))


BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = ["▁", "a", "b", "ab", "▁a", "▁ab", "c", "▁c"]
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *BYTES, *PIECES],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
    "scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -9.0, -4.0],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def test_sentencepiece_merges_by_score() -> None:
    tokenizer = tokenizer_of(of(**SENTENCEPIECE))
    ids = tokenizer("ab c")["input_ids"]
    # (a, b) before (▁, a): -2 against -3; then ▁ab
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁ab", "▁c"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab c"
    umlaut = tokenizer("ä")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(umlaut) == ["<s>", "▁", "<0xC3>", "<0xA4>"]
    assert tokenizer.decode(umlaut, skip_special_tokens=True) == "ä"
    again = tokenizer_of(of(**SENTENCEPIECE, add_bos_token=False, add_space_prefix=False))
    assert again.convert_ids_to_tokens(again("ab</s>c")["input_ids"]) == ["ab", "</s>", "c"]


def test_bytes_by_each_pre_tokenizer() -> None:
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "Ã", "¤"]
    text = "Hello  world's 1234 x+=1;\n\n\tä"
    for pre in SPLITS:
        made = of(
            model="gpt2", pre=pre, tokens=[*letters, "ĉ", "12", "<|im_end|>", "<t>"],
            token_type=[1] * (len(letters) + 2) + [3, 4], merges=["1 2"],
            eos_token_id=len(letters) + 2,
        )  # fmt: skip
        tokenizer = tokenizer_of(made)
        ids = tokenizer(text + "<|im_end|><t>")["input_ids"]
        assert tokenizer.decode(ids) == text + "<|im_end|><t>", pre
        assert tokenizer.decode(ids, skip_special_tokens=True) == text + "<t>"
        merged = "12" in tokenizer.convert_ids_to_tokens(ids)
        alone = pre in ("smollm", "starcoder", "refact", "command-r", "codeshell", "qwen2")
        assert merged != (alone or pre in ("deepseek-r1-qwen", "dots1", "megrez", "deepseek-llm"))


def test_every_token_that_ends_an_answer() -> None:
    tokens = ["a", "<|return|>", "<|end|>", "<|call|>", "<|eot_id|>", "x"]
    kinds = {"token_type": [1, 3, 3, 3, 1, 1], "model": "gpt2", "eos_token_id": 1}
    assert Vocabulary(of(tokens=tokens, **kinds)).ends == [1, 3]
    assert Vocabulary(of(tokens=tokens, **kinds, eot_token_id=5)).ends == [1, 3, 5]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model": "rwkv"}, "'rwkv', which is not known"),
        ({"eos_token_id": 4000}, "eos_token_id that cannot be read"),
        ({"tokens": [1, 2]}, "tokens that cannot be read"),
        ({"token_type": [1]}, "tokens that cannot be read"),
        ({"scores": []}, "scores that cannot be read"),
    ],
)
def test_a_vocabulary_that_is_wrong(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(PykernelsError, match=cause):
        tokenizer_of(of(**{**SENTENCEPIECE, **change}))
