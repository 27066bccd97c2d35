"""Finding systems: paths, patterns, files of all kinds."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deepmd_muon.data.ase_reading import LabelKeys, read_ase
from deepmd_muon.data.errors import SystemNotFoundError, TypeMapError
from deepmd_muon.data.lmdb_store import is_lmdb, lmdb_stores
from deepmd_muon.data.npy_store import npy_stores
from deepmd_muon.data.storage import HandleCache, Store
from deepmd_muon.data.system import System


def open_systems(
    paths: str | Iterable[str],
    type_map: Sequence[str] | None = None,
    keys: LabelKeys | None = None,
    patterns: Sequence[str] | None = None,
) -> list[System]:
    """Open systems of any kind.

    Parameters
    ----------
    paths : str or iterable of str
        Each is a system folder; a folder above systems (searched for ``type.raw``, sorted); an HDF5 file (all
        systems in it); ``file.hdf5#/group`` (that system, or all systems below the group); an LMDB database
        (``data.lmdb``); any other file that ASE reads, e.g. extended XYZ; or a pattern with ``*``, ``?`` or ``[…]`` of
        such paths (``**`` crosses folders).
    type_map : sequence of str, optional
        Element names that types shall index.
    keys : LabelKeys, optional
        Names of the labels in files that ASE reads.
    patterns : sequence of str, optional
        Then each path is a folder, and those folders below it are systems that fit one of the patterns, at any depth,
        and have a ``type.raw``.

    Returns
    -------
    list of System
        In the order of `paths`.

    Raises
    ------
    SystemNotFoundError
        When a path does not exist or holds no system.
    SystemFormatError, TypeMapError
        See `System`.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [os.fspath(paths)]
    handles = HandleCache()
    places = [place for path in paths for place in _expanded(os.fspath(path))]
    if patterns is not None:
        places = [place for folder in places for place in _fitting(folder, patterns)]
    found = (store for place in places for store in _stores(place, handles, keys))
    systems = [System(store, type_map) for store in found]
    if not systems:
        raise SystemNotFoundError("no systems given")
    return systems


def check_type_maps(systems: Sequence[System]) -> tuple[str, ...] | None:
    """Return the type map that all systems agree on, for a caller that gave none.

    Raises
    ------
    TypeMapError
        When two systems number the elements differently.
    """
    longest: tuple[str, ...] = ()
    for system in systems:
        own = system.type_map or ()
        shared = min(len(own), len(longest))
        if own[:shared] != longest[:shared]:
            raise TypeMapError(
                f"system {system.name} has type map {list(own)}, others have {list(longest)}; "
                "give the type map to use (model.type_map of an input, -t of neighbor-stat)"
            )
        longest = max(longest, own, key=len)
    return longest or None


def _expanded(path: str) -> list[str]:
    """Return the paths that fit a pattern, sorted; a path that exists stands for itself."""
    if not glob.has_magic(path) or os.path.exists(path.partition("#")[0]):
        return [path]
    if found := sorted(glob.glob(path, recursive=True)):
        return found
    raise SystemNotFoundError(f"no path fits the pattern {path} (relative patterns start at {os.getcwd()})")


def _fitting(folder: str, patterns: Sequence[str]) -> list[str]:
    """Return the systems below a folder that fit one of the patterns, sorted; a database stands for itself."""
    if is_lmdb(folder):
        return [folder]
    if not os.path.isdir(folder):
        raise SystemNotFoundError(f"rglob_patterns searches folders, but {folder} is none")
    try:
        found = {str(place) for pattern in patterns for place in Path(folder).rglob(pattern)}
    except (ValueError, NotImplementedError) as error:
        raise SystemNotFoundError(f"rglob_patterns {list(patterns)}: {error}") from error
    if systems := sorted(place for place in found if os.path.isfile(os.path.join(place, "type.raw"))):
        return systems
    raise SystemNotFoundError(
        f"no system below {folder} fits rglob_patterns {list(patterns)}: {len(found)} paths do, none with a type.raw"
    )


def _stores(path: str, handles: HandleCache, keys: LabelKeys | None) -> Iterator[Store]:
    """Find all systems at or below a path."""
    if is_lmdb(path) or path.endswith(".lmdb"):
        yield from lmdb_stores(path, handles)
    elif "#" in path or os.path.isfile(path):
        yield from _stores_in_file(path, handles, keys)
    else:
        yield from npy_stores(path, handles)


def _stores_in_file(path: str, handles: HandleCache, keys: LabelKeys | None) -> Iterator[Store]:
    """Find all systems of a file."""
    from h5py import is_hdf5  # imported for HDF5 files only: it is slow

    from deepmd_muon.data.hdf5_store import hdf5_stores

    if os.path.isfile(path) and not is_hdf5(path) and not path.endswith((".h5", ".hdf5")):
        yield from read_ase(path, keys)
    else:
        yield from hdf5_stores(path, handles)
