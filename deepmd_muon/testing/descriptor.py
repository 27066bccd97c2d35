"""Conformance tests of a descriptor, within an energy model with a small fitting net."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

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

# Steps of finite differences.
STEPS = (-2e-4, -1e-4, 1e-4, 2e-4)


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

    def predict(self, model: EnergyModel, frame: Structure) -> Results:
        """Return energy, forces, virial and atomic energies of a frame."""
        with torch.no_grad():
            out = model(_batch(model, frame))
        return {key: value.double().numpy() for key, value in out.items()}

    def _energy(self, model: EnergyModel, frame: Structure) -> float:
        return float(self.predict(model, frame)["energy"].item())

    def _predictions(self, model: EnergyModel) -> Iterator[tuple[Structure, Results]]:
        for frame in structures(len(self.type_map)):
            yield frame, self.predict(model, frame)

    # ----- derivatives ---------------------------------------------------------------------------

    def test_forces_are_the_negative_slope_of_the_energy(self) -> None:
        """Compare forces with finite differences along a random displacement of all atoms."""
        model = self.build()
        for frame, before in self._predictions(model):
            direction = np.random.default_rng(1).normal(size=frame.coord.shape)
            energies = [self._energy(model, frame.displaced(h * direction)) for h in STEPS]
            work = (before["force"] * direction).sum()
            assert abs(work + _slope(energies)) < 1e-8, frame.name
            assert before["force"].any() or frame.box is not None, "no force depends on a position"

    def test_virial_is_the_negative_slope_against_strain(self) -> None:
        """Compare the virial with finite differences along a random strain."""
        model = self.build()
        strain = np.random.default_rng(1).normal(size=(3, 3))
        for frame, before in self._predictions(model):
            # Rows are vectors: x_a grows by h · strain_ab x_b.
            strained = [frame.mapped(np.eye(3) + h * strain.T) for h in STEPS]
            energies = [self._energy(model, changed) for changed in strained]
            work = (before["virial"].reshape(3, 3) * strain).sum()
            assert abs(work + _slope(energies)) < 1e-6, frame.name

    def test_gradients_of_a_force_loss_are_finite_differences(self) -> None:
        """Compare second derivatives with the slope of a loss of energy, forces and virial.

        The slope is that along a random direction in the space of all parameters.
        """
        model = self.build()
        frames = structures(len(self.type_map))[:2]
        parameters = [p for p in model.parameters() if p.requires_grad]
        origin = [p.detach().clone() for p in parameters]
        generator = torch.Generator().manual_seed(7)
        direction = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]

        def loss() -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for frame in frames:
                out = model(_batch(model, frame))
                force = out["force"].flatten()
                weights = torch.linspace(0.5, 1.5, force.numel(), dtype=torch.float64)
                total = total + 0.1 * out["energy"].sum()
                total = total + (weights * force).square().sum()
                total = total + 0.1 * out["virial"].square().sum()
            return total

        grads = torch.autograd.grad(loss(), parameters, materialize_grads=True)
        derivative = sum(
            (grad * along).sum().item() for grad, along in zip(grads, direction, strict=True)
        )
        losses = []
        for h in STEPS:
            with torch.no_grad():
                for p, start, along in zip(parameters, origin, direction, strict=True):
                    p.copy_(start + h * along)
                losses.append(loss().item())
        assert abs(derivative - _slope(losses)) < 1e-6 * (1.0 + abs(derivative))

    def test_gradients_are_finite_at_the_edges(self) -> None:
        """Test isolated atoms, padded atoms and slots, and three atoms on a line.

        None may lead to a root or a division at zero.
        """
        model = self.build()
        line = np.array([[0.0, 0, 0], [0, 0, 1.3], [0, 0, 2.6], [40.0, 0, 0], [0, 0, 0]])
        frame = Structure("line", line, np.array([0, 1, 1, 0, -1]))
        for ordered in (frame, frame.rows(np.arange(5)[::-1])):
            out = model(_batch(model, ordered))
            loss = out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()
            loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        assert all(grad.isfinite().all() for grad in grads)
        assert not self.predict(model, scattered("atom", 1, 1, 1.0, 1))["force"].any()

    # ----- symmetries ----------------------------------------------------------------------------

    def test_rotation_turns_forces_and_virial(self) -> None:
        """The energy is a scalar, of mirror images, too."""
        model = self.build()
        rotation, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))
        for frame, before in self._predictions(model):
            for matrix in (rotation, -rotation):
                virial = matrix.T @ before["virial"].reshape(3, 3) @ matrix
                _assert_close(
                    self.predict(model, frame.mapped(matrix)),
                    {**before, "force": before["force"] @ matrix, "virial": virial.reshape(1, 9)},
                    frame.name,
                )

    def test_translation_changes_nothing(self) -> None:
        """Atoms of a periodic structure may lie outside the cell."""
        model = self.build()
        for frame, before in self._predictions(model):
            translated = frame.displaced(np.array([3.1, -20.7, 0.4]))
            _assert_close(self.predict(model, translated), before, frame.name)

    def test_permutation_permutes_the_results(self) -> None:
        """The order of atoms has no meaning."""
        model = self.build()
        for frame, before in self._predictions(model):
            order = np.random.default_rng(3).permutation(len(frame.coord))
            of_atoms = {key: before[key][:, order] for key in ("atom_energy", "force")}
            after = self.predict(model, frame.rows(order))
            _assert_close(after, {**before, **of_atoms}, frame.name)

    def test_energy_is_extensive(self) -> None:
        """Two clusters out of each other's reach, and a doubled cell, have twice the energy."""
        model = self.build()
        for frame, before in self._predictions(model):
            shift = np.array([60.0, 0.0, 0.0])
            box = None
            if frame.box is not None:
                shift = frame.box[0]
                box = frame.box * np.array([[2.0], [1.0], [1.0]])
            coord = np.vstack([frame.coord, frame.coord + shift])
            doubled = Structure(frame.name, coord, np.tile(frame.atype, 2), box)
            expected = {
                "energy": 2 * before["energy"],
                "virial": 2 * before["virial"],
                "force": np.tile(before["force"], (1, 2, 1)),
            }
            _assert_close(self.predict(model, doubled), expected, frame.name)

    def test_padding_changes_nothing(self) -> None:
        """Padding atoms have no energy and no force, and real atoms do not see them."""
        model = self.build()
        frame = scattered("padded", 5, len(self.type_map), edge=3.5, seed=6)
        padded = frame.rows(np.array([0, 1, 2, 2, 3, 4, 4]))
        is_padding = np.array([0, 0, 1, 0, 0, 0, 1], dtype=bool)  # at the positions of real atoms
        padded = padded._replace(atype=np.where(is_padding, -1, padded.atype))
        before = self.predict(model, frame)
        after = self.predict(model, padded)
        for key in ("atom_energy", "force"):
            assert not after[key][:, is_padding].any()
            after[key] = after[key][:, ~is_padding]
        _assert_close(after, before, frame.name)

    # ----- smoothness ----------------------------------------------------------------------------

    def test_smooth_at_every_cut_off(self) -> None:
        """No jump as an atom leaves, beyond what a smooth function does on the way."""
        model = self.build()

        def results_at(distance: float) -> np.ndarray:
            coord = np.array([[0.0, 0, 0], [0.9, 0.3, 0.1], [0, 0, distance]])
            results = self.predict(model, Structure("leaving", coord, np.array([0, 1, 1])))
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
        model = self.build()
        potential, coarse = self._energy_spreads(model, time_step=0.14, steps=10)
        _, fine = self._energy_spreads(model, time_step=0.07, steps=20)
        assert coarse < 0.02 * potential
        assert fine < 0.4 * coarse + 1e-12

    def _energy_spreads(
        self, model: EnergyModel, time_step: float, steps: int
    ) -> tuple[float, float]:
        """Return the spreads of potential and total energy in dynamics of a cluster of mass 1."""
        frame = structures(len(self.type_map))[0]
        velocity = 0.1 * np.random.default_rng(5).normal(size=frame.coord.shape)
        results = self.predict(model, frame)
        potential = np.zeros(steps)
        kinetic = np.zeros(steps)
        for k in range(steps):
            velocity += 0.5 * time_step * results["force"][0]
            frame = frame.displaced(time_step * velocity)
            results = self.predict(model, frame)
            velocity += 0.5 * time_step * results["force"][0]
            potential[k] = results["energy"].item()
            kinetic[k] = 0.5 * (velocity**2).sum()
        return float(np.ptp(potential)), float(np.ptp(potential + kinetic))

    # ----- files ---------------------------------------------------------------------------------

    def test_a_checkpoint_gives_the_model_back(self) -> None:
        """Settings and weights return from a file; predictions are the same to the bit."""
        model = self.build()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt"
            with whole_file(path) as file:
                torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, file)
            again = load_model(path)
        assert again.settings == model.settings
        for frame, before in self._predictions(model):
            _assert_close(self.predict(again, frame), before, frame.name, rtol=0, atol=0)

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


def _batch(model: EnergyModel, frame: Structure) -> Structures:
    """Return a batch of one frame with all its neighbours."""
    request = model.neighbors
    geometry = (frame.coord, frame.box, frame.atype, request.rcut)
    counts = build_neighbors(*geometry, None, model.by_type, model.ntypes).sections
    too_many_of_type = model.by_type and np.any(np.greater(counts, request.sel))
    if sum(counts) > sum(request.sel) or too_many_of_type:
        raise ValueError(
            f"an atom has {counts} neighbours, sel holds {tuple(request.sel)}: test a larger sel"
        )
    neighbors = build_neighbors(
        *geometry, request.sel, model.by_type, model.ntypes, inner=request.inner
    )
    box = None if frame.box is None else frame.box[None]
    frames = Frames(frame.atype[None].astype(np.int32), frame.coord[None], box)
    return Structures.of(frames, stack_neighbors([neighbors]), model.ntypes)


def _slope(values: Sequence[float]) -> float:
    """Return the derivative at 0 from values at `STEPS`: a central difference of fourth order."""
    far_before, before, after, far_after = values
    return (8 * (after - before) - (far_after - far_before)) / (12 * STEPS[2])


def _assert_close(
    actual: Results, expected: Results, name: str, *, rtol: float = 1e-12, atol: float = 1e-10
) -> None:
    for key, value in expected.items():
        message = f"{name} {key}"
        np.testing.assert_allclose(actual[key], value, rtol=rtol, atol=atol, err_msg=message)
