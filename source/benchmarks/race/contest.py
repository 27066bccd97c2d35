"""Training runs that share a process: the package's own data, model, loss and captured step, with any optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from contestants import CONTESTANTS
from optimizers import Foreign, keep_absent
from results import Errors, Key, pool
from sets import SETS, input_of
from torch import Tensor

from deepmd_muon.argcheck import Input, normalize
from deepmd_muon.data import Batch, NeighborCache, System
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.loss import build_loss
from deepmd_muon.model import Structures, build_model
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.statistics import descriptor_length
from deepmd_muon.train.batches.batch import TrainingBatch, to_device
from deepmd_muon.train.branches import make_branches
from deepmd_muon.train.learning_rate import learning_rate
from deepmd_muon.train.omitted_settings import resolve_sel
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.statistics import set_model_statistics
from deepmd_muon.train.step.stepper import build_stepper
from deepmd_muon.train.strategy import choose_strategy
from deepmd_muon.train.systems import (
    Data,
    Systems,
    make_loaders,
    open_section,
    open_training_systems,
)
from deepmd_muon.train.validation.full_validation import full_errors

# All rates end at this fraction of where they start, so that all losses go through the same prefactors.
DECAY = {"type": "exp", "smooth": True, "stop_lr_ratio": 1e-3}
MEASURED = {"force": "f:rmse", "energy": "e:rmse", "virial": "v:rmse"}
CHUNK_ATOMS = 4096  # of a batch of test frames
TRAIN_FRAMES = 96  # about so many training frames are measured with the last weights
RECORDED = 3  # batches of a layout after which its steps are replays of a graph


class Arena:
    """Systems, neighbour lists, test batches and first weights, shared by all runs with one set, model and seed.

    Parameters
    ----------
    name, model, seed, steps
        See `input_of`.
    folder
        Of the set.
    device
        Where runs train.
    stream
        Of all runs; None gives each its own.
    """

    def __init__(
        self,
        name: str,
        model: str,
        seed: int,
        steps: int,
        folder: Path,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.device, self.stream = device, stream
        train = SETS[name].systems(folder, "train")
        if not train:
            raise FileNotFoundError(f"{folder} has no training systems of the set {name}")
        self.steps = steps
        self._content = input_of(name, model, train, seed=seed, steps=steps)
        self._length = 0.0
        given = self.checked({"type": "Adam"}, 1e-3)
        given, systems = open_training_systems(given)
        self._train = systems[SINGLE].training
        given, _ = resolve_sel(given, systems, count=True)
        self._content["model"] = given.normalized["model"]
        first = build_model(given.settings.model)
        self._ntypes = first.ntypes
        self._cache = NeighborCache.of(first.neighbors, first.ntypes, 2 << 30)
        data = self.data(given)
        set_model_statistics(make_branches(given, first, {SINGLE: data}, {}, {}))
        self.weights = first.state_dict()
        samples = (
            Structures.of(x.frames, x.neighbors, first.ntypes)
            for x in data.training.sample_batches(1)
        )
        self._length = descriptor_length(first, samples)
        few = -(-TRAIN_FRAMES // len(train))
        self.parts = {
            part: dict(self._batches(given, SETS[name].systems(folder, part)))
            for part in ("test", "out")
        }
        self.parts["train"] = dict(self._batches(given, train, few))

    def checked(self, optimizer: Mapping[str, object], start_lr: float) -> Input:
        """Return the checked input of a run, with the scales that `dp train` takes where `optimizer` omits them."""
        rate = {**DECAY, "start_lr": start_lr}
        given = normalize({**self._content, "optimizer": dict(optimizer), "learning_rate": rate})
        return (
            given.with_scales(given.scales.for_descriptors(self._length)) if given.scales else given
        )

    def data(self, given: Input) -> Data:
        """Return new loaders of the training part, which begin where all runs begin."""
        seed = self._content["training"]["seed"]
        systems, caches = {SINGLE: Systems(self._train, [])}, {SINGLE: self._cache}
        return make_loaders(given, systems, caches, seed, Ranks(self.device))[SINGLE]

    def _batches(
        self, given: Input, folders: list[Path], most: int | None = None
    ) -> Iterator[tuple[str, list[TrainingBatch]]]:
        """Give the frames of each system of a part on the device, or `most` of them at equal distances."""
        for folder in folders:
            data = dataclasses.replace(
                given.settings.training.training_data, systems=(str(folder),)
            )
            (system,) = open_section(data, given.settings.model.type_map)
            yield (
                folder.name,
                [
                    to_device(batch, self._ntypes, self.device)
                    for batch in self._chunks(system, most)
                ],
            )

    def _chunks(self, system: System, most: int | None) -> Iterator[Batch]:
        width = max(1, CHUNK_ATOMS // system.natoms)
        chosen = np.arange(0, system.nframes, 1 if most is None else -(-system.nframes // most))
        for first in range(0, len(chosen), width):
            numbers = chosen[first : first + width]
            frames = system.frames(numbers)
            origin = Origin(((system.name, tuple(numbers.tolist())),))
            yield Batch(frames, self._cache.batch(system, numbers, frames), origin)


class Run:
    """One training run, which advances a step at a time.

    Parameters
    ----------
    key
        Contestant, rate and so on.
    arena
        Of the key's set, model, seed and steps.

    Attributes
    ----------
    curve
        Steps done, and the force and energy error then on the test part.
    """

    def __init__(self, key: Key, arena: Arena) -> None:
        self.key = key
        self._arena = arena
        contestant = CONTESTANTS[key.contestant]
        start_lr = contestant.start_lr(key.rate)
        given = arena.checked(
            contestant.section(key.rate) if contestant.section else {"type": "Adam"}, start_lr
        )
        model = build_model(given.settings.model)
        model.load_state_dict(arena.weights)
        self.model = model.to(arena.device)
        training, on_gpu = given.settings.training, arena.device.type == "cuda"
        strategy = choose_strategy(training, Ranks(arena.device), model)
        self._decay = learning_rate(given.settings.learning_rate, key.steps)
        self._start_lr = start_lr
        self._decays = contestant.decays
        self._foreign: Foreign | None = None
        if contestant.parts is None:
            optimizer = strategy.build_optimizer(given.settings.optimizer, start_lr)
            if contestant.keeps_absent:
                keep_absent(optimizer)
        else:
            optimizer = self._foreign = Foreign(
                contestant.parts(model, key.rate, key.steps), deferred=on_gpu
            )
            self._foreign.train()
        loss = build_loss(given.settings.loss, model.type_map)
        self._stepper = build_stepper(
            strategy=strategy,
            loss=loss,
            optimizer=optimizer,
            ema=None,
            training=training,
            scalars=self._scalars,
        )
        self._batches = self._stepper.open_batches(arena.data(given).training, model.ntypes)
        self._stream = arena.stream or torch.cuda.Stream(arena.device) if on_gpu else None
        if self._stream is not None:
            self._stream.wait_stream(
                torch.cuda.current_stream(arena.device)
            )  # which has written the weights
        self._met: Counter[Hashable] = Counter()
        self.done = 0
        self.curve: list[tuple[int, float, float]] = []

    def _scalars(self, step: int) -> tuple[float, float]:
        """Return learning rate and the fraction that the loss follows, which is the same for all contestants."""
        decayed = self._decay(step)
        return (decayed if self._decays else self._start_lr), decayed / self._start_lr

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def advance(self) -> None:
        """Take a step; on a GPU nothing waits for the device."""
        with self._on_stream():
            feed = self._batches.next()
            self._stepper(feed, self.done)
            if self._stream is not None and self._met[feed.layout] < RECORDED:
                # Eager steps reuse the memory of the model's own streams, which all runs share.
                self._met[feed.layout] += 1
                torch.cuda.synchronize()
            if self._foreign is not None and self._stream is not None:
                self._foreign.finish(self._scalars(self.done)[0])
        self.done += 1

    def check(self) -> None:
        """Raise what the steps have found; see `NonFiniteError`."""
        with self._on_stream():
            self._stepper.check(self.done)

    def measure(self) -> None:
        """Add the present errors on the test part to the curve."""
        pooled = pool(self.errors("test"))
        self.curve.append((self.done, pooled["force"], pooled["energy"]))

    def errors(self, part: str) -> dict[str, Errors]:
        """Return the root-mean-square errors on each system of a part: eV/Å, eV/atom, virials in eV/atom."""
        with self._on_stream(), self._weights_for_use():
            found = {}
            for name, batches in self._arena.parts[part].items():
                all_errors = full_errors(self.model, ((batch, True) for batch in batches), _alone)
                found[name] = {short: all_errors[long] for short, long in MEASURED.items()}
            return found

    @contextlib.contextmanager
    def _weights_for_use(self) -> Iterator[None]:
        if self._foreign is not None:
            self._foreign.eval()
        yield
        if self._foreign is not None:
            self._foreign.train()

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `DeepPotCalculator` reads, without the optimizer's state."""
        key = self.key
        name = f"{key.set}_{key.model}_{key.contestant}_{key.rate:g}_{key.seed}_{key.steps}.pt"
        folder.mkdir(parents=True, exist_ok=True)
        with self._on_stream(), self._weights_for_use():
            infos = {"lr": self._scalars(self.done - 1)[0], "step": self.done - 1}
            torch.save({"model": to_deepmd_kit(self.model, infos)}, folder / name)

    def close(self) -> None:
        """End the work of its loader."""
        self._batches.close()


def _alone(total: Tensor) -> Tensor:
    return total
