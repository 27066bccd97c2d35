"""Conformance tests of a loss: the protocol `deepmd_muon.loss.Loss`, and a run that trains, restarts and validates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from deepmd_muon.argcheck import load
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.files import working_folder
from deepmd_muon.loss import ComparedAtoms, Loss, build_loss, check_labels
from deepmd_muon.train import run

Tensors = dict[str, torch.Tensor]
TYPE_MAP = ("O", "H")
FRAMES, ATOMS = 3, 4
# Widths per frame and per atom of everything that may be predicted or compared.
OF_FRAMES = {"energy": (), "virial": (9,)}
OF_ATOMS = {
    "force": (3,),
    "atom_energy": (),
    "atom_ener": (),
    "atom_pref": (),
    "atom_ener_coeff": (),
}


class Named(NamedTuple):
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

    @staticmethod
    def atoms(mask: torch.Tensor | None = None) -> ComparedAtoms:
        """Return atoms of two types, those outside of `mask` as padding."""
        atype = torch.tensor([0, 1, 1, 0]).repeat(FRAMES, 1)
        if mask is not None:
            atype = atype.masked_fill(~mask, -1)
        return ComparedAtoms(atype, mask)

    @staticmethod
    def draw(seed: int, names: Iterator[str] | tuple[str, ...]) -> Tensors:
        """Return random values of quantities by name, float64."""
        random = torch.Generator().manual_seed(seed)
        shapes = {name: (FRAMES, *width) for name, width in OF_FRAMES.items()}
        shapes |= {name: (FRAMES, ATOMS, *width) for name, width in OF_ATOMS.items()}
        return {
            name: torch.randn(shapes[name], generator=random, dtype=torch.float64) for name in names
        }

    def predicted(self, loss: Loss) -> Tensors:
        """Return a prediction of the quantities that the loss needs."""
        names = (
            "energy",
            "atom_energy",
            *["force"] * loss.needs_force,
            *["virial"] * loss.needs_virial,
        )
        return self.draw(1, names)

    def labelled(self) -> Tensors:
        """Return every label."""
        label = self.draw(
            2, ("energy", "force", "virial", "atom_ener", "atom_pref", "atom_ener_coeff")
        )
        return {**label, "atom_pref": label["atom_pref"].abs()}

    @staticmethod
    def gradients(value: torch.Tensor, leaves: Tensors) -> Tensors:
        """Return the gradient with respect to each leaf; zeros where the loss does not use it."""
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), found, strict=True)
        }

    def test_metrics_are_those_of_the_terms(self) -> None:
        """One detached number for each term, and `rmse`, the root of the loss."""
        loss = self.build()
        assert loss.terms, "a loss needs a term"
        leaves = {name: value.requires_grad_() for name, value in self.predicted(loss).items()}
        value, metrics = loss(leaves, self.labelled(), 0.3, self.atoms())
        assert set(metrics) == {*(term.metric for term in loss.terms), "rmse"}
        assert all(metric.numel() == 1 and not metric.requires_grad for metric in metrics.values())
        assert all(metric.isfinite() for metric in metrics.values())
        torch.testing.assert_close(metrics["rmse"].double() ** 2, value.detach().double())
        assert value.requires_grad

    def test_gradients_are_finite_differences(self) -> None:
        """The gradient with respect to each predicted quantity."""
        loss, label = self.build(), self.labelled()
        leaves = {name: value.requires_grad_() for name, value in self.predicted(loss).items()}

        def value(*given: torch.Tensor) -> torch.Tensor:
            return loss(dict(zip(leaves, given, strict=True)), label, 0.3, self.atoms())[0]

        assert torch.autograd.gradcheck(value, tuple(leaves.values()), fast_mode=True)

    def test_the_learning_rate_may_be_a_tensor(self) -> None:
        """A captured step keeps it on the device."""
        loss, label = self.build(), self.labelled()
        prediction = self.predicted(loss)
        for fraction in (1.0, 0.3, 0.0):
            one, _ = loss(prediction, label, fraction, self.atoms())
            other, _ = loss(
                prediction, label, torch.tensor(fraction, dtype=torch.float64), self.atoms()
            )
            torch.testing.assert_close(one, other)

    def test_missing_labels_contribute_nothing(self) -> None:
        """The metric of a term without its labels is NaN, loss and gradient stay finite; without any they are zero."""
        loss, label = self.build(), self.labelled()
        leaves = {name: value.requires_grad_() for name, value in self.predicted(loss).items()}
        for term in loss.terms:
            rest: dict[str, torch.Tensor | None] = {
                k: v for k, v in label.items() if k not in term.labels
            }
            for given in (rest, {**rest, **dict.fromkeys(term.labels)}):
                value, metrics = loss(leaves, given, 0.3, self.atoms())
                assert metrics[term.metric].isnan(), term.metric
                assert value.isfinite()
        value, _ = loss(leaves, {}, 0.3, self.atoms())
        assert value.item() == 0.0
        if value.requires_grad:
            assert not any(g.any() for g in self.gradients(value, leaves).values())

    def test_frames_without_a_label_have_no_weight(self) -> None:
        """`find_…` says which frames have a label; any finite number may stand in the others."""
        loss, label = self.build(), self.labelled()
        has = torch.tensor([True, False, True])
        partial = {**label, **{f"find_{name}": has for name in label}}
        leaves = {name: value.requires_grad_() for name, value in self.predicted(loss).items()}
        values = []
        for filler in (0.0, 1e6):
            filled = {
                name: value.clone() if name.startswith("find_") else value
                for name, value in partial.items()
            }
            for name in label:
                filled[name] = label[name].clone()
                filled[name][1] = filler
            value, metrics = loss(leaves, filled, 0.3, self.atoms())
            assert not any(g[1].any() for g in self.gradients(value, leaves).values())
            values.append([value.detach(), *metrics.values()])
        for one, other in zip(*values, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)

    def test_padding_atoms_have_no_weight(self) -> None:
        """`mask` is False for them; neither labels nor predictions of them count. Their `atom_ener_coeff` is 0."""
        loss, label = self.build(), self.labelled()
        mask = torch.ones(FRAMES, ATOMS, dtype=torch.bool)
        mask[1, 2:] = False
        label["atom_ener_coeff"] *= mask
        prediction, values, padded = self.predicted(loss), [], set(OF_ATOMS) - {"atom_ener_coeff"}
        for filler in (0.0, 1e3):
            changed = [
                {
                    k: v.masked_fill(~mask.view(*mask.shape, *[1] * (v.dim() - 2)), filler)
                    if k in padded
                    else v
                }
                for given in (prediction, label)
                for k, v in given.items()
            ]
            first, second = changed[: len(prediction)], changed[len(prediction) :]
            leaves = {k: v.requires_grad_() for part in first for k, v in part.items()}
            value, metrics = loss(
                leaves, {k: v for part in second for k, v in part.items()}, 0.3, self.atoms(mask)
            )
            for name, gradient in self.gradients(value, leaves).items():
                assert name not in OF_ATOMS or not gradient[~mask].any(), name
            values.append([value.detach(), *metrics.values()])
        for one, other in zip(*values, strict=True):
            torch.testing.assert_close(one, other)

    def test_a_system_without_its_labels_is_reported(self) -> None:
        """Before the first step, not after a run that taught nothing."""
        loss = self.build()
        complete = frozenset().union(*(term.labels for term in loss.terms))
        assert not any(check_labels(loss, [Named("complete", complete)]))
        assert check_labels(loss, [Named("complete", complete), Named("bare", frozenset())]).errors

    def test_a_run_writes_its_columns_and_restarts(self) -> None:
        """Every metric is a column of `lcurve.out`, and a restarted run ends with the same weights, bit by bit."""
        loss = self.build()
        with _empty_folder():
            self._write_system(frozenset().union(*(term.labels for term in loss.terms)))
            Path("input.json").write_text(json.dumps(self._input()))
            assert run(load("input.json"), log_level="ERROR", skip_neighbor_stat=True) == 0
            whole = read_checkpoint("model.ckpt-4.pt")["model"]
            header = Path("lcurve.out").read_text().splitlines()[0].split()
            for metric in (*(term.metric for term in loss.terms), "rmse"):
                assert {f"{metric}_trn", f"{metric}_val"} <= set(header), metric
            assert np.isfinite(np.loadtxt("lcurve.out")).all()
            written = json.loads(Path("out.json").read_text())["loss"]
            assert {key: written[key] for key in self.loss} == dict(self.loss)
            assert (
                run(
                    load("input.json"),
                    log_level="ERROR",
                    skip_neighbor_stat=True,
                    restart="model.ckpt-2.pt",
                )
                == 0
            )
            again = read_checkpoint("model.ckpt-4.pt")["model"]
            tensors = [name for name, value in whole.items() if isinstance(value, torch.Tensor)]
            assert tensors
            assert all(torch.equal(whole[name], again[name]) for name in tensors)

    def _input(self) -> dict[str, Any]:
        descriptor = {
            "type": "se_e2_a",
            "rcut": 4.0,
            "rcut_smth": 1.0,
            "sel": [8, 8],
            "neuron": [2, 4],
            "seed": 1,
        }
        data = {"systems": ["system"], "batch_size": 2}
        return {
            "model": {
                "type_map": list(TYPE_MAP),
                "descriptor": {**descriptor, "axis_neuron": 2},
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
        folder, random = Path("system/set.000"), np.random.default_rng(4)
        folder.mkdir(parents=True)
        Path("system/type.raw").write_text("0\n1\n1\n0\n")
        Path("system/type_map.raw").write_text("O\nH\n")
        corners = 1.5 * np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
        np.save(
            folder / "coord.npy", (corners + 0.1 * random.normal(size=(6, 4, 3))).reshape(6, 12)
        )
        np.save(folder / "box.npy", np.tile(8.0 * np.eye(3).ravel(), (6, 1)))
        for label in labels:
            width = (
                4 * int(np.prod(OF_ATOMS[label]))
                if label in OF_ATOMS
                else int(np.prod(OF_FRAMES[label]))
            )
            np.save(folder / f"{label}.npy", np.abs(0.1 * random.normal(size=(6, width))))


@contextmanager
def _empty_folder() -> Iterator[None]:
    """Work in an empty temporary folder."""
    with tempfile.TemporaryDirectory() as folder, working_folder(folder):
        yield
