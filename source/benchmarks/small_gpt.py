"""Train a small GPT on text with the README's optimizer, AdamW and torch.optim.Muon: minutes on one CPU core.

    OMP_NUM_THREADS=1 python source/benchmarks/small_gpt.py > doc/benchmarks/raw/small_gpt_cpu_DATE.log

Text is that of Python's own help topics, read as bytes, so that nothing is downloaded; losses are compared within one
version of Python. Every optimizer starts from the same weights, sees the same batches, and has the same schedule: 5 %
warm-up, then linear decay to zero. `optimizer = ...` is the line of the README, executed. AdamW and torch's Muon take
several learning rates, ours what it has by default.
"""

from __future__ import annotations

import argparse
import platform
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepmd_muon
from deepmd_muon.optim import HybridMuon, muon_for

README = Path(__file__).parents[2] / "README.md"
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 64, 4, 3, 64, 16
BETAS = (0.9, 0.95)


class Block(nn.Module):
    """Attention and MLP with normalization in front, as in GPT-2."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.make_mlp(width)

    def make_mlp(self, width: int) -> None:
        """Make the layers of `mlp`."""
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mlp(self, x: Tensor) -> Tensor:
        """Return what the block adds after the attention, (batch, length, width)."""
        return self.out(F.gelu(self.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations (batch, length, width)."""
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT with nanoGPT's names, whose output layer shares the embedding if `tied`."""

    def __init__(
        self,
        width: int = WIDTH,
        blocks: Sequence[nn.Module] | None = None,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(blocks or [Block() for _ in range(LAYERS)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def readme_snippet() -> tuple[str, str]:
    """Return the imports, and the line that makes the optimizer, of the README's snippet on any torch model."""
    section = README.read_text(encoding="utf-8").split("## Use the optimizer with any torch model")[
        1
    ]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    lines = program.splitlines()
    (line,) = [line for line in lines if line.startswith("optimizer = ")]
    return "\n".join(line for line in lines if line.startswith(("import ", "from "))), line


def from_readme(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Execute the README's line on a model."""
    imports, line = readme_snippet()
    names = {"model": model}
    exec(f"{imports}\n{line}", names)
    return [names["optimizer"]]


def adamw(lr: float) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Return AdamW on every parameter."""
    return lambda model: [torch.optim.AdamW(model.parameters(), lr, betas=BETAS, weight_decay=0.1)]


def torch_muon(lr: float, adamw_lr: float) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Return torch.optim.Muon on the blocks' matrices and AdamW on the rest."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.h.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
        return [
            torch.optim.Muon(matrices, lr, weight_decay=0.1),
            torch.optim.AdamW(rest, adamw_lr, betas=BETAS, weight_decay=0.1),
        ]

    return make


def cases() -> dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]]:
    """Return every optimizer by the line that makes it."""
    found = {readme_snippet()[1].removeprefix("optimizer = "): from_readme}
    found["HybridMuon(model.named_parameters(), lr=1e-3)"] = lambda model: [
        HybridMuon(model.named_parameters(), lr=1e-3)
    ]
    split = "*.qkv.weight: rows 3"
    found[f'muon_for(model, splits=["{split}"])'] = lambda model: [muon_for(model, splits=(split,))]
    found |= {f"torch.optim.AdamW, lr={lr:g}": adamw(lr) for lr in (1e-3, 3e-3, 6e-3)}
    if hasattr(torch.optim, "Muon"):
        found |= {
            f"torch.optim.Muon, lr={lr:g}, and AdamW, lr={other:g}": torch_muon(lr, other)
            for lr, other in ((0.02, 3e-3), (0.05, 3e-3))
        }
    return found


def text() -> Tensor:
    """Return the bytes of Python's help topics."""
    from pydoc_data.topics import topics

    return torch.tensor(
        list("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8
    )


def train(
    make: Callable[[nn.Module], list[torch.optim.Optimizer]], steps: int, seed: int = 0
) -> tuple[float, float]:
    """Return the losses of the last 20 batches and of held-out text [nats a byte]."""
    data = text()
    cut = len(data) * 9 // 10
    torch.manual_seed(seed)
    model = GPT()
    optimizers = make(model)

    def rate(step: int) -> float:
        return min((step + 1) / (0.05 * steps), 1.0) * (1.0 - step / steps)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = batch_loss(model, data[:cut], draw)
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = [batch_loss(model, data[cut:], draw).item() for _ in range(20)]
    return sum(losses[-20:]) / len(losses[-20:]), sum(held_out) / len(held_out)


def batch_loss(model: nn.Module, data: Tensor, draw: torch.Generator) -> Tensor:
    """Return the loss [nats a byte] of a batch of random pieces."""
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1), generator=draw)
    pieces = data[starts + torch.arange(LENGTH + 1)].long()
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def begin_table(description: str | None, *columns: str) -> argparse.Namespace:
    """Read steps and seeds from the command line, print machine, versions and the head of a table, and return them."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, one core, Python "
        f"{platform.python_version()}, torch {torch.__version__}, deepmd_muon {deepmd_muon.__version__}; "
        f"{arguments.steps} steps, {arguments.seeds} seeds\n\n"
        f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    )
    return arguments


def main() -> None:
    """Print a table of all optimizers."""
    arguments = begin_table(__doc__, "optimizer", "loss, last 20 batches", "held-out text")
    for name, make in cases().items():
        runs = [train(make, arguments.steps, seed) for seed in range(arguments.seeds)]
        columns = [torch.tensor(column) for column in zip(*runs, strict=True)]
        shown = [f"{x.mean():.3f}" + (f" ± {x.std():.3f}" if len(x) > 1 else "") for x in columns]
        print(f"| `{name}` | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
