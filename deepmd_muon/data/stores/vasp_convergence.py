"""Ionic steps of VASP whose electronic loop ended without convergence; ASE reads their labels like all others."""

from __future__ import annotations

import re

# ASE's readers begin and end a frame at the same lines.
_FRAME_ENDS = "FREE ENERGIE OF THE ION-ELECTRON SYSTEM"
_CONVERGED = "aborting loop because EDIFF is reached"
_NELM = re.compile(r"\bNELM\s*=\s*(\d+)")


def converged_frames(path: str, form: str) -> list[bool]:
    """Return for every ionic step of a file, of a format by ASE's name, whether its electronic loop converged.

    An OUTCAR says so, and says "aborting loop" with another reason otherwise. A vasprun.xml only holds the steps of the
    loop: NELM of them count as not converged, as in pymatgen. The list is empty for formats of other programs.
    """
    if form == "vasp-out":
        return _of_outcar(path)
    return _of_vasprun(path) if form == "vasp-xml" else []


def _of_outcar(path: str) -> list[bool]:
    from ase.io.formats import open_with_compression

    found: list[bool] = []
    most, loops, reason = 0, 0, ""
    with open_with_compression(path, "rt") as file:
        for line in file:
            if not most and (match := _NELM.search(line)):
                most = int(match[1])
            elif "- Iteration" in line:
                loops += 1
            elif "aborting loop" in line:
                reason = line
            elif _FRAME_ENDS in line:
                # Without any reason (a shortened file), only NELM loops are a sign.
                found.append(_CONVERGED in reason if reason else not 0 < most <= loops)
                loops, reason = 0, ""
    return found


def _of_vasprun(path: str) -> list[bool]:
    from xml.etree import ElementTree  # takes 15 ms, and few data are VASP's

    from ase.io.formats import open_with_compression

    found: list[bool] = []
    most, loops = 0, 0
    with open_with_compression(path, "rb") as file:
        try:
            for _, element in ElementTree.iterparse(file):
                if element.tag == "i" and element.get("name") == "NELM":
                    most = int(element.text or 0)
                elif element.tag == "scstep":
                    loops += 1
                elif element.tag == "calculation":
                    found.append(not 0 < most <= loops)
                    loops = 0
                    element.clear()
        except ElementTree.ParseError:  # a run that was killed: ASE reads the steps before
            found.append(not 0 < most <= loops)
    return found
