"""The packed cache: the same model, mapped; interrupted, damaged or of another layout by name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.checkpoint.config import read_config
from model.checkpoint.packed import write
from model.checkpoint.packed.verify import verify
from model.llm import meta_decoder
from model.opened import open_weights
from model.rules import default_rules
from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, Weight, get_format
from pykernels.quant.matrix import pack_alone
from pykernels.shapes import MoEShape
from runtime.devices.cpu.weights import CPU_DEVICE, rows
from runtime.program.sizes import StepSizes

from ..checks import Checkpoints
from ..test_engine import logits
from .gguf import tiny_gguf

LINEAR = "model.modules.linear.Linear"
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3 fp8": {"fp8": True},  # latent heads, a router's bias, ragged blocks
    "qwen2_moe": {},  # biases, a shared expert with a gate
    "mixtral": {"tie_word_embeddings": True},
    "qwen3_next": {},  # delta nets, rows in another order, norms without their 1
    "gpt_oss": {},  # biases of experts and of the router, sinks
}


@pytest.fixture(scope="module")
def cache(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny deepseek_v3."""
    folder = tmp_path_factory.mktemp("packed") / "cache"
    model.convert(checkpoint("deepseek_v3").path, folder, threads=1)
    return folder


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cache, tmp_path / "cache"))


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("case", CASES)
def test_a_mapped_model_is_the_packed_one(
    case: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    made, target = checkpoint(case.split()[0], **CASES[case]), tmp_path / "cache"
    model.convert(made.path, target, threads=1)
    ids = torch.arange(2, 40)
    packed = logits_of(made.path)
    seen: list[tuple[int, int]] = []
    with model.load_engine(
        target, threads=1, max_model_len=64, progress=lambda *at: seen.append(at)
    ) as llm:
        assert torch.equal(logits(llm, ids), packed)
        table = llm.runner.weights.get(llm.runner.model.table, CPU_DEVICE, rows)
        assert in_a_file(table, target)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    assert seen[-1] == (size, size) and verify(target) == size


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "qwen3_5_moe_text"])
def test_a_gguf_file_becomes_a_cache(family: str, tmp_path: Path) -> None:
    """Of mixed formats: of experts, in a qkv, of the embedding; MLA's halves; value heads of delta
    nets in the file's order."""
    file, target = tmp_path / "model.gguf", tmp_path / "cache"
    tiny_gguf.write(file, family, num_hidden_layers=2)
    rows = model.convert(file, target, threads=1)
    assert {"q4_k", "q4_k/q6_k"} <= set(rows[-1].formats)
    assert torch.equal(logits_of(target), logits_of(file))
    assert {"converting.json", "model.gguf"}.isdisjoint(os.listdir(target))
    assert model.load_tokenizer(target).encode("ab") == model.load_tokenizer(file).encode("ab")
    assert model.convert(file, target, threads=1) == rows


def test_a_cache_keeps_to_its_rules(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, int8, int4 = checkpoint("qwen3_moe").path, tmp_path / "int8", tmp_path / "int4"
    match = {"class": "torch.nn.Linear", "name": "self_attn"}
    rules = [{"match": match, "replace": {"class": LINEAR, "kwargs": {"format": "int8"}}}]
    rules += [rule.model_dump(by_alias=True) for rule in default_rules("qwen3_moe")]
    rows = model.convert(source, int8, rules=rules, threads=1)
    assert 0.001 < rows[-1].errors["attention"] < 0.02
    assert torch.equal(logits_of(int8), logits_of(source, rules=rules))
    model.convert(source, int4, "int4", "int4", rules, threads=1)  # the last word
    assert "int4 1 x" not in str(meta_decoder(int8).lower(StepSizes(4, 4, 4, 1, 1)))
    assert "int4" in str(meta_decoder(int4).lower(StepSizes(4, 4, 4, 1, 1)))
    with pytest.raises(PykernelsError, match="q_proj.weight in int4, a rule wants int8"):
        model.load_engine(int4, rules=rules, threads=1)
    with pytest.raises(PykernelsError, match="experts of model.layers.0.mlp have no kernel"):
        model.load_engine(int4, rules=rules[:1], threads=1)


def logits_of(path: Path, **settings: Any) -> torch.Tensor:
    with model.load_engine(path, threads=1, max_model_len=64, **settings) as llm:
        return logits(llm, torch.arange(2, 40))


def in_a_file(tensor: torch.Tensor, folder: Path) -> bool:
    """Whether its memory is a shared mapping of a file of the folder that cannot be written."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(at, 16) for at in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split()[1] == "r--s" and str(folder) in line
    return False


def test_what_conversion_changes_is_told_layer_by_layer(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source, target = checkpoint("deepseek_v3").path, tmp_path / "cache"
    rows = model.convert(source, target, experts="int4", linears="int8", threads=1)
    ends, dense, moe, _ = rows
    assert [row.name for row in rows][:2] == ["ends", "layer-00000"]
    assert set(ends.errors) == {"head"} and set(dense.errors) == {"attention", "mlp"}
    assert set(moe.errors) == {"attention", "mlp", "experts"}
    assert 0.02 < moe.errors["experts"] < 0.2 and 0.001 < moe.errors["attention"] < 0.02
    assert max(moe.formats, key=lambda fmt: moe.formats[fmt]) in ("int4", "bf16")
    assert {"int4", "int8", "bf16"} == set(moe.formats)  # single heads and the router stay
    again = model.convert(source, target, experts="int4", linears="int8", threads=1)
    assert again == rows
    program = str(meta_decoder(target).lower(StepSizes(4, 4, 4, 1, 1)))
    assert program.count("int4 8 x [32, 64]") == 2 and "int8 1 x [96, 64]" in program


@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_next"])
def test_what_stands_in_the_place_of_attention_is_counted_as_it(
    family: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    layers = {"layer_types": ["conv", "conv"], "num_hidden_layers": 2}
    config: Any = layers if family == "lfm2_moe" else {}
    source, target = checkpoint(family, **config).path, tmp_path / "cache"
    _, first, *_ = model.convert(source, target, linears="int8", threads=1)
    assert set(first.errors) == {"attention", "mlp"}


class Killed(BaseException):
    """What no handler expects."""


@pytest.mark.parametrize("point", [0, 1, 3, 7, 10, 12])
def test_a_killed_conversion_goes_on(
    point: int, checkpoint: Checkpoints, cache: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """At a call of the system that writes, fsyncs or renames."""
    source, target = checkpoint("deepseek_v3").path, tmp_path / "cache"
    left = [point]

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*arguments)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killing(os.fsync))
        patch.setattr(Path, "rename", killing(Path.rename))
        with pytest.raises(Killed):
            model.convert(source, target, threads=1)
    whole = weights(cache)
    assert all(whole[name] == data for name, data in weights(target).items())
    if (target / "converting.json").exists():
        with pytest.raises(PykernelsError, match="interrupted.*convert again"):
            model.load_engine(target)
    model.convert(source, target, threads=1)
    assert weights(target) == whole
    assert {file.name for file in target.iterdir()} == {file.name for file in cache.iterdir()}


def test_of_two_conversions_into_one_folder_one_is_told(
    checkpoint: Checkpoints, cache: Path, tmp_path: Path
) -> None:
    source, target = checkpoint("deepseek_v3").path, tmp_path / "cache"
    told: list[str] = []

    def second(done: int, total: int) -> None:
        if not told:
            with pytest.raises(PykernelsError) as error:
                model.convert(source, target, threads=1)
            told.append(str(error.value))

    model.convert(source, target, threads=1, progress=second)
    assert "another process is writing" in told[0]
    assert weights(target) == weights(cache)
    assert {file.name for file in target.iterdir()} == {file.name for file in cache.iterdir()}


def test_a_full_disk_is_an_error_and_leaves_no_part(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = checkpoint("deepseek_v3").path, tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1 << 18))
        with pytest.raises(PykernelsError, match=r"needs 0.\d MiB more in .*, 0.2 MiB are free"):
            model.convert(source, target, threads=1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(write.os, "fsync", full)
        with pytest.raises(PykernelsError, match="No space left on device. Free some space"):
            model.convert(source, target, threads=1)
    assert not list(target.glob("*.part"))
    model.convert(source, target, threads=1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


LAYER = "layer-00001.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: cut(f / LAYER), f"{LAYER} has .* bytes, not .*Convert"),
    "lost": (lambda f: (f / LAYER).unlink(), f"{LAYER} is missing"),
    "layout": (lambda f: edit(f / "packed.json", layout=99), "packed layout 99, this version"),
    "config": (lambda f: edit(f / "config.json", vocab_size=128), "another shape than its config"),
    "family": (lambda f: edit(f / "config.json", n_shared_experts=2), "another shape"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_cache_is_refused(case: str, own_cache: Path) -> None:
    spoil, message = DAMAGE[case]
    spoil(own_cache)
    with pytest.raises(PykernelsError, match=message):
        model.load_engine(own_cache, threads=1)


def test_a_wrong_checksum_is_found_and_mended(
    own_cache: Path, cache: Path, checkpoint: Checkpoints
) -> None:
    flip(own_cache / LAYER)
    with pytest.raises(PykernelsError, match=f"{LAYER} is damaged: .*Delete that file"):
        verify(own_cache)
    for mend in (Path.unlink, cut):  # what the disk has lost is written again by itself
        mend(own_cache / LAYER)
        model.convert(checkpoint("deepseek_v3").path, own_cache, threads=1)
        assert weights(own_cache) == weights(cache)


def test_a_folder_of_something_else_is_left_alone(
    own_cache: Path, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("deepseek_v3").path
    with pytest.raises(PykernelsError, match="cache with another --format"):
        model.convert(source, own_cache, experts="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(PykernelsError, match="is there already"):
        model.convert(source, tmp_path / "full")
    with pytest.raises(PykernelsError, match="packed cache, which the engine alone reads"):
        model.from_pretrained(own_cache)


def test_a_cache_has_a_program(cache: Path, checkpoint: Checkpoints) -> None:
    programs = [
        str(meta_decoder(folder).lower(StepSizes(4, 4, 4, 1, 1)))
        for folder in (cache, checkpoint("deepseek_v3").path)
    ]
    assert programs[0] == programs[1]


def test_a_cache_gives_back_what_was_stored(cache: Path, checkpoint: Checkpoints) -> None:
    """Unpacked: what a GPU's layouts are made from."""
    decoders = []
    for folder in (cache, checkpoint("deepseek_v3").path):
        with open_weights(folder, read_config(folder)) as weights:
            decoders.append(weights.readable(pack_alone, lambda *_: None))
    cached, stored = (decoder.store for decoder in decoders)
    specs = decoders[0].lower().weights.values()
    assert {spec.kind for spec in specs} == {"tensor", "matrix", "heads", "experts"}
    for spec in specs:
        if spec.kind == "tensor":
            assert torch.equal(cached.tensor(spec), stored.tensor(spec))
            continue
        if spec.kind == "experts":
            experts = zip(cached.experts(spec), stored.experts(spec), strict=True)
            pairs = [pair for a, b in experts for pair in zip(a[0], b[0], strict=True)]
        else:
            pairs = list(zip(cached.matrices(spec), stored.matrices(spec), strict=True))
        assert pairs and all(torch.equal(a.data, b.data) for a, b in pairs)


# Of a matrix [33, 512] whose codes and scales count up, and of two experts in bfloat16. Where one
# of them changes, add 1 to `model.checkpoint.packed.manifest.LAYOUT`.
DIGESTS = {
    "bf16": "78f88da85f79ee77",
    "fp8": "d044ab4319d9d694",
    "fp8-channel": "112c431d92189eb9",
    "int8": "82f87bc84b1631bd",
    "int8-channel": "01a5ed475919e58a",
    "int4": "fa4fc3cbc8de0307",
    "int4-g128": "a2b2a3eb00f2e423",
    "int4-channel": "cfd13972ffdd205e",
    "mxfp4": "f8b21e90ab6288ad",
    "q4_k": "2858ca9efe172d51",
    "q5_k": "d94fb81988ecc442",
    "q6_k": "283cde16c116a917",
    "q2_k": "60ad28aea151676d",
    "q8_0": "2f5b82f9c79bb146",
}
EXPERTS = "c864e936ef8f7c1d"


def counted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    bits = torch.arange(torch.Size(shape).numel() * dtype.itemsize) % 113  # no NaN in any dtype
    return bits.to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("name", DIGESTS)
def test_packed_bytes_are_those_of_their_layout_version(name: str) -> None:
    N, K = 33, 512
    fmt = get_format(name)
    scales = fmt.scale_shape(N, K)
    weight = Weight(
        counted(fmt.data_shape(N, K), fmt.dtype),
        None if scales is None else counted(scales, fmt.scale_dtypes[0]),
    )
    blocks = torch.zeros(2, fmt.block_bytes(K), dtype=torch.uint8)
    packed_scales = torch.zeros(2, fmt.scale_bytes(K), dtype=torch.uint8)
    fmt.pack(weight, blocks, packed_scales)
    found = hashlib.sha256(blocks.numpy().tobytes() + packed_scales.numpy().tobytes())
    assert found.hexdigest()[:16] == DIGESTS[name]


def test_experts_lie_as_in_their_layout_version() -> None:
    arena = torch.zeros(0)

    def memory(nbytes: int) -> torch.Tensor:
        nonlocal arena
        arena = torch.zeros(nbytes, dtype=torch.uint8)
        return arena

    experts = PackedExperts(MoEShape(E=2, H=64, I=32, topk=1), get_format("bf16"), memory)
    for e in range(2):
        gate, up, down = (counted(s, torch.bfloat16) + e for s in ((32, 64), (32, 64), (64, 32)))
        experts.pack(e, Weight(gate), Weight(up), Weight(down))
    assert hashlib.sha256(arena.numpy().tobytes()).hexdigest()[:16] == EXPERTS
