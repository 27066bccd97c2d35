"""Write files atomically, never through a symlink or over an input. Read regular files only. Enter each folder once.

Every error of writing is a `WriteError`, which names the file that was to be written, not a temporary one.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Files of a system of data beside its sets.
_OF_SYSTEM = frozenset({"type.raw", "type_map.raw", "nopbc", "data.mdb"})
#: Seconds that a FIFO may take to find a reader.
FIFO_PATIENCE = 10.0


class WriteError(OSError):
    """A file that cannot be written, such as on a full disk; made of errno, its text and the path."""

    #: Of a command that ends with it.
    exit_status: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the system in a `with` block into a `WriteError` that names `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


class _NamedFile(io.FileIO):
    """A file under a temporary name that remembers its first error, whatever a library makes of it.

    torch.save, for one, answers a full disk with a RuntimeError about positions.
    """

    failure: WriteError | None = None

    def __init__(self, handle: int, path: Path) -> None:
        super().__init__(handle, "wb")
        self._path = path

    def write(self, data: Any) -> int:
        """Write some bytes."""
        try:
            with writing(self._path):
                return super().write(data)
        except WriteError as error:
            self.failure = self.failure or error
            raise


def make_folder_of(path: Path, named: Path | None = None) -> None:
    """Make the folder that a file will be in, if there is none; errors name `path`, or `named`, where it will be."""
    with writing(named or path):
        path.parent.mkdir(parents=True, exist_ok=True)


def try_to_write(folder: Path) -> None:
    """Make a file in a folder and remove it, to find out whether that is possible."""
    with writing(folder):
        temporary = hidden_name(folder / "try")
        os.close(os.open(temporary, _NEW, 0o666))
        temporary.unlink()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing beside `path` and put it in its place at the end of the `with` block.

    It is synced to the disk before that, so a reader (or a machine that comes up after a power cut) finds the old
    file or the new one, never a part. After an exception the old file is untouched. A link is replaced, not followed;
    a device, FIFO or terminal is written to and stays.

    Raises
    ------
    WriteError
        When some part of this fails; also when the block ends with another error after it could not write.
    """
    if is_special(path):
        with append_to(path) as special:
            yield special
        return
    with replacement(path) as temporary, named_file(temporary, path) as file:
        yield file


@contextmanager
def named_file(place: Path, path: Path) -> Iterator[BinaryIO]:
    """Open a file at `place` for writing, synced in the end, whose errors name `path`, where it will be.

    See `whole_file`.
    """
    with writing(path):
        raw = _NamedFile(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), path)
    try:
        with io.BufferedWriter(raw) as file:
            yield file
            if not file.closed:
                with writing(path):
                    file.flush()
                    os.fsync(file.fileno())
    except Exception as error:
        if raw.failure is not None and raw.failure is not error:
            raise raw.failure from error
        nameless = isinstance(error, OSError) and error.filename is None
        with writing(path) if nameless else nullcontext():
            raise


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path` that takes its place at the end of the `with` block.

    For writers that take a name; everybody else calls `whole_file`, which syncs. The name cannot be guessed and keeps
    the ending.
    """
    temporary = hidden_name(path)
    with writing(path):
        handle = os.open(temporary, _NEW, 0o666)
    try:
        with writing(path):
            os.close(handle)
        yield temporary
        with writing(path):
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # of the same disk; the first error counts
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` that takes its place at the end of the `with` block.

    A run that is killed leaves nothing at `path`, where half of the files could be taken for all. `path` must be absent
    or an empty folder; files are synced by their writers.

    Raises
    ------
    WriteError
        When the folder cannot be made or put in its place.
    """
    final = Path(os.path.realpath(path))
    aside = hidden_name(final)
    with writing(path):
        aside.mkdir(parents=True)
    try:
        yield aside
        with writing(path):
            os.replace(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # of the same disk; the first error counts
        raise


def fresh_file(path: Path, content: bytes = b"") -> BinaryIO:
    """Return a new file at `path` that begins with `content`, open for appending.

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
    special = is_special(path)
    flags = os.O_WRONLY | os.O_NONBLOCK if special else os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
    with writing(path):
        handle = _open_patiently(path, flags | os.O_CLOEXEC)
        if special:
            os.set_blocking(handle, True)
        return io.BufferedWriter(_NamedFile(handle, path))


def _open_patiently(path: Path, flags: int) -> int:
    """Open a file; of a FIFO, wait for its reader, which may just be starting, but not for ever as the system would."""
    last = time.monotonic() + FIFO_PATIENCE
    while True:
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(path.stat().st_mode):
                raise
            if time.monotonic() > last:
                raise OSError(errno.ENXIO, "it is a FIFO that nobody reads", str(path)) from error
        time.sleep(0.02)


def replace_link(link: Path, target: str) -> None:
    """Point a symbolic link at a file in the same folder, without a moment in which there is none."""
    temporary = hidden_name(link)
    with writing(link):
        temporary.symlink_to(target)  # fails if the name is taken
        try:
            os.replace(temporary, link)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def hidden_name(path: Path) -> Path:
    """Return a name beside `path` that nobody can guess: ``.name.<random>`` before the ending."""
    if not path.name:  # "." or "/"
        raise WriteError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")


def leftovers_of(path: Path) -> list[Path]:
    """Return the temporary files of `path` that lie beside it: of processes that write it, or were killed."""
    own = re.compile(rf"\.{re.escape(path.stem)}\.[0-9a-f]{{16}}{re.escape(path.suffix)}")
    return [found for found in path.parent.iterdir() if own.fullmatch(found.name)] if path.parent.is_dir() else []


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


def regular_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file.

    Raises
    ------
    OSError
        When it cannot be read, is not a regular file, or is not UTF-8.
    """
    with open_regular(path) as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise OSError(
                errno.EINVAL, f"no text in UTF-8 ({error.reason} at byte {error.start})", str(path)
            ) from error


def real_folders(root: str, refuse: Callable[[OSError], None] | None = None) -> list[tuple[str, list[str]]]:
    """Return the folders at or below one, sorted, with their files; circles of links are not followed.

    Sets of systems (``set.000``) and folders whose names begin with a dot are left out: conversions that were killed
    leave some of these. `refuse` takes the error of a folder that cannot be listed; without it, that folder is passed
    over.
    """
    seen: set[str] = set()
    found: list[tuple[str, list[str]]] = []
    for folder, below, files in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith(("set.", ".")))
        found.append((folder, files))
    return sorted(found)


def paths_matching(pattern: str, refuse: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Yield the paths that fit a pattern; ``**`` crosses `real_folders`, and at its end stands for the top alone."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    place = parts.index("**")
    rest = os.sep.join(parts[place + 1 :])
    for top in glob.glob(os.sep.join(parts[:place]) or (os.sep if parts[0] == "" and place else os.curdir)):
        if not rest:
            yield top  # readers search it for systems, and a clash below it counts
            continue
        for folder, _ in real_folders(top, refuse):
            folder = os.path.normpath(folder) if place == 0 else folder
            yield from paths_matching(os.path.join(glob.escape(folder), rest), refuse)


def refuse_clashes(
    error: type[Exception],
    outputs: Mapping[str, str | os.PathLike[str] | None],
    inputs: Mapping[str, str | os.PathLike[str] | None],
    systems: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> None:
    """Refuse to write one output over another, or over something that is read.

    Outputs and inputs come by what they are; None does not count, nor do devices among outputs. `systems` are paths or
    patterns of data, as `open_systems` takes them. The `error` names every output that is something else as well.
    """
    places = {name: Path(path) for name, path in outputs.items() if path is not None and not is_special(Path(path))}
    problems = list(_twice(places))
    existing = {name: path for name, path in places.items() if path.exists()}
    for name, path in existing.items():
        problems += [f"{name} is {what}: {path}" for what, file in inputs.items() if file and _same(path, file)]
    real = {name: os.path.realpath(path) for name, path in existing.items()}
    for what, paths in systems.items():
        for system in paths if existing else ():
            found = _outputs_in(system, real)
            problems += [f"{name} is a file of {what} {system}: {places[name]}" for name in real if name in found]
    if problems:
        raise error("; ".join(problems) + ". Give the output another name: it would be overwritten")


def _twice(places: Mapping[str, Path]) -> Iterator[str]:
    """Yield a problem for every output that is an earlier one, too."""
    seen: dict[str, str] = {}
    for name, path in places.items():
        other = seen.setdefault(os.path.realpath(path), name)
        if other != name:
            yield f"{name} is {other}: {path}"


def _same(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def _outputs_in(system: str, outputs: Mapping[str, str]) -> set[str]:
    """Return the outputs, by name with their real paths, that are files of a system, as `open_systems` takes it."""
    system = system if os.path.exists(system) else system.partition("#")[0]
    found = set()
    for place in [system] if os.path.exists(system) else paths_matching(system):
        folder = os.path.realpath(place)
        within = f"{folder}{os.sep}" if os.path.isdir(folder) else None
        for name, path in outputs.items():
            if within is None or not path.startswith(within):
                inside = False
            else:
                parts = Path(path).relative_to(folder).parts
                inside = parts[-1] in _OF_SYSTEM or any(part.startswith("set.") for part in parts[:-1])
            if inside or _same(path, place):
                found.add(name)
    return found
