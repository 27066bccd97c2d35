"""Words in headers of extended XYZ that may change the energy, and that nothing reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from deepmd_muon.data.system import System

# Two structures that are alike but for these have other energies.
_CHANGES_ENERGY = re.compile(
    r"charge|spin|multiplicity|magmom|magnetization|field|electron_temp|elec_temp|uhf",
    re.IGNORECASE,
)
_MAX_LISTED = 5  # values that a message lists


def unread_words(systems: Sequence[System], read: Collection[str]) -> list[str]:
    """Describe words such as a charge that differ among the frames, except those that are `read`.

    Numbers of other names, such as times, are not: they may follow from the structure.
    """
    values: dict[str, Counter[str]] = {}
    n_headers = 0
    for system in systems:
        for number in range(system.nframes):
            words = system.origin(number).words
            n_headers += words is not None
            for name, value in (words or {}).items():
                if name not in read and _CHANGES_ENERGY.search(name) and np.isscalar(value):
                    values.setdefault(name, Counter())[str(value)] += 1
    for counts in values.values():
        n_without = n_headers - sum(counts.values())
        if n_without:
            counts["none"] = n_without
    return [
        f"headers of frames have {name} ({_listed(counts)}), which no model reads unless you name it: "
        f"--frame-parameters {name} (doc/molecules.md)"
        for name, counts in sorted(values.items())
        if len(counts) > 1
    ]


def _listed(counts: Counter[str]) -> str:
    text = ", ".join(
        f"{value} in {count} frame{'s' * (count > 1)}"
        for value, count in counts.most_common(_MAX_LISTED)
    )
    return f"{text}, …" if len(counts) > _MAX_LISTED else text
