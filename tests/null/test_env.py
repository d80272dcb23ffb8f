"""The PYKERNELS_* flags: types, bad values, scope of an override."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pykernels.env import KERNELS, Env
from pykernels.errors import PykernelsError
from pykernels.registry import kernels


@pytest.fixture
def environ() -> dict[str, str]:
    return {}


@pytest.fixture
def flags(environ: dict[str, str]) -> Env:
    return Env(environ)


def test_defaults(flags: Env) -> None:
    assert flags.cache_dir == Path.home() / ".cache/pykernels"
    assert flags.kernel == "auto"
    assert flags.isa == frozenset()
    assert flags.threads is None
    assert flags.spin_us is None
    assert flags.hugepages is True
    flags.check()


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("cache_dir", "~/x", Path.home() / "x"),
        ("cache_dir", "/tmp/x", Path("/tmp/x")),
        ("kernel", "generic", "generic"),
        ("isa", "-avx512bf16,-gfni", frozenset({"avx512bf16", "gfni"})),
        ("isa", " -AVX2 , ", frozenset({"avx2"})),
        ("threads", "3", 3),
        ("threads", "", None),
        ("spin_us", "", None),
        ("spin_us", "0", 0.0),
        ("spin_us", "12.5", 12.5),
        ("spin_us", "3.6e9", 3.6e9),
        ("hugepages", "0", False),
    ],
)
def test_environment_is_typed_and_read_live(
    flags: Env, environ: dict[str, str], attribute: str, text: str, value: object
) -> None:
    before = getattr(flags, attribute)
    environ[f"PYKERNELS_{attribute.upper()}"] = text
    assert getattr(flags, attribute) == value
    assert type(getattr(flags, attribute)) is type(value)
    del environ[f"PYKERNELS_{attribute.upper()}"]
    assert getattr(flags, attribute) == before


BAD = [
    ("cache_dir", "", "no path"),
    ("cache_dir", " ", "empty path"),
    ("cache_dir", "~nouser/x", "a home that nobody has"),
    ("kernel", "amx512", "unknown kernel"),
    ("isa", "gfni", "feature without its minus"),
    ("isa", "-avx2,-", "a minus alone"),
    ("threads", "0", "no thread"),
    ("threads", "two", "no number"),
    ("spin_us", "-1", "negative"),
    ("spin_us", "nan", "not a number"),
    ("spin_us", "inf", "never sleeps"),
    ("spin_us", "3.7e9", "above an hour"),
    ("spin_us", "1e30", "more than a clock holds"),
    ("hugepages", "yes", "no switch"),
]


@pytest.mark.parametrize(("attribute", "text", "why"), BAD, ids=[row[2] for row in BAD])
def test_bad_value_is_one_line_with_cause_and_hint(
    flags: Env, environ: dict[str, str], attribute: str, text: str, why: str
) -> None:
    environ[f"PYKERNELS_{attribute.upper()}"] = text
    with pytest.raises(PykernelsError) as caught:
        getattr(flags, attribute)
    message = str(caught.value)
    assert f"PYKERNELS_{attribute.upper()}={text!r}" in message
    assert "\n" not in message
    with pytest.raises(PykernelsError):
        flags.check()
    assert text in [row.value for row in flags.table()]  # doctor shows it all the same


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("threads", "it is no whole number"),
        ("fake_numa", "it is no whole number"),
        ("spin_us", "it is no number"),
    ],
)
def test_a_word_for_a_number_is_told_in_words(
    flags: Env, environ: dict[str, str], attribute: str, words: str
) -> None:
    environ[f"PYKERNELS_{attribute.upper()}"] = "zero"
    with pytest.raises(PykernelsError, match=f"='zero' cannot be used: {words}. Set it"):
        getattr(flags, attribute)


def test_override_wins_nests_and_ends(flags: Env, environ: dict[str, str]) -> None:
    environ["PYKERNELS_KERNEL"] = "avx512"
    with flags.override(kernel="generic", threads=2) as same:
        assert same is flags
        assert (flags.kernel, flags.threads) == ("generic", 2)
        with flags.override(kernel="auto", hugepages=False, isa={"gfni"}):
            assert (flags.kernel, flags.threads) == ("auto", 2)
            assert (flags.hugepages, flags.isa) == (False, frozenset({"gfni"}))
        assert (flags.kernel, flags.hugepages) == ("generic", True)
        with flags.override(threads=None):
            assert flags.threads is None
        assert flags.threads == 2
    assert (flags.kernel, flags.threads) == ("avx512", None)


def test_an_override_with_nothing_wins_over_the_environment(
    flags: Env, environ: dict[str, str]
) -> None:
    environ["PYKERNELS_THREADS"] = "3"
    with flags.override(threads=None):
        assert flags.threads is None
    assert flags.threads == 3


def test_overrides_of_two_threads_end_in_any_order(flags: Env) -> None:
    """As blocks of two threads may lie: the first ends while the second still runs."""
    first, second = flags.override(kernel="generic"), flags.override(threads=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (flags.kernel, flags.threads) == ("auto", 2)
    second.__exit__(None, None, None)
    assert flags.threads is None


def test_features_may_be_named_with_their_minus(flags: Env) -> None:
    with flags.override(isa=["-gfni", "avx2"]):
        assert flags.isa == {"gfni", "avx2"}


def test_override_ends_when_its_block_raises(flags: Env) -> None:
    with pytest.raises(ZeroDivisionError), flags.override(spin_us=0):
        raise ZeroDivisionError
    assert flags.spin_us is None


def test_override_is_seen_by_other_threads(flags: Env) -> None:
    seen: list[str] = []
    with flags.override(kernel="generic"):
        thread = threading.Thread(target=lambda: seen.append(flags.kernel))
        thread.start()
        thread.join()
    assert seen == ["generic"]


def test_bad_override_sets_nothing(flags: Env) -> None:
    with pytest.raises(PykernelsError, match="PYKERNELS_THREADS"):
        with flags.override(kernel="generic", threads=0):
            pass
    with pytest.raises(PykernelsError, match="no flag 'kernels'"):
        with flags.override(kernels="generic"):
            pass
    assert flags.kernel == "auto"


def test_a_flag_cannot_be_assigned(flags: Env) -> None:
    with pytest.raises(AttributeError, match="override"):
        flags.kernel = "generic"  # type: ignore[assignment]
    assert flags.kernel == "auto"


def test_table_documents_every_flag(flags: Env) -> None:
    rows = flags.table()
    assert [row.name for row in rows] == [flag.name for flag in Env.flags()]
    assert all(row.doc.endswith(".") and len(row.doc) < 80 for row in rows)
    assert {row.name for row in rows} >= {"PYKERNELS_CACHE_DIR", "PYKERNELS_SPIN_US"}


def test_the_names_of_kernels_are_those_of_the_registry() -> None:
    assert KERNELS == ("auto", *(backend.name for backend in kernels()))
