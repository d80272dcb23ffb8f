"""How the GEMM's threshold is found, on made-up timings; and the file that keeps it."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pykernels.cpu.moe.kernel import NO_GEMM
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.target import ISA_NAMES, detect
from runtime.machine import tuning
from runtime.profiling.calibrate import MORE_TOKENS, TOKENS, Point, calibrate, crossover
from runtime.workers.pool import WorkerPool

POOL = cast(WorkerPool, SimpleNamespace(threads=15))


class Model:
    """Tiles cost 0.15 a token and at least 1, the GEMM ``fixed`` for every ``rows`` tokens; with
    ``noise``, a factor that both paths of a round share and a smaller one that they do not."""

    def __init__(self, fixed: float, noise: float = 0.0, rows: int = 32) -> None:
        self.fixed, self.noise, self.rows, self.random = fixed, noise, rows, random.Random(0)
        self.asked: list[tuple[str, int]] = []

    def __call__(self, path: str, tokens: int) -> float:
        self.asked.append((path, tokens))
        drift = 1 + self.noise * ((len(self.asked) - 1) // 2 % 2)
        jitter = 1 + self.noise / 10 * self.random.random()
        cost = self.fixed * -(-tokens // self.rows) if path == "gemm" else max(1.0, 0.15 * tokens)
        return cost * 1e-6 * drift * jitter


def points(ratios: dict[int, float]) -> list[Point]:
    return [Point(n, ratio, 1.0, ratio) for n, ratio in ratios.items()]


@pytest.mark.parametrize(
    ("ratios", "gemm_from"),
    [
        pytest.param({2: 0.5, 4: 0.9, 8: 1.2, 16: 2.0}, 8, id="one crossing"),
        pytest.param({2: 0.5, 4: 1.02, 8: 0.7, 16: 2.0}, 16, id="a small lead before a loss"),
        pytest.param({2: 0.5, 4: 1.5, 8: 0.98, 16: 2.0}, 4, id="a small loss after a lead"),
        pytest.param({2: 0.5, 4: 0.9, 8: 0.99}, NO_GEMM, id="never"),
        pytest.param({2: 0.5, 4: 1.0, 8: 1.5}, 8, id="a draw stays with the tiles"),
    ],
)
def test_the_threshold_loses_least(ratios: dict[int, float], gemm_from: int) -> None:
    assert crossover(points(ratios))[0] == gemm_from


def test_regret_is_what_the_wrong_rows_cost() -> None:
    assert crossover(points({2: 0.5, 4: 2.0}))[1] == 0.0
    _, regret = crossover(points({2: 0.5, 4: 1.1, 8: 0.8, 16: 2.0}))
    assert regret == pytest.approx(1.1 ** (1 / 4) - 1)


@pytest.mark.parametrize(
    ("model", "measured", "gemm_from"),
    [
        pytest.param(Model(2.2, noise=0.5), 64, 16, id="noise of every other round"),
        pytest.param(Model(13.0, rows=1024), 96, 96, id="pays at the first count beyond"),
        pytest.param(Model(1e3, rows=1024), 128, 129, id="at none"),
    ],
)
def test_the_threshold_is_where_the_lines_cross(model, measured: int, gemm_from: int) -> None:
    shares: list[float] = []
    found = calibrate("fp8", POOL, timer=model, progress=shares.append)
    assert (found.fmt, found.threads, found.gemm_from) == ("fp8", 15, gemm_from)
    tokens = [*TOKENS, *(n for n in MORE_TOKENS if n <= measured)]
    assert [point.tokens for point in found.points] == tokens
    assert shares == [n / len(TOKENS) for n in range(len(TOKENS))]
    assert model.asked[:4] == [("tiles", 2), ("gemm", 2)] * 2  # by turns


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with env.override(cache_dir=tmp_path / "new"):
        yield tmp_path / "new"


def test_what_was_written_is_found_for_its_key_alone(cache: Path, monkeypatch) -> None:
    assert tuning.read("amx") == {}
    file = tuning.write("amx", {"fp8": 9})
    assert tuning.write("amx", {"bf16": NO_GEMM}) == file
    tuning.write("amx", {"int4": 33}, "int8")
    assert tuning.read("amx") == {"fp8": 9, "bf16": NO_GEMM}
    assert tuning.gemm_from("amx", "fp8") == 9
    assert tuning.gemm_from("amx", "int4") == tuning.default("amx", "int4") != 33
    assert tuning.read("avx512") == {}
    assert len(list(cache.iterdir())) == 2  # no temporary file is left
    here = detect()
    others = (replace(here, cpu=name, isa=frozenset(ISA_NAMES)) for name in ("another", "another+"))
    for other in (*others, replace(here, cpu="another", isa=frozenset())):
        monkeypatch.setattr(tuning, "detect", lambda other=other: other)
        assert tuning.read("amx") == {}
        tuning.write("amx", {"fp8": 5})


@pytest.mark.parametrize("text", ["", "[1]", '{"fp8": "8"}', '{"fp8": 0}'])
def test_a_damaged_file_is_one_error(cache: Path, text: str) -> None:
    tuning.write("amx", {}).write_text(text)
    for use in (lambda: tuning.gemm_from("amx", "fp8"), lambda: tuning.write("amx", {"fp8": 5})):
        with pytest.raises(PykernelsError, match=r"cannot be read \(.*Delete it"):
            use()
    assert tuning.gemm_from("generic", "fp8") == NO_GEMM  # has no GEMM: its file is never opened


def test_a_full_disk_leaves_the_old_file(cache: Path, monkeypatch) -> None:
    file = tuning.write("amx", {"fp8": 5})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PykernelsError, match=r"cannot be written: No space.*PYKERNELS_CACHE_DIR"):
        tuning.write("amx", {"fp8": 6})
    assert list(cache.iterdir()) == [file] and tuning.read("amx") == {"fp8": 5}
