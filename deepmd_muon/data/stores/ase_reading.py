"""Systems from files that ASE reads: extended XYZ, trajectories, outputs of electronic-structure programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError, SystemNotFoundError
from deepmd_muon.data.stores.ase_labels import Labels, given, parameters_of
from deepmd_muon.data.stores.memory import MemoryStore
from deepmd_muon.data.stores.molecular_codes import gaussian_convergence, orca_convergence
from deepmd_muon.data.stores.vasp_steps import read_outcar, vasprun_convergence
from deepmd_muon.data.stores.xyz_frames import read_xyz_frames
from deepmd_muon.files import open_regular
from deepmd_muon.label_keys import LabelKeys

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger(__name__)
# Formats with lines after their last frame.
_WITH_TAIL = ("xtd",)
# Begin of a trajectory of ASE.
_TRAJECTORY = b"- of UlmASE-Trajectory"
# Endings of files that ASE decompresses.
_COMPRESSED = (".gz", ".bz2", ".xz")
# Numbers compress to a quarter or so, repeated frames to a hundredth; smaller contents fit in any memory [bytes].
_MOST_COMPRESSED, _ALWAYS_FITS = 200, 64 << 20


def read_ase(
    path: str, keys: LabelKeys | None = None, *, keep_unconverged: bool = False
) -> list[MemoryStore]:
    """Read all frames of a file that ASE reads; frames of the same atoms in the same order are one system.

    Energies are free energies where ASE has them (`free_energy`): their derivatives are the forces. A cell without
    volume, or no periodic direction, means no cell. Frames whose electronic loop did not converge are left out with a
    warning, or kept with `keep_unconverged`.

    Raises
    ------
    DataError
        When ASE is not installed.
    SystemNotFoundError
        When ASE cannot read the file.
    SystemFormatError
        When the file has no frames, a label is ambiguous or has a wrong shape, or a frame is periodic along some axes
        only.
    """
    try:
        import ase.io  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"system {path} is neither a folder nor an HDF5 file; other files are read by ASE, which is not installed: "
            "pip install ase"
        ) from error
    try:
        _check_size(path)
        frames, converged = _read_frames(path)
    except DataError:
        raise
    except Exception as error:  # ASE's readers let any error of their parsing through
        raise SystemNotFoundError(
            f"system {path}: neither a folder, an HDF5 file nor a file that ASE reads "
            f"({type(error).__name__}: {str(error).strip() or 'unknown format'})"
        ) from error
    if not frames:
        raise SystemFormatError(path, "", "the file has no frames")
    chosen = range(len(frames)) if keep_unconverged else _converged(frames, converged, path)
    return _stores(frames, chosen, path, keys or LabelKeys())


def _read_frames(path: str) -> tuple[Sequence[Atoms], Sequence[bool]]:
    """Return all frames, and whether each converged as far as the format of the file says so.

    Raises
    ------
    SystemFormatError
        When the file goes on after the last frame that ASE reads.
    """
    from ase.io import read
    from ase.io.formats import filetype, ioformats, open_with_compression

    kind = filetype(path)
    form = ioformats.get(kind)
    if kind == "vasp-out":
        return read_outcar(path)
    if kind in ("xyz", "extxyz"):
        return read_xyz_frames(path, kind), []
    if kind == "traj":
        _refuse_joined(path)
    # A format that ASE also writes is one of structures: a program's output goes on after the last.
    structures = form is not None and form.can_write and form.acceptsfd and not form.isbinary
    if structures and not form.single and kind not in _WITH_TAIL:
        with open_with_compression(path, "rt") as file:
            frames = read(file, index=":", format=kind)
            if rest := len(file.read().strip()):
                problem = (
                    f"ASE read {len(frames)} frames ({kind}), {rest} characters follow that it did "
                    "not read: an empty line or a second file may end the frames early"
                )
                raise SystemFormatError(path, "", problem)
        return frames, []
    # Otherwise ASE takes the text after an "@" for numbers of frames of the file before it.
    frames = read(path, index=":", do_not_split_by_at_sign=True)
    if kind == "vasp-xml":
        return frames, vasprun_convergence(path)
    if kind == "gaussian-out":
        return frames, gaussian_convergence(path, frames)
    return frames, orca_convergence(frames) if kind == "orca-output" else []


def _refuse_joined(path: str) -> None:
    """Refuse trajectories that were joined by `cat`: ASE reads the first one only.

    Bytes of another kind may follow the last frame; a killed run leaves part of a frame there.
    """
    overlap = b""
    with open(path, "rb") as file:
        file.seek(len(_TRAJECTORY))
        while content := file.read(1 << 20):
            if _TRAJECTORY in overlap + content:
                problem = (
                    "a second trajectory follows the first, and ASE reads only the first: give "
                    "both files, or join them with `ase convert`"
                )
                raise SystemFormatError(path, "", problem)
            overlap = content[-len(_TRAJECTORY) :]


def read_images(path: str | os.PathLike[str]) -> list[Atoms]:
    """Read all frames of an extended XYZ file as they are, with everything that the file says of them.

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
            f"{name} cannot be read as extended XYZ ({type(error).__name__}: {str(error).strip()[:500]})"
        ) from error
    if not frames:
        raise SystemFormatError(name, "", "the file has no frames")
    return frames


def _check_size(path: str) -> None:
    """Refuse a compressed file with an implausible ratio: it could fill the memory many times."""
    if not path.endswith(_COMPRESSED):
        return
    most, found = max(_ALWAYS_FITS, _MOST_COMPRESSED * os.path.getsize(path)), 0
    with _open(path) as file:
        while content := file.read(1 << 20):
            found += len(content)
            if found > most:
                raise SystemFormatError(
                    path,
                    "",
                    f"more than {found >> 20} MiB are compressed into {os.path.getsize(path)} bytes, as in no set of "
                    "data; decompress it if you trust it",
                )


def _open(path: str) -> IO[bytes]:
    from ase.io.formats import open_with_compression

    opened: IO[bytes] = open_with_compression(path, "rb")
    return opened


def _converged(frames: Sequence[Atoms], converged: Sequence[bool], path: str) -> list[int]:
    """Return the numbers of the frames that are not known to lack convergence, and warn of the others."""
    # Some of ASE's readers say it in results or info.
    said = [given(atoms).get("converged") for atoms in frames]
    unsure = [isinstance(value, (bool, np.bool_)) and not value for value in said]
    for number, good in enumerate(converged[: len(frames)]):
        unsure[number] = unsure[number] or not good
    if all(unsure):
        raise SystemFormatError(
            path,
            "",
            f"the electronic loop of no frame converged ({len(frames)} frames); allow it more "
            "steps (NELM of VASP) and compute them again, or keep them: keep_unconverged true "
            "beside systems, or --keep-unconverged",
        )
    if bad := [number for number, found in enumerate(unsure) if found]:
        log.warning(
            "%s: %d of %d frames are left out, because their electronic loop did not converge (frames %s); "
            "keep_unconverged true beside systems, or --keep-unconverged, keeps them",
            path,
            len(bad),
            len(frames),
            ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else ""),
        )
    return [number for number, found in enumerate(unsure) if not found]


def _stores(
    frames: Sequence[Atoms], chosen: Sequence[int], path: str, keys: LabelKeys
) -> list[MemoryStore]:
    """Sort frames by their atoms and by whether they have a cell; within a system, by the labels that they have."""
    systems: dict[
        tuple[tuple[str, ...], bool],
        dict[frozenset[tuple[str, int]], list[Mapping[str, np.ndarray]]],
    ] = {}
    labels = Labels.of([frames[number] for number in chosen], path, keys)
    for number in chosen:
        atoms, place = frames[number], f"frame {number}"
        arrays = _structure(atoms, path, place)
        arrays |= labels.read(atoms, path, place, cell="box" in arrays) | parameters_of(
            atoms, path, place
        )
        kind = tuple(atoms.get_chemical_symbols()), "box" in arrays
        contents = frozenset((name, array.size) for name, array in arrays.items())
        systems.setdefault(kind, {}).setdefault(contents, []).append(arrays)
    stores = []
    for number, ((symbols, pbc), sets) in enumerate(systems.items()):
        stacked = [
            {name: np.stack([frame[name] for frame in alike]) for name in alike[0]}
            for alike in sets.values()
        ]
        formula = "".join(
            f"{element}{symbols.count(element)}" for element in dict.fromkeys(symbols)
        )
        name = path if len(systems) == 1 else f"{path}#{number}-{formula}"
        stores.append(MemoryStore(name, symbols, stacked, pbc=pbc))
    return stores


def _structure(atoms: Atoms, path: str, place: str) -> dict[str, np.ndarray]:
    """Return positions (3·natoms,) and, of a periodic frame, the cell (9,) [Å]."""
    periodic = " ".join("T" if axis else "F" for axis in atoms.pbc)
    if atoms.pbc.any() and not atoms.pbc.all():
        raise SystemFormatError(
            path,
            place,
            f'pbc="{periodic}": data are periodic along all axes or none, and this frame would be trained as another '
            'structure; add vacuum of more than the cut-off along the free axes and set pbc="T T T", or remove the '
            'cell (pbc="F F F") from a molecule',
        )
    if not np.isfinite(atoms.cell.array).all():
        raise SystemFormatError(path, place, f"the cell is not finite: {atoms.cell.array.tolist()}")
    found = {"coord": atoms.get_positions().reshape(-1)}
    if atoms.pbc.any() and atoms.cell.volume > 0:
        found["box"] = np.array(atoms.cell, dtype=np.float64).reshape(-1)
    return found
