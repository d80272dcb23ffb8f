"""The corpus' split and the tokenizer's losslessness."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from model.embedded import PATH
from model.embedded.corpus import default_stdlib, find_sources, part_of
from model.embedded.tokenizer import BOS_ID, EOS_ID, encode_files, load_tokenizer

TEXTS = {
    "empty": "",
    "indented": "def f(xs):\n    if not xs:\n        return []\n\n\n\treturn xs  \n",
    "line ends": "a = 1\r\n\r\nb = 2\r\n\x0c\na\rb",
    "spaces": "   x   " + " " * 77 + "x" + "\n" * 33 + "#" * 79 + "_" * 20,
    "digits": "0xdeadbeef 1_000_000 3.14159e-10 '\\u00e9'",
    "other scripts": "naïve = 'Ελληνικά 漢字 \U0001f40d עברית'  # é as e\u0301",
    "control bytes": "".join(map(chr, range(256))),
    "like a special token": "<|bos|> is no bos when it is a <|boss|>",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(PATH)


def test_the_tokenizer_gives_any_text_back_exactly(tokenizer: Tokenizer) -> None:
    files = [file.read_bytes().decode() for file in sorted(default_stdlib().glob("*.py"))[::20]]
    assert len(files) > 5
    texts = [*TEXTS.values(), *files]
    for text, ids in zip(texts, encode_files(tokenizer, texts), strict=True):
        assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
        assert tokenizer.decode(ids[1:-1], skip_special_tokens=False) == text


def test_transformers_reads_the_tokenizer(tokenizer: Tokenizer) -> None:
    loaded = AutoTokenizer.from_pretrained(PATH)
    ids = loaded(TEXTS["indented"])["input_ids"]
    assert ids == tokenizer.encode(TEXTS["indented"]).ids
    assert (ids[0], loaded.bos_token_id, loaded.eos_token_id) == (BOS_ID, BOS_ID, EOS_ID)


def test_the_split_depends_on_the_path_alone() -> None:
    # Pinned: another Python, machine or order must put the same path into the same part.
    assert part_of("dataclasses.py") == part_of("statistics.py") == "heldout"
    assert part_of("argparse.py") == "train"
    names = [f"package/module_{i}.py" for i in range(5000)]
    share = {p: sum(part_of(n) == p for n in names) / len(names) for p in ("heldout", "validation")}
    assert share["heldout"] == pytest.approx(0.05, abs=0.01)
    assert share["validation"] == pytest.approx(0.95 * 0.02, abs=0.008)


def test_sources_leave_out_what_is_not_the_library(tmp_path: Path) -> None:
    kept = tmp_path / "a" / "kept.py"
    for file in (
        kept,
        tmp_path / "site-packages" / "other.py",
        tmp_path / "a" / "__pycache__" / "b.py",
        tmp_path / "_sysconfigdata__linux_x86_64-linux-gnu.py",
        tmp_path / "notes.txt",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    (tmp_path / "latin1.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    assert [s.path for s in find_sources(tmp_path)] == ["a/kept.py"]
    kept.unlink()
    with pytest.raises(ValueError, match=r"no UTF-8 \*\.py file"):
        find_sources(tmp_path)
