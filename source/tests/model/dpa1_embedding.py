"""DPA-1's embedding net with values, slopes and gradients of losses, for the tests of its derivatives."""

import torch

from deepmd_muon.model.descriptor.dpa1.embedding import Embedding, Inputs
from deepmd_muon.model.nn import layers
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.four_passes import run
from deepmd_muon.model.nn.networks import Network, SeedPath

ROWS = 7
#: Name of the activation, widths of the layers, and whether residual layers have a time step.
NETS = {
    "tanh": ("tanh", (3, 6, 12), True),
    "silut": ("silut:1.0", (4, 4, 5), False),
    "one layer": ("tanh", (5,), False),
}


def embedding_results(name, precision="float64", device="cpu", *, written, force=True):
    """Return features, the slope of s, and gradients of losses: of values, of slopes, of both."""
    function, widths, timestep = NETS[name]
    f, dtype = activation(function), getattr(torch, precision)
    network = Network(widths, None, timestep=timestep, dtype=dtype, stream=SeedPath(3)).to(device)
    generator = torch.Generator().manual_seed(2)
    s, start, w = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for shape in ((ROWS, 1), (ROWS, widths[0]), (widths[0],))
    )
    inputs = (start, w, *network.parameters())

    def features():
        if written:
            inputs = Inputs(s, start, w, network.tensors)
            return run(Embedding(f, network.copies), inputs, force=force)[0]
        return layers.plain_values(f, network.copies, f.value(start + s * w), network.tensors)

    out = features()
    if not force:
        return [out, *torch.autograd.grad(out.sin().sum(), inputs)]
    (slope,) = torch.autograd.grad(out.pow(3).sum(), s)
    out = features()
    (attached,) = torch.autograd.grad(out.pow(3).sum(), s, create_graph=True)
    of_slope = torch.autograd.grad(attached.sin().sum(), inputs, retain_graph=True)
    return [
        out,
        slope,
        attached,
        *of_slope,
        *torch.autograd.grad(out.sin().sum() + attached.sin().sum(), inputs),
    ]


def assert_same_embedding(found, wanted, precision):
    """Compare two results."""
    tolerance = 1e-12 if precision == "float64" else 1e-4
    for value, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            value, other, rtol=0, atol=tolerance * max(1.0, other.abs().max().item())
        )
