import logging
import re

import numpy as np
import pytest
import torch
from frozen_models import LARGER, build
from small_models import SE_E2_A
from write_systems import write_npy

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.cli.main import main
from deepmd_muon.data.neighbors.lists import with_ghosts
from deepmd_muon.deploy import freeze as freezing
from deepmd_muon.deploy.errors import FreezeError
from deepmd_muon.deploy.freeze import compare, freeze
from deepmd_muon.deploy.program import Program
from deepmd_muon.infer import Predictor
from deepmd_muon.model import ModelError
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.scripted.dense import (
    accumulate_product,
    act_of,
    add_product,
    product,
    value_of,
)

DPA1 = LARGER["se_atten"] | {"rcut": 4.0, "seed": 1}
V2 = {key: value for key, value in DPA1.items() if key != "smooth_type_embedding"} | {
    "type": "se_atten_v2"
}
DPA3 = LARGER["dpa3"] | {"seed": 1}


def dpa3(**repflow):
    return DPA3 | {"repflow": DPA3["repflow"] | repflow}


ONE_SIDE = {"type_one_side": True, "exclude_types": [[0, 1]], "neuron": [4, 4, 8]}
MODELS = {
    "se_e2_a": (SE_E2_A, {}),
    "fewer slots than neighbours": (SE_E2_A | {"sel": [5, 9]}, {}),
    "one side, time steps, excluded pairs": (
        SE_E2_A | ONE_SIDE | {"resnet_dt": True},
        {"resnet_dt": True},
    ),
    "vacuum energies, silut": (
        SE_E2_A
        | {"activation_function": "silut:0.5", "set_davg_zero": True, "env_protection": 0.01},
        {"atom_ener": [-1.0, None], "activation_function": "gelu"},
    ),
    "DPA-1": (DPA1, {}),
    "DPA-1, few slots, not smooth": (
        DPA1 | {"sel": 20, "smooth_type_embedding": False, "resnet_dt": True},
        {},
    ),
    "DPA-1 with a mean": (
        DPA1 | {"set_davg_zero": False, "type_one_side": True, "neuron": [5, 10]},
        {},
    ),
    "DPA-1, stripped types": (
        DPA1 | {"tebd_input_mode": "strip", "attn_layer": 0, "concat_output_tebd": False},
        {},
    ),
    "DPA-1, wide attention": (DPA1 | {"attn": 24}, {}),
    "DPA-1, wide attention, not smooth": (
        DPA1 | {"attn": 24, "sel": 25, "smooth_type_embedding": False},
        {},
    ),
    "DPA-1 with a mean, wide attention": (
        DPA1 | {"attn": 24, "set_davg_zero": False, "normalize": False},
        {},
    ),
    "DPA-1 v2": (V2 | {"attn_dotr": False, "normalize": False, "temperature": 0.5}, {}),
    "DPA-3": (DPA3, {}),
    "DPA-3, rough, few slots": (
        dpa3(smooth_edge_update=False, e_sel=12, a_sel=5, update_style="res_avg"),
        {},
    ),
    "DPA-3, compressed": (
        dpa3(a_compress_rate=1, a_compress_e_rate=2, a_compress_use_split=True, use_exp_switch=True)
        | {"concat_output_tebd": True, "activation_function": "silut:0.5"},
        {},
    ),
    "DPA-3, compressed by linear layers, several messages": (
        dpa3(a_compress_rate=1, a_compress_e_rate=4, n_multi_edge_message=3)
        | {"env_protection": 0.2},
        {},
    ),
    "DPA-3, one after another": (
        dpa3(sequential_update=True, smooth_edge_update=True, n_multi_edge_message=2),
        {},
    ),
    "DPA-3, one after another, rough, few slots": (
        dpa3(
            sequential_update=True, smooth_edge_update=False, e_sel=12, a_sel=5, a_compress_rate=1
        ),
        {},
    ),
    "DPA-3 without angles": (
        dpa3(update_angle=False, edge_init_use_dist=True, update_style="res_incr"),
        {},
    ),
    "float32": (SE_E2_A | {"precision": "float32"}, {"precision": "float32"}),
}


def lower(frames, program, rcut, *, atomic=False):
    """What `forward_lower` returns of each frame, forces summed over images."""
    out = []
    for coord, box, atype in zip(*frames, strict=True):
        ghosted = with_ghosts(coord, box, atype, rcut)
        given = ghosted.coord, atype[ghosted.owner], ghosted.neighbor, ghosted.owner
        tensors = [torch.from_numpy(array)[None] for array in given]
        found = program.forward_lower(*tensors, None, None, atomic)
        force = np.zeros_like(coord)
        np.add.at(force, ghosted.owner, found["extended_force"][0].numpy())
        out.append({name: value[0].numpy() for name, value in found.items()} | {"force": force})
    return out


def assert_equal(found, expected, frame, tolerance):
    for name, value in (
        ("energy", found["energy"][0]),
        ("atom_energy", found["atom_energy"][:, 0]),
        ("force", found["force"]),
        ("virial", found["virial"]),
    ):
        reference = getattr(expected, name)[frame]
        np.testing.assert_allclose(
            value, reference, rtol=0, atol=tolerance * max(1.0, np.abs(reference).max())
        )


@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_the_model(name, water_frames):
    model = build(*MODELS[name])
    expected = Predictor(model, device="cpu").predict(*water_frames)
    program = Program(model, {}).eval()
    tolerance = 1e-5 if name == "float32" else 1e-13
    assert np.abs(expected.force).max() > 1e-3
    for frame, found in enumerate(lower(water_frames, program, model.rcut, atomic=True)):
        assert_equal(found, expected, frame, tolerance)
        np.testing.assert_allclose(found["extended_virial"].sum(0), found["virial"], atol=1e-12)
    whole = program(
        *(torch.from_numpy(array) for array in (water_frames[0], water_frames[2], water_frames[1]))
    )
    np.testing.assert_allclose(whole["force"].numpy(), expected.force, rtol=0, atol=tolerance)
    np.testing.assert_allclose(whole["energy"][:, 0].numpy(), expected.energy, rtol=tolerance)


@pytest.mark.parametrize("name", ["se_e2_a", "DPA-1, wide attention", "DPA-1 v2", "DPA-3"])
def test_products_have_more_than_one_batch(name, water_frames):
    """LAMMPS exports a slow `dgemm_`, which replaces MKL's in torch's products of two matrices."""
    program = torch.jit.script(Program(build(*MODELS[name]), {}).eval())
    frames = [torch.from_numpy(array) for array in water_frames]
    with torch.profiler.profile(record_shapes=True) as profiled:
        program(frames[0][:1], frames[2][:1], frames[1][:1])
    names = {event.name for event in profiled.events()}
    assert "aten::bmm" in names
    assert not {"aten::addmm", "aten::mv", "aten::linear"} & names
    plain = [event.input_shapes[:2] for event in profiled.events() if event.name == "aten::mm"]
    assert all(shapes[1] == [3, 3] for shapes in plain)  # cell vectors


@pytest.mark.parametrize("rows", [0, 1, 4, 5])
def test_products_in_two_batches_are_products(rows):
    x, matrix = torch.rand(rows, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64).t()
    other = torch.rand(rows, 4, dtype=torch.float64)
    torch.testing.assert_close(product(x, matrix), x @ matrix)
    torch.testing.assert_close(add_product(other, x, matrix), other + x @ matrix)
    torch.testing.assert_close(add_product(matrix[0], x, matrix), matrix[0] + x @ matrix)
    expected = other + x @ matrix
    accumulate_product(other, x, matrix)
    torch.testing.assert_close(other, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("natoms", [1, 3])
def test_atoms_without_neighbours(name, natoms):
    """The list of a lone atom has no columns."""
    model = build(*MODELS[name])
    coord = np.arange(3.0 * natoms).reshape(1, natoms, 3) * 20.0
    atype = np.arange(natoms)[None] % 2
    expected = Predictor(model, device="cpu").predict(coord, None, atype)
    found = Program(model, {}).eval()(torch.from_numpy(coord), torch.from_numpy(atype), None)
    rtol = 1e-5 if name == "float32" else 1e-13
    np.testing.assert_allclose(
        found["atom_energy"][..., 0].numpy(), expected.atom_energy, rtol=rtol
    )
    np.testing.assert_array_equal(found["force"].numpy(), 0.0)


def test_attention_is_folded_where_its_lengths_keep_their_digits(water_frames):
    """Keys of one direction would have lengths near 0: a squared length, a difference of products, loses digits."""
    model = build(*MODELS["DPA-1, wide attention"])
    first, _ = model.atomic_model.descriptor.se_atten.dpa1_attention.attention_layers
    with torch.no_grad():
        keys = first.attention_layer.in_proj.matrix[:, 24:48]
        keys.copy_(keys[:, :1] * keys[:1])
    program = Program(model, {}).eval()
    assert [len(layer.folded) for layer in program.descriptor.attention] == [0, 17]
    expected = Predictor(model, device="cpu").predict(*water_frames)
    for frame, found in enumerate(lower(water_frames, program, model.rcut)):
        assert_equal(found, expected, frame, 1e-13)


@pytest.mark.parametrize("highest", [2.9, 3.0, 3.1, float("nan")])
def test_silut_is_the_same_with_and_without_arguments_at_its_threshold(highest):
    h = torch.cat(
        [
            torch.linspace(-9, 2.5, 7, dtype=torch.float64),
            torch.tensor([highest], dtype=torch.float64),
        ]
    )
    expected, _ = activation("silut:3.0")(h)
    torch.testing.assert_close(
        value_of(act_of("silut:3.0"), h), expected, rtol=1e-15, atol=1e-15, equal_nan=True
    )


@pytest.mark.parametrize("name", ["se_e2_a", "DPA-1", "DPA-1 with a mean", "DPA-3"])
def test_a_program_makes_its_tensors_where_the_positions_are(name, water_frames):
    """A tensor made without a device would be on "meta" here, and on the CPU in a program that runs on a GPU."""
    program = Program(build(*MODELS[name]), {}).eval()
    coord, box, atype = (torch.from_numpy(array[:1]) for array in water_frames)
    expected = program(coord, atype, box, do_atomic_virial=True)
    with torch.device("meta"):
        found = program(coord, atype, box, do_atomic_virial=True)
    for key, value in expected.items():
        assert torch.equal(found[key], value)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LARGER)
def test_a_file_computes_on_a_gpu_what_it_computes_on_the_cpu(kind, tmp_path, water_frames):
    freeze(build(LARGER[kind] | {"seed": 3}), tmp_path / "model.pth")
    expected, found = (
        Predictor(tmp_path / "model.pth", device=device).predict(*water_frames)
        for device in ("cpu", "cuda")
    )
    for name in ("energy", "force", "virial", "atom_energy"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-9)


def test_the_list_may_be_longer_and_in_any_order(water_frames):
    model = build(SE_E2_A | {"sel": [5, 9]})
    program = Program(model, {}).eval()
    one = tuple(part[:1] for part in water_frames)
    (expected,) = lower(one, program, model.rcut)
    ghosted = with_ghosts(one[0][0], one[1][0], one[2][0], model.rcut + 1.5)
    shuffled = np.random.default_rng(0).permuted(ghosted.neighbor, axis=1)
    given = [
        torch.from_numpy(array)[None]
        for array in (ghosted.coord, one[2][0][ghosted.owner], shuffled)
    ]
    found = program.forward_lower(*given)
    force = np.zeros_like(one[0][0])
    np.add.at(force, ghosted.owner, found["extended_force"][0].numpy())
    np.testing.assert_allclose(force, expected["force"], rtol=0, atol=1e-14)
    assert found["energy"].item() == pytest.approx(expected["energy"].item(), abs=1e-13)


def test_several_frames_with_padding_at_once(water_frames):
    model = build(SE_E2_A)
    program = Program(model, {}).eval()
    coord, _, atype = (None if part is None else part.copy() for part in water_frames)
    atype[1, 20:] = -1
    expected = Predictor(model, device="cpu").predict(coord, None, atype)
    every = np.tile(np.arange(24), (3, 24, 1))
    nlist = np.where(every == np.arange(24)[:, None], -1, every)
    found = program.forward_lower(*(torch.from_numpy(array) for array in (coord, atype, nlist)))
    np.testing.assert_allclose(found["extended_force"].numpy(), expected.force, rtol=0, atol=1e-14)
    np.testing.assert_allclose(
        found["atom_energy"][..., 0].numpy(), expected.atom_energy, rtol=0, atol=1e-13
    )
    np.testing.assert_allclose(found["virial"].numpy(), expected.virial, rtol=0, atol=1e-13)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """A model, its checkpoint and its frozen file, made by the command."""
    folder = tmp_path_factory.mktemp("frozen")
    model = build(SE_E2_A)
    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, folder / "model.ckpt-1.pt")
    (folder / "checkpoint").write_text("model.ckpt-1.pt\n")
    assert main(["--pt", "freeze", "-c", str(folder), "-o", str(folder / "model")]) == 0
    return model, folder / "model.ckpt-1.pt", folder / "model.pth"


def test_the_file_is_the_checkpoint(frozen, water_frames):
    model, checkpoint, file = frozen
    coord, box, atype = water_frames
    expected = Predictor(checkpoint, device="cpu").predict(coord, box, atype)
    found = Predictor(file, device="cpu").predict(coord, box, atype)
    for name in ("energy", "force", "virial", "atom_energy"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=0, atol=1e-13
        )
    assert compare(model, file).relative < 1e-12


def test_deepmd_kits_names_say_the_same(frozen, water_frames):
    program = torch.jit.load(frozen[2])
    one = tuple(part[:1] for part in water_frames)
    (expected,) = lower(one, program, program.get_rcut())
    ghosted = with_ghosts(one[0][0], one[1][0], one[2][0], program.get_rcut())
    given = [
        torch.from_numpy(array)[None]
        for array in (ghosted.coord, one[2][0][ghosted.owner], ghosted.neighbor)
    ]
    found = program.forward_common_lower(*given)
    assert found["energy_redu"].item() == expected["energy"].item()
    assert np.array_equal(found["energy_derv_r"][0, :, 0].numpy(), expected["extended_force"])
    for asked in (False, True):
        of_atoms = program.forward_common_lower(*given, do_atomic_virial=asked)["energy_derv_c"]
        assert of_atoms.shape == (1, len(ghosted.coord), 1, 9)
        np.testing.assert_allclose(
            of_atoms.sum(1)[0, 0].numpy(), expected["virial"].ravel(), rtol=0, atol=1e-13
        )
    assert program.get_sel() == [24, 48]
    assert (program.get_type_map(), program.get_rcut(), program.get_ntypes()) == (
        ["O", "H"],
        4.0,
        2,
    )
    assert not program.has_message_passing()
    assert '"type": "se_e2_a"' in program.get_model_def_script()


def test_dp_test_reads_the_file(frozen, water_frames, tmp_path, caplog):
    coord, box, atype = water_frames
    arrays = {"coord": coord, "box": box, "force": np.ones_like(coord), "energy": np.ones(3)}
    water = write_npy(
        tmp_path / "water", atype[0], [{name: x.reshape(3, -1) for name, x in arrays.items()}], "OH"
    )
    lines = []
    for path in frozen[1:]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert main(["--pt", "test", "-m", str(path), "-s", water]) == 0
        lines.append([record.message for record in caplog.records if "RMSE" in record.message])
    assert lines[0] == lines[1]
    assert any(re.search(r"Force\s+RMSE", line) for line in lines[0])


def test_ase_moves_atoms_with_the_file(frozen, water_frames):
    ase = pytest.importorskip("ase")
    from deepmd_muon.infer import DeepPotCalculator

    coord, box, atype = (part[0] for part in water_frames)
    forces = []
    for path in frozen[1:]:
        atoms = ase.Atoms(
            ["OH"[t] for t in atype], positions=coord, cell=box, pbc=(True, True, False)
        )
        atoms.calc = DeepPotCalculator(path, device="cpu")
        forces.append(atoms.get_forces())
    np.testing.assert_allclose(forces[1], forces[0], rtol=0, atol=1e-14)


def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch):
    model = build(SE_E2_A)
    monkeypatch.setitem(freezing.TOLERANCE, torch.float64, -1.0)
    with pytest.raises(FreezeError, match=r"differs.*model\.pth"):
        freeze(model, tmp_path / "model.pth")
    assert list(tmp_path.iterdir()) == []


def test_the_comparison_sees_other_weights(frozen):
    model = build(SE_E2_A)
    with torch.no_grad():
        model.atomic_model.fitting_net.filter_layers[1].tensors[0].matrix[0, 0] += 1e-3
    assert compare(model, frozen[2]).force > 1e-9


def test_what_has_no_scripted_form_is_named(monkeypatch):
    from deepmd_muon.model.registry import DESCRIPTORS

    monkeypatch.setattr(DESCRIPTORS, "scripted", lambda settings: None)
    with pytest.raises(ModelError, match=r"descriptor 'se_e2_a' cannot be frozen"):
        Program(build(SE_E2_A), {})


def test_rejects_non_frozen_file(tmp_path):
    (tmp_path / "model.pth").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="frozen"):
        Predictor(tmp_path / "model.pth", device="cpu")
    with pytest.raises(CheckpointError, match="there is no"):
        Predictor(tmp_path / "other.pth", device="cpu")


def test_folders_without_a_run_and_other_formats(tmp_path, capsys):
    assert main(["--pt", "freeze", "-c", str(tmp_path)]) == 2
    assert "checkpoint" in capsys.readouterr().err
