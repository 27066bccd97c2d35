"""The values of the Muon route's rules in messages, beside the elements."""

from __future__ import annotations

import functools
from typing import NamedTuple

from deepmd_muon.optim.rules.interface import Input, MatrixRule, StateTensor
from deepmd_muon.optim.rules.registry import inputs_of, tensors_of


class Carried(NamedTuple):
    """The values that messages carry for some rules, beside the elements.

    Attributes
    ----------
    blocks
        Keys of the state tensors with one number per block, which are sent and returned.
    lines
        The same with numbers for each row or column.
    inputs
        What is sent of each element beside the direction.
    sums
        Number of values of the statistics, which are sent only.
    """

    blocks: tuple[str, ...]
    lines: tuple[tuple[str, StateTensor], ...]
    inputs: tuple[Input, ...]
    sums: int


@functools.lru_cache(maxsize=256)
def carried(rules: tuple[MatrixRule, ...]) -> Carried:
    """Return what messages carry for these rules."""
    tensors = tensors_of(rules)
    lines = tuple((key, tensor) for key, tensor in tensors.items() if tensor.extent in ("rows", "columns"))
    blocks = tuple(key for key, tensor in tensors.items() if tensor.extent == "blocks")
    return Carried(blocks, lines, inputs_of(rules), sum(rule.sums for rule in rules))
