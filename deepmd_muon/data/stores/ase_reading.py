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
from deepmd_muon.data.stores.vasp_convergence import converged_frames
from deepmd_muon.files import open_regular
from deepmd_muon.label_keys import LabelKeys

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger(__name__)
# Characters of a line that counts atoms.
_LONGEST_COUNT = 64
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
        from ase.io import read
        from ase.io.formats import filetype
    except ImportError as error:
        raise DataError(
            f"system {path} is neither a folder nor an HDF5 file; other files are read by ASE, which is not installed: "
            "pip install ase"
        ) from error
    try:
        _check_size(path)
        kind = filetype(path)
        if kind in ("xyz", "extxyz"):
            _check_counts(path)
        # Otherwise ASE takes the text after an "@" for numbers of frames, and reads the file named by the rest.
        frames = read(path, index=":", do_not_split_by_at_sign=True)
        converged = converged_frames(path, kind)
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


def read_images(path: str | os.PathLike[str]) -> list[Atoms]:
    """Read all frames of an extended XYZ file as they are, with everything that the file says of them.

    Raises
    ------
    SystemNotFoundError
        When it is not a regular file, or ASE cannot read it.
    SystemFormatError
        When it has no frames, or fewer atoms than it says.
    """
    from ase.io import read

    name = os.fspath(path)
    try:
        open_regular(name).close()
        _check_size(name)
        _check_counts(name)
        frames = read(name, index=":", format="extxyz", do_not_split_by_at_sign=True)
    except DataError:
        raise
    except Exception as error:  # ASE's readers let any error of their parsing through
        raise SystemNotFoundError(
            f"{name} cannot be read as extended XYZ ({type(error).__name__}: {str(error).strip()[:500]})"
        ) from error
    if not frames:
        raise SystemFormatError(name, "", "the file has no frames")
    return list(frames)


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


def _check_counts(path: str) -> None:
    """Refuse an XYZ file whose counts of atoms go beyond its end: ASE's reader would read empty lines that often."""
    with _open(path) as file:
        while (line := file.readline(_LONGEST_COUNT)).strip():
            if line.lstrip().startswith(b"VEC"):  # vectors of a cell, after the atoms
                if not line.endswith(b"\n"):
                    file.readline()
                continue
            if len(line) == _LONGEST_COUNT:
                raise SystemFormatError(path, "", "a frame does not begin with a count of atoms")
            try:
                count = int(line.decode())  # as ASE does: it takes signs, and 1_000 for 1000
            except ValueError:
                return  # an error that ASE reports
            for _ in range(count + 1):
                if not file.readline():
                    raise SystemFormatError(
                        path,
                        "",
                        f"a frame has {count} atoms by its first line, more than the file holds",
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
            f"the electronic loop of no frame converged ({len(frames)} frames); raise NELM and compute them again, or "
            "keep them: keep_unconverged true beside systems, or --keep-unconverged",
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
