"""Layers of DPA-1's attention with values, slopes and gradients of losses, for the tests of their derivatives."""

import torch

from deepmd_muon.model.descriptor.dpa1.attention import Gates, NeighborAttention
from deepmd_muon.model.descriptor.dpa1.settings import DPA1Settings
from deepmd_muon.model.nn.networks import SeedPath

OPTIONS = {
    "normalised": {"temperature": 1.0},
    "raw": {"normalize": False},
    "scaled": {"scaling_factor": 2.5, "ln_eps": 1e-2, "layers": 3},
    "without_angles": {"dotr": False, "layers": 1},
}


def attention_of(
    columns, precision="float64", width=5, dotr=True, layers=2, alone=True, device="cpu", **settings
):
    """Return layers of attention, features and gates of three atoms; one slot is empty.

    `alone`: whether an atom has no neighbour at all; rounding hides its scores, so that differences do not see them.
    """
    given = {
        "rcut": 6.0,
        "rcut_smth": 0.5,
        "sel": 9,
        "neuron": [width],
        "attn": 3,
        "attn_layer": layers,
        **settings,
    }
    attention = NeighborAttention(DPA1Settings(**given, precision=precision), SeedPath(3)).to(
        device
    )
    generator, dtype = torch.Generator().manual_seed(2), getattr(torch, precision)
    for layer in attention.attention_layers:
        factor = layer.attn_layer_norm.matrix.data
        factor.copy_(1.0 + 0.3 * torch.randn(factor.shape, generator=generator, dtype=factor.dtype))
    features, gate = (
        torch.randn(3, columns, n, dtype=torch.float64, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for n in (width, columns if dotr else 1)
    )
    mask = torch.zeros(3, 1, columns, dtype=dtype, device=device)
    if columns:
        mask[0, 0, -1] = mask[2, :, 0 if alone else -1 :] = torch.finfo(dtype).min / 2
    return attention, features, Gates(mask, gate, None, 0)


def reference_layer(layer, features, gates):
    """Return what a layer of attention returns, with torch's own operations; they define its derivatives."""
    attention = layer.attention_layer
    norm = layer.attn_layer_norm
    inner = attention.in_proj.tensors
    outer = attention.out_proj.tensors
    qkv = (features @ inner.matrix + inner.bias).unflatten(-1, (3, -1))
    if attention.normalize:
        qkv = torch.nn.functional.normalize(qkv, dim=-1)
    query, key, value = qkv.unbind(-2)
    soft = torch.baddbmm(gates.mask, query, key.mT, alpha=attention.scale).softmax(-1)
    mixed = (soft * gates.factor) @ value
    return torch.nn.functional.layer_norm(
        features + mixed @ outer.matrix + outer.bias,
        features.shape[-1:],
        weight=norm.matrix,
        bias=norm.bias,
        eps=norm.eps,
    )


def attention_results(attention, features, gates, *, written, force=True):
    """Return features behind attention, their slopes, and gradients of losses: of values, of slopes, of both.

    Derivatives are the written ones, or those of autograd, which define them.
    """

    def forward(force):
        if written:
            return attention(features, gates, force=force)
        out = features
        for layer in attention.attention_layers:
            out = reference_layer(layer, out, gates)
        return out

    inputs = (features, gates.factor, *attention.parameters())
    out = forward(force)
    if not force:
        return [out, *torch.autograd.grad(out.sin().sum(), inputs)]
    slopes = torch.autograd.grad(out.pow(3).sum(), inputs[:2])
    out = forward(force=True)
    attached = torch.autograd.grad(out.pow(3).sum(), inputs[:2], create_graph=True)
    along = sum(slope.sin().sum() for slope in attached)
    of_slopes = torch.autograd.grad(along, inputs, retain_graph=True, materialize_grads=True)
    return [
        out,
        *slopes,
        *attached,
        *of_slopes,
        *torch.autograd.grad(out.sin().sum() + along, inputs),
    ]
