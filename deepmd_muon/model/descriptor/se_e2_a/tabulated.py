"""`se_e2_a` with tables in place of its embedding nets: the descriptor of a compressed file."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.se_e2_a.scripted import ScriptedSeE2A, embed
from deepmd_muon.model.scripted.dense import Act, Dense
from deepmd_muon.model.scripted.near import Near, Request
from deepmd_muon.model.scripted.tabulated import Tabulated, double


class TabulatedSeE2A(Tabulated):
    """See `Tabulated`; the net of every pair of types has a table."""

    covers = ScriptedSeE2A.covers
    # TorchScript reads the annotations of the class itself alone.
    message_passing: Final[bool] = False
    request: Request
    act: Act
    nets: list[list[Dense]]
    empty_features: Tensor
    sel: Tensor

    def __init__(self, scripted: ScriptedSeE2A, *, step: float, nearest: float) -> None:
        super().__init__(scripted, scripted.empty_row, step=step, nearest=nearest)
        self.act = scripted.act
        self.nets = scripted.nets
        self.one_side = scripted.one_side
        self.excludes = scripted.excludes
        self.seen.copy_(scripted.seen)
        self.register_buffer("empty_features", scripted.empty_features.clone())
        self.register_buffer("sel", torch.tensor(self.request.sel, dtype=self.scale.dtype))

    @staticmethod
    def channels_of(scripted: ScriptedSeE2A) -> int:
        """Return 1."""
        return 1

    @staticmethod
    def features_of(
        scripted: ScriptedSeE2A, centre: int, neighbor_kind: int
    ) -> Callable[[Tensor], Tensor]:
        """Return the net of a pair of types; see `Tabulated`."""
        layers = [
            double(layer) for layer in scripted.nets[scripted.net_number(centre, neighbor_kind)]
        ]
        return lambda s: embed(scripted.act, layers, s)[0]

    def embed_exactly(self, x: Tensor, pair: Tensor, switch: Tensor) -> Tensor:
        """Return G and G′; see `Tabulated`."""
        ntypes = self.request.ntypes
        out = torch.zeros([2, x.shape[0], self.width], dtype=x.dtype, device=x.device)
        for centre in range(ntypes):
            for neighbor_kind in range(ntypes):
                edges = (pair == centre * ntypes + neighbor_kind).nonzero().view(-1)
                if edges.shape[0] > 0:
                    layers = self.nets[
                        neighbor_kind if self.one_side else neighbor_kind * ntypes + centre
                    ]
                    out.index_copy_(1, edges, embed(self.act, layers, x[edges]))
        return out

    def fill(self, near: Near, neighbor_kind: Tensor, real: Tensor) -> Tensor:
        """Return the contribution of empty slots; see `Tabulated`."""
        filled = torch.zeros(
            [neighbor_kind.shape[0], self.request.ntypes],
            dtype=self.sel.dtype,
            device=neighbor_kind.device,
        )
        filled.scatter_add_(1, neighbor_kind, real.to(filled.dtype))
        empty_slots = (self.sel - filled).unsqueeze(1)  # (ncentre, 1, ntypes)
        features = torch.bmm(empty_slots, self.empty_features[near.kind])
        return self.empty_row[near.kind].unsqueeze(2) * features
