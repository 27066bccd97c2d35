"""Layers with deepmd-kit's parameter names: `networks.I.layers.L.{matrix, bias, idt}`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from deepmd_muon.model.errors import ModelError

Copies = Literal[0, 1, 2]
"""How many copies of its input a layer adds to its output: none, one, or two side by side."""

_DTYPES = {
    "default": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
    "float32": torch.float32,
    "single": torch.float32,
}

IDT_MEAN, IDT_STD = 0.1, 0.001  # deepmd-kit's start for the per-neuron time step


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

    `Stream(seed).child(i)` gives a stream of its own, so the weights of one network do not depend on how
    many others exist. Seed None draws fresh entropy.
    """

    draw_dtype: torch.dtype | None = torch.float64  # equal numbers in every precision

    def __init__(self, seed: int | Sequence[int] | None) -> None:
        self._sequence = np.random.SeedSequence(seed)

    def child(self, *path: int) -> Stream:
        """Return the stream that belongs to this path of numbers."""
        other = Stream(0)
        other._sequence = np.random.SeedSequence(
            entropy=self._sequence.entropy, spawn_key=(*self._sequence.spawn_key, *path)
        )
        return other

    def generator(self) -> torch.Generator:
        """Return a CPU generator at the start of this stream."""
        state = self._sequence.generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class SeedPath:
    """Random numbers that start a network as deepmd-kit 3.2 starts it on the same kind of device.

    deepmd-kit seeds one generator a layer with a hash of the path of numbers that leads to the layer, innermost
    first, the input's seed last (`deepmd/dpmodel/utils/seed.py`, `mix_entropy` in `deepmd/pt/utils/utils.py`). Seed
    None draws fresh entropy.
    """

    draw_dtype: torch.dtype | None = None  # numbers are drawn in the parameter's own precision

    def __init__(self, seed: int | Sequence[int] | None, path: tuple[int, ...] = ()) -> None:
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        self.path = (*path, *([seed] if isinstance(seed, int) else seed))

    def child(self, *path: int) -> SeedPath:
        """Return the seed below this one, by numbers from the outermost to the innermost."""
        return SeedPath(self.path, path[::-1])

    def generator(self) -> torch.Generator:
        """Return a CPU generator seeded with the hash of the path."""
        mixed = _hash(self.path[0])
        for number in self.path[1:]:
            mixed = (_MIX_LEFT * mixed - _MIX_RIGHT * _hash(number)) & _WORD
            mixed ^= mixed >> 16
        return torch.Generator().manual_seed(mixed if len(self.path) > 1 else self.path[0])


_WORD = 0xFFFF_FFFF_FFFF_FFFF
_HASH, _MIX_LEFT, _MIX_RIGHT = 0x43B0D7E5, 0xCA01F9DD, 0x4973F715  # numpy's SeedSequence constants


def _hash(number: int) -> int:
    number = ((number ^ _HASH) * _HASH) & _WORD
    return number ^ (number >> 16)


class LayerTensors(NamedTuple):
    """The tensors of one layer, y = activation(x·matrix + bias)·idt + copies of x."""

    matrix: torch.Tensor
    bias: torch.Tensor
    idt: torch.Tensor | None


def unflatten(flat: Sequence[torch.Tensor | None], networks: int = 1) -> list[list[LayerTensors]]:
    """Group what `Network.flat` lists again, of each of several equal networks, as an autograd function gets them."""
    layers = [LayerTensors(*flat[i : i + 3]) for i in range(0, len(flat), 3)]  # type: ignore[arg-type]  # idt may be None
    depth = len(layers) // networks
    return [layers[i : i + depth] for i in range(0, len(layers), depth)]


class Layer(torch.nn.Module):
    """Parameters of one dense layer.

    Weights start as DeePMD's: normal with deviation 1/√(in + out), bias normal with deviation 1, time step
    normal around 0.1. Without `bias` the layer is linear: x·matrix.
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
        assert self.bias is not None  # those of a `Network` have one
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
        pairs = list(pairwise(widths))
        self.copies = tuple(_copies(n_in, n_to) for n_in, n_to in pairs)
        layers = [
            Layer(
                n_in, n_to, timestep=timestep and kind > 0, dtype=dtype, stream=stream.child(index)
            )
            for index, ((n_in, n_to), kind) in enumerate(zip(pairs, self.copies, strict=True))
        ]
        if n_out is not None:
            last = stream.child(len(layers))
            layers.append(Layer(widths[-1], n_out, timestep=False, dtype=dtype, stream=last))
        self.layers = torch.nn.ModuleList(layers)

    @property
    def tensors(self) -> tuple[LayerTensors, ...]:
        """Parameters of all layers, in order."""
        return tuple(layer.tensors for layer in self.layers)  # type: ignore[misc]  # ModuleList forgets its element type

    @property
    def flat(self) -> list[torch.Tensor | None]:
        """Matrix, bias and idt of every layer one after another."""
        return [part for layer in self.tensors for part in layer]


class NetworkCollection(torch.nn.Module):
    """Networks by index, so that their names read `networks.I.layers.L.matrix`."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        self.networks = torch.nn.ModuleList(networks)

    def __getitem__(self, index: int) -> Network:
        return self.networks[index]  # type: ignore[return-value]  # ModuleList forgets its element type


def _copies(n_in: int, n_out: int) -> Copies:
    if n_out == n_in:
        return 1
    return 2 if n_out == 2 * n_in else 0
