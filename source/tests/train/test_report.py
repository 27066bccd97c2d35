import datetime
import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepmd_muon.argcheck.training import TrainingDataSettings, TrainingSettings
from deepmd_muon.progress import tracked
from deepmd_muon.train.report import (
    JsonLinesFile,
    LearningCurveFile,
    Reports,
    TensorBoardError,
    TensorBoardReport,
    WandbError,
    open_reports,
    set_up_logging,
)
from deepmd_muon.train.report.console import ConsoleReport, metrics_line, timing_line
from deepmd_muon.train.report.divergence import Divergence

TRAIN = {"rmse": 20.1, "rmse_f": 0.635, "rmse_e": 0.0112}
VALID = {"rmse": 22.2, "rmse_e": 0.0123, "rmse_f": 0.702}


def training(**changes):
    """Return settings of training with some changed."""
    data = TrainingDataSettings(systems=("data",))
    return TrainingSettings(training_data=data, numb_steps=1, **{"disp_freq": 100, **changes})


def write_curve(*rows, start_step=0):
    """Write rows of the learning curve: a step, a rate, and the errors of training and validation."""
    curve = LearningCurveFile("lcurve.out", 100, start_step=start_step)
    for row in rows:
        curve.step(*row)
    curve.close()
    return Path("lcurve.out").read_text(encoding="utf-8", errors="replace").splitlines()


def test_learning_curve_with_validation_has_deepmd_kits_bytes():
    assert write_curve((1, 1e-3, TRAIN, VALID), (100, 9.5e-4, TRAIN, VALID)) == [
        "# step       rmse_val    rmse_trn    rmse_e_val  rmse_e_trn    rmse_f_val  rmse_f_trn   lr      ",
        "# If there is no available reference data, rmse_*_{val,trn} will print nan",
        "      1      2.22e+01    2.01e+01      1.23e-02    1.12e-02      7.02e-01    6.35e-01    1.0e-03",
        "    100      2.22e+01    2.01e+01      1.23e-02    1.12e-02      7.02e-01    6.35e-01    9.5e-04",
    ]
    # Without validation data each metric has one column; a new run begins a new file.
    lines = write_curve((1, 1e-3, TRAIN, {}))
    assert lines[0] == "# step       rmse_trn    rmse_e_trn    rmse_f_trn   lr      "
    assert lines[2:] == ["      1      2.01e+01      1.12e-02      6.35e-01    1.0e-03"]


def test_a_missing_metric_is_nan_in_its_own_column():
    write_curve((1, 1e-3, TRAIN, VALID), (100, 1e-3, {"rmse": 1.0, "rmse_e": 2.0}, {}))
    rows = np.genfromtxt("lcurve.out", names=True)
    assert rows.dtype.names[:3] == ("step", "rmse_val", "rmse_trn")
    assert rows["rmse_e_trn"][1] == 2.0
    assert np.isnan([rows["rmse_val"][1], rows["rmse_e_val"][1], rows["rmse_f_trn"][1]]).all()


def test_restart_drops_later_rows_and_a_torn_one_and_keeps_one_header():
    write_curve(*((step, 1e-3, TRAIN, VALID) for step in (1, 100, 200, 300)))
    with open("lcurve.out", "a", encoding="utf-8") as file:
        file.write("    150      2.2")
    lines = write_curve((300, 5e-4, TRAIN, VALID), start_step=200)
    rows = np.genfromtxt("lcurve.out", names=True)
    assert rows["step"].tolist() == [1, 100, 200, 300]
    assert rows["lr"].tolist() == [1e-3, 1e-3, 1e-3, 5e-4]
    assert sum(line.startswith("# step") for line in lines) == 1


def test_a_damaged_row_is_left_out_with_a_warning_at_a_restart(caplog):
    write_curve(*((step, 1e-3, {"rmse": 1.0}, {}) for step in (100, 200, 300, 400)))
    content = Path("lcurve.out").read_bytes().split(b"\n")
    content[3] = content[3].replace(b"200", b"2\xff0")
    Path("lcurve.out").write_bytes(b"\n".join(content))
    write_curve(start_step=300)
    assert Path("lcurve.out").read_bytes().split(b"\n") == [*content[:3], content[4], b""]
    assert "lcurve.out: 1 damaged" in caplog.text


def test_restart_with_other_columns_writes_their_header():
    write_curve((100, 1e-3, TRAIN, {}))
    lines = write_curve((200, 1e-3, TRAIN, VALID), start_step=100)
    assert [line.startswith("# step") for line in lines] == [True, False, False, True, False, False]
    assert len(lines[2].split()) == 5
    assert len(lines[5].split()) == 8


def test_log_lines():
    line = metrics_line(100, "trn", TRAIN, 1e-3)
    assert (
        line
        == "Batch     100: trn: rmse = 2.01e+01, rmse_e = 1.12e-02, rmse_f = 6.35e-01, lr = 1.00e-03"
    )
    assert metrics_line(1, "val", {"rmse": 1.0}) == "Batch       1: val: rmse = 1.00e+00"
    now = datetime.datetime(2026, 1, 2, 3, 4)
    assert timing_line(200, 12.34, 0.0567, 3700.9, now) == (
        "Batch     200: total wall time = 12.34 s, 0.0567 s/batch, eta = 1:01:40 at 2026-01-02 04:05"
    )
    for unknown in (None, float("inf"), float("nan"), 1e20):  # the last ends after the calendar
        shown = timing_line(200, 12.34, 0.0567, unknown, now)
        assert shown == "Batch     200: total wall time = 12.34 s, 0.0567 s/batch"
    assert timing_line(200, 12.34, 0.0567, None, now, 33862.4).endswith(
        " 0.0567 s/batch, 3.386e+04 atoms/s"
    )


@pytest.mark.parametrize(
    ("start_step", "lines"), [(0, [1, 7, 13, 19, 25]), (500, [506, 512, 518, 524])]
)
def test_a_slow_run_shows_its_progress_every_half_minute(start_step, lines, caplog):
    """Steps of 5 s, metrics every 1000 steps: the wall time counts from the start of the command, 100 s earlier."""
    caplog.set_level("INFO")
    now = 1000.0
    console = ConsoleReport(1000, 2000, start_step=start_step, begun=now - 100.0, clock=lambda: now)
    for step in range(start_step + 1, start_step + 30):
        now += 5.0
        if step == 1:
            console.step(step, 1e-3, TRAIN, {})
        console.advance(step)
    shown = [message for message in caplog.messages if "wall time" in message]
    assert [int(message[6:13]) for message in shown] == lines
    for message, step in zip(shown, lines, strict=True):
        assert f"total wall time = {100 + 5 * (step - start_step):.2f} s, 5.0000 s/batch" in message
        left = str(datetime.timedelta(seconds=5 * (2000 - step)))
        assert (f"eta = {left}" in message) == (
            step != lines[0]
        )  # the first interval predicts nothing
    console.close()
    assert len(caplog.messages) == len(lines) + (
        start_step == 0
    )  # no interval of metrics has ended


def test_atoms_a_second_are_those_of_the_interval(caplog):
    """400 atoms in 4 s; then no news of other ranks' atoms in a line after a silence, which ends no interval."""
    caplog.set_level("INFO")
    now, atoms = 1000.0, 50.0
    console = ConsoleReport(10, 100, start_step=50, clock=lambda: now, atoms=lambda: atoms)
    for step, after, total in ((60, 4.0, 450.0), (65, 40.0, 450.0), (70, 10.0, 950.0)):
        now, atoms = now + after, total
        if step % 10 == 0:
            console.step(step, 1e-3, TRAIN, {})
        console.advance(step)
    shown = [
        message.partition("s/batch")[2].partition(", eta")[0]
        for message in caplog.messages
        if "wall" in message
    ]
    assert shown == [", 100 atoms/s", "", ", 10 atoms/s"]


def test_reports_of_a_run_reach_log_and_file(caplog):
    caplog.set_level("INFO")
    reports = open_reports(training(), num_steps=300)
    for step in range(1, 301):
        reports.advance(step)
        if reports.due(step):
            assert reports.due_validation(step)
            reports.step(step, 1e-3, TRAIN, VALID)
    reports.close()
    assert np.genfromtxt("lcurve.out", names=True)["step"].tolist() == [1, 100, 200, 300]
    starts = [message[:19] for message in caplog.messages]
    assert [start[-4:] for start in starts[:4]] == ["trn:", "val:", "tota", "trn:"]
    assert starts[2:4] == ["Batch       1: tota", "Batch     100: trn:"]
    assert caplog.messages[2].count("eta") == 0
    assert caplog.messages[5].count("eta") == 1
    assert caplog.messages[-1].endswith("s/batch (1 batches excluded)")


def test_display_can_be_switched_off():
    reports = open_reports(training(disp_training=False), num_steps=10)
    assert not any(reports.due(step) for step in range(1, 11))
    reports.close()


class Terminal(io.StringIO):
    """A terminal that remembers everything shown on it."""

    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_bar_moves_on_a_terminal_and_not_in_a_pipe(monkeypatch, stream):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream())
    reports = Reports(progress=tracked(range(10, 12), "training", total=40, done=10))
    for step in (10, 11, 12):
        reports.advance(step)
    reports.close()
    shown = sys.stderr.getvalue()
    assert ("10/40" in shown and "12/40" in shown) == (stream is Terminal)
    assert bool(shown) == (stream is Terminal)


def test_log_goes_to_stderr_and_file(tmp_path, capsys):
    path = tmp_path / "logs" / "run.log"
    set_up_logging("INFO", path)
    set_up_logging("INFO", path)  # a second call replaces the first: no line twice
    logging.getLogger("deepmd_muon.train").info("Batch       1: trn")
    logging.getLogger("deepmd_muon.train").debug("not shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("DEEPMD INFO    Batch       1: trn") == 1
    assert "not shown" not in captured.err
    assert path.read_text(encoding="utf-8").count("deepmd_muon.train") == 1


def test_other_ranks_show_warnings_only_and_write_no_file(tmp_path, capsys):
    set_up_logging("INFO", tmp_path / "run.log", rank=1)
    logging.getLogger("deepmd_muon").info("quiet")
    logging.getLogger("deepmd_muon").warning("loud")
    captured = capsys.readouterr().err
    assert "quiet" not in captured
    assert "DEEPMD rank:1  WARNING loud" in captured
    assert not (tmp_path / "run.log").exists()


def test_tensorboard_tags(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = TensorBoardReport(str(tmp_path / "tb"), 1)
    report.step(1, 1e-3, TRAIN, {})
    report.step(2, 5e-4, TRAIN, VALID)
    report.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.value for event in events.Scalars("Default/lr")] == pytest.approx([1e-3, 5e-4])
    assert [event.step for event in events.Scalars("Default/rmse_f")] == [1, 2]
    assert [event.value for event in events.Scalars("Default/rmse_f_val")] == pytest.approx([0.702])


def test_json_lines_keep_every_metric_and_continue_at_a_restart(tmp_path):
    path = tmp_path / "log.jsonl"
    file = JsonLinesFile(path, 5)
    file.step(1, 1e-3, {"rmse_f": 0.5}, {"rmse_f": float("nan")})
    file.step(5, 9e-4, {"rmse_f": 0.25}, {"rmse_f": 0.75})
    file.step(10, 8e-4, {"rmse_f": 0.2}, {})
    file.close()
    with path.open("a") as tail:
        tail.write('{"step": 15, "lr"')
    before = [json.loads(line) for line in path.read_text().splitlines()[:2]]
    file = JsonLinesFile(path, 5, start_step=5)
    file.step(10, 8e-4, {"rmse_f": 0.125}, {"rmse_f": 0.5})
    file.close()
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    assert [first, second] == before
    assert third["rmse_f_trn"] == 0.125
    assert third["time"] >= second["time"] >= first.pop("time")
    assert first == {"step": 1, "lr": 1e-3, "rmse_f_trn": 0.5, "rmse_f_val": None}


@pytest.mark.parametrize(
    ("setting", "module", "error"),
    [
        ("tensorboard", "torch.utils.tensorboard", TensorBoardError),
        ("wandb", "wandb", WandbError),
    ],
)
def test_a_missing_package_is_said_at_the_start(monkeypatch, setting, module, error):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(error, match=rf"install {setting} or set training\.{setting} to false"):
        open_reports(training(**{setting: True}), num_steps=10)


def test_wandb_gets_the_rows_of_the_learning_curve(monkeypatch):
    logged, calls = [], []

    def init(**options):
        calls.append(options)
        return SimpleNamespace(
            log=lambda row, step: logged.append((step, row)), finish=lambda: calls.append("finish")
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    reports = open_reports(
        training(wandb=True, wandb_project="water", disp_training=False), num_steps=200
    )
    for step in (1, 50, 100):
        if reports.due(step):
            assert reports.due_validation(step)
            reports.step(step, 1e-3, TRAIN, VALID)
    reports.close()
    row = {"lr": 1e-3}
    row |= {f"{k}_trn": v for k, v in TRAIN.items()} | {f"{k}_val": v for k, v in VALID.items()}
    assert logged == [(1, row), (100, row)]
    assert calls == [{"project": "water"}, "finish"]

    def refuse(**options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    with pytest.raises(WandbError, match="WANDB_MODE"):
        open_reports(training(wandb=True), num_steps=10)


@pytest.mark.parametrize(
    ("energy", "force", "weight", "words"),
    [
        ([0.5, 0.6, 0.7, 0.6], [1.0, 0.8, 0.7, 0.5], 3.0, []),
        ([0.01, 0.4, 0.5, 0.6], [0.1, 2.0, 2.0, 2.0], 3.0, []),  # large at first sight only
        ([0.5, 900.0, 900.0, 0.6], [1.0, 1.0, 1.0, 1.0], 3.0, []),  # it has come back
        ([0.5], [1.0], 3.0, []),
        ([float("nan")] * 4, [30.0, 40.0, 50.0, 60.0], 3.0, []),
        ([0.5, 900.0, 300.0, 400.0], [1.0, 1.0, 1.0, 1.0], 3.0, ["rmse_e", "300"]),
        ([0.5, 0.5, 0.5, 0.5], [1.0, 80.0, 90.0, 70.0], 3.0, ["rmse_f", "70"]),
        ([0.5, 0.6, 0.7, 0.6], [1.0, 0.8, 0.7, 0.5], 8e16, ["weight", "8e+16"]),
    ],
)
def test_divergence_shows_in_the_last_errors_or_the_weights(energy, force, weight, words):
    divergence = Divergence()
    for of_energy, of_force in zip(energy, force, strict=True):
        divergence.add({"rmse_e": of_energy, "rmse_f": of_force, "rmse": 1e9})
    problem = divergence.describe([torch.zeros(0), torch.tensor([1.0, -weight])])
    assert (problem is not None) == bool(words)
    assert all(word in problem for word in words)


def test_divergence_of_a_branch_names_it():
    divergence = Divergence()
    for error in (0.5, 1e4):
        divergence.add({"rmse_e/water": error, "rmse_e/copper": 0.5})
    problem = divergence.describe([])
    assert "of water" in problem
    assert "copper" not in problem
