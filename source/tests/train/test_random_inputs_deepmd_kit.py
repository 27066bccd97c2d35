"""Random inputs here and in deepmd-kit 3.2.0: statistics, weights, predictions and restarts agree, both ways.

`pytest -m deepmd_kit`. RANDOM_INPUTS names the first seed and how many to draw ("1000:90").
"""

import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, python
from random_inputs import TYPE_MAP, draw_input, write_parameters, write_systems

from deepmd_muon.argcheck import load
from deepmd_muon.argcheck.differences import unlike_deepmd_kit
from deepmd_muon.data import open_systems, with_parameters
from deepmd_muon.infer import Predictor
from deepmd_muon.train import run

pytestmark = [*MARKS, pytest.mark.timeout(1800)]
KINDS = ("se_e2_a", "se_atten", "se_atten_v2", "dpa3", "dpa3")
FIRST, COUNT = map(int, os.environ.get("RANDOM_INPUTS", "0:15").split(":"))
TABLE = Path(__file__).parents[1] / "model" / "short_range.txt"
JOBS = Path(__file__).with_name("jobs_in_deepmd_kit.py")
STEPS = 3
TINY = {"type": "exp", "start_lr": 1e-14, "stop_lr": 1e-14, "decay_steps": 1}
CONSTANT = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-3, "decay_steps": 1}
PREFIX = "model.Default.atomic_model."


class Case:
    """A random input with its systems; file names end in `_theirs` or `_ours` by who reads them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder, self.kind = seed, folder, KINDS[seed % len(KINDS)]
        folder.mkdir()
        shutil.copy(TABLE, folder / "table.txt")
        self.content = draw_input(seed, self.kind, "table.txt")
        fitting = self.content["model"]["fitting_net"]
        both, single = write_systems(folder / "both", seed), write_systems(folder / "one", seed, 1)
        write_parameters([*both, *single], fitting, seed)
        self.systems = {"both": both, "one": single[:1]}
        for path in (*both, *single):
            self._copy_for_deepmd_kit(path)
        self._write("fresh", "both", TINY, numb_steps=1)
        self._write("run", "one", self.content["learning_rate"], numb_steps=STEPS)
        for start in ("theirs", "ours"):
            self._write(f"on_{start}", "one", CONSTANT, numb_steps=STEPS + 3)
        data = Path(single[0], "set.000")
        names = ("coord", "box", "fparam", "aparam")
        arrays = {name: np.load(path) for name in names if (path := data / f"{name}.npy").exists()}
        kinds = np.loadtxt(Path(single[0], "type.raw"), dtype=int)
        np.savez(folder / "given.npz", **arrays, atype=kinds)

    @staticmethod
    def _copy_for_deepmd_kit(path: str) -> None:
        """Copy a system with three prefactors an atom: deepmd-kit 3.2.0 cannot train on its own format, one an atom."""
        copied = Path(f"{path}_theirs")
        shutil.copytree(path, copied)
        prefactors = copied / "set.000" / "atom_pref.npy"
        np.save(prefactors, np.repeat(np.load(prefactors), 3, axis=1))

    def _write(self, name: str, systems: str, rate: dict, *, numb_steps: int) -> None:
        """Write an input for both programs."""
        for reader in ("theirs", "ours"):
            content = copy.deepcopy(self.content)
            content["learning_rate"] = rate
            paths, steps = self.systems[systems], numb_steps
            if reader == "theirs":
                paths = [f"{path}_theirs" for path in paths]
                if name.startswith("on_"):  # it takes the last step of a checkpoint again
                    steps -= 1
            elif name != "fresh" and "smin_alpha" in content["model"]:
                content["model"]["smin_alpha"] = 0.1  # deepmd-kit's models have no other
            content["training"] |= {
                "training_data": {"systems": paths, "batch_size": 1},
                "numb_steps": steps,
                "save_freq": steps,
                "save_ckpt": f"{name}_{reader}",
                "disp_file": f"{name}_{reader}.out",
            }
            (self.folder / f"{name}_{reader}.json").write_text(json.dumps(content))

    def job(self, name: str, *words: str) -> dict:
        """Return a training of deepmd-kit."""
        given = ["train", f"{name}_theirs.json", "--skip-neighbor-stat", "-o", "out.json", *words]
        return {"folder": str(self.folder), "words": given}

    def train(self, name: str, monkeypatch, **options) -> None:
        """Train here."""
        monkeypatch.chdir(self.folder)
        given = load(f"{name}_ours.json")
        assert run(given, skip_neighbor_stat=True, log_level="ERROR", **options) == 0

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint under deepmd-kit's names, without prefix and copies."""
        state = torch.load(self.folder / name, weights_only=False)["model"]
        return {
            key.removeprefix(PREFIX): value.double()
            for key, value in state.items()
            if torch.is_tensor(value) and value.numel() and not key.endswith(("out_std", "_dist"))
        }


def run_jobs(folder: Path, jobs: list[dict]) -> None:
    """Let deepmd-kit do jobs in one process; each must succeed."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    python(JOBS, folder / "jobs.json", folder / "results.json")
    results = json.loads((folder / "results.json").read_text())
    failed = [(job, text) for job, text in zip(jobs, results, strict=True) if text]
    assert not failed, failed[0]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The cases, trained and continued by deepmd-kit from its own checkpoints."""
    folder = tmp_path_factory.mktemp("random")
    found = {seed: Case(seed, folder / str(seed)) for seed in range(FIRST, FIRST + COUNT)}
    jobs = []
    for case in found.values():
        jobs += [
            case.job("fresh"),
            case.job("run", "--init-model", "fresh_theirs-1.pt"),
            case.job("on_theirs", "--restart", f"run_theirs-{STEPS}.pt"),
        ]
    run_jobs(folder, jobs)
    return found


@pytest.fixture(scope="module")
def ours(cases):
    """The cases, after deepmd-kit has predicted with our checkpoints, and continued them."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DEVICE", "cpu")
    jobs = []
    for case in cases.values():
        case.train("run", patch, init_model="fresh_theirs-1.pt")
        case.train("on_theirs", patch, restart=f"run_theirs-{STEPS}.pt")
        case.train("on_ours", patch, restart=f"run_ours-{STEPS}.pt")
        for reader in ("theirs", "ours"):
            name = f"run_{reader}-{STEPS}.pt"
            given = {"model": name, "given": "given.npz", "out": f"{name}.npz"}
            jobs.append({"folder": str(case.folder), **given})
        jobs.append(case.job("on_ours", "--restart", f"run_ours-{STEPS}.pt"))
    patch.undo()
    run_jobs(next(iter(cases.values())).folder.parent, jobs)
    return cases


SEEDS = range(FIRST, FIRST + COUNT)


def ignored_by_deepmd_kit(case: Case) -> set[str]:
    """Return the tensors that are to differ, by the settings of which the log of our run speaks."""
    (branch,) = load(case.folder / "fresh_ours.json").branches.values()
    told = " ".join(unlike_deepmd_kit(branch))
    found = set()
    if any(word in told for word in ("atom_ener", "rcond", "start_pref_e")):
        found.add("out_bias")
    if "pair_exclude_types" in told:
        found |= {"mean", "stddev"}
    if "trainable_ln" in told:
        found.add("attn_layer_norm")
    return found


def compare(found, wanted, *, tolerance, skip=()):
    """Compare two states."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not any(part in name for part in skip):
            scale = 1.0 + float(value.abs().max())
            difference = float((found[name] - value).abs().max())
            assert difference < tolerance * scale, (name, difference)


@pytest.mark.parametrize("seed", SEEDS)
def test_fresh_weights_and_statistics(cases, seed, monkeypatch):
    """se_e2_a starts from other random numbers here; its statistics agree."""
    case = cases[seed]
    monkeypatch.setenv("DEVICE", "cpu")
    case.train("fresh", monkeypatch)
    found, wanted = case.weights("fresh_ours-1.pt"), case.weights("fresh_theirs-1.pt")
    skip = {*ignored_by_deepmd_kit(case), *(("filter_layers",) if case.kind == "se_e2_a" else ())}
    compare(found, wanted, tolerance=1e-9, skip=skip)


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_from_the_same_weights(ours, seed):
    case = ours[seed]
    found, wanted = (case.weights(f"run_{who}-{STEPS}.pt") for who in ("ours", "theirs"))
    compare(found, wanted, tolerance=1e-7, skip=unmoved(case) | frozen_here(case))


def test_nearly_all_inputs_move_the_weights(ours):
    """A few draw activations that are flat, or a loss that no weight changes."""
    moved = 0
    for case in ours.values():
        before, after = (
            case.weights(f"{name}.pt") for name in ("fresh_theirs-1", f"run_theirs-{STEPS}")
        )
        moved += max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-4
    assert moved >= 0.9 * len(ours)


@pytest.mark.parametrize("start", ["theirs", "ours"])
@pytest.mark.parametrize("seed", SEEDS)
def test_restarts_both_ways(ours, seed, start):
    """deepmd-kit takes the last step of the checkpoint again, so it gets one step less to do."""
    case = ours[seed]
    found = case.weights(f"on_{start}_ours-{STEPS + 3}.pt")
    wanted = case.weights(f"on_{start}_theirs-{STEPS + 2}.pt")
    compare(found, wanted, tolerance=1e-7, skip=unmoved(case) | frozen_here(case))


def frozen_here(case: Case) -> set[str]:
    """Return what deepmd-kit trains and this package does not, and all that depends on it."""
    return {""} if "attn_layer_norm" in ignored_by_deepmd_kit(case) else set()


def unmoved(case: Case) -> set[str]:
    """Return the weight whose gradient is 0 but for rounding, to which Adam's steps are blind.

    Without energies in the loss, and where the values in vacuum are removed, a bias of the output has none.
    """
    loss, fitting = case.content["loss"], case.content["model"]["fitting_net"]
    energies = any(loss[f"start_pref_{x}"] and loss[f"limit_pref_{x}"] for x in ("e", "ae"))
    moves = energies and "atom_ener" not in fitting
    return set() if moves else {f"layers.{len(fitting['neuron'])}.bias"}


@pytest.mark.parametrize("who", ["theirs", "ours"])
@pytest.mark.parametrize("seed", SEEDS)
def test_predictions_with_either_checkpoint(ours, seed, who, monkeypatch):
    case = ours[seed]
    monkeypatch.chdir(case.folder)
    name = f"run_{who}-{STEPS}.pt"
    predictor = Predictor(name, device="cpu")
    opened = open_systems(case.systems["one"][0], TYPE_MAP)
    (system,) = with_parameters(opened, predictor.parameters)
    found, wanted = predictor.evaluate(system.frames([0])), np.load(f"{name}.npz")
    for key in ("energy", "force", "virial"):
        np.testing.assert_allclose(
            getattr(found, key).ravel(), wanted[key].ravel(), rtol=1e-9, atol=1e-9, err_msg=key
        )
