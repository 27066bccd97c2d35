"""`dp doc-train-input`: the reference of every key of an input file."""

from __future__ import annotations

import argparse
import json

from deepmd_muon.cli.handover import DeepmdKitOption

HELP = "print the reference of every key of an input file"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--out-type",
        default="rst",
        choices=("rst", "md", "text", "json_schema"),
        help="markup of the reference, or a JSON Schema [%(default)s]",
    )
    form.add_argument(
        "--schema",
        action="store_const",
        dest="out_type",
        const="json_schema",
        help="the same as --out-type json_schema, for editors that check a file while it is written",
    )
    parser.add_argument(
        "--explore", action="store_true", help="the input of dp explore instead of dp train"
    )
    parser.add_argument(
        "--multi-task", nargs=0, action=DeepmdKitOption, help="reference of multi-task training"
    )


def run(options: argparse.Namespace) -> int:
    """Print the reference."""
    from deepmd_muon.argcheck.document import reference, reference_of
    from deepmd_muon.argcheck.json_schema import json_schema, json_schema_of

    if options.explore:
        from deepmd_muon.explore.settings import ExploreSettings

        if options.out_type == "json_schema":
            print(
                json.dumps(
                    json_schema_of(ExploreSettings, "Input of dp explore"),
                    indent=2,
                    ensure_ascii=False,
                )
            )
        else:
            print(reference_of(ExploreSettings, "Input of dp explore", options.out_type), end="")
    elif options.out_type == "json_schema":
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    else:
        print(reference(options.out_type), end="")
    return 0
