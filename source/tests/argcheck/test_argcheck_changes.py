"""A restart says what has changed in its input, and nothing of settings that are gone."""

import logging
from pathlib import Path

from deepmd_muon.argcheck.changes import report_changes

PRESENT = {"training": {"numb_steps": 10, "save_ckpt": "new"}}


def test_settings_of_earlier_versions_without_effect_are_no_change(caplog):
    saved = {"training": {"numb_steps": 5, "save_ckpt": "old", "neighbor_graph_method": "auto"}}
    with caplog.at_level(logging.INFO):
        report_changes(saved, PRESENT, Path("model.ckpt-5.pt"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "since model.ckpt-5.pt was written: training/numb_steps was 5, is 10"),
        ("INFO", "since model.ckpt-5.pt was written: training/save_ckpt was 'old', is 'new'"),
    ]
