"""How much memory this process uses, and how much more it can have: of the host or of its cgroup, whichever is less."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 where there is no limit


def resident_bytes() -> int:
    """Memory of this process now; 0 where the system doesn't tell."""
    return _field(PROC / "self/status", "VmRSS") or 0


def peak_resident_bytes() -> int | None:
    """The most memory that this process has used; null where the system doesn't tell."""
    # Not ru_maxrss on Linux: that one survives exec, so a small program started by a large one reports the large one.
    peak = _field(PROC / "self/status", "VmHWM")
    if peak is not None or sys.platform == "win32":
        return peak
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def trim() -> None:
    """Give memory that was freed back to the system, where the C library can be asked to (glibc)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int | None:
    """What can still be allocated without swapping or being killed; null where the system doesn't tell."""
    known = [room for room in (_field(PROC / "meminfo", "MemAvailable"), *_cgroup_rooms()) if room is not None]
    return max(0, min(known)) if known else None


def _field(path: Path, name: str) -> int | None:
    """A line `NAME: N kB`, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms() -> Iterator[int]:
    """Limit minus use of every cgroup that this process is in, parents included. Cached file pages count as free."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _rooms(CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms(CGROUPS / "memory", path, *names)


def _rooms(root: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> Iterator[int]:
    # In a container the path may be the host's and not be there: its own limit is then the root's.
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
            limit = int((folder / limit_name).read_text())
            if limit < _UNLIMITED:
                yield limit - int((folder / used_name).read_text()) + _cache(folder / "memory.stat", cache_name)
        if folder == root:
            return


def _cache(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name), 0)
    return 0
