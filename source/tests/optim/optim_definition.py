"""The definition of a step of HybridMuon in float64, one parameter and one block at a time.

It takes names of settings and a parameter's route and view from the package, and no arithmetic:
polar factors come from singular value decompositions, and a block's rows and columns are counted.
"""

from __future__ import annotations

import itertools
import math

import torch
from polar_oracle import oracle

# As doc/optimizer.md has them.
DEFAULTS = {
    "lr": 5e-4,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.001,
    "maximize": False,
    "schedule": "8+2",
    "large_schedule": None,
    "large_matrix_dim": 1024,
    "scaling": "match_rms",
    "lr_adjust_coeff": 0.18,
    "layout": "auto",
    "magma_muon": True,
    "normuon": False,
    "normuon_beta": 0.95,
    "cautious_decay": False,
    "rules": (),
    "master_weights": False,
    "adam_betas": (0.9, 0.95),
    "adam_eps": 1e-20,
    "adam_lr_ratio": 1.0,
    "adam_weight_decay": None,
}


def define(entry, p, settings):
    """Return the definition of a parameter's steps, by its entry of the routing."""
    settings = {**DEFAULTS, **settings}
    if entry.route == "muon":
        return MuonDefinition(p, entry.view, settings)
    return AdamDefinition(p, settings, decays=entry.route == "adamw")


def weight_dtype(p, settings):
    """Return the dtype that weights are rounded to after a step; master weights are float32."""
    is_narrow = p.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if settings["master_weights"] and is_narrow else p.dtype


class AdamDefinition:
    """Adam, with decoupled decay on route 'adamw'."""

    def __init__(self, p, settings, *, decays):
        self.p = p.detach().double().clone()
        self.dtype = weight_dtype(p, settings)
        self.settings = settings
        self.decays = decays
        self.first = torch.zeros_like(self.p)
        self.second = torch.zeros_like(self.p)
        self.steps = 0

    def step(self, g):
        """Advance the moments and `p`."""
        own = self.settings
        beta1, beta2 = own["adam_betas"]
        rate = float(own["lr"]) * own["adam_lr_ratio"]
        g = -g.double() if own["maximize"] else g.double()
        self.steps += 1
        self.first = beta1 * self.first + (1 - beta1) * g
        self.second = beta2 * self.second + (1 - beta2) * g**2
        first = self.first / (1 - beta1**self.steps)
        second = self.second / (1 - beta2**self.steps)
        decay = own["adam_weight_decay"]
        decay = own["weight_decay"] if decay is None else decay
        kept = 1 - rate * decay if self.decays else 1.0
        moved = kept * self.p - rate * first / (second.sqrt() + own["adam_eps"])
        self.p = moved.to(self.dtype).double()


def parts_of(view):
    """Yield matrix, rows and columns of every block of a view, as numbers along its dimensions."""
    rows, columns = torch.arange(view.rows), torch.arange(view.columns)
    for matrix, part in itertools.product(range(view.batch), range(max(1, len(view.sizes)))):
        if view.axis is None:
            yield matrix, rows, columns
        elif view.axis == "rows":
            yield matrix, lines_of_part(view, part), columns
        else:
            yield matrix, rows, lines_of_part(view, part)


def lines_of_part(view, part):
    """Count the rows or columns of a part, of which each group has an equal share."""
    shares = [size // view.groups for size in view.sizes]
    lines = []
    for group in range(view.groups):
        start = group * sum(shares) + sum(shares[:part])
        lines += range(start, start + shares[part])
    return torch.tensor(lines)


class MuonDefinition:
    """The Muon route with the rules of this package and of examples/update_rules."""

    def __init__(self, p, view, settings):
        self.p = p.detach().double().clone()
        self.dtype = weight_dtype(p, settings)
        self.moment_dtype = p.dtype
        self.view = view
        self.settings = settings
        self.m = torch.zeros_like(self.p)
        self.parts = list(parts_of(view))
        self.blocks = [BlockDefinition(settings) for _ in self.parts]

    def step(self, g):
        """Advance the momentum, the state of every block and `p`."""
        own = self.settings
        lr, beta = float(own["lr"]), own["momentum"]
        g = -g.double() if own["maximize"] else g.double()
        self.m = beta * self.m + (1 - beta) * g
        direction = beta * self.m + (1 - beta) * g if own["nesterov"] else self.m
        update = torch.zeros(self.view.shape, dtype=torch.float64)
        braked = torch.zeros_like(update)
        for block, part in zip(self.blocks, self.parts, strict=True):
            u = block.update(*(self.cut(x, part) for x in (direction, self.m, g)))
            matrix, rows, columns = part
            update[matrix, rows[:, None], columns] = u
            if "radial_brake" in own["rules"]:
                w = self.cut(self.p, part)
                braked[matrix, rows[:, None], columns] = (w - brake(w, w - lr * u)) / lr
        decays = (update.view_as(self.p) * self.p >= 0).double() if own["cautious_decay"] else 1.0
        if "radial_brake" in own["rules"]:
            update = braked
        moved = self.p * (1 - lr * own["weight_decay"] * decays) - lr * update.view_as(self.p)
        self.p = moved.to(self.dtype).double()
        self.m = self.m.to(self.moment_dtype).double()

    def cut(self, x, part):
        """Return a block of a tensor in the parameter's shape."""
        matrix, rows, columns = part
        return x.reshape(self.view.shape)[matrix][rows][:, columns]


class BlockDefinition:
    """The update of one block, and what rules remember of it."""

    def __init__(self, settings):
        self.settings = settings
        self.score = 0.5
        self.moment = 0.0
        self.soap = None

    def update(self, direction, m, g):
        """Return the scaled and damped polar factor of a direction."""
        own = self.settings
        if "soap_muon" in own["rules"]:
            self.soap = self.soap or SoapDefinition(*direction.shape)
            direction = self.soap.divide(direction, g)
        o = oracle(direction[None], self.schedule(min(direction.shape)))[0]
        if own["normuon"]:
            o = self.normalize(o.T).T if own["layout"] == "in_out" else self.normalize(o)
        if own["magma_muon"]:
            self.score = 0.9 * self.score + 0.1 * magma_ratio(m, g)
            o = (0.1 + 0.9 * self.score) * o
        return self.scale(*o.shape) * o

    def schedule(self, smaller_side):
        """Return the schedule of coefficients for this size."""
        own = self.settings
        is_large = own["large_schedule"] is not None and smaller_side >= own["large_matrix_dim"]
        return own["large_schedule"] if is_large else own["schedule"]

    def normalize(self, o):
        """Divide every row by the root of its second moment, and restore the norm."""
        beta = self.settings["normuon_beta"]
        self.moment = beta * self.moment + (1 - beta) * o.square().mean(dim=1)
        changed = o / (self.moment.sqrt() + 1e-10).unsqueeze(1)
        return changed * (o.norm() / changed.norm())

    def scale(self, rows, columns):
        """Return the factor that makes steps of all shapes alike."""
        own = self.settings
        if own["scaling"] == "none":
            return 1.0
        if own["scaling"] == "match_rms":
            return own["lr_adjust_coeff"] * math.sqrt(max(rows, columns))
        out_over_in = columns / rows if own["layout"] == "in_out" else rows / columns
        if own["scaling"] == "rectangular":
            out_over_in = max(1.0, out_over_in)
        return math.sqrt(out_over_in)


def magma_ratio(m, g):
    """Return the alignment of momentum and gradient between 0 and 1."""
    cosine = (m * g).sum().item() / (m.norm().item() * g.norm().item())

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    return (sigmoid(cosine / 2) - sigmoid(-0.5)) / (sigmoid(0.5) - sigmoid(-0.5))


def brake(before, after):
    """Return a block after a step, whose norm may grow by half as much."""
    old, new = before.norm(), after.norm()
    wanted = old + 0.5 * (new - old) if new > old else new
    return after * (wanted / new if old > 0 else 1.0)


class SoapDefinition:
    """SOAP's part of a block, its bases turned element by element and made orthogonal by an SVD."""

    def __init__(self, rows, columns):
        self.covariances = [torch.zeros(n, n, dtype=torch.float64) for n in (rows, columns)]
        self.bases = [torch.eye(n, dtype=torch.float64) for n in (rows, columns)]
        self.v = torch.zeros(rows, columns, dtype=torch.float64)

    def divide(self, u, g):
        """Divide a direction by the root of its second moment in the bases; turn these."""
        p, q = self.bases
        rotated = torch.einsum("ia,ij,jb->ab", p, u, q)
        self.v = 0.9 * self.v + 0.1 * rotated**2
        root = self.v.sqrt()
        divided = torch.einsum("ia,ab,jb->ij", p, rotated / (root + 1e-5 * root.max()), q)
        for side, x in enumerate((g, g.T)):
            self.covariances[side] = 0.9 * self.covariances[side] + 0.1 * x @ x.T
            self.bases[side] = self.turn(self.covariances[side], self.bases[side])
        return divided

    @staticmethod
    def turn(covariance, basis):
        """Take a step towards the eigenvectors, largest first."""
        a = (basis.T @ covariance @ basis).tolist()  # Python's numbers are quicker here
        largest = max(a[i][i] for i in range(len(a)))
        s = [[0.0] * len(a) for _ in a]
        for i, j in itertools.product(range(len(a)), repeat=2):
            if a[i][i] < a[j][j]:
                s[i][j] = a[i][j] / (a[j][j] + 1e-5 * largest)
                s[j][i] = -s[i][j]
        s = torch.tensor(s, dtype=torch.float64)
        norm = min(s.abs().sum(dim=1).max().item(), s.norm().item() / 2**0.5)
        left, _, right = torch.linalg.svd(basis + basis @ s / max(1.0, norm))
        return left @ right
