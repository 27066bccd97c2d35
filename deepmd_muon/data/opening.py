"""Finding systems: paths, patterns, files of all kinds, formats of other packages."""

from __future__ import annotations

import functools
import glob
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from deepmd_muon.data.elements import by_atomic_number
from deepmd_muon.data.errors import DataError, SystemNotFoundError, TypeMapError
from deepmd_muon.data.frames import Parameters
from deepmd_muon.data.stores.ase_reading import read_ase
from deepmd_muon.data.stores.lmdb_store import is_lmdb, lmdb_stores
from deepmd_muon.data.stores.npy_store import npy_stores, refuse_unlisted
from deepmd_muon.data.stores.storage import HandleCache, Store
from deepmd_muon.data.system import System
from deepmd_muon.files import paths_matching
from deepmd_muon.label_keys import LabelKeys

log = logging.getLogger(__name__)

# Systems with wrong parameters that one message lists.
_MOST_LISTED = 10

Reader = Callable[[str], Iterable[Store]]
_READERS: dict[str, str | Reader] = {}


def register_format(ending: str, read: str | Reader) -> None:
    """Read paths with an ending by a function of another package.

    Parameters
    ----------
    ending
        Of files or folders, such as ".mydata"; compared with the end of the path.
    read
        Maps the path to a `Store` for each system in it, for instance a `MemoryStore`, or names such a function as
        "module:attribute". It raises `DataError` for a file that it cannot read.

    Raises
    ------
    DataError
        When the ending is empty or taken by another function.
    """
    if not ending.startswith(".") or len(ending) < 2:
        raise DataError(
            f"the ending of a data format is a dot and letters, such as '.mydata'; found {ending!r}"
        )
    if _READERS.setdefault(ending, read) != read:
        raise DataError(
            f"paths that end with {ending} are read by {_READERS[ending]}; choose another ending"
        )


def open_systems(
    paths: str | Iterable[str],
    type_map: Sequence[str] | None = None,
    keys: LabelKeys | None = None,
    patterns: Sequence[str] | None = None,
    *,
    keep_unconverged: bool = False,
) -> list[System]:
    """Open systems of any kind.

    Parameters
    ----------
    paths : str or iterable of str
        Each is a system folder; a folder above systems (searched for ``type.raw``, sorted); an HDF5 file (all
        systems in it); ``file.hdf5#/group`` (that system, or all systems below the group); an LMDB database
        (``data.lmdb``); a path whose ending is registered (`register_format`); any other file that ASE reads, e.g.
        extended XYZ; or a pattern with ``*``, ``?`` or ``[…]`` of
        such paths (``**`` crosses folders).
    type_map : sequence of str, optional
        Element names that types shall index.
    keys : LabelKeys, optional
        Names of the labels in files that ASE reads.
    patterns : sequence of str, optional
        Then each path is a folder, and those folders below it are systems that fit one of the patterns, at any depth,
        and have a ``type.raw``.
    keep_unconverged : bool
        Keep frames of files that ASE reads whose electronic loop did not converge.

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
    places: list[str] = []
    for path in map(os.fspath, paths):
        if not glob.has_magic(path) or os.path.exists(path.partition("#")[0]):
            places.append(path)
        elif found := sorted(set(paths_matching(path, refuse_unlisted))):
            places += found
        else:
            raise SystemNotFoundError(
                f"no path fits the pattern {path} (relative patterns start at {os.getcwd()})"
            )
    if patterns is not None:
        places = [place for folder in places for place in _fitting(folder, patterns)]
    read = functools.partial(read_ase, keys=keys, keep_unconverged=keep_unconverged)
    systems = [
        System(store, type_map) for place in places for store in _stores(place, handles, read)
    ]
    if not systems:
        raise SystemNotFoundError("no systems given")
    return systems


def with_common_types(systems: Sequence[System]) -> list[System]:
    """Return systems that were opened without a type map with one that has the elements of all.

    Their `type_map` lists elements in the order of their first appearance; it stays None where no system names its
    elements.

    Raises
    ------
    TypeMapError
        When one system does not name its elements and others number them differently.
    """
    names = tuple(dict.fromkeys(name for system in systems for name in system.type_map or ()))
    nameless = [system.name for system in systems if system.type_map is None]
    for system in systems:
        own = system.type_map or ()
        if nameless and own != names[: len(own)]:
            raise TypeMapError(
                f"system {nameless[0]} has no type_map.raw, and others number elements differently ({list(own)} in "
                f"{system.name}, {list(names[: len(own)])} elsewhere); give the type map to use (-t of neighbor-stat)"
            )
    return [system if system.type_map == names else system.with_types(names) for system in systems]


def elements_of(systems: Sequence[System]) -> tuple[str, ...]:
    """Return the types of systems by atomic number, for a caller that needs a type map and has none.

    Raises
    ------
    TypeMapError
        When a system has no type_map.raw.
    """
    for system in systems:
        if system.type_map is None:
            raise TypeMapError(
                f"system {system.name} has no type_map.raw, so its elements are unknown: name them there, or give the "
                "type map (model/type_map of an input, -t of a command)"
            )
    return by_atomic_number(name for system in systems for name in system.type_map or ())


def check_labels(systems: Sequence[System]) -> None:
    """Refuse data without any label, and warn of systems without.

    Raises
    ------
    DataError
        When no system has energies, forces, virials or another label.
    """
    bare = [system.name for system in systems if not system.labels]
    if len(bare) == len(systems):
        raise DataError(
            f"no frame of {bare[0]}{f' and {len(bare) - 1} other systems' if bare[1:] else ''} has energies, forces or "
            "another label; in a file that ASE reads, name them with label_keys (--energy-key, --force-key, … on the "
            "command line)"
        )
    for name in bare:
        log.warning("%s: no labels", name)


def with_parameters(systems: Sequence[System], wanted: Parameters) -> list[System]:
    """Return systems whose frames carry the parameters that a model reads, if any.

    Raises
    ------
    DataError
        Listing every system and file that is missing or of another width.
    """
    if not (wanted.fparam or wanted.aparam):
        return list(systems)
    problems = [
        problem for system in systems if (problem := system.problem_with(wanted)) is not None
    ]
    if problems:
        more = (
            f"\n  and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        )
        listed = "\n  ".join(problems[:_MOST_LISTED])
        raise DataError(
            f"the model reads {wanted.fparam} frame parameters (numb_fparam) and {wanted.aparam} of each atom "
            f"(numb_aparam), which {len(problems)} of {len(systems)} systems do not have:\n  {listed}{more}"
        )
    return [system.with_parameters(wanted) for system in systems]


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
    if systems := sorted(
        place for place in found if os.path.isfile(os.path.join(place, "type.raw"))
    ):
        return systems
    raise SystemNotFoundError(
        f"no system below {folder} fits rglob_patterns {list(patterns)}: {len(found)} paths do, none with a type.raw"
    )


def _mode(path: str) -> int:
    """Return what a path is, as `stat` encodes it; 0 where nothing is there."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):
        return 0


def _stores(path: str, handles: HandleCache, read: Reader) -> Iterator[Store]:
    """Find all systems at or below a path; `read` takes files that are not HDF5."""
    mode = _mode(path)
    there = mode or _mode(path.partition("#")[0])
    if there and not stat.S_ISREG(there) and not stat.S_ISDIR(there):
        raise SystemNotFoundError(
            f"system {path} is a device or FIFO; give a folder or a regular file"
        )
    if (
        registered := next(
            (reader for ending, reader in _READERS.items() if path.endswith(ending)), None
        )
    ) is not None:
        if not mode:
            raise SystemNotFoundError(f"system {path} does not exist")
        if isinstance(registered, str):
            module, _, name = registered.partition(":")
            registered = getattr(import_module(module), name)
        yield from registered(path)
    elif is_lmdb(path) or path.endswith(".lmdb"):
        yield from lmdb_stores(path, handles)
    elif "#" not in path and not stat.S_ISREG(mode):
        yield from npy_stores(path, handles)
    else:
        from h5py import is_hdf5  # imported for HDF5 files only: it is slow

        from deepmd_muon.data.stores.hdf5_store import hdf5_stores

        if stat.S_ISREG(mode) and not is_hdf5(path) and not path.endswith((".h5", ".hdf5")):
            yield from read(path)
        else:
            yield from hdf5_stores(path, handles)
