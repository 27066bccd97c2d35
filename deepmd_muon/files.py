"""Write files atomically, never through a symlink or over an input; read regular files only.

Every error of writing is a `WriteError`, which names the file that was to be written, not a
temporary one.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Files of a system of data, besides those in its sets.
_SYSTEM_FILES = frozenset({"type.raw", "type_map.raw", "nopbc", "data.mdb"})


class WriteError(OSError):
    """A file cannot be written, for instance on a full disk.

    Arguments are errno, its text and the path.
    """

    #: Exit status of a command that ends with this error.
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
    """A file under a temporary name that keeps its first error.

    A library may raise another one: torch.save raises a RuntimeError about positions when the disk
    is full.
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
    """Make the folder of `path`, if there is none.

    Errors name `path`, or `named`, the final path of the file.
    """
    with writing(named or path):
        path.parent.mkdir(parents=True, exist_ok=True)


def try_to_write(folder: Path) -> None:
    """Make a file in a folder and remove it, to check that the folder is writable."""
    with writing(folder):
        temporary = hidden_name(folder / "try")
        os.close(os.open(temporary, _NEW, 0o666))
        temporary.unlink()


@contextmanager
def whole_file(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; rename it to `path` at the end of the `with` block.

    It is synced to the disk before, so a reader finds the old file or the new one, never a part,
    even after a power cut. After an exception the old file is unchanged. A link is replaced, not
    followed; a device or FIFO is refused. With `new`, fail at the end if `path` exists, so that no
    other process's file is lost.

    Raises
    ------
    WriteError
        When any of this fails; also when a write inside the block fails and the block then raises
        another error.
    """
    with replacement(path, new=new) as temporary, named_file(temporary, path) as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; see `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def named_file(place: Path, path: Path) -> Iterator[BinaryIO]:
    """Open a file at `place` for writing, and sync it in the end.

    Errors name `path`, its final path. See `whole_file`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with writing(path):
        raw = _NamedFile(os.open(place, flags, 0o666), path)
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
def replacement(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file; rename it to `path` at the end of the `with` block.

    Use it for writers that take a path; others call `whole_file`, which syncs. The name cannot be
    guessed, and has the same ending. With `new`, fail if `path` exists.
    """
    if is_special(path):
        raise WriteError(
            errno.EINVAL, "it is a device or FIFO; give the name of a regular file", str(path)
        )
    with writing(path):
        temporary = hidden_name(path)
        os.close(os.open(temporary, _NEW, 0o666))
    try:
        yield temporary
        with writing(path):
            _publish(temporary, path, new=new)
    except BaseException:
        with suppress(OSError):  # caused by the same disk; the first error counts
            temporary.unlink(missing_ok=True)
        raise


def _publish(temporary: Path, path: Path, *, new: bool) -> None:
    """Rename a file to its final path; with `new`, fail if that exists."""
    if not new:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise
    except OSError:  # no hard links in this file system
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)
    else:
        temporary.unlink()


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder; rename it to `path` at the end of the `with` block.

    If the process is killed, `path` stays as it was, so that a part of the files cannot be mistaken
    for all. `path` must be absent or an empty folder. The writers of the files sync them.

    Raises
    ------
    WriteError
        When the folder cannot be made or renamed.
    """
    final = Path(os.path.realpath(path))
    with writing(path):
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = hidden_name(final)
        aside.mkdir()
    try:
        yield aside
        with writing(path):
            os.replace(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # errors have the same cause; the first one counts
        raise


@contextmanager
def working_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Work in a folder, as `contextlib.chdir` of Python 3.11 does."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def fresh_file(path: Path, content: bytes = b"") -> BinaryIO:
    """Return a new file at `path` that begins with `content`, open for appending.

    The old file stays until the new one holds `content`. Links and devices are handled as by
    `whole_file`.
    """
    with whole_file(path) as file:
        file.write(content)
    return append_to(path)


def append_to(path: Path) -> BinaryIO:
    """Open a file from `fresh_file` for appending; fail if it has been replaced by a link."""
    with writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        return io.BufferedWriter(_NamedFile(handle, path))


def replace_link(link: Path, target: str) -> None:
    """Point a symbolic link at a file in the same folder; the link exists at all times."""
    temporary = hidden_name(link)
    with writing(link):
        temporary.symlink_to(target)  # fails if the name is taken
        try:
            os.replace(temporary, link)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def hidden_name(path: Path) -> Path:
    """Return a path beside `path` that cannot be guessed: ``.name.<random>`` before the ending."""
    if not path.name:  # "." or "/"
        raise WriteError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")


def is_special(path: Path) -> bool:
    """Return whether a path is a device, FIFO or similar."""
    parent = os.path.realpath(path.parent)
    if parent == "/dev" or f"{parent}/".startswith("/proc/"):
        return True  # /dev/stdout may be a regular file that other processes append to
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; errors as in `regular_handle`."""
    return os.fdopen(regular_handle(path)[0], "rb")


def regular_handle(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; return its handle and status.

    Raises
    ------
    OSError
        When it cannot be opened or is not regular: reading a FIFO would block, and a device may
        have no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return handle, status


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


def real_folders(
    root: str, refuse: Callable[[OSError], None] | None = None
) -> list[tuple[str, list[str], list[str]]]:
    """Return the folders at or below `root`, sorted, with their folders and files.

    Cycles of links are not followed. Sets of systems (``set.000``) are not entered, and neither are
    folders with a name that begins with a dot, which killed conversions leave behind. `refuse`
    receives the error of a folder that cannot be listed; without it, such folders are skipped.
    """
    seen: set[str] = set()
    folders: list[tuple[str, list[str], list[str]]] = []
    for folder, below, files in os.walk(root, onerror=refuse, followlinks=True):
        further = sorted(name for name in below if not name.startswith(("set.", ".")))
        if seen or further:  # a root without folders to enter, such as a system, is in no circle
            real = os.path.realpath(folder)
            if real in seen:
                below.clear()
                continue
            seen.add(real)
        folders.append((folder, [*below], files))
        below[:] = further  # os.walk enters these
    return sorted(folders)


def paths_matching(pattern: str, refuse: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Yield the paths that match a pattern.

    ``**`` matches `real_folders`; at the end, only the folder before it.
    """
    names = pattern.split(os.sep)
    if "**" not in names:
        yield from glob.iglob(pattern)
        return
    position = names.index("**")
    before = os.sep.join(names[:position])
    after = os.sep.join(names[position + 1 :])
    if not before:
        before = os.curdir if position == 0 else os.sep  # "**/…" or "/**/…"
    for top in glob.glob(before):
        if not after:
            yield top  # readers search it for systems; `refuse_clashes` looks below it, too
            continue
        for folder, _, _ in real_folders(top, refuse):
            if position == 0:
                folder = os.path.normpath(folder)  # without "./"
            yield from paths_matching(os.path.join(glob.escape(folder), after), refuse)


def refuse_clashes(
    error: type[Exception],
    outputs: Mapping[str, str | os.PathLike[str] | None],
    inputs: Mapping[str, str | os.PathLike[str] | None],
    systems: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> None:
    """Refuse to write one output over another, over an input, or to a device or FIFO.

    `outputs` and `inputs` have paths by description; None is ignored. `systems` has paths or
    patterns of data by description, as `open_systems` takes them. The `error` names every output
    that is another file, too.
    """
    output_paths = {name: Path(path) for name, path in outputs.items() if path is not None}
    special = [
        f"{name} is a device or FIFO: {path}"
        for name, path in output_paths.items()
        if is_special(path)
    ]
    if special:
        raise error("; ".join(special) + ". Give the name of a regular file")
    problems = list(_twice(output_paths))
    existing = {name: path for name, path in output_paths.items() if path.exists()}
    for name, path in existing.items():
        for what, file in inputs.items():
            if file and _same(path, file):
                problems.append(f"{name} is {what}: {path}")
    if existing:
        real_paths = {name: os.path.realpath(path) for name, path in existing.items()}
        for what, paths in systems.items():
            for system in paths:
                inside = _outputs_in(system, real_paths)
                problems += [
                    f"{name} is a file of {what} {system}: {path}"
                    for name, path in existing.items()
                    if name in inside
                ]
    if problems:
        raise error(
            f"{'; '.join(problems)}. Give the output another name, so that it overwrites no other "
            "file"
        )


def _twice(places: Mapping[str, Path]) -> Iterator[str]:
    """Yield a problem for every output with the path of an earlier one."""
    seen: dict[str, str] = {}
    for name, path in places.items():
        earlier = seen.setdefault(os.path.realpath(path), name)
        if earlier != name:
            yield f"{name} is {earlier}: {path}"


def _same(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def _outputs_in(system: str, outputs: Mapping[str, str]) -> set[str]:
    """Return the names of the outputs that are files of a system.

    `system` is a path or pattern as for `open_systems`; `outputs` has real paths by name.
    """
    if not os.path.exists(system):
        system = system.partition("#")[0]  # without the group in an HDF5 file
    names = set()
    for place in [system] if os.path.exists(system) else paths_matching(system):
        folder = os.path.realpath(place)
        for name, path in outputs.items():
            if _same(path, place) or _belongs_to_system(path, folder):
                names.add(name)
    return names


def _belongs_to_system(path: str, folder: str) -> bool:
    """Return whether a path below a folder is a file of a system there."""
    if not os.path.isdir(folder) or not path.startswith(f"{folder}{os.sep}"):
        return False
    *folders, name = Path(path).relative_to(folder).parts
    return name in _SYSTEM_FILES or any(parent.startswith("set.") for parent in folders)
