"""The fused steps of an optimizer: whether they may be used, and those that are kept.

A list of parameters is stepped by `FusedMuon` if the kernels implement its settings (`fuses`), and
if their results on small matrices agree with torch's within a tolerance (`_agrees_with_torch`).
Otherwise `muon_` steps it. The kernels of small models are compiled ahead in threads
(`compile_kernels`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from deepmd_muon.coverage import Coverage
from deepmd_muon.optim.config import DEEPMD_KIT, HybridMuonConfig
from deepmd_muon.optim.cuda import launch_in_threads
from deepmd_muon.optim.polar import dispatch
from deepmd_muon.optim.polar.dispatch import IMPLEMENTATIONS, geometry_of
from deepmd_muon.optim.polar.launches import launches_for, start_launch
from deepmd_muon.optim.polar.orthogonalization import check, choices
from deepmd_muon.optim.polar.schedules import Coefficients, coefficients_of
from deepmd_muon.optim.polar.tables import AddressTable, Inputs, captured_addresses
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.magma import SCORE, Magma
from deepmd_muon.optim.rules.master_weights import NARROW, MasterWeights
from deepmd_muon.optim.rules.registry import matrix_rules
from deepmd_muon.optim.update.fused import SMALL, TYPES, FusedMuon
from deepmd_muon.optim.update.gradients import StepControl, gradients_of
from deepmd_muon.optim.update.muon import muon_

_LOG = logging.getLogger(__name__)
# Fused steps made with the same first parameter, recorded or not, up to which new ones may be
# recorded. If tensors or lists change again and again, recording costs more than it saves.
_MAX_RECORDINGS = 8
# Recorded steps of large models keep at most this share of a GPU's memory. Launched from Python
# they wait for the host: 11 ms instead of 1 for 30 million weights (H200).
_RECORDED_SHARE = 1 / 64
_BYTES_PER_ELEMENT = 27  # of a step, see `arguments.workspace`
# Bound on the lists of parameters whose steps are kept: if experts get gradients in turn, there are
# always new lists.
_MOST_LISTS = 16
FUSED_RULES = (Magma,)  # the rules that the kernels of `FusedMuon` implement
FUSED_COVERAGE = Coverage(
    frozenset(
        {
            # The kernels read these, or the tables hold what follows from them.
            *("momentum", "weight_decay", "nesterov", "scaling", "layout", "lr_adjust_coeff"),
            "magma_muon",
            # Both forms of the step call the same orthogonalization.
            *("enable_gram", "flash_muon", "schedule", "large_schedule", "large_matrix_dim"),
            "precision",
            # These decide which parameters and views a step receives.
            *("muon_mode", "min_matrix_dim", "splits", "adam_patterns", "adamw_patterns"),
            *("muon_patterns", "conv_patterns", "expert_patterns", "local_patterns"),
            *("vector_route", "sharded"),
            # These act before or after a step.
            *("on_route_change", "on_nonfinite", "offload"),
            # Of the other routes.
            *("adam_beta1", "adam_beta2", "adam_eps", "adam_implementation", "adam_lr_ratio"),
            "adam_weight_decay",
            # These act only through the rules of `matrix_rules`, which `fuses` checks.
            *("normuon", "normuon_beta", "cautious_decay", "master_weights", "rules"),
        }
    )
)
_COMPILING = threading.Lock()
_COMPILED: set[tuple[object, ...]] = set()  # views, device, dtypes and settings
# Implementations with a kernel for each class of shapes; a launch on zeros of the same shapes
# compiles it.
_BY_CLASS = ("whole", "strips")


class FusedError(RuntimeError):
    """The result of the fused kernels differs from torch's."""


class FusedStepCache:
    """The fused steps of an optimizer, one for each of the latest lists of parameters.

    The branches of a multi-task model have different lists that begin with the same shared
    parameters. Each list keeps its step, because a captured graph reads its tables, and no tables
    can be made during a capture.
    """

    def __init__(self) -> None:
        # By the ids of the parameters, in the order of their first step. A new tensor may have an
        # old id, so `FusedMuon.fits` compares addresses.
        self._known: dict[tuple[int, ...], FusedMuon] = {}
        self._made: Counter[Tensor] = Counter()  # steps made, by first parameter
        self._captured: list[FusedMuon] = []  # kept, because captured graphs read their tables

    def step(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        views: Sequence[MatrixView],
        *,
        lr: float | Tensor,
        settings: HybridMuonConfig,
        control: StepControl,
        maximize: bool = False,
    ) -> bool:
        """Take one step as `muon_` does and return True.

        Return False, without changes, if `muon_` is needed: the kernels lack a setting, do not take
        the gradients' dtypes, disagree with torch, or do not take the tensors' layout or dtypes.
        """
        device = params[0].device
        dtype = params[0].dtype
        scores = state.get(SCORE, [])
        key = tuple(map(id, params))
        known = self._known.get(key)
        is_valid = known is not None and known.fits(params, buffers, scores, settings)
        fused = known if is_valid else None
        if fused is None and not fuses(settings.structure, dtype):
            return False
        grads = gradients_of(params)
        grad_dtype = grads[0].dtype  # may differ from earlier steps
        if grad_dtype not in TYPES or any(g.dtype is not grad_dtype for g in grads):
            return False
        # Triton launches on the current device.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if known is None:
                compile_kernels(tuple(views), device, dtype, grad_dtype, settings)
            # Cached. Asked in every step, because the dtype of the gradients may be new; the layout
            # below is tested only when tables are made.
            if not _agrees_with_torch(
                device, dtype, grad_dtype, magma=bool(scores), nesterov=settings.nesterov
            ):
                return False
            if fused is None:
                if not all(x.is_contiguous() and x.dtype == dtype for x in (*params, *buffers)):
                    return False
                fused = self._make(params, buffers, scores, views, settings, replaced=known)
                self._known[key] = fused
                if len(self._known) > _MOST_LISTS:
                    oldest = next(iter(self._known))
                    del self._known[oldest]
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._captured.append(fused)
            if isinstance(lr, Tensor) and not lr.is_cuda:
                lr = float(lr)  # does not synchronize
            grads = [g.contiguous() for g in grads]
            fused.step(grads, lr, control, maximize=maximize, settings=settings)
        return True

    def _make(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        scores: Sequence[Tensor],
        views: Sequence[MatrixView],
        settings: HybridMuonConfig,
        *,
        replaced: FusedMuon | None,
    ) -> FusedMuon:
        """Make the step of a list of parameters, recorded if that pays and memory suffices."""
        self._made[params[0]] += 1
        is_stable = self._made[params[0]] <= _MAX_RECORDINGS
        elements = sum(p.numel() for p in params)
        recorded_elements = sum(
            fused.elements
            for fused in self._known.values()
            if fused.records and fused is not replaced
        )
        is_small = elements <= SMALL
        has_room = is_small or recorded_elements + elements <= _most_recorded(params[0].device)
        return FusedMuon(params, buffers, scores, views, settings, recording=is_stable and has_room)


def _most_recorded(device: torch.device) -> int:
    """Return the elements whose steps may be recorded: their memory is a small part of a GPU's."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(min(free, _RECORDED_SHARE * total)) // _BYTES_PER_ELEMENT


@functools.lru_cache(maxsize=256)
def fuses(settings: HybridMuonConfig, dtype: torch.dtype) -> bool:
    """Return whether the kernels implement these settings and their rules; log what they lack."""
    fused_rules = FUSED_RULES if dtype in NARROW else (*FUSED_RULES, MasterWeights)
    # The class itself: a subclass may do something else.
    lacking = [rule.name for rule in matrix_rules(settings) if type(rule) not in fused_rules]
    lacking += FUSED_COVERAGE.uncovered(settings)
    if settings.schedule == DEEPMD_KIT:
        lacking.append(f"schedule {DEEPMD_KIT!r}")
    if lacking:
        _LOG.info(
            "the fused kernels do not implement %s: torch's operations step the Muon route",
            ", ".join(lacking),
        )
    return not lacking


@functools.lru_cache(maxsize=64)
def _agrees_with_torch(
    device: torch.device,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    *,
    magma: bool,
    nesterov: bool,
) -> bool:
    """Return whether the kernels compile, and agree with torch on small matrices; log why not."""
    try:
        _compare_with_torch(device, dtype, grad_dtype, magma=magma, nesterov=nesterov)
    except Exception as error:  # an error of the compiler or driver must not end a training run
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning(
            "fused steps of %s parameters are disabled, and torch is used instead: %s",
            dtype,
            reason,
        )
        return False
    return True


def _compare_with_torch(
    device: torch.device,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    *,
    magma: bool,
    nesterov: bool,
) -> None:
    """Raise FusedError unless two fused steps agree with `muon_`; the second may be a replay."""
    settings = HybridMuonConfig(
        magma_muon=magma, nesterov=nesterov, flash_muon=False, precision="float32"
    ).explicit()
    # Wide random blocks have full rank; otherwise rounding would determine the polar factor.
    random = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 8, 36, generator=random, dtype=torch.float64, device="cpu").to(device)
    view = MatrixView(2, 8, 36, "columns", (20, 16))
    results = []
    for is_fused in (False, True):
        p = x.to(dtype, copy=True).requires_grad_()
        m = (0.5 - x).to(dtype)
        if grad_dtype != dtype:
            p.grad_dtype = None  # allows a gradient of another dtype
        p.grad = x.flip(1).to(grad_dtype)
        scores = [torch.full((4,), 0.5, device=device)] if magma else []
        state = {SCORE: scores} if magma else {}
        with torch.no_grad():
            fused = FusedMuon([p], [m], scores, [view], settings) if is_fused else None
            for _ in range(2):
                if fused is not None:
                    fused.step([p.grad], 0.1, StepControl(), maximize=False)
                else:
                    muon_([p], [m], state, [view], lr=0.1, settings=settings, control=StepControl())
        results.append([p.detach(), m, *scores])
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    for expected, value in zip(*results, strict=True):
        difference = (value.double() - expected.double()).abs().max()
        error = float(difference / expected.double().abs().max())
        if not error <= tolerance:
            raise FusedError(f"the result differs from torch's by {error:.1e}")


def compile_kernels(
    views: tuple[MatrixView, ...],
    device: torch.device,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    settings: HybridMuonConfig,
) -> None:
    """Compile and check the kernels of a small model's step in parallel threads.

    A call waits for a running call of another thread. Repeated calls do nothing, as do calls on a
    CPU and while a graph is captured. The kernels of large models are compiled by their first step.
    """
    elements = sum(view.batch * view.rows * view.columns for view in views)
    if device.type != "cuda" or elements > SMALL or torch.cuda.is_current_stream_capturing():
        return
    with _COMPILING:
        key = (views, device, dtype, grad_dtype, settings)
        if key in _COMPILED:
            return
        _COMPILED.add(key)
        calls: list[Callable[[], object]] = []
        if fuses(settings.structure, dtype):  # as `step`, so that it logs once
            calls.append(
                lambda: _agrees_with_torch(
                    device,
                    dtype,
                    grad_dtype,
                    magma=settings.magma_muon,
                    nesterov=settings.nesterov,
                )
            )
        if settings.flash_muon and settings.precision in ("auto", "float16"):
            counts: Counter[tuple[int, int]] = Counter()
            for view in views:
                for shape in view.block_shapes:
                    counts[shape] += view.batch
            # As the step launches them: blocks of one shape are a batch, batches of one schedule
            # share launches.
            by_schedule: dict[Coefficients, list[Tensor]] = defaultdict(list)
            for shape, count in counts.items():
                schedule = coefficients_of(settings.schedule_of((count, *shape)))
                by_schedule[schedule].append(
                    torch.zeros(count, *shape, dtype=torch.float32, device=device)
                )
            for schedule, matrices in by_schedule.items():
                calls += compilations(matrices, schedule)
        launch_in_threads(calls, device)


def compilations(
    matrices: Sequence[Tensor], coefficients: Coefficients
) -> list[Callable[[], object]]:
    """Return calls that compile and check the kernels for such matrices, one kernel per call.

    Only shapes, dtypes and the device of `matrices` matter. A call passes on errors of the compiler
    or driver.
    """
    device = matrices[0].device
    capability = torch.cuda.get_device_capability(device)
    usable = tuple(name for name in IMPLEMENTATIONS if name not in dispatch.FAILED)
    # The operands of `precision` "auto" and "float16", with which alone these kernels run.
    names = choices(geometry_of(matrices), capability, torch.float16, usable)
    calls: list[Callable[[], object]] = [functools.partial(captured_addresses, matrices[:1])]
    for name in dict.fromkeys(names):
        if name == "torch":
            continue
        calls.append(functools.partial(check, name, device))
        if name not in _BY_CLASS:
            continue
        members = [x for x, its_name in zip(matrices, names, strict=True) if its_name == name]
        plan = launches_for(name, geometry_of(members), device)
        inputs = Inputs(AddressTable(len(members), device).of(members), members)
        out = torch.empty(plan.out_size, dtype=torch.float32, device=device)
        # One launch for each kernel that these matrices need.
        by_constants = {tuple(launch.constants.items()): launch for launch in plan.launches}
        calls += [
            functools.partial(start_launch, name, launch, inputs, coefficients, out)
            for launch in by_constants.values()
        ]
    return calls
