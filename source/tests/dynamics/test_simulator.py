"""The batched force call equals the predictor at every step; dynamics and relaxations are physics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dynamics_models import build

from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.dynamics import Barostat, ForceField, Langevin, Systems, simulate
from deepmd_muon.dynamics.forces import Forces
from deepmd_muon.dynamics.integrators import GIGAPASCAL
from deepmd_muon.dynamics.systems import BOLTZMANN, DynamicsError
from deepmd_muon.infer import Predictor


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("se_e2_a", False),
        ("se_e2_a", True),
        ("dpa3", False),
        pytest.param("dpa3", True, marks=pytest.mark.slow),
    ],
)
def test_forces_are_the_predictors_while_lists_are_reused(
    name, frozen, frames, generator, tmp_path
):
    model = build(name)
    if frozen:
        freeze(model, tmp_path / "model.pth")
    predictor = Predictor(tmp_path / "model.pth" if frozen else model, device="cpu", batch_atoms=48)
    systems = Systems.from_frames(frames, predictor.type_map)
    force_field = ForceField(predictor, skin=0.8)
    for _ in range(4):
        found = force_field(systems.coord, systems.box, systems.atype)
        expected = predictor.evaluate(systems.frames())
        np.testing.assert_allclose(found.energy, expected.energy, rtol=1e-12)
        np.testing.assert_allclose(found.force, expected.force, atol=1e-12)
        np.testing.assert_allclose(found.virial, expected.virial, atol=1e-11)
        noise = torch.randn(systems.coord.shape, generator=generator, dtype=torch.float64)
        systems = replace(
            systems, coord=systems.coord + torch.where(systems.real[..., None], 0.05 * noise, 0.0)
        )
    assert 3 <= force_field.lists_built < 12


def test_verlet_conserves_energy_to_second_order(frames, generator):
    force_field = ForceField(Predictor(build("smooth"), device="cpu"))
    systems = Systems.from_frames(frames.rows(slice(0, 2)), ("O", "H"), masses=(16.0, 1.0)).heated(
        300.0, generator
    )
    spread = []
    for time_step, steps in ((0.5, 16), (0.25, 32)):
        total = torch.stack(
            [s.total_energy for s in simulate(force_field, systems, steps, time_step, every=1)]
        )
        spread.append(np.ptp(total.numpy(), axis=0))
    np.testing.assert_allclose(spread[1] / spread[0], 0.25, rtol=0.3)


def test_langevin_reaches_each_copys_temperature(frames, generator):
    force_field = ForceField(Predictor(build("smooth"), device="cpu"))
    start = Systems.from_frames(frames.rows(slice(0, 1)), ("O", "H"))
    copies = start.rows(torch.zeros(6, dtype=torch.int64))
    wanted = torch.tensor([100.0] * 3 + [400.0] * 3)
    thermostat = Langevin(wanted, friction=0.5)
    run = simulate(
        force_field, copies.heated(wanted, generator), 120, 0.5, thermostat=thermostat, every=4
    )
    found = [2.0 * snapshot.systems.kinetic / (BOLTZMANN * 3 * 24) for snapshot in run]
    mean = torch.stack(found[5:]).mean(0)
    assert mean[:3].mean() == pytest.approx(100.0, rel=0.15)
    assert mean[3:].mean() == pytest.approx(400.0, rel=0.15)


def test_a_lost_copy_is_named_and_the_others_go_on(frames, generator):
    force_field = ForceField(Predictor(build("smooth"), device="cpu"))
    systems = Systems.from_frames(frames, ("O", "H")).heated(100.0, generator)
    alone = list(simulate(force_field, systems.rows(torch.tensor([0])), 4, 0.5))[-1]
    systems.velocity[1, 5] = 10.0
    systems.coord[2, 3] = float("nan")
    snapshots = list(simulate(force_field, systems, 4, 0.5, every=1))
    lost = {lost.copy: lost for snapshot in snapshots for lost in snapshot.lost}
    assert lost[1].step == 1
    assert lost[1].atom == 5
    assert lost[2].step == 0
    assert "finite" in lost[2].reason
    assert snapshots[-1].copies.tolist() == [0]
    np.testing.assert_allclose(snapshots[-1].systems.coord, alone.systems.coord, atol=1e-12)


@pytest.mark.parametrize(
    "wanted", [torch.tensor(200.0), torch.tensor([200.0]), torch.tensor([100.0, 200.0, 300.0])]
)
@pytest.mark.parametrize("when", ["at once", "later"])
def test_thermostat_and_barostat_go_on_without_a_lost_copy(frames, generator, wanted, when):
    force_field = ForceField(Predictor(build("smooth"), device="cpu"))
    systems = Systems.from_frames(frames, ("O", "H")).heated(wanted, generator)
    if when == "at once":
        systems.coord[1, 3] = float("nan")
    else:
        systems.velocity[1, 5] = 10.0
    settings = {"thermostat": Langevin(wanted), "barostat": Barostat(wanted / 1e3, wanted, every=2)}
    *_, end = simulate(force_field, systems, 4, 0.5, every=1, **settings)
    assert end.copies.tolist() == [0, 2]
    assert end.systems.coord.isfinite().all()


def test_temperatures_that_fit_no_structures_are_refused(frames, generator):
    force_field = ForceField(Predictor(build("smooth"), device="cpu"))
    systems = Systems.from_frames(frames, ("O", "H"))
    with pytest.raises(DynamicsError, match="2 temperatures"):
        systems.heated(torch.tensor([100.0, 200.0]), generator)
    with pytest.raises(DynamicsError, match="2 temperatures"):
        next(
            simulate(
                force_field, systems, 1, 0.5, thermostat=Langevin(torch.tensor([100.0, 200.0]))
            )
        )
    for wrong in (Langevin(-300.0), Langevin(float("nan")), Langevin(300.0, friction=-0.1)):
        with pytest.raises(DynamicsError, match="temperature"):
            next(simulate(force_field, systems, 1, 0.5, thermostat=wrong))


@pytest.mark.parametrize("masses", [[16.0], [16.0, 1.0, 1.0], [16.0, 0.0], [-16.0, 1.0]])
def test_masses_of_other_types_or_not_above_zero_are_refused(frames, masses):
    with pytest.raises(DynamicsError, match="mass"):
        Systems.from_frames(frames, ("O", "H"), masses=masses)


def test_numbers_without_a_meaning_heat_and_press_nothing(frames, generator):
    systems = Systems.from_frames(frames, ("O", "H"))
    for wrong in (-5.0, float("nan"), float("inf")):
        with pytest.raises(DynamicsError, match="temperature"):
            systems.heated(wrong, generator)
    force_field = ForceField(Predictor(build("smooth"), device="cpu"))
    barostat = Barostat(float("nan"), 300.0)
    with pytest.raises(DynamicsError, match="pressure"):
        next(simulate(force_field, systems, 1, 0.5, thermostat=Langevin(300.0), barostat=barostat))


def test_mistakes_have_their_error(frames):
    with pytest.raises(DynamicsError, match="masses"):
        Systems.from_frames(frames, ("O", "H_water"))
    with pytest.raises(DynamicsError, match="time step"):
        next(simulate(None, Systems.from_frames(frames, ("O", "H")), 1, 0.0))


class IdealGas:
    """Atoms that do not feel each other."""

    device = torch.device("cpu")

    def reset(self):
        pass

    def launchable(self, box, atype):
        return False

    def __call__(self, coord, box, atype):
        return Forces(
            coord.new_zeros(len(coord)), torch.zeros_like(coord), coord.new_zeros(len(coord), 9)
        )


def test_cells_of_an_ideal_gas_have_the_volumes_of_its_pressure(generator):
    """Volumes of N atoms follow a gamma distribution: mean (N + 1) kT/p, relative spread 1/√(N + 1)."""
    natoms, copies, kelvin = 20, 64, 300.0
    pressures = torch.tensor([0.1, 0.2], dtype=torch.float64).repeat_interleave(copies // 2)
    expected = (natoms + 1) * BOLTZMANN * kelvin / (pressures * GIGAPASCAL)
    start = Systems(
        coord=torch.zeros(copies, natoms, 3, dtype=torch.float64),
        box=(expected ** (1.0 / 3.0))[:, None, None] * torch.eye(3, dtype=torch.float64),
        atype=torch.zeros(copies, natoms, dtype=torch.int64),
        mass=torch.full((copies, natoms), 4.0, dtype=torch.float64),
        velocity=torch.zeros(copies, natoms, 3, dtype=torch.float64),
    ).heated(kelvin, generator)
    barostat = Barostat(pressures, kelvin, time=20.0, compressibility=1.0, every=1)
    run = simulate(
        IdealGas(), start, 2500, 1.0, thermostat=Langevin(kelvin, 0.5), barostat=barostat, every=8
    )
    volume = (
        torch.stack([torch.linalg.det(snapshot.systems.box) for snapshot in run])[50:] / expected
    )
    for rows in (slice(0, copies // 2), slice(copies // 2, copies)):
        assert volume[:, rows].mean() == pytest.approx(1.0, rel=0.05)
        assert volume[:, rows].std() == pytest.approx((natoms + 1) ** -0.5, rel=0.1)


def test_constant_pressure_needs_a_thermostat(frames):
    force_field = ForceField(Predictor(build("smooth"), device="cpu"))
    with pytest.raises(DynamicsError, match="thermostat"):
        next(
            simulate(
                force_field,
                Systems.from_frames(frames, ("O", "H")),
                1,
                0.5,
                barostat=Barostat(0.0, 300.0),
            )
        )
