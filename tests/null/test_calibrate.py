"""How the GEMM's threshold is found, on made-up timings."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest

from pykernels.cpu.moe.kernel import NEVER
from pykernels.env import env
from pykernels.target import detect
from runtime.machine import tuning
from runtime.profiling.calibrate import LATER, TOKENS, Point, calibrate, crossover, keep, time_paths
from runtime.workers.pool import WorkerPool

POOL = cast(WorkerPool, SimpleNamespace(threads=15))


class Model:
    """Tiles cost 0.15 a token and at least 1, the GEMM ``fixed`` for every ``rows`` tokens; with
    ``noise``, a factor that both paths of a round share and a smaller one that they do not."""

    def __init__(self, fixed: float, noise: float = 0.0, rows: int = 32) -> None:
        self.fixed, self.noise, self.rows, self.random = fixed, noise, rows, random.Random(0)
        self.asked: list[tuple[str, int]] = []

    def seconds(self, path: str, tokens: int) -> float:
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
        pytest.param({2: 1.1, 4: 1.2, 8: 1.2}, 2, id="the GEMM from the start"),
        pytest.param({2: 0.5, 4: 0.9, 8: 0.99}, NEVER, id="never"),
        pytest.param({2: 0.5, 4: 1.0, 8: 1.5}, 8, id="a draw stays with the tiles"),
    ],
)
def test_the_threshold_loses_least(ratios: dict[int, float], gemm_from: int) -> None:
    assert crossover(points(ratios))[0] == gemm_from


def test_regret_is_what_the_wrong_rows_cost() -> None:
    assert crossover(points({2: 0.5, 4: 2.0}))[1] == 0.0
    _, regret = crossover(points({2: 0.5, 4: 1.1, 8: 0.8, 16: 2.0}))
    assert regret == pytest.approx(1.1 ** (1 / 4) - 1)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize(
    ("fixed", "gemm_from"),
    [
        pytest.param(1.1, 8, id="just above one pass of tiles"),
        pytest.param(2.2, 16, id="two passes"),
    ],
)
def test_a_model_is_calibrated_to_where_its_lines_cross(
    fixed: float, gemm_from: int, noise: float
) -> None:
    """Memory that is half as fast in every other round moves nothing: ratios are of one round."""
    found = calibrate("fp8", POOL, timer=Model(fixed, noise))
    assert (found.fmt, found.threads, found.gemm_from) == ("fp8", 15, gemm_from)
    assert [point.tokens for point in found.points] == list(TOKENS)


@pytest.mark.parametrize(
    ("fixed", "measured", "gemm_from"),
    [
        pytest.param(13.0, 96, 96, id="pays at the first count beyond"),
        pytest.param(18.0, 128, 128, id="at the second"),
        pytest.param(1e3, 128, 129, id="at none: not below the last, nor the default"),
    ],
)
def test_a_gemm_that_has_not_paid_is_measured_further(
    fixed: float, measured: int, gemm_from: int
) -> None:
    model = Model(fixed, rows=1024)
    found = calibrate("fp8", POOL, timer=model)
    assert [point.tokens for point in found.points] == [
        *TOKENS,
        *(n for n in LATER if n <= measured),
    ]
    assert found.gemm_from == gemm_from
    assert model.asked[-1][1] == measured


def test_what_was_not_measured_is_not_below_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.machine.tuning.gemm_from_here", lambda *_: 200)
    assert calibrate("int8", POOL, timer=Model(1e3)).gemm_from == 200


def test_paths_take_turns_and_the_first_round_only_warms_up() -> None:
    model = Model(2.0)
    clock = iter(range(1000))
    shares: list[float] = []
    slow = time_paths(model, (4, 8), shares.append, lambda: float(next(clock)))
    assert shares == [0.0, 0.5]
    assert model.asked == [
        (path, n) for n in (4, 8) for _ in range(4) for path in ("tiles", "gemm")
    ]
    assert [round(point.gemm * 1e6, 6) for point in slow] == [2.0, 2.0]
    quick = Model(2.0)
    time_paths(quick, (4,), clock=lambda: 0.0)
    assert len(quick.asked) == 2 * 8


def test_the_first_round_counts_in_no_median() -> None:
    """Round n takes n + 1 seconds on tiles and a tenth of its square through the GEMM."""

    class Slower:
        def __init__(self) -> None:
            self.calls = 0

        def seconds(self, path: str, tokens: int) -> float:
            n, self.calls = self.calls // 2 + 1, self.calls + 1
            return n * n / 10 if path == "gemm" else float(n)

    (point,) = time_paths(Slower(), (4,), clock=iter(range(9)).__next__)
    assert (point.tiles, point.gemm, point.ratio) == (3.0, 0.9, pytest.approx(10 / 3))


def test_what_is_kept_is_what_experts_will_find(tmp_path) -> None:
    found = calibrate("fp8", POOL, timer=Model(1.05))
    with env.override(cache_dir=tmp_path):
        keep(found)
        assert tuning.chosen("amx", "fp8", detect().cpu).gemm_from == found.gemm_from == 8
