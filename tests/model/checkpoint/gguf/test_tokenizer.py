"""Tokenizers made of a file's metadata."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import regex
from gguf.constants import Keys
from transformers import GemmaTokenizer

from model.checkpoint.gguf.pretokenizers import SPLITS
from model.checkpoint.gguf.sampling import sampling_of
from model.checkpoint.gguf.tokenizer import special_ids, tokenizer_of
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


def test_gemma4_is_transformers_own() -> None:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    pieces = ["▁", "a", "b", "ab", "▁a", "▁▁", "c", "\n", "\n\n", "▁c"]
    tokens = [*names, *BYTES, *pieces]
    merges = ["▁ a", "a b", "▁ ▁", "▁ c", "\n \n"]
    made = of(
        model="gemma4",
        tokens=tokens,
        merges=merges,
        token_type=[3, 3, 3, 2, 3, 3, 3] + [6] * 256 + [1] * len(pieces),
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        add_bos_token=False,
    )
    tokenizer = tokenizer_of(made)
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(first, last) for first, last in (merge.split(" ") for merge in merges)]
    theirs = GemmaTokenizer(vocab=vocab, merges=pairs, extra_special_tokens=["<|turn>", "<turn|>"])
    for text in ("ab c", " a  ab\n\nab\n", "ä<|turn>ab<turn|>", "cab   ab"):
        assert tokenizer(text)["input_ids"] == [
            2,
            *theirs(text, add_special_tokens=False).input_ids,
        ]
        assert tokenizer.decode(tokenizer(text)["input_ids"][1:]) == text
    assert special_ids(made)["eos_token_id"] == [1, 6]


def test_bytes_by_each_pre_tokenizer() -> None:
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "Ã", "¤"]
    text = "Hello  world's 1234 x+=1;\n\n\tä"
    for pre in SPLITS:
        made = of(
            model="gpt2",
            pre=pre,
            tokens=[*letters, "ĉ", "12", "<|im_end|>", "<t>"],
            token_type=[1] * (len(letters) + 2) + [3, 4],
            merges=["1 2"],
            eos_token_id=len(letters) + 2,
        )
        tokenizer = tokenizer_of(made)
        ids = tokenizer(text + "<|im_end|><t>")["input_ids"]
        assert tokenizer.decode(ids) == text + "<|im_end|><t>", pre
        assert tokenizer.decode(ids, skip_special_tokens=True) == text + "<t>"
        merged = "12" in tokenizer.convert_ids_to_tokens(ids)
        alone = pre in ("smollm", "starcoder", "refact", "command-r", "codeshell", "qwen2")
        alone |= pre in ("qwen35", "deepseek-r1-qwen", "dots1", "megrez", "deepseek-llm")
        assert merged != alone


def test_words_of_qwen35_have_their_marks() -> None:
    """The expression of its tokenizer.json, which llama.cpp quotes."""
    original = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    text = "हिन्दी: it's 12 e\u0301toiles,\n\n  x+=1; (\u0301)\n"
    made = of(model="gpt2", pre="qwen35", tokens=["a", "b", "ab"], merges=["a b"], eos_token_id=0)
    split = tokenizer_of(made).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:last] for _, (first, last) in split] == regex.findall(original, text)


def test_every_token_that_ends_an_answer() -> None:
    """As `special_eog_ids` in llama.cpp's `llama-vocab.cpp`: by key, and by text whatever the
    type; a harmony `<|end|>` ends a message only."""
    tokens = ["a", "<|return|>", "<|end|>", "<|call|>", "<|eot_id|>", "x", "<|file_sep|>", "y"]
    kinds = {"token_type": [1, 3, 3, 3, 1, 1, 1, 1], "model": "gpt2", "eos_token_id": 1}
    assert Vocabulary(of(tokens=tokens, **kinds)).ends == [1, 3, 4, 6]
    assert Vocabulary(of(tokens=tokens, **kinds, eot_token_id=5)).ends == [1, 3, 4, 5, 6]
    ends = Vocabulary(of(tokens=tokens, **kinds, eom_token_id=5, fim_sep_token_id=7)).ends
    assert ends == [1, 3, 4, 5, 7]
    tokens[1] = "<|im_end|>"
    assert Vocabulary(of(tokens=tokens, **kinds)).ends == [1, 2, 3, 4, 6]


def test_an_end_of_the_type_of_an_ordinary_token() -> None:
    made = of(
        model="gpt2",
        pre="gpt-2",
        tokens=["a", "b", "ab", "<|im_end|>", "</eos>"],
        token_type=[1, 1, 1, 1, 3],
        merges=["a b"],
        eos_token_id=4,
    )
    assert special_ids(made)["eos_token_id"] == [3, 4]
    tokenizer = tokenizer_of(made)
    assert tokenizer("ab<|im_end|>")["input_ids"] == [2, 3]
    assert tokenizer.decode([2, 3], skip_special_tokens=True) == "ab"


def test_special_tokens_outside_the_vocabulary_are_none() -> None:
    """llama.cpp warns of a "bad special token" and goes on with its default."""
    bad = {"padding_token_id": 4294967295, "eos_token_id": 4000}
    made = of(**{**SENTENCEPIECE, **bad})
    with pytest.warns(UserWarning) as told:
        tokenizer = tokenizer_of(made)
    assert ["padding_token_id 4294967295" in str(one.message) for one in told].count(True) == 1
    assert tokenizer.pad_token is None and tokenizer.eos_token == "</s>"
    assert special_ids(made) == {"bos_token_id": 1, "pad_token_id": None, "eos_token_id": [2]}


def test_sampling_by_the_metadata() -> None:
    """Keys of the package `gguf`: `Keys.General.SAMPLING_*`; what llama.cpp begins with."""
    made = of(**SENTENCEPIECE, suppress_tokens=[5])
    made.metadata |= {
        Keys.General.SAMPLING_TEMP: 0.6,
        Keys.General.SAMPLING_TOP_K: 20,
        Keys.General.SAMPLING_PENALTY_REPEAT: 1.1,
    }
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "suppress_tokens": [5]}
    ids = {"bos_token_id": 1, "pad_token_id": None, "eos_token_id": [2]}
    assert sampling_of(made) == {**own, **ids, "penalty_repeat": 1.1}
    made.metadata[Keys.General.SAMPLING_PENALTY_LAST_N] = -1
    assert sampling_of(made) == {**own, **ids, "repetition_penalty": 1.1}
    assert sampling_of(of(**SENTENCEPIECE)) is None


def test_a_pre_tokenizer_that_is_not_named_is_told_of() -> None:
    with pytest.warns(UserWarning, match="does not name its pre-tokenizer"):
        tokenizer_of(of(model="gpt2", tokens=["a", "b", "ab"], merges=["a b"]))


def test_kimi_k2_without_merges() -> None:
    """Its ids are the ranks of a tiktoken file, from which the merges follow."""
    letters = [*"abcd", "ab", "cd", "abcd", "ba", "aba"]
    tokenizer = tokenizer_of(of(model="gpt2", pre="kimi-k2", tokens=letters))
    # tiktoken.Encoding(...).encode of the package tiktoken 0.14, with these ranks
    texts = {"abcd": [6], "abcdabab": [6, 4, 4], "baba": [1, 8], "bab": [1, 4], "aba": [8]}
    assert {text: tokenizer(text)["input_ids"] for text in texts} == texts


BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab"],
    "merges": ["a b"],
}


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"model": "rwkv"}, "'rwkv', which is not known"),
        ({"tokens": [1, 2]}, "tokens that cannot be read"),
        ({"tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"]}, "the token 'a' twice, as 0 and 2"),
        ({"token_type": [1]}, "1 values of tokenizer.ggml.token_type for 3 tokens"),
        ({"scores": [0.0]}, "1 values of tokenizer.ggml.scores for 3 tokens"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
        ({"merges": []}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "the merge 'ab', which joins nothing"),
        ({"merges": ["a c"]}, "cannot be made: .*c"),
        ({"merges": [1]}, "merges that cannot be read"),
        ({"pre": "unheard-of"}, "the pre-tokenizer 'unheard-of', which is not known"),
        ({"eos_token_id": "a"}, "eos_token_id that cannot be read"),
        ({"add_bos_token": True}, "wants a bos token in front of texts .* and names none"),
    ],
)
def test_a_vocabulary_that_is_wrong(values: dict[str, Any], cause: str) -> None:
    with pytest.raises(PykernelsError, match=cause) as raised:
        tokenizer_of(of(**{**BYTE_LEVEL, **values}))
    assert "\n" not in str(raised.value)
