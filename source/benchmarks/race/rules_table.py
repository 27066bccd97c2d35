"""Make the table of the race of rules from the lines of `stability_runs.py`, each rule at the best of its rates.

python source/benchmarks/race/rules_table.py rules.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

from settings import RULES
from stability_table import pooled

# Two rules that were raced and are no longer there, and the optimizer beside them.
ROWS = (*RULES, "hyperball", "rows", "adamw")


def main() -> None:
    """Print the force errors of each rule on each set, mean over seeds, with the factor of the best rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in (
        json.loads(line)
        for path in parser.parse_args().results
        for line in path.read_text().splitlines()
    ):
        rule, _, factor = line["setting"].partition("_x")
        if rule in ROWS and "test" in line:
            errors = [
                pooled(one["force"] for one in line[part].values()) for part in ("test", "out")
            ]
            model, steps = line.get("model", "se_e2_a"), line.get("steps", 3000)
            what = [
                line["set"],
                *[model] * (model != "se_e2_a"),
                *[f"{steps:,} steps"] * (steps != 3000),
            ]
            found[", ".join(what), rule][factor or "1"].append((errors[0], errors[1]))
    sets = list(dict.fromkeys(name for name, _ in found))
    for part, title in enumerate(("test", "out of distribution")):
        print(f"\n| {title} [eV/Å] | " + " | ".join(sets) + " |\n|" + "---|" * (len(sets) + 1))
        for rule in (rule for rule in ROWS if any((name, rule) in found for name in sets)):
            cells = []
            for name in sets:
                runs_at = found.get((name, rule), {})
                rates = {factor: list(zip(*runs, strict=True)) for factor, runs in runs_at.items()}
                if not rates:
                    cells.append("–")
                    continue
                factor, errors = min(rates.items(), key=lambda item: statistics.fmean(item[1][0]))
                if math.isnan(errors[part][0]):
                    cells.append("–")  # the set has no such part
                    continue
                low, high = min(errors[part]), max(errors[part])
                cells.append(
                    f"{statistics.fmean(errors[part]):.4f} ({low:.4f} – {high:.4f}), ×{factor}"
                )
            print(f"| {rule} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
