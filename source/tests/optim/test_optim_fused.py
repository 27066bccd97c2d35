"""The fused steps against `muon_`, which defines them: on a GPU, or in the process of the interpreter.

`test_kernels.py` starts that process: Triton reads TRITON_INTERPRET when a kernel is defined, and a process that has
set it compiles nothing any more.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in the interpreter's process", allow_module_level=True)

from hypothesis import Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from settings_changes import changes_of

from deepmd_muon.coverage import Coverage
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.polar.schedules import coefficients_of
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.magma import SCORE_START, Magma
from deepmd_muon.optim.rules.registry import matrix_rules, register_rule, tensors_of
from deepmd_muon.optim.update import applied, fused, fused_steps
from deepmd_muon.optim.update.fused import FusedMuon
from deepmd_muon.optim.update.fused_steps import FusedStepCache
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.update.muon import muon_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
# Shape and view: whole, tall, an even size, experts, blocks of columns (not contiguous) and of rows, blocks that are
# interleaved, a vector.
CASES = [
    ((7, 40), MatrixView(1, 7, 40)),
    ((45, 30), MatrixView(1, 45, 30)),
    ((16, 80), MatrixView(1, 16, 80)),
    ((3, 8, 24), MatrixView(3, 8, 24)),
    ((2, 6, 50), MatrixView(2, 6, 50, "columns", (32, 10, 8), 2)),
    ((30, 33), MatrixView(1, 30, 33, "rows", (9, 21))),
    ((24, 20), MatrixView(1, 24, 20, "rows", (16, 4, 4), 4)),
    ((1, 90), MatrixView(1, 1, 90)),
]
VIEWS = [view for _, view in CASES]
SETTINGS = HybridMuonConfig(flash_muon=False, precision="float32").explicit()


class Job:
    """Parameters, momenta and scores that both implementations start from."""

    def __init__(self, dtype=torch.float32, damped=True):
        generator = torch.Generator().manual_seed(3)

        def draw(shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

        self.params = [draw(shape).requires_grad_() for shape, _ in CASES]
        self.buffers = [draw(shape) for shape, _ in CASES]
        self.scores = (
            [torch.full((view.blocks,), SCORE_START, device=DEVICE) for view in VIEWS]
            if damped
            else []
        )
        self.give(0)

    def give(self, seed):
        generator = torch.Generator().manual_seed(50 + seed)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)

    @property
    def lists(self):
        return self.params, self.buffers, {"magma_score": self.scores} if self.scores else {}, VIEWS

    @property
    def tensors(self):
        return [x.detach() for x in (*self.params, *self.buffers, *self.scores)]


def run_both(
    prepare=lambda job: None,
    *,
    steps=2,
    dtype=torch.float32,
    lr=0.1,
    maximize=False,
    scale=None,
    **settings,
):
    """Step both ways; return the tensors after it, defined and found."""
    settings = HybridMuonConfig(
        flash_muon=False, precision="float32", weight_decay=0.01, **settings
    ).explicit()
    scale = None if scale is None else torch.tensor(scale, device=DEVICE)
    results = []
    for step in (muon_, FusedStepCache().step):
        job = Job(dtype, settings.magma_muon)
        for k in range(steps):
            job.give(k)
            prepare(job)
            with torch.no_grad():
                done = step(
                    *job.lists,
                    lr=lr,
                    settings=settings,
                    control=StepControl(None, scale),
                    maximize=maximize,
                )
            assert done is not False
        results.append(job.tensors)
    return results


def differences(results):
    """Return the largest difference of each tensor over its largest entry."""
    return [
        float((a.double() - b.double()).abs().max() / a.double().abs().max())
        for a, b in zip(*results, strict=True)
    ]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float64, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)],
)
def test_equals_its_definition(dtype, tolerance):
    defined, found = run_both(dtype=dtype)
    assert max(differences((defined, found))) <= tolerance
    if dtype == torch.float64:
        momenta = slice(len(CASES), 2 * len(CASES))
        assert max(differences((defined[momenta], found[momenta]))) <= 1e-15


SWITCHES = st.fixed_dictionaries(
    {
        "nesterov": st.booleans(),
        "magma_muon": st.booleans(),
        "scaling": st.sampled_from(["match_rms", "match_rms", "spectral"]),
        "layout": st.sampled_from(["as_stored", "in_out"]),
        "schedule": st.sampled_from(["8+2", "keller-jordan", ((1.5, -0.5, 0.0),) * 3]),
    }
)
# Numbers that schedulers, or a gradient scaler, change from step to step.
OF_ONE_STEP = st.fixed_dictionaries(
    {
        "momentum": st.sampled_from([0.0, 0.5, 0.95]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.5]),
        "lr": st.sampled_from([0.1, 0.02]),
        "scale": st.sampled_from([None, 2.0**10]),
        "skip": st.sampled_from([False, False, True]),
    }
)


@examples(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(SWITCHES, st.lists(OF_ONE_STEP, min_size=2, max_size=2), st.booleans(), st.booleans())
def test_random_settings_and_schedules_mean_the_same(switches, steps, maximize, bfloat16):
    results = []
    for step in (muon_, FusedStepCache().step):
        job = Job(torch.bfloat16 if bfloat16 else torch.float32, switches["magma_muon"])
        for k, numbers in enumerate(steps):
            numbers = dict(numbers)
            lr, scale, skip = (numbers.pop(key) for key in ("lr", "scale", "skip"))
            settings = HybridMuonConfig(
                flash_muon=False,
                precision="float32",
                lr_adjust_coeff=0.2 * (k + 1),
                **switches,
                **numbers,
            ).explicit()
            job.give(k)
            control = StepControl(
                torch.tensor(float(skip), device=DEVICE),
                None if scale is None else torch.tensor(scale, device=DEVICE),
            )
            with torch.no_grad():
                done = step(
                    *job.lists, lr=lr, settings=settings, control=control, maximize=maximize
                )
            assert done is not False
        results.append(job.tensors)
    assert max(differences(results)) <= (1.6e-2 if bfloat16 else 1e-5)


@dataclasses.dataclass(frozen=True)
class Halved(MatrixRule):
    """A rule of another package: updates of half the size."""

    name = "halved"

    def factors(self, polar, state):
        return [torch.full((len(x), 1, 1), 0.5, dtype=x.dtype, device=x.device) for x in polar]


register_rule(Halved())
START = HybridMuonConfig(flash_muon=False, precision="float32", weight_decay=0.01)
# Settings that no other value follows for, or that act together with others only.
EXAMPLES = {
    "layout": [{"layout": name, "scaling": "spectral"} for name in ("in_out", "out_in")],
    "schedule": [{"schedule": "polar-express"}, {"schedule": ((1.5, -0.5, 0.0),) * 6}],
    "large_schedule": [{"large_schedule": "polar-express-5", "large_matrix_dim": 20}],
    "large_matrix_dim": [{"large_matrix_dim": 20, "large_schedule": "polar-express-5"}],
    "normuon_beta": [{"normuon_beta": 0.5, "normuon": True}],
    "rules": [{"rules": ("halved",)}],
    "splits": [{"splits": ("*: rows 2",)}],
    "conv_patterns": [{"conv_patterns": ("*",)}],
    "sharded": [{"sharded": dataclasses.replace(START.sharded, slots=1)}],
    # Kernels of the polar factor run on a GPU only: both ways of a step call them.
    "flash_muon": [{"flash_muon": True}],
    **{
        name: [{name: ("*",)}]
        for name in (
            *("adam_patterns", "adamw_patterns", "muon_patterns"),
            *("expert_patterns", "local_patterns"),
        )
    },
}


def results_of(step, changes):
    """Take a step with changed settings; return the tensors after it, and what the step returned."""
    settings = dataclasses.replace(START, **changes).explicit()
    job = Job(damped=settings.magma_muon)
    params, buffers, scores, views = job.lists
    state = dict(scores)
    for key, tensor in tensors_of(matrix_rules(settings)).items():
        if key not in state:
            state[key] = [
                torch.full(
                    tensor.shape_for(tuple(p.shape), view),
                    tensor.start,
                    dtype=tensor.dtype_for(p.dtype),
                    device=DEVICE,
                )
                for p, view in zip(params, views, strict=True)
            ]
    with torch.no_grad():
        done = step(params, buffers, state, views, lr=0.1, settings=settings, control=StepControl())
    return job.tensors, done


def assert_each_setting_is_refused_or_implemented():
    """Change every setting: the gate says no, or the fused step does what `muon_` does."""
    plain, _ = results_of(muon_, {})
    without_effect = {}
    implemented = []
    for name, changes in changes_of(START, EXAMPLES).items():
        settings = dataclasses.replace(START, **changes).explicit()
        if not fused_steps.fuses(settings, torch.float32):
            continue
        wanted, _ = results_of(muon_, changes)
        if len(wanted) == len(plain) and all(map(torch.equal, wanted, plain)):
            without_effect |= changes
            continue
        found, done = results_of(FusedStepCache().step, changes)
        assert done is True, name
        # Both ways round directions that differ in the last bit.
        allowed = {"auto": 1e-3, "float16": 1e-3, "bfloat16": 1e-2}.get(settings.precision, 1e-5)
        assert max(differences((wanted, found))) <= allowed, name
        implemented.append(name)
    found, _ = results_of(FusedStepCache().step, without_effect)
    wanted, _ = results_of(muon_, without_effect)
    assert max(differences((wanted, found))) <= 1e-5, without_effect
    return implemented


def test_each_setting_is_refused_or_implemented():
    implemented = assert_each_setting_is_refused_or_implemented()
    assert {"nesterov False", "magma_muon False", "scaling none"} <= set(implemented)
    for refused in ({"schedule": "deepmd-kit"}, {"normuon": True}, {"rules": ("halved",)}):
        settings = dataclasses.replace(START, **refused).explicit()
        assert not fused_steps.fuses(settings, torch.float32)
        assert results_of(FusedStepCache().step, refused)[1] is False


@dataclasses.dataclass(frozen=True)
class OtherMagma(Magma):
    """A subclass of a rule that the kernels have: it may do something else."""

    name = "other"

    @classmethod
    def of(cls, settings):
        return cls()


def test_a_subclass_of_a_known_rule_is_another_rule(monkeypatch):
    settings = dataclasses.replace(START, weight_decay=0.02).explicit()
    assert fused_steps.fuses(settings, torch.float32)
    fused_steps.fuses.cache_clear()
    monkeypatch.setattr(fused_steps, "matrix_rules", lambda _: (OtherMagma(),))
    assert not fused_steps.fuses(settings, torch.float32)
    fused_steps.fuses.cache_clear()


def test_the_comparison_sees_a_gate_that_forgets_a_setting(monkeypatch):
    every = {field.name for field in dataclasses.fields(HybridMuonConfig)}
    monkeypatch.setattr(fused_steps, "FUSED_COVERAGE", Coverage(frozenset(every)))
    monkeypatch.setattr(fused_steps, "matrix_rules", lambda _: ())
    fused_steps.fuses.cache_clear()
    with pytest.raises(AssertionError):
        assert_each_setting_is_refused_or_implemented()
    fused_steps.fuses.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_on_the_device_means_the_same(dtype):
    assert max(differences(run_both(lr=torch.tensor(0.1, device=DEVICE, dtype=dtype)))) <= 1e-5


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_the_size_of_float64_gradients_does_not_matter(factor):
    def enlarge(job):
        for p, m in zip(job.params, job.buffers, strict=True):
            p.grad.mul_(factor)
            m.mul_(factor)

    defined, found = run_both(enlarge, steps=1, dtype=torch.float64)
    assert max(differences((defined, found))) <= 1e-6


def test_zero_gradients_move_as_defined():
    def clear(job):
        for p, m in zip(job.params, job.buffers, strict=True):
            p.grad.zero_()
            m.zero_()

    defined, found = run_both(clear)
    n = len(CASES)
    assert all(torch.equal(a, b) for a, b in zip(defined[n : 2 * n], found[n : 2 * n], strict=True))
    assert max(differences((defined[:n], found[:n]))) <= 1e-6  # weight decay alone
    assert max(differences((defined[2 * n :], found[2 * n :]))) <= 1e-6


def test_a_nan_stays_in_its_block():
    def spoil(job):
        job.params[3].grad[1, 2, 3] = float("nan")

    (clean, spoilt) = (run_both(steps=1)[1], run_both(spoil, steps=1)[1])
    n = len(CASES)
    for i, (a, b) in enumerate(zip(clean, spoilt, strict=True)):
        if i % n != 3:
            assert torch.equal(a, b), i
    assert torch.equal(clean[3][0], spoilt[3][0])
    assert torch.equal(clean[3][2], spoilt[3][2])
    assert spoilt[3][1].isnan().all()
    assert spoilt[n + 3].isnan().sum() == 1
    defined = run_both(spoil, steps=1)[0]
    torch.testing.assert_close(spoilt[2 * n + 3], defined[2 * n + 3], equal_nan=True)


def test_a_skipped_step_changes_no_bit():
    job = Job()
    before = [x.clone() for x in job.tensors]
    job.params[0].grad[0, 0] = float("inf")
    with torch.no_grad():
        assert FusedStepCache().step(
            *job.lists,
            lr=0.1,
            settings=SETTINGS,
            control=StepControl(torch.ones((), device=DEVICE)),
        )
    assert all(torch.equal(a, b) for a, b in zip(before, job.tensors, strict=True))


def test_gradients_may_lie_anywhere_and_move():
    def move(job):
        for i, p in enumerate(job.params):
            if i % 2:
                p.grad = p.grad.mT.contiguous().mT  # not contiguous
            else:
                p.grad = torch.cat([p.grad.new_zeros(1), p.grad.flatten()])[1:].view_as(
                    p
                )  # not aligned

    plain, moved = run_both(steps=3)[1], run_both(move, steps=3)[1]
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


def test_tables_are_made_anew_when_state_moves():
    (job, other), steps = (Job(), Job()), FusedStepCache()
    for k in range(2):
        with torch.no_grad():
            job.give(k)
            other.give(k)
            assert steps.step(*job.lists, lr=0.1, settings=SETTINGS, control=StepControl())
            job.buffers = [m.clone() for m in job.buffers]
            assert FusedStepCache().step(
                *other.lists, lr=0.1, settings=SETTINGS, control=StepControl()
            )
    assert all(torch.equal(a, b) for a, b in zip(job.tensors, other.tensors, strict=True))


def test_a_schedule_keeps_tables_and_graphs():
    (job, other), steps = (Job(), Job()), FusedStepCache()
    with torch.no_grad():
        for k, momentum in enumerate((0.95, 0.85, 0.9, 0.9)):
            scheduled = SETTINGS.with_numbers(
                {"momentum": momentum, "weight_decay": 0.4 * k, "lr_adjust_coeff": momentum}
            )
            for each in (job, other):
                each.give(k)
            assert steps.step(*job.lists, lr=0.1, settings=scheduled, control=StepControl())
            muon_(*other.lists, lr=0.1, settings=scheduled, control=StepControl())
    assert steps._made[job.params[0]] == 1
    (step,) = steps._known.values()
    assert len(step._recorded) == torch.cuda.is_available()
    for x, expected in zip(job.tensors, other.tensors, strict=True):
        torch.testing.assert_close(x, expected, rtol=2e-5, atol=2e-5)


def test_steps_of_few_lists_of_parameters_are_kept(monkeypatch):
    """As where another expert has gradients in every step."""
    monkeypatch.setattr(fused_steps, "_MOST_LISTS", 2)
    job, steps = Job(), FusedStepCache()
    params, buffers, state, views = job.lists
    with torch.no_grad():
        for last in (1, 2, 3, 1):
            lists = (
                params[:last],
                buffers[:last],
                {key: x[:last] for key, x in state.items()},
                views[:last],
            )
            assert steps.step(*lists, lr=0.1, settings=SETTINGS, control=StepControl())
            assert len(steps._known) == min(last, 2) or last == 1
    assert len(steps._known) == 2
    assert list(steps._known)[-1] == (id(params[0]),)


def test_steps_repeat_bitwise():
    first = run_both(steps=2)[1]
    for _ in range(3 if torch.cuda.is_available() else 1):  # the interpreter has no race
        assert all(torch.equal(a, b) for a, b in zip(first, run_both(steps=2)[1], strict=True))


def test_transposed_parameters_are_left_to_torch():
    job = Job()
    job.params[0] = job.params[0].detach().mT.contiguous().mT.requires_grad_()
    job.params[0].grad = torch.ones_like(job.params[0])
    before = [x.clone() for x in job.tensors]
    with torch.no_grad():
        done = FusedStepCache().step(
            *job.lists,
            lr=0.1,
            settings=SETTINGS,
            control=StepControl(),
        )
    assert done is False
    assert all(torch.equal(a, b) for a, b in zip(before, job.tensors, strict=True))


def test_large_matrices_are_cut_into_chunks():
    view = MatrixView(1, 64, 2500)
    generator = torch.Generator().manual_seed(0)
    p, m, g = (torch.randn(64, 2500, generator=generator).to(DEVICE) for _ in range(3))
    results = []
    for step in (muon_, None):
        q, n, score = (
            p.clone().requires_grad_(),
            m.clone(),
            torch.full((1,), SCORE_START, device=DEVICE),
        )
        q.grad = g
        with torch.no_grad():
            if step is None:
                fused = FusedMuon([q], [n], [score], [view], SETTINGS)
                fused.step([g], 0.1, StepControl(), maximize=False)
            else:
                step(
                    [q],
                    [n],
                    {"magma_score": [score]},
                    [view],
                    lr=0.1,
                    settings=SETTINGS,
                    control=StepControl(),
                )
        results.append([q.detach(), n, score])
    assert max(differences(results)) <= 1e-5


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.slow)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ],
)
def test_the_last_product_applies_its_result(dtype):
    applied.check.__wrapped__(DEVICE, dtype)


def test_the_last_product_updates_large_matrices(monkeypatch):
    """Wide, tall and stacked matrices, beside one that takes launches of its own; a skipped step changes nothing."""
    schedule = coefficients_of("polar-express-5")[::2]
    settings = HybridMuonConfig(schedule=schedule, weight_decay=0.1).explicit()
    views = [MatrixView(1, 128, 256), MatrixView(1, 256, 128), MatrixView(1, 7, 40)]
    generator = torch.Generator().manual_seed(0)
    start = [
        [torch.randn(v.rows, v.columns, generator=generator).to(DEVICE) for v in views]
        for _ in range(3)
    ]
    monkeypatch.setattr(fused, "SMALL", 0)
    monkeypatch.setattr(applied, "check", lambda *_: None)
    monkeypatch.setattr(
        applied, "choose_for", lambda *_: "symmetric"
    )  # rather than kernels for such small ones
    found = []
    for separately in (True, False):
        params, buffers, grads = ([x.clone() for x in some] for some in start)
        scores = [torch.full((1,), SCORE_START, device=DEVICE) for _ in views]
        with monkeypatch.context() as patch, torch.no_grad():
            if separately:
                patch.setattr(fused, "takes", lambda *_: False)
            step = FusedMuon(params, buffers, scores, views, settings)
            assert (step._applied is None) == separately
            assert all(torch.equal(p, q) for p, q in zip(params, start[0], strict=True))
            step.step(grads, 0.5, StepControl(), maximize=False)
        found.append([*params, *buffers, *scores])
        moved = [p.clone() for p in params]
        with torch.no_grad():
            step.step(grads, 0.5, StepControl(torch.ones((), device=DEVICE)), maximize=False)
        assert all(torch.equal(p, q) for p, q in zip(params, moved, strict=True))
    for i, (defined, got) in enumerate(zip(*found, strict=True)):
        update = (defined - start[0][i]).norm() if i < len(views) else defined.norm()
        assert (got - defined).norm() <= 3e-3 * update, i
