"""What is wrong with a GGUF file: one line that names it, and never more than that."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import model
from model.checkpoint.gguf.container import read_header
from pykernels.errors import PykernelsError

from . import tiny_gguf
from .tiny_gguf import Type


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tiny_gguf.write(path, "qwen3_moe", num_hidden_layers=1)
    return path


def refused(path: Path, cause: str) -> None:
    with pytest.raises(PykernelsError, match=cause) as raised:
        model.load_engine(path)
    assert "\n" not in str(raised.value) and raised.value.hint
    assert "config.json" not in raised.value.hint  # which such a file has not


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old, new)


def nought(key: bytes) -> Callable[[bytes], bytes]:
    """The value of a key, a number of 4 bytes, becomes 0."""

    def change(data: bytes) -> bytes:
        at = data.index(key) + len(key) + 4
        return data[:at] + bytes(4) + data[at + 4 :]

    return change


def no_kernel(data: bytes) -> bytes:
    """The type of attn_q becomes one of as many bytes that is not read: BF16 to I16."""
    at = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8
    return data[:at] + struct.pack("<I", Type.I32) + data[at + 4 :]


@pytest.mark.parametrize(
    ("change", "cause"),
    {
        "cut off": (lambda data: data[:-100_000], "half-downloaded: it has"),
        "in the header": (lambda data: data[:1000], "cut off or corrupt"),
        "empty": (lambda data: b"", "is empty"),
        "text": (lambda data: b"hello" * 100, "is no GGUF file"),
        "big endian": (lambda data: data[:4] + b"\0\0\0\3" + data[8:], "GGUF version"),
        "tensors": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "promises"),
        "architecture": (replaced(b"qwen3moe", b"qwen9moe"), "'qwen9moe' of .* is not known"),
        "a key": (replaced(b"e.expert_count", b"e.expert_cuont"), "no qwen3moe.expert_count"),
        "no layers": (nought(b"qwen3moe.block_count"), "has the qwen3moe.block_count '0', which c"),
        "no context": (nought(b"qwen3moe.context_length"), "the qwen3moe.context_length '0', whi"),
        "no choice": (nought(b"qwen3moe.expert_used_count"), "qwen3moe.expert_used_count '0', wh"),
        "a tensor": (replaced(b"blk.0.attn_k.w", b"blk.0.attn_y.w"), "1 tensors are missing"),
        "a type": (no_kernel, "is I32, "),
        "a tokenizer": (replaced(b"gpt-2", b"gpt-x"), "'gpt-x', which is not known"),
    }.values(),
)
def test_a_file_that_is_wrong(
    change: Callable[[bytes], bytes], cause: str, file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(change(file.read_bytes()))
    refused(path, cause)


def test_a_type_without_a_kernel(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 292), np.uint8), raw_dtype=Type.Q8_K)
    for name, value in {
        "embedding_length": 256,
        "block_count": 1,
        "attention.head_count": 4,
        "context_length": 64,
        "feed_forward_length": 256,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "token_embd.weight is Q8_K, for which there is no kernel")


def test_files_that_are_missing(file: Path, tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "There is no file")
    for name in ("m-00001-of-00002.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    refused(tmp_path, "holds 2 GGUF models")
    refused(tmp_path / "m-00001-of-00002.gguf", "1 of the 2 files .* missing: m-00002-of-00002")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(file.read_bytes())
    refused(tmp_path / "m-00001-of-00002.gguf", "is one of 1 files by its metadata")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_header_with_any_bytes_changed(data: st.DataObject, file: Path) -> None:
    """Read, or refused in one line."""
    raw = bytearray(file.read_bytes())
    header = raw.index(b"blk.0.attn_norm.weight") + 3000
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        new = data.draw(st.binary(min_size=1, max_size=8))
        raw[at : at + len(new)] = new
    changed = file.with_name("changed.gguf")
    changed.write_bytes(raw[: data.draw(st.sampled_from([len(raw), header, len(raw) - 1]))])
    try:
        read_header(changed)
    except PykernelsError as error:
        assert "\n" not in str(error)
