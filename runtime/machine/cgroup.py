"""What the cgroups, v1 and v2, grant this process: processor time and memory.

A limit of any ancestor counts too, so each look walks from the process's own cgroup up to the root
of the hierarchy that is mounted here. Where that lies is in ``/proc/self/mountinfo`` and
``/proc/self/cgroup`` (man 7 cgroups, man 5 proc): in a container the mount may begin at the
container's own cgroup while the path still names the host's, or the other way round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NO_LIMIT = 1 << 60
"""Bytes from which v1's "unlimited" (2**63 rounded down to pages) is none."""


@dataclass(frozen=True)
class MemoryLimit:
    """One cgroup's limit.

    Attributes:
        limit: bytes.
        free: of them, not used or page cache that is given up under pressure.
    """

    limit: int
    free: int


def cpu_quota(root: Path = Path("/")) -> float:
    """CPUs' worth of time that this process may use, infinity if nothing limits it.

    Args:
        root: where ``proc`` and ``sys`` lie; another one for tests.
    """
    quota = math.inf
    for folder in _chain(root, "cpu"):
        if text := read(folder / "cpu.max"):  # v2: "200000 100000" or "max 100000"
            granted, period = text.split()
        else:
            granted = read(folder / "cpu.cfs_quota_us") or "max"
            period = read(folder / "cpu.cfs_period_us") or "100000"
        if granted != "max" and int(granted) > 0:
            quota = min(quota, int(granted) / int(period))
    return quota


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits that hold for this process, its own cgroup's first."""
    limits = []
    for folder in _chain(root, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = read(folder / limit_file), read(folder / used_file)
            if limit and used and limit != "max" and int(limit) < NO_LIMIT:
                free = int(limit) - int(used) + _reclaimable(folder)
                limits.append(MemoryLimit(int(limit), max(0, min(int(limit), free))))
    return limits


def read(path: Path) -> str | None:
    """The file's text without its last newline; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _reclaimable(folder: Path) -> int:
    """Page cache that the cgroup is charged for and gives up under pressure: its children's too,
    which in v1 only the line "total_" counts."""
    stat = read(folder / "memory.stat") or ""
    matches = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return max(map(int, matches), default=0)


def _chain(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroups for a controller, v1's and v2's, innermost first."""
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        v2 = number == "0" and not controllers
        if not v2 and controller not in controllers.split(","):
            continue
        for mount_root, mount_point in _mounts(root, "cgroup2" if v2 else "cgroup", controller):
            inside = PurePosixPath(path)
            if inside.is_relative_to(mount_root) and ".." not in inside.parts:
                inside = inside.relative_to(mount_root)
            else:  # a path of another namespace: the mount's root is all there is to see
                inside = PurePosixPath()
            top = root / mount_point.relative_to("/")
            for step in (inside, *inside.parents):
                yield top / step
            break


def _mounts(root: Path, kind: str, controller: str) -> Iterator[tuple[PurePosixPath, Path]]:
    """(cgroup that is the mount's root, mount point) of the hierarchies of one kind."""
    for line in (read(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        # By single spaces: the source in the middle may be empty.
        fields, (fstype, _, options) = left.split(" "), right.split(" ", 2)
        if fstype == kind and (kind == "cgroup2" or controller in options.split(",")):
            yield PurePosixPath(fields[3]), Path(fields[4])
