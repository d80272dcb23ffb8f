"""Checkpoints of compressed-tensors: int4 words and FP8 of an output, a tensor or a block."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import model
from model.checkpoint.compressed_tensors import unpack_int4
from model.checkpoint.config import read_config
from model.checkpoint.load import expert_weight, stored_weight
from model.checkpoint.names import Names
from model.checkpoint.plan import Dense, Experts, make_plan
from model.checkpoint.safetensors import Checkpoint, Part
from model.modules.inject import inject
from model.modules.moe import routed_experts
from model.pretrained import build_meta
from model.rules import default_rules
from pykernels.errors import PykernelsError
from pykernels.quant import get_format

from . import tiny_compressed
from .tiny import FP8_SIZES, Tiny
from .tiny_compressed import FP8, INT4, INT8

Checkpoints = Callable[..., Tiny]
SCHEMES = {**{name: name for name in INT4}, "int8-channel": "int8-channel",
           "int8-tensor": "int8-channel", "channel": "fp8-channel", "tensor": "fp8-channel",
           "block": "fp8"}  # fmt: skip
"""What is stored, and the weight format that it is read into."""
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DENSE = "model.layers.0.mlp.gate_proj.weight"


def options(scheme: str) -> dict[str, Any]:
    return {"compressed": scheme, "shards": 1, **FP8_SIZES}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_value_is_as_stored(checkpoint: Checkpoints, scheme: str) -> None:
    """Without rules everything is dequantized into transformers' own modules, exactly."""
    made = checkpoint("deepseek_v3", **options(scheme))
    quantized = [key for key in made.stored if key.endswith("_scale") and "input" not in key]
    assert f"{EXPERT}_scale" in quantized and any(".experts." not in key for key in quantized)
    lm = model.from_pretrained(made.path, rules=[], dtype="float32")
    got = lm.state_dict()
    for name, tensor in made.reference.state_dict().items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_keep_their_codes(checkpoint: Checkpoints, scheme: str) -> None:
    """Nothing is quantized again: codes and scales of the file are those that are packed."""
    made = checkpoint("deepseek_v3", **options(scheme))
    config = read_config(made.path)
    with Checkpoint(made.path) as files:
        lm = build_meta(config, torch.bfloat16)
        inject(lm, default_rules(config.model_type), "auto")
        plan = make_plan(lm, files, torch.bfloat16)
        experts = [item for item in plan.items if isinstance(item, Experts)]
        assert len(experts) == 2 and {item.stored for item in experts} == {SCHEMES[scheme]}
        fmt = get_format(SCHEMES[scheme])
        for projection in range(3):
            source = experts[0].experts[3][projection]
            weight = expert_weight(files, source, fmt.name)
            fmt.check(weight, *source.shape)
            key = f"model.layers.1.mlp.experts.3.{('gate', 'up', 'down')[projection]}_proj.weight"
            value = tiny_compressed.value_of(made.stored, key)
            assert value is not None and torch.equal(fmt.dequantize(weight), value)
            if scheme in INT4:
                assert weight.scale is not None
                assert torch.equal(weight.scale, made.stored[f"{key}_scale"])
        dense = next(i for i in plan.items if isinstance(i, Dense) and i.name == DENSE)
        assert dense.source.fmt == SCHEMES[scheme]
        assert stored_weight(files, dense.source).data.shape == dense.source.shape


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits(checkpoint: Checkpoints, ids: torch.Tensor, scheme: str) -> None:
    made = checkpoint("deepseek_v3", **options(scheme))
    lm = model.from_pretrained(made.path, dtype="float32")
    assert {routed.weights.fmt.name for routed in routed_experts(lm)} == {SCHEMES[scheme]}
    with torch.no_grad():
        got, want = lm(ids).logits, made.reference(ids).logits
    # As in test_loading: bf16 inputs and h inside the experts are all that differs.
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 5e-3


def test_words_hold_eight_values_lowest_first() -> None:
    words = torch.tensor([[0x76543210, -1], [0x0FEDCBA9 - (1 << 31) + (1 << 31), 0x8]])
    seen = unpack_int4(words.to(torch.int32), 12)
    assert seen.tolist() == [
        [-8, -7, -6, -5, -4, -3, -2, -1, 7, 7, 7, 7],
        [1, 2, 3, 4, 5, 6, 7, -8, 0, -8, -8, -8],
    ]


def test_the_last_word_of_a_row_may_be_part_of_one(tmp_path: Path) -> None:
    """As many words as 12 values take are two; a row of the next one is no row of these."""
    stored = {"a_packed": torch.zeros(4, 2, dtype=torch.int32), "a_scale": torch.ones(4, 1),
              "a_shape": torch.tensor([4, 12])}  # fmt: skip
    save_file(stored, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        names = Names.__new__(Names)
        names.checkpoint, names.stored, names.missing = checkpoint, {n: n for n in stored}, []
        names.left = set(stored)
        found = names.take("a", (4, 12))
    assert found is not None and (found.shape, found.fmt) == ((4, 12), "int4-channel")
    assert not names.left


WEIGHTS = [
    ("asymmetric", {"symmetric": False}, "symmetric False"),
    ("permuted inputs", {"actorder": "group"}, "actorder 'group'"),
    ("another group size", {"group_size": 64}, "group_size 64"),
    ("a scale for a matrix", {"strategy": "tensor"}, "strategy 'tensor'"),
    ("8 bits", {"num_bits": 8}, "num_bits 8"),
    ("floats in words", {"type": "float"}, "type 'float'"),
]
TOP = [
    ("another layout", {"format": "marlin-24"}, "format 'marlin-24'"),
    ("NVFP4", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    (
        "not calibrated yet",
        {"quantization_status": "initialized"},
        "quantization_status 'initialized'",
    ),
    ("a quantized KV cache", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ("rotated weights", {"transform_config": {"R1": 1}}, "transform_config"),
    ("pruned weights", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
    ("no groups", {"config_groups": {}}, "config_groups {}"),
    ("a group that is none", {"config_groups": {"group_0": 4}}, "a group 4"),
    ("weights that are none", {"config_groups": {"g": {"weights": 4}}}, "weights 4"),
    ("sparsity that is none", {"sparsity_config": "dense"}, "sparsity_config 'dense'"),
]


def refused(folder: Path, said: str) -> None:
    with pytest.raises(PykernelsError, match=said) as error:
        model.from_pretrained(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("scheme", "weights", "top", "said"),
    [
        *(pytest.param("int4", w, {}, said, id=why) for why, w, said in WEIGHTS),
        *(pytest.param("int4", {}, t, said, id=why) for why, t, said in TOP),
        pytest.param(
            "block", {"block_structure": [64, 64]}, {}, r"block_structure \[64, 64\]", id="blocks"
        ),
        pytest.param("int4", {"group_size": None}, {}, "group_size None", id="no group size"),
        *(
            pytest.param("int8-channel", changed, {}, said, id=f"int8 {said}")
            for changed, said in (
                ({"symmetric": False}, "symmetric False"),
                ({"strategy": "group"}, "strategy 'group'"),
                ({"strategy": None}, "strategy None"),
                ({"num_bits": 4}, "num_bits 4"),
                ({"type": "float"}, "type 'float'"),
                ({"actorder": "group"}, "actorder 'group'"),
            )
        ),
        pytest.param(
            "int4-channel", {"actorder": "group"}, {}, "actorder 'group'", id="int4 permuted"
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, scheme: str, weights: dict[str, Any], top: dict[str, Any], said: str
) -> None:
    config = copy.deepcopy(tiny_compressed.config(scheme))
    config["config_groups"]["group_0"]["weights"].update(weights)
    config.update(top)
    whole = {"model_type": "deepseek_v3", "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    refused(tmp_path, f"is quantized by compressed-tensors with {said}.*, which cannot be read")


@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_orders_that_leave_the_inputs_in_place_are_read(tmp_path: Path, actorder: Any) -> None:
    config = tiny_compressed.config("int4")
    config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    config["sparsity_config"] = {"format": "dense"}
    whole = {"model_type": "deepseek_v3", "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_config(tmp_path).model_type == "deepseek_v3"


def test_codes_that_the_config_calls_frozen_are_read(
    own: Callable[..., Path], ids: torch.Tensor
) -> None:
    """Frozen is calibrated: compressed-tensors itself saved its first compressed checkpoints under
    that status, and converters of FP8 to int8 write it to this day. What is stored is told by the
    tensors; transformers and vLLM go by them as well."""
    folder = own("deepseek_v3", **options("int4"))
    want = model.from_pretrained(folder)(ids).logits
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quantization_status"] = "frozen"
    (folder / "config.json").write_text(json.dumps(config))
    lm = model.from_pretrained(folder)
    assert {routed.weights.fmt.name for routed in routed_experts(lm)} == {"int4"}
    assert torch.equal(lm(ids).logits, want)


def fuse(tensors: dict[str, torch.Tensor], *scale: int) -> None:
    """Layer 1's experts as one tensor of codes each, with scales of that shape."""
    block = "model.layers.1.mlp.experts"
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        experts = []
        while (at := f"{block}.{len(experts)}.{parts[0]}.weight") in tensors:
            del tensors[f"{at}_scale"]
            codes = [tensors.pop(f"{block}.{len(experts)}.{part}.weight") for part in parts]
            for part in parts[1:]:
                del tensors[f"{block}.{len(experts)}.{part}.weight_scale"]
            experts.append(torch.cat(codes))
        tensors[f"{block}.{name}"] = torch.stack(experts)
        tensors[f"{block}.{name}_scale"] = torch.full(scale, 0.01)


NORM = "model.norm.weight"
TENSORS: list[tuple[str, str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    *(
        (
            f"fused int8 with scales {list(scale)}",
            "int8-channel",
            lambda t, scale=scale: fuse(t, *scale),  # type: ignore[misc]
            r"experts\.gate_up_proj is I8 \[\d+, 256, 256\], its codes are read as matrices",
        )
        for scale in ((1,), (4, 1), (4, 256, 1))
    ),
    (
        "an int8 vector",
        "int8-channel",
        lambda t: t.update({NORM: t[NORM].to(torch.int8), f"{NORM}_scale": torch.ones(1)}),
        rf"{NORM} is I8 \[256\], its codes are read as matrices",
    ),
    (
        "an FP8 vector",
        "channel",
        lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn), f"{NORM}_scale": torch.ones(1)}),
        rf"{NORM} is F8_E4M3 \[256\], its codes are read as matrices",
    ),
    (
        "no int8 scales",
        "int8-channel",
        lambda t: t.pop(f"{EXPERT}_scale"),
        f"1 tensors are missing in .*: {EXPERT}_scale",
    ),
    (
        "int8 scales of groups",
        "int8-channel",
        lambda t: t.update({f"{EXPERT}_scale": torch.ones(128, 2)}),
        rf"{EXPERT}_scale is F32 \[128, 2\], {EXPERT} needs F32 \[128, 1\] or \[1\]",
    ),
    (
        "int8 scales that are no floats",
        "int8-channel",
        lambda t: t.update({f"{EXPERT}_scale": torch.ones(128, 1, dtype=torch.int32)}),
        rf"{EXPERT}_scale is I32 \[128, 1\], ",
    ),
    (
        "no scales",
        "int4",
        lambda t: t.pop(f"{EXPERT}_scale"),
        f"1 tensors are missing in .*: {EXPERT}_scale",
    ),
    (
        "no FP8 scales at all",
        "channel",
        lambda t: t.pop(f"{EXPERT}_scale"),
        f"1 tensors are missing in .*: {EXPERT}_scale_inv",
    ),
    (
        "words of another matrix",
        "int4",
        lambda t: t.update({f"{EXPERT}_packed": torch.zeros(128, 16, dtype=torch.int32)}),
        rf"{EXPERT}_packed is I32 \[128, 16\], the model's \[128, 256\] needs I32 \[128, 32\]",
    ),
    (
        "scales of other groups",
        "int4",
        lambda t: t.update({f"{EXPERT}_scale": torch.ones(128, 4).bfloat16()}),
        rf"{EXPERT}_scale is BF16 \[128, 4\], {EXPERT}_packed needs BF16 \[128, 1\] or"
        r" \[128, 2\] or \[128, 8\]",
    ),
    (
        "scales that neither bfloat16 nor float16 can hold",
        "int4",
        lambda t: t.update({f"{EXPERT}_scale": torch.ones(128, 8)}),
        rf"{EXPERT}_scale is F32 \[128, 8\], .* needs BF16",
    ),
    (
        "weights that were calibrated and not compressed",
        "channel",
        lambda t: t.update({EXPERT: torch.ones(128, 256).bfloat16()}),
        f"{EXPERT} is BF16 and has a scale: it was calibrated but never made codes of",
    ),
    *(
        (
            f"words that say they are {told}",
            "int4",
            lambda t, told=told: t.update({f"{EXPERT}_shape": torch.tensor(told)}),  # type: ignore[misc]
            rf"{EXPERT}_shape is {said}, {EXPERT}_packed is for the model's \[128, 256\]",
        )
        for told, said in (
            ([7, 9], r"\[7, 9\]"),
            ([128, 255], r"\[128, 255\]"),
            ([128, 256, 1], r"I64 \[3\]"),
        )
    ),
    (
        "one expert in other groups than the rest",
        "int4",
        lambda t: t.update({f"{EXPERT}_scale": torch.ones(128, 2).bfloat16()}),
        "are partly int4 and partly int4-g128",
    ),
    (
        "zero points that the config does not tell of",
        "int4",
        lambda t: t.update({f"{EXPERT}_zero_point": torch.zeros(1)}),
        f"no place for: {EXPERT}_zero_point",
    ),
]


@pytest.mark.parametrize(("why", "scheme", "change", "said"), TENSORS, ids=[t[0] for t in TENSORS])
def test_wrong_tensors_are_told_before_one_is_read(
    own: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    scheme: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
) -> None:
    folder = own("deepseek_v3", **options(scheme))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    read = Checkpoint.read

    def only_shapes(files: Checkpoint, part: Part) -> torch.Tensor:
        assert part.name.endswith("_shape"), "something was loaded"
        return read(files, part)

    monkeypatch.setattr(Checkpoint, "read", only_shapes)
    refused(folder, said)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_int4_scales_of_outputs_are_any_floats(
    own: Callable[..., Path], dtype: torch.dtype
) -> None:
    folder = own("deepseek_v3", **options("int4-channel"))
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[f"{EXPERT}_scale"].to(dtype) * 1.001
    tensors[f"{EXPERT}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    lm = model.from_pretrained(folder)
    routed = next(iter(routed_experts(lm)))
    _, up, _ = routed.weights.unpack(3)
    assert routed.weights.fmt.name == "int4-channel" and torch.equal(up.scale, scale.float())


@pytest.mark.parametrize("scheme", ["int4", "int4-g128"])
def test_int4_with_float16_scales_is_the_same_numbers(
    own: Callable[..., Path], scheme: str
) -> None:
    """As of models in float16, and all of compressed-tensors' first ones: none of their scales is
    rounded to bfloat16's 8 bits."""
    folder = own("deepseek_v3", **{**options(scheme), "moe_intermediate_size": 256})
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = (tensors[name].float() * 1.001).half()
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="float16 scales, which are kept exactly as q8_0"):
        lm = model.from_pretrained(folder, dtype="float32")
    want = tiny_compressed.value_of(tensors, DENSE)
    assert want is not None and torch.equal(lm.get_parameter(DENSE), want)
    routed = next(iter(routed_experts(lm)))
    assert routed.weights.fmt.name == "q8_0"
    for e in range(8):
        for proj, weight in zip(("gate", "up", "down"), routed.weights.unpack(e), strict=True):
            want = tiny_compressed.value_of(
                tensors, f"model.layers.1.mlp.experts.{e}.{proj}_proj.weight"
            )
            assert want is not None and torch.equal(routed.weights.fmt.dequantize(weight), want)


def test_float16_scales_that_are_not_finite_are_refused(own: Callable[..., Path]) -> None:
    folder = own("deepseek_v3", **options("int4"))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = tensors[name].half()
    tensors[f"{EXPERT}_scale"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="q8_0"):
        refused(folder, f"{EXPERT}_packed has scales that are NaN or infinite")


def test_every_scheme_is_in_the_table() -> None:
    assert set(SCHEMES) == {*INT4, *INT8, *FP8}
