"""Parameters that have no gradient on this rank, but perhaps on another one.

In a mixture of experts, for example, a rank may have received no token for an expert. If another
rank has a gradient of some block, the block steps, and this rank's gradient counts as zeros. If no
rank has one, neither the block nor its momentum may change. This rank learns which case it is only
from the headers of the return. Until then it advances a copy of the momentum, and keeps a copy of
what the update changes:

    stage      this rank                                                       member
    advance    advances a copy of the momentum, with zeros as the gradient     `copy_momentum`
    pack       sends directions from the copy; headers say "no gradient"       `momenta`
    apply      reads from headers whether any rank has a gradient of a         `undecided_pieces`
               block; updates it, and undoes the update if no rank has one     `settle`
    end        writes the copy to the momentum for blocks with a gradient      `write_momenta`
               on any rank

The answer stays on the device: tensors are chosen with `torch.where`. The host waits only for
momenta or master weights that are offloaded to host memory.

Headers come from the ranks of one replica of the momentum. `StepComparison` checks that the other
replicas have gradients of the same parameters, so these headers hold for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.sharded.bucket import Bucket
from deepmd_muon.optim.sharded.messages import PRESENCE
from deepmd_muon.optim.sharded.pieces import local_shape, piece_of
from deepmd_muon.optim.sharded.plan import Plan


class UndecidedPiece(NamedTuple):
    """A piece of a parameter without a gradient on this rank, with copies from before its update.

    Attributes
    ----------
    changed
        Views that the update changes: of the parameter, and of its master weight if any.
    old
        Copies of these.
    has_gradient
        Whether any rank has a gradient of the block, bool ().
    """

    changed: list[Tensor]
    old: list[Tensor]
    has_gradient: Tensor

    def settle(self) -> None:
        """Undo the update if no rank has a gradient of the block."""
        for x, old in zip(self.changed, self.old, strict=True):
            # A master weight may be in host memory. Only then the host waits.
            x.copy_(torch.where(self.has_gradient.to(x.device), x, old))


class MissingGradients:
    """The parameters without a gradient on this rank, in one step.

    Attributes
    ----------
    momenta
        By position in the plan, the copies that advance instead of the momenta, in local shapes.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self.momenta: dict[int, Tensor] = {}
        # By position in the plan and block: whether any rank has a gradient of it.
        self._has_gradient: dict[tuple[int, int], Tensor] = {}

    def copy_momentum(self, parameter: int, momentum: Tensor) -> Tensor:
        """Note a parameter without a gradient; return the copy of its momentum to advance.

        `parameter` is its position in the plan.
        """
        self.momenta[parameter] = momentum.clone()
        return self.momenta[parameter]

    def undecided_pieces(self, bucket: Bucket) -> list[UndecidedPiece]:
        """Return the bucket's pieces to settle after their update.

        Call it when the updates have arrived, before they are applied.
        """
        numbers = [
            k for k, piece in enumerate(bucket.updated_pieces) if piece.parameter in self.momenta
        ]
        if not numbers:
            return []
        has_gradient = bucket.exchange.applying.read_headers()[:, PRESENCE] > 0  # (pieces,)
        undecided = []
        for k in numbers:
            piece = bucket.updated_pieces[k]
            self._has_gradient[piece.parameter, piece.block] = has_gradient[k]
            changed = bucket.changed[k]
            old = [x.clone() for x in changed]
            undecided.append(UndecidedPiece(changed, old, has_gradient[k]))
        return undecided

    def write_momenta(self, momenta: Mapping[int, Tensor]) -> None:
        """Write the advanced copies to the local momenta, for blocks with a gradient on any rank.

        Call it when all buckets have been applied. `momenta` are by position in the plan, and may
        be in host memory.
        """
        for i, advanced in self.momenta.items():
            shape = local_shape(self._plan, i, self._rank, "gather")
            for block in range(self._plan.parameters[i].view.blocks):
                piece = piece_of(self._plan, i, block, self._rank, "gather")
                if not piece.elements:
                    continue
                old = momenta[i].view(shape)[piece.local_index]
                new = advanced.view(shape)[piece.local_index]
                # A rank with a piece of a block's momentum also updates a piece of the block, so
                # `undecided_pieces` has set this.
                has_gradient = self._has_gradient[i, block]
                old.copy_(torch.where(has_gradient, new, old.to(new.device)))
