"""The values of the Muon route's rules in messages, beside the elements."""

from __future__ import annotations

import functools
from typing import NamedTuple

from deepmd_muon.optim.routing.views import Axis
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.registry import tensors_of


class Carried(NamedTuple):
    """The values that messages carry for some rules, beside the elements.

    Attributes
    ----------
    blocks
        Keys of the state tensors with one number per block, which are sent and returned.
    lines
        The same with one number per row or column, and which of both.
    sums
        Number of values of the statistics, which are sent only.
    """

    blocks: tuple[str, ...]
    lines: tuple[tuple[str, Axis], ...]
    sums: int


@functools.lru_cache(maxsize=256)
def carried(rules: tuple[MatrixRule, ...]) -> Carried:
    """Return what messages carry for these rules."""
    tensors = tensors_of(rules)
    lines: list[tuple[str, Axis]] = []
    for key, tensor in tensors.items():
        if tensor.extent == "rows" or tensor.extent == "columns":
            lines.append((key, tensor.extent))
    blocks = tuple(key for key, tensor in tensors.items() if tensor.extent == "blocks")
    return Carried(blocks, tuple(lines), sum(rule.sums for rule in rules))
