"""Opening files: written in one piece, never through a link that someone has put there; read if they are files."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing beside `path` and put it in its place at the end of the `with` block.

    It is synced to the disk before that, so a reader (or a machine that comes up after a power cut) finds the old
    file or the new one, never a part. After an exception the old file is untouched. A link is replaced, not followed;
    a device, FIFO or terminal is written to and stays.
    """
    if is_special(path):
        with append_to(path) as special:
            yield special
        return
    with replacement(path) as temporary, temporary.open("r+b") as file:
        yield file


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path` that takes its place at the end of the `with` block.

    For writers that take a name; everybody else calls `whole_file`. The name cannot be guessed and keeps the ending.
    """
    temporary = hidden_name(path)
    os.close(os.open(temporary, _NEW, 0o666))
    try:
        yield temporary
        handle = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fresh_file(path: Path, content: bytes = b"") -> BinaryIO:
    """Return a new file at `path` that begins with `content`, open for what is written as it comes.

    The old file stays until the new one holds `content`. Links and devices are treated as by `whole_file`.
    """
    if not is_special(path):
        with whole_file(path) as whole:
            whole.write(content)
        return append_to(path)
    file = append_to(path)
    file.write(content)
    return file


def append_to(path: Path) -> BinaryIO:
    """Open for appending what `fresh_file` has made, unless someone has put a link there since."""
    flags = os.O_WRONLY if is_special(path) else os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags | os.O_CLOEXEC), "wb")


def replace_link(link: Path, target: str) -> None:
    """Point a symbolic link at a file in the same folder, without a moment in which there is none."""
    temporary = hidden_name(link)
    temporary.symlink_to(target)  # fails if the name is taken
    try:
        os.replace(temporary, link)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def hidden_name(path: Path) -> Path:
    """Return a name beside `path` that nobody can guess: ``.name.<random>`` before the ending."""
    return path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")


def is_special(path: Path) -> bool:
    """Return whether a path is a device, FIFO or the like, which is written to and never replaced."""
    parent = os.path.realpath(path.parent)
    if parent == "/dev" or f"{parent}/".startswith("/proc/"):
        return True  # even where /dev/stdout is a regular file: others append to it
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading.

    Raises
    ------
    OSError
        When it cannot be opened or is something else: a FIFO would keep its reader waiting, a device may have no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(handle, "rb")
