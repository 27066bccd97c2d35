"""Conformance tests of a descriptor, within an energy model with a small fitting net."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, build_neighbors, stack_neighbors
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.files import whole_file
from deepmd_muon.infer import load_model
from deepmd_muon.model import DescriptorModel, EnergyModel, ModelError, Structures, build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.testing.structures import Structure, scattered, structures

Results = dict[str, np.ndarray]

# Central difference of fourth order: f′(x) ≈ Σ weight · f(x + offset · STEP) / STEP.
OFFSETS = (-2, -1, 1, 2)
WEIGHTS = (1 / 12, -2 / 3, 2 / 3, -1 / 12)
STEP = 1e-4


def _slope(values: Sequence[float]) -> float:
    """Return the central difference of values at the offsets."""
    terms = [weight * value for weight, value in zip(WEIGHTS, values, strict=True)]
    return float(sum(terms)) / STEP


class DescriptorChecks:
    """Tests that every descriptor of an energy model has to pass.

    Pytest collects them from a derived class.

    The descriptor should compute in float64, and its `sel` should hold all neighbours within its
    cut-off radius, of up to 0.08 atoms/Å³: no energy is smooth if neighbours are left out.

    Attributes
    ----------
    descriptor
        The section `model/descriptor` of an input.
    fitting_net
        The section `model/fitting_net`.
    type_map
        Element names; at least two.
    smooth
        Whether energy and forces are continuous when an atom crosses a cut-off radius.
    """

    descriptor: ClassVar[Mapping[str, Any]] = {}
    fitting_net: ClassVar[Mapping[str, Any]] = {"type": "ener", "neuron": [8, 8], "seed": 2}
    type_map: ClassVar[Sequence[str]] = ("O", "H")
    smooth: ClassVar[bool] = True

    # ----- the model under test ------------------------------------------------------------------

    def build(self) -> DescriptorModel:
        """Return the model under test, always with the same weights, statistics and biases."""
        torch.manual_seed(1)
        model = build_model(
            {
                "type_map": list(self.type_map),
                "descriptor": dict(self.descriptor),
                "fitting_net": dict(self.fitting_net),
            }
        )
        assert isinstance(model, DescriptorModel)
        scale = 1.0 + 0.1 * torch.arange(model.ntypes, dtype=torch.float64)[:, None]
        mean = torch.tensor([[0.02, 0.0, 0.0, 0.0]])
        stddev = torch.tensor([[0.2, 0.1, 0.1, 0.1]])
        model.set_statistics(mean * scale, stddev * scale)
        model.set_energy_bias([-3.0 + kind for kind in range(model.ntypes)])
        return model

    def batch(self, model: EnergyModel, *frames: Structure) -> Structures:
        """Return frames with all their neighbours.

        All have equally many atoms, and all or none have a cell.
        """
        request = model.neighbors
        neighbors = []
        for frame in frames:
            geometry = (frame.coord, frame.box, frame.atype, request.rcut)
            counts = build_neighbors(*geometry, None, model.by_type, model.ntypes).sections
            too_many_of_type = model.by_type and np.any(np.greater(counts, request.sel))
            if sum(counts) > sum(request.sel) or too_many_of_type:
                raise ValueError(
                    f"an atom has {counts} neighbours, sel holds {tuple(request.sel)}: test a "
                    "larger sel"
                )
            neighbors.append(
                build_neighbors(*geometry, request.sel, model.by_type, model.ntypes, request.inner)
            )
        boxes = [frame.box for frame in frames if frame.box is not None]
        stacked = Frames(
            np.stack([frame.atype for frame in frames]).astype(np.int32),
            np.stack([frame.coord for frame in frames]),
            np.stack(boxes) if boxes else None,
        )
        return Structures.of(stacked, stack_neighbors(neighbors), model.ntypes)

    def predict(self, model: EnergyModel, *frames: Structure) -> Results:
        """Return energy, forces, virial and atomic energies of frames."""
        with torch.no_grad():
            out = model(self.batch(model, *frames), force=True, virial=True)
        return {key: value.double().numpy() for key, value in out.items()}

    def _structures(self) -> dict[str, Structure]:
        return structures(len(self.type_map))

    # ----- derivatives ---------------------------------------------------------------------------

    def test_forces_are_the_negative_slope_of_the_energy(self) -> None:
        """Compare forces with finite differences; their sum over atoms is zero."""
        model = self.build()
        for name, frame in self._structures().items():
            force = self.predict(model, frame)["force"][0]
            for atom, axis in ((0, 0), (1, 2), (len(frame.coord) - 1, 1)):
                energies = []
                for offset in OFFSETS:
                    displaced = frame.moved(atom, axis, STEP * offset)
                    energies.append(self.predict(model, displaced)["energy"][0])
                assert abs(force[atom, axis] + _slope(energies)) < 1e-8, (name, atom, axis)
            np.testing.assert_allclose(force.sum(0), 0.0, atol=1e-10, err_msg=name)
        force = self.predict(model, self._structures()["cluster"])["force"]
        assert np.abs(force).max() > 1e-6, "no force depends on a position"

    def test_virial_is_the_negative_slope_against_strain(self) -> None:
        """Compare the virial with finite differences; it is symmetric."""
        model = self.build()
        for name, frame in self._structures().items():
            virial = self.predict(model, frame)["virial"].reshape(3, 3)
            for a, b in ((0, 0), (1, 1), (0, 2), (2, 1)):
                energies = []
                for offset in OFFSETS:
                    strain = np.eye(3)
                    strain[b, a] += STEP * offset  # rows are vectors: x_a grows by x_b
                    energies.append(self.predict(model, frame.mapped(strain))["energy"][0])
                assert abs(virial[a, b] + _slope(energies)) < 1e-6, (name, a, b)
            np.testing.assert_allclose(virial, virial.T, atol=1e-9, err_msg=name)

    def test_gradients_of_a_force_loss_are_finite_differences(self) -> None:
        """Compare second derivatives with the slope of a loss of energy, forces and virial.

        The slope is that along a random direction in the space of all parameters.
        """
        model = self.build()
        frames = list(self._structures().values())[:2]
        parameters = [p for p in model.parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(7)
        direction = []
        for p in parameters:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            direction.append(noise.to(p.dtype))

        def loss() -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for frame in frames:
                out = model(self.batch(model, frame), force=True, virial=True)
                force = out["force"].flatten()
                weights = torch.linspace(0.5, 1.5, force.numel(), dtype=torch.float64)
                total = total + 0.1 * out["energy"].sum()
                total = total + (weights * force).square().sum()
                total = total + 0.1 * out["virial"].square().sum()
            return total

        grads = torch.autograd.grad(loss(), parameters, allow_unused=True)
        derivative = 0.0
        for grad, along in zip(grads, direction, strict=True):
            if grad is not None:
                derivative += float((grad * along).sum())
        values = []
        previous = 0
        with torch.no_grad():
            for offset in OFFSETS:
                for p, along in zip(parameters, direction, strict=True):
                    p.add_(along, alpha=STEP * (offset - previous))
                values.append(float(loss()))
                previous = offset
        assert abs(derivative - _slope(values)) < 1e-6 * (1.0 + abs(derivative))

    def test_gradients_are_finite_at_the_edges(self) -> None:
        """Test isolated atoms, padded atoms and slots, and three atoms on a line.

        None may lead to a root or a division at zero.
        """
        model = self.build()
        line = np.array([[0.0, 0, 0], [0, 0, 1.3], [0, 0, 2.6], [40.0, 0, 0], [0, 0, 0]])
        atype = np.array([0, 1, 1, 0, -1])
        forwards = Structure(line, atype)
        backwards = Structure(line[::-1].copy(), atype[::-1].copy())
        out = model(self.batch(model, forwards, backwards), virial=True)
        loss = out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        assert all(grad.isfinite().all() for grad in grads)
        lone_atom = Structure(np.zeros((1, 3)), np.array([1]))
        assert not self.predict(model, lone_atom)["force"].any()

    # ----- symmetries ----------------------------------------------------------------------------

    def test_rotation_turns_forces_and_virial(self) -> None:
        """The energy is a scalar, of mirror images, too."""
        model = self.build()
        rotation, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))
        for matrix in (rotation, -rotation):
            for name, frame in self._structures().items():
                before = self.predict(model, frame)
                after = self.predict(model, frame.mapped(matrix))
                force = before["force"] @ matrix
                virial = matrix.T @ before["virial"].reshape(3, 3) @ matrix
                np.testing.assert_allclose(
                    after["energy"], before["energy"], rtol=1e-12, err_msg=name
                )
                np.testing.assert_allclose(after["force"], force, atol=1e-10, err_msg=name)
                np.testing.assert_allclose(
                    after["virial"].reshape(3, 3), virial, atol=1e-9, err_msg=name
                )

    def test_translation_changes_nothing(self) -> None:
        """Atoms of a periodic structure may lie outside the cell."""
        model = self.build()
        for name, frame in self._structures().items():
            translated = frame._replace(coord=frame.coord + np.array([3.1, -20.7, 0.4]))
            after = self.predict(model, translated)
            for key, value in self.predict(model, frame).items():
                np.testing.assert_allclose(
                    after[key], value, rtol=1e-10, atol=1e-9, err_msg=f"{name} {key}"
                )

    def test_permutation_permutes_the_results(self) -> None:
        """The order of atoms has no meaning."""
        model = self.build()
        for name, frame in self._structures().items():
            order = np.random.default_rng(3).permutation(len(frame.coord))
            permuted = frame._replace(coord=frame.coord[order], atype=frame.atype[order])
            before = self.predict(model, frame)
            after = self.predict(model, permuted)
            np.testing.assert_allclose(after["energy"], before["energy"], rtol=1e-12, err_msg=name)
            for key in ("atom_energy", "force"):
                np.testing.assert_allclose(
                    after[key], before[key][:, order], rtol=1e-10, atol=1e-10, err_msg=name
                )

    def test_energy_is_extensive(self) -> None:
        """Two clusters out of each other's reach, and a doubled cell, have twice the energy."""
        model = self.build()
        for name, frame in self._structures().items():
            shift = np.array([60.0, 0.0, 0.0])
            box = None
            if frame.box is not None:
                shift = frame.box[0]
                box = frame.box * np.array([[2.0], [1.0], [1.0]])
            coord = np.vstack([frame.coord, frame.coord + shift])
            doubled = Structure(coord, np.tile(frame.atype, 2), box)
            once = self.predict(model, frame)
            twice = self.predict(model, doubled)
            np.testing.assert_allclose(
                twice["energy"], 2 * once["energy"], rtol=1e-12, err_msg=name
            )
            np.testing.assert_allclose(twice["virial"], 2 * once["virial"], atol=1e-9, err_msg=name)
            np.testing.assert_allclose(
                twice["force"], np.tile(once["force"], (1, 2, 1)), atol=1e-10, err_msg=name
            )

    def test_padding_changes_nothing(self) -> None:
        """Padding atoms have no energy and no force, and real atoms do not see them."""
        model = self.build()
        frame = scattered(5, len(self.type_map), 3.5, 6)
        rows = [0, 1, 2, 2, 3, 4, 4]  # a padding atom has the position of a real one
        is_padding = np.array([False, False, True, False, False, False, True])
        atype = np.where(is_padding, -1, frame.atype[rows])
        alone = self.predict(model, frame)
        padded = self.predict(model, Structure(frame.coord[rows], atype))
        np.testing.assert_allclose(padded["energy"], alone["energy"], rtol=1e-12)
        np.testing.assert_allclose(padded["force"][:, ~is_padding], alone["force"], atol=1e-10)
        assert not padded["force"][:, is_padding].any()
        assert not padded["atom_energy"][:, is_padding].any()

    # ----- smoothness ----------------------------------------------------------------------------

    def test_smooth_at_every_cut_off(self) -> None:
        """No jump as an atom leaves, beyond what a smooth function does on the way."""
        model = self.build()

        def results_at(distance: float) -> np.ndarray:
            coord = np.array([[0.0, 0, 0], [0.9, 0.3, 0.1], [0, 0, distance]])
            results = self.predict(model, Structure(coord, np.array([0, 1, 1])))
            return np.concatenate([results["energy"], results["force"].ravel()])

        jumps = {}
        for rcut in sorted({model.rcut, *(radius for radius, _ in model.neighbors.inner)}):
            before, below, above, after = (
                results_at(rcut + shift * 1e-5) for shift in (-3, -1, 1, 3)
            )
            slope = 0.5 * (below - before) + 0.5 * (after - above)
            jumps[rcut] = np.abs(above - below - slope).max()
        assert not self.smooth or max(jumps.values()) < 1e-8, jumps

    def test_dynamics_conserve_the_energy(self) -> None:
        """Velocity Verlet: the error of the total energy falls with the square of the time step."""
        coarse = self._run_dynamics(time_step=0.14, steps=10)
        fine = self._run_dynamics(time_step=0.07, steps=20)
        assert coarse.total < 0.02 * coarse.potential
        assert fine.total < 0.4 * coarse.total + 1e-12

    def _run_dynamics(self, time_step: float, steps: int) -> _Spread:
        """Return the spread of energies in dynamics of the cluster with masses of 1."""
        model = self.build()
        frame = self._structures()["cluster"]
        velocity = 0.1 * np.random.default_rng(5).normal(size=frame.coord.shape)
        totals = []
        potentials = []
        results = self.predict(model, frame)
        for _ in range(steps):
            velocity = velocity + 0.5 * time_step * results["force"][0]
            frame = frame._replace(coord=frame.coord + time_step * velocity)
            results = self.predict(model, frame)
            velocity = velocity + 0.5 * time_step * results["force"][0]
            potential = results["energy"].item()
            potentials.append(potential)
            totals.append(potential + 0.5 * (velocity**2).sum())
        return _Spread(total=float(np.ptp(totals)), potential=float(np.ptp(potentials)))

    # ----- files ---------------------------------------------------------------------------------

    def test_a_checkpoint_gives_the_model_back(self) -> None:
        """Settings and weights return from a file; predictions are the same to the bit."""
        model = self.build()
        frame = self._structures()["triclinic"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt"
            with whole_file(path) as file:
                torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, file)
            again = load_model(path)
        assert again.settings == model.settings
        for key, value in self.predict(model, frame).items():
            np.testing.assert_array_equal(self.predict(again, frame)[key], value, err_msg=key)

    def test_a_frozen_file_gives_the_same(self) -> None:
        """`dp freeze` compares the program with the model.

        A descriptor without a scripted form is refused.
        """
        model = self.build()
        has_scripted_form = DESCRIPTORS.scripted(model.settings.descriptor) is not None
        with tempfile.TemporaryDirectory() as folder:
            try:
                difference = freeze(model, Path(folder) / "frozen.pth")
            except ModelError:
                assert not has_scripted_form
            else:
                assert has_scripted_form
                assert difference.relative < 1e-9


class _Spread(NamedTuple):
    """Largest minus smallest energy in dynamics."""

    total: float
    potential: float
