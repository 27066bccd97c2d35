"""DPA-1 for TorchScript; forces come from autograd within the file."""

from typing import Final, NamedTuple

import torch

from deepmd_muon.model.descriptor.dpa1.attention import SHIFT, AttentionLayer
from deepmd_muon.model.descriptor.dpa1.module import DPA1, shortened, smooth_rows
from deepmd_muon.model.scripted.dense import Act, Dense, act_of, dense_layers, output_of, value_of
from deepmd_muon.model.scripted.near import Near, Request


class Tape(NamedTuple):
    """The graph from edge vectors to descriptor."""

    vectors: torch.Tensor
    descriptor: torch.Tensor


class Attention(NamedTuple):
    """One attention layer: both linear layers and the normalisation behind them."""

    inner: Dense
    outer: Dense
    scale: torch.Tensor
    shift: torch.Tensor
    eps: float
    temperature: float


class Columns(NamedTuple):
    """The environment column by column; see `module.Neighborhood`."""

    rows: torch.Tensor
    weight: torch.Tensor
    real: torch.Tensor
    kind: torch.Tensor
    switch: torch.Tensor
    direction: torch.Tensor


class Gates(NamedTuple):
    """The effect of masks, switches and angles on attention; see `attention.Gates`, whose mask is a flag here."""

    hidden: torch.Tensor
    after: torch.Tensor
    switch: torch.Tensor
    beyond: int


def run_layers(act: Act, layers: list[Dense], x: torch.Tensor) -> torch.Tensor:
    """Apply layers `(rows, n)`, left to autograd."""
    for layer in layers:
        x = output_of(layer, x, value_of(act, torch.addmm(layer.bias, x, layer.matrix)))
    return x


def per_length(x: torch.Tensor, least: float = 1e-12) -> torch.Tensor:
    """Return the inverse length of the last dimension's vectors; autograd through a division of them takes longer."""
    inverse: torch.Tensor = x.norm(2.0, [-1], True).clamp(min=least).reciprocal()
    return inverse


def attend(
    layer: Attention, x: torch.Tensor, gates: Gates, smooth: bool, normalize: bool, shift: float
) -> torch.Tensor:
    """Return the features after one attention layer `(ncentre, ncolumns, width)`."""
    inner, outer = layer.inner, layer.outer
    query, key, value = torch.nn.functional.linear(x, inner.matrix.t(), inner.bias).chunk(3, dim=-1)
    factor = torch.full([1], layer.temperature, dtype=x.dtype, device=x.device)
    if normalize:
        factor = factor * per_length(query)
        key = key * per_length(key)
        value = value * per_length(value)
    scores = torch.bmm(query * factor, key.transpose(1, 2))
    if smooth:
        scores = (scores + shift) * gates.switch - shift
    scores = scores.masked_fill(gates.hidden, -1e30)
    if gates.beyond > 0 and scores.shape[2] > 0:
        top = scores.detach().amax(-1, keepdim=True).clamp(min=-shift)
        powers = (scores - top).exp()
        weights = powers * (powers.sum(-1, keepdim=True) + float(gates.beyond) * (-shift - top).exp()).reciprocal()
    else:
        weights = scores.softmax(-1)
    out = torch.nn.functional.linear(torch.bmm(weights * gates.after, value), outer.matrix.t(), outer.bias)
    return torch.nn.functional.layer_norm(x + out, [x.shape[2]], layer.scale, layer.shift, layer.eps)


def _attention_of(layer: AttentionLayer) -> Attention:
    own, norm = layer.attention_layer, layer.attn_layer_norm
    dense = [
        Dense(part.matrix.detach().clone(), part.tensors.bias.detach().clone(), None, 0)
        for part in (own.in_proj, own.out_proj)
    ]
    scale, shift = norm.matrix.detach().clone(), norm.bias.detach().clone()
    return Attention(dense[0], dense[1], scale, shift, float(norm.eps), float(own.scale))


class ScriptedDPA1(torch.nn.Module):
    """Descriptor of a frozen file; see `deepmd_muon.model.scripted.interface`."""

    message_passing: Final[bool] = False
    shift: Final[float] = SHIFT
    request: Request
    act: Act
    layers: list[Dense]
    attention: list[Attention]
    mean: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    of_neighbor: torch.Tensor
    of_centre: torch.Tensor
    gate: torch.Tensor

    def __init__(self, module: DPA1) -> None:
        super().__init__()
        own, block = module.settings, module.se_atten
        self.slots, self.axis, self.width = module.slots, module.axis, module.width
        self.rcut, self.rcut_smth, self.protection = own.rcut, own.rcut_smth, own.env_protection
        self.strip, self.one_side = own.tebd_input_mode == "strip", own.type_one_side
        self.smooth, self.dotr = own.smooth_type_embedding, own.attn_dotr
        self.normalize = own.normalize
        self.plain = own.set_davg_zero
        self.append_types = own.concat_output_tebd
        self.act = act_of(own.activation_function)
        self.layers = dense_layers(block.filter_layers[0])
        self.attention = [_attention_of(layer) for layer in block.dpa1_attention.attention_layers]  # type: ignore[arg-type]
        with torch.no_grad():
            table = module.type_embedding().detach().clone()
        self.request = Request(own.rcut, [module.slots], False, False, len(table))
        self.register_buffer("mean", block.mean.detach()[:, 0].clone())
        self.register_buffer("scale", 1.0 / block.stddev.detach()[:, 0])
        self.register_buffer("table", table)
        self._tabulate(module, table)

    @torch.no_grad()
    def _tabulate(self, module: DPA1, table: torch.Tensor) -> None:
        """Keep the results of the first layer, or of the net of the types, for every type or pair of types."""
        first, ntypes, width = self.layers[0], len(table), table.shape[1]
        n_out = first.matrix.shape[1]
        of_neighbor, of_centre = first.bias.expand(ntypes, n_out).clone(), table.new_zeros(ntypes, n_out)
        gate = table.new_zeros(0, self.width)
        if not self.strip:
            of_neighbor += table @ first.matrix[1 : 1 + width]
            if not self.one_side:
                of_centre += table @ first.matrix[1 + width :]
        else:
            assert module.se_atten.filter_layers_strip is not None
            net = dense_layers(module.se_atten.filter_layers_strip[0])
            pairs = torch.cat([table.repeat(ntypes, 1), table.repeat_interleave(ntypes, dim=0)], dim=1)
            gate = run_layers(self.act, net, table.repeat(ntypes, 1) if self.one_side else pairs)
        self.register_buffer("of_neighbor", of_neighbor)
        self.register_buffer("of_centre", of_centre)
        self.register_buffer("gate", gate)

    @torch.jit.export
    def describe(self, near: Near) -> tuple[torch.Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        vectors = near.vectors.detach().requires_grad_(True)
        columns = self._columns(near, vectors)
        features = self._embed(columns, near.kind)
        if len(self.attention) > 0:
            gates = self._gates(columns, near.neighbor.shape[1])
            for layer in self.attention:
                features = attend(layer, features, gates, self.smooth, self.normalize, self.shift)
        weighted = columns.rows * columns.weight.unsqueeze(-1)
        a = torch.bmm(weighted.transpose(1, 2), features) / self.slots
        descriptor = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis]).flatten(1)
        if self.append_types:
            descriptor = torch.cat([descriptor, self.table[near.kind]], dim=1)
        return descriptor.detach(), Tape(vectors, descriptor)

    def _columns(self, near: Near, vectors: torch.Tensor) -> Columns:
        """Return the environment in the precision of the weights."""
        real = near.neighbor >= 0
        rows, switch, direction = smooth_rows(vectors, real, self.rcut, self.rcut_smth, self.protection)
        dtype = self.mean.dtype
        mean, scale = self.mean[near.kind], self.scale[near.kind]
        rows = (rows.to(dtype) - mean.unsqueeze(1)) * scale.unsqueeze(1)
        kind = near.types[near.neighbor.clamp(min=0)].clamp(min=0)
        weight, switch, direction = real.to(dtype), switch.to(dtype), shortened(direction.to(dtype), rows)
        if self.plain:
            return Columns(rows, weight, real, kind, switch, direction)
        empty = (self.slots - (near.neighbor != -1).sum(1, keepdim=True)).to(dtype)  # hidden ones are -2
        return Columns(
            torch.cat([rows, (-mean * scale).unsqueeze(1)], dim=1),
            torch.cat([weight, empty], dim=1),
            torch.nn.functional.pad(real, [0, 1]),
            torch.cat([kind, near.first_type.unsqueeze(1)], dim=1),
            torch.nn.functional.pad(switch, [0, 1]),
            torch.nn.functional.pad(direction, [0, 0, 0, 1]),
        )

    def _embed(self, columns: Columns, centre: torch.Tensor) -> torch.Tensor:
        """Return the features of every column `(ncentre, ncolumns, width)` before attention."""
        first = self.layers[0]
        radial, kind = columns.rows[..., :1], columns.kind
        h = radial * first.matrix[0] + self.of_neighbor[kind] + self.of_centre[centre].unsqueeze(1)
        x = value_of(self.act, h)
        idt = first.idt
        if idt is not None:
            x = x * idt
        if first.copies > 0:
            inputs = [radial]
            if not self.strip:
                inputs.append(self.table[kind])
                if not self.one_side:
                    inputs.append(self.table[centre].unsqueeze(1).expand(-1, kind.shape[1], -1))
            joined = torch.cat(inputs, dim=-1)
            x = x + (joined if first.copies == 1 else torch.cat([joined, joined], dim=-1))
        features = run_layers(self.act, self.layers[1:], x.flatten(0, 1))
        features = features.view(kind.shape[0], kind.shape[1], self.width)
        if self.strip:
            gate = self.gate[centre.unsqueeze(1) * self.table.shape[0] + kind]
            if self.smooth:
                gate = gate * columns.switch.unsqueeze(-1)
            features = features * (1.0 + gate)
        return features

    def _gates(self, columns: Columns, slots: int) -> Gates:
        """Return the mask and factors of the attention weights; the first `slots` columns take one slot each."""
        real = columns.real
        switch = columns.switch.unsqueeze(2) * columns.switch.unsqueeze(1)
        after = switch if self.smooth else real.to(self.mean.dtype).unsqueeze(2)
        if self.dotr:
            after = after * torch.bmm(columns.direction, columns.direction.transpose(1, 2))
        hidden = ~real
        if self.smooth:
            hidden = (torch.arange(real.shape[1], device=real.device) >= slots).expand_as(real)
        return Gates(hidden.unsqueeze(1), after, switch, self.slots - slots if self.smooth else 0)

    @torch.jit.export
    def pullback(self, adjoint: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        outputs: list[torch.Tensor | None] = [adjoint]
        slope = torch.autograd.grad([tape.descriptor], [tape.vectors], outputs)[0]
        assert slope is not None
        return slope
