"""The safetensors reader: against the safetensors library, and on spoilt files."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model.checkpoint.tensors.safetensors import Checkpoint, TensorSlice
from pykernels.errors import PykernelsError

from ..checks import Own

INDEX = "model.safetensors.index.json"
Header = dict[str, Any]


def test_reads_what_the_library_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(7, 2).bfloat16(),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "ints": torch.arange(100).view(2, 50),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(
        "model.checkpoint.tensors.safetensors._READ", 77
    )  # the ints take several reads
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for name, want in tensors.items():
            got = checkpoint.read(TensorSlice(name))
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert torch.equal(got.float(), want.float()), name
            assert checkpoint.nbytes(TensorSlice(name)) == want.nbytes
        checkpoint.read(TensorSlice("f32")).zero_()  # a read is fresh memory
        assert torch.equal(checkpoint.read(TensorSlice("f32")), tensors["f32"])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_parts_are_slices(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("parts")
    E, N, K = (data.draw(st.integers(1, 5)) for _ in range(3))
    tensor = torch.arange(E * N * K, dtype=torch.float32).view(E, N, K)
    save_file({"other": torch.ones(3), "t": tensor}, folder / "model.safetensors")
    e = data.draw(st.integers(0, E - 1))
    start = data.draw(st.integers(0, N))
    stop = data.draw(st.integers(start, N))
    with Checkpoint(folder) as checkpoint:
        part = TensorSlice("t", e, (start, stop))
        assert torch.equal(checkpoint.read(part), tensor[e, start:stop])
        assert checkpoint.shape(part) == (stop - start, K)
        assert checkpoint.nbytes(part) == (stop - start) * K * 4


def shard(folder: Path) -> Path:
    return next(folder.glob("model-00002*"))


def of_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Spoils a shard as a whole."""
    return lambda folder: shard(folder).write_bytes(change(shard(folder).read_bytes()))


def of_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Spoils the weight map of the index."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def of_header(change: Callable[[Header], object]) -> Callable[[Path], None]:
    """Spoils the JSON of a shard, whose data stays where it is."""

    def spoil(folder: Path) -> None:
        data = shard(folder).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        shard(folder).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return spoil


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(*patterns: str) -> Callable[[Path], object]:
    return lambda folder: [file.unlink() for p in patterns for file in list(folder.glob(p))]


def first(header: Header) -> Header:
    """The entry of the tensor whose data come first."""
    return min((e for e in header.values() if "shape" in e), key=lambda e: e["data_offsets"])


def first_shape(shape: Callable[[list[int]], list[Any]]) -> Callable[[Path], None]:
    return of_header(lambda header: first(header).update(shape=shape(first(header)["shape"])))


def unreadable(folder: Path) -> None:
    file = shard(folder)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # opens, and fails at the first byte


def pickles(folder: Path) -> None:
    remove("*.safetensors*")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


BROKEN = "has a broken safetensors header"
GAP = r"is corrupt: \S+ begins at byte \d+, the tensor before it ends at \d+"
# fmt: off
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (of_bytes(lambda data: data[:-7]), r"is half-downloaded: it has \d+ bytes and its head"),
    "cut in the header": (of_bytes(lambda data: data[:40]), r"is cut off or no .* \(40 bytes\)"),
    "longer": (of_bytes(lambda data: data + b"x"), "is corrupt: it has"),
    "nested header": (
        of_bytes(lambda _: (500_000).to_bytes(8, "little") + b'{"a":' * 100_000), BROKEN),
    "absent": (remove("model-00002*"), "1 of 2 shards .* are missing: model-00002-of-00002.safet"),
    "no weights": (remove("*.safetensors*"), "has neither model.safetensors nor model.safetensor"),
    "no index": (remove(INDEX), "has safetensors files but no model.safetensors.index.json"),
    "pickles": (pickles, "in another format than safetensors: pytorch_model.bin"),
    "pickles and an adapter": (
        lambda folder: (pickles(folder), write("adapter_model.safetensors", "")(folder)),
        "in another format than safetensors: pytorch_model.bin"),
    "stale index": (
        of_index(lambda m: m.update({"model.new": next(iter(m.values()))})),
        "names 1 tensors that their shard does not hold, the first is model.new"),
    "file elsewhere": (
        of_index(lambda m: m.update({"lm_head.weight": "../model.safetensors"})),
        "names a file that cannot be in its folder: '../model.safetensors'"),
    "a long name": (
        of_index(lambda m: m.update({"lm_head.weight": "m" * 3000})),
        r"names a file that cannot be in its folder: 'm{60}'\. Download"),
    "index of numbers": (
        of_index(lambda m: m.update({"lm_head.weight": [1]})),
        "has a weight_map of other than file names"),
    "index without map": (write(INDEX, '{"metadata": {}}'), "has no weight_map"),
    "index is a list": (write(INDEX, "[]"), "holds no JSON object"),
    "nested index": (write(INDEX, "[" * 100_000), "is not valid JSON: maximum recursion depth"),
    "unreadable": (unreadable, "cannot be read: Input/output error"),
    "overlap": (of_header(lambda header: header.update(twin=first(header))), GAP),
    "negative shape": (first_shape(lambda shape: [-1, -math.prod(shape)]), BROKEN),
    "fewer rows than bytes": (first_shape(lambda shape: [shape[0] - 1, *shape[1:]]), BROKEN),
}
# fmt: on


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_files_are_refused(own: Own, name: str) -> None:
    folder = own()
    spoil, message = SPOILT[name]
    spoil(folder)
    with pytest.raises(PykernelsError, match=message) as raised:
        Checkpoint(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("index", ["other weights", "absent shards", "broken"])
def test_a_single_file_comes_before_an_index(index: str, own: Own) -> None:
    """As transformers has it, which loads the same folder here; and safetensors before pickles."""
    folder = own("qwen3_moe")
    tensors = {
        name: tensor + 1
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "pytorch_model.bin").write_bytes(b"")
    if index == "absent shards":
        remove("model-0*")(folder)
    elif index == "broken":
        write(INDEX, "{")(folder)
    name = "model.embed_tokens.weight"
    truth = AutoModelForCausalLM.from_pretrained(folder).get_parameter(name)
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        assert torch.equal(checkpoint.read(TensorSlice(name)), truth)


def fail(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("call", "fake", "message"),
    [
        ("open", fail, "cannot be read: Input/output error"),
        ("preadv", fail, "cannot be read: Input/output error"),
        ("preadv", lambda *_: 0, "ended while it was being read"),
    ],
    ids=["no open", "no read", "cut off meanwhile"],
)
def test_a_disk_that_fails_later(
    own: Own, monkeypatch: pytest.MonkeyPatch, call: str, fake: Any, message: str
) -> None:
    with Checkpoint(own()) as checkpoint:
        monkeypatch.setattr(os, call, fake)
        with pytest.raises(PykernelsError, match=rf"\.safetensors {message}"):
            checkpoint.read(TensorSlice("lm_head.weight"))
        monkeypatch.undo()
