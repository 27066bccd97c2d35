"""DPA-1 without attention, with tables in place of its embedding net: the descriptor of a compressed file.

The type of a centre and that of a neighbour are constants of a table. In strip mode the net of the types multiplies
features by 1 + t, or by 1 + switch·t with `smooth_type_embedding`: then t·G is the second channel.
"""

from collections.abc import Callable
from typing import Final

import torch

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.dpa1.scripted import ScriptedDPA1, embed_edges
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

    #: The settings that this form has.
    covers = Coverage(
        frozenset(
            {
                *("sel", "rcut", "rcut_smth", "env_protection", "exclude_types"),
                *("neuron", "axis_neuron", "activation_function", "resnet_dt", "type_one_side"),
                *("precision", "trainable", "seed", "set_davg_zero"),
                *("tebd_dim", "use_tebd_bias", "concat_output_tebd", "tebd_input_mode"),
                *("smooth_type_embedding", "attn_layer", "trainable_ln"),
                # Of attention, which a compressed descriptor does not have.
                *("attn", "attn_dotr", "normalize", "scaling_factor", "temperature", "ln_eps"),
            }
        )
    )
    # TorchScript reads the annotations of the class itself alone.
    message_passing: Final[bool] = False
    request: Request
    act: Act
    layers: list[Dense]
    types: torch.Tensor
    gate: torch.Tensor
    empty_features: torch.Tensor

    def __init__(self, own: ScriptedDPA1, *, step: float, nearest: float) -> None:
        if len(own.attention) > 0:
            raise ModelError(
                "DPA-1 with attention layers has no tables and cannot be compressed: features of an edge depend on all "
                "others. Use dp freeze, or train with attn_layer 0"
            )
        super().__init__(own, -own.mean * own.scale, step=step, nearest=nearest)
        self.act, self.layers, self.one_side = own.act, own.layers, own.one_side
        self.register_buffer("types", own.table.clone())
        self.register_buffer("gate", own.gate.clone())
        if own.append_types:
            self.type_rows = own.table.clone()
        self.fills = self.fills and not own.plain
        with torch.no_grad():
            pairs = torch.arange(self.request.ntypes**2, device=self.scale.device)
            inputs = self.empty_row[:, 0].repeat_interleave(self.request.ntypes)
            features = self.embed_exactly(
                inputs, pairs, torch.zeros_like(inputs[: len(inputs) * (self.channels - 1)])
            )
        self.register_buffer("empty_features", features[0])

    @staticmethod
    def channels_of(own: ScriptedDPA1) -> int:
        """Return 2 where a switch fades the influence of types, else 1."""
        return 2 if own.strip and own.smooth else 1

    @staticmethod
    def features_of(
        own: ScriptedDPA1, centre: int, other: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the net, with the types and their net's factor as constants; see `Tabulated`."""
        layers = [double(layer) for layer in own.layers]
        types = [] if own.strip else [own.table[other].double()]
        if types and not own.one_side:
            types.append(own.table[centre].double())
        gate = own.gate[centre * own.request.ntypes + other].double() if own.strip else None

        def features(x: torch.Tensor) -> torch.Tensor:
            rows = torch.cat([x.unsqueeze(1), *(one.expand(len(x), -1) for one in types)], dim=1)
            found = embed_rows(own.act, layers, rows)[0]
            if gate is None:
                return found
            return torch.cat([found, found * gate], dim=1) if own.smooth else found * (1.0 + gate)

        return features

    def embed_exactly(
        self, x: torch.Tensor, pair: torch.Tensor, switch: torch.Tensor
    ) -> torch.Tensor:
        """Return G and its derivatives; see `Tabulated`."""
        return embed_edges(
            self.act, self.layers, x, pair, self.types, self.gate, switch, self.one_side
        )

    def fill(self, near: Near, other: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the contribution of empty slots: deepmd-kit gives them the type of the first atom; see `Tabulated`."""
        empty = (self.slots - (near.neighbor != -1).sum(1)).to(
            self.scale.dtype
        )  # hidden ones are -2
        features = self.empty_features[near.kind * self.request.ntypes + near.first_type]
        return (self.empty_row[near.kind] * empty.unsqueeze(1)).unsqueeze(2) * features.unsqueeze(1)
