"""DPA-1 for TorchScript: values and the explicit pullback of embedding and attention.

The graph of autograd holds the geometry alone, some numbers an edge; features and attention weights need hundreds.
"""

from typing import Final, NamedTuple

import torch

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.dpa1.attention import SHIFT, AttentionLayer
from deepmd_muon.model.descriptor.dpa1.geometry import shortened, smooth_rows
from deepmd_muon.model.descriptor.dpa1.module import DPA1, GROUP
from deepmd_muon.model.scripted.dense import (
    Act,
    Dense,
    accumulate_product,
    act_of,
    add_product,
    dense_layers,
    embed_rows,
    product,
)
from deepmd_muon.model.scripted.near import Near, Request
from deepmd_muon.model.scripted.rows import sums_pullback

WORST_CONDITION = 1e5
"""Largest ratio of squared lengths of queries, keys or values up to which an attention layer is folded."""


class Attention(NamedTuple):
    """One attention layer.

    Attributes
    ----------
    inner, outer
        The linear layers of query, key and value, and that behind them.
    folded
        Their products, each for features with a 1 behind them, x̃: M = QKᵀ times the temperature, the Gram matrices of
        query, key and value if these are normalised, and the product V of the layers of value and behind it, side by
        side `(width + 1, 2·width + 1)` or `(width + 1, 5·width + 4)`; without rows where the layers are applied one by
        one.
    scale, shift, eps
        Of the normalisation.
    temperature
        Factor of the scores.
    """

    inner: list[Dense]
    outer: Dense
    folded: torch.Tensor
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
    """The effect of masks, switches and angles on attention; see `attention.Gates`, whose mask is a flag here.

    `switch` is empty unless attention is smooth.
    """

    hidden: torch.Tensor
    after: torch.Tensor
    switch: torch.Tensor
    beyond: int


class Attended(NamedTuple):
    """What the pullback of an attention layer reads.

    Attributes
    ----------
    parts, inverse
        Query, key and value `(ncentre, ncolumns, attn)`, and the inverse lengths that normalised them. Of a folded
        layer: x̃, x̃·M and x̃·V, which the inverse lengths have not scaled, then x̃ times the Gram matrices.
    scores
        Scores `(ncentre, ncolumns, ncolumns)`, −1e30 where hidden; if attention is smooth, shifted ones before the
        switch.
    weights, factors
        Softmax of the scores, and its product with `Gates.after`, of a folded layer also with the inverse lengths of
        the values.
    normed, deviation
        Features before scale and shift `(ncentre·ncolumns, width)`, and the inverse deviation that normalised them.
    """

    parts: list[torch.Tensor]
    inverse: list[torch.Tensor]
    scores: torch.Tensor
    weights: torch.Tensor
    factors: torch.Tensor
    normed: torch.Tensor
    deviation: torch.Tensor


class Tape(NamedTuple):
    """What the pullback reads.

    Attributes
    ----------
    vectors, columns, gates
        The graph of the geometry.
    embedded
        Features before attention and their derivatives by R₀ and, with a smooth gate, by the switch
        `(2 or 3, ncentre·ncolumns, width)`.
    layers
        Of attention.
    features
        After it `(ncentre, ncolumns, width)`.
    a
        A `(ncentre, 4, width)`.
    """

    vectors: torch.Tensor
    columns: Columns
    gates: Gates
    embedded: torch.Tensor
    layers: list[Attended]
    features: torch.Tensor
    a: torch.Tensor


def embed_edges(
    act: Act,
    layers: list[Dense],
    x: torch.Tensor,
    pair: torch.Tensor,
    types: torch.Tensor,
    gate: torch.Tensor,
    switch: torch.Tensor,
    one_side: bool,
) -> torch.Tensor:
    """Return features of edges, their derivatives by R₀ and, with a switch, by the switch `(2 or 3, n, width)`.

    Parameters
    ----------
    act, layers
        The embedding net.
    x
        R₀ `(n,)`.
    pair
        centre·ntypes + neighbour `(n,)`.
    types
        Embedding of every type `(ntypes, tebd_dim)`.
    gate
        In strip mode the result of the net of the types for every pair `(ntypes², width)`, else without rows.
    switch
        Factor of the gate `(n,)`; empty where it has none.
    one_side
        Whether features depend on the type of the neighbour alone.
    """
    ntypes = types.shape[0]
    inputs = [x.unsqueeze(1)]
    if gate.shape[0] == 0:
        inputs.append(types[pair % ntypes])
        if not one_side:
            inputs.append(types[torch.div(pair, ntypes, rounding_mode="floor")])
    found = embed_rows(act, layers, torch.cat(inputs, dim=1))
    if gate.shape[0] == 0:
        return found
    factor = gate[pair]
    if switch.shape[0] == 0:
        return found * (1.0 + factor)
    both = found * (1.0 + factor * switch.unsqueeze(1))
    return torch.cat([both, (found[0] * factor).unsqueeze(0)])


def attend(
    layer: Attention, x: torch.Tensor, gates: Gates, normalize: bool, shift: float
) -> Attended:
    """Return one attention layer's values for features `(ncentre, ncolumns, width)`."""
    ncentre, ncolumns, width = x.shape
    flat = x.view(-1, width)
    folded = layer.folded.shape[0] > 0
    parts: list[torch.Tensor] = []
    inverse: list[torch.Tensor] = []
    if folded:
        parts, inverse = _fold(layer, x, normalize)
        scores = torch.bmm(parts[1], parts[0].transpose(1, 2))
        if normalize:
            _scale_pairs(scores, inverse)
    else:
        for dense in layer.inner:
            part = add_product(dense.bias, flat, dense.matrix)
            if normalize:
                inverse.append(part.norm(2.0, [-1], True).clamp_(min=1e-12).reciprocal())
                part = part.mul_(inverse[-1])
            parts.append(part.view(ncentre, ncolumns, part.shape[1]))
        scores = torch.bmm(parts[0], parts[1].transpose(1, 2)).mul_(layer.temperature)
    kept = scores
    if gates.switch.shape[0] > 0:
        kept = scores.add_(shift)
        scores = (kept * gates.switch).sub_(shift)
    scores = scores.masked_fill_(gates.hidden, -1e30)
    if gates.beyond > 0 and ncolumns > 0:
        top = scores.amax(-1, keepdim=True).clamp_(min=-shift)
        powers = (scores - top).exp()
        weights = powers.div_(
            powers.sum(-1, keepdim=True) + float(gates.beyond) * (-shift - top).exp()
        )
    else:
        weights = scores.softmax(-1)
    factors = weights * gates.after
    if folded:
        if normalize:
            factors.mul_(inverse[2].view(ncentre, 1, ncolumns))
        mixed = x + layer.outer.bias
        torch.baddbmm(mixed, factors, parts[2], out=mixed)
        total = mixed.view(-1, width)
    else:
        mixed = torch.bmm(factors, parts[2]).view(-1, parts[2].shape[2])
        total = add_product(layer.outer.bias, mixed, layer.outer.matrix).add_(flat)
    total = total.sub_(total.mean(-1, keepdim=True))  # on CPUs var_mean takes several times as long
    deviation = (total.norm(2.0, [-1], True).square_().div_(width) + layer.eps).rsqrt()
    return Attended(parts, inverse, kept, weights, factors, total.mul_(deviation), deviation)


def _scale_pairs(pairs: torch.Tensor, inverse: list[torch.Tensor]) -> None:
    """Multiply pairs `(ncentre, ncolumns, ncolumns)` by the inverse lengths of query and key.

    This touches less memory than scaling the features: a row has fewer pairs than features.
    """
    ncentre, ncolumns, _ = pairs.shape
    pairs.mul_(inverse[0].view(ncentre, ncolumns, 1)).mul_(inverse[1].view(ncentre, 1, ncolumns))


def _fold(
    layer: Attention, x: torch.Tensor, normalize: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return `Attended.parts` and `Attended.inverse` of a folded layer for features `(ncentre, ncolumns, width)`."""
    ncentre, ncolumns, width = x.shape
    wide = width + 1
    flat = x.view(-1, width)
    extended = torch.cat([flat, flat.new_ones([flat.shape[0], 1])], dim=1)
    products = product(extended, layer.folded)
    moved, values = products[:, :wide], products[:, products.shape[1] - width :]
    shape = [ncentre, ncolumns, wide]  # explicit: a lone atom has no columns
    parts = [extended.view(shape), moved.view(shape), values.view([ncentre, ncolumns, width])]
    inverse: list[torch.Tensor] = []
    if normalize:
        for index in range(3):  # one by one: a temporary of all three is slow to write
            gram = products[:, (index + 1) * wide : (index + 2) * wide]
            inverse.append((gram * extended).sum(-1, keepdim=True).clamp_(min=1e-24).rsqrt())
            parts.append(gram)
    return parts, inverse


def attend_pullback(
    layer: Attention,
    above: torch.Tensor,
    tape: Attended,
    gates: Gates,
    of_after: torch.Tensor,
    of_switch: torch.Tensor,
    shift: float,
) -> torch.Tensor:
    """Return dE/dx from dE/dy of one layer `(ncentre·ncolumns, width)`, and add to the derivatives by its gates."""
    value = tape.parts[2]
    folded = layer.folded.shape[0] > 0
    normalize = len(tape.inverse) > 0
    scaled = above * layer.scale
    along = (scaled * tape.normed).mean(-1, keepdim=True)
    below = (
        scaled.sub_(scaled.mean(-1, keepdim=True))
        .addcmul_(tape.normed, along, value=-1.0)
        .mul_(tape.deviation)
    )
    of_mixed = (below if folded else product(below, layer.outer.matrix.t())).view(value.shape)
    of_value = torch.bmm(tape.factors.transpose(1, 2), of_mixed)
    # The softmax: dE/dscore = w·(dE/dw − Σ w·dE/dw), also with a constant in its denominator.
    of_scores = torch.bmm(of_mixed, value.transpose(1, 2)).mul_(tape.weights)
    if folded and normalize:
        of_scores.mul_(tape.inverse[2].view(value.shape[0], 1, value.shape[1]))
    of_after.add_(of_scores)
    of_scores.mul_(gates.after)
    of_lengths = torch.jit.annotate(
        list[torch.Tensor], []
    )  # −dE/dlog(length) of query, key and value
    if folded and normalize:
        of_lengths.append(of_scores.sum(1))
    of_scores.addcmul_(tape.weights, of_scores.sum(-1, keepdim=True), value=-1.0)
    scores = tape.scores
    if gates.switch.shape[0] > 0:
        of_switch.addcmul_(of_scores, scores)
        of_scores.mul_(gates.switch)
        scores = scores - shift
    if folded:
        if normalize:
            products = of_scores * scores
            of_lengths = [products.sum(2), products.sum(1)] + of_lengths  # noqa: RUF005 (TorchScript has no stars in lists)
            _scale_pairs(of_scores, tape.inverse)
        return _unfold(layer, below, tape, of_scores, of_value, of_lengths)
    query, key = tape.parts[0], tape.parts[1]
    of_scores.mul_(layer.temperature)
    adjoints = [torch.bmm(of_scores, key), torch.bmm(of_scores.transpose(1, 2), query), of_value]
    for index in range(3):
        adjoint = adjoints[index]
        if normalize:
            part = tape.parts[index]
            adjoint.addcmul_(part, (adjoint * part).sum(-1, keepdim=True), value=-1.0)
            adjoint = adjoint.view(-1, part.shape[2]).mul_(tape.inverse[index])
        width = adjoint.shape[-1]
        below = add_product(below, adjoint.view(-1, width), layer.inner[index].matrix.t())
    return below


def _unfold(
    layer: Attention,
    below: torch.Tensor,
    tape: Attended,
    of_scores: torch.Tensor,
    of_value: torch.Tensor,
    of_lengths: list[torch.Tensor],
) -> torch.Tensor:
    """Add the contribution of a folded layer's products to dE/dx `(ncentre·ncolumns, width)`.

    A squared length l² = x̃·G·x̃ changes by 2·x̃·G, which the forward pass has computed.
    """
    width = below.shape[1]
    extended, moved = tape.parts[0], tape.parts[1]
    of_x = below.view(of_value.shape)
    torch.baddbmm(of_x, of_scores.transpose(1, 2), moved[:, :, :width], out=of_x)
    for index in range(len(of_lengths)):
        rate = tape.inverse[index].square().mul_(of_lengths[index].view(-1, 1))
        below.addcmul_(tape.parts[index + 3][:, :width], rate, value=-1.0)
    first, last = (
        layer.folded[:width, : width + 1],
        layer.folded[:width, layer.folded.shape[1] - width :],
    )
    accumulate_product(below, torch.bmm(of_scores, extended).view(-1, width + 1), first.t())
    accumulate_product(below, of_value.view(-1, width), last.t())
    return below


def _attention_of(layer: AttentionLayer, normalize: bool) -> Attention:
    own, norm = layer.attention_layer, layer.attn_layer_norm
    inner, outer = (
        (part.matrix.detach().clone(), part.tensors.bias.detach().clone())
        for part in (own.in_proj, own.out_proj)
    )
    parts = [
        Dense(matrix.contiguous(), bias.clone(), None, 0)
        for matrix, bias in zip(inner[0].chunk(3, dim=1), inner[1].chunk(3), strict=True)
    ]
    scale, shift = norm.matrix.detach().clone(), norm.bias.detach().clone()
    last = Dense(*outer, None, 0)
    folded = _folded(parts, last, normalize, float(own.scale))
    return Attention(parts, last, folded, scale, shift, float(norm.eps), float(own.scale))


def _folded(inner: list[Dense], outer: Dense, normalize: bool, temperature: float) -> torch.Tensor:
    """Return `Attention.folded`; no rows where features are wider than attention, or lengths would lose digits."""
    width, attn = inner[0].matrix.shape
    query, key, value = (torch.cat([dense.matrix, dense.bias[None]]).double() for dense in inner)
    none = outer.matrix.new_zeros(0, 0)
    if width >= attn:
        return none
    products = [temperature * (query @ key.t())]
    if normalize:
        # Rounding errors of l² = x̃·G·x̃ are relative to the largest l², which is `condition` times the smallest.
        condition = max(float(torch.linalg.cond(part)) ** 2 for part in (query, key, value))
        if not condition < WORST_CONDITION:
            return none
        products += [part @ part.t() for part in (query, key, value)]
    return torch.cat([*products, value @ outer.matrix.double()], dim=1).to(outer.matrix.dtype)


class ScriptedDPA1(torch.nn.Module):
    """Descriptor of a frozen file; see `deepmd_muon.model.scripted.interface`."""

    #: The settings that this form has.
    covers = Coverage(
        frozenset(
            {
                *("sel", "rcut", "rcut_smth", "env_protection", "exclude_types"),
                *("neuron", "axis_neuron", "activation_function", "resnet_dt", "type_one_side"),
                *("precision", "trainable", "seed", "set_davg_zero"),
                *("tebd_dim", "use_tebd_bias", "concat_output_tebd", "tebd_input_mode"),
                *("smooth_type_embedding", "attn_layer", "trainable_ln"),
                *("attn", "attn_dotr", "normalize", "scaling_factor", "temperature", "ln_eps"),
            }
        )
    )
    message_passing: Final[bool] = False
    centres_cpu: Final[int] = GROUP
    shift: Final[float] = SHIFT
    request: Request
    act: Act
    layers: list[Dense]
    attention: list[Attention]
    mean: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
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
        self.attention = [
            _attention_of(layer, own.normalize)  # type: ignore[arg-type]
            for layer in block.dpa1_attention.attention_layers
        ]
        with torch.no_grad():
            table = module.type_embedding().detach().clone()
        self.request = Request(own.rcut, [module.slots], False, False, len(table))
        self.register_buffer("mean", block.mean.detach()[:, 0].clone())
        self.register_buffer("scale", 1.0 / block.stddev.detach()[:, 0])
        self.register_buffer("table", table)
        self.register_buffer("gate", self._gate(module, table))

    @torch.no_grad()
    def _gate(self, module: DPA1, table: torch.Tensor) -> torch.Tensor:
        """Return the result of the net of the types for every pair `(ntypes², width)`, or no rows."""
        strip = module.se_atten.filter_layers_strip
        if strip is None:
            return table.new_zeros(0, self.width)
        pairs = table.repeat(len(table), 1)
        if not self.one_side:
            pairs = torch.cat([pairs, table.repeat_interleave(len(table), dim=0)], dim=1)
        return embed_rows(self.act, dense_layers(strip[0]), pairs)[0]

    @torch.jit.export
    def describe(self, near: Near) -> tuple[torch.Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        vectors = near.vectors.detach().requires_grad_(True)
        columns = self._columns(near, vectors)
        ncentre, ncolumns = columns.kind.shape
        rows, none = columns.rows.detach(), columns.rows.new_zeros([0])
        pair = near.kind.unsqueeze(1) * self.table.shape[0] + columns.kind
        fade = columns.switch.detach().view(-1) if self.strip and self.smooth else none
        embedded = embed_edges(
            self.act,
            self.layers,
            rows[..., 0].reshape(-1),
            pair.view(-1),
            self.table,
            self.gate,
            fade,
            self.one_side,
        )
        features = embedded[0].view(ncentre, ncolumns, self.width)
        gates, layers = Gates(none, none, none, 0), torch.jit.annotate(list[Attended], [])
        if len(self.attention) > 0:
            gates = self._gates(columns, near.neighbor.shape[1])
            plain = Gates(gates.hidden, gates.after.detach(), gates.switch.detach(), gates.beyond)
            for layer in self.attention:
                layers.append(attend(layer, features, plain, self.normalize, self.shift))
                features = torch.addcmul(layer.shift, layers[-1].normed, layer.scale).view(
                    features.shape
                )
        weighted = rows * columns.weight.unsqueeze(-1)
        a = torch.bmm(weighted.transpose(1, 2), features) / self.slots
        descriptor = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis]).flatten(1)
        if self.append_types:
            descriptor = torch.cat([descriptor, self.table[near.kind]], dim=1)
        return descriptor, Tape(vectors, columns, gates, embedded, layers, features, a)

    def _columns(self, near: Near, vectors: torch.Tensor) -> Columns:
        """Return the environment in the precision of the weights."""
        real = near.neighbor >= 0
        rows, switch, direction = smooth_rows(
            vectors, real, self.rcut, self.rcut_smth, self.protection
        )
        dtype = self.mean.dtype
        mean, scale = self.mean[near.kind], self.scale[near.kind]
        rows = (rows.to(dtype) - mean.unsqueeze(1)) * scale.unsqueeze(1)
        kind = near.types[near.neighbor.clamp(min=0)].clamp(min=0)
        weight, switch, direction = (
            real.to(dtype),
            switch.to(dtype),
            shortened(direction.to(dtype), rows),
        )
        if self.plain:
            return Columns(rows, weight, real, kind, switch, direction)
        empty = (self.slots - (near.neighbor != -1).sum(1, keepdim=True)).to(
            dtype
        )  # hidden ones are -2
        return Columns(
            torch.cat([rows, (-mean * scale).unsqueeze(1)], dim=1),
            torch.cat([weight, empty], dim=1),
            torch.nn.functional.pad(real, [0, 1]),
            torch.cat([kind, near.first_type.unsqueeze(1)], dim=1),
            torch.nn.functional.pad(switch, [0, 1]),
            torch.nn.functional.pad(direction, [0, 0, 0, 1]),
        )

    def _gates(self, columns: Columns, slots: int) -> Gates:
        """Return the mask and factors of the attention weights; the first `slots` columns take one slot each."""
        real = columns.real
        switch = columns.rows.new_zeros([0])
        after = real.to(self.mean.dtype).unsqueeze(2).expand(-1, -1, real.shape[1])
        if self.smooth:
            switch = columns.switch.unsqueeze(2) * columns.switch.unsqueeze(1)
            after = switch
        if self.dotr:
            after = after * torch.bmm(columns.direction, columns.direction.transpose(1, 2))
        hidden = ~real
        if self.smooth:
            hidden = (torch.arange(real.shape[1], device=real.device) >= slots).expand_as(real)
        return Gates(hidden.unsqueeze(1), after, switch, self.slots - slots if self.smooth else 0)

    @torch.jit.export
    def pullback(self, adjoint: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        columns, gates = tape.columns, tape.gates
        a_bar = sums_pullback(adjoint, tape.a, self.axis, self.slots)
        weight = columns.weight.unsqueeze(-1)
        of_features = torch.bmm(columns.rows.detach() * weight, a_bar).view(-1, self.width)
        of_rows = torch.bmm(tape.features, a_bar.transpose(1, 2)) * weight
        of_after, of_switch = torch.zeros_like(gates.after), torch.zeros_like(gates.switch)
        plain = Gates(gates.hidden, gates.after.detach(), gates.switch.detach(), gates.beyond)
        for index in range(len(tape.layers) - 1, -1, -1):
            layer, values = self.attention[index], tape.layers[index]
            of_features = attend_pullback(
                layer, of_features, values, plain, of_after, of_switch, self.shift
            )
        of_rows[..., 0] += (of_features * tape.embedded[1]).sum(-1).view(columns.kind.shape)
        results, adjoints = [columns.rows], torch.jit.annotate(list[torch.Tensor | None], [of_rows])
        if tape.embedded.shape[0] > 2:
            results.append(columns.switch)
            adjoints.append((of_features * tape.embedded[2]).sum(-1).view(columns.kind.shape))
        for result, slope in [(gates.after, of_after), (gates.switch, of_switch)]:
            if result.requires_grad:
                results.append(result)
                adjoints.append(slope)
        slope = torch.autograd.grad(results, [tape.vectors], adjoints)[0]
        assert slope is not None
        return slope
