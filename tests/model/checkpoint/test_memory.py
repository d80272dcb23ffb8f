"""Loading makes no second copy, counts the memory first, reports progress."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import model
from model.checkpoint import memory
from model.checkpoint.cache_cost import CacheCost
from model.checkpoint.tensors.safetensors import Checkpoint
from model.modules.moe import routed_experts
from pykernels.errors import PykernelsError
from runtime.engine import EngineConfig

from ..checks import Checkpoints, refused

ROOT = Path(__file__).resolve().parents[3]

_RSS = """
import resource, sys
import model
from model.modules.moe import routed_experts
from pathlib import Path
warm, big = map(Path, sys.argv[1:])
model.from_pretrained(warm)  # threads, compiled kernels
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
lm = model.from_pretrained(big)
packed = sum(r.nbytes for r in routed_experts(lm))
dense = sum(p.nbytes for p in lm.parameters())
print(peak() - before, packed + dense)
"""


def test_the_peak_is_the_model_and_no_second_copy(checkpoint: Checkpoints) -> None:
    warm = checkpoint("qwen3_moe").path
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 24}
    big = checkpoint("qwen3_moe", **sizes, num_hidden_layers=2).path
    done = subprocess.run(
        [sys.executable, "-c", _RSS, str(warm), str(big)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 75e6
    assert grown < 1.25 * size


def test_memory_that_is_just_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 3 << 20)
    memory.check(3 << 20)
    with pytest.raises(PykernelsError, match="needs 3.0 MiB of main memory, 3.0 MiB are free"):
        memory.check((3 << 20) + 1)


def test_memory_is_checked_before_loading(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 300_000)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("something was loaded"))
    message = r"needs \d.\d MiB of main memory, 0.3 MiB are free"
    refused(message, checkpoint("deepseek_v3").path)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_as_much_memory_is_used_as_was_checked(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, fp8: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory, "check", asked.append)
    lm = model.from_pretrained(checkpoint("deepseek_v3", fp8=fp8).path)
    packed = sum(r.nbytes for r in routed_experts(lm))
    dense = sum(p.nbytes for p in lm.parameters()) + 2 * 8 * 4  # and the routers' biases
    largest = max(p.numel() for p in lm.parameters())
    one_expert = 3 * 128 * 256 if fp8 else 3 * 32 * 64
    assert packed + dense < asked[0] <= packed + dense + 8 * max(largest, one_expert)


def test_progress_goes_from_nothing_to_all(checkpoint: Checkpoints) -> None:
    made = checkpoint("deepseek_v3")
    seen: list[tuple[int, int]] = []
    model.from_pretrained(made.path, progress=lambda done, total: seen.append((done, total)))
    stored = sum(tensor.nbytes for tensor in made.stored.values())
    assert {total for _, total in seen} == {stored}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == stored
    assert len(seen) > 20


def test_an_engine_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 10 << 30)
    smaller = {"int8": 8 << 30, "int4": 5 << 30}
    memory.check_engine(8 << 30, 1 << 20, 1024, 2, smaller)
    with pytest.raises(PykernelsError, match="experts in int8 it needs 8.0 GiB: .*--format int8"):
        memory.check_engine(12 << 30, 1 << 20, 1024, 2, smaller)
    with pytest.raises(
        PykernelsError, match="12.0 GiB of main memory, 10.0 GiB are free. Free mem"
    ):
        memory.check_engine(12 << 30, 1 << 20, 1024, 2, {})
    with pytest.raises(
        PykernelsError,
        match="a context of 1024, or max_num_seqs=1, which has room for 2048, or the experts in"
        " int4",
    ):
        memory.check_engine(8 << 30, 1 << 20, 2048, 2, smaller)


def test_what_layers_with_a_window_leave_is_for_more_tokens() -> None:
    """Three quarters of a token's 1,000 bytes are theirs; they have pages for 640 tokens and one of
    each eight of the others."""
    cost = CacheCost(1000, 750, lambda pages: min(pages, 10 + pages // 8) % pages)
    assert cost.nbytes(5) == 5 * 64_000 and cost.most_pages(5 * 64_000) == 5
    assert cost.nbytes(80) == 80 * 16_000 + 20 * 48_000
    assert cost.most_pages(80 * 16_000 + 20 * 48_000) in range(80, 88)
    assert cost.nbytes(cost.most_pages(1 << 30)) <= 1 << 30


def test_the_size_of_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pages of 64 tokens of 1,000 bytes, with 10 MB free and 2 MB of weights."""
    monkeypatch.setattr(memory, "available", lambda: 10_000_000)

    def pages(on_gpu: int | None = None, **settings: int) -> int:
        return memory.cache_pages(
            EngineConfig(**settings), 128, CacheCost(1000), 2_000_000, {}, on_gpu
        )

    assert pages(kv_tokens=65) == 2 and pages(kv_bytes=200_000) == 3
    # An eighth of the 8 MB that are left, in sequences of 128 tokens, and a page more.
    assert pages() == 2 * 7 + 1 and pages(max_num_seqs=3) == 2 * 3 + 1
    assert pages(on_gpu=512_000) == 2 * 2 + 1, "two sequences at least"
    for settings, named in (
        ({"kv_bytes": 63_999}, "64000 or more"),
        ({"kv_tokens": 10_000}, "kv_tokens=8000 at most"),
        # What does not fit on a GPU lies in main memory.
        ({"kv_tokens": 10_240, "on_gpu": 100_000}, "kv_tokens=10048 at most"),
    ):
        with pytest.raises(PykernelsError, match=named):
            pages(**settings)
