"""`dp show TOPIC FILE`: look into an input, a checkpoint, a learning curve, this machine.

`dp show FILE ATTRIBUTE...` is deepmd-kit's command.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepmd_muon.cli.attributes import ATTRIBUTES, log_attributes
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import choices
from deepmd_muon.cli.models import add_model_options, check_compiled
from deepmd_muon.cli.systems import begin
from deepmd_muon.files import refuse_clashes

HELP = (
    "show how the optimizer treats every parameter, on one process or many, or draw a learning "
    "curve"
)


# Topics, and the files that they take.
_TOPICS = {
    "routing": "input.json or model.ckpt.pt",
    "plan": "input.json",
    "lcurve": "lcurve.out",
    "weights": "model.ckpt.pt",
    "kernels": "no file",
}
_PICTURES = {"lcurve": "lcurve.png", "weights": "weights.png"}  # without -o


class _TopicAction(argparse.Action):
    """Takes the topic, and fits the argument FILE to it: of all topics, kernels alone takes none."""

    file: argparse.Action

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        """Note the topic."""
        namespace.topic = values
        self.file.metavar = _TOPICS.get(values, "FILE")
        if values == "kernels":
            # With '*' from the start, Python 3.11 would take no file that follows an option.
            self.file.nargs = "*"
            self.file.required = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    topic = parser.add_argument(
        "topic",
        metavar="TOPIC",
        action=_TopicAction,
        help="routing (which update each parameter gets, of an input file or a checkpoint), plan "
        "(of its step on several processes), weights (spectra and updates of a checkpoint), lcurve "
        "(draw one or more) or kernels (of this machine, by shape); or deepmd-kit's form, a "
        f"checkpoint or frozen file, followed by {', '.join(ATTRIBUTES)}",
    )
    assert isinstance(topic, _TopicAction)
    topic.file = parser.add_argument(
        "file", metavar="FILE", nargs="+", help="input.json, model.ckpt.pt or lcurve.out"
    )
    add_model_options(parser, "trust")
    pictures = ", ".join(f"{topic}: {picture}" for topic, picture in _PICTURES.items())
    parser.add_argument("-o", "--output", metavar="FILE", help=f"picture [{pictures}]")
    curve = parser.add_argument_group(
        "lcurve", "several files, one a run, are drawn in one picture"
    )
    curve.add_argument("--label", metavar="NAME", nargs="+", help="name of every run")
    curve.add_argument(
        "--against",
        choices=("step", "time"),
        default="step",
        help="axis; time needs logs of training.jsonl_file",
    )
    curve.add_argument(
        "--stacked", action="store_true", help="panels one below the other, for one column"
    )
    plan = parser.add_argument_group("plan", "zero_stage and hsdp default to those of the input")
    plan.add_argument("--world-size", type=int, metavar="N", help="processes")
    plan.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help="training.zero_stage")
    plan.add_argument(
        "--hsdp", type=int, metavar="GROUPS", help="training.data_parallel_replicate_degree"
    )
    plan.add_argument(
        "--owners", action="store_true", help="list which process orthogonalizes which matrix"
    )


def run(options: argparse.Namespace) -> int:
    """Show."""
    if options.topic not in _TOPICS:
        return _run_attributes(options)
    if options.topic == "kernels":
        if options.file:
            raise CommandError(f"show kernels takes no file; found {', '.join(options.file)}")
        from deepmd_muon.optim import describe_kernels

        print(describe_kernels())
        return 0
    if options.topic == "lcurve":
        from deepmd_muon.show.learning_curve import plot_learning_curves

        picture = options.output or _PICTURES["lcurve"]
        curves = {f"the curve {path}": path for path in options.file}
        refuse_clashes(CommandError, {"-o": picture}, curves)
        plot_learning_curves(
            options.file, picture, options.label, options.against, stacked=options.stacked
        )
        print(f"{picture}: drawn")
        return 0
    if len(options.file) != 1:
        files = ", ".join(options.file) or "none"
        raise CommandError(f"show {options.topic} takes one file; found {files}")
    from deepmd_muon.checkpoint_file.file import DIRECTORY_SUFFIX, checkpoint_path

    path = checkpoint_path(options.file[0])
    if path.suffix == ".pth":
        raise CommandError(
            f"{path} is a frozen model, which holds no optimizer; give the checkpoint it was made "
            "from"
        )
    if options.topic == "plan":
        from deepmd_muon.show.plan import plan_page

        page = plan_page(
            path,
            ranks=options.world_size,
            stage=options.zero_stage,
            groups=options.hsdp,
            owners=options.owners,
        )
        print(page)
        return 0
    if options.topic == "weights":
        from deepmd_muon.show.weights import weights_page

        picture = options.output or _PICTURES["weights"]
        refuse_clashes(CommandError, {"-o": picture}, {"the checkpoint": path})
        print(weights_page(path, Path(picture)))
        print(f"{picture}: drawn")
        return 0
    print(
        _checkpoint_routing(path)
        if path.suffix in (".pt", DIRECTORY_SUFFIX)
        else _input_routing(path)
    )
    return 0


def _run_attributes(options: argparse.Namespace) -> int:
    """Show a model as deepmd-kit does: the first word is its file, the others are attributes."""
    unknown = [word for word in options.file if word not in ATTRIBUTES]
    if unknown and Path(options.topic).exists():
        advice = choices(unknown[0], ATTRIBUTES)
        raise CommandError(f"a model has no attribute {unknown[0]!r}; {advice}")
    if unknown:
        advice = choices(options.topic, tuple(_TOPICS))
        raise CommandError(f"there is no topic {options.topic!r}; {advice}")
    from deepmd_muon.checkpoint_file.file import checkpoint_path

    check_compiled(options.topic, trust=options.trust)
    begin(options, inputs={"the model": checkpoint_path(options.topic)})
    log_attributes(options.topic, options.file, trust=options.trust)
    return 0


def _input_routing(path: Path) -> str:
    """Return the routing that training with this input would use, without reading data.

    If its optimizer is another, return the routing of HybridMuon.
    """
    from deepmd_muon.argcheck import load
    from deepmd_muon.optim import HybridMuon, HybridMuonConfig
    from deepmd_muon.show.plan import model_of, optimizer_of
    from deepmd_muon.train.checkpoint.continued_state import shared_names

    run_input = load(path)
    optimizer = optimizer_of(run_input)
    introduction = ""
    if not isinstance(optimizer, HybridMuon):
        n_weights = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        introduction = (
            f"{type(optimizer).__name__} treats all {n_weights} weights alike; with HybridMuon "
            "they would take:\n\n"
        )
        start_lr = run_input.settings.learning_rate.start_lr
        optimizer = HybridMuonConfig().build(model_of(run_input), lr=start_lr)
    assert isinstance(optimizer, HybridMuon)
    sharing = _sharing(shared_names(model_of(run_input)))
    return f"{introduction}{optimizer.routing}\n\n{optimizer.routing.summary()}{sharing}"


def _checkpoint_routing(path: Path) -> str:
    """Return the routing that is recorded in a checkpoint."""
    from deepmd_muon.checkpoint_file.file import OWN_KEY, read_checkpoint, understood
    from deepmd_muon.optim.routing.routes import RouteTable
    from deepmd_muon.train.checkpoint.continued_state import SHARED

    checkpoint = read_checkpoint(path)
    if "optimizer" not in checkpoint:
        raise CommandError(f"{path} holds no optimizer state, so no routing is recorded in it")
    with understood(path):
        groups = checkpoint["optimizer"]["param_groups"]
        if not any("routes" in group or "lr_adjust" in group for group in groups):
            return (
                f"{path} holds the state of Adam or AdamW, which treat all parameters alike: there "
                "are no routes"
            )
        # Files list the empty parameters of deepmd-kit's model, too.
        routing = RouteTable(
            [entry for entry in RouteTable.from_groups(groups) if 0 not in entry.shape]
        )
        shared = checkpoint.get(OWN_KEY, {}).get(SHARED, {})
        return f"{routing}\n\n{routing.summary()}{_sharing(shared)}"


def _sharing(shared: Mapping[str, str]) -> str:
    """Describe which parameters of the table several branches share: the table lists each once.

    `shared` has the listed name of each name that the table leaves out.
    """
    branches: dict[str, list[str]] = {}  # by listed name, its own branch first
    for name, listed in shared.items():
        owner = listed.partition(".")[0]
        branches.setdefault(listed, [owner]).append(name.partition(".")[0])
    lines = []
    for (owner, *sharers), count in Counter(map(tuple, branches.values())).items():
        lines.append(f"\n{count} parameters of {owner} are those of {', '.join(sharers)} as well")
    return "".join(lines)
