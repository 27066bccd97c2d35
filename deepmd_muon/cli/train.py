"""`dp train`: train a model as an input file says."""

from __future__ import annotations

import argparse
import time

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import HandOver
from deepmd_muon.collector import importing_torch

HELP = "train a model as an input file says"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names and meaning are deepmd-kit's."""
    parser.add_argument("INPUT", help="input file, JSON or YAML")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "-i",
        "--init-model",
        metavar="CKPT",
        help="start from the weights of this checkpoint or frozen file, at step 0",
    )
    source.add_argument(
        "-r",
        "--restart",
        metavar="CKPT",
        help="continue the run that wrote this checkpoint, step and state included; auto (or "
        "latest) takes the newest of training.save_ckpt, and starts afresh when there is none",
    )
    source.add_argument(
        "-t",
        "--finetune",
        metavar="CKPT",
        help="start from the weights of this checkpoint or frozen file, at step 0, with the energy bias fitted to "
        "the training data",
    )
    source.add_argument(
        "-f",
        "--init-frz-model",
        metavar="MODEL",
        help="start from the weights of a frozen file (.pth), at step 0",
    )
    parser.add_argument(
        "--model-branch",
        metavar="NAME",
        help="branch of a multi-task checkpoint (with --finetune, --init-model or --restart); "
        "without it, or with RANDOM, --finetune takes the descriptor of the first branch and "
        "starts the fitting net anew",
    )
    parser.add_argument(
        "--replay",
        nargs="+",
        metavar="DATA",
        help="with --finetune: train a second branch beside the input's data, on data that the "
        "checkpoint was trained on, or on structures that it draws and labels itself (pseudo); "
        "section replay of INPUT has the settings",
    )
    parser.add_argument(
        "--use-pretrain-script",
        action="store_true",
        help="take the model section from the checkpoint instead of INPUT; with --finetune, "
        "descriptor and fitting net",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="out.json",
        metavar="FILE",
        help="where the normalised input goes [%(default)s]",
    )
    parser.add_argument(
        "--skip-neighbor-stat",
        action="store_true",
        help="do not count neighbours first; sel must then be numbers, and is not checked",
    )
    parser.add_argument(
        "--force-load",
        action="store_true",
        help="go on with a changed model section: load what fits and start the other parameters "
        "anew",
    )


def run(options: argparse.Namespace) -> int:
    """Train.

    An input that needs features of deepmd-kit goes to deepmd-kit, before torch is imported.
    """
    begun = time.monotonic()
    frozen = options.init_frz_model
    if frozen and not frozen.endswith(".pth"):
        raise HandOver(f"the frozen form of {frozen}")
    from deepmd_muon.argcheck import DeepmdKitOnlyError, load

    try:
        run_input = load(options.INPUT)
    except DeepmdKitOnlyError as error:
        problems = "; ".join(map(str, error.problems))
        raise HandOver(
            error.elsewhere, f"install it, or change {error.source} ({problems})"
        ) from error
    with importing_torch():
        from deepmd_muon.train import run as run_training
    finetune = options.finetune
    init_model = options.init_model
    if finetune or init_model:
        from deepmd_muon.cli.published import checkpoint_or_published

        finetune = finetune and checkpoint_or_published(finetune, options.log_level)
        init_model = init_model and checkpoint_or_published(init_model, options.log_level)

    if options.model_branch and not any(
        (options.finetune, options.init_model, options.init_frz_model, options.restart)
    ):
        raise CommandError(
            "--model-branch names a branch of the checkpoint of --finetune, --init-model or "
            "--restart; give one"
        )
    make_data = None
    model_branch = options.model_branch
    if options.replay:
        from deepmd_muon.replay.prepare import prepare

        if not options.finetune:
            raise CommandError(
                "--replay goes with --finetune CKPT; a run with replay continues from the out.json "
                "that it wrote: dp --pt train out.json --restart CKPT"
            )
        prepared = prepare(run_input, finetune, options.model_branch, options.replay)
        run_input = prepared.run_input
        make_data = prepared.make_data
        model_branch = None  # each branch of the new input names the one that it starts from
    return run_training(
        run_input,
        make_data=make_data,
        output=options.output,
        restart=options.restart,
        init_model=init_model or options.init_frz_model,
        finetune=finetune,
        model_branch=model_branch,
        skip_neighbor_stat=options.skip_neighbor_stat,
        force_load=options.force_load,
        use_pretrain_script=options.use_pretrain_script,
        log_level=options.log_level,
        log_path=options.log_path,
        begun=begun,
    )
