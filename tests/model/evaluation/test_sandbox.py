"""Programs in the sandbox: what passes, what their limits end, and what stays inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.evaluation.sandbox import Limits, confinement, run_program

LIMITS = Limits(seconds=2.0)


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("assert sum([1, 2]) == 3", "passed"),
        ("assert sum([1, 2]) == 4", "failed"),
        ("raise SystemExit(0)", "failed"),  # it did not get to its end
        ("import os\nos._exit(0)", "died"),
        ("while True: pass", "timed out"),
        ("x = bytearray(1 << 40)", "failed"),
        ("open('x', 'wb').write(bytes(1 << 21))", "failed"),
        ("open('x', 'w').write('inside')", "passed"),
        ("import os\nassert not set(os.environ) - {'LC_CTYPE'}", "passed"),  # which Python sets
    ],
)
def test_a_program_ends_as_it_must(program: str, verdict: str) -> None:
    assert run_program(program, LIMITS).verdict == verdict


@pytest.mark.skipif("landlock" not in confinement(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("fork", ["", "import os\nif os.fork(): os._exit(0)\n"])
def test_no_file_outside_is_touched(fork: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    for deed in (
        f"open({str(tmp_path / 'made')!r}, 'w')",
        f"open({str(kept)!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
    ):
        assert not run_program(fork + deed, LIMITS).passed
    assert kept.read_text() == "here" and list(tmp_path.iterdir()) == [kept]


@pytest.mark.skipif("namespaces" not in confinement(), reason="this kernel grants no namespaces")
def test_no_network_is_there() -> None:
    program = "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']"
    assert run_program(program, LIMITS).verdict == "passed"
