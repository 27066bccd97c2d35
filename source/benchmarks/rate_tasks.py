"""Tasks of several sizes for `small_gpt_race.py`: GPTs, a mixture of experts, ViTs, a ConvNet, a potential.

Their data are generated: text of a random language of three tokens of memory, and the images of `small_vision.py`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import small_equivariant
import small_vision
import torch
import torch.nn.functional as F
from small_gpt import GPT, Block
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH, HELD_OUT = 1024, 128, 32, 512
EXPERTS, CHOSEN = 8, 2
IMAGES = 64  # of a batch
_RANK = 16
_REPEATED = 0.3  # share of tokens that repeat the one `_LAG` places before
_LAG = 16


class Experts(Block):
    """A block whose MLP is a mixture of experts, stored as two parameters (experts, out, in)."""

    def make_mlp(self, width: int) -> None:
        """Make router and experts; all are evaluated, which a graph can hold, and two count."""
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(EXPERTS, 2 * width, width))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, width, 2 * width))

    def mlp(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts, (batch, length, width)."""
        scores = self.router(x)
        best, number = scores.topk(CHOSEN, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, number, best.softmax(-1))
        hidden = F.gelu(torch.einsum("blw,ehw->bleh", x, self.up))
        return torch.einsum("bleh,ewh,ble->blw", hidden, self.down, weights)


@functools.lru_cache(maxsize=2)
def synthetic_text(seed: int, count: int, device: str) -> Tensor:
    """Return pieces (count, length + 1) of a language that is the same for all seeds.

    The logits of the next token are those of its frequency (Zipf), plus terms of the token before
    it, of the product of the two tokens before it, and of the third one.
    """
    language = torch.Generator().manual_seed(0)
    tables = torch.randn(3, VOCABULARY, _RANK, generator=language).to(device)
    out = torch.randn(3, _RANK, VOCABULARY, generator=language).to(device) / _RANK**0.5
    frequency = -torch.arange(1, VOCABULARY + 1, device=device).log()
    draw = torch.Generator(device).manual_seed(seed)
    pieces = torch.zeros(count, LENGTH + 1, dtype=torch.int64, device=device)
    pieces[:, :3] = torch.randint(VOCABULARY, (count, 3), generator=draw, device=device)
    repeats = torch.rand(count, LENGTH + 1, generator=draw, device=device) < _REPEATED
    for t in range(3, LENGTH + 1):
        last = tables[0][pieces[:, t - 1]]
        pair = last * tables[1][pieces[:, t - 2]]
        third = tables[2][pieces[:, t - 3]]
        logits = frequency + 2.0 * last @ out[0] + pair @ out[1] + third @ out[2]
        token = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
        pieces[:, t] = torch.where(repeats[:, t], pieces[:, max(0, t - _LAG)], token)
    return pieces


class Text:
    """A GPT of some width on synthetic text."""

    def __init__(
        self,
        seed: int,
        steps: int,
        device: str,
        *,
        width: int,
        layers: int,
        block: Callable[[int, int], nn.Module] = Block,
    ) -> None:
        pieces = synthetic_text(seed, steps * BATCH + HELD_OUT, device)
        self.batches = pieces[HELD_OUT:].view(steps, BATCH, -1)
        self.halves = pieces[:HELD_OUT].chunk(2)
        self.make = lambda: GPT(
            width,
            [block(width, max(1, width // 64)) for _ in range(layers)],
            VOCABULARY,
            LENGTH,
            tied=False,
        )

    def model(self) -> nn.Module:
        """Return a new model."""
        return self.make()

    def loss(self, model: nn.Module, at: Tensor) -> Tensor:
        """Return the loss [nats a token] of batch number `at`."""
        return _text_loss(model, self.batches.index_select(0, at)[0])

    def held_out(self, model: nn.Module) -> list[float]:
        """Return the losses of both halves of the text that is not trained on."""
        return [
            statistics.mean(_text_loss(model, some).item() for some in half.split(64))
            for half in self.halves
        ]


def _text_loss(model: nn.Module, pieces: Tensor) -> Tensor:
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


@functools.lru_cache(maxsize=4)
def generated_images(seed: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Return images and their classes."""
    x, label = small_vision.images(count, torch.Generator().manual_seed(seed))
    return x.to(device), label.to(device)


class Images:
    """A vision model on generated images."""

    def __init__(
        self, seed: int, steps: int, device: str, *, make: Callable[[], nn.Module]
    ) -> None:
        self.make = make
        self.x, self.label = generated_images(seed, steps * IMAGES, device)
        x, label = generated_images(99, 4 * HELD_OUT, device)
        self.halves = list(zip(x.chunk(2), label.chunk(2), strict=True))

    def model(self) -> nn.Module:
        """Return a new model."""
        return self.make()

    def loss(self, model: nn.Module, at: Tensor) -> Tensor:
        """Return the loss [nats] of batch number `at`."""
        rows = at * IMAGES + torch.arange(IMAGES, device=at.device)
        return F.cross_entropy(model(self.x[rows]), self.label[rows])

    def held_out(self, model: nn.Module) -> list[float]:
        """Return the losses of two sets of new images."""
        model.eval()
        losses = [F.cross_entropy(model(x), label).item() for x, label in self.halves]
        model.train()
        return losses


class SizedTask(NamedTuple):
    """A task of one size."""

    make: Callable[[int, int, str], Text | Images | small_equivariant.Clusters]
    steps: int
    seeds: Sequence[int] = (1, 2)
    is_text: bool = True


def _text(width: int, layers: int, **options: object) -> Callable[[int, int, str], Text]:
    return functools.partial(Text, width=width, layers=layers, **options)


def _images(make: Callable[[], nn.Module]) -> SizedTask:
    return SizedTask(functools.partial(Images, make=make), steps=400, is_text=False)


SYNTHETIC_TASKS = {
    "GPT, width 1024": SizedTask(_text(1024, 8), 250, (1,)),
    "GPT, width 768": SizedTask(_text(768, 4), 400),
    "GPT, width 512": SizedTask(_text(512, 4), 400),
    "GPT, width 256": SizedTask(_text(256, 4), 500),
    "experts, width 192": SizedTask(_text(192, 4, block=Experts), 500),
    "GPT, width 128": SizedTask(_text(128, 4), 500),
    "GPT, width 64": SizedTask(_text(64, 4), 500),
    "GPT, width 32": SizedTask(_text(32, 2), 500),
    "ViT, width 192": _images(functools.partial(small_vision.ViT, 192, 4)),
    "ViT, width 48": _images(small_vision.ViT),
    "ConvNet": _images(small_vision.ConvNet),
}
EQUIVARIANT = SizedTask(small_equivariant.Clusters, steps=600, is_text=False)
