"""A small transformer with a mixture of experts in every layer, and the text that it learns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu, one_hot, scaled_dot_product_attention

SYMBOLS, LENGTH, LANGUAGES = 16, 32, 4
WIDTH, HEADS, LAYERS = 64, 4, 2
EXPERTS, CHOSEN, HIDDEN = 8, 2, 64
BALANCE = 0.01  # weight of the loss that keeps the experts equally busy


class Text:
    """Text of several languages; in each the next symbol is drawn at random, depending on the two before it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = (
            2.5 * torch.randn(LANGUAGES, SYMBOLS, SYMBOLS, SYMBOLS, generator=generator)
        ).softmax(-1)
        sample, language = self._draw(400, 1)
        p = self.table[language[:, None], sample[:, :-2], sample[:, 1:-1]]
        self.entropy = -(p * p.log()).sum(-1).mean().item()

    def _draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        language = torch.randint(LANGUAGES, (count,), generator=generator)
        text = torch.randint(SYMBOLS, (count, 8 + LENGTH + 1), generator=generator)
        for i in range(2, text.shape[1]):
            p = self.table[language, text[:, i - 2], text[:, i - 1]]
            text[:, i] = torch.multinomial(p, 1, generator=generator)[:, 0]
        return text[:, 8:], language

    def draw(self, count: int, seed: int) -> Tensor:
        """Return int64 (count, LENGTH + 1), each row in a language of its own."""
        return self._draw(count, seed)[0]


class Attention(nn.Module):
    """Causal attention; queries, keys and values are made by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, WIDTH) to the same shape."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


def local(weight: Tensor) -> Tensor:
    """Return this rank's experts of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class StackedExperts(nn.Module):
    """Experts as three-dimensional weights, (experts, out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def each(self) -> list[tuple[Tensor, Tensor]]:
        """Return the two weights of each expert on this rank."""
        return list(zip(local(self.up).unbind(), local(self.down).unbind(), strict=True))


class GroupedExperts(nn.Module):
    """Experts as one weight, (experts · out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS * HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS * WIDTH, HIDDEN) / HIDDEN**0.5)

    def each(self) -> list[tuple[Tensor, Tensor]]:
        """Return the two weights of each expert on this rank."""
        return list(zip(local(self.up).split(HIDDEN), local(self.down).split(WIDTH), strict=True))


class _Gather(torch.autograd.Function):
    """The tokens of all ranks, from those of this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class _SumAndTakeOwn(torch.autograd.Function):
    """The tokens of this rank, summed over the experts of all ranks."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class MixtureOfExperts(nn.Module):
    """Each token is mapped by the experts that its router prefers.

    With `expert_parallel` this rank has a part of the experts, and sees the tokens of all ranks.
    """

    expert_parallel = False

    def __init__(self, experts: StackedExperts | GroupedExperts) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, WIDTH) to the same shape."""
        odds = self.router(x).softmax(-1)
        kept, chosen = odds.topk(CHOSEN, dim=-1)
        hits = one_hot(chosen, EXPERTS).sum(-2)
        # Of every sequence by itself, so that the loss does not depend on how sequences are shared among ranks.
        self.balance = EXPERTS / CHOSEN * (hits.float().mean(1) * odds.mean(1)).sum(-1).mean()
        weights = odds * hits / kept.sum(-1, keepdim=True)
        tokens, weights = x.flatten(0, 1), weights.flatten(0, 1)
        first = 0
        if self.expert_parallel:
            tokens, weights = _Gather.apply(tokens), _Gather.apply(weights)
            first = dist.get_rank() * EXPERTS // dist.get_world_size()
        y = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(self.experts.each(), start=first):
            mine = weights[:, number].nonzero()[:, 0]
            out = gelu(tokens[mine] @ up.T) @ down.T
            y = y.index_add(0, mine, weights[mine, number, None] * out)
        return (_SumAndTakeOwn.apply(y) if self.expert_parallel else y).view_as(x)


class Block(nn.Module):
    """Attention and experts, each added to its input."""

    def __init__(self, experts: StackedExperts | GroupedExperts) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.moe = Attention(), MixtureOfExperts(experts)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, WIDTH) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class Transformer(nn.Module):
    """Predicts the next symbol. Layers have stacked and grouped experts in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            Block(GroupedExperts() if i % 2 else StackedExperts()) for i in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map int64 (batch, length) to logits (batch, length, SYMBOLS)."""
        x = self.embedding(symbols) + self.positions[: symbols.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def prediction_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean cross-entropy of a symbol, from the third on [nats]."""
    logits = model(text[:, :-1])[:, 1:]
    return cross_entropy(logits.flatten(0, 1), text[:, 2:].flatten())


def training_loss(model: nn.Module, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy, and what is minimized: with the balance of all layers."""
    loss = prediction_loss(model, text)
    balances = [
        module.balance for module in model.modules() if isinstance(module, MixtureOfExperts)
    ]
    return loss, loss + BALANCE * torch.stack(balances).sum()
