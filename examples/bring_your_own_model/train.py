"""HybridMuon on a model that has nothing to do with chemistry: a small transformer that learns a Markov chain.

    python train.py                                   # HybridMuon, 300 steps, about 10 s on one core
    python train.py --optimizer adamw --lr 3e-3
    python train.py --compare --seeds 3 --lr 3e-3 1e-2 3e-2 1e-1  # the table of README.md

The text is drawn from a random chain in which the next symbol depends on the two before it. Its entropy rate is
known, so the loss has a floor: what is printed is the excess over it, in nats per symbol.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from deepmd_muon.optim import HybridMuon

SYMBOLS, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 16, 32, 64, 4, 2, 32


class Block(nn.Module):
    """Attention and feed-forward, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.adam_positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map int64 (batch, length) to logits (batch, length, SYMBOLS)."""
        return self.head(
            self.norm(
                self.blocks(self.embedding(symbols) + self.adam_positions[: symbols.shape[1]])
            )
        )


class Chain:
    """A random chain of order two, and text drawn from it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = 2.5 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=generator)
        self.table = logits.softmax(-1)
        sample = self.draw(400, torch.Generator().manual_seed(1))
        p = self.table[sample[:, :-2], sample[:, 1:-1]]
        self.entropy = -(p * p.log()).sum(-1).mean().item()

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return int64 (count, LENGTH + 1)."""
        text = torch.randint(SYMBOLS, (count, 8 + LENGTH + 1), generator=generator)
        for i in range(2, text.shape[1]):
            p = self.table[text[:, i - 2], text[:, i - 1]]
            text[:, i] = torch.multinomial(p, 1, generator=generator)[:, 0]
        return text[:, 8:]


def excess(model: Transformer, text: Tensor, entropy: float) -> Tensor:
    """Return the loss above the chain's entropy, from the third symbol on [nats]."""
    logits = model(text[:, :-1])[:, 1:]
    return cross_entropy(logits.flatten(0, 1), text[:, 2:].flatten()) - entropy


def optimizers(name: str, model: Transformer, lr: float) -> list[torch.optim.Optimizer]:
    """Make the contestants; each decays weights by 0.01."""
    if name == "hybrid_muon":
        return [
            HybridMuon(
                model.named_parameters(),
                lr,
                weight_decay=0.01,
                magma_muon=False,
                layout="out_in",
                adamw_patterns=["embedding.weight", "head.weight"],
                splits=["*.qkv.weight: rows 3"],
            )
        ]
    if name == "torch_muon":
        inside = {p for p in model.blocks.parameters() if p.ndim == 2}
        rest = [p for p in model.parameters() if p not in inside]
        muon = torch.optim.Muon(inside, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, lr, (0.9, 0.95), weight_decay=0.01)]
    return [torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.01)]


def train(
    name: str, lr: float, steps: int, seed: int, chain: Chain, *, report: bool = False
) -> tuple[float, float]:
    """Train one model; return its excess loss on fresh text [nats] and the time a step took [ms]."""
    torch.manual_seed(seed)
    model = Transformer()
    contestants = optimizers(name, model, lr)
    if report and isinstance(contestants[0], HybridMuon):
        print(contestants[0].routing, "\n")
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1.0 - t / steps) for o in contestants
    ]
    generator = torch.Generator().manual_seed(100 + seed)
    spent = 0.0
    for step in range(steps):
        text = chain.draw(BATCH, generator)
        start = time.perf_counter()
        loss = excess(model, text, chain.entropy)
        for optimizer in contestants:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(contestants, schedules, strict=True):
            optimizer.step()
            schedule.step()
        spent += time.perf_counter() - start
        if report and (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1:5d}  excess loss {loss.item():.4f}")
    with torch.no_grad():
        final = excess(
            model, chain.draw(400, torch.Generator().manual_seed(2)), chain.entropy
        ).item()
    return final, 1000.0 * spent / steps


def compare(rates: Sequence[float], steps: int, seeds: int, chain: Chain) -> None:
    """Print excess loss by optimizer and learning rate, mean and spread over seeds."""
    print("| optimizer | " + " | ".join(f"lr {lr:g}" for lr in rates) + " | ms a step |")
    print("|---" * (len(rates) + 2) + "|")
    for name in ("adamw", "torch_muon", "hybrid_muon"):
        cells, times = [], []
        for lr in rates:
            runs = [train(name, lr, steps, seed, chain) for seed in range(seeds)]
            losses = [loss for loss, _ in runs]
            spread = f" ± {statistics.stdev(losses):.3f}" if seeds > 1 else ""
            cells.append(f"{statistics.fmean(losses):.3f}{spread}")
            times += [ms for _, ms in runs]
        print(f"| {name} | {' | '.join(cells)} | {statistics.median(times):.1f} |", flush=True)


def main() -> None:
    """Train or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizer", choices=("hybrid_muon", "torch_muon", "adamw"), default="hybrid_muon"
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    chain = Chain()
    print(f"entropy of the chain: {chain.entropy:.3f} nats per symbol\n")
    if args.compare:
        compare(args.lr, args.steps, args.seeds, chain)
        return
    for lr, seed in itertools.product(args.lr, range(args.seeds)):
        final, ms = train(args.optimizer, lr, args.steps, seed, chain, report=True)
        print(
            f"{args.optimizer}, lr {lr:g}, seed {seed}: excess loss {final:.4f} on fresh text, {ms:.1f} ms a step"
        )


if __name__ == "__main__":
    main()
