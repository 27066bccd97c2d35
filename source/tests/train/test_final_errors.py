"""The table of errors that ends a run: its numbers, its sample, its command, and when it does not come."""

import os
import shlex
import signal
from pathlib import Path

import pytest
import torch
from test_validation import CPU, loader, systems  # noqa: F401 (a fixture)

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.evaluation import evaluate_system
from deepmd_muon.infer.metrics import add_errors
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.step.step import TrainingStep
from deepmd_muon.train.validation.final_errors import (
    error_table,
    frames_of_sample,
    frames_to_compare,
    parity_command,
)
from deepmd_muon.train.validation.full_validation import error_sums

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"


def table(caplog):
    """The lines of the table and those after it."""
    lines = [record.getMessage() for record in caplog.records]
    first = [k for k, line in enumerate(lines) if line.startswith("errors on the validation data")]
    return lines[first[0] :] if first else []


def test_the_table_has_the_errors_of_dp_test_and_its_command_draws_it(
    small_input, train, finished, caplog, monkeypatch
):
    monkeypatch.setattr("deepmd_muon.train.validation.final_errors._FEWEST_FRAMES", 30)
    assert train(small_input(), log_level="INFO", restart="model.ckpt-10.pt") == 0
    title, head, *rows, command, done, check = table(caplog)
    assert "all 30 frames" in title
    columns = "system frames energy [meV/atom] force [meV/Å] virial [meV/atom]"
    assert " ".join(head.split()) == columns
    predictor, total, expected = Predictor("model.ckpt.pt"), {}, []
    for system in open_systems(str(EXAMPLE / "valid"), ["Cu"]):
        errors = {}
        for part in evaluate_system(predictor, system):
            errors = add_errors(errors, part.errors)
        total = add_errors(total, errors)
        expected.append((system.name, 10, errors))
    for row, (name, count, errors) in zip(rows, [*expected, ("all", 30, total)], strict=True):
        cells = row.split()
        assert name.endswith(cells[0].lstrip("…"))
        assert int(cells[1]) == count
        for cell, quantity in zip(
            cells[2:], ("energy_per_atom", "force", "virial_per_atom"), strict=True
        ):
            if quantity in errors:
                assert float(cell) == pytest.approx(1e3 * errors[quantity].rmse, rel=6e-3)
            else:
                assert cell == "-"  # a cluster has no virial
    assert sum("-" in row.split() for row in rows) == 1
    assert "training done" in done
    words = shlex.split(command.partition(": ")[2])
    assert main(words[1:]) == 0
    assert Path("parity.png").stat().st_size > 1000
    words = shlex.split(check.partition(": ")[2])
    assert words[2:5] == ["check", "model.ckpt.pt", "--train-data"]
    assert main([*words[1:], "--time", "0.002", "--copies", "1", "--probes", "1"]) in (0, 1)
    assert Path("check.png").stat().st_size > 1000


def test_no_table_without_validation_data_or_after_a_signal(
    small_input, train, caplog, monkeypatch
):
    given = small_input()
    del given["training"]["validation_data"]
    assert train(given, log_level="INFO") == 0
    assert table(caplog) == []
    original, count = TrainingStep.__call__, 0

    def interrupted(self, *args):
        nonlocal count
        count += 1
        if count == 10:  # the last step
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    monkeypatch.setattr(TrainingStep, "__call__", interrupted)
    assert train(small_input(), log_level="INFO") == 128 + signal.SIGTERM
    assert table(caplog) == []


def test_a_signal_during_the_comparison_ends_it(small_input, train, caplog, monkeypatch):
    from deepmd_muon.train.validation import run_validation

    compared = []

    def stopped(model, batches, nrows, add_up):
        for batch in batches:
            compared.append(batch)
            os.kill(os.getpid(), signal.SIGINT)
        return [[0.0] * 12] * nrows

    monkeypatch.setattr(run_validation, "error_sums", stopped)
    assert train(small_input(), log_level="INFO") == 128 + signal.SIGINT
    assert len(compared) == 1
    assert table(caplog) == []


def test_a_restart_of_a_finished_run_shows_the_same_table(small_input, train, finished, caplog):
    assert train(small_input(), log_level="INFO", restart="model.ckpt-10.pt") == 0
    again = table(caplog)
    caplog.clear()
    assert train(small_input(), log_level="INFO", restart="model.ckpt-5.pt") == 0
    assert table(caplog)[:-3] == again[:-3] != []
    assert "a sample of 9 of 30 frames" in again[0]


@pytest.mark.parametrize(
    ("frames", "steps", "expected"),
    [
        ([10, 10, 10], 1_000, [10, 10, 10]),
        ([10, 10, 10], 4, [3, 3, 3]),
        ([9_000, 999, 1], 1_000_000, [900, 99, 1]),  # at most 1000, and at least one of each
        ([5] * 40, 100, [1, 0, 0, 0] * 10),  # more systems than frames
        ([], 10, []),
    ],
)
def test_the_sample_is_bounded_by_the_run(frames, steps, expected):
    assert frames_to_compare(frames, steps) == expected


@pytest.mark.parametrize(
    ("frames", "disp_freq", "expected"),
    [
        ([10, 10, 10], 100, [10, 10, 10]),
        ([100, 200], 90, [10, 20]),
        ([100, 200], 1, [3, 6]),
        ([1, 99], 30, [1, 9]),
    ],
)
def test_the_sample_of_a_row_is_bounded_by_the_steps_between_rows(frames, disp_freq, expected):
    assert frames_of_sample(frames, disp_freq) == expected


def test_a_row_of_the_learning_curve_has_the_errors_of_its_sample(small_input, train, caplog):
    given = small_input()
    given["training"]["validation_data"] |= {"batch_size": "auto", "numb_btch": "sample"}
    assert train(given, log_level="INFO") == 0
    # Of a run this short the table compares ten frames, too, by the weights of the last row.
    title, head, *rows = table(caplog)[:6]
    assert "a sample of 9 of 30 frames" in title
    assert head.split()[4] == "force"
    names, *values = (
        line.split() for line in Path("lcurve.out").read_text().splitlines() if line[:6] != "# If t"
    )
    last = dict(zip(names[1:], values[-1], strict=True))
    assert int(last["step"]) == 10
    assert 1e3 * float(last["rmse_f_val"]) == pytest.approx(float(rows[-1].split()[3]), rel=1e-2)


def test_ranks_share_the_comparison(systems, model):  # noqa: F811 (fixtures)
    def found(world, add_up=None):
        parts = []
        for rank in range(world):
            dealt = loader(systems, rank=rank, world_size=world).deal_sample([5, 2])
            batches = ((to_device(batch, 1, CPU), counts, k) for batch, counts, k in dealt)
            error_sums(model, batches, 2, lambda values: parts.append(values.clone()) or values)
        return torch.stack(parts).sum(0)

    whole = found(1)
    # Numbers of energies: frames 0, 1, 3, 5, 7 of the first, of which 0 to 5 have energies; the second has all.
    assert whole.view(2, 4, 3)[:, 0, 2].tolist() == [4.0, 2.0]
    for world in (2, 3, 8):
        torch.testing.assert_close(found(world), whole, rtol=1e-12, atol=0.0)


def test_of_many_systems_the_worst_are_shown():
    def sums(force):
        return [0.0, 0.0, 0.0, 6 * force, 6 * force**2, 6.0, *[0.0] * 6]

    errors = [0.001 * (k + 1) for k in range(30)]
    names = [f"{'long/' * 10}{k}" for k in range(30)]
    title, head, *rows = error_table(
        names, [2] * 30, [1] * 29 + [0], [*map(sums, errors[:29]), [0.0] * 12]
    )
    assert "sample of 29 of 60" in title
    assert head.split() == ["system", "frames", "force", "[meV/Å]"]
    assert [row.split()[0][-3:] for row in rows[:20]] == [
        f"/{k}"[-3:] if k > 9 else f"g/{k}"[-3:] for k in range(9, 29)
    ]
    assert float(rows[0].split()[2]) == 10.0
    assert "9 systems" in rows[20]
    mean = (sum(e**2 for e in errors[:29]) / 29) ** 0.5
    assert float(rows[21].split()[2]) == pytest.approx(1e3 * mean, rel=5e-3)
    assert len(rows) == 22
    assert all(len(row) <= 80 for row in rows)


def test_the_command_is_left_out_where_it_would_not_find_the_data(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("below/input.json", "my input.json"):
        (tmp_path / name).touch()
    assert parity_command("below/input.json", Path("model.ckpt.pt")) is None
    assert parity_command("the input", Path("model.ckpt.pt")) is None
    assert "--valid-data 'my input.json'" in parity_command("my input.json", Path("model.ckpt.pt"))
