"""`pykernels inspect`: what the table and its totals say, from headers or a configuration alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import model
from model.inspection.examine import examine
from model.inspection.report import layers
from model.llm import meta_decoder
from model.pinning.profile import Profile, write
from pykernels.errors import PykernelsError
from runtime.planning.placement import deal
from runtime.planning.work import weight_bytes

from .checkpoint.gguf import tiny_gguf
from .checkpoint.gguf.tiny_gguf import mixed
from .checks import Checkpoints
from .conftest import Run, failed
from .tiny import FP8_SIZES


@pytest.mark.parametrize(
    ("name", "total", "cpu", "gpu"),
    [("deepseek-v3", 671, 654, 17), ("deepseek-v2.5", 236, 223, 13), ("qwen2-57b", 57, 49, 8)],
)
def test_totals_are_those_of_the_paper(name: str, total: int, cpu: int, gpu: int) -> None:
    """KTransformers (SOSP 2025), table 1, in billions of parameters."""
    found = examine(name, device="cuda:0")
    assert found.classes and found.engine
    whole = examine(name, device="cuda:0", experts="gpu")
    assert set(whole.devices) == {"cuda:0"}
    numbers = {device: round(count / 1e9) for device, (count, _) in found.devices.items()}
    assert numbers == {"cpu": cpu, "cuda:0": gpu}
    both = found.parameters(True) + found.parameters(False)
    assert round(both / 1e9) == total


def test_a_token_reads_what_the_engine_reads(checkpoint: Checkpoints) -> None:
    for path in (model.EMBEDDED, checkpoint("qwen2_moe").path):
        read = weight_bytes(meta_decoder(path).lower())
        assert examine(path).token_bytes == pytest.approx(read, rel=0.02)


def test_a_packed_cache_is_what_was_asked_of_convert(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint("qwen2_moe").path
    model.convert(path, tmp_path / "packed", "int8", threads=1, progress=False)
    stored, found = examine(path), examine(tmp_path / "packed")
    assert {entry.format for entry in found.entries if entry.routed} == {"int8"}
    others = [
        [(entry.name, entry.format) for entry in one.entries if not entry.routed]
        for one in (stored, found)
    ]
    assert others[0] == others[1]
    assert found.token_bytes < stored.token_bytes


def test_experts_whose_down_has_a_format_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    tiny_gguf.write(file, "qwen3_moe", type_of=tiny_gguf.by_grids)
    for entry in (entry for entry in examine(file).entries if entry.routed):
        assert entry.format == "iq2_xxs/iq3_s"
        # Codes of 3 and 4 bits, and 10 bytes of scales for 256.
        bits = (2 * 3 + 4) / 3 + 10 / 32
        assert entry.bytes == pytest.approx(entry.parameters * bits / 8, rel=1e-3)


def test_a_matrix_that_a_gguf_file_has_in_parts(tmp_path: Path) -> None:
    """Qwen3-Next's in_proj_qkvz, as files have it whose types differ."""
    file = tmp_path / "m.gguf"
    wide = {"linear_num_value_heads": 8}
    tiny_gguf.write(file, "qwen3_next", lambda n: mixed(n.replace("attn_gate", "attn_v")), **wide)
    found = examine(file)
    formats = {e.format for e in found.entries if e.name.endswith("in_proj_qkvz")}
    assert formats == {"q4_k/q6_k"}
    read = weight_bytes(meta_decoder(file).lower())
    assert found.token_bytes == pytest.approx(read, rel=0.02)


def test_layers_that_are_alike_are_one(checkpoint: Checkpoints) -> None:
    found = examine("deepseek-v3")
    runs = [(first, last) for first, last, _ in layers(found.entries) if first >= 0]
    assert runs == [(0, 2), (3, 60)]
    by_rule = examine("deepseek-v3", rules="2-gpus")
    runs = [(first, last) for first, last, _ in layers(by_rule.entries) if first >= 0]
    assert runs == [(0, 2), (3, 30), (31, 60)]
    assert {entry.device for entry in by_rule.entries if entry.routed} == {"cpu"}
    assert by_rule.entries[-1].device == "cuda:1"


def test_layers_are_dealt_over_gpus_by_size() -> None:
    found = examine("deepseek-v3", device="cuda:0,cuda:1,cuda:2", experts="gpu")
    sizes = [nbytes for _, nbytes in found.devices.values()]
    assert list(found.devices) == ["cuda:0", "cuda:1", "cuda:2"]
    assert max(sizes) - min(sizes) < 2 * max(entry.bytes for entry in found.entries)
    with pytest.raises(PykernelsError, match="1 layer for 2 GPUs. Give 1 at most"):
        deal([5], [9, 9])


def test_formats_of_headers_of_a_config_and_of_rules(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint("deepseek_v3", fp8=True).path
    shutil.copy(path / "config.json", tmp_path)
    stored, told = (
        {e.name: (e.format, e.bytes) for e in examine(p).entries} for p in (path, tmp_path)
    )
    assert stored == told
    assert stored["model.layers.1.mlp.experts"][0] == "fp8"
    assert stored["lm_head"][0] == stored["model.embed_tokens"][0] == "bf16"
    mixed = {e.name: e.format for e in examine(path, rules="int4").entries}
    assert mixed["model.layers.0.self_attn.q_b_proj"] == "int4"
    assert mixed["model.layers.0.self_attn.kv_b_proj"] == "fp8"


@pytest.mark.parametrize(("scheme", "fmt"), [("awq", "int4-zp-g128"), ("gptq", "int4-zp")])
def test_formats_of_a_config_with_zero_points(
    scheme: str, fmt: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint("deepseek_v3", compressed=scheme, shards=1, **FP8_SIZES).path
    shutil.copy(path / "config.json", tmp_path)
    stored, told = ({e.name: e.format for e in examine(p).entries} for p in (path, tmp_path))
    for name in ("mlp.experts", "mlp.shared_experts.up_proj", "self_attn.q_a_proj"):
        assert stored[f"model.layers.1.{name}"] == told[f"model.layers.1.{name}"] == fmt


def test_what_an_expert_cache_would_take(run: Run) -> None:
    """SMOE IV-D: eight of DeepSeek-V3's experts a layer are about 10 GB in four bits."""
    plain = examine("deepseek-v3", device="cuda:0")
    found = examine("deepseek-v3", device="cuda:0", slots=8)
    taken = found.devices["cuda:0"][1] - plain.devices["cuda:0"][1]
    assert round(taken / 2e9) == 10  # its known shape is in FP8
    assert found.devices["cpu"] == plain.devices["cpu"]
    assert (
        "8 slots, 3%"
        in run("inspect", "deepseek-v3", "--device", "cuda:0", "--expert-cache", "8").out
    )
    failed(run("inspect", "deepseek-v3", "--expert-cache", "8"), "with a GPU")
    failed(run("inspect", "deepseek-v3", "--device", "cuda:0", "--expert-cache", "256"), "1 to 255")


def test_what_experts_on_the_gpu_too_would_take(run: Run, tmp_path: Path) -> None:
    """Three matrices of 7,168 x 2,048 an expert in FP8, with a scale for each 128 x 128."""
    plain = examine("deepseek-v3", device="cuda:0")
    found = examine("deepseek-v3", device="cuda:0", gpu_experts=8)
    one = 3 * 7168 * 2048 * (1 + 4 / 128**2)
    taken = found.devices["cuda:0"][1] - plain.devices["cuda:0"][1]
    assert found.gpu_share is not None and taken == found.gpu_share.bytes
    assert taken == pytest.approx(8 * 58 * one, rel=0.01)
    assert found.devices["cpu"] == plain.devices["cpu"]
    assert found.gpu_share.cpu_token_bytes == pytest.approx(58 * 8 * one * (1 - 8 / 256), rel=0.01)
    assert found.token_bytes == pytest.approx(plain.token_bytes, rel=1e-6)

    # Of each layer the first expert has three quarters of the choices; few more fit.
    names = [entry.name.removesuffix(".experts") for entry in plain.entries if entry.routed]
    counts = {name: [745] + [1] * 255 for name in names}
    profile = Profile(model_type="deepseek_v3", tokens=1000, topk=8, counts=counts)
    write(profile, tmp_path / "profile.json")
    asked = ["--device", "cuda:0", "--gpu-experts", tmp_path / "profile.json"]
    shown = run("inspect", "deepseek-v3", *asked, "--gpu-gib", 24, "--json")
    gpu_share = json.loads(shown.out)["gpu_experts"]
    assert gpu_share["profiled"] and gpu_share["layers"] == 58
    assert gpu_share["share"] == pytest.approx(0.745, abs=2e-3)
    assert "58 layers are on the GPU too" in run("inspect", "deepseek-v3", *asked[:3], 1).out
    if not torch.cuda.is_available():
        failed(run("inspect", "deepseek-v3", *asked), "no GPU here. Add --gpu-gib")
    failed(run("inspect", "deepseek-v3", "--gpu-experts", 1), "--device cuda:0")
    failed(run("inspect", "deepseek-v3", *asked[:3], 256), "256 experts on the GPU. Give 255")


def test_the_table_and_its_json(run: Run) -> None:
    shown = run("inspect", "deepseek-v3", "--device", "cuda:0")
    assert shown.code == 0, shown.err
    assert "model.layers.3-60" in shown.out and "256 experts, top-8" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    found = json.loads(run("inspect", "--json").out)
    assert found["runs"] == "engine" and set(found["kv_cache_token_bytes"]) == {"bf16", "fp8"}
    assert sum(m["bytes"] for m in found["modules"]) == found["devices"]["cpu"]["bytes"]
    failed(run("inspect", "deepseek-v9"), "no known shape of that name")


def test_sizes_that_a_config_lacks_are_not_made_up(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "hidden_size": 2048}')
    failed(run("inspect", tmp_path / "config.json"), "config.json has no num_hidden_layers")


def test_layers_with_a_window_are_told(run: Run) -> None:
    """Gemma 4 26B: 25 of 30 layers see 1,024 tokens, with 8 heads of 256."""
    found = json.loads(run("inspect", "gemma4-26b", "--json").out)
    assert found["window"] == 1024
    assert found["window_token_bytes"] == 25 * 2 * 2 * 8 * 256
    shown = run("inspect", "gemma4-26b").out.splitlines()
    assert any("keep the last 1024 tokens alone" in line for line in shown)


def test_a_state_is_beside_keys_and_values(run: Run) -> None:
    """Qwen3-Next's 36 gated delta nets: three inputs of 8,192 channels, and 32 heads of 128 x 128;
    its other 12 layers have two heads of 256."""
    found = json.loads(run("inspect", "qwen3-next-80b", "--json").out)
    assert found["runs"] == "engine"
    assert found["state_bytes"] == 36 * 4 * (3 * 8192 + 32 * 128 * 128)
    assert found["kv_cache_token_bytes"]["bf16"] == 12 * 2 * 2 * 2 * 256
    total = found["routed_parameters"] + found["other_parameters"]
    assert total == pytest.approx(79.7e9, rel=0.005)
    assert "of states" in run("inspect", "qwen3-next-80b").out
