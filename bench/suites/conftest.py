"""Figures beside the times: every benchmark may leave GB/s, TFLOP/s and its share of the roof."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads must not spin

import pytest  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pykernels.registry import names  # noqa: E402
from pykernels.target import detect  # noqa: E402

COLUMNS = (
    "threads",
    "gbps",
    "roof_gbps",
    "roof_share",
    "tflops",
    "tok_per_s",
    "p50_us",
    "p99_us",
    "max_us",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The expert kernels, where a benchmark has some."""
    parser.addoption(
        "--kernel",
        default="auto",
        metavar="NAMES",
        help="expert kernels of the benchmarks: auto (the default), or some of"
        f" {', '.join(names()[1:])}, with commas between them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuses kernels that there are not."""
    for name in config.getoption("kernel").split(","):
        if name not in names():
            raise pytest.UsageError(f"--kernel {name}: use some of {', '.join(names())}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case for each kernel."""
    if "kernel" in metafunc.fixturenames:
        kernels = metafunc.config.getoption("kernel").split(",")
        metafunc.parametrize("kernel", kernels, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--benchmark-enable`` a suite would run its calls once and time nothing."""
    if not config.getoption("benchmark_enable"):
        skip = pytest.mark.skip(reason="a benchmark: --benchmark-enable, or make bench")
        for item in items:
            if item.path.name.startswith("bench_"):
                item.add_marker(skip)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """One table of all ``extra_info`` after pytest-benchmark's own of times."""
    session = getattr(config, "_benchmarksession", None)
    found = [bench for bench in getattr(session, "benchmarks", ()) if bench.extra_info]
    if not found:
        return
    table = Table(title=f"medians on {detect().cpu}")
    table.add_column("case", no_wrap=True)
    for heading in ("median ms", *COLUMNS):
        table.add_column(heading, justify="right")
    for bench in found:
        cells = [_cell(bench.extra_info.get(name)) for name in COLUMNS]
        case = bench.fullname.split("::")[-1].removeprefix("bench_")
        table.add_row(case, f"{bench.stats.median * 1e3:.3f}", *cells)
    terminalreporter.ensure_newline()
    Console(width=160).print(table)


def _cell(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
