"""The ener loss against values that deepmd-kit 3.2.0 computed, and against its own definition."""

import gzip
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from deepmd_muon.loss import ComparedAtoms, build_loss, check_labels

FIXTURE = torch.load(
    io.BytesIO(gzip.decompress(Path(__file__).with_name("deepmd_kit_loss.pt.gz").read_bytes())),
    weights_only=True,
)
CASES = list(FIXTURE["cases"])
TYPES = ["O", "H"]
ATOMS = ComparedAtoms(torch.zeros(3, 5, dtype=torch.int64))
PADDED = ComparedAtoms(FIXTURE["padded_atype"], FIXTURE["padded_atype"] >= 0)


def given():
    prediction = {
        "energy": FIXTURE["prediction"]["energy"].reshape(-1),
        "atom_energy": FIXTURE["prediction"]["atom_energy"].squeeze(-1),
        "force": FIXTURE["prediction"]["force"],
        "virial": FIXTURE["prediction"]["virial"],
    }
    label = {key: value.squeeze(-1) for key, value in FIXTURE["label"].items()}
    label["atom_pref"] = label["atom_pref"][:, ::3]
    return prediction, label


@pytest.mark.parametrize("kind", ["whole", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_same_values(name, kind):
    case = FIXTURE["cases"][name]
    prediction, label = given()
    atoms = PADDED if kind == "padded" else ATOMS
    value, metrics = build_loss(case["settings"], TYPES)(prediction, label, 0.3, atoms)
    torch.testing.assert_close(value, case[kind]["loss"], rtol=1e-13, atol=0)
    for key, wanted in case[kind]["metrics"].items():
        torch.testing.assert_close(metrics[key], wanted, rtol=1e-13, atol=0, msg=key)
    assert set(metrics) == set(case[kind]["metrics"])


def test_prefactor_follows_the_learning_rate():
    prediction, label = given()
    loss = build_loss({"start_pref_e": 0.02, "limit_pref_e": 1.0, "start_pref_f": 0.0}, TYPES)
    square = (prediction["energy"] - label["energy"]).square().mean() / 5
    for fraction in (0.0, 0.25, torch.tensor(0.5, dtype=torch.float64), 1.0):
        value, _ = loss(prediction, label, fraction, ATOMS)
        torch.testing.assert_close(value, (1.0 - 0.98 * fraction) * square)


def frames_of(values, chosen):
    """Some frames of a dictionary of tensors."""
    return {key: value[chosen] for key, value in values.items()}


TERMS = {
    "e": ["energy"],
    "f": ["force"],
    "v": ["virial"],
    "ae": ["atom_ener"],
    "pf": ["force", "atom_pref"],
}


@pytest.mark.parametrize("kind", ["whole", "padded"])
@pytest.mark.parametrize(
    ("name", "term"),
    [
        (name, t)
        for name in CASES
        for t in TERMS
        if FIXTURE["cases"][name]["settings"][f"start_pref_{t}"]
    ],
)
def test_frames_without_a_label_have_no_weight(name, term, kind):
    """A term is that of the frames that have its labels; what stands in the others does not matter."""
    settings = FIXTURE["cases"][name]["settings"]
    alone = build_loss(
        {
            k: 0.0 if "_pref_" in k and not k.endswith(f"_{term}") else v
            for k, v in settings.items()
        },
        TYPES,
    )
    assert [found.metric.split("_")[1] for found in alone.terms] == [term]
    prediction, label = given()
    atoms = PADDED if kind == "padded" else ATOMS
    found = torch.tensor([True, False, True])
    partial = dict(label)
    for quantity in TERMS[term]:
        partial[quantity] = label[quantity].clone()
        partial[quantity][1] = 1e6
        partial[f"find_{quantity}"] = found
    leaves = {key: value.clone().requires_grad_() for key, value in prediction.items()}
    value, metrics = alone(leaves, partial, 0.3, atoms)
    chosen = [0, 2]
    inputs = frames_of(prediction, chosen), frames_of(label, chosen)
    mask = None if atoms.mask is None else atoms.mask[chosen]
    wanted, expected = alone(*inputs, 0.3, ComparedAtoms(atoms.atype[chosen], mask))
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
    assert expected.keys() == metrics.keys()
    for key, figure in expected.items():
        torch.testing.assert_close(metrics[key], figure, rtol=1e-12, atol=0, msg=key)
    gradients = [
        g
        for g in torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        if g is not None
    ]
    assert gradients
    assert all((g[1] == 0).all() for g in gradients)


def test_labels_of_different_frames_do_not_mix():
    """Each term has its own frames: energies of the first two, forces of the last."""
    prediction, label = given()
    first, last = torch.tensor([True, True, False]), torch.tensor([False, False, True])
    loss = build_loss({}, TYPES)
    value, metrics = loss(
        prediction, {**label, "find_energy": first, "find_force": last}, 0.3, ATOMS
    )
    energy, force = prediction["energy"] - label["energy"], prediction["force"] - label["force"]
    torch.testing.assert_close(metrics["rmse_e"], (energy[:2] / 5).square().mean().sqrt())
    torch.testing.assert_close(metrics["rmse_f"], force[2].square().mean().sqrt())
    torch.testing.assert_close(
        value,
        (1.0 - 0.98 * 0.3) * energy[:2].square().mean() / 5
        + (1.0 + 999.0 * 0.3) * force[2].square().mean(),
    )


def test_weights_and_coefficients_of_some_frames():
    prediction, label = given()
    found = torch.tensor([True, False, True])
    only_pf = {"start_pref_pf": 1.0, "limit_pref_pf": 1.0, "start_pref_e": 0.0, "start_pref_f": 0.0}
    power = (prediction["force"] - label["force"]).square()
    weighted = power * label["atom_pref"].unsqueeze(-1)
    partial = {**label, "find_atom_pref": found}
    value, _ = build_loss(only_pf, TYPES)(prediction, partial, 1.0, ATOMS)
    torch.testing.assert_close(value, weighted[found].mean())
    value, _ = build_loss({**only_pf, "use_default_pf": True}, TYPES)(
        prediction, partial, 1.0, ATOMS
    )
    torch.testing.assert_close(value, torch.stack([weighted[0], power[1], weighted[2]]).mean())
    value, metrics = build_loss(only_pf, TYPES)(
        prediction, {**partial, "find_force": ~found}, 1.0, ATOMS
    )
    assert value == 0
    assert metrics["rmse_pf"].isnan()
    loss = build_loss(
        {"start_pref_e": 1.0, "start_pref_f": 0.0, "enable_atom_ener_coeff": True}, TYPES
    )
    value, _ = loss(prediction, {**label, "find_atom_ener_coeff": found}, 1.0, ATOMS)
    energy = (prediction["atom_energy"] * label["atom_ener_coeff"]).sum(1)
    energy[1] = prediction["energy"][1]
    torch.testing.assert_close(value, (energy - label["energy"]).square().mean() / 5)


class System(NamedTuple):
    name: str
    labels: frozenset


@pytest.mark.parametrize(
    ("settings", "labels", "warnings", "errors"),
    [
        ({}, [{"energy", "force"}], [], []),
        (
            {},
            [{"energy"}, {"force", "virial"}],
            [
                r"1 of 2 systems have no energy\.npy .*: s1",
                r"1 of 2 systems have no force\.npy .*: s0",
            ],
            [],
        ),
        (
            {},
            [{"force"}] * 2,
            [],
            [r"no system has energy\.npy, .* set loss/start_pref_e and loss/limit_pref_e to 0"],
        ),
        ({"start_pref_e": 0.0}, [{"force"}] * 2, [], []),
        (
            {},
            [{"energy"}] + [{"energy", "force"}] * 9 + [{"energy"}] * 9,
            ["10 of 19 .*: s0, s10, s11, …"],
            [],
        ),
        (
            {},
            [{"energy"}],
            ["no system has force.npy: loss/start_pref_f and loss/limit_pref_f have no effect"],
            [],
        ),
        (
            {"start_pref_v": 1.0, "limit_pref_v": 1.0},
            [{"energy", "force"}, {"atom_ener"}, set()],
            ["2 of 3 .* energy", "2 of 3 .* force", "no system has virial.npy: loss/start_pref_v"],
            [
                "system s1 .* need energy or force or virial, it has atom_ener;",
                "system s2 .* it has none;",
            ],
        ),
        (
            {"start_pref_pf": 1.0, "limit_pref_pf": 1.0, "start_pref_f": 0.0},
            [{"energy", "force"}],
            [r"no system has atom_pref\.npy and force\.npy"],
            [],
        ),
        (
            {"start_pref_pf": 1.0, "limit_pref_pf": 1.0, "use_default_pf": True},
            [{"energy", "force"}],
            [],
            [],
        ),
    ],
)
def test_labels_are_compared_with_the_terms(settings, labels, warnings, errors):
    systems = [System(f"s{k}", frozenset(found)) for k, found in enumerate(labels)]
    check = check_labels(build_loss(settings, TYPES), systems)
    for found, wanted in ((check.warnings, warnings), (check.errors, errors)):
        assert len(found) == len(wanted), found
        assert all(re.match(pattern, text) for pattern, text in zip(wanted, found, strict=True)), (
            found
        )


def test_default_prefactors_of_atoms_are_one():
    prediction, label = given()
    settings = {
        "start_pref_pf": 1.0,
        "limit_pref_pf": 1.0,
        "start_pref_e": 0.0,
        "start_pref_f": 0.0,
    }
    del label["atom_pref"]
    value, _ = build_loss({**settings, "use_default_pf": True}, TYPES)(
        prediction, label, 1.0, ATOMS
    )
    torch.testing.assert_close(value, (prediction["force"] - label["force"]).square().mean())
    value, metrics = build_loss(settings, TYPES)(prediction, label, 1.0, ATOMS)
    assert value == 0
    assert metrics["rmse_pf"].isnan()


def test_a_term_needs_both_prefactors():
    loss = build_loss({"start_pref_v": 1.0, "start_pref_ae": 0.1, "limit_pref_ae": 0.2}, TYPES)
    assert [term.metric for term in loss.terms] == ["rmse_e", "rmse_f", "rmse_ae"]
    assert not loss.needs_virial
    assert loss.needs_force


@pytest.mark.parametrize("settings", [{}, {"loss_func": "mae"}, {"use_huber": True}])
def test_weights_multiply_what_frames_add_to_the_loss(settings):
    """The loss of a batch is the mean of its frames' losses, each times its weight; errors have none."""
    prediction, label = given()
    loss = build_loss({"start_pref_v": 0.3, "limit_pref_v": 0.4, **settings}, TYPES)
    weights = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    weighted, metrics = loss(prediction, {**label, "weight": weights}, 0.3, ATOMS)
    _, unweighted = loss(prediction, label, 0.3, ATOMS)
    alone = []
    for k in range(3):
        frame = slice(k, k + 1)
        atoms = ComparedAtoms(ATOMS.atype[frame])
        alone.append(loss(frames_of(prediction, frame), frames_of(label, frame), 0.3, atoms)[0])
    torch.testing.assert_close(weighted, (weights * torch.stack(alone)).mean())
    for name in ("rmse_f", "rmse_e", "rmse_v"):
        shown = name.replace("rmse", "mae") if "loss_func" in settings else name
        torch.testing.assert_close(metrics[shown], unweighted[shown])
    has_weight = torch.tensor([True, True, False])
    partial, _ = loss(
        prediction, {**label, "weight": weights, "find_weight": has_weight}, 0.3, ATOMS
    )
    expected = torch.stack([0.5 * alone[0], 2.0 * alone[1], alone[2]]).mean()
    torch.testing.assert_close(partial, expected)
