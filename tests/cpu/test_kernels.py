"""The table of the kernels that a run compiles by default."""

from __future__ import annotations

from pykernels.quant import FORMATS
from pykernels.registry import kernels

from .kernels import DIFFERENT, SIBLINGS, TRIED, fastest, tried


def test_every_format_is_tried_and_every_backend_with_several() -> None:
    assert {*DIFFERENT, *SIBLINGS} == {*FORMATS} and all(tried(fastest(), f) for f in DIFFERENT)
    for row in TRIED.values():
        assert {name for names in row.values() for name in names} <= {*FORMATS}
        assert all(FORMATS[name].int8_kind for name in row["int8"])
    for backend in kernels():
        assert sum(tried(backend.name, name) for name in FORMATS) >= 2


def test_a_backend_that_is_not_in_the_table_is_tried_with_all() -> None:
    assert all(tried("mine", name) for name in FORMATS)
