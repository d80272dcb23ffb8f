"""Which file a path stands for, and the parts of its tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import model
from model.checkpoint.config import read_config
from model.checkpoint.gguf import GGUF, find_gguf
from model.checkpoint.open import open_checkpoint
from model.checkpoint.tensors.safetensors import TensorSlice
from model.pretrained import load_tokenizer
from pykernels.errors import PykernelsError

from . import tiny_gguf


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("split")
    tiny_gguf.write(folder / "m.gguf", "mixtral", num_hidden_layers=1, files=2)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single") / "m.gguf"
    tiny_gguf.write(path, "mixtral", num_hidden_layers=1)
    return path


def opens(path: Path) -> None:
    assert read_config(path).model_type == "mixtral"
    assert load_tokenizer(path).bos_token_id == 0
    with open_checkpoint(path) as checkpoint:
        assert isinstance(checkpoint, GGUF) and "output_norm.weight" in checkpoint.tensors


@pytest.mark.parametrize("folder", ["plain", "x.gguf"])
@pytest.mark.parametrize("name", ["m.gguf", "M.GGUF"])
def test_a_folder_of_one_file(folder: str, name: str, single: Path, tmp_path: Path) -> None:
    """The hub's folders have the original model's config.json, which may be of another size, and a
    vision tower's file."""
    (tmp_path / folder).mkdir()
    shutil.copy(single, tmp_path / folder / name)
    (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    opens(tmp_path / folder)
    opens(tmp_path / folder / name)


@pytest.mark.parametrize("suffix", [".gguf", ".GGUF"])
def test_a_folder_of_a_split_set(suffix: str, split: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "x.gguf"
    folder.mkdir()
    for file in split:
        shutil.copy(file, folder / f"{file.stem}{suffix}")
    (folder / "config.json").write_text("{}")
    opens(folder)


def test_what_is_no_gguf_folder(single: Path, tmp_path: Path) -> None:
    for other in ("model.safetensors", "model.safetensors.index.json", "packed.json"):
        folder = tmp_path / other
        folder.mkdir()
        shutil.copy(single, folder / "m.gguf")
        (folder / other).write_bytes(b"")
        assert find_gguf(folder) is None
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None and find_gguf(tmp_path / "config.json") is None
    (tmp_path / "none.gguf").mkdir()
    with pytest.raises(PykernelsError, match="there is no config.json and no GGUF file in it"):
        model.load_engine(tmp_path / "none.gguf")


def test_halves_of_a_stacked_tensor(tmp_path: Path) -> None:
    """Rows of a matrix and of a bias of one expert, as the package wrote them."""
    matrix = np.arange(2 * 4 * 32, dtype=np.float32).reshape(2, 4, 32)
    bias = np.arange(8, dtype=np.float32).reshape(2, 4)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gpt-oss")
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", matrix)
    writer.add_tensor("blk.0.ffn_gate_up_exps.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUF(tmp_path / "m.gguf") as checkpoint:
        for name, values in zip(list(checkpoint.tensors), (matrix, bias), strict=True):
            for rows in ((0, 2), (2, 4)):
                part = TensorSlice(name, 1, rows)
                wanted = torch.from_numpy(values[1, slice(*rows)])
                assert torch.equal(checkpoint.read(part), wanted)
                assert checkpoint.nbytes(part) == wanted.nbytes
