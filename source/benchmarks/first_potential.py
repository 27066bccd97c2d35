"""Walk through doc/tutorials/own-data.md as a reader does, command by command, and time each.

    python source/benchmarks/first_potential.py --venv NEW --folder NEW

makes a fresh environment (unless the folder exists), installs this checkout as the page says, runs the page's `sh`
blocks in an empty folder, and prints wall time, processor time and exit status of each command. The output of
command N is N.log in the folder, beside what the commands wrote.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parents[2]
PAGE = TOP / "doc" / "tutorials" / "own-data.md"
INSTALL = 'pip install -c constraints.txt ".[ase]"'  # as on doc/start.md


class Timed(NamedTuple):
    """A command that has run: seconds on the clock and of processors, and its exit status."""

    command: str
    wall: float
    user: float
    status: int


def commands_of(page: str) -> list[str]:
    """Return the commands of the `sh` blocks above the section on times."""
    page = page.partition("\n## Times")[0]
    blocks = re.findall(r"^(<!-- .* -->\n)?```sh\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    joined = "".join(code for note, code in blocks if not note).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def run(command: str, folder: Path, environment: dict[str, str], log: Path) -> Timed:
    """Run a command in a shell, its output in a file."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    with log.open("wb") as file:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    wall = time.perf_counter() - start
    return Timed(
        command,
        wall,
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before,
        done.returncode,
    )


def table(timed: list[Timed]) -> str:
    """Return the Markdown table of the commands."""
    lines = ["| command | wall [s] | processor [s] | exit status |", "|---|---|---|---|"]
    lines += [f"| `{t.command}` | {t.wall:.1f} | {t.user:.1f} | {t.status} |" for t in timed]
    lines.append(f"| all | {sum(t.wall for t in timed):.0f} | {sum(t.user for t in timed):.0f} | |")
    return "\n".join(lines)


def main() -> int:
    """Install, run the commands, print the table; return 1 when a command fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venv", type=Path, required=True, help="virtual environment; made unless it exists"
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the commands run; must not exist"
    )
    args = parser.parse_args()
    folder, venv = args.folder.resolve(), args.venv.resolve()
    folder.mkdir(parents=True)
    # The page names the example's file from the top of a checkout.
    (folder / "examples").symlink_to(TOP / "examples")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(venv)}
    if not venv.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        installed = run(INSTALL, TOP, environment, folder / "install.log")
        print(table([installed]), flush=True)
        if installed.status:
            return 1
    timed = []
    for number, command in enumerate(commands_of(PAGE.read_text()), 1):
        timed.append(run(command, folder, environment, folder / f"{number}.log"))
        print(
            f"{number}: {timed[-1].status} after {timed[-1].wall:.0f} s: {command}",
            file=sys.stderr,
            flush=True,
        )
    print(table(timed))
    return int(any(t.status for t in timed))


if __name__ == "__main__":
    sys.exit(main())
