"""`dp doc-train-input`: the reference of every key of an input file."""

from __future__ import annotations

import argparse
import json

from deepmd_muon.cli.handover import DeepmdKitOption

HELP = "print the reference of every key of an input file"

_OUT_TYPES = ("md", "json", "json_schema")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--out-type",
        default="md",
        choices=_OUT_TYPES,
        help="the reference in Markdown, its dargs arguments as JSON (for DP-GUI), or a JSON "
        "Schema [%(default)s]",
    )
    form.add_argument(
        "--schema",
        action="store_const",
        dest="out_type",
        const="json_schema",
        help="the same as --out-type json_schema, for editors that check a file while it is "
        "written",
    )
    parser.add_argument(
        "--explore", action="store_true", help="the input of dp explore instead of dp train"
    )
    parser.add_argument(
        "--multi-task", nargs=0, action=DeepmdKitOption, help="reference of multi-task training"
    )


def run(options: argparse.Namespace) -> int:
    """Print the reference."""
    print(_of_explore(options.out_type) if options.explore else _of_train(options.out_type), end="")
    return 0


def _of_train(out_type: str) -> str:
    from deepmd_muon.argcheck.dargs_tree import encoded, gen_args
    from deepmd_muon.argcheck.document import reference
    from deepmd_muon.argcheck.json_schema import json_schema

    if out_type == "json":
        return encoded(gen_args())
    if out_type == "json_schema":
        return _indented(json_schema())
    return reference()


def _of_explore(out_type: str) -> str:
    from deepmd_muon.argcheck.dargs_tree import arguments_of, encoded
    from deepmd_muon.argcheck.document import reference_of
    from deepmd_muon.argcheck.json_schema import json_schema_of
    from deepmd_muon.explore.settings import ExploreSettings

    title = "Input of dp explore"
    if out_type == "json":
        return encoded(arguments_of(ExploreSettings))
    if out_type == "json_schema":
        return _indented(json_schema_of(ExploreSettings, title))
    return reference_of(ExploreSettings, title)


def _indented(schema: object) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
