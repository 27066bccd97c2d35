"""DPA-1 without attention, with tables in place of its embedding net: the form of compressed files.

A table holds the features of one pair of types as a function of R₀. In strip mode the net of the
types multiplies features G by 1 + t, or by 1 + switch·t with `smooth_type_embedding`: then t·G is
the second channel.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.scripted import COVERS, ScriptedDPA1, embed_edges
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.scripted.dense import Act, Dense, embed_rows
from deepmd_muon.model.scripted.near import Near, Request
from deepmd_muon.model.scripted.tabulated import Tabulated, double


class TabulatedDPA1(Tabulated):
    """See `Tabulated`.

    Raises
    ------
    ModelError
        When the descriptor has attention.
    """

    covers = COVERS
    # TorchScript reads the annotations of the class itself alone.
    message_passing: Final[bool] = False
    request: Request
    act: Act
    layers: list[Dense]
    types: Tensor
    type_gate: Tensor
    empty_features: Tensor

    def __init__(self, scripted: ScriptedDPA1, *, step: float, nearest: float) -> None:
        if len(scripted.attention) > 0:
            raise ModelError(
                "DPA-1 with attention layers has no tables and cannot be compressed: features of "
                "an edge depend on all others. Use dp freeze, or train with attn_layer 0"
            )
        super().__init__(scripted, -scripted.mean * scripted.scale, step=step, nearest=nearest)
        self.act = scripted.act
        self.layers = scripted.layers
        self.one_side = scripted.one_side
        self.register_buffer("types", scripted.table.clone())
        self.register_buffer("type_gate", scripted.type_gate.clone())
        if scripted.append_types:
            self.type_rows = scripted.table.clone()
        self.fills = self.fills and not scripted.empty_is_zero
        with torch.no_grad():
            pairs = torch.arange(self.request.ntypes**2, device=self.scale.device)
            x = self.empty_row[:, 0].repeat_interleave(self.request.ntypes)
            no_switch = torch.zeros_like(x[: len(x) * (self.channels - 1)])
            features = self.embed_exactly(x, pairs, no_switch)[0]
        self.register_buffer("empty_features", features)

    @staticmethod
    def channels_of(scripted: ScriptedDPA1) -> int:
        """Return 2 if a switch fades the influence of types, else 1."""
        return 2 if scripted.strip and scripted.smooth else 1

    @staticmethod
    def features_of(
        scripted: ScriptedDPA1, centre: int, neighbor_kind: int
    ) -> Callable[[Tensor], Tensor]:
        """Return the net with types and the output of their net as constants; see `Tabulated`."""
        layers = [double(layer) for layer in scripted.layers]
        types = [] if scripted.strip else [scripted.table[neighbor_kind].double()]
        if types and not scripted.one_side:
            types.append(scripted.table[centre].double())
        gate = (
            scripted.type_gate[centre * scripted.request.ntypes + neighbor_kind].double()
            if scripted.strip
            else None
        )

        def features(x: Tensor) -> Tensor:
            columns = [vector.expand(len(x), -1) for vector in types]
            radial = embed_rows(scripted.act, layers, torch.cat([x.unsqueeze(1), *columns], dim=1))[
                0
            ]
            if gate is None:
                return radial
            if scripted.smooth:
                return torch.cat([radial, radial * gate], dim=1)
            return radial * (1.0 + gate)

        return features

    def embed_exactly(self, x: Tensor, pair: Tensor, switch: Tensor) -> Tensor:
        """Return G and its derivatives; see `Tabulated`."""
        return embed_edges(
            self.act,
            self.layers,
            x=x,
            pair=pair,
            types=self.types,
            type_gate=self.type_gate,
            switch=switch,
            one_side=self.one_side,
        )

    def fill(self, near: Near, neighbor_kind: Tensor, real: Tensor) -> Tensor:
        """Return the contribution of empty slots; see `Tabulated`.

        deepmd-kit gives empty slots the type of the frame's first atom.
        """
        # −1 is an empty slot; a neighbour of an excluded pair (−2) fills its slot
        n_empty = self.slots - (near.neighbor != -1).sum(1)
        features = self.empty_features[near.kind * self.request.ntypes + near.first_type]
        rows = self.empty_row[near.kind] * n_empty.to(self.scale.dtype).unsqueeze(1)
        return rows.unsqueeze(2) * features.unsqueeze(1)
