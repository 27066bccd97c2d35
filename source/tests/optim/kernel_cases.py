"""The kernels that orthogonalize: gates, and the table of their cases in Triton's interpreter and on a GPU.

A matrix of 64 × 64 costs the interpreter 0.04 s as a whole and 0.2 to 0.4 s otherwise; 240 × 240 takes 1 to 4 s. So
large ones and batch 133 have few cases there, most marked slow, and one case is enough where another differs in size
only; a GPU runs all. The interpreter runs programs one after the other: kernels whose programs meet at barriers get one
program a matrix there, so barriers and the division of work are tested on a GPU only.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_backends import DEVICE, INTERPRETING
from polar_oracle import RESOLUTION, SHAPES, SPECTRA, Oracle, matrices
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_muon.optim.polar import SCHEDULES, dispatch, orthogonalize_matrices
from deepmd_muon.optim.polar.orthogonalization import choose_all, run_kernels

BATCHES = (0, 1, 3, 133)
SCALES = (1e-30, 1e-20, 1e-7, 2.0**-90, 2.0**90, 1e7, 1e20, 1e30)
# The gates: relative error along every singular pair that a float32 input resolves, share of energy outside of these.
INSIDE, OUTSIDE = 3e-3, 0.02
# Two results within the gate, of one matrix in two memory layouts or on different tiles, may differ by this.
LIKE = 3e-3
COEFFICIENTS = SCHEDULES["8+2"].coefficients
# For what no step changes, such as strides and batches, where a step costs much: first, middle and last ones.
FEW_COEFFICIENTS = (*COEFFICIENTS[:2], *COEFFICIENTS[-2:])


@dataclasses.dataclass(frozen=True)
class Way:
    """One implementation, or the table's choice (of an H200's where an interpreter runs the kernels)."""

    name: str
    device: str = DEVICE.type
    coefficients: tuple[tuple[float, float, float], ...] = COEFFICIENTS

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        """Orthogonalize batches of matrices and bring the results back."""
        return [o.cpu() for o in self.run([x.to(self.device) for x in xs])]

    def run(self, xs: list[Tensor]) -> list[Tensor]:
        """Orthogonalize batches of matrices that are on the device."""
        if self.device == "cuda" and self.name == "default":
            return orthogonalize_matrices(xs, self.coefficients)
        if self.name != "default":
            return run_kernels(self.name, xs, self.coefficients)
        geometry = tuple((tuple(x.shape), x.stride(), x.dtype) for x in xs)
        chosen = choose_all(geometry, (9, 0), torch.float16, dispatch.IMPLEMENTATIONS)
        results: dict[int, Tensor] = {}
        for name in dict.fromkeys(chosen):
            members = [i for i, c in enumerate(chosen) if c == name]
            some = [xs[i] for i in members]
            done = (
                orthogonalize_matrices(some, self.coefficients, "float16", flash=False)
                if name == "torch"
                else run_kernels(name, some, self.coefficients)
            )
            results.update(zip(members, done, strict=True))
        return [results[i] for i in range(len(xs))]


def default_choice(shape: tuple[int, int], batch: int) -> str:
    """Return what the table chooses for a batch of float32 matrices on an H200."""
    m, n = min(shape), max(shape)
    return dispatch.choose(dispatch.MatrixBatch(m, n, batch))


def fits(name: str, shape: tuple[int, int]) -> bool:
    """Say whether the table would give an implementation three float32 matrices of a shape, were it the only one."""
    batch = dispatch.MatrixBatch(min(shape), max(shape), 3)
    return dispatch.choose(batch, (name,)) == name


def bits(x: Tensor) -> Tensor:
    """Return a tensor whose equality is that of bits, NaNs included."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def difference(a: Tensor, b: Tensor) -> float:
    """Return ‖a − b‖ / ‖b‖, the largest of a batch; NaN counts as infinite."""
    norm = torch.linalg.matrix_norm(b.double()).clamp_min(1e-300)
    return (
        (torch.linalg.matrix_norm(a.double() - b.double()) / norm)
        .nan_to_num(torch.inf)
        .max()
        .item()
    )


def check_schedules(
    way: Way, shape: tuple[int, int], kinds: tuple[str, ...] = ("rank1", "log5")
) -> None:
    """What is kept in fp32 follows the schedule: noise stays below its gate wherever later steps enlarge or shrink."""
    eight = SCHEDULES["8+2"].coefficients
    flipped = (tuple(-c for c in eight[0]), *eight[1:])
    changed = {
        "shrunk": (*eight, (1e-3, 0.0, 0.0)),
        "odd": (*eight, (0.0, 2.0, -1.0)),
        "flipped": flipped,
    }
    x, oracle = judged(shape, kinds, 1)
    for name in (*SCHEDULES, *changed):
        coefficients = changed[name] if name in changed else SCHEDULES[name].coefficients
        (o,) = run_kernels(way.name, [x.to(way.device)], coefficients)
        for i, noise in enumerate(oracle.noise(o.cpu())):
            assert noise <= OUTSIDE, (name, kinds[i], noise)


@functools.lru_cache(maxsize=128)
def judged(shape: tuple[int, int], kinds: tuple[str, ...], each: int) -> tuple[Tensor, Oracle]:
    """Return a batch, `each` matrices of every kind, and what judges it."""
    x = torch.cat([matrices(kind, each, *shape, seed=i) for i, kind in enumerate(kinds)])
    return x, Oracle(x)


def check_quality(
    way: Way, shape: tuple[int, int], kinds: tuple[str, ...] = SPECTRA, each: int = 1
) -> None:
    """Gate error and noise on every spectrum, tall and wide; NaN, which compares as false, fails."""
    x, oracle = judged(shape, kinds, each)
    for o in (way(x)[0], way(x.mT)[0].mT):
        assert o.shape == x.shape
        assert o.dtype == torch.float32
        errors, noise = oracle.error(o, RESOLUTION), oracle.noise(o)
        for i in range(len(x)):
            assert errors[i] <= INSIDE, (kinds[i // each], errors[i])
            assert noise[i] <= OUTSIDE, (kinds[i // each], noise[i])


def check_batches(way: Way, shape: tuple[int, int], batches: tuple[int, ...] = BATCHES) -> None:
    """Any batch gives what each matrix gives alone; of whole matrices the same bits."""
    some = matrices("gaussian", 3, *shape)
    alone = torch.cat([way(some[i : i + 1])[0] for i in range(3)])
    for batch in batches:
        members = torch.arange(batch) % 3
        (o,) = way(some[members])
        assert o.shape == (batch, *shape)
        if batch:
            assert difference(o, alone[members]) <= LIKE, batch
        if way.name == "whole":
            assert torch.equal(o, alone[members]), batch


def check_views(way: Way, shape: tuple[int, int], batch: int = 2) -> None:
    """Strided, offset, transposed and expanded views give what copies give; nothing around them matters or changes."""
    m, n = shape
    base = matrices("gaussian", batch, *shape).to(way.device)
    (expected,) = way(base)
    hull = torch.full((batch + 1, 2 * m + 3, 2 * n + 5), torch.nan, device=way.device)
    hulls = {
        "offset": (padded := hull.clone(), padded[1:, 2 : 2 + m, 3 : 3 + n]),
        "strided": (apart := hull.clone(), apart[:batch, 1 : 1 + 2 * m : 2, 2 : 2 + 2 * n : 2]),
        "turned": (transposed := hull.mT.clone(), transposed.mT[1:, 2 : 2 + m, 3 : 3 + n]),
        "batch last": (last := hull.permute(1, 2, 0).clone(), last.permute(2, 0, 1)[1:, :m, :n]),
    }
    for _, view in hulls.values():
        view.copy_(base)
    before = {kind: parent.clone() for kind, (parent, _) in hulls.items()}
    for kind, o in zip(hulls, way(*(view for _, view in hulls.values())), strict=True):
        assert difference(o, expected) <= LIKE, kind
        assert torch.equal(bits(hulls[kind][0]), bits(before[kind])), kind
    expanded = [
        base[:1].expand(3, m, n),
        base[:, :1].expand(batch, m, n),
        base[:, :, :1].expand(batch, m, n),
    ]
    copies = [x.contiguous() for x in expanded]
    for x, o, copied in zip(expanded, way(*expanded), way(*copies), strict=True):
        assert difference(o, copied) <= LIKE, x.stride()
    for x, copied in zip(expanded, copies, strict=True):
        assert torch.equal(x, copied)


def check_tiles(way: Way, shape: tuple[int, int], batch: int, scales: tuple[float, ...]) -> None:
    """Tiles read from the input and written to the result give the same bits as all other ways, turned or not."""
    for scale in scales:
        base = scale * matrices("gaussian", batch, *shape)
        expected, *others = way(base, base, base)  # of so many tensors: not read in tiles
        square = shape[0] == shape[1]
        changed = 0.25 * base.flip(0)  # another order and norm, which change no bit of the results
        one, two = way(base, changed.mT.contiguous().mT if square else changed.mT)
        for other in (*others, one, (two if square else two.mT).flip(0)):
            assert torch.equal(bits(expected), bits(other))
        for x in (base, base.mT.contiguous().mT):
            for _ in range(
                3 if way.device == "cuda" else 1
            ):  # the second call is recorded, and the third replayed
                assert torch.equal(bits(way(x)[0]), bits(expected))
            if not square:
                assert torch.equal(bits(way(x.mT)[0].mT), bits(expected))


def check_scales(way: Way, shape: tuple[int, int], some: tuple[float, ...] = SCALES) -> None:
    """The scale does not matter, from the smallest to the largest; powers of two do not change a bit.

    (A batch is compared with a batch: how many matrices share the device may decide on the tiles of each.)
    """
    x = matrices("gaussian", 1, *shape)
    scales = torch.tensor(some, dtype=torch.float64)[:, None, None]
    (expected,), (o,) = way(x.repeat(len(some), 1, 1)), way((x.double() * scales).float())
    assert difference(o, expected) <= LIKE
    for i, scale in enumerate(some):
        if scale in (2.0**-90, 2.0**90):
            assert torch.equal(o[i], expected[i]), scale
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        narrow = x.to(dtype)
        assert torch.equal(way(narrow)[0], way(narrow.float())[0]), dtype


def check_special_values(way: Way, shape: tuple[int, int]) -> None:
    """Zeros stay zero, NaN and infinity stay in their matrix, the input is not written."""
    x = matrices("gaussian", 3, *shape)
    x[1] = 0.0
    (expected,) = way(x)
    assert torch.equal(expected[1], torch.zeros(shape))
    for bad in (torch.nan, torch.inf):
        y = x.clone()
        y[2, shape[0] // 2, shape[1] // 2] = bad
        given = y.to(way.device)
        (o,) = way(given)
        assert torch.isnan(o[2]).any()
        for i in (0, 1):
            assert torch.equal(bits(o[i]), bits(expected[i])), (bad, i)
        assert torch.equal(bits(given.cpu()), bits(y)), bad


def check_signs(way: Way, shape: tuple[int, int], seeds: int = 5) -> None:
    """A matrix of rank one comes out as itself, normalised: no direction is flipped, damped or joined by others."""
    x = torch.cat([matrices("rank1", 1, *shape, seed=seed) for seed in range(seeds)])
    x = torch.cat([x, -x])
    (o,) = way(x)
    assert difference(o, x / torch.linalg.matrix_norm(x)[:, None, None]) <= 0.05
    cosines = (o * x).sum((1, 2)) / (torch.linalg.matrix_norm(o) * torch.linalg.matrix_norm(x))
    assert cosines.min() >= 0.999


def check_company(way: Way, shapes: tuple[tuple[int, int, int], ...]) -> None:
    """Alone and in any company: the same bits."""
    xs = [matrices("gaussian", *shape, seed=i) for i, shape in enumerate(shapes)]
    for x, o in zip(xs, way(*xs), strict=True):
        assert torch.equal(way(x)[0], o)
        for i in range(min(len(x), 3)):
            assert torch.equal(way(x[i : i + 1])[0][0], o[i])


def check_repeats(way: Way, shapes: tuple[tuple[int, int, int], ...], runs: int = 10) -> None:
    """Every run gives the same bits."""
    xs = [matrices("log3", *shape, seed=i).to(way.device) for i, shape in enumerate(shapes)]
    first = way(*xs)
    for _ in range(runs - 1):
        for again, o in zip(way(*xs), first, strict=True):
            assert torch.equal(again, o)


class Poison(TorchDispatchMode):
    """Everything that is allocated inside is full of NaNs, unless it asks for zeros, and lies between guard bands."""

    BAND = 4096  # bytes before and after
    FILL = 0xFF  # a NaN in every floating-point kind, −1 in integers
    EMPTY = (
        "aten::empty",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
    )
    ZEROS = ("aten::zeros", "aten::zeros_like", "aten::new_zeros")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch not import its compiler, which takes seconds: nothing is compiled here."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name not in self.EMPTY + self.ZEROS or result.numel() == 0:
            return result
        size = 1 + sum(
            stride * (length - 1)
            for stride, length in zip(result.stride(), result.shape, strict=True)
        )
        size *= result.element_size()
        room = -(-size // 16) * 16
        memory = torch.full(
            (room + 2 * self.BAND,), self.FILL, dtype=torch.uint8, device=result.device
        )
        self.kept.append((memory, size))
        inner = (
            memory[self.BAND : self.BAND + room]
            .view(result.dtype)
            .as_strided(result.shape, result.stride())
        )
        return inner.zero_() if name in self.ZEROS else inner

    def check(self, *results: Tensor) -> None:
        """Assert that no band was written and that the results were allocated here."""
        for memory, size in self.kept:
            assert (memory[: self.BAND] == self.FILL).all(), "written before the beginning"
            assert (memory[self.BAND + size :] == self.FILL).all(), "written past the end"
        owned = {memory.untyped_storage().data_ptr() for memory, _ in self.kept}
        assert all(o.untyped_storage().data_ptr() in owned for o in results)


def forget_workspaces() -> None:
    """Clear all that the kernels' modules remember, so that it is allocated anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith("deepmd_muon.optim.polar."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def check_memory(way: Way, shapes: tuple[tuple[int, int, int], ...]) -> None:
    """What was in results and workspaces before does not matter; nothing is written outside of them."""
    xs = [matrices("gaussian", *shape, seed=i).to(way.device) for i, shape in enumerate(shapes)]
    forget_workspaces()
    with Poison() as poison:
        results = way.run(xs)
    poison.check(*results)
    forget_workspaces()
    expected = way(*xs)
    for o, e in zip(results, expected, strict=True):
        assert torch.isfinite(e).all()
        assert torch.equal(o.cpu(), e)


FORCED = tuple(name for name in dispatch.IMPLEMENTATIONS if name != "torch")
# A shape of every implementation's own for the gates that do not depend much on it.
OWN = {
    "whole": (17, 33),
    "strips": (65, 300),
    "symmetric": (200, 450),
    "default": (65, 64),
}
# Shapes at the borders of tiles and of the table's rules.
EVERY = (*SHAPES, (1, 256), (60, 250), (128, 128), (320, 64), (768, 128), (500, 700))
LARGE = ((1030, 520), (2050, 1024))
LONG = ("rank8", "log5", "log8")


@dataclasses.dataclass(frozen=True)
class Case:
    """A gate for one implementation, with its further arguments; `few` means four of the ten steps."""

    check: Callable[..., None]
    name: str
    arguments: tuple[Any, ...]
    few: bool = False
    slow: bool = False

    def run(self) -> None:
        """Raise AssertionError unless the implementation passes the gate."""
        self.check(
            Way(self.name, DEVICE.type, FEW_COEFFICIENTS if self.few else COEFFICIENTS),
            *self.arguments,
        )

    def param(self, index: int) -> Any:
        """Return the case under a name for pytest."""
        words = re.findall(r"[\w.+-]+", str(self.arguments[:1]))
        name = "-".join(
            [self.check.__name__.removeprefix("check_"), self.name, "x".join(words), str(index)]
        )
        return pytest.param(self, id=name, marks=[pytest.mark.slow] * self.slow)


def of_interpreter() -> Iterator[Case]:
    """Yield the cases that the interpreter has time for."""

    def rows(
        check: Callable[..., None], table: dict[str, list[tuple]], **options: bool
    ) -> Iterator[Case]:
        return (
            Case(check, name, arguments, **options)
            for name, some in table.items()
            for arguments in some
        )

    few = {"few": True}
    quality = {
        "whole": [(shape, SPECTRA) for shape in SHAPES if max(shape) <= 65],
        "strips": [((17, 33), SPECTRA), *((shape, LONG) for shape in ((5, 7), (63, 65), (65, 64)))],
        "symmetric": [((25, 50), LONG), ((65, 64), ("rank8", "log8")), ((127, 129), ("log5",))],
        "default": [((63, 65), SPECTRA), ((127, 129), ("log5",))],
    }
    slow_quality = {
        "strips": [
            ((65, 64), SPECTRA),
            *((shape, LONG) for shape in ((16, 16), (25, 50), (127, 129))),
            *((shape, ("log5",)) for shape in ((128, 384), (240, 240), (241, 1607))),
        ],
        "symmetric": [
            *(((16, 16), LONG), ((25, 50), SPECTRA)),
            *((shape, ("log5",)) for shape in ((128, 384), (241, 1607))),
        ],
    }
    yield from rows(check_quality, quality)
    yield from rows(check_quality, slow_quality, slow=True)
    yield Case(check_schedules, "symmetric", ((25, 50), ("rank1",)))
    yield Case(check_schedules, "symmetric", ((25, 50), ("log5",)), slow=True)
    whole = [(1, 1), (1, 8), (2, 1), (17, 33), (65, 64), (5, 7)]
    small = {
        "strips": [((17, 33), (1, 3))],
        "symmetric": [((5, 7), (1, 3))],
    }
    some = {
        "whole": [(shape, (1, 3)) for shape in whole],
        **small,
        "default": [((5, 7), (0, 1, 3))],
    }
    yield from rows(check_batches, some, **few)
    yield Case(check_batches, "whole", ((5, 7), (133,)), few=True, slow=True)
    for name in FORCED:
        yield Case(check_views, name, ((6, 9), 1), **few)
        yield Case(
            check_scales, name, ((6, 9), SCALES if name == "whole" else (1e-30, 2.0**90)), **few
        )
        yield Case(check_special_values, name, ((6, 9) if name != "symmetric" else (9, 6),), **few)
        yield Case(check_signs, name, ((20, 30), 2 if name in ("whole", "strips") else 1))
    yield Case(check_views, "whole", ((33, 20),), **few)
    yield from rows(
        check_tiles, {"symmetric": [((64, 64), 2, (1e30,)), ((64, 140), 1, (1.0,))]}, **few
    )
    yield Case(check_tiles, "symmetric", ((128, 64), 2, (1.0,)), few=True, slow=True)
    memory = {
        "whole": [(((2, 5, 7), (1, 9, 4), (1, 1, 8), (1, 64, 65), (1, 60, 250)),)],
        "strips": [(((2, 5, 7), (1, 70, 100)),)],
        "symmetric": [(((1, 70, 20),),)],
        "default": [(((1, 5, 7), (1, 60, 70), (3, 1, 8)),)],
    }
    slow_memory = {
        "strips": [(((1, 60, 40), (1, 70, 300)),)],
        "symmetric": [(((1, 5, 7), (1, 70, 60), (1, 20, 150)),)],
        "default": [(((1, 5, 7), (1, 127, 129), (3, 1, 8)),)],
    }
    yield from rows(check_memory, memory, **few)
    yield from rows(check_memory, slow_memory, few=True, slow=True)
    mixed = ((2, 5, 7), (1, 30, 9), (3, 1, 8), (1, 40, 40))
    yield Case(check_company, "whole", (mixed,))
    yield Case(check_repeats, "whole", (mixed, 2))


def of_gpu() -> Iterator[Case]:
    """Yield the cases of a GPU: every gate, each implementation forced and as the table chooses."""
    for name in (*FORCED, "default"):
        shapes = tuple(shape for shape in EVERY if name == "default" or fits(name, shape))
        for shape in shapes:
            kinds = SPECTRA if max(shape) < 1000 else ("gaussian", "rank8", "log5", "log8")
            yield Case(check_quality, name, (shape, kinds))
            yield Case(check_batches, name, (shape, (1, 3, 133) if name in FORCED else BATCHES))
            for check in (check_views, check_scales, check_special_values, check_signs):
                yield Case(check, name, (shape,))
        for shape in LARGE:
            if name in FORCED and fits(name, shape):
                yield Case(check_quality, name, (shape, ("rank8", "log5")))
        m, n = OWN[name]
        several = tuple((2, *shape) for shape in shapes)
        yield Case(check_repeats, name, (several,))
        yield Case(check_memory, name, (((1, m, n), (3, n, m)),))
        yield Case(check_memory, name, (several,))
    for batch, *shape in (
        (2, 128, 128),
        (2, 256, 768),
        (8, 1024, 4096),
        (1, 4096, 4096),
        (3, 2048, 8192),
    ):
        yield Case(check_tiles, "symmetric", (tuple(shape), batch, (1.0, 2.0**-100, 1e30)))
    for shape in ((128, 128), (256, 768), (300, 1000), (1024, 2048)):
        yield Case(check_schedules, "symmetric", (shape,))
    yield Case(
        check_company, "whole", (((133, 5, 7), (1, 30, 9), (3, 1, 8), (2, 100, 120), (1, 64, 250)),)
    )
    # A step gives the same on any number of GPUs: what shares a launch decides on strips and tiles.
    yield Case(
        check_company, "strips", (((6, 768, 128), (6, 320, 128), (6, 320, 64), (2, 240, 240)),)
    )
    yield Case(check_company, "strips", (((4, 240, 240), (2, 1600, 240), (2, 100, 384)),))


CASES = [case.param(i) for i, case in enumerate(of_interpreter() if INTERPRETING else of_gpu())]
