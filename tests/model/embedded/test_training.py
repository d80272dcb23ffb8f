"""The script that made the checkpoint: its parts, and a whole run in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model.embedded import PATH
from model.embedded.architecture import SIZES, build_model
from model.embedded.balance import LoadCounter, router_bias, routers
from model.embedded.corpus import default_stdlib, find_sources, part_of, split
from model.embedded.evaluate import evaluate_checkpoint, total_bits
from model.embedded.export import checkpoint_tensors, export, load_dequantized
from model.embedded.fp8 import dequantize_blocks, fake_quantize, quantize_blocks
from model.embedded.references import xz_bits_per_byte
from model.embedded.tokenizer import encode_files, load_tokenizer
from model.embedded.train import Run, TrainSettings


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (2, 130, 300)])
def test_fp8_blocks_keep_each_weight_within_e4m3s_step(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    codes, scale = quantize_blocks(weight)
    rows, columns = shape[-2:]
    assert scale.shape == (*shape[:-2], -(-rows // 128), -(-columns // 128))
    back = dequantize_blocks(codes, scale)
    # Normals: half of 2^-3 relative; subnormals: half of 2^-9 scales.
    bound = torch.maximum(weight.abs() / 16, torch.full_like(weight, float(scale.max()) * 2**-10))
    assert ((back - weight).abs() <= bound * 1.0001).all()
    assert torch.equal(fake_quantize(back), back), "what FP8 holds must survive a second rounding"


def test_router_biases_move_against_the_load_error() -> None:
    torch.manual_seed(0)
    model = build_model(SIZES["tiny"], torch.float32).eval()
    counter = LoadCounter(model)
    counter.mask = torch.tensor([True] * 20 + [False] * 4)
    with torch.no_grad():
        model(input_ids=torch.randint(2, 512, (1, 24)), use_cache=False)
    loads = {layer: load.clone() for layer, load in counter.loads.items()}
    assert set(loads) == set(routers(model)) == {1, 2}
    assert all(load.sum() == 20 * 3 for load in loads.values()), "padding must not count"
    counter.update_biases(0.25)
    for layer, router in routers(model).items():
        wanted = 0.25 * torch.sign(loads[layer].mean() - loads[layer])
        assert torch.equal(router_bias(router), wanted)
        assert counter.loads[layer].sum() == 0


def test_export_and_reload_round_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(SIZES["tiny"], torch.float32)
    for router in routers(model).values():
        router_bias(router).uniform_(-1, 1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    export(state, SIZES["tiny"], tmp_path)
    stored = checkpoint_tensors(state)
    reloaded = load_dequantized(tmp_path).state_dict()
    assert set(reloaded) == set(state)
    for name, value in reloaded.items():
        if name.endswith("gate_up_proj"):
            halves = state[name].unflatten(1, (2, -1))  # [E, 2, I, H]: gate and up apart
            assert torch.equal(value, fake_quantize(halves).flatten(1, 2)), name
        elif name in stored and name + "_scale_inv" not in stored:
            keep = torch.float32 if "bias" in name else torch.bfloat16
            assert torch.equal(value, state[name].to(keep).float()), name
        else:
            assert torch.equal(value, fake_quantize(state[name])), name


def test_the_whole_script_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library"
    library.mkdir()
    texts = [s.text[:2500] for s in find_sources(default_stdlib() / "json")]
    counts = {"train": 0, "validation": 0, "heldout": 0}
    for number in range(2000):
        part = part_of(f"m{number}.py")
        if counts[part] < (12 if part == "train" else 1):
            counts[part] += 1
            (library / f"m{number}.py").write_text(texts[number % len(texts)] + f"# {number}\n")
    settings = TrainSettings(size="tiny", minutes=1.0, epochs=0.5, rows=4, length=64, evaluations=2)
    out = tmp_path / "out"
    monkeypatch.setattr(Run, "probe", lambda self: 0.1)  # seconds a step
    run = Run(settings, split(find_sources(library)), out)
    run.finish(run.train())
    log = json.loads((out / "training.json").read_text())
    assert log["curve"][-1]["validation"] < 0.8 * 8
    assert log["curve"][-1]["loss"] < log["curve"][0]["loss"]
    result = evaluate_checkpoint(out, library, "test")
    assert result["bits_per_byte_fp8"] == pytest.approx(log["bits_per_byte_bf16"], rel=0.02)


def test_the_shipped_model_beats_xz_on_held_out_files() -> None:
    names = ("dataclasses.py", "statistics.py")
    files = [s for s in find_sources(default_stdlib()) if s.path in names]
    assert [part_of(s.path) for s in files] == ["heldout", "heldout"]
    heads = [s.text[:1500] for s in files]
    nbytes = sum(len(head.encode()) for head in heads)
    bits = total_bits(load_dequantized(PATH), encode_files(load_tokenizer(PATH), heads))
    # Far below 0.5 would mean that the scored token leaks into its own prediction.
    assert 0.5 < bits / nbytes < 1.4
    pieces = [type(s)(s.path, head.encode()) for s, head in zip(files, heads, strict=True)]
    assert bits / nbytes < 0.6 * xz_bits_per_byte(pieces, [])["concatenated"]
