"""A lower rate of the first layer of the fitting net on the Muon route, for the experiment on stability.

The layer is told apart by its shape: of the matrices of se_e2_a, it alone has many times more rows than columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from deepmd_muon.optim import MatrixRule, register_rule
from deepmd_muon.optim.rules.interface import BlockState

#: Rows per column from which a matrix is the first layer: 512 × 96 in the race, at most 96 × 96 elsewhere.
TALL = 4


def is_first_layer(block: Tensor) -> bool:
    """Return whether a block (b, rows, columns) is the first layer of the fitting net of se_e2_a."""
    return block.shape[-2] >= TALL * block.shape[-1]


@dataclasses.dataclass(frozen=True)
class FirstLayerRate(MatrixRule):
    """The lower rate as a rule; it has no state."""

    name = "first_layer_rate"
    factor: float = 0.3

    def factors(self, polar: Sequence[Tensor], state: BlockState) -> list[Tensor]:
        """Return the factor for tall blocks, and 1 for others."""
        return [
            block.new_full((1, 1, 1), self.factor if is_first_layer(block) else 1.0)
            for block in polar
        ]


register_rule(FirstLayerRate())
