"""The fitting net `ener` in deepmd-kit's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepmd_muon.model.deepmd_kit import Translation


def _section(section: Mapping[str, Any]) -> dict[str, Any]:
    """One flag instead of one a layer, and a list of energies instead of null."""
    trainable = section.get("trainable", True)
    return {
        **section,
        "trainable": all(trainable) if isinstance(trainable, (list, tuple)) else trainable,
        "atom_ener": section.get("atom_ener") or [],
    }


TRANSLATION = Translation(section=_section)
