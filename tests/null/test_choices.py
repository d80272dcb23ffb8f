"""The file of what this machine was calibrated to: read, written, refused."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pykernels.cpu.moe.kernel import NEVER
from pykernels.cpu.moe.plan import GEMM_FROM
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.target import ISA_NAMES, detect
from runtime.machine import tuning
from runtime.machine.tuning import Choices

CPU = "Some(R) CPU @ 2/4 GHz (arch9)"
AMX_FP8, AMX_BF16 = tuning.key("amx", "fp8"), tuning.key("amx", "bf16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with env.override(cache_dir=tmp_path / "new"):
        yield tmp_path / "new"


def test_without_a_file_the_choices_are_the_defaults() -> None:
    assert tuning.read(CPU) == {}
    assert tuning.chosen("amx", "int4", CPU) == Choices(gemm_from=GEMM_FROM)


def test_cpus_whose_names_differ_in_a_plus_have_a_file_each() -> None:
    tuning.write("XEON 8592+", AMX_FP8, Choices(gemm_from=9), {})
    assert tuning.read("XEON 8592") == {}


def test_what_was_written_is_chosen_for_its_cpu_and_format_alone(cache: Path) -> None:
    file = tuning.write(CPU, AMX_FP8, Choices(gemm_from=9), {"threads": 15})
    tuning.write(CPU, AMX_BF16, Choices(gemm_from=7), {})
    assert tuning.read(CPU) == {AMX_FP8: Choices(9), AMX_BF16: Choices(7)}
    assert tuning.chosen("amx", "fp8", CPU).gemm_from == 9
    assert tuning.chosen("amx", "int8", CPU) == tuning.default("amx", "int8")
    assert tuning.chosen("amx", "int4", CPU, "int8") == tuning.default("amx", "int4", "int8")
    assert tuning.chosen("avx512", "fp8", CPU) == tuning.default("avx512", "fp8")
    assert tuning.chosen("amx", "fp8", "another CPU") == tuning.default("amx", "fp8")
    assert [path.name for path in cache.iterdir()] == [file.name]  # nothing half-written is left
    assert json.loads(file.read_text())["formats"][AMX_FP8]["measured"] == {"threads": 15}
    tuning.write(CPU, AMX_FP8, Choices(gemm_from=NEVER), {})
    assert tuning.read(CPU) == {AMX_FP8: Choices(NEVER), AMX_BF16: Choices(7)}


def test_what_was_measured_with_other_instructions_is_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = frozenset(ISA_NAMES)
    for isa, gemm_from in ((every, 9), (every - {"avx512bf16", "avx512vnni"}, 30)):
        monkeypatch.setattr(tuning, "detect", lambda isa=isa: replace(detect(), isa=isa))
        assert tuning.chosen("avx512", "fp8", CPU) == tuning.default("avx512", "fp8")
        tuning.write(CPU, tuning.key("avx512", "fp8"), Choices(gemm_from), {})
        assert tuning.chosen("avx512", "fp8", CPU) == Choices(gemm_from)
    keys = {"avx512/avx512-bf16-vbmi-vnni-gfni/fp8/bf16", "avx512/avx512-vbmi-gfni/fp8/bf16"}
    assert set(tuning.read(CPU)) == keys


def test_calibrations_at_the_same_time_lose_nothing() -> None:
    names = [f"amx/fp8/{n}" for n in range(40)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: tuning.write(CPU, name, Choices(gemm_from=9), {}), names))
    assert set(tuning.read(CPU)) == set(names)


def test_a_file_system_that_locks_no_folder_is_written_to(cache: Path, monkeypatch) -> None:
    """As NFS; what another process is about to write there is left alone."""
    other = cache / f"{tuning.path(CPU).name}.new"
    cache.mkdir()
    other.write_text("{")

    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(tuning.fcntl, "flock", refuse)
    tuning.check_writable(CPU)
    file = tuning.write(CPU, AMX_FP8, Choices(gemm_from=9), {})
    assert tuning.read(CPU) == {AMX_FP8: Choices(9)}
    assert set(cache.iterdir()) == {file, other}


def test_a_file_of_another_version_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.write(CPU, AMX_FP8, Choices(gemm_from=9), {})
    monkeypatch.setattr(tuning, "VERSION", tuning.VERSION + 1)
    assert tuning.read(CPU) == {}
    tuning.write(CPU, AMX_BF16, Choices(gemm_from=7), {})
    assert tuning.read(CPU) == {AMX_BF16: Choices(7)}


def test_files_from_before_instructions_were_part_of_a_key_count_as_none(cache: Path) -> None:
    old = {"amx/fp8/bf16": {"choices": {"gemm_from": 77}, "measured": {"threads": 2}}}
    cache.mkdir()
    for version in (6, tuning.VERSION):
        text = json.dumps({"version": version, "cpu": CPU, "formats": old})
        tuning.path(CPU).write_text(text)
        assert tuning.chosen("amx", "fp8", CPU) == tuning.default("amx", "fp8")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[" * 100_000, id="deeper than any parser goes"),
        pytest.param("[]", id="no object"),
        pytest.param('{"version": V}', id="no formats"),
        pytest.param('{"version": V, "formats": {"fp8": {}}}', id="no choices"),
        pytest.param(
            '{"version": V, "formats": {"fp8": {"choices": {"gemm_from": "8"}}}}', id="no number"
        ),
        pytest.param(
            '{"version": V, "formats": {"fp8": {"choices": {"gemm_to": 8}}}}', id="no such choice"
        ),
        pytest.param(
            '{"version": V, "formats": {"fp8": {"choices": {"gemm_from": -4}}}}', id="negative"
        ),
        pytest.param('{"version": V, "formats": {"fp8": {"choices": {"gemm_from": 0}}}}', id="0"),
        pytest.param(
            '{"version": V, "formats": {"fp8": {"choices": {"gemm_from": true}}}}', id="a boolean"
        ),
        pytest.param(
            f'{{"version": V, "formats": {{"fp8": {{"choices": {{"gemm_from": {10**30}}}}}}}}}',
            id="more than 64 bits",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error(cache: Path, text: str) -> None:
    cache.mkdir()
    tuning.path(CPU).write_text(text.replace("V", str(tuning.VERSION)))
    for use in (
        lambda: tuning.chosen("amx", "fp8", CPU),
        lambda: tuning.write(CPU, AMX_FP8, Choices(5), {}),
    ):
        with pytest.raises(PykernelsError, match=r"cannot be read .*\. Delete it"):
            use()
    assert tuning.chosen("generic", "fp8", CPU) == Choices(NEVER)  # never opened


def test_a_file_that_cannot_be_written_is_one_error(cache: Path) -> None:
    (cache / f"{tuning.path(CPU).name}.new").mkdir(parents=True)
    for use in (
        lambda: tuning.write(CPU, AMX_FP8, Choices(5), {}),
        lambda: tuning.check_writable(CPU),
    ):
        with pytest.raises(PykernelsError, match=r"cannot be written.*PYKERNELS_CACHE_DIR"):
            use()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_write_that_is_cut_short_leaves_nothing_behind(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    file = tuning.write(CPU, AMX_FP8, Choices(5), {})

    def replace(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises((PykernelsError, KeyboardInterrupt)):
        patch.setattr(Path, "replace", replace)
        tuning.write(CPU, AMX_FP8, Choices(6), {})
    assert list(cache.iterdir()) == [file]
    assert tuning.read(CPU) == {AMX_FP8: Choices(5)}


def test_what_a_killed_process_has_left_is_written_over(cache: Path) -> None:
    cache.mkdir()
    (cache / f"{tuning.path(CPU).name}.new").write_text("{")
    tuning.check_writable(CPU)
    assert list(cache.iterdir()) == []


def test_a_file_that_may_not_be_read_is_not_to_be_deleted(cache: Path) -> None:
    tuning.path(CPU).mkdir(parents=True)
    with pytest.raises(PykernelsError, match=r"cannot be read: Is a directory\. .*CACHE_DIR"):
        tuning.read(CPU)
    with env.override(cache_dir=Path(__file__) / "below a file"):
        assert tuning.read(CPU) == {}  # who makes the folder will tell


def test_choices_in_words() -> None:
    assert str(Choices(8)) == "GEMM from 8 tokens an expert"
    assert str(Choices(NEVER)) == "tiles always"
