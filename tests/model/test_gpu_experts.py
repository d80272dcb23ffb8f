"""Which experts a GPU has beside those of the CPU, and what a profile says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import model
from model.llm import meta_decoder
from model.pinning import profile
from model.pinning.choose import Block, choose
from model.pinning.hybrid import gpu_experts_of
from model.pinning.profile import Profile
from pykernels.errors import PykernelsError
from runtime.devices.cuda.memory.weights import gpu_bytes
from runtime.planning.placement import Placement

from .conftest import Run, failed

BLOCKS = {f"layers.{i}.mlp": Block(4, 10, "cuda:0") for i in range(2)}


def test_which_experts_are_kept() -> None:
    assert choose(2, BLOCKS, {"cuda:0": 40}) == {name: [0, 1] for name in BLOCKS}
    assert choose("auto", BLOCKS, {"cuda:0": 39}) == {name: [0] for name in BLOCKS}
    assert choose("auto", BLOCKS, {"cuda:0": 999}) == {name: [0, 1, 2] for name in BLOCKS}
    counts = dict(zip(BLOCKS, ([9, 1, 8, 0], [2, 3, 0, 0]), strict=True))
    seen = Profile(model_type="tiny", tokens=9, topk=2, counts=counts)
    assert list(choose(seen, BLOCKS, {"cuda:0": 39}).values()) == [[0, 2], [1]]
    assert seen.coverage(0.5) == 22 / 23
    with pytest.raises(PykernelsError, match="need 0.0 GiB on cuda:0.* Give 1 at most, or auto"):
        choose(2, BLOCKS, {"cuda:0": 39})
    with pytest.raises(PykernelsError, match="4 of a layer's 4 experts on the GPU. Give 3 at mo"):
        choose(4, BLOCKS, {"cuda:0": 999})
    other = {**counts, "layers.2.mlp": [1, 2, 3, 4]}
    with pytest.raises(PykernelsError, match="is of 3 layers of a tiny"):
        choose(seen.model_copy(update={"counts": other}), BLOCKS, {"cuda:0": 39})


def test_which_experts_the_engine_has_on_a_gpu_besides() -> None:
    program = meta_decoder(model.EMBEDDED).lower()
    layers = range(1, 6)  # 32 experts each
    one = next(spec for spec in program.weights.values() if spec.shape[0] == 32 and spec.moe)
    each = gpu_bytes(one.some([0]))

    def beside(asked: Any, free_bytes: int) -> dict[int, tuple[int, ...]]:
        placement = Placement("cuda:0", by_layer={5: "cuda:1"} if two else {})
        return gpu_experts_of(asked, program, placement, {"cuda:0": free_bytes, "cuda:1": each})

    two = False
    assert beside(2, free_bytes=10 * each) == dict.fromkeys(layers, (0, 1))
    assert beside("auto", free_bytes=15 * each - 1) == dict.fromkeys(layers, (0, 1))
    for key in ("mlp", "mlp.experts"):  # of a block, or of the experts alone
        counts = {f"model.layers.{i}.{key}": [*[0] * 31, i] for i in layers}
        profile = Profile(model_type="deepseek_v3", tokens=5, topk=1, counts=counts)
        assert beside(profile, free_bytes=3 * each) == dict.fromkeys((3, 4, 5), (31,))
    with pytest.raises(PykernelsError, match="32 of a layer's 32 experts.* Give 31 at most"):
        beside(32, free_bytes=1 << 40)
    with pytest.raises(PykernelsError, match="Give 1 at most, or auto"):
        beside(2, free_bytes=10 * each - 1)
    with pytest.raises(PykernelsError, match="is of 4 layers"):
        counts.popitem()
        beside(profile.model_copy(update={"counts": counts}), free_bytes=1 << 40)
    with pytest.warns(UserWarning, match="cuda:0, cuda:1: no room for experts"):
        assert beside("auto", free_bytes=each - 1) == {}
    two = True  # the last layer on another GPU, which has room for one of its experts
    assert beside("auto", free_bytes=8 * each) == {**dict.fromkeys(range(1, 5), (0, 1)), 5: (0,)}
    with pytest.raises(PykernelsError, match="gpu_experts=2 without a GPU"):
        model.load_engine(model.EMBEDDED, gpu_experts=2)


def test_a_profile_from_text(run: Run, writer: Path, tmp_path: Path) -> None:
    text, out, plot = (tmp_path / name for name in ("text.txt", "profile.json", "profile.png"))
    text.write_text("def f(x):\n    return x\n" * 8)
    result = run(
        "profile",
        "experts",
        text,
        "--model",
        writer,
        "--out",
        out,
        "--plot",
        plot,
        "--length",
        50,
    )
    assert result.code == 0, result.err
    found = profile.read(out)
    assert {sum(row) for row in found.rows} == {found.tokens * found.topk}
    assert json.loads(out.read_text())["counts"].keys() == found.counts.keys()
    assert plot.stat().st_size > 1000
    assert "the most used half takes" in result.out
    failed(run("generate", "a", "--model", writer, "--gpu-experts", out), "without a GPU")
    out.write_text('{"model_type": "x"}')
    with pytest.raises(PykernelsError, match="json is no profile of experts: tokens: Field"):
        profile.read(out)
