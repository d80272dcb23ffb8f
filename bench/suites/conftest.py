"""Figures beside the times: every benchmark may leave GB/s, TFLOP/s and its share of the roof."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads must not spin

import pytest  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from bench.harness.machine import check_gpu  # noqa: E402
from pykernels.errors import PykernelsError  # noqa: E402
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
    "bound",
    "error",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The CPU's expert kernels; the GPU and what is timed there."""
    parser.addoption(
        "--kernel",
        default="auto",
        metavar="NAMES",
        help="expert kernels of the benchmarks: auto (the default), or some of"
        f" {', '.join(names()[1:])}, with commas between them",
    )
    parser.addoption("--device", default="cuda:0", help="of the Triton kernels (default: cuda:0)")
    parser.addoption(
        "--shape",
        action="append",
        default=[],
        metavar="OP:NAME=VALUE,...",
        help="in place of the table of an op (attention, experts, linear, router):"
        " linear:format=q4_k,tokens=4,inputs=4096,outputs=4096; any number of times",
    )
    parser.addoption("--full", action="store_true", help="the whole table of `make bench-gpu`")


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark reads its options when it is configured
def pytest_configure(config: pytest.Config) -> None:
    """Refuses kernels that there are not; ``--benchmark-only`` is enough to time."""
    if config.getoption("benchmark_only"):
        config.option.benchmark_enable = True
    for name in config.getoption("kernel").split(","):
        if name not in names():
            raise pytest.UsageError(f"--kernel {name}: use some of {', '.join(names())}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case for each kernel."""
    if "kernel" in metafunc.fixturenames:
        kernels = metafunc.config.getoption("kernel").split(",")
        metafunc.parametrize("kernel", kernels, scope="module")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Returns the device of ``--device``; "cpu", in Triton's interpreter, is for trying one's own
    case."""
    name = request.config.getoption("device")
    if name == "cpu":
        return torch.device("cpu")
    try:
        return check_gpu(name)
    except PykernelsError as error:
        pytest.skip(f"no Triton kernel is timed: {error}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--benchmark-only`` a suite would run its calls once and time nothing."""
    if not config.getoption("benchmark_enable"):
        skip = pytest.mark.skip(reason="a benchmark: --benchmark-only, or make bench")
        for item in items:
            if item.path.name.startswith("bench_"):
                item.add_marker(skip)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """One table of all ``extra_info`` after pytest-benchmark's own of times."""
    session = getattr(config, "_benchmarksession", None)
    benchmarks = [bench for bench in getattr(session, "benchmarks", ()) if bench.extra_info]
    if not benchmarks:
        return
    machines = dict.fromkeys(bench.extra_info.get("gpu", detect().cpu) for bench in benchmarks)
    columns = [name for name in COLUMNS if any(name in bench.extra_info for bench in benchmarks)]
    table = Table(title=f"medians on {' and '.join(machines)}")
    table.add_column("case", no_wrap=True)
    for heading in ("median ms", *columns):
        table.add_column(heading, justify="right")
    for bench in benchmarks:
        cells = [_cell(bench.extra_info.get(name)) for name in columns]
        case = bench.fullname.split("::")[-1].removeprefix("bench_")
        table.add_row(Text(case), f"{bench.stats.median * 1e3:.4g}", *cells)
    terminalreporter.ensure_newline()
    Console(width=160).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
