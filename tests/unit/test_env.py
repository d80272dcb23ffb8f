"""The PYKERNELS_* flags: types, bad values, scope of an override."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest

from pykernels.env import Env, check_temporary_folder
from pykernels.errors import PykernelsError


@pytest.fixture
def environ() -> dict[str, str]:
    return {}


@pytest.fixture
def flags(environ: dict[str, str]) -> Env:
    return Env(environ)


def test_defaults(flags: Env) -> None:
    assert flags.cache_dir == Path.home() / ".cache/pykernels"
    assert (flags.kernel, flags.isa, flags.hugepages) == ("auto", frozenset(), True)
    assert flags.threads is None and flags.spin_us is None
    flags.check()


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("cache_dir", "~/x", Path.home() / "x"),
        ("kernel", "generic", "generic"),
        ("isa", "-avx512bf16,-gfni", frozenset({"avx512bf16", "gfni"})),
        ("isa", " -AVX2 , ", frozenset({"avx2"})),
        ("threads", "3", 3),
        ("threads", "", None),
        ("spin_us", "12.5", 12.5),
        ("hugepages", "0", False),
    ],
)
def test_the_environment_is_typed_and_read_live(
    flags: Env, environ: dict[str, str], attribute: str, text: str, value: object
) -> None:
    before = getattr(flags, attribute)
    environ[f"PYKERNELS_{attribute.upper()}"] = text
    assert getattr(flags, attribute) == value
    assert type(getattr(flags, attribute)) is type(value)
    del environ[f"PYKERNELS_{attribute.upper()}"]
    assert getattr(flags, attribute) == before


def test_a_misspelt_variable_is_a_warning_that_names_the_flag(flags, environ) -> None:
    environ["PYKERNELS_THREAD"] = "4"
    with pytest.warns(UserWarning, match="^PYKERNELS_THREAD is no flag.*PYKERNELS_THREADS is one$"):
        flags.check()


BAD = [
    ("cache_dir", " ", "it is empty"),
    ("cache_dir", "~nouser/x", "home of a user who has none here"),
    ("kernel", "", "it is empty"),
    ("isa", "gfni", "does not start with '-'"),
    ("threads", "0", "it is below 1"),
    ("threads", "two", "it is no whole number"),
    ("spin_us", "zero", "it is no number"),
    ("spin_us", "-1", "negative, no number or above an hour"),
    ("hugepages", "yes", "neither 0 nor 1"),
]


@pytest.mark.parametrize(("attribute", "text", "why"), BAD)
def test_a_bad_value_is_one_line(
    flags: Env, environ: dict[str, str], attribute: str, text: str, why: str
) -> None:
    environ[f"PYKERNELS_{attribute.upper()}"] = text
    for read in (lambda: getattr(flags, attribute), flags.check):
        with pytest.raises(PykernelsError) as caught:
            read()
        message = str(caught.value)
        assert f"PYKERNELS_{attribute.upper()}={text!r} cannot be used: " in message
        assert why in message and "\n" not in message
    assert text in [row.value for row in flags.table()]  # doctor shows it all the same


def test_override_wins_nests_and_ends(flags: Env, environ: dict[str, str]) -> None:
    environ["PYKERNELS_KERNEL"] = "avx512"
    with flags.override(kernel="generic", threads=2) as same:
        assert same is flags
        assert (flags.kernel, flags.threads) == ("generic", 2)
        with flags.override(kernel="auto", hugepages=False, isa=["-gfni", "avx2"]):
            assert (flags.kernel, flags.threads) == ("auto", 2)
            assert (flags.hugepages, flags.isa) == (False, frozenset({"gfni", "avx2"}))
        assert (flags.kernel, flags.hugepages) == ("generic", True)
        with flags.override(threads=None):
            assert flags.threads is None
        assert flags.threads == 2
    assert (flags.kernel, flags.threads) == ("avx512", None)


def test_overrides_of_two_threads_end_in_any_order(flags: Env) -> None:
    """As blocks of two threads may lie: the first ends while the second still runs."""
    first, second = flags.override(kernel="generic"), flags.override(threads=2)
    first.__enter__()
    second.__enter__()
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(flags.kernel))
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert seen == ["generic"] and (flags.kernel, flags.threads) == ("auto", 2)
    second.__exit__(None, None, None)
    assert flags.threads is None


def test_a_bad_override_sets_nothing(flags: Env) -> None:
    with pytest.raises(PykernelsError, match="PYKERNELS_THREADS"):
        with flags.override(kernel="generic", threads=0):
            pass
    with pytest.raises(PykernelsError, match="no flag 'kernels'"):
        with flags.override(kernels="generic"):
            pass
    with pytest.raises(AttributeError, match="override"):
        flags.kernel = "generic"  # type: ignore[assignment]
    assert flags.kernel == "auto"


def test_without_a_temporary_folder_the_reason_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file lies where each folder would be: nobody, root neither, can write into it."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", None)
    candidates = lambda: [str(tmp_path / "file")]  # noqa: E731
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", candidates)
    with pytest.raises(PykernelsError, match="temporary files"):
        check_temporary_folder()
