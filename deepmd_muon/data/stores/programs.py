"""Programs whose outputs are recognized by their first lines, whatever the file is called."""

from __future__ import annotations

import os
import re
from io import BufferedIOBase
from typing import BinaryIO, NamedTuple

from deepmd_muon.files import open_regular

_HEAD = 1 << 16  # searched for a program's name [bytes]
COMPRESSED = (".gz", ".bz2", ".xz")  # endings of files that ASE decompresses
# Files of a folder that are looked at to say what it holds; a folder of calculations may have
# thousands.
_MOST_FILES = 200
# Endings of files of structures, whose frames may have labels.
_STRUCTURES = (".xyz", ".extxyz", ".traj", ".db")


class Program(NamedTuple):
    """A program, and the names that ASE and dpdata give the formats of its output."""

    name: str
    signature: re.Pattern[bytes]  # in the first lines of its output
    ase: str | None = None
    dpdata: tuple[str, ...] = ()
    takes_folder: bool = False  # dpdata reads the calculation's folder, not this file

    @property
    def options(self) -> str:
        """The options that read its output with dpdata."""
        return " or ".join(f"--format {name}" for name in self.dpdata)


# Structures, whose comments may name the program that computed them.
_XYZ = re.compile(rb"\s*\d+[ \t]*\r?\n")

# ASE recognizes Gaussian, ORCA and others by content, too; VASP's files by their names alone.
_PROGRAMS = (
    Program("VASP (OUTCAR)", re.compile(rb"\A\s*vasp\.\d"), "vasp-out", ("vasp/outcar",)),
    Program(
        "VASP (vasprun.xml)",
        re.compile(rb"\A(<\?xml[^>]*>)?\s*<modeling>"),
        "vasp-xml",
        ("vasp/xml",),
    ),
    Program(
        "Gaussian",
        re.compile(rb"Entering Gaussian System"),
        "gaussian-out",
        ("gaussian/log", "gaussian/md"),
    ),
    Program("ORCA", re.compile(rb"\* O   R   C   A \*"), "orca-output", ("orca/spout",)),
    Program("Quantum ESPRESSO", re.compile(rb"Program PWSCF"), "espresso-out"),
    Program(
        "FHI-aims",
        re.compile(rb"Invoking FHI-aims"),
        "aims-output",
        ("fhi_aims/md", "fhi_aims/scf"),
    ),
    Program("CP2K", re.compile(rb"^ (CP2K|DBCSR)\| ", re.MULTILINE), dpdata=("cp2k/output",)),
    Program("PWmat", re.compile(rb"\A\s*\d+ atoms,\s*Iteration"), dpdata=("pwmat/movement",)),
    Program("Psi4", re.compile(rb"Psi4: An Open-Source"), dpdata=("psi4/out",)),
    Program("sqm", re.compile(rb"AMBER SQM VERSION"), dpdata=("sqm/out",)),
    Program("n2p2", re.compile(rb"\Abegin\s*\n(comment|lattice|atom)\b"), dpdata=("n2p2",)),
    Program(
        "SIESTA",
        re.compile(rb"(?i)^[ \t]*siesta version\b", re.MULTILINE),
        dpdata=("siesta/output", "siesta/aimd_output"),
    ),
    Program(
        "ABACUS",
        re.compile(rb"(WELCOME TO ABACUS|\bABACUS v\d)"),
        dpdata=("abacus/scf", "abacus/md", "abacus/relax"),
        takes_folder=True,
    ),
)


def recognize(path: str) -> Program | None:
    """Return the program that wrote a file, None if its first lines do not tell."""
    try:
        with open_regular(path) as file:
            head = _decompressed(file, path).read(_HEAD)
    except Exception:  # not readable; decompressors raise errors of their own kinds
        return None
    if _XYZ.match(head):
        return None
    return next((program for program in _PROGRAMS if program.signature.search(head)), None)


def _decompressed(file: BinaryIO, path: str) -> BinaryIO | BufferedIOBase:
    """Return the contents of a file that its ending calls compressed."""
    if path.endswith(".gz"):
        import gzip

        return gzip.GzipFile(fileobj=file)
    if path.endswith(".bz2"):
        import bz2

        return bz2.BZ2File(file)
    if path.endswith(".xz"):
        import lzma

        return lzma.LZMAFile(file)
    return file


def describe_files(folder: str) -> str:
    """Return how to read what a folder holds if it holds no system; empty if nothing is known."""
    n_files = 0
    for place, subfolders, files in os.walk(folder):
        subfolders.sort()
        for name in sorted(files):
            n_files += 1
            if n_files > _MOST_FILES:
                return ""
            path = os.path.join(place, name)
            ending = os.path.splitext(name)[1]
            if ending in _STRUCTURES:
                pattern = os.path.join(place, f"*{ending}")
                return f"; it holds {path}: give files or a pattern, '{pattern}'"
            program = recognize(path)
            if program is not None and program.takes_folder:
                return f"; {path} looks like {program.name}: {program.options} reads its folder"
    return ""
