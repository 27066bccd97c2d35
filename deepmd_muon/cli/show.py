"""`dp show routing FILE` and `dp show lcurve FILE`: look into an input file, a checkpoint, a learning curve."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import HandOver

HELP = "show how the optimizer treats every parameter, or draw a learning curve"

_TOPICS = ("routing", "lcurve")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "topic",
        metavar="TOPIC",
        help="routing (of an input file or a checkpoint) or lcurve (draw it); anything else is a model's file, "
        "and deepmd-kit shows what follows of it",
    )
    parser.add_argument("file", metavar="FILE", nargs="+", help="input.json, model.ckpt.pt or lcurve.out")
    parser.add_argument("-o", "--output", metavar="FILE", default="lcurve.png", help="picture of lcurve [%(default)s]")


def run(options: argparse.Namespace) -> int:
    """Show."""
    if options.topic not in _TOPICS:
        raise HandOver(f"'show {options.topic}'")
    if len(options.file) > 1:
        raise CommandError(f"show {options.topic} takes one file; found {', '.join(options.file)}")
    path = Path(options.file[0])
    if options.topic == "lcurve":
        from deepmd_muon.infer.learning_curve import plot_learning_curve

        plot_learning_curve(path, options.output)
        print(f"{options.output}: drawn")
        return 0
    from deepmd_muon.model.checkpoint_file import checkpoint_path

    path = checkpoint_path(path)
    print(_checkpoint_routing(path) if path.suffix == ".pt" else _input_routing(path))
    return 0


def _input_routing(path: Path) -> str:
    """Return the routing that training with this input would use; no data are read."""
    from deepmd_muon.argcheck import load
    from deepmd_muon.model import build_model
    from deepmd_muon.optim import HybridMuon

    checked = load(path)
    section = checked.normalized["model"]
    if isinstance(section["descriptor"]["sel"], str):
        # "auto" needs the data, and the number of neighbours is in no parameter's shape.
        section["descriptor"]["sel"] = [1] * len(section["type_map"])
    model = build_model(section)
    optimizer = checked.settings.optimizer.build(model, lr=checked.settings.learning_rate.start_lr)
    if not isinstance(optimizer, HybridMuon):
        weights = sum(parameter.numel() for parameter in model.parameters())
        return f"{type(optimizer).__name__} treats all {weights} weights alike: there are no routes"
    return f"{optimizer.routing}\n\n{optimizer.routing.summary()}"


def _checkpoint_routing(path: Path) -> str:
    """Return the routing that is recorded in a checkpoint."""
    from deepmd_muon.model.checkpoint_file import read_checkpoint
    from deepmd_muon.optim.routing import RouteTable

    checkpoint = read_checkpoint(path)
    if "optimizer" not in checkpoint:
        raise CommandError(f"{path} holds no optimizer state, so no routing is recorded in it")
    routing = RouteTable.from_manifest(checkpoint["optimizer"]["param_groups"])
    return f"{routing}\n\n{routing.summary()}"
