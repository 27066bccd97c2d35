"""One colour for each optimizer in all pictures, and colours for other series.

Their lightness differs, so that a print in grey still tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

PURPLE = "#3c1a5b"
RED = "#8c1b2c"
BLUE = "#2467a8"
GRAY = "#7d7d7d"
GREEN = "#45a774"
ORANGE = "#ee9c30"
BROWN = "#dfc48c"
#: Colours in the order of series.
SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, GRAY, BROWN)
#: Colours of optimizers by their names in pictures.
OPTIMIZERS = {
    "HybridMuon": ORANGE,
    "Adam": BLUE,
    "AdamW": GREEN,
    "SOAP": PURPLE,
    "deepmd-kit's HybridMuon": RED,
    "torch.optim.Muon": GRAY,
    "schedule-free AdamW": BROWN,
}


def colors_of(labels: Sequence[str]) -> list[str]:
    """Return a colour for each label of the series of a picture, in their order.

    A label that is an optimizer's name, or begins with it as "HybridMuon, seed 2" does, gets that
    optimizer's colour if no earlier label has it. The others take the remaining colours in order,
    and start again with the first when all are taken.
    """
    reserved: dict[int, str] = {}  # by number of the label
    for number, label in enumerate(labels):
        for name, color in OPTIMIZERS.items():
            if _begins_with(label, name) and color not in reserved.values():
                reserved[number] = color
                break
    free = [color for color in SERIES if color not in reserved.values()]
    remaining = itertools.cycle(free or SERIES)
    return [reserved.get(number) or next(remaining) for number in range(len(labels))]


def _begins_with(label: str, name: str) -> bool:
    """Whether a label is a name or begins with it as a word, in any case."""
    follows = label[len(name) :][:1]
    return label.lower().startswith(name.lower()) and not follows.isalnum()
