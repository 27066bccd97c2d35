"""Modules of deepmd-kit behind `EnergyModel`, against deepmd-kit's own call (`pytest -m deepmd_kit`).

They run in an environment in which both packages can be imported.
"""

import copy
import dataclasses
import importlib.util
import itertools

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepmd_muon.data.frames import longest_vector
from deepmd_muon.data.neighbors.lists import build_neighbors, stack_neighbors
from deepmd_muon.model import Structures
from deepmd_muon.model.settings import HostedSettings

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]
SIZES = (14, 11, 14)  # atoms of the frames

SE_A = {
    "type": "se_e2_a",
    "sel": [24, 40],
    "rcut": 4.0,
    "rcut_smth": 2.0,
    "neuron": [4, 8],
    "axis_neuron": 3,
    "type_one_side": True,
}
SE_R = {"type": "se_e2_r", "sel": [24, 40], "rcut": 4.5, "rcut_smth": 2.0, "neuron": [4, 8]}
SE_T = {"type": "se_e3", "sel": [24, 40], "rcut": 3.5, "rcut_smth": 2.0, "neuron": [3, 6]}
SE_T_TEBD = {**SE_T, "type": "se_e3_tebd", "sel": 50, "tebd_dim": 4}
ATTENTION = {
    "type": "se_atten",
    "sel": 60,
    "rcut": 4.0,
    "rcut_smth": 2.0,
    "neuron": [4, 8],
    "axis_neuron": 3,
    "attn": 8,
    "attn_layer": 1,
}
STRIP = {"tebd_input_mode": "strip"}
V2 = {k: v for k, v in ATTENTION.items() if k != "attn"} | {"type": "se_atten_v2", "attn_layer": 0}
DPA2 = {
    "type": "dpa2",
    "repinit": {
        "tebd_dim": 4,
        "rcut": 4.5,
        "rcut_smth": 2.0,
        "nsel": 70,
        "neuron": [4, 8],
        "axis_neuron": 3,
        "use_three_body": True,
        "three_body_sel": 30,
        "three_body_rcut": 3.5,
        "three_body_rcut_smth": 2.0,
    },
    "repformer": {
        "rcut": 3.5,
        "rcut_smth": 2.5,
        "nsel": 30,
        "nlayers": 2,
        "g1_dim": 8,
        "g2_dim": 6,
        "attn2_hidden": 4,
        "attn2_nhead": 2,
        "attn1_hidden": 8,
        "attn1_nhead": 2,
        "axis_neuron": 2,
        "g1_out_conv": True,
        "g1_out_mlp": True,
    },
}
DPA4 = {
    "rcut": 4.0,
    "sel": 60,
    "channels": 8,
    "n_radial": 4,
    "lmax": 2,
    "mmax": 1,
    "n_blocks": 2,
    "so2_layers": 2,
    "ffn_so3_grid": True,
    "message_node_so3": True,
    "use_amp": False,
    # A random roll of each edge changes the last digits.
    "random_gamma": False,
}
PARAMETERS = {"numb_fparam": 2, "numb_aparam": 1}
# Room for the virtual atoms of all neighbours.
DPA2_OF_SPINS = {
    **DPA2,
    "repinit": DPA2["repinit"] | {"nsel": 160, "three_body_sel": 80},
    "repformer": DPA2["repformer"] | {"nsel": 80},
}
VIRTUAL_ATOMS = {"use_spin": [True, False], "virtual_scale": [0.3]}


def section_of(descriptor, fitting_net=None, **keys):
    """A model section in float64."""
    numbers = {"precision": "float64", "seed": 1}
    if descriptor.get("type") == "hybrid":
        numbered = {"type": "hybrid", "list": [part | numbers for part in descriptor["list"]]}
    else:
        numbered = descriptor | numbers
    width = [0] if keys.get("type") == "dpa4" else [8, 8]
    net = {"neuron": width, "precision": "float64", "seed": 2, **(fitting_net or {})}
    return {"type_map": ["O", "H"], "descriptor": numbered, "fitting_net": net, **keys}


def dpa4_section(**keys):
    return section_of(DPA4, type="dpa4", **keys)


SECTIONS = {
    "se_e2_r": section_of(SE_R),
    "se_e3": section_of(SE_T),
    "se_e3_tebd": section_of(SE_T_TEBD),
    "se_e3_tebd strip": section_of(SE_T_TEBD | STRIP),
    "se_atten strip": section_of(ATTENTION | STRIP | {"smooth_type_embedding": True}),
    "se_atten_v2, exclusions": section_of(
        V2 | {"exclude_types": [[0, 0]]}, pair_exclude_types=[[1, 1]], atom_exclude_types=[0]
    ),
    "dpa2": section_of(DPA2),
    "dpa2, parameters": section_of(DPA2, PARAMETERS),
    "hybrid": section_of({"type": "hybrid", "list": [SE_A, SE_R]}),
    "hybrid, mixed types": section_of({"type": "hybrid", "list": [SE_A, SE_R, ATTENTION]}),
    "linear_ener": {
        "type": "linear_ener",
        "weights": "sum",
        "type_map": ["O", "H"],
        "models": [section_of(ATTENTION), section_of(V2 | {"rcut": 3.5, "sel": 40})],
    },
    "dpa4": dpa4_section(),
    "dpa4, parameters": dpa4_section(fitting_net=PARAMETERS),
    "dpa4, charge and spin": {
        **dpa4_section(fitting_net=PARAMETERS),
        "descriptor": {**DPA4, "add_chg_spin_ebd": True, "precision": "float64", "seed": 1},
    },
    "dpa4, exclusions": dpa4_section(pair_exclude_types=[[0, 0]], atom_exclude_types=[1]),
    "dpa4, zbl": dpa4_section(bridging_method="zbl", bridging_r_inner=0.8, bridging_r_outer=1.2),
    # Without smooth weights, neighbours beyond `sel` would change energies by jumps.
    "se_e2_a, spins": section_of(SE_A, spin=VIRTUAL_ATOMS),
    "se_atten_v2, spins": section_of(V2 | {"sel": 120}, PARAMETERS, spin=VIRTUAL_ATOMS),
    "dpa2, spins": section_of(DPA2_OF_SPINS, spin=VIRTUAL_ATOMS),
    "dpa4, spins": dpa4_section(spin={"scheme": "native", "use_spin": [True, False]}),
    "dpa4, virtual atoms": dpa4_section(
        spin={"scheme": "deepspin", **VIRTUAL_ATOMS}, fitting_net=PARAMETERS
    ),
    "dpa4, virtual atoms, zbl": dpa4_section(
        spin={"scheme": "deepspin", **VIRTUAL_ATOMS},
        bridging_method="zbl",
        bridging_r_inner=0.8,
        bridging_r_outer=1.2,
    ),
}


def build(section):
    """The model of a section, with all weights and biases away from 0."""
    from deepmd.utils.argcheck import model_args

    from deepmd_muon.model.hosted.module import HostedModel

    arguments = model_args()
    normalized = arguments.normalize_value(copy.deepcopy(section), trim_pattern="_*")
    arguments.check_value(normalized, strict=True)
    model = HostedModel(HostedSettings.of(normalized))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_energy_bias([-1.5, 0.7])
    return model


@dataclasses.dataclass
class Frames:
    coord: np.ndarray
    atype: np.ndarray
    box: np.ndarray | None
    fparam: np.ndarray | None = None
    aparam: np.ndarray | None = None
    charge_spin: np.ndarray | None = None
    spin: np.ndarray | None = None

    @property
    def atomic_parameters(self):
        columns = [x for x in (self.aparam, self.spin) if x is not None]
        return np.concatenate(columns, axis=2) if columns else None

    @property
    def frame_parameters(self):
        columns = [x for x in (self.fparam, self.charge_spin) if x is not None]
        return np.concatenate(columns, axis=1) if columns else None


def random_frames(model, *, periodic):
    """Frames of several sizes, padded; some atoms are outside the cell."""
    random = np.random.default_rng(4)
    natoms = max(SIZES)
    coord = np.zeros((len(SIZES), natoms, 3))
    atype = np.full((len(SIZES), natoms), -1)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3) * 2.2
    for k, size in enumerate(SIZES):
        coord[k, :size] = random.permutation(grid)[:size]
        coord[k, :size] += random.uniform(-0.35, 0.35, (size, 3))
        atype[k, :size] = random.integers(0, 2, size)
    box = 6.5 * np.eye(3) + random.uniform(-0.3, 0.3, (len(SIZES), 3, 3)) if periodic else None
    frames = Frames(coord, atype, box)
    if model.settings.fitting_net.numb_fparam:
        frames.fparam = random.normal(size=(len(SIZES), 2))
        frames.aparam = random.normal(size=(len(SIZES), natoms, 1))
    if model.settings.charge_spin.embedded:
        frames.charge_spin = np.array([[-1.0, 2.0], [0.0, 1.0], [3.0, 0.0]])
    if model.settings.spins.read:
        frames.spin = random.normal(size=coord.shape)
        frames.spin[:, 0] = 0.0  # a virtual atom at its atom
        model.reach_spins(longest_vector(frames.spin))
    return frames


def structures_of(model, frames, rcut=None):
    lists = [
        build_neighbors(
            coord=frames.coord[k],
            box=None if frames.box is None else frames.box[k],
            atype=frames.atype[k],
            rcut=rcut or model.rcut,
            sel=model.sel,
            by_type=model.by_type,
            ntypes=2,
        )
        for k in range(len(SIZES))
    ]
    return Structures.of(frames, stack_neighbors(lists), ntypes=2)


def predict_in_deepmd_kit(model, frames):
    """What deepmd-kit's own call returns, frame by frame and without padding."""
    outputs = []
    for k, size in enumerate(SIZES):
        options = {}
        if frames.fparam is not None:
            options["fparam"] = torch.tensor(frames.fparam[k : k + 1])
            options["aparam"] = torch.tensor(frames.aparam[k : k + 1, :size])
        if frames.charge_spin is not None:
            options["charge_spin"] = torch.tensor(frames.charge_spin[k : k + 1])
        if frames.spin is not None:
            options["spin"] = torch.tensor(frames.spin[k : k + 1, :size])
        outputs.append(
            model.hosted.forward_common(
                torch.tensor(frames.coord[k : k + 1, :size]),
                torch.tensor(frames.atype[k : k + 1, :size]),
                box=None if frames.box is None else torch.tensor(frames.box[k].reshape(1, 9)),
                **options,
            )
        )
    natoms = frames.atype.shape[1]

    def padded(key):
        vectors = [output[key].reshape(-1, 3) for output in outputs]
        rows = [torch.nn.functional.pad(x, (0, 0, 0, natoms - len(x))) for x in vectors]
        return torch.stack(rows)

    magnetic = {} if frames.spin is None else {"force_mag": padded("energy_derv_r_mag")}
    return {
        **magnetic,
        "energy": torch.cat([output["energy_redu"].reshape(1) for output in outputs]),
        "force": padded("energy_derv_r"),
        "virial": torch.stack([output["energy_derv_c_redu"].reshape(9) for output in outputs]),
    }


def loss_of(output):
    """A loss that every number of an output enters with a weight of its own."""
    weights = torch.linspace(-1.0, 1.0, output["force"].numel()).view_as(output["force"])
    loss = (output["force"] * weights + output["force"].square()).sum()
    if "force_mag" in output:
        loss = loss + (output["force_mag"] * weights + output["force_mag"].square()).sum()
    return loss + output["energy"].square().sum() + 0.01 * output["virial"].square().sum()


def gradient(model, output):
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss_of(output), params, allow_unused=True)


def assert_near(ours, theirs, tolerance=1e-9):
    atol = tolerance * float(theirs.detach().abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("name", SECTIONS)
def test_agrees_with_deepmd_kits_own_call(name):
    """Energies, forces, virials, and the gradient of a loss of them."""
    model = build(SECTIONS[name])
    for periodic in (True, False):
        frames = random_frames(model, periodic=periodic)
        ours = model(structures_of(model, frames))
        theirs = predict_in_deepmd_kit(model, frames)
        for key, expected in theirs.items():
            assert_near(ours[key], expected)
        expected_gradient = gradient(model, theirs)
        scale = max(float(g.abs().max()) for g in expected_gradient if g is not None)
        for g, expected in zip(gradient(model, ours), expected_gradient, strict=True):
            assert (g is None) == (expected is None)
            if g is not None:
                torch.testing.assert_close(g, expected, rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize("name", SECTIONS)
def test_no_operation_of_a_step_reads_numbers_on_the_host(name):
    """Fake tensors have no numbers: reading one raises."""
    model = build(SECTIONS[name])
    assert model.why_not_captured is None
    structures = structures_of(model, random_frames(model, periodic=True))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fields = {f.name: getattr(structures, f.name) for f in dataclasses.fields(structures)}
        fake = {k: mode.from_tensor(x) if torch.is_tensor(x) else x for k, x in fields.items()}
        gradients = gradient(model, model(Structures(**fake)))
    assert sum(g is not None for g in gradients) > len(gradients) / 2


@pytest.mark.parametrize("name", ["dpa2", "hybrid", "se_e3_tebd", "dpa4"])
def test_lists_with_a_skin_in_any_order_change_nothing(name):
    """Dynamics reuse lists that reach beyond the cut-off."""
    model = build(SECTIONS[name])
    frames = random_frames(model, periodic=True)
    wide = structures_of(model, frames, rcut=model.rcut + 0.5)
    starts = np.cumsum([0, *wide.sections])
    random = np.random.default_rng(5)
    columns = np.concatenate(
        [random.permutation(np.arange(a, b)) for a, b in itertools.pairwise(starts)]
    )
    shuffled = dataclasses.replace(
        wide,
        neighbor=wide.neighbor[:, columns],
        shift=wide.shift[:, columns],
        filled=np.repeat(np.array(wide.sections)[:, None], len(wide.order), axis=1),
    )
    with torch.no_grad():
        expected = model(structures_of(model, frames))
        output = model(shuffled)
        for key in ("energy", "force", "virial"):
            assert not output[key].requires_grad
            assert_near(output[key], expected[key])


@pytest.mark.parametrize("name", ["dpa4", "dpa4 with frame parameters"])
def test_a_bound_of_all_edges_changes_nothing(name):
    """Batches on a device have one, so that steps leave out most empty slots."""
    section = copy.deepcopy(SECTIONS["dpa4"])
    if name != "dpa4":
        section["fitting_net"]["numb_fparam"] = 1
    model = build(section)
    frames = random_frames(model, periodic=True)
    structures = structures_of(model, frames)
    if name != "dpa4":
        fparam = torch.arange(structures.nframes, dtype=torch.float64)[:, None]
        structures = dataclasses.replace(structures, fparam=fparam)
    n_edges = int((structures.neighbor >= 0).sum())
    assert n_edges + 3 < structures.neighbor.numel()
    expected = model(structures)
    output = model(dataclasses.replace(structures, edges=n_edges + 3))
    for key in ("energy", "force", "virial"):
        assert_near(output[key], expected[key])
    for bounded, plain in zip(gradient(model, output), gradient(model, expected), strict=True):
        assert_near(bounded, plain)


def test_what_deepmd_kit_cannot_do_with_a_frozen_model_is_known():
    """It compiles DPA-4 with virtual atoms for one rank."""
    assert "one rank" in build(SECTIONS["dpa4, virtual atoms"]).frozen_without
    for name in ("dpa4, spins", "se_e2_a, spins"):
        assert "one rank" not in (build(SECTIONS[name]).frozen_without or "")


def test_names_and_statistics_are_deepmd_kits():
    """Names of tensors, and mean, deviation and bias from a sample."""
    model = build(SECTIONS["dpa2"])
    names = [name for name, _ in model.hosted.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    frames = random_frames(model, periodic=True)
    sample = {
        "coord": torch.tensor(frames.coord[:1]),
        "atype": torch.tensor(frames.atype[:1]),
        "box": torch.tensor(frames.box[:1].reshape(1, 9)),
        "energy": torch.tensor([[-7.0]], dtype=torch.float64),
        "natoms": torch.tensor([[14, 14, *np.bincount(frames.atype[0]).tolist()]]),
        "find_energy": np.float32(1.0),
    }
    before = model.hosted.get_descriptor().repinit.stddev.clone()
    model.fit_statistics([sample])
    assert not torch.equal(model.hosted.get_descriptor().repinit.stddev, before)
    counts = torch.bincount(sample["atype"][0]).double()
    fitted = float(counts @ model.out_bias[0, :, 0])
    assert fitted == pytest.approx(-7.0, abs=1e-6)


def test_a_model_that_waits_for_the_device_says_what_waits():
    """It runs all the same, without a graph."""
    two_sided = SE_A | {"type_one_side": False}
    model = build(section_of({"type": "hybrid", "list": [two_sided, SE_R]}))
    assert "type_one_side" in model.why_not_captured
    frames = random_frames(model, periodic=True)
    expected = predict_in_deepmd_kit(model, frames)
    assert_near(model(structures_of(model, frames))["force"], expected["force"])
