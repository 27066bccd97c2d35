"""Train a small convolutional net and a small ViT on generated images with several optimizers.

Images (3, 16, 16) of ten classes: each class has a smooth random pattern, drawn once; an image is the pattern of its
class, rolled by a random shift, plus a weaker pattern of another class and noise. Nothing is downloaded. Run
``python source/benchmarks/small_vision.py --seeds 3`` on one core. Rates fall linearly to 0 after a warm-up of 5 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from small_gpt import BETAS, adamw, begin_table
from torch import Tensor, nn

from deepmd_muon.optim import MuonConfig

CLASSES, SIZE, BATCH, WIDTH, HEADS, PATCH = 10, 16, 64, 48, 4, 4
Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


class ConvNet(nn.Module):
    """Four 3x3 convolutions with batch normalization, the third grouped, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 32, 64)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False, groups=4 if i == 2 else 1)
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = torch.relu(norm(conv(x)))
            x = F.max_pool2d(x, 2) if i < 3 else x
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    """Encoder layers over patches of 4x4, with timm's names."""

    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, PATCH, PATCH)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (SIZE // PATCH) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x)[:, 0]))


def patterns() -> Tensor:
    """Return the classes' patterns, (classes, 3, size, size), of unit variance."""
    draw = torch.Generator().manual_seed(0)
    coarse = torch.randn(CLASSES, 3, 5, 5, generator=draw)
    smooth = F.interpolate(coarse, size=SIZE, mode="bicubic")
    return smooth / smooth.std(dim=(1, 2, 3), keepdim=True)


def images(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, size, size) and their classes."""
    table = patterns()
    label, other = (torch.randint(CLASSES, (count,), generator=draw) for _ in range(2))
    shifts = torch.randint(SIZE, (count, 2), generator=draw).tolist()
    whole = torch.stack(
        [
            torch.roll(table[k], (a, b), (1, 2))
            for k, (a, b) in zip(label.tolist(), shifts, strict=True)
        ]
    )
    noise = torch.randn(whole.shape, generator=draw)
    return whole + 0.5 * table[other] + noise, label


def muon(lr: float | None = None, **settings: object) -> Make:
    """Return MuonConfig with some settings on every parameter."""
    return lambda model: [MuonConfig(**settings).build(model, lr)]


def torch_muon(lr: float, adamw_lr: float) -> Make:
    """Return torch.optim.Muon on the matrices of hidden layers and AdamW on the rest, kernels included."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and not name.startswith("head")]
        rest = [p for _, p in named if not any(p is q for q in matrices)]
        found = [torch.optim.AdamW(rest, adamw_lr, betas=BETAS, weight_decay=0.1)]
        return [*found, torch.optim.Muon(matrices, lr, weight_decay=0.1)] if matrices else found

    return make


def cases() -> dict[str, Make]:
    """Return every optimizer by the line that makes it."""
    found = {"MuonConfig().build(model)": muon()}
    found |= {f"MuonConfig().build(model, lr={lr:g})": muon(lr) for lr in (0.005, 0.05)}
    found["MuonConfig(conv_patterns=[]).build(model)"] = muon(conv_patterns=())
    for split in (
        "*.in_proj_weight: rows 1",
        f"*.in_proj_weight: rows {WIDTH // HEADS}*{3 * HEADS}",
    ):
        found[f'MuonConfig(splits=["{split}"]).build(model)'] = muon(splits=(split,))
    found |= {f"torch.optim.AdamW, lr={lr:g}": adamw(lr) for lr in (1e-3, 3e-3, 1e-2)}
    if hasattr(torch.optim, "Muon"):
        found["torch.optim.Muon, lr=0.02, and AdamW, lr=0.003"] = torch_muon(0.02, 3e-3)
    return found


def train(kind: type[nn.Module], make: Make, steps: int, seed: int) -> tuple[float, float]:
    """Return loss [nats] and share of right answers on 1,000 new images."""
    torch.manual_seed(seed)
    model = kind()
    optimizers = make(model)

    def rate(step: int) -> float:
        return min((step + 1) / (0.05 * steps), 1.0) * (1.0 - step / steps)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, label = images(BATCH, draw)
        F.cross_entropy(model(x), label).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    model.eval()
    with torch.no_grad():
        x, label = images(1000, torch.Generator().manual_seed(2))
        logits = model(x)
        right = (logits.argmax(1) == label).double().mean().item()
        return F.cross_entropy(logits, label).item(), right


def main() -> None:
    """Print a table of all optimizers."""
    arguments = begin_table(
        __doc__, "optimizer", "convolutions: loss", "right", "ViT: loss", "right"
    )
    for name, make in cases().items():
        columns = []
        for kind in (ConvNet, ViT):
            runs = [train(kind, make, arguments.steps, seed) for seed in range(arguments.seeds)]
            for values, scale, form in zip(
                zip(*runs, strict=True), (1, 100), (".3f", ".1f"), strict=True
            ):
                x = scale * torch.tensor(values)
                columns.append(
                    f"{x.mean():{form}}" + (f" ± {x.std():{form}}" if len(x) > 1 else "")
                )
        print(f"| `{name}` | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
