"""Frames of an XYZ file: ASE ends at an empty line and drops columns without a name."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from deepmd_muon.data.errors import SystemFormatError

if TYPE_CHECKING:
    from ase import Atoms

# Digits of a number of atoms.
_MOST_DIGITS = 12
# Names, kinds and widths of the columns: Properties=species:S:1:pos:R:3:forces:R:3
_PROPERTIES = re.compile(rb'(?<!\S)Properties=(?:"([^"]*)"|(\S+))')
_DEFAULT_PROPERTIES = b"species:S:1:pos:R:3"
_MOST_SHOWN = 40


def read_xyz_frames(path: str, form: str) -> list[Atoms]:
    """Read all frames of an XYZ file, `form` "xyz" or "extxyz", and skip empty lines between them.

    Raises
    ------
    SystemFormatError
        When a frame has more atoms than the file holds, something else than a count begins a
        frame, or a row has more columns than its frame names.
    """
    from ase.io import read
    from ase.io.formats import open_with_compression

    with open_with_compression(path, "rb") as file:
        lines = _Lines(file, path)
        for _ in lines.of_frames():  # the whole file is checked before ASE takes memory for atoms
            pass
        if not lines.skipped:
            # Otherwise ASE takes the text after an "@" for numbers of frames of the file before it.
            return list(read(path, index=":", format=form, do_not_split_by_at_sign=True))
        file.seek(0)
        text = b"".join(_Lines(file, path).of_frames()).decode("utf-8")
    return list(read(io.StringIO(text), index=":", format=form))


class _Lines:
    """The lines of an XYZ file, with the number of the present one for messages."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path
        self._number = 0
        self._frame = 0
        self.skipped = 0  # empty lines before a frame

    def of_frames(self) -> Iterator[bytes]:
        """Yield the lines of all frames, without empty lines between them."""
        empty = 0
        vectors_may_follow = False
        while line := self._next():
            if not line.strip():
                empty += 1
                continue
            if vectors_may_follow and line.lstrip().startswith(b"VEC"):
                yield line  # a vector of the cell
                continue
            natoms = self._count(line)
            self.skipped += empty
            empty = 0
            yield line
            yield from self._rest_of_frame(natoms)
            vectors_may_follow = True
            self._frame += 1

    def _rest_of_frame(self, natoms: int) -> Iterator[bytes]:
        comment = self._next()
        ncolumns, properties = _columns(comment)
        yield comment
        for _ in range(natoms):
            row = self._next()
            if not row:
                raise self._error(
                    f"a frame has {natoms} atoms by its first line, more than the file holds"
                )
            if ncolumns and len(row.split()) > ncolumns:
                raise self._error(
                    f"{len(row.split())} columns, but the second line of the frame names "
                    f"{ncolumns} ({properties}); name all, for instance "
                    f'"Properties={properties}:forces:R:3"'
                )
            yield row

    def _count(self, line: bytes) -> int:
        text = line.strip()
        if not text.isdigit() or len(text) > _MOST_DIGITS:
            beginning = text[:_MOST_SHOWN].decode("utf-8", "replace")
            raise self._error(f"expected the number of atoms of a frame, found {beginning!r}")
        return int(text)

    def _next(self) -> bytes:
        self._number += 1
        return self._file.readline()

    def _error(self, problem: str) -> SystemFormatError:
        return SystemFormatError(
            self._path, f"frame {self._frame}", f"line {self._number}: {problem}"
        )


def _columns(comment: bytes) -> tuple[int, str]:
    """Return the number of columns that a second line names, 0 if ASE has to judge, and names."""
    match = _PROPERTIES.search(comment)
    if match is None and b"Properties" in comment:
        return 0, ""
    properties = _DEFAULT_PROPERTIES if match is None else match[1] or match[2]
    widths = properties.split(b":")[2::3]
    if not all(width.isdigit() for width in widths):
        return 0, ""
    return sum(map(int, widths)), properties.decode("utf-8", "replace")
