"""Conformance tests of a descriptor, within an energy model with a small fitting net."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from deepmd_muon.data import Frames, build_neighbors, stack_neighbors
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.files import whole_file
from deepmd_muon.infer import load_model
from deepmd_muon.model import EnergyModel, ModelError, Structures, build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.testing.structures import Structure, scattered, structures

Results = dict[str, np.ndarray]
#: Offsets and weights of the central difference of fourth order.
STENCIL = ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12))


class DescriptorChecks:
    """Tests that every descriptor of an energy model has to pass.

    Pytest collects them from a derived class.

    The descriptor should compute in float64, and its `sel` should hold all neighbours within its
    cut-off radius, of up to 0.08 atoms/Å³: where neighbours are left out, no energy is smooth.

    Attributes
    ----------
    descriptor
        The section `model/descriptor` of an input.
    fitting_net
        The section `model/fitting_net`.
    type_map
        Element names; at least two.
    smooth
        Whether energy and forces are continuous where an atom crosses a cut-off radius.
    """

    descriptor: ClassVar[Mapping[str, Any]] = {}
    fitting_net: ClassVar[Mapping[str, Any]] = {"type": "ener", "neuron": [8, 8], "seed": 2}
    type_map: ClassVar[Sequence[str]] = ("O", "H")
    smooth: ClassVar[bool] = True

    def build(self) -> EnergyModel:
        """Return the model under test: seeded weights, the same statistics and energy biases in every call."""
        sections = {"descriptor": dict(self.descriptor), "fitting_net": dict(self.fitting_net)}
        torch.manual_seed(1)
        model = build_model({"type_map": list(self.type_map), **sections})
        of_types = 1.0 + 0.1 * torch.arange(model.ntypes, dtype=torch.float64)[:, None]
        mean, stddev = torch.tensor([[0.02, 0.0, 0.0, 0.0]]), torch.tensor([[0.2, 0.1, 0.1, 0.1]])
        model.set_statistics(mean * of_types, stddev * of_types)
        model.set_energy_bias([-3.0 + kind for kind in range(model.ntypes)])
        return model

    def batch(self, model: EnergyModel, *frames: Structure) -> Structures:
        """Return frames of equally many atoms, all with or all without a cell, with all their neighbours."""
        request, ntypes = model.neighbors, model.ntypes
        parts = []
        for frame in frames:
            given = frame.coord, frame.box, frame.atype, request.rcut
            found = build_neighbors(*given, None, model.by_type, ntypes).sections
            if sum(found) > sum(request.sel) or (
                model.by_type and np.any(np.greater(found, request.sel))
            ):
                raise ValueError(
                    f"an atom has {found} neighbours, sel holds {tuple(request.sel)}: test a "
                    "larger sel"
                )
            parts.append(build_neighbors(*given, request.sel, model.by_type, ntypes, request.inner))
        box = (
            None
            if frames[0].box is None
            else np.stack([frame.box for frame in frames if frame.box is not None])
        )
        arrays = (
            np.stack([f.atype for f in frames]).astype(np.int32),
            np.stack([f.coord for f in frames]),
        )
        return Structures.of(Frames(*arrays, box), stack_neighbors(parts), ntypes)

    def predict(self, model: EnergyModel, *frames: Structure) -> Results:
        """Return energy, forces, virial and atomic energies of frames."""
        with torch.no_grad():
            found = model(self.batch(model, *frames), force=True, virial=True)
        return {key: value.double().numpy() for key, value in found.items()}

    def _structures(self) -> dict[str, Structure]:
        return structures(len(self.type_map))

    def _cluster(self) -> Structure:
        return self._structures()["cluster"]

    def test_forces_are_the_negative_slope_of_the_energy(self) -> None:
        """Compare forces with finite differences; their sum over atoms is zero."""
        model = self.build()
        for name, frame in self._structures().items():
            force = self.predict(model, frame)["force"][0]
            for atom, axis in ((0, 0), (1, 2), (len(frame.coord) - 1, 1)):
                moved = [frame.moved(atom, axis, 1e-4 * step) for step, _ in STENCIL]
                slope = self._slope([self.predict(model, x)["energy"][0] for x in moved], 1e-4)
                assert abs(force[atom, axis] + slope) < 1e-8, (name, atom, axis)
            np.testing.assert_allclose(force.sum(0), 0.0, atol=1e-10, err_msg=name)
        assert np.abs(self.predict(model, self._cluster())["force"]).max() > 1e-6, (
            "no force depends on a position"
        )

    def test_virial_is_the_negative_slope_against_strain(self) -> None:
        """Compare the virial with finite differences; it is symmetric."""
        model = self.build()
        for name, frame in self._structures().items():
            virial = self.predict(model, frame)["virial"].reshape(3, 3)
            for a, b in ((0, 0), (1, 1), (0, 2), (2, 1)):
                strained = []
                for step, _ in STENCIL:
                    strain = np.eye(3)
                    strain[b, a] += 1e-4 * step  # rows are vectors: x_a grows by x_b
                    strained.append(frame.mapped(strain))
                slope = self._slope([self.predict(model, x)["energy"][0] for x in strained], 1e-4)
                assert abs(virial[a, b] + slope) < 1e-6, (name, a, b)
            np.testing.assert_allclose(virial, virial.T, atol=1e-9, err_msg=name)

    @staticmethod
    def _slope(values: Sequence[float], step: float) -> float:
        return (
            float(sum(weight * value for (_, weight), value in zip(STENCIL, values, strict=True)))
            / step
        )

    def test_rotation_turns_forces_and_virial(self) -> None:
        """The energy is a scalar, of mirror images, too."""
        model = self.build()
        turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))
        for matrix in (turn, -turn):
            for name, frame in self._structures().items():
                before, after = (
                    self.predict(model, frame),
                    self.predict(model, frame.mapped(matrix)),
                )
                virial = matrix.T @ before["virial"].reshape(3, 3) @ matrix
                np.testing.assert_allclose(
                    after["energy"], before["energy"], rtol=1e-12, err_msg=name
                )
                np.testing.assert_allclose(
                    after["force"], before["force"] @ matrix, atol=1e-10, err_msg=name
                )
                np.testing.assert_allclose(
                    after["virial"].reshape(3, 3), virial, atol=1e-9, err_msg=name
                )

    def test_translation_changes_nothing(self) -> None:
        """Atoms of a periodic structure may lie outside the cell."""
        model = self.build()
        for name, frame in self._structures().items():
            moved = frame._replace(coord=frame.coord + np.array([3.1, -20.7, 0.4]))
            before, after = self.predict(model, frame), self.predict(model, moved)
            for key, value in before.items():
                np.testing.assert_allclose(
                    after[key], value, rtol=1e-10, atol=1e-9, err_msg=f"{name} {key}"
                )

    def test_permutation_permutes_the_results(self) -> None:
        """The order of atoms has no meaning."""
        model = self.build()
        for name, frame in self._structures().items():
            order = np.random.default_rng(3).permutation(len(frame.coord))
            before = self.predict(model, frame)
            after = self.predict(
                model, frame._replace(coord=frame.coord[order], atype=frame.atype[order])
            )
            np.testing.assert_allclose(after["energy"], before["energy"], rtol=1e-12, err_msg=name)
            for key in ("atom_energy", "force"):
                np.testing.assert_allclose(
                    after[key], before[key][:, order], rtol=1e-10, atol=1e-10, err_msg=name
                )

    def test_energy_is_extensive(self) -> None:
        """Two clusters out of each other's reach, and a doubled cell, have twice the energy."""
        model = self.build()
        for name, frame in self._structures().items():
            away = np.array([60.0, 0.0, 0.0]) if frame.box is None else frame.box[0]
            box = None if frame.box is None else frame.box * np.array([[2.0], [1.0], [1.0]])
            twice = Structure(
                np.vstack([frame.coord, frame.coord + away]), np.tile(frame.atype, 2), box
            )
            one, two = self.predict(model, frame), self.predict(model, twice)
            np.testing.assert_allclose(two["energy"], 2 * one["energy"], rtol=1e-12, err_msg=name)
            np.testing.assert_allclose(two["virial"], 2 * one["virial"], atol=1e-9, err_msg=name)
            np.testing.assert_allclose(
                two["force"], np.tile(one["force"], (1, 2, 1)), atol=1e-10, err_msg=name
            )

    def test_smooth_at_every_cut_off(self) -> None:
        """No jump where an atom leaves, beyond what a smooth function does on the way."""
        model = self.build()

        def at(distance: float) -> np.ndarray:
            coord = np.array([[0.0, 0, 0], [0.9, 0.3, 0.1], [0, 0, distance]])
            found = self.predict(model, Structure(coord, np.array([0, 1, 1])))
            return np.concatenate([found["energy"], found["force"].ravel()])

        jumps = {}
        for rcut in sorted({model.rcut, *(radius for radius, _ in model.neighbors.inner)}):
            before, below, above, after = (at(rcut + shift * 1e-5) for shift in (-3, -1, 1, 3))
            jumps[rcut] = np.abs(
                above - below - 0.5 * (below - before) - 0.5 * (after - above)
            ).max()
        assert not self.smooth or max(jumps.values()) < 1e-8, jumps

    def test_dynamics_conserve_the_energy(self) -> None:
        """Velocity Verlet: the error of the total energy falls with the square of the time step."""
        model, start = self.build(), self._cluster()
        kick = 0.1 * np.random.default_rng(5).normal(size=start.coord.shape)

        def spread(dt: float, steps: int) -> tuple[float, float]:
            x, v, totals, potentials = start.coord.copy(), kick.copy(), [], []
            found = self.predict(model, start)
            for _ in range(steps):
                v = v + 0.5 * dt * found["force"][0]
                x = x + dt * v
                found = self.predict(model, start._replace(coord=x))
                v = v + 0.5 * dt * found["force"][0]
                potentials.append(found["energy"].item())
                totals.append(potentials[-1] + 0.5 * (v**2).sum())
            return float(np.ptp(totals)), float(np.ptp(potentials))

        coarse, exchanged = spread(0.14, 10)
        fine, _ = spread(0.07, 20)
        assert coarse < 0.02 * exchanged
        assert fine < 0.4 * coarse + 1e-12

    def test_gradients_of_a_force_loss_are_finite_differences(self) -> None:
        """Second derivatives: the slope of a loss of energy, forces and virial along a direction of all parameters."""
        model, frames = self.build(), list(self._structures().values())[:2]
        parameters = [p for p in model.parameters() if p.requires_grad]
        random = torch.Generator().manual_seed(7)
        along = [
            torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)
            for p in parameters
        ]

        def loss() -> torch.Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for frame in frames:
                out = model(self.batch(model, frame), force=True, virial=True)
                weights = torch.linspace(0.5, 1.5, out["force"].numel(), dtype=torch.float64)
                total = (
                    total
                    + 0.1 * out["energy"].sum()
                    + (weights * out["force"].flatten()).square().sum()
                )
                total = total + 0.1 * out["virial"].square().sum()
            return total

        gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
        found = sum(
            float((g * d).sum()) for g, d in zip(gradients, along, strict=True) if g is not None
        )
        values = []
        with torch.no_grad():
            for before, (step, _) in zip(
                (0, *(s for s, _ in STENCIL)), (*STENCIL, (0, 0.0)), strict=True
            ):
                for p, d in zip(parameters, along, strict=True):
                    p.add_(d, alpha=1e-4 * (step - before))
                values.append(float(loss()))
        assert abs(found - self._slope(values[:-1], 1e-4)) < 1e-6 * (1.0 + abs(found))

    def test_gradients_are_finite_at_the_edges(self) -> None:
        """Isolated atoms, padded atoms and slots, three atoms on a line: no root or division at zero."""
        model = self.build()
        line = np.array([[0.0, 0, 0], [0, 0, 1.3], [0, 0, 2.6], [40.0, 0, 0], [0, 0, 0]])
        padded = Structure(line, np.array([0, 1, 1, 0, -1]))
        out = model(
            self.batch(model, padded, Structure(line[::-1].copy(), padded.atype[::-1].copy())),
            virial=True,
        )
        (
            out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()
        ).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all(g.isfinite().all() for g in gradients)
        assert not self.predict(model, Structure(np.zeros((1, 3)), np.array([1])))["force"].any()

    def test_padding_changes_nothing(self) -> None:
        """Padding atoms have no energy and no force, and real atoms do not see them."""
        model, frame = self.build(), scattered(5, len(self.type_map), 3.5, 6)
        rows = [0, 1, 2, 2, 3, 4, 4]
        atype = np.where([False, False, True, False, False, False, True], -1, frame.atype[rows])
        real = atype >= 0
        alone, padded = (
            self.predict(model, frame),
            self.predict(model, Structure(frame.coord[rows], atype)),
        )
        np.testing.assert_allclose(padded["energy"], alone["energy"], rtol=1e-12)
        np.testing.assert_allclose(padded["force"][:, real], alone["force"], atol=1e-10)
        assert not padded["force"][:, ~real].any()
        assert not padded["atom_energy"][:, ~real].any()

    def test_a_checkpoint_gives_the_model_back(self) -> None:
        """Settings and weights return from a file; predictions are the same to the bit."""
        model, frame = self.build(), self._structures()["triclinic"]
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
        scripted = DESCRIPTORS.scripted(model.settings.descriptor) is not None
        with tempfile.TemporaryDirectory() as folder:
            try:
                difference = freeze(model, Path(folder) / "frozen.pth")
            except ModelError:
                assert not scripted
            else:
                assert scripted
                assert difference.relative < 1e-9
