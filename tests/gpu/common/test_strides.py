"""Which layouts are rows at one distance."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common.strides import rows_of

X = torch.zeros(4, 3, 8)


ROWS = [
    (X, (12, 8)),
    (X[:, :1], (4, 24)),  # how far apart the one of a dimension would be says nothing
    (X[:1, :2, :5], (2, 8)),
    (X[0, :1].expand(5, 8), (5, 0)),
    (X[:0], (0, 0)),
    (torch.zeros(6, 1).T.reshape(6)[::2].view(3, 1), (3, 2)),  # nor where a row has one element
]
NO_ROWS = [X.mT[..., :1], X[0].expand(4, 3, 8), X[:, :2], X[..., ::2], torch.zeros(())]


def test_rows_at_one_distance() -> None:
    for x, expected in ROWS:
        assert rows_of(x, "x") == expected
    for x in NO_ROWS:
        with pytest.raises(PykernelsError, match="contiguous"):
            rows_of(x, "x")
