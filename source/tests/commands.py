"""`dp` in this process, from a line of words."""

from deepmd_muon.cli.main import main


def run_dp(line: str) -> int:
    """Run a command and return its exit status; spaces separate its words."""
    return main(line.split())
