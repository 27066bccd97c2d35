"""Conformance tests of a loss: its protocol, and a run that trains, restarts and validates."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.argcheck import load
from deepmd_muon.checkpoint_file.file import read_checkpoint
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

    # ----- tests ---------------------------------------------------------------------------------

    def test_metrics_are_those_of_the_terms(self) -> None:
        """One detached number for each term, and `rmse`, the root of the loss."""
        loss = self.build()
        assert loss.terms, "a loss needs a term"
        value, metrics = loss(self.leaves(loss), self.labels(), LR_FRACTION, self.atoms())
        assert set(metrics) == {*(term.metric for term in loss.terms), "rmse"}
        for metric in metrics.values():
            assert metric.numel() == 1
            assert not metric.requires_grad
            assert metric.isfinite()
        torch.testing.assert_close(metrics["rmse"].double() ** 2, value.detach().double())
        assert value.requires_grad

    def test_gradients_are_finite_differences(self) -> None:
        """The gradient with respect to each predicted quantity."""
        loss = self.build()
        labels = self.labels()
        leaves = self.leaves(loss)

        def value_of(*tensors: Tensor) -> Tensor:
            prediction = dict(zip(leaves, tensors, strict=True))
            return loss(prediction, labels, LR_FRACTION, self.atoms())[0]

        assert torch.autograd.gradcheck(value_of, tuple(leaves.values()), fast_mode=True)

    def test_the_learning_rate_may_be_a_tensor(self) -> None:
        """A captured step keeps it on the device."""
        loss = self.build()
        labels = self.labels()
        prediction = self.prediction(loss)
        for fraction in (1.0, 0.3, 0.0):
            from_number, _ = loss(prediction, labels, fraction, self.atoms())
            tensor = torch.tensor(fraction, dtype=torch.float64)
            from_tensor, _ = loss(prediction, labels, tensor, self.atoms())
            torch.testing.assert_close(from_number, from_tensor)

    def test_missing_labels_contribute_nothing(self) -> None:
        """The metric of a term without its labels is NaN; loss and gradient are finite.

        Without any labels they are zero.
        """
        loss = self.build()
        labels = self.labels()
        leaves = self.leaves(loss)
        for term in loss.terms:
            absent: dict[str, Tensor | None] = {
                name: label for name, label in labels.items() if name not in term.labels
            }
            for partial in (absent, {**absent, **dict.fromkeys(term.labels)}):
                value, metrics = loss(leaves, partial, LR_FRACTION, self.atoms())
                assert metrics[term.metric].isnan(), term.metric
                assert value.isfinite()
        value, _ = loss(leaves, {}, LR_FRACTION, self.atoms())
        assert value.item() == 0.0
        if value.requires_grad:
            assert not any(grad.any() for grad in self.gradients(value, leaves).values())

    def test_frames_without_a_label_have_no_weight(self) -> None:
        """`find_…` says which frames have a label; the others may hold any finite number."""
        loss = self.build()
        labels = self.labels()
        leaves = self.leaves(loss)
        has_label = torch.tensor([True, False, True])
        results = []
        for filler in (0.0, 1e6):
            filled = {f"find_{name}": has_label for name in labels}
            for name, label in labels.items():
                filled[name] = label.clone()
                filled[name][1] = filler
            value, metrics = loss(leaves, filled, LR_FRACTION, self.atoms())
            for grad in self.gradients(value, leaves).values():
                assert not grad[1].any()
            results.append([value.detach(), *metrics.values()])
        for zeros, large in zip(*results, strict=True):
            torch.testing.assert_close(zeros, large, equal_nan=True)

    def test_padding_atoms_have_no_weight(self) -> None:
        """`mask` is False for padding atoms; neither labels nor predictions of them count.

        Their `atom_ener_coeff` is 0.
        """
        loss = self.build()
        labels = self.labels()
        prediction = self.prediction(loss)
        mask = torch.ones(NFRAMES, NATOMS, dtype=torch.bool)
        mask[1, 2:] = False
        labels["atom_ener_coeff"] *= mask

        def filled(tensors: Tensors, filler: float) -> Tensors:
            """Return tensors with `filler` for padding atoms."""
            changed = {}
            for name, tensor in tensors.items():
                changed[name] = tensor
                if name in ATOM_SHAPES and name != "atom_ener_coeff":
                    padding = ~mask if tensor.dim() == 2 else ~mask[..., None]
                    changed[name] = tensor.masked_fill(padding, filler)
            return changed

        results = []
        for filler in (0.0, 1e3):
            leaves = {
                name: tensor.requires_grad_() for name, tensor in filled(prediction, filler).items()
            }
            value, metrics = loss(leaves, filled(labels, filler), LR_FRACTION, self.atoms(mask))
            for name, grad in self.gradients(value, leaves).items():
                assert name not in ATOM_SHAPES or not grad[~mask].any(), name
            results.append([value.detach(), *metrics.values()])
        for zeros, large in zip(*results, strict=True):
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
            assert run(load("input.json"), log_level="ERROR", skip_neighbor_stat=True) == 0
            weights = read_checkpoint("model.ckpt-4.pt")["model"]
            header = Path("lcurve.out").read_text().splitlines()[0].split()
            for metric in (*(term.metric for term in loss.terms), "rmse"):
                assert {f"{metric}_trn", f"{metric}_val"} <= set(header), metric
            assert np.isfinite(np.loadtxt("lcurve.out")).all()
            section = json.loads(Path("out.json").read_text())["loss"]
            assert {key: section[key] for key in self.loss} == dict(self.loss)
            status = run(
                load("input.json"),
                log_level="ERROR",
                skip_neighbor_stat=True,
                restart="model.ckpt-2.pt",
            )
            assert status == 0
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

    def leaves(self, loss: Loss) -> Tensors:
        """Return a prediction that requires gradients."""
        return {name: value.requires_grad_() for name, value in self.prediction(loss).items()}

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
    def gradients(value: Tensor, leaves: Tensors) -> Tensors:
        """Return the gradient with respect to each leaf; zeros for one that the loss ignores."""
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }

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
        folder = Path("system/set.000")
        folder.mkdir(parents=True)
        np.savetxt("system/type.raw", ATYPE, fmt="%d")
        Path("system/type_map.raw").write_text("\n".join(TYPE_MAP))
        random = np.random.default_rng(4)
        corners = 1.5 * np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
        coord = corners + 0.1 * random.normal(size=(6, NATOMS, 3))
        np.save(folder / "coord.npy", coord.reshape(6, 3 * NATOMS))
        np.save(folder / "box.npy", np.tile(8.0 * np.eye(3).ravel(), (6, 1)))
        for label in labels:
            width = (
                NATOMS * math.prod(ATOM_SHAPES[label])
                if label in ATOM_SHAPES
                else math.prod(FRAME_SHAPES[label])
            )
            np.save(folder / f"{label}.npy", np.abs(0.1 * random.normal(size=(6, width))))
