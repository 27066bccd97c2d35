"""Systems from outputs that dpdata reads, by the name of their format."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError, SystemNotFoundError
from deepmd_muon.data.stores.memory import MemoryStore

# Names of arrays in dpdata and in a folder of npy files.
_ARRAYS = {
    "coords": "coord",
    "cells": "box",
    "energies": "energy",
    "forces": "force",
    "virials": "virial",
    "spins": "spin",
    "force_mags": "force_mag",
}
_OF_CELLS = ("cells", "virials")
# Earlier releases take Hartree in headers of extended XYZ for eV.
_LOWEST = (1, 1)
# Keyword of formats that leave out frames whose electronic loop did not converge.
_CHECK = "convergence_check"


def dpdata_formats(path: str, name: str) -> dict[str, type]:
    """Return dpdata's formats that read files, by name.

    Raises
    ------
    DataError
        When dpdata, which may read the file at `path` as `name`, is not installed or too old.
    """
    try:
        import dpdata
        from dpdata.format import Format
        from dpdata.system import load_format  # noqa: F401 - its import registers the formats
    except ImportError as error:
        raise DataError(
            f"system {path}: ASE does not read it, dpdata may read it as {name}, and dpdata is not "
            "installed: pip install dpdata"
        ) from error
    release = tuple(int(part) for part in re.findall(r"\d+", dpdata.__version__)[:2])
    if release < _LOWEST:
        raise DataError(
            f"system {path}: dpdata {dpdata.__version__} would read it as {name}, and releases "
            'before 1.1 ignore units: pip install -U "dpdata>=1.1"'
        )
    return {
        name: format_class
        for name, format_class in Format.get_formats().items()
        if _reads(format_class, "labeled_system") or _reads(format_class, "system")
    }


def _reads(format_class: type, kind: str) -> bool:
    """Return whether a format implements one of dpdata's readers."""
    from dpdata.format import Format

    name = f"from_{kind}"
    return getattr(format_class, name) is not getattr(Format, name)


def read_dpdata(path: str, name: str, *, keep_unconverged: bool = False) -> list[MemoryStore]:
    """Read a file or folder in one of dpdata's formats, its labels if the format has them.

    Raises
    ------
    DataError
        When dpdata is not installed.
    SystemNotFoundError
        When dpdata cannot read the path.
    SystemFormatError
        When it returns no frame.
    """
    format_class = dpdata_formats(path, name)[name]
    has_labels = _reads(format_class, "labeled_system")
    reader = getattr(format_class, "from_labeled_system" if has_labels else "from_system")
    options: dict[str, Any] = {}
    if keep_unconverged and _CHECK in inspect.signature(reader).parameters:
        options[_CHECK] = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            systems = _read(path, name, format_class, options)
    except Exception as error:  # dpdata's readers let any error of their parsing through
        raise SystemNotFoundError(
            f"system {path}: dpdata cannot read it as {name} "
            f"({type(error).__name__}: {str(error).strip()[:500] or 'no reason given'}); formats "
            "differ in whether they take a file, a folder or the common beginning of several files"
        ) from error
    stores = [
        _store(data, path if len(systems) == 1 else f"{path}#{number}")
        for number, data in enumerate(systems)
        if len(data["coords"])
    ]
    if not stores:
        raise SystemFormatError(
            path,
            "",
            f"dpdata finds no frame in it as {name}: it has another format, or the calculation "
            "did not converge, did not finish or printed no forces",
        )
    return stores


def _read(
    path: str, name: str, format_class: type, options: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return dpdata's data of each system."""
    import dpdata

    # A file of extended XYZ holds many compositions, and a folder of one format many calculations.
    if _reads(format_class, "multi_systems") and (os.path.isdir(path) or "xyz" in name):
        systems = dpdata.MultiSystems.from_file(path, fmt=name, **options)
        return [system.data for system in systems.systems.values()]
    if _reads(format_class, "labeled_system"):
        return [dpdata.LabeledSystem(path, fmt=name, **options).data]
    return [dpdata.System(path, fmt=name, **options).data]


def _store(data: Mapping[str, Any], name: str) -> MemoryStore:
    """Return a system of dpdata in our names; its units and signs are ours."""
    cells = np.asarray(data["cells"])
    pbc = not data.get("nopbc", False) and bool(np.linalg.det(cells).all())
    arrays = {
        our_name: np.asarray(data[their_name]).reshape(len(cells), -1)
        for their_name, our_name in _ARRAYS.items()
        if data.get(their_name) is not None and (pbc or their_name not in _OF_CELLS)
    }
    symbols = [data["atom_names"][kind] for kind in data["atom_types"]]
    return MemoryStore(name, symbols, [arrays], pbc=pbc)
