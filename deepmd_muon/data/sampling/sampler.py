"""Which frames make the next batch: batch sizes, probabilities of systems, and the sampler.

The order of batches is a pure function of seed, systems and rules. The system of draw k comes from block
``k // 1024`` of a random stream, and each system serves its frames in shuffled epochs, each epoch with a
stream of its own. So the position is one integer, and resuming replays the choices instead of storing
generators.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from deepmd_muon.data.errors import SamplerStateError, SamplingError

#: Forms of a batch size.
BatchKind = Literal["fixed", "list", "auto", "max", "filter", "mixed", "mix"]

#: System choices drawn at once; part of the definition of the order, do not change.
CHOICE_BLOCK = 1024

# The frames of a system that has one.
_ONLY = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class BatchRule:
    """A parsed batch size.

    ``fixed``: the same number of frames in every system. ``list``: one number per system. ``auto``: the smallest number
    of frames with at least `number` atoms. ``max``: the largest with at most `number` atoms, and at least one.
    ``filter``: as ``max``, and systems of more atoms are left out. ``mixed``: batches of `number` frames drawn from all
    systems, padded to the largest. ``mix``: batches of frames of similar sizes from all systems, at most `number` atoms
    with padding.
    """

    kind: BatchKind
    number: int = 0  # frames or atoms
    sizes: tuple[int, ...] = ()  # frames per system, for ``list``

    @classmethod
    def parse(cls, spec: int | str | Sequence[int]) -> BatchRule:
        """Read a batch size: ``4``, ``[1, 2]``, ``"auto"``, ``"auto:32"`` and, like it, max, filter, mixed and mix.

        Raises
        ------
        SamplingError
            When `spec` is none of these or a number is not positive.
        """
        help_text = 'use a positive integer, a list of them, "auto", "auto:N", "max:N", "filter:N", "mixed:N" or "mix:N"'
        if isinstance(spec, str):
            kind, colon, tail = spec.partition(":")
            if spec == "auto":
                return cls("auto", 32)
            if (
                kind in get_args(BatchKind)[2:]
                and colon
                and tail.isascii()
                and tail.isdigit()
                and int(tail) > 0
            ):
                return cls(kind, int(tail))  # type: ignore[arg-type]  # kind was just compared with the choices
            raise SamplingError(f"batch_size {spec!r}: {help_text}")
        numbers = [spec] if isinstance(spec, (int, np.integer)) else list(spec)
        if not numbers or any(
            isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n <= 0 for n in numbers
        ):
            raise SamplingError(f"batch_size {spec!r}: {help_text}")
        if isinstance(spec, (int, np.integer)):
            return cls("fixed", int(spec))
        return cls("list", sizes=tuple(int(n) for n in numbers))

    def keep(self, natoms: Sequence[int]) -> list[int]:
        """Numbers of the systems that this rule leaves in.

        Raises
        ------
        SamplingError
            When ``filter`` leaves none.
        """
        if self.kind != "filter":
            return list(range(len(natoms)))
        kept = [k for k, n in enumerate(natoms) if n <= self.number]
        if not kept:
            raise SamplingError(
                f"batch_size filter:{self.number} leaves no system: the smallest has {min(natoms)} atoms"
            )
        return kept

    def frames_per_batch(self, natoms: Sequence[int]) -> tuple[int, ...]:
        """Frames of a batch of each system; `natoms` are the atoms of the systems that were kept."""
        if self.kind == "list":
            if len(self.sizes) != len(natoms):
                raise SamplingError(
                    f"batch_size lists {len(self.sizes)} numbers, but {len(natoms)} systems were found"
                )
            return self.sizes
        if self.kind in ("fixed", "mixed"):
            return (self.number,) * len(natoms)
        if self.kind == "auto":
            return tuple(-(-self.number // n) for n in natoms)
        return tuple(max(1, self.number // n) for n in natoms)


def system_probabilities(
    nbatches: Sequence[int],
    auto_prob: str = "prob_sys_size",
    sys_probs: Sequence[float] | None = None,
) -> np.ndarray:
    """Probability of each system.

    Parameters
    ----------
    nbatches : sequence of int, (nsystems,)
        Batches each system has.
    auto_prob : str
        ``prob_uniform``; ``prob_sys_size`` (in proportion to batches); or ``prob_sys_size;a:b:w;…``: systems
        a to b−1 share the weight w in proportion to their batches, and systems in no block are never drawn.
    sys_probs : sequence of float, optional
        Explicit probabilities; negative ones share the rest in proportion to batches.

    Returns
    -------
    ndarray of float64, (nsystems,)
        Sums to 1.

    Raises
    ------
    SamplingError
        When the rule is malformed or does not fit the number of systems.
    """
    size: np.ndarray = np.asarray(nbatches, dtype=np.float64)
    if sys_probs is not None:
        return _given_probabilities(size, sys_probs)
    if auto_prob == "prob_uniform":
        return np.full(len(size), 1.0 / len(size))
    if auto_prob == "prob_sys_size":
        return np.asarray(size / size.sum())
    if auto_prob.startswith("prob_sys_size;"):
        return _block_probabilities(size, auto_prob)
    raise SamplingError(
        f'auto_prob {auto_prob!r}: use "prob_uniform", "prob_sys_size" or "prob_sys_size;first:last:weight;…"'
    )


def _given_probabilities(size: np.ndarray, sys_probs: Sequence[float]) -> np.ndarray:
    given: np.ndarray = np.asarray(sys_probs, dtype=np.float64)
    if given.shape != size.shape:
        raise SamplingError(
            f"sys_probs has {given.size} entries, but {size.size} systems were found"
        )
    if not np.isfinite(given).all():
        raise SamplingError(f"sys_probs {given.tolist()} must be finite")
    automatic = given < 0
    rest = 1.0 - given[~automatic].sum()
    if rest < -1e-8:
        raise SamplingError(
            f"the probabilities given in sys_probs sum to {1 - rest:.6g}, more than 1"
        )
    if automatic.any():
        share = np.where(automatic, size, 0.0)
        given = np.where(automatic, max(rest, 0.0) * share / share.sum(), given)
    elif rest > 1e-5:
        raise SamplingError(
            f"sys_probs sum to {1 - rest:.6g}, not 1; negative entries share the rest of 1"
        )
    return np.asarray(given / given.sum())


def _block_probabilities(size: np.ndarray, rule: str) -> np.ndarray:
    weights: np.ndarray = np.zeros_like(size)
    covered = np.zeros(len(size), dtype=bool)
    for block in rule.split(";")[1:]:
        try:
            first_text, last_text, weight_text = block.split(":")
            first, last, weight = int(first_text), int(last_text), float(weight_text)
        except ValueError as error:
            raise SamplingError(
                f"auto_prob: block {block!r} of {rule!r} is not first:last:weight"
            ) from error
        if not (0 <= first < last and first < len(size)):
            raise SamplingError(
                f"auto_prob: block {block!r} holds none of the {len(size)} systems (last is excluded)"
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise SamplingError(
                f"auto_prob: the weight of block {block!r} must be finite and not negative"
            )
        part = slice(first, last)
        if covered[part].any():
            raise SamplingError(f"auto_prob: block {block!r} overlaps an earlier one of {rule!r}")
        covered[part] = True
        weights[part] = weight * size[part] / size[part].sum()
    if not weights.sum() > 0:
        raise SamplingError(f"auto_prob: all weights of {rule!r} are zero")
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class Plan:
    """The frames of one batch: parts of one system each, in order."""

    parts: tuple[tuple[int, np.ndarray], ...]


def new_seed() -> int:
    """Draw a seed for the order of the data: 63 bits, a plain integer everywhere."""
    # numpy < 2 has no shift of a uint64 by a Python integer.
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) >> 1


class SavedOrder:
    """An order of batches whose position, one integer, can be saved and restored."""

    step: int  # batches drawn so far
    seed: int  # of the order
    _identity: str

    def state_dict(self, step: int | None = None) -> dict[str, int | str]:
        """Position as plain values; `step` names another position than the present one."""
        # The seed as text: it may have 128 bits, which not every serialiser takes as an integer.
        at = int(self.step if step is None else step)
        return {"version": 1, "step": at, "seed": str(self.seed), "identity": self._identity}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go to a saved position; the seed comes along.

        Raises
        ------
        SamplerStateError
            When the position was saved with other systems, sizes or probabilities.
        """
        if state.get("version") != 1:
            raise SamplerStateError(
                f"sampler state of version {state.get('version')}, expected version 1"
            )
        if state["identity"] != self._identity:
            raise SamplerStateError(
                "the saved position belongs to other training data: atoms, frames, labels, batch sizes or "
                "probabilities of the systems have changed, so the order of batches cannot be continued"
            )
        self.seed, self.step = int(state["seed"]), int(state["step"])
        self._forget()

    def _forget(self) -> None:
        """Drop what was computed for another position or seed."""
        raise NotImplementedError


class Sampler(SavedOrder):
    """An endless, reproducible order of batches of `sizes` frames of systems of `nframes`.

    Each system serves its frames without repetition until all were served (the last batch of such an epoch may be
    smaller), then shuffles anew. Where `mixed` is positive, a batch is this many frames, each from a system drawn for
    it. `identity` says more about the systems; it is compared when a position is restored.
    """

    def __init__(
        self,
        nframes: Sequence[int],
        sizes: Sequence[int],
        probabilities: np.ndarray,
        seed: int,
        mixed: int = 0,
        identity: str = "",
    ) -> None:
        self.nframes = tuple(int(n) for n in nframes)
        self.sizes = tuple(
            1 if mixed else min(int(b), n) for b, n in zip(sizes, self.nframes, strict=True)
        )
        self.seed = int(seed)
        self.mixed = int(mixed)
        self._cumulative = np.cumsum(probabilities)
        # Rounding must not leave a gap at the end, nor draw a system of probability zero there.
        self._cumulative[np.flatnonzero(probabilities)[-1] :] = 1.0
        rule = (self.nframes, self.sizes, [float(p) for p in probabilities], self.mixed, identity)
        self._identity = hashlib.sha256(repr(rule).encode()).hexdigest()
        self._choices: tuple[int, np.ndarray] | None = None
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self.step = 0
        self._served = np.zeros(len(self.nframes), dtype=np.int64)

    @property
    def mixes_systems(self) -> bool:
        """Whether the frames of a batch may come from several systems."""
        return self.mixed > 0

    def _choice_block(self, block: int) -> np.ndarray:
        """Systems of draws ``1024·block …``."""
        if self._choices is None or self._choices[0] != block:
            draws = np.random.Generator(np.random.PCG64([self.seed, 0, block])).random(CHOICE_BLOCK)
            self._choices = (block, np.searchsorted(self._cumulative, draws, side="right"))
        return self._choices[1]

    def _take(self, draw: int) -> tuple[int, np.ndarray]:
        """Serve draw number `draw`: the system and its frames."""
        system = int(self._choice_block(draw // CHOICE_BLOCK)[draw % CHOICE_BLOCK])
        size, nframes = self.sizes[system], self.nframes[system]
        epoch, turn = divmod(int(self._served[system]), -(-nframes // size))
        self._served[system] += 1
        if nframes == 1:
            return system, _ONLY
        known = self._orders.get(system)
        if known is None or known[0] != epoch:
            stream = np.random.Generator(np.random.PCG64([self.seed, 1, system, epoch]))
            known = self._orders[system] = (epoch, stream.permutation(nframes))
        return system, known[1][turn * size : (turn + 1) * size]

    def next(self) -> Plan:
        """Draw the next batch."""
        draws = max(1, self.mixed)
        parts = [self._take(self.step * draws + k) for k in range(draws)]
        self.step += 1
        if self.mixed:
            # Frames of one system lie together, so that each system is read once.
            systems = sorted({system for system, _ in parts})
            parts = [
                (s, np.concatenate([frames for system, frames in parts if system == s]))
                for s in systems
            ]
        return Plan(tuple(parts))

    def _forget(self) -> None:
        self._choices = None
        self._orders.clear()
        draws = self.step * max(1, self.mixed)
        self._served[:] = 0
        for block in range(-(-draws // CHOICE_BLOCK)):
            chosen = self._choice_block(block)[: draws - block * CHOICE_BLOCK]
            self._served += np.bincount(chosen, minlength=len(self.nframes))
