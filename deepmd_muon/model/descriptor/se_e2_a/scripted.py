"""`se_e2_a` for TorchScript: values of `module.SeE2A` and an explicit pullback."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.se_e2_a.embedding import CPU_BLOCK_ROWS
from deepmd_muon.model.descriptor.se_e2_a.module import SeE2A
from deepmd_muon.model.scripted.dense import Act, Dense, act_of, dense_layers, embed_rows
from deepmd_muon.model.scripted.near import Near, Request
from deepmd_muon.model.scripted.rows import Rows, environment_rows, rows_pullback, sums_pullback


class Section(NamedTuple):
    """The centres of one type and the columns of their neighbours of another.

    Attributes
    ----------
    centre_type, neighbor_type
        The types.
    first_atom, natoms
        The centres.
    first_column, ncolumns
        The columns.
    """

    centre_type: int
    neighbor_type: int
    first_atom: int
    natoms: int
    first_column: int
    ncolumns: int


class Block(NamedTuple):
    """Some centres of a section, with R, G(s) and G′(s) of their edges.

    Attributes
    ----------
    atoms
        Rows of the centres `(natoms,)`.
    first_column, width
        Columns of the neighbours.
    rows
        `(natoms, width, 4)`.
    features
        G and G′ `(2, natoms, width, M)`.
    """

    atoms: Tensor
    first_column: int
    width: int
    rows: Tensor
    features: Tensor


class Tape(NamedTuple):
    """Values that the pullback needs.

    Attributes
    ----------
    environment
        The rows before standardisation.
    scale
        dR/drow `(ncentre, 4)`.
    used
        Which slots count `(ncentre, nnei)`.
    blocks
        All edges.
    a
        A `(ncentre, 4, M)`.
    """

    environment: Rows
    scale: Tensor
    used: Tensor
    blocks: list[Block]
    a: Tensor


def embed(act: Act, layers: list[Dense], s: Tensor) -> Tensor:
    """Return G(s) and G′(s) `(2, rows, M)` of s `(rows,)`."""
    return embed_rows(act, layers, s.unsqueeze(1))


class ScriptedSeE2A(torch.nn.Module):
    """Descriptor of a frozen file; see `deepmd_muon.model.scripted.interface`."""

    #: The settings that this form implements.
    covers = Coverage(
        frozenset(
            {
                "sel",
                "rcut",
                "rcut_smth",
                "env_protection",
                "exclude_types",
                "neuron",
                "axis_neuron",
                "activation_function",
                "resnet_dt",
                "type_one_side",
                "precision",
                "trainable",
                "seed",
                "set_davg_zero",
            }
        )
    )
    message_passing: Final[bool] = False
    block_rows: Final[int] = CPU_BLOCK_ROWS
    request: Request
    act: Act
    nets: list[list[Dense]]
    scale: Tensor
    empty_row: Tensor
    empty_features: Tensor
    seen: Tensor

    def __init__(self, module: SeE2A) -> None:
        super().__init__()
        settings = module.settings
        ntypes = len(module.sel)
        self.request = Request(
            rcut=settings.rcut, sel=list(module.sel), by_type=True, sort=False, ntypes=ntypes
        )
        self.rcut = settings.rcut
        self.rcut_smth = settings.rcut_smth
        self.protection = settings.env_protection
        self.act = act_of(settings.activation_function)
        self.axis = module.axis
        self.width = module.width
        self.one_side = module.one_side
        self.slots = module.slots
        nets = module.sea.filter_layers
        self.nets = [dense_layers(nets[number]) for number in range(len(nets.networks))]
        mean = module.sea.mean.detach()[:, 0]
        stddev = module.sea.stddev.detach()[:, 0]
        self.register_buffer("scale", 1.0 / stddev)
        self.register_buffer("empty_row", -mean / stddev)
        self.register_buffer("empty_features", self._features_of_empty_rows())
        self.excludes = bool(module.excluded)
        seen = torch.ones(ntypes, ntypes, dtype=torch.bool)
        for pair in module.excluded:
            seen[pair] = False
        self.register_buffer("seen", seen)

    @torch.no_grad()
    def _features_of_empty_rows(self) -> Tensor:
        """Return G(s) of an empty slot, by types of centre and neighbour `(ntypes, ntypes, M)`."""
        ntypes = self.request.ntypes
        by_centre = []
        for centre in range(ntypes):
            s = self.empty_row[centre, :1]
            nets = [self.nets[self.net_number(centre, neighbor)] for neighbor in range(ntypes)]
            by_centre.append(torch.stack([embed(self.act, layers, s)[0, 0] for layers in nets]))
        return torch.stack(by_centre)

    def net_number(self, centre: int, neighbor: int) -> int:
        """Return the number of the net for a type of centres and a type of neighbours."""
        return neighbor if self.one_side else neighbor * self.request.ntypes + centre

    @torch.jit.export
    def describe(self, near: Near) -> tuple[Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        empty = near.neighbor < 0
        environment = environment_rows(
            near.vectors, empty, self.rcut, self.rcut_smth, self.protection
        )
        scale = self.scale[near.kind]
        empty_row = self.empty_row[near.kind]
        rows = torch.addcmul(
            empty_row.unsqueeze(1), environment.rows.to(scale.dtype), scale.unsqueeze(1)
        )
        used = torch.ones_like(empty)
        if self.excludes:
            neighbor_types = near.types[near.neighbor.clamp(min=0)].clamp(min=0)
            used = self.seen[near.kind.unsqueeze(1), neighbor_types] | empty
            rows = rows * used.unsqueeze(-1)
        a = torch.zeros([near.kind.shape[0], 4, self.width], dtype=rows.dtype, device=rows.device)
        blocks: list[Block] = []
        first_atom = 0
        for centre in range(len(near.counts)):
            first_column = 0
            for kind in range(len(near.sections)):
                section = Section(
                    centre_type=centre,
                    neighbor_type=kind,
                    first_atom=first_atom,
                    natoms=near.counts[centre],
                    first_column=first_column,
                    ncolumns=near.sections[kind],
                )
                self._add_sums(section, empty, rows, a, blocks)
                first_column += near.sections[kind]
            first_atom += near.counts[centre]
        a = a / self.slots
        d = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis])
        return d.flatten(1), Tape(environment, scale, used, blocks, a)

    def _add_sums(
        self,
        section: Section,
        empty: Tensor,
        rows: Tensor,
        a: Tensor,
        blocks: list[Block],
    ) -> None:
        """Add Σ R ⊗ G of a section to the rows of `a`, and its blocks to the list.

        As in `embedding`, blocks hold atoms with similar numbers of neighbours, and missing slots
        enter at once.
        """
        layers = self.nets[self.net_number(section.centre_type, section.neighbor_type)]
        sel = self.request.sel[section.neighbor_type]
        atoms_slice = slice(section.first_atom, section.first_atom + section.natoms)
        columns = slice(section.first_column, section.first_column + section.ncolumns)
        filled, order = (~empty[atoms_slice, columns]).sum(1).sort(descending=True, stable=True)
        widths: list[int] = filled.cpu().tolist()
        start = 0
        while start < len(widths):
            width = widths[start]
            stop = len(widths)
            if not rows.is_cuda:
                stop = min(stop, start + max(1, self.block_rows // max(1, width)))
            atoms = order[start:stop] + section.first_atom
            r = rows[atoms, section.first_column : section.first_column + width]
            features = embed(self.act, layers, r[..., 0].reshape(-1))
            features = features.view(2, stop - start, width, self.width)
            sums = torch.bmm(r.transpose(1, 2), features[0])
            if sel > width:
                missing_row = self.empty_row[section.centre_type] * float(sel - width)
                empty_features = self.empty_features[section.centre_type, section.neighbor_type]
                sums += missing_row.unsqueeze(1) * empty_features.unsqueeze(0)
            a.index_add_(0, atoms, sums)
            blocks.append(Block(atoms, section.first_column, width, r, features))
            start = stop

    @torch.jit.export
    def pullback(self, adjoint: Tensor, tape: Tape) -> Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        a_bar = sums_pullback(adjoint, tape.a, self.axis, self.slots).transpose(1, 2)
        environment = tape.environment
        out = torch.zeros(environment.rows.shape, dtype=tape.a.dtype, device=tape.a.device)
        for block in tape.blocks:
            block_a_bar = a_bar[block.atoms]
            rows_bar = torch.bmm(block.features[0], block_a_bar)
            through_s = torch.bmm(block.features[1], block_a_bar).mul_(block.rows)
            rows_bar[..., 0] += through_s.sum(-1)
            columns = slice(block.first_column, block.first_column + block.width)
            out[block.atoms, columns] = rows_bar
        out = out * tape.scale.unsqueeze(1) * tape.used.unsqueeze(-1)
        return rows_pullback(
            out.to(environment.rows.dtype),
            environment.edges,
            environment.radial,
            environment.isotropic,
            environment.bend,
        )
