"""Conformance tests of a loss: its protocol, and a run that trains, restarts and validates."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.argcheck import load
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.data import MemoryStore, System
from deepmd_muon.data.writing import write_npy
from deepmd_muon.files import working_folder
from deepmd_muon.loss import ComparedAtoms, Loss, build_loss, check_labels
from deepmd_muon.train import run

Tensors = dict[str, Tensor]
TYPE_MAP = ("O", "H")
ATYPE = (0, 1, 1, 0)
NFRAMES = 3
NATOMS = len(ATYPE)
LR_FRACTION = 0.3  # of start_lr; it sets the prefactors of the terms

# Shapes per frame and per atom of everything that may be predicted or compared.
FRAME_SHAPES: dict[str, tuple[int, ...]] = {"energy": (), "virial": (9,)}
ATOM_SHAPES: dict[str, tuple[int, ...]] = {
    "force": (3,),
    "atom_energy": (),
    "atom_ener": (),
    "atom_pref": (),
    "atom_ener_coeff": (),
}
LABELS = ("energy", "force", "virial", "atom_ener", "atom_pref", "atom_ener_coeff")


class NamedLabels(NamedTuple):
    """A system as `check_labels` sees it."""

    name: str
    labels: frozenset[str]


class Evaluated(NamedTuple):
    """A loss of a prediction, and its gradients."""

    value: Tensor
    metrics: Tensors
    grads: Tensors  # by predicted quantity; zeros for one that the loss ignores

    @property
    def numbers(self) -> list[Tensor]:
        """Value and metrics."""
        return [self.value.detach(), *self.metrics.values()]


class LossChecks:
    """Tests that every loss has to pass; pytest collects them from a derived class.

    Attributes
    ----------
    loss
        The section `loss` of an input.
    """

    loss: ClassVar[Mapping[str, Any]] = {}

    def build(self) -> Loss:
        """Return the loss under test."""
        return build_loss(dict(self.loss), TYPE_MAP)

    def evaluate(
        self,
        loss: Loss,
        prediction: Tensors,
        labels: Mapping[str, Tensor | None],
        atoms: ComparedAtoms,
    ) -> Evaluated:
        """Evaluate a loss with its gradients."""
        leaves = {name: x.clone().requires_grad_() for name, x in prediction.items()}
        value, metrics = loss(leaves, labels, LR_FRACTION, atoms)
        grads: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if value.requires_grad:
            grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        return Evaluated(value, metrics, dict(zip(leaves, grads, strict=True)))

    # ----- tests ---------------------------------------------------------------------------------

    def test_metrics_are_those_of_the_terms(self) -> None:
        """One detached number for each term, and `rmse`, the root of the loss."""
        loss = self.build()
        assert loss.terms, "a loss needs a term"
        result = self.evaluate(loss, self.prediction(loss), self.labels(), self.atoms())
        metrics = result.metrics
        assert set(metrics) == {*(term.metric for term in loss.terms), "rmse"}
        for metric in metrics.values():
            assert metric.numel() == 1
            assert not metric.requires_grad
            assert metric.isfinite()
        torch.testing.assert_close(metrics["rmse"].double() ** 2, result.value.detach().double())
        assert result.value.requires_grad

    def test_gradients_are_finite_differences(self) -> None:
        """The gradient with respect to each predicted quantity."""
        loss = self.build()
        labels = self.labels()
        leaves = {name: x.requires_grad_() for name, x in self.prediction(loss).items()}

        def value_of(*tensors: Tensor) -> Tensor:
            prediction = dict(zip(leaves, tensors, strict=True))
            return loss(prediction, labels, LR_FRACTION, self.atoms())[0]

        assert torch.autograd.gradcheck(value_of, tuple(leaves.values()), fast_mode=True)

    def test_the_learning_rate_may_be_a_tensor(self) -> None:
        """A captured step keeps it on the device."""
        loss = self.build()
        arguments = self.prediction(loss), self.labels()
        for fraction in (1.0, 0.3, 0.0):
            from_number, _ = loss(*arguments, fraction, self.atoms())
            tensor = torch.tensor(fraction, dtype=torch.float64)
            from_tensor, _ = loss(*arguments, tensor, self.atoms())
            torch.testing.assert_close(from_number, from_tensor)

    def test_missing_labels_contribute_nothing(self) -> None:
        """The metric of a term without its labels is NaN; loss and gradient are finite.

        Without any labels they are zero.
        """
        loss = self.build()
        prediction = self.prediction(loss)
        for term in loss.terms:
            absent: dict[str, Tensor | None] = {
                name: label for name, label in self.labels().items() if name not in term.labels
            }
            for partial in (absent, {**absent, **dict.fromkeys(term.labels)}):
                result = self.evaluate(loss, prediction, partial, self.atoms())
                assert result.metrics[term.metric].isnan(), term.metric
                assert result.value.isfinite()
                assert all(grad.isfinite().all() for grad in result.grads.values())
        result = self.evaluate(loss, prediction, {}, self.atoms())
        assert result.value.item() == 0.0
        assert not any(grad.any() for grad in result.grads.values())

    def test_frames_without_a_label_have_no_weight(self) -> None:
        """`find_…` says which frames have a label; the others may hold any finite number."""
        loss = self.build()
        has_label = torch.tensor([True, False, True])
        numbers = []
        for filler in (0.0, 1e6):
            labels = self.labels()
            for label in labels.values():
                label[1] = filler
            labels |= {f"find_{name}": has_label for name in labels}
            result = self.evaluate(loss, self.prediction(loss), labels, self.atoms())
            assert not any(grad[1].any() for grad in result.grads.values())
            numbers.append(result.numbers)
        for zeros, large in zip(*numbers, strict=True):
            torch.testing.assert_close(zeros, large, equal_nan=True)

    def test_padding_atoms_have_no_weight(self) -> None:
        """`mask` is False for padding atoms; neither labels nor predictions of them count.

        Their `atom_ener_coeff` is 0.
        """
        loss = self.build()
        mask = torch.ones(NFRAMES, NATOMS, dtype=torch.bool)
        mask[1, 2:] = False
        numbers = []
        for filler in (0.0, 1e3):
            prediction = self.prediction(loss)
            labels = self.labels()
            for name, tensor in (*prediction.items(), *labels.items()):
                if name in ATOM_SHAPES:
                    tensor[~mask] = 0.0 if name == "atom_ener_coeff" else filler
            result = self.evaluate(loss, prediction, labels, self.atoms(mask))
            for name, grad in result.grads.items():
                assert name not in ATOM_SHAPES or not grad[~mask].any(), name
            numbers.append(result.numbers)
        for zeros, large in zip(*numbers, strict=True):
            torch.testing.assert_close(zeros, large)

    def test_a_system_without_its_labels_is_reported(self) -> None:
        """Before the first step, not after a run that taught nothing."""
        loss = self.build()
        complete = NamedLabels("complete", self._needed_labels(loss))
        bare = NamedLabels("bare", frozenset())
        assert not any(check_labels(loss, [complete]))
        assert check_labels(loss, [complete, bare]).errors

    def test_a_run_writes_its_columns_and_restarts(self) -> None:
        """Every metric is a column of `lcurve.out`; a restart ends with the very same weights."""
        loss = self.build()
        with tempfile.TemporaryDirectory() as folder, working_folder(folder):
            self._write_system(self._needed_labels(loss))
            Path("input.json").write_text(json.dumps(self._input()))
            options: dict[str, Any] = {"log_level": "ERROR", "skip_neighbor_stat": True}
            assert run(load("input.json"), **options) == 0
            weights = read_checkpoint("model.ckpt-4.pt")["model"]
            header = Path("lcurve.out").read_text().splitlines()[0].split()
            for metric in (*(term.metric for term in loss.terms), "rmse"):
                assert {f"{metric}_trn", f"{metric}_val"} <= set(header), metric
            assert np.isfinite(np.loadtxt("lcurve.out")).all()
            section = json.loads(Path("out.json").read_text())["loss"]
            assert {key: section[key] for key in self.loss} == dict(self.loss)
            assert run(load("input.json"), restart="model.ckpt-2.pt", **options) == 0
            again = read_checkpoint("model.ckpt-4.pt")["model"]
            tensors = [name for name, value in weights.items() if isinstance(value, Tensor)]
            assert tensors
            assert all(torch.equal(weights[name], again[name]) for name in tensors)

    # ----- what the tests share ------------------------------------------------------------------

    @staticmethod
    def draw(seed: int, names: Iterable[str]) -> Tensors:
        """Return random values of quantities by name, float64, per frame or per frame and atom."""
        random = torch.Generator().manual_seed(seed)
        shapes = {name: (NFRAMES, *shape) for name, shape in FRAME_SHAPES.items()}
        shapes |= {name: (NFRAMES, NATOMS, *shape) for name, shape in ATOM_SHAPES.items()}
        return {
            name: torch.randn(shapes[name], generator=random, dtype=torch.float64) for name in names
        }

    def prediction(self, loss: Loss) -> Tensors:
        """Return a prediction of the quantities that the loss needs."""
        names = ["energy", "atom_energy"]
        if loss.needs_force:
            names.append("force")
        if loss.needs_virial:
            names.append("virial")
        return self.draw(1, names)

    def labels(self) -> Tensors:
        """Return every label."""
        labels = self.draw(2, LABELS)
        return {**labels, "atom_pref": labels["atom_pref"].abs()}

    @staticmethod
    def atoms(mask: Tensor | None = None) -> ComparedAtoms:
        """Return the atoms of all frames, with padding outside of `mask`."""
        atype = torch.tensor(ATYPE).repeat(NFRAMES, 1)
        if mask is not None:
            atype = atype.masked_fill(~mask, -1)
        return ComparedAtoms(atype, mask)

    @staticmethod
    def _needed_labels(loss: Loss) -> frozenset[str]:
        return frozenset().union(*(term.labels for term in loss.terms))

    def _input(self) -> dict[str, Any]:
        descriptor = {
            "type": "se_e2_a",
            "rcut": 4.0,
            "rcut_smth": 1.0,
            "sel": [8, 8],
            "neuron": [2, 4],
            "axis_neuron": 2,
            "seed": 1,
        }
        data = {"systems": ["system"], "batch_size": 2}
        return {
            "model": {
                "type_map": list(TYPE_MAP),
                "descriptor": descriptor,
                "fitting_net": {"neuron": [4, 4], "seed": 2},
            },
            "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4},
            "loss": dict(self.loss),
            "optimizer": {"type": "Adam"},
            "training": {
                "training_data": data,
                "validation_data": data,
                "numb_steps": 4,
                "disp_freq": 1,
                "save_freq": 2,
                "seed": 3,
            },
        }

    def _write_system(self, labels: frozenset[str]) -> None:
        """Write six frames of four atoms with these labels to the folder `system`."""
        random = np.random.default_rng(4)
        corners = 1.5 * np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
        coord = corners + 0.1 * random.normal(size=(6, NATOMS, 3))
        arrays = {"coord": coord.reshape(6, -1), "box": np.tile(8.0 * np.eye(3).ravel(), (6, 1))}
        for label in sorted(labels):
            shape = (NATOMS, *ATOM_SHAPES[label]) if label in ATOM_SHAPES else FRAME_SHAPES[label]
            arrays[label] = np.abs(0.1 * random.normal(size=(6, math.prod(shape))))
        symbols = [TYPE_MAP[kind] for kind in ATYPE]
        write_npy([System(MemoryStore("system", symbols, [arrays], pbc=True))], Path("system"))
