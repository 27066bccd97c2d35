"""How data are read: names of labels in files, which frames count, and how much; settings of input.json.

Imports neither NumPy nor torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deepmd_muon.section import Rule, Section
from deepmd_muon.setting import setting


def _one_of_both(stress: str | None, virial: str | None) -> str | None:
    if stress and virial:
        return f"excludes virial; found {stress!r} and {virial!r}, keep one of them"
    return None


@dataclasses.dataclass(frozen=True)
class LabelKeys(Section):
    """Names of the labels in files that ASE reads.

    Labels without a given name are found by their usual names.
    """

    energy: str | None = setting(None, doc="Name of the total energy [eV], such as 'REF_energy'.")
    force: str | None = setting(None, doc="Name of the forces [eV/Å].")
    virial: str | None = setting(None, doc="Name of the virial −dE/dε [eV], nine numbers.")
    stress: str | None = setting(
        None,
        doc=(
            "Name of the stress [eV/Å³], six numbers (Voigt) or nine; positive under tension. "
            "Excludes virial."
        ),
    )

    rules = (Rule(("stress", "virial"), _one_of_both),)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How data are read: the settings of a data section beside its paths.

    Attributes
    ----------
    keys
        Names of the labels in files that ASE reads.
    format
        Format of all paths, by ASE's or dpdata's name; None lets content and name of a file tell.
    keep_unconverged
        Keep frames whose electronic loop did not converge, of files that ASE or dpdata read.
    config_weights
        Weights of frames in the loss by their `config_type`, in files that ASE reads.
    max_force
        Frames with a larger force [eV/Å] are left out; None keeps all.
    min_pair_dist
        Frames with two atoms nearer than this [Å] are left out.
    frame_parameters
        Names of the frame parameters, such as "charge": columns of fparam, from files of these
        names in each set or from headers of extended XYZ.
    """

    keys: LabelKeys = dataclasses.field(default_factory=LabelKeys)
    format: str | None = None
    keep_unconverged: bool = False
    config_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_force: float | None = None
    min_pair_dist: float = 0.0
    frame_parameters: tuple[str, ...] = ()
