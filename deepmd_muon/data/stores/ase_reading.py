"""Systems from files that ASE reads: extended XYZ, trajectories, outputs of programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError, SystemNotFoundError
from deepmd_muon.data.stores.ase_labels import Labels, is_label, parameters_of, values_of
from deepmd_muon.data.stores.ase_weights import Weights
from deepmd_muon.data.stores.memory import FrameOrigin, MemoryStore
from deepmd_muon.data.stores.molecular_codes import gaussian_convergence, orca_convergence
from deepmd_muon.data.stores.programs import COMPRESSED
from deepmd_muon.data.stores.vasp_steps import read_outcar, vasprun_convergence
from deepmd_muon.data.stores.xyz_frames import read_xyz_frames
from deepmd_muon.files import open_regular
from deepmd_muon.label_keys import Reading

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger(__name__)

# Formats with lines after their last frame.
_WITH_TAIL = ("xtd",)
# Beginning of a trajectory of ASE.
_TRAJECTORY = b"- of UlmASE-Trajectory"
# Numbers compress to a quarter or so, repeated frames to a hundredth.
_MAX_COMPRESSION = 200
_ALWAYS_FITS = 64 << 20  # smaller contents fit in any memory [bytes]
_BLOCK = 1 << 20  # read at once [bytes]
_MAX_LISTED = 5  # frames that a warning lists
_NAME_FORMAT = "name the right format if ASE or dpdata reads it: --format, or format beside systems"


def read_ase(path: str, reading: Reading, kind: str | None = None) -> list[MemoryStore]:
    """Read all frames of a file that ASE reads, in its format `kind` or one that it recognizes.

    Frames of the same atoms in the same order are one system. Energies are free energies if ASE has
    them (`free_energy`): their derivatives are the forces. A cell without volume, or no periodic
    direction, means no cell. Frames whose electronic loop did not converge are left out with a
    warning, or kept with `reading.keep_unconverged`. So are frames of weight 0.

    Raises
    ------
    DataError
        When ASE is not installed.
    SystemNotFoundError
        When ASE cannot read the file.
    SystemFormatError
        When the file has no frames, a label is ambiguous or has a wrong shape, or a frame is
        periodic along some axes only.
    """
    try:
        import ase.io  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"system {path} is neither a folder nor an HDF5 file; other files are read by ASE, "
            "which is not installed: pip install ase"
        ) from error
    try:
        _check_size(path)
        contents = _read_frames(path, kind)
    except DataError:
        raise
    except Exception as error:  # ASE's readers let any error of their parsing through
        problem = "neither a folder, an HDF5 file nor a file that ASE reads"
        if kind is not None:
            problem = f"ASE cannot read it as {kind}"
        raise SystemNotFoundError(
            f"system {path}: {problem} "
            f"({type(error).__name__}: {str(error).strip() or 'unknown format'}); {_NAME_FORMAT}; "
            "arrays of other layouts (.npz) become a system by examples/write_system.py, in eV and Å"
        ) from error
    if not contents.frames:
        raise SystemFormatError(path, "", f"the file has no frames that ASE finds; {_NAME_FORMAT}")
    numbers: Sequence[int] = range(len(contents.frames))
    if not reading.keep_unconverged:
        numbers = _converged_frames(contents, path)
    return _stores(contents.frames, numbers, path, reading)


def read_images(path: str | os.PathLike[str]) -> list[Atoms]:
    """Read all frames of an extended XYZ file as they are, with all their info and arrays.

    Raises
    ------
    SystemNotFoundError
        When it is not a regular file, or ASE cannot read it.
    SystemFormatError
        When it has no frames, or fewer atoms than it says.
    """
    name = os.fspath(path)
    try:
        open_regular(name).close()
        _check_size(name)
        frames = read_xyz_frames(name, "extxyz")
    except DataError:
        raise
    except Exception as error:  # ASE's readers let any error of their parsing through
        raise SystemNotFoundError(
            f"{name} cannot be read as extended XYZ "
            f"({type(error).__name__}: {str(error).strip()[:500]})"
        ) from error
    if not frames:
        raise SystemFormatError(name, "", "the file has no frames")
    return frames


# ----- frames ------------------------------------------------------------------------------------


class _Contents(NamedTuple):
    """The frames of a file."""

    frames: Sequence[Atoms]
    converged: Sequence[bool]  # of each frame; fewer or none if the format does not say


def _check_size(path: str) -> None:
    """Refuse a compressed file with an implausible ratio: it could fill the memory many times."""
    if not path.endswith(COMPRESSED):
        return
    from ase.io.formats import open_with_compression

    compressed_size = os.path.getsize(path)
    limit = max(_ALWAYS_FITS, _MAX_COMPRESSION * compressed_size)
    size = 0
    with open_with_compression(path, "rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            if size > limit:
                raise SystemFormatError(
                    path,
                    "",
                    f"more than {size >> 20} MiB are compressed into {compressed_size} bytes, as "
                    "in no set of data; decompress it if you trust it",
                )


def _read_frames(path: str, kind: str | None) -> _Contents:
    """Return all frames, and whether each converged as far as the format of the file says so.

    Raises
    ------
    SystemFormatError
        When the file goes on after the last frame that ASE reads.
    """
    from ase.io import read
    from ase.io.formats import filetype, ioformats, open_with_compression

    kind = kind or filetype(path)
    form = ioformats.get(kind)
    if kind == "vasp-out":
        outcar = read_outcar(path)
        return _Contents(outcar.frames, outcar.converged)
    if kind in ("xyz", "extxyz"):
        return _Contents(read_xyz_frames(path, kind), [])
    if kind in ("db", "json"):
        return _Contents(_read_rows(path, kind), [])
    if kind == "traj":
        _refuse_joined(path)
    if kind == "lammps-dump-text":
        _refuse_types_without_elements(path)
    # A format that ASE also writes is one of structures: a program's output goes on after the last.
    structures = form is not None and form.can_write and form.acceptsfd and not form.isbinary
    if structures and not form.single and kind not in _WITH_TAIL:
        with open_with_compression(path, "rt") as file:
            frames = read(file, index=":", format=kind)
            n_unread = len(file.read().strip())
        if n_unread:
            raise SystemFormatError(
                path,
                "",
                f"ASE read {len(frames)} frames ({kind}), {n_unread} characters follow that it did "
                "not read: an empty line or a second file may end the frames early",
            )
        return _Contents(frames, [])
    # Otherwise ASE takes the text after an "@" for numbers of frames of the file before it.
    frames = read(path, index=":", format=kind, do_not_split_by_at_sign=True)
    converged: list[bool] = []
    if kind == "vasp-xml":
        converged = vasprun_convergence(path)
    elif kind == "gaussian-out":
        converged = gaussian_convergence(path, frames)
    elif kind == "orca-output":
        converged = orca_convergence(frames)
    return _Contents(frames, converged)


def _read_rows(path: str, kind: str) -> list[Atoms]:
    """Return the rows of a database of ASE, their key-value pairs as words of a header.

    The results of a row's calculator are its labels, so that pairs with names of labels are left
    out: they may be other methods'.
    """
    from ase.db import connect

    frames = []
    with connect(path, type=kind, serial=True) as database:
        for row in database.select():
            atoms = row.toatoms()
            for name in row.key_value_pairs:
                if atoms.calc is None or not is_label(name):
                    # row.charge is the sum of initial charges, whatever the pair says.
                    atoms.info[name] = vars(row)[name]
            frames.append(atoms)
    return frames


def _refuse_joined(path: str) -> None:
    """Refuse trajectories that were joined by `cat`: ASE reads the first one only.

    Bytes of another kind may follow the last frame; a killed run leaves part of a frame there.
    """
    overlap = b""
    with open(path, "rb") as file:
        file.seek(len(_TRAJECTORY))
        while block := file.read(_BLOCK):
            if _TRAJECTORY in overlap + block:
                raise SystemFormatError(
                    path,
                    "",
                    "a second trajectory follows the first, and ASE reads only the first: give "
                    "both files, or join them with `ase convert`",
                )
            overlap = block[-len(_TRAJECTORY) :]


def _refuse_types_without_elements(path: str) -> None:
    """Refuse a dump of LAMMPS without elements: ASE takes type 1 for hydrogen, 2 for helium."""
    from ase.io.formats import open_with_compression

    with open_with_compression(path, "rt") as file:
        columns = next((line for line in file if line.startswith("ITEM: ATOMS")), "").split()
    if not {"element", "mass"}.intersection(columns):
        raise SystemFormatError(
            path,
            "frame 0",
            "its atoms have types and no elements: write the dump with the column element (dump "
            "custom … element x y z fx fy fz, dump_modify element …), and energies as labels are "
            "in no dump",
        )


def _converged_frames(contents: _Contents, path: str) -> list[int]:
    """Return the numbers of the frames that may have converged, and warn of the others."""
    failed = [_says_unconverged(atoms) for atoms in contents.frames]
    for number, converged in enumerate(contents.converged[: len(failed)]):
        failed[number] = failed[number] or not converged
    if all(failed):
        raise SystemFormatError(
            path,
            "",
            f"the electronic loop of no frame converged ({len(failed)} frames); allow it more "
            "steps (NELM of VASP) and compute them again, or keep them: keep_unconverged true "
            "beside systems, or --keep-unconverged",
        )
    failed_numbers = [number for number, has_failed in enumerate(failed) if has_failed]
    if failed_numbers:
        listed = ", ".join(map(str, failed_numbers[:_MAX_LISTED]))
        if len(failed_numbers) > _MAX_LISTED:
            listed += ", …"
        log.warning(
            "%s: %d of %d frames are left out, because their electronic loop did not converge "
            "(frames %s); keep_unconverged true beside systems, or --keep-unconverged, keeps them",
            path,
            len(failed_numbers),
            len(failed),
            listed,
        )
    return [number for number, has_failed in enumerate(failed) if not has_failed]


def _says_unconverged(atoms: Atoms) -> bool:
    """Return whether a frame says that it did not converge, as some of ASE's readers do."""
    converged = values_of(atoms).get("converged")
    return isinstance(converged, (bool, np.bool_)) and not converged


# ----- systems -----------------------------------------------------------------------------------


def _stores(
    frames: Sequence[Atoms], numbers: Sequence[int], path: str, reading: Reading
) -> list[MemoryStore]:
    """Sort frames into systems by their atoms and by whether they have a cell.

    Within a system, frames with the same labels are a set.
    """
    systems: dict[_Kind, dict[_Sizes, list[_Frame]]] = {}
    weights = Weights.of(frames, numbers, path, reading.config_weights)
    numbers = weights.counting
    labels = Labels.of([frames[number] for number in numbers], path, reading.keys)
    for number in numbers:
        atoms = frames[number]
        place = f"frame {number}"
        arrays = _structure(atoms, path, place)
        pbc = "box" in arrays
        arrays |= labels.read(atoms, path, place, cell=pbc)
        arrays |= parameters_of(atoms, path, place, reading.frame_parameters)
        if weights.differ:
            arrays["weight"] = np.array([weights.by_frame[number]])
        kind = _Kind(tuple(atoms.get_chemical_symbols()), pbc)
        sizes = frozenset((name, array.size) for name, array in arrays.items())
        origin = FrameOrigin(
            file=path,
            number=number,
            config_type=str(atoms.info.get("config_type", "")),
            words=labels.other_words(atoms),
        )
        systems.setdefault(kind, {}).setdefault(sizes, []).append(_Frame(arrays, origin))

    stores = []
    for number, (kind, sets) in enumerate(systems.items()):
        stacked = [
            {name: np.stack([frame.arrays[name] for frame in alike]) for name in alike[0].arrays}
            for alike in sets.values()
        ]
        name = path if len(systems) == 1 else f"{path}#{number}-{_formula(kind.symbols)}"
        origins = [frame.origin for alike in sets.values() for frame in alike]
        stores.append(MemoryStore(name, kind.symbols, stacked, pbc=kind.pbc, origins=origins))
    return stores


class _Frame(NamedTuple):
    """One frame."""

    arrays: Mapping[str, np.ndarray]
    origin: FrameOrigin


class _Kind(NamedTuple):
    """What frames of one system have in common."""

    symbols: tuple[str, ...]
    pbc: bool


_Sizes = frozenset[tuple[str, int]]
"""Names of the arrays of a frame, and numbers of their values."""


def _formula(symbols: Sequence[str]) -> str:
    return "".join(f"{element}{symbols.count(element)}" for element in dict.fromkeys(symbols))


def _structure(atoms: Atoms, path: str, place: str) -> dict[str, np.ndarray]:
    """Return positions (3·natoms,) and, of a periodic frame, the cell (9,) [Å]."""
    if atoms.pbc.any() and not atoms.pbc.all():
        periodic = " ".join("T" if axis else "F" for axis in atoms.pbc)
        raise SystemFormatError(
            path,
            place,
            f'pbc="{periodic}": data are periodic along all axes or none, and this frame would be '
            "trained as another structure; add vacuum of more than the cut-off along the free axes "
            'and set pbc="T T T", or remove the cell (pbc="F F F") from a molecule',
        )
    if not np.isfinite(atoms.cell.array).all():
        raise SystemFormatError(path, place, f"the cell is not finite: {atoms.cell.array.tolist()}")
    structure = {"coord": atoms.get_positions().reshape(-1)}
    if atoms.pbc.any() and atoms.cell.volume > 0:
        structure["box"] = np.array(atoms.cell, dtype=np.float64).reshape(-1)
    return structure
