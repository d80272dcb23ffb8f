"""The notebooks run, cell after cell, and what they check holds."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from types import ModuleType

import matplotlib
import pytest

from pykernels import registry
from pykernels.target import detect
from runtime.profiling import measure, roofline, workload

LONG = (
    "a_roofline_of_this_machine",  # it measures for ten seconds
    "a_cpu_kernel_from_nothing",  # it compiles kernels of its own for longer than that
)
NOTEBOOKS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.all] if path.stem in LONG else [])
    for path in sorted((Path(__file__).parents[2] / "bench/notebooks").glob("*.ipynb"))
]


@pytest.mark.skipif(bool(detect().lacks(("avx2", "fma"))), reason="this CPU has no AVX2 and FMA")
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("agg")
    monkeypatch.setattr(registry, "BACKENDS", [*registry.BACKENDS])  # what it registers goes again
    monkeypatch.setattr(roofline, "read_roof", lambda pool: 10.0)  # it reads gigabytes
    monkeypatch.setattr(workload, "layers_out_of_cache", lambda *_: 2)
    whole = measure.measure_moe
    short = lambda *given, seconds, **how: whole(*given, seconds=0.02, **how)  # noqa: E731
    monkeypatch.setattr(measure, "measure_moe", short)
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    names = ModuleType("notebook").__dict__
    for i, source in enumerate(code):
        name = f"{path.name}[{i}]"  # Triton asks for the source of what it compiles, as in Jupyter
        monkeypatch.setitem(
            linecache.cache, name, (len(source), None, source.splitlines(True), name)
        )
        exec(compile(source, name, "exec"), names)
