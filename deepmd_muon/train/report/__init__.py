"""Reports of a training run: log lines and a progress line, the learning-curve file, trackers.

The trainer knows one object, `Reports`: it asks `due(step)` before it reads metrics from the
device, hands them to `step`, and calls `close` at the end. Steps are 1-based here, as in DeePMD's
log and learning curve.
"""

from deepmd_muon.train.report.console import ConsoleReport
from deepmd_muon.train.report.json_lines import JsonLinesFile
from deepmd_muon.train.report.lcurve import LearningCurveFile
from deepmd_muon.train.report.logs import separate_log, set_up_logging
from deepmd_muon.train.report.reports import Report, Reports, open_reports
from deepmd_muon.train.report.trackers import (
    TensorBoardError,
    TensorBoardReport,
    WandbError,
    WandbReport,
)

__all__ = [
    "ConsoleReport",
    "JsonLinesFile",
    "LearningCurveFile",
    "Report",
    "Reports",
    "TensorBoardError",
    "TensorBoardReport",
    "WandbError",
    "WandbReport",
    "open_reports",
    "separate_log",
    "set_up_logging",
]
