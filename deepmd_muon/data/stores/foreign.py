"""Files of other programs, by the format the user names, else by their first lines."""

from __future__ import annotations

import difflib
import glob
import logging
import os
from collections.abc import Sequence

from deepmd_muon.data.errors import DataError, SystemNotFoundError
from deepmd_muon.data.stores.ase_reading import read_ase
from deepmd_muon.data.stores.cp2k_trajectory import is_trajectory, read_trajectory
from deepmd_muon.data.stores.dpdata_reading import dpdata_formats, read_dpdata
from deepmd_muon.data.stores.memory import MemoryStore
from deepmd_muon.data.stores.programs import COMPRESSED, recognize
from deepmd_muon.label_keys import Reading

log = logging.getLogger(__name__)

# dpdata's names of the forms that this package reads and writes itself.
OWN_FORMATS = (
    "deepmd",
    "deepmd/raw",
    "deepmd/comp",
    "deepmd/npy",
    "deepmd/npy/mixed",
    "deepmd/hdf5",
    "deepmd/hdf5/mixed",
    "deepmd/lmdb",
    "lmdb",
)


def read_foreign(path: str, reading: Reading) -> list[MemoryStore]:
    """Read a file without a named format: its first lines decide, then ASE.

    Raises
    ------
    DataError
        When the package that reads it is not installed.
    SystemNotFoundError, SystemFormatError
        See `read_ase` and `read_dpdata`.
    """
    if is_trajectory(path):
        return read_trajectory(path)
    program = recognize(path)
    if program is None:
        return read_ase(path, reading)
    if program.takes_folder:
        raise SystemNotFoundError(
            f"system {path}: looks like {program.name}, which dpdata reads by its folder: give the "
            f"folder of the calculation's INPUT, and {program.options} (format beside systems)"
        )
    if program.ase is None:
        return _read_first(path, program.dpdata, reading)
    try:
        return read_ase(path, reading, program.ase)
    except SystemNotFoundError as error:
        if not program.dpdata:
            raise
        raise SystemNotFoundError(
            f"{error}; it looks like {program.name}: {program.options} reads it with dpdata"
        ) from error


def _read_first(path: str, names: Sequence[str], reading: Reading) -> list[MemoryStore]:
    """Read a file in the first of dpdata's formats that can read it."""
    if path.endswith(COMPRESSED):
        raise SystemNotFoundError(
            f"system {path}: dpdata reads it as {names[0]}, but no compressed files: decompress it"
        )
    problem: SystemNotFoundError | None = None
    for name in names:
        try:
            stores = read_dpdata(path, name, keep_unconverged=reading.keep_unconverged)
        except SystemNotFoundError as error:
            problem = problem or error
            continue
        log.info("%s: read by dpdata as %s", path, name)
        return stores
    assert problem is not None
    raise problem


def read_as(path: str, name: str, reading: Reading) -> list[MemoryStore]:
    """Read a file, a folder or files with a common beginning in a format of ASE or dpdata.

    Raises
    ------
    DataError
        When neither package knows the format, or the one that does is not installed.
    SystemNotFoundError
        When no file has this path or begins with it, or it cannot be read.
    SystemFormatError
        See `read_ase` and `read_dpdata`.
    """
    if not os.path.exists(path) and not glob.glob(f"{glob.escape(path)}*"):
        raise SystemNotFoundError(
            f"system {path} does not exist (relative paths start at {os.getcwd()})"
        )
    of_ase = _ase_formats()
    if name in of_ase:
        return read_ase(path, reading, name)
    of_dpdata = list(dpdata_formats(path, name))
    if name.lower() in of_dpdata:
        return read_dpdata(path, name.lower(), keep_unconverged=reading.keep_unconverged)
    similar = difflib.get_close_matches(name.lower(), [*of_ase, *of_dpdata], n=5, cutoff=0.5)
    hint = f"; similar: {', '.join(similar)}" if similar else ""
    raise DataError(
        f"neither ASE nor dpdata reads a format {name!r}{hint}; `ase info --formats` lists ASE's, and "
        "the page on data those of dpdata"
    )


def _ase_formats() -> list[str]:
    """Return the names of ASE's formats; none without ASE."""
    try:
        from ase.io.formats import ioformats
    except ImportError:
        return []
    return [name for name, form in ioformats.items() if form.can_read]
