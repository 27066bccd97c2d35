"""Which frames make the next batch: batch sizes, probabilities of systems, and the sampler.

The order of batches is a pure function of seed, systems and rules. The system of draw k comes from
block ``k // 1024`` of a random stream, and each system serves its frames in shuffled epochs, each
epoch with another stream. So the position is one integer, and resuming replays the choices instead
of storing generators.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from deepmd_muon.data.errors import SamplerStateError, SamplingError

#: Forms of a batch size.
BatchKind = Literal["fixed", "list", "auto", "max", "filter", "mixed", "mix"]

#: System choices drawn at once; part of the definition of the order, do not change.
CHOICE_BLOCK = 1024

# The first integers of the seed of a stream, after the run's seed, so that no two streams are the
# same; part of the definition of the order.
_CHOICES = 0
_EPOCHS = 1


_BATCH_SIZES = (
    'use a positive integer, a list of them, "auto", "auto:N", "max:N", "filter:N", "mixed:N" '
    'or "mix:N"'
)


@dataclass(frozen=True)
class BatchRule:
    """A parsed batch size.

    - ``fixed``: the same number of frames in every system.
    - ``list``: one number per system.
    - ``auto``: the smallest number of frames with at least `number` atoms.
    - ``max``: the largest number of frames with at most `number` atoms, and at least one.
    - ``filter``: as ``max``, and systems of more atoms are left out.
    - ``mixed``: batches of `number` frames drawn from all systems, padded to the largest.
    - ``mix``: batches of frames of similar sizes from all systems, at most `number` atoms with
      padding.
    """

    kind: BatchKind
    number: int = 0  # frames or atoms
    sizes: tuple[int, ...] = ()  # frames per system, for ``list``

    @classmethod
    def parse(cls, spec: int | str | Sequence[int]) -> BatchRule:
        """Read a batch size: ``4``, ``[1, 2]``, ``"auto"``, ``"auto:32"``, ``"max:64"``, ….

        Raises
        ------
        SamplingError
            When `spec` is none of these or a number is not positive.
        """
        error = SamplingError(f"batch_size {spec!r}: {_BATCH_SIZES}")
        if isinstance(spec, str):
            if spec == "auto":
                return cls("auto", 32)
            kind, _, digits = spec.partition(":")
            has_number = digits.isascii() and digits.isdigit() and int(digits) > 0
            if kind not in get_args(BatchKind)[2:] or not has_number:  # all but fixed and list
                raise error
            return cls(kind, int(digits))  # type: ignore[arg-type]  # one of the choices, see above
        if isinstance(spec, (int, np.integer)):
            if not _is_size(spec):
                raise error
            return cls("fixed", int(spec))
        sizes = list(spec)
        if not sizes or not all(_is_size(size) for size in sizes):
            raise error
        return cls("list", sizes=tuple(int(size) for size in sizes))

    def keep(self, natoms: Sequence[int]) -> list[int]:
        """Return the numbers of the systems that this rule leaves in.

        Raises
        ------
        SamplingError
            When ``filter`` leaves none.
        """
        if self.kind != "filter":
            return list(range(len(natoms)))
        small = [k for k, n in enumerate(natoms) if n <= self.number]
        if not small:
            raise SamplingError(
                f"batch_size filter:{self.number} leaves no system: "
                f"the smallest has {min(natoms)} atoms"
            )
        return small

    def frames_per_batch(self, natoms: Sequence[int]) -> tuple[int, ...]:
        """Return the frames of a batch of each system, from the atoms of the systems left in."""
        if self.kind == "list":
            if len(self.sizes) != len(natoms):
                raise SamplingError(
                    f"batch_size lists {len(self.sizes)} numbers, "
                    f"but {len(natoms)} systems were found"
                )
            return self.sizes
        if self.kind in ("fixed", "mixed"):
            return (self.number,) * len(natoms)
        if self.kind == "auto":
            return tuple(-(-self.number // n) for n in natoms)
        return tuple(max(1, self.number // n) for n in natoms)


def _is_size(value: object) -> bool:
    """Whether a value is a positive integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return bool(value > 0)


def system_probabilities(
    nbatches: Sequence[int],
    auto_prob: str = "prob_sys_size",
    sys_probs: Sequence[float] | None = None,
) -> np.ndarray:
    """Return the probability of each system.

    Parameters
    ----------
    nbatches : sequence of int, (nsystems,)
        Batches each system has.
    auto_prob : str
        ``prob_uniform``; ``prob_sys_size`` (in proportion to batches); or
        ``prob_sys_size;a:b:w;…``: systems a to b−1 share the weight w in proportion to their
        batches, and systems in no block are never drawn.
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
        return _complete_probabilities(size, np.asarray(sys_probs, dtype=np.float64))
    if auto_prob == "prob_uniform":
        return np.full(len(size), 1.0 / len(size))
    if auto_prob == "prob_sys_size":
        return np.asarray(size / size.sum())
    if auto_prob.startswith("prob_sys_size;"):
        return _block_probabilities(size, auto_prob)
    raise SamplingError(
        f'auto_prob {auto_prob!r}: use "prob_uniform", "prob_sys_size" or '
        '"prob_sys_size;first:last:weight;…"'
    )


def _complete_probabilities(size: np.ndarray, sys_probs: np.ndarray) -> np.ndarray:
    """Replace negative probabilities by shares of the rest, in proportion to `size`."""
    if sys_probs.shape != size.shape:
        raise SamplingError(
            f"sys_probs has {sys_probs.size} entries, but {size.size} systems were found"
        )
    if not np.isfinite(sys_probs).all():
        raise SamplingError(f"sys_probs {sys_probs.tolist()} must be finite")
    is_automatic = sys_probs < 0
    rest = 1.0 - sys_probs[~is_automatic].sum()
    if rest < -1e-8:
        raise SamplingError(
            f"the probabilities given in sys_probs sum to {1 - rest:.6g}, more than 1"
        )
    if is_automatic.any():
        share = np.where(is_automatic, size, 0.0)
        automatic = max(rest, 0.0) * share / share.sum()
        sys_probs = np.where(is_automatic, automatic, sys_probs)
    elif rest > 1e-5:
        raise SamplingError(
            f"sys_probs sum to {1 - rest:.6g}, not 1; negative entries share the rest of 1"
        )
    return np.asarray(sys_probs / sys_probs.sum())


def _block_probabilities(size: np.ndarray, rule: str) -> np.ndarray:
    """Return the probabilities of a rule ``prob_sys_size;first:last:weight;…``."""
    weights: np.ndarray = np.zeros_like(size)
    is_covered = np.zeros(len(size), dtype=bool)
    for block in rule.split(";")[1:]:
        try:
            begin_text, end_text, weight_text = block.split(":")
            begin = int(begin_text)
            end = int(end_text)
            weight = float(weight_text)
        except ValueError as error:
            raise SamplingError(
                f"auto_prob: block {block!r} of {rule!r} is not first:last:weight"
            ) from error
        if not (0 <= begin < end and begin < len(size)):
            raise SamplingError(
                f"auto_prob: block {block!r} holds none of the {len(size)} systems "
                "(last is excluded)"
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise SamplingError(
                f"auto_prob: the weight of block {block!r} must be finite and not negative"
            )
        systems = slice(begin, end)
        if is_covered[systems].any():
            raise SamplingError(f"auto_prob: block {block!r} overlaps an earlier one of {rule!r}")
        is_covered[systems] = True
        weights[systems] = weight * size[systems] / size[systems].sum()
    if not weights.sum() > 0:
        raise SamplingError(f"auto_prob: all weights of {rule!r} are zero")
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class Plan:
    """The frames of one batch."""

    # Numbers of systems, each with the numbers of its frames, in the order of the batch.
    parts: tuple[tuple[int, np.ndarray], ...]


def new_seed() -> int:
    """Draw a seed for the order of the data: 63 bits, a plain integer everywhere."""
    # numpy < 2 has no shift of a uint64 by a Python integer.
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) >> 1


class SavedOrder:
    """An order of batches with a position, one integer, that can be saved and restored."""

    step: int  # batches drawn so far
    seed: int  # of the order
    _identity: str

    def state_dict(self, step: int | None = None) -> dict[str, int | str]:
        """Return the position as plain values; `step` names another position than this one."""
        return {
            "version": 1,
            "step": int(self.step if step is None else step),
            # As text: a seed may have 128 bits, which not every serialiser takes as an integer.
            "seed": str(self.seed),
            "identity": self._identity,
        }

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
                "the saved position belongs to other training data: atoms, frames, labels, batch "
                "sizes or probabilities of the systems have changed, so the order of batches "
                "cannot be continued"
            )
        self.seed = int(state["seed"])
        self.step = int(state["step"])
        self._forget()

    def _forget(self) -> None:
        """Drop what was computed for another position or seed."""
        raise NotImplementedError


class _Epoch(NamedTuple):
    """The frames of one system in the order of one epoch."""

    number: int
    frames: np.ndarray  # (nframes,)


class Sampler(SavedOrder):
    """An endless, reproducible order of batches of `sizes` frames of systems of `nframes`.

    Each system serves its frames without repetition until all were served (the last batch of such
    an epoch may be smaller), then shuffles again. If `mixed` is positive, a batch is this many
    frames, each from a system drawn for it. `identity` says more about the systems; it is compared
    when a position is restored.
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
            1 if mixed else min(int(size), n) for size, n in zip(sizes, self.nframes, strict=True)
        )
        self.seed = int(seed)
        self.step = 0
        self.mixed = int(mixed)
        self._cumulative = np.cumsum(probabilities)
        # Rounding must not leave a gap at the end, nor draw a system of probability zero there.
        last_drawn = np.flatnonzero(probabilities)[-1]
        self._cumulative[last_drawn:] = 1.0
        rule = (self.nframes, self.sizes, [float(p) for p in probabilities], self.mixed, identity)
        self._identity = hashlib.sha256(repr(rule).encode()).hexdigest()
        self._choices: tuple[int, np.ndarray] | None = None  # the last block that was drawn
        self._epochs: dict[int, _Epoch] = {}  # by system
        self._served = np.zeros(len(self.nframes), dtype=np.int64)  # batches of each system so far

    @property
    def mixes_systems(self) -> bool:
        """Whether the frames of a batch may come from several systems."""
        return self.mixed > 0

    def next(self) -> Plan:
        """Draw the next batch."""
        n_draws = max(1, self.mixed)
        draws = [self._serve(self.step * n_draws + k) for k in range(n_draws)]
        self.step += 1
        if not self.mixed:
            return Plan(tuple(draws))
        # Frames of one system come together, so that each system is read once.
        frames_of: dict[int, list[np.ndarray]] = {}
        for system, frames in draws:
            frames_of.setdefault(system, []).append(frames)
        return Plan(tuple((k, np.concatenate(frames_of[k])) for k in sorted(frames_of)))

    def _serve(self, draw: int) -> tuple[int, np.ndarray]:
        """Return the system of a draw, and its next frames."""
        block, place = divmod(draw, CHOICE_BLOCK)
        system = int(self._choice_block(block)[place])
        size = self.sizes[system]
        nframes = self.nframes[system]
        batches_per_epoch = -(-nframes // size)
        epoch, turn = divmod(int(self._served[system]), batches_per_epoch)
        self._served[system] += 1
        if nframes == 1:  # spares the stream
            return system, np.zeros(1, dtype=np.int64)
        current = self._epochs.get(system)
        if current is None or current.number != epoch:
            stream = np.random.Generator(np.random.PCG64([self.seed, _EPOCHS, system, epoch]))
            current = _Epoch(epoch, stream.permutation(nframes))
            self._epochs[system] = current
        return system, current.frames[turn * size : (turn + 1) * size]

    def _choice_block(self, block: int) -> np.ndarray:
        """Return the systems of draws ``1024·block …``."""
        if self._choices is None or self._choices[0] != block:
            stream = np.random.Generator(np.random.PCG64([self.seed, _CHOICES, block]))
            systems = np.searchsorted(self._cumulative, stream.random(CHOICE_BLOCK), side="right")
            self._choices = (block, systems)
        return self._choices[1]

    def _forget(self) -> None:
        self._choices = None
        self._epochs.clear()
        # Replay the choices up to this position.
        n_draws = self.step * max(1, self.mixed)
        self._served[:] = 0
        for block in range(-(-n_draws // CHOICE_BLOCK)):
            systems = self._choice_block(block)[: n_draws - block * CHOICE_BLOCK]
            self._served += np.bincount(systems, minlength=len(self.nframes))
