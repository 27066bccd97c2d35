"""The statistics of rules: sums over pieces, which owners combine into one value for each block.

A rule such as Magma compares the momentum and the gradient of a whole block. Each holder computes
sums over its piece (`MatrixRule.measure`), headers of the gather carry them to the owner, and the
owner combines the sums of a block (`MatrixRule.combine`).

A parameter's momentum advances once, in its first bucket, but its blocks may be in several buckets.
So the sums of all pieces are computed when the momentum advances, and wait in a table, float64
(rows, sums), until their piece is packed. The table has a row for each piece of the parameters with
statistics, in the order of parameters, parts of a matrix, and matrices. For example, a rank has 2
matrices of `experts`, each fused of 2 parts, and then the only matrix of `w`:

    row          0          1          2          3          4
    parameter    experts    experts    experts    experts    w
    part         0          0          1          1          0
    matrix       0          1          0          1          0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.rules.interface import Pieces
from deepmd_muon.optim.sharded.bucket import Bucket, MomentumBatch
from deepmd_muon.optim.sharded.plan import Plan, rule_values


class StatisticsTable:
    """The rows of one rank's table; a step gets its memory from `new`.

    The constructor sets `Bucket.statistics_rows`, the rows of the momenta that a bucket advances.
    Buckets are given in the order in which they advance momenta.

    Attributes
    ----------
    first_row
        The first row of each parameter, by position in the plan. A parameter without statistics has
        an entry, but no rows.
    """

    def __init__(self, plan: Plan, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._device = device
        self.first_row: dict[int, int] = {}
        n_rows = 0
        for bucket in buckets:
            start = n_rows
            for batch in bucket.momentum_batches:
                for i, shape, slices in zip(
                    batch.parameters, batch.shapes, batch.part_slices, strict=True
                ):
                    self.first_row[i] = n_rows
                    if rule_values(plan.parameters[i].rules).sums:
                        n_matrices = shape[0]
                        n_rows += n_matrices * len(slices)
            bucket.statistics_rows = slice(start, n_rows)
        self._n_rows = n_rows
        self._n_sums = max((bucket.n_sums for bucket in buckets), default=0)

    def new(self) -> Tensor:
        """Return uninitialized memory for the table of one step, float64 (rows, sums).

        It has as many sums as the bucket with the most.
        """
        return torch.empty(self._n_rows, self._n_sums, dtype=torch.float64, device=self._device)

    def measure(self, bucket: Bucket, pieces: Sequence[Pieces], table: Tensor) -> None:
        """Write the rows of a bucket.

        `pieces` are the results of `pieces_of` for its momentum batches, in their order, except for
        batches without statistics.
        """
        sums = [rule.measure(pieces, self._device) for rule in bucket.measuring_rules]
        if sums:
            torch.cat(sums, dim=1, out=table[bucket.statistics_rows, : bucket.n_sums])


def pieces_of(
    batch: MomentumBatch, momenta: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Pieces]:
    """Return momentum and gradient of every part of every parameter, in the order of rows.

    Parts are (matrices, elements). Without a split, momentum and gradient keep their shape and are
    not copied.
    """
    pieces = []
    for momentum, grad, shape, slices in zip(
        momenta, grads, batch.shapes, batch.part_slices, strict=True
    ):
        n_matrices, matrix_rows, matrix_columns = shape
        if len(slices) == 1:
            pieces.append(Pieces(momentum, grad, (n_matrices, matrix_rows * matrix_columns)))
            continue
        for rows, columns in slices:
            momentum_part = momentum.reshape(shape)[:, rows, columns].flatten(1)
            grad_part = grad.reshape(shape)[:, rows, columns].flatten(1)
            pieces.append(Pieces(momentum_part, grad_part, (n_matrices, momentum_part.shape[1])))
    return pieces
