"""Name a process of a machine, and learn whether it has ended, without being its parent."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal, NamedTuple


def identify(pid: int) -> str:
    """Return a name that no other process of any machine has; empty without Linux's /proc."""
    try:
        return f"{_machine()} {pid} {_read_stat(pid).start}"
    except OSError:
        return ""


def life_of(identity: str) -> Literal["alive", "ended", "unknown"]:
    """Return whether the process that `identify` has named runs; unknown on other machines.

    A process that has ended, but whose parent has not asked for its status, has ended.
    """
    if not identity:
        return "unknown"
    machine, pid, start = identity.split()
    try:
        if machine != _machine():
            return "unknown"
        stat = _read_stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    except OSError:
        return "unknown"
    # Another process may have got the number.
    return "ended" if stat.state in "ZX" or stat.start != start else "alive"


@functools.cache
def _machine() -> str:
    """Name this machine's run of its system and, for containers, the space of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class _Stat(NamedTuple):
    state: str
    start: str  # clock ticks after the boot


def _read_stat(pid: int) -> _Stat:
    # The second of the 52 fields is the command in brackets, which may contain any character.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return _Stat(state=fields[0], start=fields[19])
