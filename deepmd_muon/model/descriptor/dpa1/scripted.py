"""DPA-1 for TorchScript: the descriptor, and the pullback from the descriptor to the edges.

Autograd differentiates the geometry alone, which has a few numbers for each edge. Features and
attention weights have hundreds of numbers for each edge; their derivatives are written out here.

A bar marks derivatives of the energy: `x_bar` is dE/dx, but `a_bar` is dE/d(slots·a) and
`lengths_bar` is −dE/dlog(l). The symbols of attention are those of `attention_passes`; A is P∘E
there, while `a` is the sum of R ⊗ features over the columns of an atom, divided by the slots.
In smooth attention the scores are (scale·QKᵀ + shift)·w − shift, with w the product of both
neighbours' switches: they fall to −shift at the cut-off.

A layer is folded if features are narrower than Q, K and V, unless these are normalised and badly
conditioned (`WORST_CONDITION`): products of its matrices are computed once. With x̃, the features
with a 1 behind them, and W̃, a matrix with its bias as the last row,

    scale·QKᵀ = x̃·M·x̃ᵀ,  M = scale·W̃_q·W̃_kᵀ      V·Wₒ = x̃·F,  F = W̃_v·Wₒ.

Normalised rows of Q, K and V are divided by their lengths l, which follow from Gram matrices,
l² = x̃·G·x̃ᵀ with G = W̃·W̃ᵀ. Scores and A are divided by the lengths, instead of the rows.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

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
"""Largest ratio of squared lengths of queries, keys or values up to which a layer is folded."""

COVERS = Coverage(
    frozenset(
        {
            "sel",
            "rcut",
            "rcut_smth",
            "env_protection",
            "exclude_types",
            "neuron",
            "axis_neuron",
            "activation_function",
            "resnet_dt",
            "type_one_side",
            "precision",
            "trainable",
            "seed",
            "set_davg_zero",
            "tebd_dim",
            "use_tebd_bias",
            "concat_output_tebd",
            "tebd_input_mode",
            "smooth_type_embedding",
            "attn_layer",
            "trainable_ln",
            "attn",
            "attn_dotr",
            "normalize",
            "scaling_factor",
            "temperature",
            "ln_eps",
        }
    )
)
"""The settings that the scripted and the tabulated form have."""


# ----- records -----------------------------------------------------------------------------------


class AttentionWeights(NamedTuple):
    """One attention layer.

    Attributes
    ----------
    inner
        The linear layers of Q, K and V, from width to attn.
    outer
        The linear layer behind attention, from attn to width.
    folded
        M, Gram matrices if Q, K and V are normalised, and F, side by side (width + 1, …); no rows
        if the layer is not folded.
    gamma, beta, eps
        Of the normalisation; (width,), (width,).
    scale
        Factor of the scores.
    """

    inner: list[Dense]
    outer: Dense
    folded: Tensor
    gamma: Tensor
    beta: Tensor
    eps: float
    scale: float


class Columns(NamedTuple):
    """The environment column by column; see `module.Neighborhood`."""

    rows: Tensor  # R (ncentre, ncolumns, 4)
    weight: Tensor  # slots that the column stands for (ncentre, ncolumns)
    real: Tensor  # whether it has a neighbour (ncentre, ncolumns)
    kind: Tensor  # type (ncentre, ncolumns)
    switch: Tensor  # (ncentre, ncolumns)
    direction: Tensor  # (ncentre, ncolumns, 3)


class Gates(NamedTuple):
    """The effect of masks, switches and angles on attention; see `attention.Gates`.

    Attributes
    ----------
    hidden
        Columns that no row attends to (ncentre, 1, ncolumns).
    factor
        Factor of the softmax (ncentre, ncolumns, ncolumns).
    switch
        Product of both neighbours' switches, like `factor`; no elements unless attention is smooth.
    unlisted
        In smooth attention, the number of empty slots without a column; else 0.
    """

    hidden: Tensor
    factor: Tensor
    switch: Tensor
    unlisted: int


class Projected(NamedTuple):
    """Tensors with scores ∝ query·keyᵀ, and the values that attention mixes.

    Attributes
    ----------
    query, key, value
        Q, K and V (ncentre, ncolumns, attn). Of a folded layer x̃·M, x̃
        (ncentre, ncolumns, width + 1) and x̃·F (ncentre, ncolumns, width), not normalised.
    inverse
        1/l of Q, K and V, in this order (ncentre·ncolumns, 1); empty if they are not normalised.
    gram_products
        x̃·G of Q, K and V (ncentre·ncolumns, width + 1); empty unless folded and normalised.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inverse: list[Tensor]
    gram_products: list[Tensor]


class AttentionSaved(NamedTuple):
    """What the pullback of an attention layer reads.

    Attributes
    ----------
    projected
        Queries, keys and values.
    scores
        Scores (ncentre, ncolumns, ncolumns), −1e30 where hidden; in smooth attention
        scale·QKᵀ + shift, before the switch multiplies it, also where hidden.
    soft
        P, the softmax of the scores.
    gated
        P∘`Gates.factor`; of a folded layer also divided by the lengths of the values.
    normed
        N (ncentre·ncolumns, width).
    inverse_deviation
        (ncentre·ncolumns, 1).
    """

    projected: Projected
    scores: Tensor
    soft: Tensor
    gated: Tensor
    normed: Tensor
    inverse_deviation: Tensor


class Tape(NamedTuple):
    """What the pullback reads.

    Attributes
    ----------
    vectors, columns, gates
        The geometry, with autograd's graph from `vectors` to the others.
    embedded
        Features before attention, and their derivatives; see `embed_edges`.
    layers
        Of attention.
    features
        Features behind attention (ncentre, ncolumns, width).
    a
        Σ R ⊗ features / slots (ncentre, 4, width).
    """

    vectors: Tensor
    columns: Columns
    gates: Gates
    embedded: Tensor
    layers: list[AttentionSaved]
    features: Tensor
    a: Tensor


# ----- the descriptor ----------------------------------------------------------------------------


class ScriptedDPA1(torch.nn.Module):
    """Descriptor of a frozen file; see `deepmd_muon.model.scripted.interface`."""

    covers = COVERS
    message_passing: Final[bool] = False
    centres_cpu: Final[int] = GROUP
    shift: Final[float] = SHIFT
    request: Request
    act: Act
    layers: list[Dense]  # of the embedding net
    attention: list[AttentionWeights]
    mean: Tensor  # of environment rows, for each type (ntypes, 4)
    scale: Tensor  # 1/stddev (ntypes, 4)
    table: Tensor  # embedding of each type (ntypes, tebd_dim)
    type_gate: Tensor  # see `embed_edges`

    def __init__(self, module: DPA1) -> None:
        super().__init__()
        settings = module.settings
        block = module.se_atten
        self.slots = module.slots
        self.axis = module.axis
        self.width = module.width
        self.rcut = settings.rcut
        self.rcut_smth = settings.rcut_smth
        self.protection = settings.env_protection
        self.strip = settings.tebd_input_mode == "strip"
        self.one_side = settings.type_one_side
        self.smooth = settings.smooth_type_embedding
        self.dotr = settings.attn_dotr
        self.normalize = settings.normalize
        self.empty_is_zero = settings.set_davg_zero
        self.append_types = settings.concat_output_tebd
        self.act = act_of(settings.activation_function)
        self.layers = dense_layers(block.filter_layers[0])
        self.attention = [
            _copy_weights(layer, settings.normalize)  # type: ignore[arg-type]
            for layer in block.dpa1_attention.attention_layers
        ]
        with torch.no_grad():
            table = module.type_embedding().detach().clone()
            type_gate = self._type_gate(module, table)
        self.request = Request(
            rcut=settings.rcut, sel=[module.slots], by_type=False, sort=False, ntypes=len(table)
        )
        self.register_buffer("mean", block.mean.detach()[:, 0].clone())
        self.register_buffer("scale", 1.0 / block.stddev.detach()[:, 0])
        self.register_buffer("table", table)
        self.register_buffer("type_gate", type_gate)

    def _type_gate(self, module: DPA1, table: Tensor) -> Tensor:
        """Return the output of the net of the types for every pair (ntypes², width), or no rows."""
        networks = module.se_atten.filter_layers_strip
        if networks is None:
            return table.new_zeros(0, self.width)
        pairs = table.repeat(len(table), 1)  # row: centre·ntypes + neighbour
        if not self.one_side:
            centres = table.repeat_interleave(len(table), dim=0)
            pairs = torch.cat([pairs, centres], dim=1)
        return embed_rows(self.act, dense_layers(networks[0]), pairs)[0]

    @torch.jit.export
    def describe(self, near: Near) -> tuple[Tensor, Tape]:
        """Return D (ncentre, dim_out) and the tape."""
        vectors = near.vectors.detach().requires_grad_(True)
        columns = self._columns(near, vectors)
        ncentre, ncolumns = columns.kind.shape
        rows = columns.rows.detach()
        no_elements = columns.rows.new_zeros([0])
        pair = near.kind.unsqueeze(1) * self.table.shape[0] + columns.kind
        embedded = embed_edges(
            self.act,
            self.layers,
            x=rows[..., 0].reshape(-1),
            pair=pair.view(-1),
            types=self.table,
            type_gate=self.type_gate,
            switch=columns.switch.detach().view(-1) if self.strip and self.smooth else no_elements,
            one_side=self.one_side,
        )
        features = embedded[0].view(ncentre, ncolumns, self.width)
        gates = Gates(no_elements, no_elements, no_elements, 0)
        layers = torch.jit.annotate(list[AttentionSaved], [])
        if len(self.attention) > 0:
            gates = self._gates(columns, near.neighbor.shape[1])
            detached = _detach(gates)
            for weights in self.attention:
                saved = attend(weights, features, detached, self.normalize, self.shift)
                layers.append(saved)
                flat = torch.addcmul(weights.beta, saved.normed, weights.gamma)
                features = flat.view(features.shape)
        weighted = rows * columns.weight.unsqueeze(-1)
        a = torch.bmm(weighted.transpose(1, 2), features) / self.slots
        descriptor = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis]).flatten(1)
        if self.append_types:
            descriptor = torch.cat([descriptor, self.table[near.kind]], dim=1)
        tape = Tape(
            vectors=vectors,
            columns=columns,
            gates=gates,
            embedded=embedded,
            layers=layers,
            features=features,
            a=a,
        )
        return descriptor, tape

    def _columns(self, near: Near, vectors: Tensor) -> Columns:
        """Return the standardised environment in the precision of the weights."""
        real = near.neighbor >= 0
        rows, switch, direction = smooth_rows(
            vectors, real, self.rcut, self.rcut_smth, self.protection
        )
        dtype = self.mean.dtype
        mean = self.mean[near.kind]
        scale = self.scale[near.kind]
        rows = (rows.to(dtype) - mean.unsqueeze(1)) * scale.unsqueeze(1)
        columns = Columns(
            rows=rows,
            weight=real.to(dtype),
            real=real,
            kind=near.types[near.neighbor.clamp(min=0)].clamp(min=0),
            switch=switch.to(dtype),
            direction=shortened(direction.to(dtype), rows),
        )
        if self.empty_is_zero:
            return columns
        # One more column represents all empty slots (−1). A neighbour of an excluded pair (−2)
        # fills its slot.
        n_empty = (self.slots - (near.neighbor != -1).sum(1, keepdim=True)).to(dtype)
        empty_row = (-mean * scale).unsqueeze(1)
        return Columns(
            rows=torch.cat([columns.rows, empty_row], dim=1),
            weight=torch.cat([columns.weight, n_empty], dim=1),
            real=torch.nn.functional.pad(real, [0, 1]),
            kind=torch.cat([columns.kind, near.first_type.unsqueeze(1)], dim=1),
            switch=torch.nn.functional.pad(columns.switch, [0, 1]),
            direction=torch.nn.functional.pad(columns.direction, [0, 0, 0, 1]),
        )

    def _gates(self, columns: Columns, listed: int) -> Gates:
        """Return the gates; the first `listed` columns are slots of the list, one each."""
        real = columns.real
        ncolumns = real.shape[1]
        switch = columns.rows.new_zeros([0])
        hidden = ~real
        factor = real.to(self.mean.dtype).unsqueeze(2).expand(-1, -1, ncolumns)
        if self.smooth:
            switch = columns.switch.unsqueeze(2) * columns.switch.unsqueeze(1)
            factor = switch
            # Empty slots have scores, too; only the column of all empty slots is hidden.
            hidden = (torch.arange(ncolumns, device=real.device) >= listed).expand_as(real)
        if self.dotr:
            factor = factor * torch.bmm(columns.direction, columns.direction.transpose(1, 2))
        return Gates(
            hidden=hidden.unsqueeze(1),
            factor=factor,
            switch=switch,
            unlisted=self.slots - listed if self.smooth else 0,
        )

    @torch.jit.export
    def pullback(self, adjoint: Tensor, tape: Tape) -> Tensor:
        """Return dE/dr_ij (ncentre, nnei, 3) from dE/dD (ncentre, dim_out)."""
        columns = tape.columns
        gates = tape.gates
        weight = columns.weight.unsqueeze(-1)
        a_bar = sums_pullback(adjoint, tape.a, self.axis, self.slots)
        features_bar = torch.bmm(columns.rows.detach() * weight, a_bar).view(-1, self.width)
        rows_bar = torch.bmm(tape.features, a_bar.transpose(1, 2)) * weight
        factor_bar = torch.zeros_like(gates.factor)
        switch_bar = torch.zeros_like(gates.switch)
        detached = _detach(gates)
        for index in range(len(tape.layers) - 1, -1, -1):
            features_bar = attend_pullback(
                self.attention[index],
                features_bar,
                tape.layers[index],
                gates=detached,
                factor_bar=factor_bar,
                switch_bar=switch_bar,
                shift=self.shift,
            )
        by_radial = tape.embedded[1]  # dG/dR₀
        rows_bar[..., 0] += (features_bar * by_radial).sum(-1).view(columns.kind.shape)
        # The rest is geometry: autograd continues from the tensors that depend on it.
        results = [columns.rows]
        adjoints = torch.jit.annotate(list[Tensor | None], [rows_bar])
        if tape.embedded.shape[0] > 2:
            by_switch = tape.embedded[2]  # dG/dswitch
            results.append(columns.switch)
            adjoints.append((features_bar * by_switch).sum(-1).view(columns.kind.shape))
        if gates.factor.requires_grad:
            results.append(gates.factor)
            adjoints.append(factor_bar)
        if gates.switch.requires_grad:
            results.append(gates.switch)
            adjoints.append(switch_bar)
        slope = torch.autograd.grad(results, [tape.vectors], adjoints)[0]
        assert slope is not None
        return slope


def _detach(gates: Gates) -> Gates:
    return Gates(gates.hidden, gates.factor.detach(), gates.switch.detach(), gates.unlisted)


def embed_edges(
    act: Act,
    layers: list[Dense],
    x: Tensor,
    pair: Tensor,
    types: Tensor,
    type_gate: Tensor,
    switch: Tensor,
    one_side: bool,
) -> Tensor:
    """Return features of edges and their derivatives by R₀ and, with a switch, by the switch.

    Parameters
    ----------
    act, layers
        The embedding net.
    x
        R₀ (n,).
    pair
        centre·ntypes + neighbour (n,).
    types
        Embedding of every type (ntypes, tebd_dim).
    type_gate
        In strip mode g, the output of the net of the types for every pair (ntypes², width):
        features are multiplied by 1 + g, or by 1 + g·switch. Else without rows.
    switch
        Of the edges (n,); no elements if g has no such factor.
    one_side
        Whether features depend on the type of the neighbour alone.

    Returns
    -------
    Tensor
        G, dG/dR₀ and, with a switch, dG/dswitch (2 or 3, n, width).
    """
    ntypes = types.shape[0]
    strip = type_gate.shape[0] > 0
    inputs = [x.unsqueeze(1)]
    if not strip:
        inputs.append(types[pair % ntypes])
        if not one_side:
            inputs.append(types[torch.div(pair, ntypes, rounding_mode="floor")])
    net = embed_rows(act, layers, torch.cat(inputs, dim=1))  # values, derivatives by R₀
    if not strip:
        return net
    g = type_gate[pair]
    if switch.shape[0] == 0:
        return net * (1.0 + g)
    gated = net * (1.0 + g * switch.unsqueeze(1))
    by_switch = net[0] * g
    return torch.cat([gated, by_switch.unsqueeze(0)])


# ----- an attention layer ------------------------------------------------------------------------


def attend(
    weights: AttentionWeights, x: Tensor, gates: Gates, normalize: bool, shift: float
) -> AttentionSaved:
    """Apply an attention layer to features (ncentre, ncolumns, width), without γ and β."""
    ncentre, ncolumns, width = x.shape
    flat = x.view(-1, width)
    folded = weights.folded.shape[0] > 0
    if folded:
        projected = _project_folded(weights, x, normalize)
    else:
        projected = _project(weights, x, normalize)
    scores = torch.bmm(projected.query, projected.key.transpose(1, 2))
    if not folded:
        scores.mul_(weights.scale)
    elif normalize:
        _scale_pairs(scores, projected.inverse)
    saved_scores = scores
    if gates.switch.shape[0] > 0:
        saved_scores.add_(shift)
        scores = (saved_scores * gates.switch).sub_(shift)
    scores.masked_fill_(gates.hidden, -1e30)  # also `saved_scores`, unless there is a switch
    if gates.unlisted > 0 and ncolumns > 0:
        soft = _softmax_with_unlisted(scores, gates.unlisted, shift)
    else:
        soft = scores.softmax(-1)
    gated = soft * gates.factor
    if folded:
        if normalize:
            gated.mul_(projected.inverse[2].view(ncentre, 1, ncolumns))  # 1/l of the values
        summed = x + weights.outer.bias
        torch.baddbmm(summed, gated, projected.value, out=summed)  # adds in place
        summed = summed.view(-1, width)
    else:
        mixed = torch.bmm(gated, projected.value).view(-1, projected.value.shape[2])
        summed = add_product(weights.outer.bias, mixed, weights.outer.matrix).add_(flat)
    # On CPUs var_mean takes several times as long.
    centred = summed.sub_(summed.mean(-1, keepdim=True))
    variance = centred.norm(2.0, [-1], True).square_().div_(width)
    inverse_deviation = (variance + weights.eps).rsqrt()
    return AttentionSaved(
        projected=projected,
        scores=saved_scores,
        soft=soft,
        gated=gated,
        normed=centred.mul_(inverse_deviation),
        inverse_deviation=inverse_deviation,
    )


def _softmax_with_unlisted(scores: Tensor, unlisted: int, shift: float) -> Tensor:
    """Return the softmax of scores and of `unlisted` more, of slots without a column: −shift."""
    top = scores.amax(-1, keepdim=True).clamp_(min=-shift)
    powers = (scores - top).exp()
    of_unlisted = float(unlisted) * (-shift - top).exp()
    return powers.div_(powers.sum(-1, keepdim=True) + of_unlisted)


def _project(weights: AttentionWeights, x: Tensor, normalize: bool) -> Projected:
    """Return Q, K and V of features (ncentre, ncolumns, width)."""
    ncentre, ncolumns, width = x.shape
    flat = x.view(-1, width)
    projections: list[Tensor] = []
    inverse: list[Tensor] = []
    for dense in weights.inner:
        projection = add_product(dense.bias, flat, dense.matrix)
        if normalize:
            length = projection.norm(2.0, [-1], True)
            inverse.append(length.clamp_(min=1e-12).reciprocal())
            projection = projection.mul_(inverse[-1])
        projections.append(projection.view(ncentre, ncolumns, projection.shape[1]))
    gram_products: list[Tensor] = []
    return Projected(projections[0], projections[1], projections[2], inverse, gram_products)


def _project_folded(weights: AttentionWeights, x: Tensor, normalize: bool) -> Projected:
    """Return x̃·M, x̃ and x̃·F of features (ncentre, ncolumns, width)."""
    ncentre, ncolumns, width = x.shape
    wide = width + 1
    flat = x.view(-1, width)
    extended = torch.cat([flat, flat.new_ones([flat.shape[0], 1])], dim=1)
    products = product(extended, weights.folded)
    shape = [ncentre, ncolumns, wide]  # explicit: a lone atom has no columns
    inverse: list[Tensor] = []
    gram_products: list[Tensor] = []
    if normalize:
        for index in range(3):  # one by one: a temporary of all three is slow to write
            gram_product = products[:, (index + 1) * wide : (index + 2) * wide]
            square = (gram_product * extended).sum(-1, keepdim=True)
            inverse.append(square.clamp_(min=1e-24).rsqrt())
            gram_products.append(gram_product)
    return Projected(
        query=products[:, :wide].view(shape),
        key=extended.view(shape),
        value=products[:, products.shape[1] - width :].view([ncentre, ncolumns, width]),
        inverse=inverse,
        gram_products=gram_products,
    )


def _scale_pairs(pairs: Tensor, inverse: list[Tensor]) -> None:
    """Divide pairs (ncentre, ncolumns, ncolumns) by the lengths of query and key.

    This touches less memory than scaling the features if a row has fewer pairs than features.
    """
    ncentre, ncolumns, _ = pairs.shape
    query_inverse, key_inverse, _ = inverse
    pairs.mul_(query_inverse.view(ncentre, ncolumns, 1)).mul_(
        key_inverse.view(ncentre, 1, ncolumns)
    )


def attend_pullback(
    weights: AttentionWeights,
    z_bar: Tensor,
    saved: AttentionSaved,
    gates: Gates,
    factor_bar: Tensor,
    switch_bar: Tensor,
    shift: float,
) -> Tensor:
    """Return dE/dx (ncentre·ncolumns, width) from that of the layer's output, `z_bar`.

    Add the layer's part of dE/dfactor and dE/dswitch to `factor_bar` and `switch_bar`.
    """
    projected = saved.projected
    value = projected.value
    folded = weights.folded.shape[0] > 0
    normalize = len(projected.inverse) > 0
    # S̄ = (N̄ − mean(N̄) − N·mean(N̄∘N))/deviation
    normed_bar = z_bar * weights.gamma
    along = (normed_bar * saved.normed).mean(-1, keepdim=True)
    centred_bar = normed_bar.sub_(normed_bar.mean(-1, keepdim=True))
    summed_bar = centred_bar.addcmul_(saved.normed, along, value=-1.0).mul_(saved.inverse_deviation)
    mixed_bar = summed_bar if folded else product(summed_bar, weights.outer.matrix.t())
    mixed_bar = mixed_bar.view(value.shape)
    value_bar = torch.bmm(saved.gated.transpose(1, 2), mixed_bar)
    # One buffer, in place: P∘Ā, then P∘P̄, then the cotangent of the scores.
    soft_gated_bar = torch.bmm(mixed_bar, value.transpose(1, 2)).mul_(saved.soft)
    if folded and normalize:
        soft_gated_bar.mul_(projected.inverse[2].view(value.shape[0], 1, value.shape[1]))
    factor_bar.add_(soft_gated_bar)
    soft_soft_bar = soft_gated_bar.mul_(gates.factor)  # = A∘Ā
    lengths_bar: list[Tensor] = []  # −dE/dlog(l) of queries, keys and values, if folded
    if folded and normalize:
        lengths_bar.append(soft_soft_bar.sum(1))  # of values
    # P∘P̄ − P·Σ P∘P̄, also with a constant in the denominator of the softmax.
    scores_bar = soft_soft_bar.addcmul_(saved.soft, soft_soft_bar.sum(-1, keepdim=True), value=-1.0)
    scores = saved.scores
    if gates.switch.shape[0] > 0:
        switch_bar.addcmul_(scores_bar, scores)
        scores_bar.mul_(gates.switch)
        scores = scores - shift
    if folded:
        if normalize:
            products = scores_bar * scores
            lengths_bar.insert(0, products.sum(1))  # of keys
            lengths_bar.insert(0, products.sum(2))  # of queries
            _scale_pairs(scores_bar, projected.inverse)
        return _pull_folded(
            weights,
            summed_bar,
            projected,
            scores_bar=scores_bar,
            value_bar=value_bar,
            lengths_bar=lengths_bar,
        )
    scores_bar.mul_(weights.scale)
    return _pull_projections(weights, summed_bar, projected, scores_bar, value_bar)


def _pull_projections(
    weights: AttentionWeights,
    summed_bar: Tensor,
    projected: Projected,
    scores_bar: Tensor,
    value_bar: Tensor,
) -> Tensor:
    """Return dE/dx: `summed_bar` and the parts through Q, K and V."""
    projections = [projected.query, projected.key, projected.value]
    adjoints = [
        torch.bmm(scores_bar, projected.key),
        torch.bmm(scores_bar.transpose(1, 2), projected.query),
        value_bar,
    ]
    x_bar = summed_bar
    for index in range(3):
        adjoint = adjoints[index]
        if len(projected.inverse) > 0:
            unit = projections[index]
            adjoint.addcmul_(unit, (adjoint * unit).sum(-1, keepdim=True), value=-1.0)
            adjoint = adjoint.view(-1, unit.shape[2]).mul_(projected.inverse[index])
        flat = adjoint.view(-1, adjoint.shape[-1])
        x_bar = add_product(x_bar, flat, weights.inner[index].matrix.t())
    return x_bar


def _pull_folded(
    weights: AttentionWeights,
    summed_bar: Tensor,
    projected: Projected,
    scores_bar: Tensor,
    value_bar: Tensor,
    lengths_bar: list[Tensor],
) -> Tensor:
    """Return dE/dx: `summed_bar`, overwritten, and the parts through x̃·M, x̃, x̃·F and lengths.

    `lengths_bar` are −dE/dlog(l) of queries, keys and values (ncentre, ncolumns), if normalised;
    dlog(l)/dx̃ = x̃·G/l².
    """
    x_bar = summed_bar
    width = x_bar.shape[1]
    wide = width + 1
    by_centre = x_bar.view(value_bar.shape)  # the same memory
    query = projected.query[:, :, :width]
    # Adds in place.
    torch.baddbmm(by_centre, scores_bar.transpose(1, 2), query, out=by_centre)
    for index in range(len(lengths_bar)):
        rate = projected.inverse[index].square().mul_(lengths_bar[index].view(-1, 1))
        x_bar.addcmul_(projected.gram_products[index][:, :width], rate, value=-1.0)
    score_matrix = weights.folded[:width, :wide]
    value_matrix = weights.folded[:width, weights.folded.shape[1] - width :]
    query_bar = torch.bmm(scores_bar, projected.key).view(-1, wide)
    accumulate_product(x_bar, query_bar, score_matrix.t())
    accumulate_product(x_bar, value_bar.view(-1, width), value_matrix.t())
    return x_bar


# ----- the weights of a layer --------------------------------------------------------------------


def _copy_weights(layer: AttentionLayer, normalize: bool) -> AttentionWeights:
    """Return copies of a layer's weights."""
    attention = layer.attention_layer
    norm = layer.attn_layer_norm
    matrices = attention.in_proj.matrix.detach().clone().chunk(3, dim=1)
    biases = attention.in_proj.tensors.bias.detach().clone().chunk(3)
    inner = [
        Dense(matrix.contiguous(), bias.clone(), idt=None, copies=0)
        for matrix, bias in zip(matrices, biases, strict=True)
    ]
    outer = Dense(
        attention.out_proj.matrix.detach().clone(),
        attention.out_proj.tensors.bias.detach().clone(),
        idt=None,
        copies=0,
    )
    scale = float(attention.scale)
    return AttentionWeights(
        inner=inner,
        outer=outer,
        folded=_fold_weights(inner, outer, normalize, scale),
        gamma=norm.matrix.detach().clone(),
        beta=norm.bias.detach().clone(),
        eps=float(norm.eps),
        scale=scale,
    )


def _fold_weights(inner: list[Dense], outer: Dense, normalize: bool, scale: float) -> Tensor:
    """Return the products of a folded layer, side by side; without rows if it is not folded.

    These are M (width + 1, width + 1), the Gram matrices of Q, K and V, of the same shape, if
    normalised, and F (width + 1, width). Folding does not pay if features are as wide as Q, K and
    V, and lengths must not lose digits.
    """
    width, attn = inner[0].matrix.shape
    not_folded = outer.matrix.new_zeros(0, 0)
    if width >= attn:
        return not_folded
    query, key, value = (torch.cat([dense.matrix, dense.bias[None]]).double() for dense in inner)
    products = [scale * (query @ key.t())]
    if normalize:
        # Rounding errors of l² are relative to the largest l², `condition` times the smallest.
        condition = max(float(torch.linalg.cond(matrix)) ** 2 for matrix in (query, key, value))
        if not condition < WORST_CONDITION:  # also if it is NaN
            return not_folded
        products += [matrix @ matrix.t() for matrix in (query, key, value)]
    products.append(value @ outer.matrix.double())
    return torch.cat(products, dim=1).to(outer.matrix.dtype)
