"""`se_e2_a` for TorchScript: values and the explicit pullback of `module.SeE2A`, without its graph."""

from typing import Final, NamedTuple

import torch

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.se_e2_a.embedding import CPU_BLOCK_ROWS
from deepmd_muon.model.descriptor.se_e2_a.module import SeE2A
from deepmd_muon.model.scripted.dense import Act, Dense, act_of, dense_layers, embed_rows
from deepmd_muon.model.scripted.near import Near, Request
from deepmd_muon.model.scripted.rows import Rows, environment_rows, rows_pullback, sums_pullback


class Block(NamedTuple):
    """Some centres of one type and their neighbours of another: where they stand, R, and G(s), G′(s).

    Attributes
    ----------
    atoms
        Which centres `(natoms,)`.
    first, width
        Columns of the neighbours.
    rows
        `(natoms, width, 4)`.
    features
        G and G′ `(2, natoms, width, M)`.
    """

    atoms: torch.Tensor
    first: int
    width: int
    rows: torch.Tensor
    features: torch.Tensor


class Tape(NamedTuple):
    """Values that the pullback needs."""

    environment: Rows
    scale: torch.Tensor
    used: torch.Tensor
    blocks: list[Block]
    a: torch.Tensor


def embed(act: Act, layers: list[Dense], s: torch.Tensor) -> torch.Tensor:
    """Return G(s) and G′(s) `(2, rows, M)` of s `(rows,)`."""
    return embed_rows(act, layers, s.unsqueeze(1))


class ScriptedSeE2A(torch.nn.Module):
    """Descriptor of a frozen file; see `deepmd_muon.model.scripted.interface`."""

    #: The settings that this form has.
    covers = Coverage(
        frozenset(
            {
                *("sel", "rcut", "rcut_smth", "env_protection", "exclude_types"),
                *("neuron", "axis_neuron", "activation_function", "resnet_dt", "type_one_side"),
                *("precision", "trainable", "seed", "set_davg_zero"),
            }
        )
    )
    message_passing: Final[bool] = False
    block_rows: Final[int] = CPU_BLOCK_ROWS
    request: Request
    act: Act
    nets: list[list[Dense]]
    scale: torch.Tensor
    empty_row: torch.Tensor
    empty_features: torch.Tensor
    seen: torch.Tensor

    def __init__(self, module: SeE2A) -> None:
        super().__init__()
        own, neighbors = module.settings, module.settings.neighbors()
        ntypes = len(neighbors.sel)
        self.request = Request(neighbors.rcut, list(neighbors.sel), True, False, ntypes)
        self.rcut, self.rcut_smth, self.protection = own.rcut, own.rcut_smth, own.env_protection
        self.act = act_of(own.activation_function)
        self.axis, self.width, self.one_side = module.axis, module.width, module.one_side
        self.nets = [dense_layers(net) for net in module.sea.filter_layers.networks]  # type: ignore[arg-type]
        self.slots = sum(neighbors.sel)
        mean, stddev = module.sea.mean.detach()[:, 0], module.sea.stddev.detach()[:, 0]
        self.register_buffer("scale", 1.0 / stddev)
        self.register_buffer("empty_row", -mean / stddev)
        self.register_buffer("empty_features", self._features_of_empty_rows())
        self.excludes = bool(module.excluded)
        seen = torch.ones(ntypes, ntypes, dtype=torch.bool)
        for centre, other in module.excluded:
            seen[centre, other] = False
        self.register_buffer("seen", seen)

    @torch.no_grad()
    def _features_of_empty_rows(self) -> torch.Tensor:
        """Return G(s) of an empty slot `(ntypes, ntypes, M)` by the types of centre and neighbour."""
        ntypes = self.request.ntypes
        rows = [
            [
                embed(self.act, self.nets[self._net(centre, other)], self.empty_row[centre, :1])[
                    0, 0
                ]
                for other in range(ntypes)
            ]
            for centre in range(ntypes)
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def _net(self, centre: int, other: int) -> int:
        """Return which network the neighbours of type `other` of centres of type `centre` have."""
        return other if self.one_side else other * self.request.ntypes + centre

    @torch.jit.export
    def describe(self, near: Near) -> tuple[torch.Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        empty = near.neighbor < 0
        environment = environment_rows(
            near.vectors, empty, self.rcut, self.rcut_smth, self.protection
        )
        scale, empty_row = self.scale[near.kind], self.empty_row[near.kind]
        rows = torch.addcmul(
            empty_row.unsqueeze(1), environment.rows.to(scale.dtype), scale.unsqueeze(1)
        )
        used = torch.ones_like(empty)
        if self.excludes:
            other = near.types[near.neighbor.clamp(min=0)].clamp(min=0)
            used = self.seen[near.kind.unsqueeze(1), other] | empty
            rows = rows * used.unsqueeze(-1)
        a = torch.zeros([near.kind.shape[0], 4, self.width], dtype=rows.dtype, device=rows.device)
        blocks: list[Block] = []
        start = 0
        for centre in range(len(near.counts)):
            first = 0
            for kind in range(len(near.sections)):
                here = slice(start, start + near.counts[centre])
                filled = (~empty[here, first : first + near.sections[kind]]).sum(1)
                self._gather(centre, kind, start, first, filled, rows, a, blocks)
                first += near.sections[kind]
            start += near.counts[centre]
        a = a / self.slots
        d = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis])
        return d.flatten(1), Tape(environment, scale, used, blocks, a)

    def _gather(
        self,
        centre: int,
        other: int,
        start: int,
        column: int,
        filled: torch.Tensor,
        rows: torch.Tensor,
        a: torch.Tensor,
        blocks: list[Block],
    ) -> None:
        """Add Σ R ⊗ G over the neighbours of one type to the rows of `a` of the centres of another."""
        layers = self.nets[self._net(centre, other)]
        sel = self.request.sel[other]
        filled, order = filled.sort(descending=True, stable=True)
        widths: list[int] = filled.cpu().tolist()
        first = 0
        while first < len(widths):
            width = widths[first]
            last = (
                len(widths)
                if rows.is_cuda
                else min(len(widths), first + max(1, self.block_rows // max(1, width)))
            )
            atoms = order[first:last] + start
            r = rows[atoms, column : column + width]
            features = embed(self.act, layers, r[..., 0].reshape(-1)).view(
                2, last - first, width, self.width
            )
            sums = torch.bmm(r.transpose(1, 2), features[0])
            if sel > width:
                missing = self.empty_row[centre] * float(sel - width)
                sums += missing.unsqueeze(1) * self.empty_features[centre, other].unsqueeze(0)
            a.index_add_(0, atoms, sums)
            blocks.append(Block(atoms, column, width, r, features))
            first = last

    @torch.jit.export
    def pullback(self, adjoint: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        a = tape.a
        a_bar = sums_pullback(adjoint, a, self.axis, self.slots).transpose(1, 2)
        shape = tape.environment.rows.shape
        out = torch.zeros(shape, dtype=a.dtype, device=a.device)
        for block in tape.blocks:
            here = a_bar[block.atoms]
            slope = torch.bmm(block.features[0], here)
            slope[..., 0] += torch.bmm(block.features[1], here).mul_(block.rows).sum(-1)
            out[block.atoms, block.first : block.first + block.width] = slope
        out = out * tape.scale.unsqueeze(1) * tape.used.unsqueeze(-1)
        return rows_pullback(out.to(tape.environment.rows.dtype), tape.environment)
