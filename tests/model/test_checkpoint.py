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
from safetensors.torch import save_file

from model.checkpoint.safetensors import Checkpoint, Part
from pykernels.errors import PykernelsError

INDEX = "model.safetensors.index.json"


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(7, 2).bfloat16(),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "ints": torch.arange(6).view(2, 3),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for name, want in tensors.items():
            got = checkpoint.read(Part(name))
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert torch.equal(got.float(), want.float()), name
            assert checkpoint.nbytes(Part(name)) == want.nbytes


@settings(max_examples=60, deadline=None)
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
        part = Part("t", e, (start, stop))
        assert torch.equal(checkpoint.read(part), tensor[e, start:stop])
        assert checkpoint.shape(part) == (stop - start, K)
        assert checkpoint.nbytes(part) == (stop - start) * K * 4


def test_a_read_is_fresh_memory(tmp_path: Path) -> None:
    save_file({"t": torch.ones(4)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read(Part("t")).zero_()
        assert checkpoint.read(Part("t")).tolist() == [1, 1, 1, 1]


def shard(folder: Path) -> Path:
    return next(folder.glob("model-00002*"))


def cut(folder: Path) -> None:
    file = shard(folder)
    file.write_bytes(file.read_bytes()[:-7])


def cut_in_the_header(folder: Path) -> None:
    file = shard(folder)
    file.write_bytes(file.read_bytes()[:40])


def empty(folder: Path) -> None:
    shard(folder).write_bytes(b"")


def grown(folder: Path) -> None:
    file = shard(folder)
    file.write_bytes(file.read_bytes() + b"x")


def garbage(folder: Path) -> None:
    file = shard(folder)
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xfe{{"
    file.write_bytes(bytes(data))


def absent(folder: Path) -> None:
    shard(folder).unlink()


def no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def no_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def pickles(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def stale_index(folder: Path) -> None:
    change_index(folder, lambda m: m.update({"model.new": next(iter(m.values()))}))


def outside(folder: Path) -> None:
    change_index(folder, lambda m: m.update({"lm_head.weight": "../model.safetensors"}))


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ')


def index_without_map(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": {}}')


def index_of_numbers(folder: Path) -> None:
    change_index(folder, lambda m: m.update({"lm_head.weight": [1]}))  # type: ignore[dict-item]


def unreadable(folder: Path) -> None:
    file = shard(folder)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # opens, and fails at the first byte


def index_is_a_list(folder: Path) -> None:
    (folder / INDEX).write_text("[]")


def nested(folder: Path) -> None:
    (folder / INDEX).write_text("[" * 100_000)


def of_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Spoils the JSON of a shard, whose data stays where it is."""

    def spoil(folder: Path) -> None:
        data = shard(folder).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        shard(folder).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return spoil


def first(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of the tensor whose data come first."""
    return min((e for e in header.values() if "shape" in e), key=lambda e: e["data_offsets"])


def before_the_data(header: dict[str, Any]) -> None:
    start, stop = first(header)["data_offsets"]
    first(header).update(dtype="U8", shape=[stop - start + 8], data_offsets=[start - 8, stop])


def one_more_tensor(header: dict[str, Any]) -> None:
    header["twin"] = first(header)


def one_tensor_less(header: dict[str, Any]) -> None:
    header.pop(next(name for name, entry in header.items() if entry is first(header)))


def negative_shape(header: dict[str, Any]) -> None:
    first(header)["shape"] = [-1, -math.prod(first(header)["shape"])]


def no_whole_shape(header: dict[str, Any]) -> None:
    first(header)["shape"][0] += 0.5


def whole_as_a_fraction(header: dict[str, Any]) -> None:
    first(header)["shape"][0] += 0.0


def less_than_its_bytes(header: dict[str, Any]) -> None:
    first(header)["shape"][0] -= 1


def infinite_shape(header: dict[str, Any]) -> None:
    first(header)["shape"][0] = float("inf")


def deep_header(folder: Path) -> None:
    text = b'{"a":' * 100_000
    shard(folder).write_bytes(len(text).to_bytes(8, "little") + text)


HEADERS = [
    (before_the_data, "has a broken safetensors header"),
    (one_more_tensor, r"is corrupt: \S+ begins at byte \d+, the tensor before it ends at \d+"),
    (one_tensor_less, r"is corrupt: \S+ begins at byte \d+, the tensor before it ends at \d+"),
    (negative_shape, "has a broken safetensors header"),
    (no_whole_shape, "has a broken safetensors header"),
    (infinite_shape, "has a broken safetensors header"),
    (whole_as_a_fraction, "has a broken safetensors header"),
    (less_than_its_bytes, "has a broken safetensors header"),
]

SPOILT = [
    (cut, r"model-00002-of-00002.safetensors is half-downloaded: it has \d+ bytes and its header"),
    (cut_in_the_header, r"is cut off or no safetensors file \(40 bytes\)"),
    (empty, r"is cut off or no safetensors file \(0 bytes\)"),
    (grown, "is corrupt: it has"),
    (garbage, "has a broken safetensors header"),
    (
        absent,
        "1 of 2 shards .* are missing: model-00002-of-00002.safetensors. Download the missing",
    ),
    (no_weights, "has neither model.safetensors nor model.safetensors.index.json"),
    (no_index, "has safetensors files but no model.safetensors.index.json"),
    (pickles, "in another format than safetensors"),
    (stale_index, "names 1 tensors that their shard does not hold, the first is model.new"),
    (outside, "names a file outside its folder: ../model.safetensors"),
    (broken_index, "is not valid JSON"),
    (index_without_map, "has no weight_map"),
    (index_of_numbers, "has a weight_map of other than file names"),
    (unreadable, r"model-00002-of-00002.safetensors cannot be read: Input/output error"),
    (index_is_a_list, "holds no JSON object"),
    (nested, "is not valid JSON: maximum recursion depth"),
    (deep_header, "has a broken safetensors header"),
    *((of_header(change), said) for change, said in HEADERS),
]
SPOILT_IDS = [f.__name__ for f, _ in [*SPOILT[: -len(HEADERS)], *HEADERS]]


@pytest.mark.parametrize(("spoil", "said"), SPOILT, ids=SPOILT_IDS)
def test_a_spoilt_checkpoint_is_told(
    own: Callable[..., Path], spoil: Callable[[Path], None], said: str
) -> None:
    folder = own()
    spoil(folder)
    with pytest.raises(PykernelsError, match=said) as raised:
        Checkpoint(folder)
    assert "\n" not in str(raised.value)


def test_a_header_beyond_the_specifications_limit_is_not_read(
    own: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.checkpoint.safetensors._MAX_HEADER", 100)
    with pytest.raises(PykernelsError, match="is cut off or no safetensors file"):
        Checkpoint(own())


def test_a_tensor_is_read_in_as_many_pieces_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(100)
    save_file({"other": torch.ones(3), "t": tensor}, tmp_path / "model.safetensors")
    monkeypatch.setattr("model.checkpoint.safetensors._READ", 77)
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read(Part("t")), tensor)


def test_a_file_that_is_cut_off_later_is_told(
    own: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([0])  # a second look would be one too many
    with Checkpoint(own()) as checkpoint:
        monkeypatch.setattr(os, "preadv", lambda *_: next(ends))
        with pytest.raises(PykernelsError, match=r"\.safetensors ended while it was being read"):
            checkpoint.read(Part("lm_head.weight"))
        monkeypatch.undo()


def failing(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_disk_that_fails_later_is_told(
    own: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with Checkpoint(own()) as checkpoint:
        monkeypatch.setattr(os, call, failing)
        with pytest.raises(PykernelsError, match=r"\.safetensors cannot be read: Input/output err"):
            checkpoint.read(Part("lm_head.weight"))
        monkeypatch.undo()
