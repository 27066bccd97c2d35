"""One colour for each optimizer in all pictures, and colours for other series."""

from __future__ import annotations

from collections.abc import Sequence

#: Colours in the order of series.
SERIES = ("#1f6fb4", "#d1651a", "#2d8a57", "#8a5aa8", "#b8323f", "#6b6b6b", "#8c6d31")
BLUE, ORANGE, GREEN, PURPLE, RED, GRAY, BROWN = SERIES
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
    named: dict[int, str] = {}
    for number, label in enumerate(labels):
        color = next((c for name, c in OPTIMIZERS.items() if _names(label, name)), None)
        if color is not None and color not in named.values():
            named[number] = color
    free = [color for color in SERIES if color not in named.values()] or list(SERIES)
    rest = (free[number % len(free)] for number in range(len(labels)))
    return [named.get(number) or next(rest) for number in range(len(labels))]


def _names(label: str, name: str) -> bool:
    start, rest = label[: len(name)], label[len(name) :]
    return start.lower() == name.lower() and not rest[:1].isalnum()
