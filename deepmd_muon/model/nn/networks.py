"""Networks with deepmd-kit's parameter names: `networks.I.layers.L.{matrix, bias, idt}`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.errors import ModelError

T = TypeVar("T")

Copies = Literal[0, 1, 2]
"""How many copies of its input a layer adds to its output: none, one, or two side by side."""

_DTYPES = {
    "default": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
    "float32": torch.float32,
    "single": torch.float32,
}

# deepmd-kit's start for the per-neuron time step.
IDT_MEAN = 0.1
IDT_STD = 0.001


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype that a `precision` setting means; "default" is float64.

    Raises
    ------
    ModelError
        When the models here do not compute in this precision.
    """
    if precision not in _DTYPES:
        raise ModelError(f"precision {precision!r} is not offered; use one of {', '.join(_DTYPES)}")
    return _DTYPES[precision]


class Stream:
    """Random numbers of one model, independent of torch's global generator.

    Every network draws from its own child stream, `Stream(seed).child(i)`, so that its weights do
    not depend on the number of other networks. Seed None draws fresh entropy.
    """

    draw_dtype: torch.dtype | None = torch.float64  # equal numbers in every precision

    def __init__(self, seed: int | Sequence[int] | None) -> None:
        self._sequence = np.random.SeedSequence(seed)

    def child(self, *path: int) -> Stream:
        """Return the stream of this path of numbers below this stream."""
        child = Stream(0)
        child._sequence = np.random.SeedSequence(
            entropy=self._sequence.entropy, spawn_key=(*self._sequence.spawn_key, *path)
        )
        return child

    def generator(self) -> torch.Generator:
        """Return a CPU generator at the start of this stream."""
        state = self._sequence.generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class SeedPath:
    """Random numbers that start a network as deepmd-kit 3.2 starts it on the same kind of device.

    deepmd-kit seeds one generator a layer with a hash of the path of numbers that leads to the
    layer, innermost first, the input's seed last (`deepmd/dpmodel/utils/seed.py`, `mix_entropy` in
    `deepmd/pt/utils/utils.py`). Seed None draws fresh entropy.
    """

    draw_dtype: torch.dtype | None = None  # numbers are drawn in the parameter's own precision

    def __init__(self, seed: int | Sequence[int] | None, path: tuple[int, ...] = ()) -> None:
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        seeds = [seed] if isinstance(seed, int) else seed
        self.path = (*path, *seeds)

    def child(self, *path: int) -> SeedPath:
        """Return the seed below this one, by numbers from the outermost to the innermost."""
        return SeedPath(self.path, path[::-1])

    def generator(self) -> torch.Generator:
        """Return a CPU generator seeded with the hash of the path."""
        if len(self.path) == 1:  # deepmd-kit takes a single number as it is
            return torch.Generator().manual_seed(self.path[0])
        mixed = _hash(self.path[0])
        for number in self.path[1:]:
            mixed = (_MIX_LEFT * mixed - _MIX_RIGHT * _hash(number)) & _WORD
            mixed ^= mixed >> 16
        return torch.Generator().manual_seed(mixed)


_WORD = 0xFFFF_FFFF_FFFF_FFFF
# Constants of numpy's SeedSequence.
_HASH = 0x43B0D7E5
_MIX_LEFT = 0xCA01F9DD
_MIX_RIGHT = 0x4973F715


def _hash(number: int) -> int:
    number = ((number ^ _HASH) * _HASH) & _WORD
    return number ^ (number >> 16)


class LayerTensors(NamedTuple):
    """The tensors of one layer, y = activation(x·matrix + bias)·idt + copies of x."""

    matrix: Tensor
    bias: Tensor
    idt: Tensor | None


def unflatten(flat: Sequence[Tensor | None], networks: int = 1) -> list[list[LayerTensors]]:
    """Return the layers of several equal networks from their `Network.flat` in a row."""
    layers = [
        LayerTensors(*flat[i : i + 3])  # type: ignore[arg-type]  # idt may be None
        for i in range(0, len(flat), 3)
    ]
    depth = len(layers) // networks
    return [layers[i : i + depth] for i in range(0, len(layers), depth)]


class Layer(torch.nn.Module):
    """Parameters of one dense layer.

    They start as in DeePMD: matrix normal with deviation 1/√(n_in + n_out), bias normal with
    deviation 1, time step normal around 0.1. Without `bias` the layer is linear: x·matrix.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        timestep: bool,
        dtype: torch.dtype,
        stream: Stream | SeedPath,
        bias: bool = True,
    ) -> None:
        super().__init__()
        generator = stream.generator()

        def normal(shape: tuple[int, ...], mean: float, std: float) -> torch.nn.Parameter:
            drawn = torch.empty(shape, dtype=stream.draw_dtype or dtype).normal_(
                mean, std, generator=generator
            )
            return torch.nn.Parameter(drawn.to(dtype))

        self.matrix = normal((n_in, n_out), 0.0, 1.0 / math.sqrt(n_in + n_out))
        self.bias = normal((n_out,), 0.0, 1.0) if bias else None
        self.idt = normal((n_out,), IDT_MEAN, IDT_STD) if timestep else None

    @property
    def tensors(self) -> LayerTensors:
        """The layer's parameters in a fixed order."""
        assert self.bias is not None  # layers of a `Network` have one
        return LayerTensors(self.matrix, self.bias, self.idt)


class Network(torch.nn.Module):
    """A stack of layers; `copies` says which of them add their input to their output.

    Parameters
    ----------
    widths
        Input width, then the width of each hidden layer.
    n_out
        Width of a last linear layer without residual, or None for none.
    timestep
        `resnet_dt`: residual layers scale their activation by a trained `idt`.
    dtype
        Precision of the parameters.
    stream
        Source of the starting weights.
    """

    def __init__(
        self,
        widths: Sequence[int],
        n_out: int | None,
        *,
        timestep: bool,
        dtype: torch.dtype,
        stream: Stream | SeedPath,
    ) -> None:
        super().__init__()
        layers: list[Layer] = []
        all_copies: list[Copies] = []
        for index, (n_from, n_to) in enumerate(pairwise(widths)):
            copies = _copies(n_from, n_to)
            layer = Layer(
                n_from,
                n_to,
                timestep=timestep and copies > 0,
                dtype=dtype,
                stream=stream.child(index),
            )
            layers.append(layer)
            all_copies.append(copies)
        self.copies = tuple(all_copies)
        if n_out is not None:
            last = stream.child(len(layers))
            layers.append(Layer(widths[-1], n_out, timestep=False, dtype=dtype, stream=last))
        self.layers = torch.nn.ModuleList(layers)

    @property
    def tensors(self) -> tuple[LayerTensors, ...]:
        """Parameters of all layers, in order."""
        # ModuleList forgets the type of its elements.
        return tuple(layer.tensors for layer in self.layers)  # type: ignore[misc]

    @property
    def flat(self) -> list[Tensor | None]:
        """Matrix, bias and idt of every layer one after another."""
        return [tensor for layer in self.tensors for tensor in layer]


class NetworkCollection(torch.nn.Module):
    """Networks by index, so that their names read `networks.I.layers.L.matrix`."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        self.networks = torch.nn.ModuleList(networks)

    def __getitem__(self, index: int) -> Network:
        # ModuleList forgets the type of its elements.
        return self.networks[index]  # type: ignore[return-value]


def _copies(n_in: int, n_out: int) -> Copies:
    if n_out == n_in:
        return 1
    return 2 if n_out == 2 * n_in else 0


def run_layer(layer: Callable[..., T], *arguments: Any, recompute: bool) -> T:
    """Return ``layer(*arguments)``; with `recompute`, the forward pass keeps the arguments alone.

    The layer must draw no random numbers. Every backward pass that needs its tensors calls it
    again: once for forces, and once for the gradient of the loss. The pass that computes forces
    still keeps some tensors for the gradient of a loss on forces. Without gradients the layer is
    called once.
    """
    if not recompute or not torch.is_grad_enabled():
        return layer(*arguments)
    # The first call imports torch's compiler, which takes seconds.
    from torch.utils.checkpoint import checkpoint

    result: T = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result
