"""One training step of a deepmd-kit model on a GPU: its module eager, ours eager, ours in a CUDA graph.

    python source/benchmarks/hosted_step.py --cases mini-192 mini-384 mini-1536 --profile
    python source/benchmarks/hosted_step.py --cases mini-192 dpa2-192 --profile --compiled

A case is MODEL-ATOMS: mini, mini-float32 (no bfloat16), neo, air (DPA-4), dpa2, hybrid, se_e3. Structures are random
water at 1 g/cm³. A step is energy, forces and virial, an absolute-error loss, its gradient, and HybridMuon. Captured
and eager steps begin at the same weights; the printed difference of their losses and weights is that of sums in
another order, which two eager runs have as well.

deepmd-kit 3.2.0 must be importable. Its compiled operators and MPI are not needed: packages that only read files or
serve other models may be missing, stand-ins take their place.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import platform
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# Packages that deepmd-kit imports and these models do not call.
UNUSED = ("mendeleev", "scipy", "e3nn", "lmdb", "h5py", "msgpack", "yaml")
# Steps before a capture.
WARM_UP = 3
DENSITY = 0.1003  # atoms of water [1/Å³]
TYPE_MAP = ["O", "H"]

DPA4 = {
    "type": "dpa4",
    "sel": 120,
    "rcut": 6.0,
    "channels": 32,
    "n_radial": 16,
    "edge_norm": False,
    "use_env_seed": True,
    "lmax": 2,
    "mmax": 1,
    "n_blocks": 2,
    "so2_layers": 3,
    "radial_so2_mode": "degree_channel",
    "radial_so2_rank": 1,
    "n_focus": 1,
    "ffn_so3_grid": True,
    "so3_readout": "mlp",
    "grid_mlp": [False, False, False],
    "grid_branch": [0, 0, 1],
    "ffn_blocks": 1,
    "message_node_so3": True,
    "use_amp": True,
    "precision": "float32",
    "seed": 42,
}
FITTING = {"neuron": [240, 240, 240], "resnet_dt": True, "seed": 1}
REPINIT = {
    "rcut": 6.0,
    "rcut_smth": 0.5,
    "nsel": 120,
    "neuron": [25, 50, 100],
    "axis_neuron": 12,
    "tebd_dim": 8,
    "use_three_body": True,
    "three_body_sel": 48,
    "three_body_rcut": 4.0,
    "three_body_rcut_smth": 3.5,
}
REPFORMER = {
    "rcut": 4.0,
    "rcut_smth": 3.5,
    "nsel": 48,
    "nlayers": 3,
    "g1_dim": 128,
    "g2_dim": 32,
    "attn2_hidden": 32,
    "attn2_nhead": 4,
    "attn1_hidden": 128,
    "attn1_nhead": 4,
    "axis_neuron": 4,
    "update_h2": False,
    "update_g1_has_attn": False,
    "update_g2_has_attn": False,
    "update_style": "res_residual",
    "update_residual": 0.01,
    "attn2_has_gate": True,
    "use_sqrt_nnei": True,
    "g1_out_conv": True,
    "g1_out_mlp": True,
}
SE_A = {
    "type": "se_e2_a",
    "seed": 1,
    "sel": [20, 40],
    "rcut": 4.0,
    "rcut_smth": 0.5,
    "neuron": [10, 20, 40],
}
SE_R = {
    "type": "se_e2_r",
    "seed": 1,
    "sel": [60, 120],
    "rcut": 6.0,
    "rcut_smth": 0.5,
    "neuron": [5, 10, 20],
}
SE_T = {
    "type": "se_e3",
    "seed": 1,
    "sel": [20, 40],
    "rcut": 4.0,
    "rcut_smth": 0.5,
    "neuron": [2, 4, 8],
}
MODELS: dict[str, dict[str, Any]] = {
    "mini": {"type": "dpa4", "descriptor": DPA4},
    "mini-float32": {"type": "dpa4", "descriptor": DPA4 | {"use_amp": False}},
    "neo": {"type": "dpa4", "descriptor": DPA4 | {"lmax": 3, "n_focus": 2}},
    "air": {
        "type": "dpa4",
        "descriptor": DPA4 | {"lmax": 3, "channels": 64, "n_blocks": 3, "so2_layers": 4},
    },
    "dpa2": {"descriptor": {"type": "dpa2", "seed": 1, "repinit": REPINIT, "repformer": REPFORMER}},
    "hybrid": {"descriptor": {"type": "hybrid", "list": [SE_A | {"type_one_side": True}, SE_R]}},
    "se_e3": {"descriptor": SE_T},
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules in place of missing packages that nothing here calls."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of an empty module."""
        if name.partition(".")[0] not in UNUSED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module with whatever class is asked for."""

        class Anything(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        module = Anything(spec.name)
        if spec.name == "mendeleev":  # statistics sort the elements of the data
            from ase.data import atomic_numbers

            module.element = lambda symbol: types.SimpleNamespace(
                atomic_number=atomic_numbers[symbol]
            )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def import_deepmd_kit() -> None:
    """Make deepmd-kit importable without its compiled operators, MPI and unused packages."""
    sys.meta_path.append(StandIns())  # behind the real ones
    from deepmd.env import GLOBAL_CONFIG

    GLOBAL_CONFIG["cibuildwheel"] = "0"  # a wheel loads MPI for operators that are not used here


def water(natoms: int, nframes: int, seed: int = 1) -> types.SimpleNamespace:
    """Return random water: molecules on a jittered grid, turned at random."""
    random = np.random.default_rng(seed)
    molecules = natoms // 3
    length = (natoms / DENSITY) ** (1 / 3)
    points = int(np.ceil(molecules ** (1 / 3)))
    grid = np.stack(np.meshgrid(*[np.arange(points)] * 3, indexing="ij"), -1).reshape(-1, 3)
    shape = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    frames = []
    for _ in range(nframes):
        cells = random.permutation(grid)[:molecules]
        centres = cells * length / points + random.normal(scale=0.1, size=(molecules, 3))
        turns, _ = np.linalg.qr(random.normal(size=(molecules, 3, 3)))
        frames.append((centres[:, None] + shape @ turns).reshape(-1, 3))
    return types.SimpleNamespace(
        coord=np.stack(frames),
        atype=np.tile([0, 1, 1], (nframes, molecules)),
        box=np.tile(length * np.eye(3), (nframes, 1, 1)),
        force=random.normal(size=(nframes, natoms, 3)),
    )


def neighbor_list(frames: Any, model: Any) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return neighbours, cell translations and sections, as `Structures.from_numpy` reads them."""
    shifts = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), -1).reshape(-1, 3)
    groups = [[0], [1]] if model.by_type else [[0, 1]]
    rows: list[list[list[tuple[int, int]]]] = []
    for coord, box, atype in zip(frames.coord, frames.box, frames.atype, strict=True):
        images = coord[:, None] + (shifts @ box)[None]  # (natoms, 27, 3)
        for point in coord:
            distance = np.linalg.norm(images - point, axis=2)
            j, s = np.nonzero((distance < model.rcut) & (distance > 1e-6))
            nearest = np.argsort(distance[j, s])
            j, s = j[nearest], s[nearest]
            rows.append(
                [[*zip(j[k], s[k], strict=True)] for k in (np.isin(atype[j], g) for g in groups)]
            )
    limits = model.sel
    widths = [
        min(limit, max(len(row[group]) for row in rows)) for group, limit in enumerate(limits)
    ]
    index = np.full((len(rows), sum(widths)), -1)
    shift = np.zeros((len(rows), sum(widths), 3), dtype=np.int8)
    for number, row in enumerate(rows):
        start = 0
        for group, width in enumerate(widths):
            for column, (j, s) in enumerate(row[group][:width]):
                index[number, start + column] = j
                shift[number, start + column] = shifts[s]
            start += width
    nframes, natoms = frames.atype.shape
    return index.reshape(nframes, natoms, -1), shift.reshape(nframes, natoms, -1, 3), tuple(widths)


def build(name: str, device: torch.device) -> Any:
    """Return a hosted model, with weights moved so that zero-initialized heads act."""
    from deepmd.utils.argcheck import model_args

    from deepmd_muon.model.hosted.module import HostedModel
    from deepmd_muon.model.settings import HostedSettings

    section = copy.deepcopy(MODELS[name])
    section["type_map"] = TYPE_MAP
    fitting = {"type": "dpa4_ener", "neuron": [0], "precision": "float32", "seed": 42}
    section["fitting_net"] = fitting if section.get("type") == "dpa4" else copy.deepcopy(FITTING)
    arguments = model_args()
    section = arguments.normalize_value(section, trim_pattern="_*")
    arguments.check_value(section, strict=True)
    model = HostedModel(HostedSettings.of(section), seed=1).to(device)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.03 * noise.to(parameter.dtype).to(device))
    return model.train()


class AbsoluteErrors:
    """A loss of the lengths of force errors, and of the sizes of energy and virial."""

    terms = ()
    needs_force = True
    needs_virial = True

    def __call__(
        self, prediction: Any, labels: Any, lr_fraction: Any, atoms: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, without metrics."""
        force = labels["force"]
        natoms = force.shape[1]
        loss = 20 * (prediction["force"] - force).norm(dim=-1).mean()
        loss = loss + 20 * (prediction["energy"] / natoms).abs().mean()
        return loss + 5 * (prediction["virial"] / natoms).abs().mean(), {}


class Step:
    """A training step of one model on one batch, from the same weights each time it is made."""

    def __init__(self, model: Any, frames: Any, structures: Any, device: torch.device) -> None:
        from deepmd_muon.optim import HybridMuon
        from deepmd_muon.train.batches.batch import TrainingBatch
        from deepmd_muon.train.ranks.ranks import Ranks
        from deepmd_muon.train.step.compiled import CompiledGradient

        self.model = model
        self.structures = structures
        self.frames = frames
        labels: Any = {"force": torch.tensor(frames.force, device=device)}
        atoms = np.full(len(frames.atype), frames.atype.shape[1])
        self.batch = TrainingBatch(structures, labels, None, None, atoms, {})  # type: ignore[arg-type]
        self.evaluate = AbsoluteErrors()
        self.lr_fraction = torch.ones((), dtype=torch.float64, device=device)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.optimizer = HybridMuon(
            named, lr=1e-4, muon_mode="slice", capturable=device.type == "cuda"
        )
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.compiled = CompiledGradient(model, self.evaluate, self.parameters, Ranks(device))
        self.coord = torch.tensor(frames.coord, device=device)
        self.atype = torch.tensor(frames.atype, device=device)
        self.box = torch.tensor(frames.box.reshape(-1, 9), device=device)

    def predict(self) -> dict[str, torch.Tensor]:
        """Return our prediction."""
        return self.model(self.structures)  # type: ignore[no-any-return]

    def predict_by_deepmd_kit(self) -> dict[str, torch.Tensor]:
        """Return the prediction of deepmd-kit's own call, neighbour list included."""
        kit = self.model.hosted
        if hasattr(kit, "core_compute"):
            # Its list builders need packages of their own: the edges come from ours.
            from deepmd_muon.model.edges import edge_vectors

            n = self.structures.neighbor.shape
            real = self.structures.neighbor >= 0
            centre = self.structures.order.unsqueeze(1).expand(n)
            index = torch.stack([self.structures.neighbor[real], centre[real]])
            vectors = edge_vectors(self.structures)[real]
            mask = torch.ones_like(index[0], dtype=torch.bool)
            out = kit.forward_common_lower(
                self.coord, self.atype, index, vectors, index, mask, use_compile=False
            )
        else:
            out = kit.forward_common(self.coord, self.atype, self.box)
        return {
            "energy": out["energy_redu"].flatten(),
            "force": out["energy_derv_r"].reshape(self.coord.shape),
            "virial": out["energy_derv_c_redu"].reshape(-1, 9),
        }

    def differentiate(self, prediction: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Put the gradient of the loss in `grad`."""
        for parameter in self.parameters:
            parameter.grad = None
        loss, _ = self.evaluate(prediction(), self.batch.labels, self.lr_fraction, None)
        loss.backward()
        self.loss.copy_(loss.detach())

    def differentiate_compiled(self) -> None:
        """Do the same by one program, which the first call compiles."""
        for parameter in self.parameters:
            parameter.grad = None
        result = self.compiled("the layout", self.batch, self.lr_fraction)
        if result is None:
            raise RuntimeError("the compiler failed")
        self.loss.copy_(result[0])

    def step_compiled(self) -> None:
        """Update the weights once, by the compiled gradient."""
        self.differentiate_compiled()
        self.optimizer.step()

    def step(self, prediction: Callable[[], dict[str, torch.Tensor]] | None = None) -> None:
        """Update the weights once."""
        self.differentiate(prediction or self.predict)
        self.optimizer.step()


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of some work, which is run `WARM_UP` times before."""
    from deepmd_muon.model.nn.graphs import GraphMemory

    memory = GraphMemory()
    for _ in range(WARM_UP):
        memory.run_aside(work)
    graph = memory.recorded(work)
    return graph.replay


def milliseconds(work: Callable[[], Any], repeats: int, warm_up: int = 3) -> float:
    """Return the median time of a call [ms]; the device is waited for after each."""
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(case: str, device: torch.device, make: Callable[[], Step], steps: int = 4) -> None:
    """Print how far captured steps, and eager steps run again, are from eager steps."""

    def run(*, capture: bool) -> tuple[list[float], torch.Tensor]:
        """Return the losses of some steps, and the weights after them."""
        torch.manual_seed(4)
        step = make()
        work: Callable[[], Any] = step.step
        if capture:
            work = captured(step.step)
        else:
            for _ in range(WARM_UP):
                work()
        torch.manual_seed(5)
        losses = []
        for _ in range(steps):
            work()
            losses.append(float(step.loss))
        return losses, torch.cat([p.detach().double().flatten() for p in step.parameters])

    eager_losses, eager = run(capture=False)
    runs = {"eager again": False, "captured": True} if device.type == "cuda" else {"again": False}
    for name, capture in runs.items():
        losses, weights = run(capture=capture)
        loss_gap = max(abs(a - b) / abs(b) for a, b in zip(losses, eager_losses, strict=True))
        gap = float((weights - eager).norm() / eager.norm())
        print(f"{case}: {name} against eager: losses {loss_gap:.1e}, weights {gap:.1e}", flush=True)


def profile(title: str, work: Callable[[], Any], rows: int, *, shapes: bool) -> None:
    """Print what takes the device's time in a call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    repeats = 3
    with torch.profiler.profile(activities=activities, record_shapes=shapes) as record:
        for _ in range(repeats):
            work()
        synchronize()
    events = record.key_averages(group_by_input_shape=shapes)
    busy = [e for e in events if e.self_device_time_total > 0]
    if not shapes:
        busy = [e for e in busy if "CUDA" in str(e.device_type)]
    busy.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in busy) / repeats / 1e3
    launches = sum(e.count for e in busy) / repeats
    print(f"{title}: {total:.2f} ms on the device, {launches:.0f} calls a step")
    for event in busy[:rows]:
        milli = event.self_device_time_total / repeats / 1e3
        where = f" {event.input_shapes}" if shapes else ""
        print(f"  {milli:8.3f} ms {event.count / repeats:6.0f} × {(event.key + where)[:230]}")


def run_case(case: str, options: argparse.Namespace, device: torch.device) -> None:
    """Measure one case."""
    from deepmd_muon.model import Structures

    name, _, natoms = case.rpartition("-")
    model = build(name, device)
    frames = water(int(natoms), options.frames)
    index, shift, sections = neighbor_list(frames, model)
    structures = Structures.from_numpy(
        frames.coord,
        frames.atype,
        frames.box,
        neighbor=index,
        shift=shift,
        sections=sections,
        ntypes=2,
    ).to(device)
    # As in batches of fixed shapes: any slot may hold a neighbour, and their number has a bound.
    structures.filled[:] = np.array(sections)[:, None]
    edges = int((index >= 0).sum())
    if not options.slots:
        structures = dataclasses.replace(structures, edges=-(-edges // 256) * 256)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{case}: {count} parameters, {edges} edges in {index.size} slots, {sections}", flush=True
    )
    if model.why_not_captured:
        print(f"{case}: {model.why_not_captured}")

    def make() -> Step:
        return Step(build(name, device), frames, structures, device)

    if options.compiled:
        compare_compiled(case, options, make)
        return
    step = Step(model, frames, structures, device)
    if options.brief:
        time_of_step = milliseconds(captured(step.step), 5 * options.repeats)
        print(f"{case}: captured step: {time_of_step:8.2f} ms", flush=True)
        return
    with torch.no_grad():
        ours = step.predict()
    kit = step.predict_by_deepmd_kit()
    for key in ("energy", "force", "virial"):
        expected = kit[key].detach()
        gap = (ours[key] - expected).abs().max() / expected.abs().max()
        print(f"{case}: {key} against deepmd-kit's own call: {gap.item():.1e}")
    compare(case, device, make)
    eager = milliseconds(lambda: step.step(step.predict_by_deepmd_kit), options.repeats)
    print(f"{case}: deepmd-kit's call eager, our HybridMuon: {eager:8.2f} ms", flush=True)
    print(
        f"{case}: our call eager:      {milliseconds(step.step, options.repeats):8.2f} ms",
        flush=True,
    )
    if device.type != "cuda":
        return
    torch.cuda.reset_peak_memory_stats()
    replay = captured(step.step)
    whole = milliseconds(replay, 5 * options.repeats)
    memory = torch.cuda.max_memory_allocated() / 2**20
    print(f"{case}: captured step:       {whole:8.2f} ms, {memory:.0f} MiB", flush=True)
    gradient = captured(lambda: step.differentiate(step.predict))
    print(f"{case}: captured gradient:   {milliseconds(gradient, 5 * options.repeats):8.2f} ms")
    update = captured(step.optimizer.step)
    print(
        f"{case}: captured optimizer:  {milliseconds(update, 5 * options.repeats):8.2f} ms",
        flush=True,
    )
    if options.profile:
        profile(f"{case}: kernels of the captured step", replay, options.rows, shapes=False)
        profile(
            f"{case}: operations of the eager gradient",
            lambda: step.differentiate(step.predict),
            options.rows,
            shapes=True,
        )


def compare_compiled(case: str, options: argparse.Namespace, make: Callable[[], Step]) -> None:
    """Compare the compiled step with the plain one, both in CUDA graphs where there is a GPU."""
    step = make()
    torch.manual_seed(4)
    step.differentiate(step.predict)
    plain = [p.grad for p in step.parameters]
    loss = float(step.loss)
    torch.manual_seed(4)
    step.differentiate(step.predict)
    again = [p.grad for p in step.parameters]
    torch.manual_seed(4)
    begun = time.perf_counter()
    step.differentiate_compiled()
    synchronize()
    print(f"{case}: compiled and run in {time.perf_counter() - begun:.1f} s", flush=True)
    print(f"{case}: losses differ by {abs(float(step.loss) - loss) / abs(loss):.1e}")
    for name, others in {
        "plain again": again,
        "compiled": [p.grad for p in step.parameters],
    }.items():
        pairs = [(a, b) for a, b in zip(others, plain, strict=True) if b is not None]
        gap = sum(float((a.double() - b.double()).norm() ** 2) for a, b in pairs)
        size = sum(float(b.double().norm() ** 2) for _, b in pairs)
        print(f"{case}: gradient {name} against plain: {(gap / size) ** 0.5:.1e}", flush=True)
    if not torch.cuda.is_available():
        return
    replays = {}
    for name, work in {"compiled": step.step_compiled, "plain": make().step}.items():
        torch.cuda.reset_peak_memory_stats()
        replay = captured(work)
        time_of_step = milliseconds(replay, 5 * options.repeats)
        memory = torch.cuda.max_memory_allocated() / 2**20
        print(f"{case}: {name}, captured: {time_of_step:8.2f} ms, {memory:.0f} MiB", flush=True)
        replays[name] = replay
    step = make()
    eager = milliseconds(lambda: step.step(step.predict_by_deepmd_kit), options.repeats)
    print(f"{case}: deepmd-kit's call eager, our HybridMuon: {eager:8.2f} ms", flush=True)
    if options.profile:
        replay = replays["compiled"]
        profile(f"{case}: kernels of the compiled step", replay, options.rows, shapes=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["mini-192", "mini-384"])
    parser.add_argument("--frames", type=int, default=1, help="structures in a batch")
    parser.add_argument("--repeats", type=int, default=10, help="eager steps that are timed")
    parser.add_argument("--profile", action="store_true", help="print what takes the time")
    parser.add_argument("--compiled", action="store_true", help="compare the compiled step only")
    parser.add_argument("--brief", action="store_true", help="time the captured step only")
    parser.add_argument("--slots", action="store_true", help="compute empty slots of lists, too")
    parser.add_argument("--rows", type=int, default=25, help="rows of a profile")
    options = parser.parse_args(arguments)
    import_deepmd_kit()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # As training/enable_tf32 does; deepmd-kit's DPA-4 asks for it itself on the way to the forces.
    torch.set_float32_matmul_precision("high")
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    print(f"{card}, torch {torch.__version__}, Python {platform.python_version()}")
    for case in options.cases:
        guarded(case, options, device)


def guarded(case: str, options: argparse.Namespace, device: torch.device) -> None:
    """Measure one case; print an error, so that the other cases follow."""
    try:
        run_case(case, options, device)
    except Exception as error:
        traceback.print_exc(limit=-8)
        print(f"{case}: FAILED {error!r}"[:600], flush=True)


if __name__ == "__main__":
    main()
