"""The race's scripts are not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "source" / "benchmarks" / "race"))
