"""Without a GPU, kernels run interpreted: the harness is tested, not the GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is decorated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Beside a GPU kernels are compiled for it, in the whole process."""
    if torch.cuda.is_available():
        skip = pytest.mark.skip(reason="for the interpreter, where there is no GPU")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)
