"""GGUF files for llama.cpp's programs, and what becomes of programs that are not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.e2e.ours import Shape
from bench.peers import llama_bench, llama_tools
from bench.peers.client import PeerMissing
from bench.peers.gguf_model import TYPES, model_file, tensors
from pykernels.quant import Weight, get_format

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("arch", ["qwen3-30b", "mixtral-8x7b"])
@pytest.mark.parametrize("fmt", TYPES)
def test_gguf_reads_back_what_was_written(arch: str, fmt: str, tmp_path: Path) -> None:
    config = Shape(arch, layers=1, experts=8, vocab=256).config()
    config.hidden_size, config.intermediate_size = 256, 512
    config.moe_intermediate_size, config.head_dim = 256, 32
    path = model_file(config, fmt, tmp_path, arch)
    reader = gguf.GGUFReader(path)
    found = {t.name: t for t in reader.tensors}
    wanted = {t.name: t for t in tensors(config)}
    assert {name: tuple(t.shape[::-1]) for name, t in found.items()} == {
        name: t.shape for name, t in wanted.items()
    }
    down = found["blk.0.ffn_down_exps.weight"]
    theirs = gguf.dequantize(down.data, down.tensor_type)
    assert down.tensor_type.name == TYPES[fmt][0]
    rows = torch.from_numpy(np.array(down.data[0]))
    data = rows.view(torch.bfloat16) if fmt == "bf16" else rows
    ours = get_format(fmt).dequantize(Weight(data.contiguous()))
    assert np.allclose(theirs[0], ours.numpy(), atol=1e-6)
    assert 0.5 < theirs.std() * theirs.shape[-1] ** 0.5 < 2
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_peer_that_is_not_built_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_tools, "VENVS", tmp_path)
    for offload in (llama_bench.CPU_ONLY, *llama_bench.ON_THE_GPU):
        with pytest.raises(PeerMissing, match=f"bench.peers.install {offload.tools.engine}"):
            llama_bench.prefill(tmp_path / "any.gguf", 8, 1, offload=offload)


@pytest.mark.parametrize("inner", ["", "llama.cpp/", "llama_cpp_python-0.3.36/vendor/llama.cpp/"])
@pytest.mark.parametrize("archive", [False, True])
def test_llama_cpp_is_found_in_a_folder_or_an_archive(
    inner: str, archive: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / inner / "tools/llama-bench").mkdir(parents=True)
    (source / inner / "CMakeLists.txt").touch()
    if archive:
        source = Path(shutil.make_archive(str(tmp_path / "packed"), "xztar", source))
    root = llama_tools.unpack(source, tmp_path / "scratch")
    assert (root / "CMakeLists.txt").exists()


def test_a_source_without_llama_cpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(llama_tools.ToolMissing, match="no llama.cpp in"):
        llama_tools.unpack(tmp_path, tmp_path)
    (tmp_path / "a.txz").write_text("no archive")
    with pytest.raises(llama_tools.ToolMissing, match="cannot be unpacked"):
        llama_tools.unpack(tmp_path / "a.txz", tmp_path)
