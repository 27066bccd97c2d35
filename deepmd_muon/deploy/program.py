"""The program in a frozen file, with the methods that LAMMPS's plugin and deepmd-kit's `DeepPot` call.

The plugin asks for `get_rcut`, `get_ntypes`, `get_type_map`, `get_dim_fparam`, `get_dim_aparam`, `is_aparam_nall` and
`has_message_passing`, and runs `forward_lower` each step. `DeepPot` runs `forward_common_lower` where it finds
neighbours itself, else `forward`. Our predictor runs `forward_lower`.
"""

import copy
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from deepmd_muon.coverage import Coverage
from deepmd_muon.deploy.images import all_pairs, with_images
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE
from deepmd_muon.model.energy_model import EnergyModel
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.registry import DESCRIPTORS, FITTING_NETS
from deepmd_muon.model.scripted.near import Near, neighbors_within, sort_by_type
from deepmd_muon.model.short_range import edge_slope

# Settings of the model that a program has; the scripted forms of its parts list theirs in `covers`.
COVERAGE = Coverage(
    frozenset(
        {
            *("type_map", "descriptor", "fitting_net", "pair_exclude_types", "atom_exclude_types"),
            *("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax"),
            # The statistics that follow from these are among the weights.
            *("data_stat_nbatch", "data_stat_protect"),
        }
    )
)


def check_coverage(what: str, covers: Coverage | None, settings: Any) -> None:
    """Raise ModelError naming the settings that a frozen form does not cover; None covers all."""
    names = () if covers is None else covers.uncovered(settings)
    if names:
        raise ModelError(
            f"the {what} cannot be frozen with this value of {', '.join(names)}: frozen files do not have the setting. "
            "Compute with the checkpoint, or train with the default"
        )


class Sums(NamedTuple):
    """The sums over centres.

    Attributes
    ----------
    energy
        Of every local atom `(nframes·nloc,)`.
    force
        On every atom `(nframes·nall, 3)`.
    virial
        Of every frame `(nframes, 9)`.
    atom_virial
        Of every atom `(nframes·nall, 9)`, or without rows.
    """

    energy: torch.Tensor
    force: torch.Tensor
    virial: torch.Tensor
    atom_virial: torch.Tensor


def add_edges(near: Near, slope: torch.Tensor, frame: torch.Tensor, sums: Sums) -> None:
    """Add the contributions of edges to forces and virials; `slope` is dE/dr_ij, and the neighbour gets the virial."""
    sums.force.index_add_(0, near.centre, slope.sum(1))
    atoms = near.neighbor.clamp(min=0).view(-1)
    sums.force.index_add_(0, atoms, slope.reshape(-1, 3), alpha=-1)
    if sums.atom_virial.shape[0] > 0:
        products = slope.unsqueeze(3) * near.vectors.unsqueeze(2)
        sums.atom_virial.index_add_(0, atoms, products.reshape(-1, 9), alpha=-1)
    sums.virial.index_add_(
        0, frame, torch.bmm(slope.transpose(1, 2), near.vectors).reshape(-1, 9), alpha=-1
    )


def _places(
    order: torch.Tensor, offset: torch.Tensor, nloc: int, mapping: torch.Tensor | None
) -> torch.Tensor:
    """Return the row of every atom's original among the sorted centres `(nframes·nall,)`."""
    if mapping is None:
        raise ValueError(
            "this potential passes messages: it needs mapping (LAMMPS: atom_modify map yes) or comm_dict"
        )
    place = torch.zeros([offset.shape[0] * nloc], dtype=torch.int64, device=order.device)
    place = place.index_copy(0, order, torch.arange(order.shape[0], device=order.device))
    frames = torch.arange(offset.shape[0], device=order.device).unsqueeze(1)
    return place[(mapping.to(torch.int64) + frames * nloc).view(-1)]


def _outputs(
    sums: Sums, nframes: int, do_atomic_virial: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the results of `forward_lower`, with forces and virials in `dtype`."""
    per_atom = sums.energy.view(nframes, -1)
    out = {
        "energy": per_atom.sum(1, keepdim=True),
        "atom_energy": per_atom.unsqueeze(2),
        "extended_force": sums.force.view(nframes, -1, 3).to(dtype),
        "virial": sums.virial.to(dtype),
    }
    if do_atomic_virial:
        out["extended_virial"] = sums.atom_virial.view(nframes, -1, 9).to(dtype)
    return out


class _WithoutParameters(torch.nn.Module):
    """A scripted fitting net that reads neither frame nor atomic parameters."""

    default_fparam: torch.Tensor
    if TYPE_CHECKING:
        net: Any

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net, self.numb_fparam, self.numb_aparam = net, 0, 0
        self.register_buffer("default_fparam", torch.zeros(0))

    @torch.jit.export
    def energy_and_slope(
        self, descriptor: torch.Tensor, counts: list[int], parameters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the net, which takes no parameters."""
        found: tuple[torch.Tensor, torch.Tensor] = self.net.energy_and_slope(descriptor, counts)
        return found


class Program(torch.nn.Module):
    """Energy, forces and virial from positions and a neighbour list; see the module.

    Parameters
    ----------
    model
        The trained model; its weights are copied.
    section
        The model section in deepmd-kit's form; `DeepPot` reads it from the file.
    min_distance
        Smallest distance in the training data [Å]; `dp compress` reads it from the file.

    Raises
    ------
    ModelError
        When a part of the model has no scripted form.
    """

    centres_cpu: Final[
        int
    ]  # evaluated at once: bounds memory, and the data that a cache has to hold
    centres_gpu: Final[int] = 8192
    type_map: list[str]
    sel: list[int]
    bias: torch.Tensor
    has_table: Final[bool]
    excluded: torch.Tensor
    counted: torch.Tensor
    if TYPE_CHECKING:  # TorchScript finds the types of submodules itself
        descriptor: Any
        fitting_net: Any
        short_range: Any

    def __init__(
        self, model: EnergyModel, section: dict[str, Any], min_distance: float = UNKNOWN_DISTANCE
    ) -> None:
        super().__init__()
        own = model.atomic_model
        check_coverage("model", COVERAGE, model.settings)
        parts = []
        for table, settings, module in (
            (DESCRIPTORS, model.settings.descriptor, own.descriptor),
            (FITTING_NETS, model.settings.fitting_net, own.fitting_net),
        ):
            scripted = table.scripted(settings)
            if scripted is None:
                kind = f"{table.what} {table.name_of(settings)!r}"
                raise ModelError(
                    f"the {kind} cannot be frozen: it was registered without `scripted`"
                )
            covers = getattr(scripted, "covers", None)
            check_coverage(f"{table.what} {table.name_of(settings)!r}", covers, settings)
            parts.append(scripted(module))
        self.descriptor, net = parts
        self.centres_cpu = int(getattr(self.descriptor, "centres_cpu", 256))
        self.fitting_net = net if hasattr(net, "numb_fparam") else _WithoutParameters(net)
        self.excludes = model.excluded is not None
        no_pairs = torch.zeros(model.ntypes, model.ntypes, dtype=torch.int64)
        every = torch.ones(model.ntypes, dtype=torch.float64)
        self.register_buffer(
            "excluded", no_pairs if model.excluded is None else model.excluded.clone()
        )
        self.register_buffer("counted", every if model.counted is None else model.counted.clone())
        self.has_table = model.short_range is not None
        self.short_range = (
            copy.deepcopy(model.short_range) if self.has_table else torch.nn.Identity()
        )
        self.type_map, self.rcut, self.sel = (
            list(model.type_map),
            float(model.rcut),
            list(model.sel),
        )
        self.ntypes = len(self.type_map)
        self.section, self.min_distance = json.dumps(section), min_distance
        self.register_buffer("bias", own.out_bias.detach()[0, :, 0].clone())

    @torch.jit.export
    def get_rcut(self) -> float:
        """Return the cut-off [Å]."""
        return self.rcut

    @torch.jit.export
    def get_ntypes(self) -> int:
        """Return the number of types."""
        return self.ntypes

    @torch.jit.export
    def get_type_map(self) -> list[str]:
        """Return the element symbol of every type."""
        return self.type_map

    @torch.jit.export
    def get_sel(self) -> list[int]:
        """Return the neighbour slots: for each type, or one number for all."""
        return self.sel

    @torch.jit.export
    def get_dim_fparam(self) -> int:
        """Return how many frame parameters there are."""
        number: int = self.fitting_net.numb_fparam
        return number

    @torch.jit.export
    def get_dim_aparam(self) -> int:
        """Return how many atomic parameters there are."""
        number: int = self.fitting_net.numb_aparam
        return number

    @torch.jit.export
    def has_default_fparam(self) -> bool:
        """Return whether frame parameters may be left out."""
        there: bool = self.fitting_net.default_fparam.shape[0] > 0
        return there

    @torch.jit.export
    def get_default_fparam(self) -> torch.Tensor | None:
        """Return the frame parameters of calls without any `(numb_fparam,)`."""
        default: torch.Tensor = self.fitting_net.default_fparam
        return default if default.shape[0] > 0 else None

    @torch.jit.export
    def is_aparam_nall(self) -> bool:
        """Return whether ghosts have atomic parameters."""
        return False

    @torch.jit.export
    def get_sel_type(self) -> list[int]:
        """Return the types that have an energy; empty for all."""
        counted: list[int] = []
        if float(self.counted.min()) == 0.0:
            for kind in range(self.ntypes):
                if float(self.counted[kind]) > 0.0:
                    counted.append(kind)  # noqa: PERF401 (TorchScript has no comprehension with "if")
        return counted

    @torch.jit.export
    def has_message_passing(self) -> bool:
        """Return whether features of ghosts have to be exchanged between ranks."""
        needed: bool = self.descriptor.message_passing
        return needed

    @torch.jit.export
    def model_output_type(self) -> list[str]:
        """Return the prediction of the fitting net."""
        return ["energy"]

    @torch.jit.export
    def get_model_def_script(self) -> str:
        """Return the model section as JSON."""
        return self.section

    @torch.jit.export
    def get_min_nbor_dist(self) -> float:
        """Return the smallest distance in the training data [Å], negative when unknown."""
        return self.min_distance

    @torch.jit.export
    def get_observed_type_list(self) -> list[str]:
        """Return the types of the training data: those with an energy bias above deepmd-kit's bound [eV]."""
        names: list[str] = []
        for kind in range(self.ntypes):
            if abs(float(self.bias[kind])) > 1e-6:
                names.append(self.type_map[kind])  # noqa: PERF401 (TorchScript has no comprehension with "if")
        return names

    @torch.jit.export
    def forward_lower(
        self,
        extended_coord: torch.Tensor,
        extended_atype: torch.Tensor,
        nlist: torch.Tensor,
        mapping: torch.Tensor | None = None,
        fparam: torch.Tensor | None = None,
        aparam: torch.Tensor | None = None,
        do_atomic_virial: bool = False,
        comm_dict: dict[str, torch.Tensor] | None = None,
        charge_spin: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Evaluate atoms and ghosts with a given neighbour list.

        Parameters
        ----------
        extended_coord
            Positions of local atoms, then ghosts `(nframes, nall, 3)` [Å].
        extended_atype
            Types `(nframes, nall)`, −1 for padding.
        nlist
            Numbers of the atoms near each local atom `(nframes, nloc, n)`, in any order, farther than the cut-off or
            not, −1 for an empty entry.
        mapping
            Local atom that each atom is an image of `(nframes, nall)`; message passing needs it or `comm_dict`.
        fparam
            Frame parameters `(nframes, numb_fparam)`.
        aparam
            Parameters of local atoms `(nframes, nloc, numb_aparam)`.
        charge_spin
            Not used.
        do_atomic_virial
            Whether to return the virial of every atom.
        comm_dict
            How ranks exchange ghosts: the arguments of `deepmd::border_op`.

        Returns
        -------
        dict
            `energy (nframes, 1)`, `atom_energy (nframes, nloc, 1)` [eV], `extended_force (nframes, nall, 3)` [eV/Å],
            `virial (nframes, 9)` and, if asked for, `extended_virial (nframes, nall, 9)` [eV]; energies float64, the
            others in the precision of the positions.
        """
        parameters = self._parameter_rows(nlist, fparam, aparam)
        return self._evaluate(
            extended_coord, extended_atype, nlist, mapping, parameters, do_atomic_virial, comm_dict
        )

    def _parameter_rows(
        self, nlist: torch.Tensor, fparam: torch.Tensor | None, aparam: torch.Tensor | None
    ) -> torch.Tensor:
        """Return frame and atomic parameters of every local atom `(nframes·nloc, numb_fparam + numb_aparam)`."""
        nframes, nloc = nlist.shape[0], nlist.shape[1]
        parts = [torch.zeros([nframes * nloc, 0], dtype=torch.float64, device=nlist.device)]
        frames: int = self.fitting_net.numb_fparam
        atoms: int = self.fitting_net.numb_aparam
        if frames > 0:
            given = fparam if fparam is not None else self.get_default_fparam()
            if given is None:
                raise ValueError("this potential reads frame parameters: give fparam")
            of_frames = given.to(torch.float64).reshape([-1, frames]).expand([nframes, frames])
            parts.append(of_frames.repeat_interleave(nloc, dim=0))
        if atoms > 0:
            if aparam is None:
                raise ValueError("this potential reads atomic parameters: give aparam")
            parts.append(aparam.to(torch.float64).reshape([nframes * nloc, atoms]))
        return torch.cat(parts, dim=1)

    def _evaluate(
        self,
        extended_coord: torch.Tensor,
        extended_atype: torch.Tensor,
        nlist: torch.Tensor,
        mapping: torch.Tensor | None,
        parameters: torch.Tensor,
        do_atomic_virial: bool,
        comm_dict: dict[str, torch.Tensor] | None,
    ) -> dict[str, torch.Tensor]:
        """Implement `forward_lower`, apart from it because TorchScript methods call each other without defaults."""
        nframes, nall = extended_atype.shape
        nloc = nlist.shape[1]
        coord = extended_coord.reshape(nframes * nall, 3).to(torch.float64)
        types = extended_atype.reshape(-1)
        offset = torch.arange(nframes, device=coord.device) * nall
        centre = (offset.unsqueeze(1) + torch.arange(nloc, device=coord.device)).view(-1)
        listed = torch.where(nlist >= 0, nlist + offset.view(-1, 1, 1), -1).view(nframes * nloc, -1)
        step = self.centres_gpu if coord.is_cuda else self.centres_cpu
        crowd = (listed >= 0).sum(1) if centre.shape[0] > step else torch.zeros_like(centre)
        order = sort_by_type(types[centre], crowd)
        sums = Sums(
            energy=torch.zeros([nframes * nloc], dtype=torch.float64, device=coord.device),
            force=torch.zeros_like(coord),
            virial=torch.zeros([nframes, 9], dtype=torch.float64, device=coord.device),
            atom_virial=coord.new_zeros([coord.shape[0] if do_atomic_virial else 0, 9]),
        )
        place = torch.empty([0], dtype=torch.int64, device=coord.device)
        comm: dict[str, torch.Tensor] = {}
        if self.descriptor.message_passing:
            step = max(1, order.shape[0])  # all at once: layers read the features of other centres
            if comm_dict is not None:
                comm = comm_dict
            else:
                place = _places(order, offset, nloc, mapping)
        for begin in range(
            0, max(1, order.shape[0]), step
        ):  # a rank without atoms still takes part in exchanges
            here = order[begin : begin + step]
            atoms = centre[here]
            kind = types[atoms]
            own: list[int] = torch.bincount(kind, minlength=self.ntypes).cpu().tolist()
            neighbor, sections, vectors = neighbors_within(
                coord, types, atoms, listed[here], self.descriptor.request
            )
            if self.excludes:
                mark = self.excluded[kind.unsqueeze(1), types[neighbor.clamp(min=0)].clamp(min=0)]
                neighbor = torch.where((mark < 0) & (neighbor >= 0), mark, neighbor)
            frame = torch.div(atoms, nall, rounding_mode="floor")
            first_type = types[frame * nall].clamp(min=0)
            near = Near(
                atoms, kind, own, neighbor, sections, vectors, types, first_type, place, nloc, comm
            )
            described, tape = self.descriptor.describe(near)
            values, adjoint = self.fitting_net.energy_and_slope(described, own, parameters[here])
            weight = self.counted[kind]
            if self.has_table:
                other = torch.where(neighbor >= 0, types[neighbor.clamp(min=0)], -1)
                blend = self.short_range(vectors, kind, other)
                share = 1.0 - blend.weight
                add_edges(
                    near, weight.view(-1, 1, 1) * edge_slope(blend, values, vectors), frame, sums
                )
                values = share * values + blend.weight * blend.energy
                adjoint = share.unsqueeze(1).to(adjoint.dtype) * adjoint
            sums.energy[here] = (values + self.bias[kind]) * weight
            adjoint = adjoint * weight.unsqueeze(1).to(adjoint.dtype)
            add_edges(near, self.descriptor.pullback(adjoint, tape), frame, sums)
        return _outputs(sums, nframes, do_atomic_virial, extended_coord.dtype)

    @torch.jit.export
    def forward_common_lower(
        self,
        extended_coord: torch.Tensor,
        extended_atype: torch.Tensor,
        nlist: torch.Tensor,
        mapping: torch.Tensor | None = None,
        fparam: torch.Tensor | None = None,
        aparam: torch.Tensor | None = None,
        do_atomic_virial: bool = False,
        charge_spin: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the results of `forward_lower` under the names of deepmd-kit's Python code.

        deepmd-kit sums `energy_derv_c` over atoms to get the virial. Without `do_atomic_virial` the first atom
        therefore holds the whole virial.
        """
        parameters = self._parameter_rows(nlist, fparam, aparam)
        found = self._evaluate(
            extended_coord, extended_atype, nlist, mapping, parameters, do_atomic_virial, None
        )
        if do_atomic_virial:
            of_atoms = found["extended_virial"]
        else:
            of_atoms = found["virial"].new_zeros(
                [extended_atype.shape[0], extended_atype.shape[1], 9]
            )
            of_atoms[:, :1] = found["virial"].unsqueeze(1)
        return {
            "energy": found["atom_energy"],
            "energy_redu": found["energy"],
            "energy_derv_r": found["extended_force"].unsqueeze(2),
            "energy_derv_c": of_atoms.unsqueeze(2),
            "energy_derv_c_redu": found["virial"].unsqueeze(1),
            "mask": (extended_atype[:, : nlist.shape[1]] >= 0).to(torch.int32),
        }

    def forward(
        self,
        coord: torch.Tensor,
        atype: torch.Tensor,
        box: torch.Tensor | None = None,
        fparam: torch.Tensor | None = None,
        aparam: torch.Tensor | None = None,
        do_atomic_virial: bool = False,
        charge_spin: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Evaluate frames; the neighbours are found by comparing all pairs.

        Parameters
        ----------
        coord
            Positions `(nframes, natoms, 3)` or `(nframes, 3·natoms)` [Å].
        atype
            Types `(nframes, natoms)`, −1 for padding.
        box
            Cell vectors `(nframes, 9)` or `(nframes, 3, 3)` [Å]; None without periodicity.
        fparam
            Frame parameters `(nframes, numb_fparam)`.
        aparam
            Atomic parameters `(nframes, natoms, numb_aparam)`.
        charge_spin
            Not used.
        do_atomic_virial
            Whether to return the virial of every atom.

        Returns
        -------
        dict
            `energy (nframes, 1)`, `atom_energy (nframes, natoms, 1)`, `force (nframes, natoms, 3)`,
            `virial (nframes, 9)` and, if asked for, `atom_virial (nframes, natoms, 9)`.
        """
        nframes, natoms = atype.shape
        parts: list[dict[str, torch.Tensor]] = []
        for frame in range(nframes):
            own, kind = coord[frame].view(natoms, 3), atype[frame]
            owner = torch.arange(natoms, device=coord.device)
            if box is not None:
                own, kind, owner = with_images(own, kind, box[frame].view(3, 3), self.rcut)
            nlist = all_pairs(own, natoms, self.rcut)
            of_frame = None if fparam is None else fparam.reshape([nframes, -1])[frame]
            of_atoms = None if aparam is None else aparam.reshape([nframes, natoms, -1])[frame]
            parameters = self._parameter_rows(nlist[None], of_frame, of_atoms)
            found = self._evaluate(
                own[None], kind[None], nlist[None], owner[None], parameters, do_atomic_virial, None
            )
            part = {
                "energy": found["energy"],
                "atom_energy": found["atom_energy"],
                "virial": found["virial"],
            }
            part["force"] = (
                torch.zeros_like(own[:natoms])
                .index_add(0, owner, found["extended_force"][0])
                .unsqueeze(0)
            )
            if do_atomic_virial:
                zeros = torch.zeros([natoms, 9], dtype=own.dtype, device=own.device)
                part["atom_virial"] = zeros.index_add(
                    0, owner, found["extended_virial"][0]
                ).unsqueeze(0)
            part["mask"] = (atype[frame : frame + 1] >= 0).to(torch.int32)
            parts.append(part)
        out: dict[str, torch.Tensor] = {}
        for key in parts[0]:
            out[key] = torch.cat([part[key] for part in parts])
        return out
