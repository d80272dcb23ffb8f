"""RMSNorm, SiLU*mul and the embedding gather."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.embedding import embed
from pykernels.gpu.norm import post_norm, rms_norm, softcap
from tests.gpu.rounding import assert_rounded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# shape, why
SHAPES = [
    ((0, 64), "no rows"),
    ((1, 7168), "a token of DeepSeek-V3"),
    ((3, 1), "the least width"),
    ((37, 100), "several rows a program, the last ragged"),
    ((2, 5, 128), "heads of Qwen3"),
    pytest.param((4096, 7168), "a prompt", marks=pytest.mark.gpu),
    pytest.param((9, 20000), "wide", marks=pytest.mark.gpu),
]


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("shape", "why"), SHAPES)
def test_rms_norm(
    shape: tuple[int, ...], why: str, residual: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = normal(shape, dtype, device), normal(shape[-1:], dtype, device)
    added = normal(shape, dtype, device) if residual else None
    out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    normed, total = rms_norm(x, weight, 1e-6, added, out)
    assert normed is out[0]
    if residual:
        assert total is out[1]
        assert_rounded(total, x.double() + added.double())
        x = total  # what the norm saw, cut or rounded
    assert_rounded(normed, ref.rms_norm(x, weight, 1e-6, None, torch.float64)[0])


def test_rms_norm_of_a_slice_and_in_place(device: torch.device) -> None:
    """MLA norms the first 512 of 576; a decoder adds into its residual stream."""
    wide, weight = torch.randn(4, 576, device=device), torch.rand(512, device=device)
    normed, total = rms_norm(wide[:, :512], weight, 1e-5, wide[:, 64:])
    truth = ref.rms_norm(wide[:, :512], weight, 1e-5, wide[:, 64:], torch.float64)
    assert total is not None and torch.equal(total, wide[:, :512] + wide[:, 64:])
    assert_rounded(normed, truth[0])
    x, stream = torch.randn(4, 512, device=device), torch.randn(4, 512, device=device)
    truth, total = ref.rms_norm(x, weight, 1e-5, stream)
    normed, into = rms_norm(x, weight, 1e-5, stream, (x, stream))
    assert into is stream and torch.equal(stream, total)
    assert_rounded(x, truth.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "why"), SHAPES)
def test_post_norm(
    shape: tuple[int, ...], why: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = normal(shape, dtype, device), normal(shape[-1:], dtype, device)
    stream, scale = torch.randn(shape, device=device), torch.rand(1, device=device)
    for added, by in ((None, None), (stream, scale)):
        truth = ref.post_norm(x, weight, 1e-6, added, by, torch.float64)
        assert_rounded(post_norm(x, weight, 1e-6, added, by), truth)
    assert post_norm(x, weight, 1e-6, stream, scale, stream) is stream
    assert_rounded(stream, truth)


def test_softcap(device: torch.device) -> None:
    x = torch.cat([torch.randn(5000) * 50, torch.tensor([0.0, 3e38, -3e38])]).to(device)
    truth = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(softcap(x, 30.0).double(), truth, rtol=1e-6, atol=1e-5)
    assert softcap(x, 30.0, x) is x


def test_a_row_of_zeros_and_one_of_large_values(device: torch.device) -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e18)]).to(device)
    normed, _ = rms_norm(x, torch.ones(64, device=device), 1e-6)
    assert normed[0].abs().max() == 0 and torch.allclose(normed[1], torch.ones_like(normed[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 9)])
def test_embed(
    shape: tuple[int, ...], integers: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    table = normal((50, 1100), dtype, device)
    ids = torch.randint(0, 50, shape, device=device).to(integers)
    assert torch.equal(embed(ids, table), table[ids.long()])
    part = table[:, 7:1032]  # rows further apart than they are long
    assert torch.equal(embed(ids, part), part[ids.long()])


def test_an_id_outside_the_table_shows(device: torch.device) -> None:
    table = torch.randn(5, 8, device=device)
    found = embed(torch.tensor([4, 5, -1, 0], device=device), table)
    assert torch.equal(found[[0, 3]], table[[4, 0]]) and found[[1, 2]].isnan().all()
    assert torch.equal(ref.embed(torch.tensor([5, 1]), table.cpu())[1], table[1].cpu())


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


COMPILES = [
    ("rms_norm 7168", lambda: rms_norm(_meta(4096, 7168), _meta(7168), 1e-6, _meta(4096, 7168))),
    ("rms_norm heads", lambda: rms_norm(_meta(4096, 32, 128), _meta(128), 1e-6)),
    (
        "post_norm",
        lambda: post_norm(
            _meta(4096, 2816), _meta(2816), 1e-6, _meta(4096, 2816), _meta(1, dtype=torch.float32)
        ),
    ),
    ("softcap", lambda: softcap(_meta(3, 262144, dtype=torch.float32), 30.0)),
    ("embed", lambda: embed(_meta(8, dtype=torch.int64), _meta(129280, 7168))),
]
