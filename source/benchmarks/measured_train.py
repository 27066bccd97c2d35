"""Run a command of this package or of deepmd-kit, and print how much memory of the GPU it took at most.

    python source/benchmarks/measured_train.py ours --pt train input.json
    python source/benchmarks/measured_train.py deepmd-kit --pt train input.json

deepmd-kit may be there as Python alone, without its compiled operators; see `deepmd_kit_step.py`.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command whose words are this process's arguments."""
    which, *words = sys.argv[1:]
    if which == "ours":
        from deepmd_muon.cli.main import main as command

        status = command(words)
    else:
        from deepmd_kit_step import import_deepmd_kit

        import_deepmd_kit()
        from deepmd.main import main as their_command

        sys.argv = ["dp", *words]
        status = their_command(words)
    import torch

    if torch.cuda.is_available():
        most = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        print(
            "GPU memory: {:.0f} MiB allocated, {:.0f} MiB reserved".format(
                *(x / 2**20 for x in most)
            )
        )
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
