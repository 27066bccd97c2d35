"""Frames of an XYZ file: ASE ends at an empty line and drops columns without a name.

It also ignores `lattice=` and other cases of its keys, and refuses a stress of six numbers.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from deepmd_muon.data.errors import SystemFormatError

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger(__name__)

# Digits of a number of atoms.
_MOST_DIGITS = 12
# Names, kinds and widths of the columns: Properties=species:S:1:pos:R:3:forces:R:3
_PROPERTIES = re.compile(rb'(?<!\S)Properties=(?:"([^"]*)"|(\S+))')
_DEFAULT_PROPERTIES = b"species:S:1:pos:R:3"
_MOST_SHOWN = 40
_BOM = b"\xef\xbb\xbf"  # Windows' editors begin files with it
# Keys of the second line as ASE writes them; GPUMD takes them in any case.
_KEYS = {key.lower(): key for key in (b"Lattice", b"Properties", b"pbc")}
_KEY = re.compile(rb"(?i)(?<!\S)(lattice|properties|pbc)(?==)")
_TENSOR = re.compile(rb"""(?<!\S)(stress|virial)=["'{\[]([^"'}\]]*)["'}\]]""")
# Places of xx, yy, zz, yz, xz, xy (ASE's order) in a symmetric matrix.
_VOIGT = (0, 5, 4, 5, 1, 3, 4, 3, 2)
# Second lines of i-PI: "# CELL(abcABC): … positions{angstrom}  cell{atomic_unit}"
_IPI = re.compile(rb"\b(positions|forces|velocities|momenta)\{(\w+)\}")


def read_xyz_frames(path: str, form: str) -> list[Atoms]:
    """Read all frames of an XYZ file, `form` "xyz" or "extxyz".

    Empty lines between frames are skipped, keys of their second lines may have any case, and a
    stress or virial of six numbers has ASE's order xx, yy, zz, yz, xz, xy.

    Raises
    ------
    SystemFormatError
        When a frame has more atoms than the file holds, something else than a count begins a
        frame, a row has more columns than its frame names, or i-PI wrote the file.
    """
    from ase.io.formats import open_with_compression

    with open_with_compression(path, "rb") as file:
        lines = _Lines(file, path)
        for _ in lines.of_frames():  # the whole file is checked before ASE takes memory for atoms
            pass
        if lines.with_voigt:
            log.info(
                "%s: a stress or virial of six numbers is read as xx yy zz yz xz xy, ASE's order",
                path,
            )
        if not lines.rewritten:
            # Otherwise ASE takes the text after an "@" for numbers of frames of the file before it.
            return _read(path, form, path, do_not_split_by_at_sign=True)
        file.seek(0)
        text = b"".join(_Lines(file, path).of_frames()).decode("utf-8")
    return _read(io.StringIO(text), form, path)


def _read(source: str | IO[str], form: str, path: str, **options: bool) -> list[Atoms]:
    from ase.io import read

    try:
        return list(read(source, index=":", format=form, **options))
    except KeyError as error:  # ASE looks up the number of each symbol
        raise SystemFormatError(
            path,
            "",
            f"ASE knows no element {error.args[0]!r}; the column of species needs symbols such as Cu "
            "(species:S:1), or write atomic numbers into a column Z:I:1",
        ) from error


class _Lines:
    """The lines of an XYZ file, with the number of the present one for messages."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path
        self._number = 0
        self._frame = 0
        self.rewritten = False  # the lines yielded differ from those of the file
        self.with_voigt = False  # some tensor has six numbers

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
            self.rewritten |= empty > 0
            empty = 0
            yield line
            yield from self._rest_of_frame(natoms)
            vectors_may_follow = True
            self._frame += 1

    def _rest_of_frame(self, natoms: int) -> Iterator[bytes]:
        comment = self._comment()
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

    def _comment(self) -> bytes:
        """Return the second line of a frame in ASE's words."""
        line = self._next()
        if header := _IPI.search(line):
            raise self._error(
                f"i-PI wrote this file ({header[0].decode()}), with its own units and without labels: "
                "join positions [Å], forces [eV/Å] and energies [eV] of its output files into one "
                "file of extended XYZ"
            )
        comment = _TENSOR.sub(self._as_matrix, _KEY.sub(lambda key: _KEYS[key[0].lower()], line))
        self.rewritten |= comment != line
        return comment

    def _as_matrix(self, tensor: re.Match[bytes]) -> bytes:
        """Return the nine numbers of a symmetric tensor that has six."""
        numbers = tensor[2].replace(b",", b" ").split()
        if len(numbers) != 6:
            return tensor[0]
        self.with_voigt = True
        return b'%s="%s"' % (tensor[1], b" ".join(numbers[place] for place in _VOIGT))

    def _count(self, line: bytes) -> int:
        text = line.strip()
        if not text.isdigit() or len(text) > _MOST_DIGITS:
            beginning = text[:_MOST_SHOWN].decode("utf-8", "replace")
            raise self._error(f"expected the number of atoms of a frame, found {beginning!r}")
        return int(text)

    def _next(self) -> bytes:
        self._number += 1
        line = self._file.readline()
        if self._number == 1 and line.startswith(_BOM):
            self.rewritten = True
            return line[len(_BOM) :]
        return line

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
