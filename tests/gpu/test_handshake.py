"""SUBMIT and COMBINE: what the host gets, and what comes back into the residual stream."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.handshake import combine, copy_rows

BF16, FP32 = torch.bfloat16, torch.float32


def host(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host that a kernel reaches."""
    x = torch.full(shape, 9, dtype=dtype)
    return x.pin_memory() if device.type == "cuda" else x


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(("T", "H", "K"), [(1, 7168, 8), (3, 100, 6), (0, 32, 2)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_copy_rows(T: int, H: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    """To the host and back, each in the dtype that its reader takes."""
    x = torch.randn(T, H + 4, device=device).to(dtype)[:, 4:]
    ids = torch.randint(-1, 60, (T, K), device=device)
    weights = torch.rand(T, K, device=device)
    for kinds in ((BF16, torch.int32, FP32), (FP32, torch.int64, BF16)):
        out = [
            host(*source.shape, dtype=kind, device=device)
            for source, kind in zip((x, ids, weights), kinds, strict=True)
        ]
        copy_rows((x, ids, weights), out)
        sync(device)
        for source, target in zip((x, ids, weights), out, strict=True):
            assert torch.equal(target, source.cpu().to(target.dtype))
        back = [torch.empty_like(x.contiguous()), torch.empty_like(ids)]
        copy_rows(out[:2], back)
        sync(device)
        assert torch.equal(back[0].cpu(), out[0].to(dtype)) and torch.equal(back[1], ids)


@pytest.mark.parametrize(
    ("T", "H", "count"), [(1, 7168, 3), (3, 100, 5), (2, 64, 0), (0, 8, 1), (2, 40, 12)]
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_combine(T: int, H: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """Every second addend lies in the host's memory, in float32; the sum replaces the residual."""
    residual = torch.randn(T, H, device=device).to(dtype)
    addends = [
        host(T, H, dtype=FP32, device=device).normal_()
        if i % 2
        else torch.randn(T, H, device=device).to(dtype)
        for i in range(count)
    ]
    weight = torch.rand(H, device=device) + 0.5
    given = [x.cpu() for x in (residual, *addends, weight)]
    total = torch.stack([x.double() for x in given[:-1]]).sum(0)
    normed = torch.nn.functional.rms_norm(total, (H,), given[-1].double(), 1e-5)
    kept, out = residual.clone(), torch.full_like(residual, torch.nan)
    truth = ref.combine(*(residual, addends, weight, 1e-5))
    found = combine(residual, addends, weight, 1e-5, (out, residual))
    assert found[0] is out and found[1] is residual
    rounding = 2.0**-7 if dtype == BF16 else 1e-5
    for ours in (found, truth):
        for x, expected in zip(ours, (normed, total), strict=True):
            torch.testing.assert_close(x.double().cpu(), expected, rtol=rounding, atol=rounding)
    assert torch.equal(found[1], truth[1])
    assert count == 0 or T == 0 or not torch.equal(kept, residual)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    ids, weights = torch.zeros(2, 3, device=device).int(), torch.zeros(2, 3, device=device)
    out = [host(2, n, dtype=t, device=device) for n, t in ((8, BF16), (3, torch.int32), (3, FP32))]
    wrong = {
        "rows of other numbers": lambda: combine(x, [x[:1]], weight, 1e-5),
        "a short weight": lambda: combine(x, [x], weight[:4], 1e-5),
        "integers": lambda: combine(x.int(), [], weight, 1e-5),
        "integers to floats": lambda: copy_rows([ids], [out[2]]),
        "a target with gaps": lambda: copy_rows([x[:, :2]], [out[0][:, :2]]),
        "a target of another shape": lambda: copy_rows([weights[:, :2]], [out[2]]),
        "too many rows": lambda: copy_rows([x] * 5, [out[0]] * 5),
    }
    for what, call in wrong.items():
        with pytest.raises(PykernelsError):
            call()
            pytest.fail(f"{what}: taken")


@pytest.mark.gpu
def test_memory_that_is_not_pinned_is_refused(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(PykernelsError, match="pinned"):
        combine(x, [torch.zeros(2, 8)], weight, 1e-5)


@pytest.mark.gpu
def test_a_graph_waits_for_numbered_flags(device: torch.device) -> None:
    """Three hops of a graph, replayed twice, each answered by the host with twice what it got."""
    from pykernels.gpu.common.stream_memory import wait_value, write_value

    H, hops = 7168, 3
    x, weight = torch.randn(1, H, device=device), torch.ones(H, device=device)
    ids, weights = torch.zeros(1, 2, device=device).int(), torch.ones(1, 2, device=device)
    kinds = ((H, BF16), (2, torch.int32), (2, FP32))
    places = tuple(host(1, n, dtype=kind, device=device) for n, kind in kinds)
    result = host(1, H, dtype=FP32, device=device)
    flags = torch.zeros(32, dtype=torch.int32).pin_memory()
    asked, answered = flags.data_ptr(), flags.data_ptr() + 64
    outs = [torch.empty(2, 1, H, device=device) for _ in range(hops)]
    copy_rows((x, ids, weights), places)  # compiles
    combine(x, [result], weight, 1e-5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for hop in range(hops):
            copy_rows((x, ids, weights), places)
            write_value(asked, hop + 1)
            wait_value(answered, hop + 1)
            combine(x, [result], weight, 1e-5, tuple(outs[hop]))
    for _ in range(2):
        x.normal_()
        torch.cuda.synchronize()
        graph.replay()
        for hop in range(hops):
            while flags[0] != hop + 1:
                pass
            result.copy_(2 * places[0].float() + hop)
            flags[16] = hop + 1
        torch.cuda.synchronize()
        for hop in range(hops):
            expected = x + 2 * x.bfloat16().float() + hop
            torch.testing.assert_close(outs[hop][1], expected)


def _compile(count: int, dtype: torch.dtype) -> None:
    def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight = empty(4, 7168, dtype=dtype), empty(7168, dtype=dtype)
    combine(x, [empty(4, 7168)] * count, weight, 1e-5)
    ids, weights = empty(4, 8, dtype=torch.int32), empty(4, 8)
    copy_rows((x, ids, weights), (empty(4, 7168, dtype=BF16), ids, weights))


COMPILES = [("bf16", lambda: _compile(3, BF16)), ("float32", lambda: _compile(2, FP32))]
