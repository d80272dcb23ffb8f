"""What this machine can do: features and caches, as they are detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.target import cache_sizes, detect


def test_hidden_features_are_not_detected():
    assert detect().vendor in Path("/proc/cpuinfo").read_text()
    for name in detect().isa:
        with env.override(isa=frozenset({name})):
            assert name not in detect().isa
    with env.override(isa="-avx512_bf16"):  # as /proc/cpuinfo spells it
        with pytest.raises(PykernelsError, match="hides 'avx512_bf16'.*Hide some of .*avx512bf16"):
            detect()


def test_every_cache_of_a_level_is_counted_once(tmp_path):
    """Four cores: two last-level caches of two each; instructions have their own first level."""
    for core in range(4):
        caches = (1, "Data", "48K", core), (1, "Instruction", "32K", core)
        for i, (level, kind, size, shared) in enumerate(
            (*caches, (3, "Unified", "96M", core // 2))
        ):
            index = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{i}"
            index.mkdir(parents=True)
            for name, text in (("level", level), ("type", kind), ("size", size)):
                (index / name).write_text(f"{text}\n")
            (index / "shared_cpu_list").write_text(f"{shared}\n")
    assert cache_sizes(1, tmp_path, [0, 2]) == [48 << 10] * 2
    assert cache_sizes(3, tmp_path, range(4)) == [96 << 20] * 2
    assert cache_sizes(2, tmp_path, range(4)) == []
    for core in (2, 3):  # some virtual machines do not say
        (tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index2/size").write_text("\n")
    assert cache_sizes(3, tmp_path, range(4)) == [96 << 20]
