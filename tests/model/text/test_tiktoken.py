"""Kimi's `tiktoken.model` without the package tiktoken, whose ids are the right ones."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

import model
from pykernels.errors import PykernelsError

from ..checks import Own

TOKENS = [
    "th",
    "the",
    " the",
    "he",
    "ll",
    "'ll",
    "12",
    "123",
    "23",
    "  ",
    "\n\n",
    "ab",
    "ba",
    "aba",
]
PARTS = ["你", "好", "你好", "世", "世界", "é"]


def ranks() -> list[bytes]:
    """All bytes, then tokens; characters of three bytes after their first two."""
    tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in TOKENS]
    for part in PARTS:
        data = part.encode()
        if len(data) == 3:
            tokens.append(data[:2])
        tokens.append(data)
    return tokens


N = len(ranks())
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|tool_call_begin|>", 255: "[PAD]"}
CONFIG: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "added_tokens_decoder": {
        str(N + i): {"content": text, "special": "tool" not in text} for i, text in SPECIAL.items()
    },
    "bos_token": "[BOS]",
    "eos_token": {"content": "[EOS]"},
    "pad_token": "[PAD]",
    "chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
}

IDS: dict[str, list[int]] = {
    "then the he'll": [257, 110, 258, 32, 259, 261],
    " the  the\n\nthe": [258, 32, 258, 266, 257],
    "你好世界": [274, 276, 231, 149, 140],
    "é你好ab": [278, 274, 267],
    "1234 12345": [263, 52, 32, 263, 52, 53],
    "babab": [98, 267, 267],
    "[BOS]ab<|im_end|>": [279, 267, 281],
    "abAbAB'LL": [267, 65, 98, 65, 66, 39, 76, 76],
    "x<|reserved_token_329|>": [120, 329],
    "🙂": [240, 159, 153, 130],
}
"""`tiktoken.Encoding(pat_str=..., mergeable_ranks=..., special_tokens=...).encode(text,
allowed_special="all")` of the package tiktoken 0.14, with the `pat_str` of Moonshot's
`tokenization_kimi.py`."""


@pytest.fixture
def folder(own: Own) -> Path:
    path = own()
    lines = [base64.b64encode(token) + f" {i}\n".encode() for i, token in enumerate(ranks())]
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return path


def test_ids_are_those_of_tiktoken(folder: Path) -> None:
    tokenizer = model.load_tokenizer(folder)
    assert {text: tokenizer(text)["input_ids"] for text in IDS} == IDS
    assert {text: tokenizer.decode(ids) for text, ids in IDS.items()} == {t: t for t in IDS}
    assert len(tokenizer) == N + 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (N, N + 1)
    # As Moonshot's own tokenizer: tools' markers are text, ends are not.
    shown = tokenizer.decode([N + 2, N + 3, N + 9], skip_special_tokens=True)
    assert shown == f"<|tool_call_begin|><|reserved_token_{N + 9}|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])["input_ids"]
    assert chat == [ranks().index(b"ab"), N + 2]


def put(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (put("tiktoken.model", "YQ== 0\nnot a line"), "tiktoken.model cannot be read"),
        (put("tiktoken.model", "YQ== 0\nYg== 2\n"), "are not those from 0 to"),
        (put("tiktoken.model", "YQ== 0\nYg== 1\n"), "no token for the byte 0"),
        (put("tokenizer_config.json", "{}"), "of the class None, whose way of splitting"),
        (
            put(
                "tokenizer_config.json",
                json.dumps({**CONFIG, "added_tokens_decoder": {"5": {"content": "x"}}}),
            ),
            "names the special token 5",
        ),
        (
            put("tokenizer_config.json", json.dumps({**CONFIG, "added_tokens_decoder": [1]})),
            "added_tokens_decoder that cannot be read",
        ),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "no tokenizer_config.json"),
    ],
)
def test_a_file_that_is_wrong(folder: Path, spoil: Callable[[Path], object], cause: str) -> None:
    spoil(folder)
    with pytest.raises(PykernelsError, match=cause):
        model.load_tokenizer(folder)


def test_a_vocabulary_with_merges_in_two_files(own: Own) -> None:
    """GPT-2's and Qwen's; transformers reads them."""
    path, letters = own("qwen2_moe"), sorted(ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "th", "the", "Ġthe"])}
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    ids = model.load_tokenizer(path)("the the")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(path)("the the")["input_ids"] == [257, 258]


def test_sentencepiece_names_the_packages_that_it_takes(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own()
    (path / "tokenizer.model").write_bytes(b"\n\x07\n\x03<s>")
    monkeypatch.setattr("model.pretrained.is_sentencepiece_available", lambda: False)
    monkeypatch.setattr("model.pretrained.is_protobuf_available", lambda: True)
    with pytest.raises(PykernelsError, match="pip install sentencepiece, or download tokenizer"):
        model.load_tokenizer(path)
