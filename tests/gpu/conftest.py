"""Every test here runs twice in the project's life: interpreted on any CPU, compiled on a GPU.

``device`` is "cuda" where there is a GPU; elsewhere "cpu", and Triton interprets (see the conftest
above). Tests marked ``gpu`` (large sizes, graphs, FP8 tensor cores) need the real thing.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
