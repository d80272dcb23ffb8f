"""Weights by name: where they are placed, and that each is made once in a device's layout."""

from __future__ import annotations

import weakref

import pytest
import torch

from model import EMBEDDED
from model.llm import meta_decoder
from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.weights import unpack_from_gpu
from pykernels.quant import PackedMatrix, get_format
from pykernels.quant.experts import aligned_zeros
from pykernels.quant.split import SplitExperts
from pykernels.shapes import MoEShape
from runtime.devices.cpu.weights import packed
from runtime.devices.cuda.memory.weights import dense, gpu_bytes, gpu_format, matrix
from runtime.planning.placement import place
from runtime.program.sizes import StepSizes
from runtime.program.weights import WeightStore

CPU = torch.device("cpu")


def test_experts_go_to_a_gpu_if_all_fit() -> None:
    program = meta_decoder(EMBEDDED).lower(StepSizes(8, 8, 8, 1, 1))
    total = sum(gpu_bytes(spec) for spec in program.weights.values())
    whole = place(program, "auto", {"cuda:0": total}, gpu_bytes)
    split = place(program, "auto", {"cuda:0": total - 1}, gpu_bytes)
    assert whole == place(program, "gpu", {"cuda:0": 0}, gpu_bytes)
    assert split == place(program, "cpu", {"cuda:0": total}, gpu_bytes)
    on_cpu = {name for name, devices in split.weights(program).items() if "cpu" in devices}
    routed = {node.weights["experts"] for node in program.nodes if node.role == "routed"}
    assert on_cpu == routed and not any("cpu" in d for d in whole.weights(program).values())
    sizes = [sum(gpu_bytes(program.weights[name]) for name in on_cpu)]
    sizes += [split.nbytes(program, "cuda:0", gpu_bytes)]
    assert sum(sizes) == total
    others = [node for node in split.place(program).nodes if node.role != "routed"]
    assert {node.device for node in others} == {"cuda:0"}
    with pytest.raises(PykernelsError, match="experts on 'some'. Give auto, cpu, gpu"):
        place(program, "some", {"cuda:0": total}, gpu_bytes)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "int4-channel", "mxfp4", "q4_k", "q5_k"])
@pytest.mark.parametrize("N", [40, 128])  # with a gap before the next matrix, and without
def test_stacked_matrices_in_the_layouts_of_a_gpu(name: str, N: int) -> None:
    fmt, g = get_format(name), torch.Generator().manual_seed(N)
    parts = [fmt.quantize(torch.randn(n, 256, generator=g) / 16) for n in (N, 70)]
    store = WeightStore()
    spec = store.add("w", PackedMatrix.of(fmt, parts))
    exact = torch.zeros(spec.shape)
    for start, part in zip(spec.starts, parts, strict=True):
        values = fmt.dequantize(part)
        exact[start : start + len(values)] = values
    found, on_gpu = torch.zeros(spec.shape), gpu_format(fmt, 256)
    rows = store.get(spec, CPU, matrix)
    for part in rows:
        weight = unpack_from_gpu(on_gpu, part.matrix, 0)
        found[part.start : part.start + part.matrix.N] = on_gpu.dequantize(weight)
    rounded = exact if on_gpu is fmt else exact.bfloat16().float()
    assert torch.equal(found, rounded)
    assert torch.equal(store.get(spec, CPU, dense), exact.bfloat16())
    assert store.get(spec, CPU, matrix) is rows
    assert len(rows) == (2 if name == "fp8" and N == 40 else 1)  # a scale is for 128 rows


def test_a_weight_that_nobody_has_is_named() -> None:
    spec = meta_decoder(EMBEDDED).norm
    with pytest.raises(PykernelsError, match="the weight 'model.norm.weight' is not given"):
        WeightStore().tensor(spec)


def test_a_weight_that_was_dropped_is_gone_or_read_anew() -> None:
    fmt, g = get_format("bf16"), torch.Generator().manual_seed(0)
    store, values = WeightStore(), torch.randn(64, 128, generator=g).bfloat16()
    spec = store.add("w", PackedMatrix.of(fmt, [fmt.quantize(values)]))
    gone = weakref.ref(store.get(spec, CPU, packed))
    store.replace("w", torch.zeros(64, 128))
    assert not store.get(spec, CPU, dense).any()  # a layout that is made later
    store.drop("w")
    assert gone() is None
    with pytest.raises(PykernelsError, match="the weight 'w' is not given"):
        store.get(spec, CPU, packed)
    with pytest.raises(PykernelsError, match="there is no weight 'w' to drop"):
        store.drop("w")
    store.add("w", PackedMatrix.of(fmt, [fmt.quantize(values)]))
    assert torch.equal(store.get(spec, CPU, dense), values)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_ranks_experts_take_no_memory_of_their_own(slices: int) -> None:
    fmt, shape = get_format("q8_0"), MoEShape(E=4, H=256, I=512, topk=2)
    layer = SplitExperts(
        shape, fmt, [aligned_zeros] * slices, [lambda fmt, *into: fmt.pack(*into)] * slices
    )
    g = torch.Generator().manual_seed(0)
    given = [
        [
            fmt.quantize(torch.randn(*dims, generator=g))
            for dims in ((512, 256), (512, 256), (256, 512))
        ]
        for _ in range(shape.E)
    ]
    for e, matrices in enumerate(given):
        layer.pack(e, *matrices)
    store = WeightStore()
    spec = store.add("experts", layer)
    found = store.get(spec.some([2, 3]), CPU, packed)
    for e, matrices in enumerate(given[2:]):
        for weight, expected in zip(found.unpack(e), matrices, strict=True):
            assert torch.equal(fmt.dequantize(weight), fmt.dequantize(expected))
    for part, whole in zip(found.slices, layer.slices, strict=True):
        assert part.shape.E == 2 and part.arena.data_ptr() == whole.arena.data_ptr()
        assert part.gate_up.data_ptr() == whole.gate_up[2].data_ptr()
    assert store.get(spec.some([0, 3]), CPU, packed).missing() == []
