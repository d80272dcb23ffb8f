"""Tiny checkpoints, each written once a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from . import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tiny.Tiny]:
    """`checkpoint(model_type, **options of tiny.make)`, made once for the same arguments."""
    made: dict[str, tiny.Tiny] = {}

    def get(model_type: str = "deepseek_v3", **options: Any) -> tiny.Tiny:
        key = f"{model_type} {sorted(options.items())}"
        if key not in made:
            made[key] = tiny.make(tmp_path_factory.mktemp("tiny"), model_type, **options)
        return made[key]

    return get


@pytest.fixture
def own(checkpoint: Callable[..., tiny.Tiny], tmp_path: Path) -> Callable[..., Path]:
    """Like `checkpoint`, but the folder of a private copy, to be spoilt."""

    def get(model_type: str = "deepseek_v3", **options: Any) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(checkpoint(model_type, **options).path, folder)
        return folder

    return get


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """int64 [2, 17]: token ids for the tiny vocabularies, without their special tokens."""
    return torch.randint(2, 96, (2, 17), generator=torch.Generator().manual_seed(1))
