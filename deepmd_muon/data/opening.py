"""Finding systems: paths, patterns, files of all kinds, formats of other packages."""

from __future__ import annotations

import functools
import glob
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import numpy as np

from deepmd_muon.data.checks.close_atoms import shortest_distances
from deepmd_muon.data.checks.words import frame_words
from deepmd_muon.data.elements import by_atomic_number
from deepmd_muon.data.errors import DataError, SystemNotFoundError, TypeMapError
from deepmd_muon.data.frames import Parameters
from deepmd_muon.data.stores.foreign import OWN_FORMATS, read_as
from deepmd_muon.data.stores.lmdb_store import is_lmdb, lmdb_stores
from deepmd_muon.data.stores.named_parameters import NamedParameters
from deepmd_muon.data.stores.npy_store import npy_stores, refuse_unlisted
from deepmd_muon.data.stores.programs import describe_files
from deepmd_muon.data.stores.run_folders import read_other
from deepmd_muon.data.stores.storage import HandleCache, Store
from deepmd_muon.data.system import System
from deepmd_muon.files import paths_matching
from deepmd_muon.label_keys import Reading

log = logging.getLogger(__name__)

_MAX_LISTED = 10  # systems with wrong parameters that one message lists

Reader = Callable[[str], Iterable[Store]]
"""Returns a store for each system of a path."""
# By ending of the path, see `register_format`.
_READERS: dict[str, str | Reader] = {}


def register_format(ending: str, read: str | Reader) -> None:
    """Read paths with an ending by a function of another package.

    Parameters
    ----------
    ending
        Of files or folders, such as ".mydata"; compared with the end of the path.
    read
        Maps the path to a `Store` for each system in it, for instance a `MemoryStore`, or names
        such a function as "module:attribute". It raises `DataError` for a file that it cannot read.

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
    reading: Reading | None = None,
    patterns: Sequence[str] | None = None,
) -> list[System]:
    """Open systems of any kind.

    Parameters
    ----------
    paths : str or iterable of str
        Each is a system folder; a folder above systems (searched for ``type.raw``, sorted); an HDF5
        file (all systems in it); ``file.hdf5#/group`` (that system, or all systems below the
        group); an LMDB database (``data.lmdb``); a path whose ending is registered
        (`register_format`); any other file that ASE reads, e.g. extended XYZ; or a pattern with
        ``*``, ``?`` or ``[…]`` of such paths (``**`` crosses folders).
    type_map : sequence of str, optional
        Element names that types shall index.
    reading : Reading, optional
        Format, names of labels, and which frames count. With a format, a path is a file, a folder
        or the beginning of several files, as the format needs it.
    patterns : sequence of str, optional
        Then each path is a folder, and those folders below it are systems that fit one of the
        patterns, at any depth, and have a ``type.raw``.

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
    places = _expand(map(os.fspath, paths))
    if patterns is not None:
        places = [place for folder in places for place in _matching_systems(folder, patterns)]
    reading = reading or Reading()

    def stores_at(place: str) -> Iterable[Store]:
        if reading.format is None or reading.format in OWN_FORMATS:
            return _stores(place, handles, functools.partial(read_other, reading=reading))
        return read_as(place, reading.format, reading)

    stores = (store for place in places for store in stores_at(place))
    if reading.frame_parameters:
        stores = (NamedParameters(store, reading.frame_parameters) for store in stores)
    systems = [System(store, type_map) for store in stores]
    if not systems:
        raise SystemNotFoundError("no systems given")
    if reading.config_weights:
        _check_config_weights(systems, reading.config_weights)
    if reading.max_force is not None:
        systems = _without_large_forces(systems, reading.max_force)
    if reading.min_pair_dist:
        systems = _without_close_atoms(systems, reading.min_pair_dist)
    return systems


def _check_config_weights(systems: Sequence[System], config_weights: Mapping[str, float]) -> None:
    """Warn of names that no frame has.

    Raises
    ------
    DataError
        When no frame has a config_type: other weights than 1 would be ignored.
    """
    config_types = {name for system in systems for name in system.config_types()}
    if not config_types:
        raise DataError(
            "config_weights weighs frames by their config_type, which files that ASE reads have, and "
            f"no frame of {systems[0].name} and the others has one; write weight.npy instead "
            "(--config-weights of dp init and dp convert-data does)"
        )
    unknown = sorted(config_weights.keys() - config_types - {"Default"})
    if unknown:
        log.warning(
            "config_weights names %s, which no frame has; config_type is one of %s",
            ", ".join(unknown),
            ", ".join(sorted(config_types)),
        )


def _without_large_forces(systems: Sequence[System], max_force: float) -> list[System]:
    """Leave out frames with a force above `max_force` [eV/Å], and name them.

    Raises
    ------
    DataError
        When no frame is left.
    """
    remaining = []
    for system in systems:
        largest = system.largest_forces()
        excluded = np.flatnonzero(largest > max_force)
        reach = largest[excluded].max(initial=0.0)
        reason = f"their forces reach {reach:.3g} eV/Å, beyond max_force"
        remaining += _without(system, excluded, reason)
    if not remaining:
        raise DataError(f"every frame has a force above max_force ({max_force:g} eV/Å)")
    return remaining


def _without_close_atoms(systems: Sequence[System], min_pair_dist: float) -> list[System]:
    """Leave out frames with two atoms nearer than `min_pair_dist` [Å], and name them.

    Raises
    ------
    DataError
        When no frame is left.
    """
    remaining = []
    for system in systems:
        shortest = shortest_distances(system, min_pair_dist)
        excluded = np.flatnonzero(np.isfinite(shortest))
        reason = f"their atoms are {shortest.min():.3g} Å apart, below min_pair_dist"
        remaining += _without(system, excluded, reason)
    if not remaining:
        raise DataError(f"every frame has atoms nearer than min_pair_dist ({min_pair_dist:g} Å)")
    return remaining


def _without(system: System, excluded: np.ndarray, reason: str) -> list[System]:
    """Name some frames, and return the system without them; nothing if none is left."""
    if not len(excluded):
        return [system]
    log.warning("%s: left out, %s: %s", system.name, reason, frame_words(excluded))
    included = np.setdiff1d(np.arange(system.nframes), excluded)
    return [system.select(included)] if len(included) else []


def _expand(paths: Iterable[str]) -> list[str]:
    """Replace patterns by the paths that they match, sorted."""
    places: list[str] = []
    for path in paths:
        # A path that exists is no pattern, whatever its name is.
        if not glob.has_magic(path) or os.path.exists(path.partition("#")[0]):
            places.append(path)
            continue
        matches = sorted(set(paths_matching(path, refuse_unlisted)))
        if not matches:
            raise SystemNotFoundError(
                f"no path fits the pattern {path} (relative patterns start at {os.getcwd()})"
            )
        places += matches
    return places


def with_common_types(systems: Sequence[System]) -> list[System]:
    """Give systems that were opened without a type map one that has the elements of all.

    It lists elements in the order of their first appearance. It stays None if no system names its
    elements.

    Raises
    ------
    TypeMapError
        When one system does not name its elements and others number them differently.
    """
    names = tuple(dict.fromkeys(name for system in systems for name in system.type_map or ()))
    nameless = [system.name for system in systems if system.type_map is None]
    for system in systems:
        own_names = list(system.type_map or ())
        expected_names = list(names[: len(own_names)])
        if nameless and own_names != expected_names:
            raise TypeMapError(
                f"system {nameless[0]} has no type_map.raw, and others number elements differently "
                f"({own_names} in {system.name}, {expected_names} elsewhere); give the type map to "
                "use (-t of neighbor-stat)"
            )
    return [system if system.type_map == names else system.with_types(names) for system in systems]


def elements_of(systems: Sequence[System]) -> tuple[str, ...]:
    """Return the elements of systems by atomic number, as a type map.

    Raises
    ------
    TypeMapError
        When a system has no type_map.raw.
    """
    for system in systems:
        if system.type_map is None:
            raise TypeMapError(
                f"system {system.name} has no type_map.raw, so its elements are unknown: name them "
                "there, or give the type map (model/type_map of an input, -t of a command)"
            )
    return by_atomic_number(name for system in systems for name in system.type_map or ())


def check_labels(systems: Sequence[System]) -> None:
    """Refuse data without any label, and warn of systems without.

    Raises
    ------
    DataError
        When no system has energies, forces, virials or another label.
    """
    unlabelled = [system.name for system in systems if not system.labels - {"weight"}]
    if len(unlabelled) == len(systems):
        names = unlabelled[0]
        if len(systems) > 1:
            names += f" and {len(systems) - 1} other systems"
        raise DataError(
            f"no frame of {names} has energies, forces or another label; in a file that ASE reads, "
            "name them with label_keys (--energy-key, --force-key, … on the command line)"
        )
    for name in unlabelled:
        log.warning("%s: no labels", name)


def with_parameters(systems: Sequence[System], parameters: Parameters) -> list[System]:
    """Return systems whose frames carry the parameters that a model reads, if any.

    Raises
    ------
    DataError
        Listing every system and file that is missing or of another width.
    """
    if not parameters.of_frame and not parameters.of_atom:
        return list(systems)
    problems = []
    for system in systems:
        problem = system.problem_with(parameters)
        if problem is not None:
            problems.append(problem)
    if problems:
        listed = "\n  ".join(problems[:_MAX_LISTED])
        if len(problems) > _MAX_LISTED:
            listed += f"\n  and {len(problems) - _MAX_LISTED} more"
        hint = ""
        if parameters.fparam:
            hint = " (frame_parameters, --frame-parameters read them by names such as charge)"
        raise DataError(
            f"the model reads {_words(parameters)}, which {len(problems)} of {len(systems)} "
            f"systems do not have{hint}:\n  {listed}"
        )
    return [system.with_parameters(parameters) for system in systems]


def _words(parameters: Parameters) -> str:
    """Return what a model reads, in words."""
    words = []
    if parameters.fparam or parameters.aparam:
        words.append(f"{parameters.fparam} frame parameters (numb_fparam)")
        words.append(f"{parameters.aparam} of each atom (numb_aparam)")
    if parameters.charge_spin:
        words.append("charge and spin of frames (add_chg_spin_ebd)")
    if parameters.spin:
        words.append("the spin of each atom (model/spin)")
    return " and ".join(words)


def _matching_systems(folder: str, patterns: Sequence[str]) -> list[str]:
    """Return the systems below a folder that match one of the patterns, sorted.

    A database is its only system.
    """
    if is_lmdb(folder):
        return [folder]
    if not os.path.isdir(folder):
        raise SystemNotFoundError(f"rglob_patterns searches folders, but {folder} is none")
    try:
        matches = {str(place) for pattern in patterns for place in Path(folder).rglob(pattern)}
    except (ValueError, NotImplementedError) as error:
        raise SystemNotFoundError(f"rglob_patterns {list(patterns)}: {error}") from error
    systems = sorted(place for place in matches if os.path.isfile(os.path.join(place, "type.raw")))
    if not systems:
        raise SystemNotFoundError(
            f"no system below {folder} fits rglob_patterns {list(patterns)}: {len(matches)} paths "
            "do, none with a type.raw"
        )
    return systems


def _stores(path: str, handles: HandleCache, read_foreign: Reader) -> Iterator[Store]:
    """Find all systems at or below a path; `read_foreign` reads other programs' files and folders."""
    mode = _mode(path)
    mode_of_file = mode or _mode(path.partition("#")[0])  # "#" may begin a group of an HDF5 file
    if mode_of_file and not stat.S_ISREG(mode_of_file) and not stat.S_ISDIR(mode_of_file):
        raise SystemNotFoundError(
            f"system {path} is a device or FIFO; give a folder or a regular file"
        )
    registered = next((read for ending, read in _READERS.items() if path.endswith(ending)), None)
    if registered is not None:
        if not mode:
            raise SystemNotFoundError(f"system {path} does not exist")
        if isinstance(registered, str):
            module, _, name = registered.partition(":")
            registered = getattr(import_module(module), name)
        yield from registered(path)
    elif is_lmdb(path) or path.endswith(".lmdb"):
        yield from lmdb_stores(path, handles)
    elif "#" not in path and not stat.S_ISREG(mode):
        yield from npy_stores(path, handles) or read_foreign(path) or _refuse_folder(path)
    else:
        from h5py import is_hdf5  # imported for HDF5 files only: it is slow

        from deepmd_muon.data.stores.hdf5_store import hdf5_stores

        if stat.S_ISREG(mode) and not is_hdf5(path) and not path.endswith((".h5", ".hdf5")):
            yield from read_foreign(path)
        else:
            yield from hdf5_stores(path, handles)


def _refuse_folder(path: str) -> NoReturn:
    raise SystemNotFoundError(
        f"no system found in {path}: neither it nor a folder below has a type.raw, or an output of "
        f"a program that is recognized{describe_files(path)}"
    )


def _mode(path: str) -> int:
    """Return the kind of a path, as `stat` encodes it; 0 if it does not exist."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):
        return 0
