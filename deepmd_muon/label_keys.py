"""Names of labels in files that ASE reads: a section of input.json.

Imports neither NumPy nor torch.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

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

    rules: ClassVar[tuple[Rule, ...]] = (Rule(("stress", "virial"), _one_of_both),)
