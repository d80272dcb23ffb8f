"""Conversations that are taken up after a restart, on the embedded model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import model
from model.checkpoint.identity import identity
from pykernels.errors import PykernelsError
from runtime.engine import Completion, SamplingParams

SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 2, "threads": 1}
FIRST = torch.randint(2, 4000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


def turns(conversation: list[int], count: int, **how: Any) -> list[Completion]:
    """The answers of one process to a conversation that grows by them."""
    found = []
    with model.load_engine(how.pop("path", model.EMBEDDED), **SIZES, **how) as llm:
        for _ in range(count):
            (answer,) = llm.engine.generate([conversation], GREEDY)[0].completions
            found.append(answer)
            conversation += [*answer.token_ids, 5, 6, 7]
    return found


def logprobs(answer: Completion) -> Sequence[object]:
    return [*answer.token_ids, *answer.logprobs]


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_a_restart_changes_nothing_but_the_time(device: str, tmp_path: Path) -> None:
    without = turns(FIRST.copy(), 3, device=device)
    disk: dict[str, Any] = {"device": device, "kv_disk": tmp_path, "kv_disk_gib": 0.1}
    conversation = FIRST.copy()
    one_by_one = [turns(conversation, 1, **disk)[0] for _ in range(3)]
    assert [a.stats.cached_tokens for a in one_by_one] == [0, 192, 192]
    assert list(map(logprobs, one_by_one)) == list(map(logprobs, without))


def test_another_model_or_dtype_has_blocks_of_its_own(tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    (first,) = turns(FIRST.copy(), 1, kv_disk=disk)
    other = tmp_path / "other"
    shutil.copytree(model.EMBEDDED, other)
    for file in other.glob("*.safetensors"):
        tensors, name = load_file(file), "model.norm.weight"
        if name in tensors:  # four bytes of it; a file's time may be any
            tensors[name][0] += 1
            save_file(tensors, file)
    for how in ({"path": other}, {"kv_dtype": "fp8"}):
        (found,) = turns(FIRST.copy(), 1, kv_disk=disk, **how)
        assert found.stats.cached_tokens == 0 and logprobs(found) != logprobs(first)
    (again,) = turns(FIRST.copy(), 1, kv_disk=disk)
    assert again.stats.cached_tokens == 192 and again.token_ids == first.token_ids


def test_a_file_of_the_hub_is_the_same_anywhere(tmp_path: Path) -> None:
    config, found = LlamaConfig(), []
    for machine, name in (
        ("a", "0" * 64),
        ("b", "0" * 64),
        ("c", "1" * 64),
        ("d", "kept"),
        ("e", "kept"),
    ):
        blob, file = tmp_path / machine / "blobs" / name, tmp_path / machine / "x.safetensors"
        blob.parent.mkdir(parents=True)
        blob.write_bytes(b"weights")
        os.utime(blob, (ord(machine), ord(machine)))
        file.symlink_to(blob)
        found.append(identity(config, [file]))
    assert found[0] == found[1] and len(set(found)) == 4


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PykernelsError, match="kv_disk_gib=1.0 without a directory"):
        model.load_engine(model.EMBEDDED, kv_disk_gib=1.0)
    with pytest.raises(PykernelsError, match="kv_ram_gib=1.0 without a GPU"):
        model.load_engine(model.EMBEDDED, kv_ram_gib=1.0)
    with pytest.raises(PykernelsError, match="GiB for what leaves the KV cache, and"):
        model.load_engine(model.EMBEDDED, device="ref", kv_ram_gib=1e6)
    with pytest.raises(PykernelsError, match="hold no page, which takes 0.2 MiB"):
        model.load_engine(model.EMBEDDED, device="ref", kv_ram_gib=1e-5)
    with pytest.raises(PykernelsError, match="hold no page"):
        model.load_engine(model.EMBEDDED, kv_disk=tmp_path, kv_disk_gib=1e-5)
    with pytest.raises(PykernelsError, match="passes"):
        model.load_engine(model.EMBEDDED, kv_disk=tmp_path, passes=[lambda program: program])
