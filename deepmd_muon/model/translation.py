"""How deepmd-kit's state dict and section of one part of a model differ from ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepmd_muon.model.errors import ForeignModelError


def own_parameters(part: torch.nn.Module) -> list[str]:
    """Return the names of a part's parameters in our order."""
    return [name for name, _ in part.named_parameters()]


def check_slots(state: Mapping[str, torch.Tensor], part: str, *names: str) -> None:
    """Check that statistics of a descriptor are those of a centre type, the same for every neighbour slot.

    Raises
    ------
    ForeignModelError
        When slots differ.
    """
    for name in names:
        values = state[f"{part}.{name}"]
        if not torch.equal(values, values[:, :1].expand_as(values)):
            raise ForeignModelError(
                f"the descriptor's {name} differs between neighbour slots of one centre type"
            )


@dataclasses.dataclass(frozen=True)
class Translation:
    """The differences between deepmd-kit's form of one kind of descriptor or fitting net and ours.

    Names are those below the part, without the prefix up to `descriptor.` or `fitting_net.`.

    Attributes
    ----------
    section
        Changes deepmd-kit's normalised section to today's keys and spellings of ours, where they differ.
    empty
        Names of the entries without elements that deepmd-kit's state dict has besides ours, parameters or buffers.
    is_empty
        Whether a name of deepmd-kit's state dict is such an entry.
    parameters
        Names of all parameters in the order of deepmd-kit's `named_parameters`, empty ones included.
    ours_only
        Features that a part's settings request and deepmd-kit lacks, one phrase each; it cannot read such a model.
    check
        Raises `ForeignModelError` when weights of deepmd-kit do not fit our form of the part.
    """

    section: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda section: section
    empty: Callable[[Any], list[str]] = lambda part: []
    is_empty: Callable[[str], bool] = lambda name: False
    parameters: Callable[[Any], list[str]] = own_parameters
    ours_only: Callable[[Any], Sequence[str]] = lambda settings: ()
    check: Callable[[Mapping[str, torch.Tensor]], None] = lambda state: None


PLAIN = Translation()
"""For a part that deepmd-kit does not have, or stores as we do."""
