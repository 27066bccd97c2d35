"""Name a process of a machine, and learn whether it has ended, without being its parent."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal, NamedTuple


def identify(pid: int) -> str:
    """Return a name that no other process of any machine has.

    It is empty without Linux's /proc, or if that shows the processes of another container.
    """
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
    except OSError:  # this machine has no name; the process is on another one
        return "unknown"
    try:
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
    if os.readlink("/proc/self") != str(os.getpid()):
        # A container may number its processes itself, and still have the /proc of its host.
        raise FileNotFoundError("/proc does not show this process by its number")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class _Stat(NamedTuple):
    state: str
    start: str  # clock ticks after the boot


def _read_stat(pid: int) -> _Stat:
    # The second of the 52 fields is the command in brackets, which may contain any character. Linux
    # cuts it after 15 bytes, so that half a character may be left.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    return _Stat(state=fields[0], start=fields[19])
