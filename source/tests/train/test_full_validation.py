"""Full validation during training: its errors, the best checkpoints, and both through a restart."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.data import open_systems
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.evaluation import evaluate_system
from deepmd_muon.infer.metrics import add_errors
from deepmd_muon.train.validation.best import BestCheckpoints

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
FULL = {
    "full_validation": True,
    "full_val_start": 0,
    "validation_freq": 2,
    "validation_metric": "F:RMSE",
}


def rows(path="val.log"):
    return {
        int(line.split()[0]): [float(x) for x in line.split()[1:]]
        for line in lines(path)
        if line[0] != "#"
    }


def lines(path="val.log"):
    return Path(path).read_text().splitlines()


@pytest.fixture
def validated(small_input):
    """A function that gives an input with full validation."""

    def make(steps=10, training=None, **validating):
        given = small_input(training={"numb_steps": steps, **(training or {})})
        given["validating"] = {**FULL, **validating}
        return given

    return make


def test_the_best_checkpoint_has_the_errors_of_dp_test(validated, train):
    assert train(validated(training={"enable_ema": True}, max_best_ckpt=2)) == 0
    found = rows()
    assert list(found) == [2, 4, 6, 8, 10]
    columns = [name.partition("(")[0] for name in lines()[0].split()[2:]]
    assert columns == ["E_MAE", "E_RMSE", "F_MAE", "F_RMSE", "S_MAE", "S_RMSE"]
    ranked = sorted(found, key=lambda step: found[step][3])[:2]
    best = [f"best.ckpt-{step}.t-{rank}.pt" for rank, step in enumerate(ranked, 1)]
    assert sorted(path.name for path in Path().glob("*best*")) == sorted(best)
    predictor = Predictor(best[0])
    errors = {}
    for system in open_systems(str(EXAMPLE / "valid"), ["Cu"]):
        for part in evaluate_system(predictor, system):
            errors = add_errors(errors, part.errors)
    expected = [
        (errors[name].mae, errors[name].rmse) for name in ("energy_per_atom", "force", "stress")
    ]
    np.testing.assert_allclose(np.ravel(expected) * 1e3, found[ranked[0]], rtol=1e-4)


def test_a_restart_goes_on_as_if_nothing_had_happened(
    validated, train, load, tmp_path, monkeypatch
):
    whole = validated(10, max_best_ckpt=3, save_best_dir="best", validation_metric="v:mae")
    assert train(whole) == 0
    expected = {path.name for path in Path("best").iterdir()}
    assert len(expected) == 3
    assert "V_MAE" in lines()[0]
    # A run that was killed after ten steps, and lost all checkpoints but the first.
    other = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-restarted", symlinks=True)
    monkeypatch.chdir(other)
    for name in ("model.ckpt-10.pt", "model.ckpt.pt"):
        Path(name).unlink()
    (Path("best") / ".best.ckpt-8.t-1.0123456789abcdef.pt").touch()
    assert train(whole, restart="model.ckpt-5.pt") == 0
    assert lines() == lines(tmp_path / "val.log")
    assert {path.name for path in Path("best").iterdir()} == expected
    theirs = load(str(tmp_path / "model.ckpt-10.pt"))["model"]["_extra_state"]["train_infos"]
    assert load()["model"]["_extra_state"]["train_infos"] == theirs
    assert theirs["full_validation_metric"] == "v:mae"
    steps = [record["step"] for record in theirs["full_validation_topk_records"]]
    assert expected == {f"best.ckpt-{step}.t-{rank}.pt" for rank, step in enumerate(steps, 1)}


def test_a_run_continues_from_a_best_checkpoint_and_a_fresh_one_keeps_it(validated, train):
    assert train(validated(6)) == 0
    (best,) = Path().glob("best.ckpt-*.pt")
    assert train(validated(6, training={"save_ckpt": "again"}), restart=str(best)) == 0
    assert list(rows()) == [2, 4, 6]
    (best,) = Path().glob("best.ckpt-*.pt")
    assert train(validated(6, full_val_start=0.5, validation_freq=1, save_best=False)) == 0
    assert list(rows()) == [3, 4, 5, 6]
    assert list(rows("val.log.1")) == [2, 4, 6]
    assert [path.name for path in Path().glob("best*")] == [
        best.name.replace("best.ckpt", "best.ckpt.1")
    ]


def test_ranks_are_those_of_the_errors(tmp_path):
    best = BestCheckpoints(tmp_path, 2, "e:mae")
    (tmp_path / "best.ckpt-1.t-1.pt.mine").touch()

    def names():
        return sorted(path.name for path in tmp_path.glob("*.pt"))

    for step, error, expected in (
        (10, 3.0, ["best.ckpt-10.t-1.pt"]),
        (20, 2.0, ["best.ckpt-10.t-2.pt", "best.ckpt-20.t-1.pt"]),
        (30, 2.5, ["best.ckpt-20.t-1.pt", "best.ckpt-30.t-2.pt"]),
        (40, 2.5, None),
        (50, 1.0, ["best.ckpt-20.t-2.pt", "best.ckpt-50.t-1.pt"]),
    ):
        assert best.enter(step, error) == (expected is not None)
        if expected:
            best.save(step, {"step": step})
            assert names() == expected
    again = BestCheckpoints(tmp_path, 1, "e:mae")
    again.restore(best.state())
    again.tidy()
    assert names() == ["best.ckpt-50.t-1.pt"]
    other = BestCheckpoints(tmp_path, 2, "f:mae")
    other.restore(best.state())
    assert other.records == []
    other.keep_earlier()
    assert names() == ["best.ckpt.1-50.t-1.pt"]


def test_a_quantity_that_the_loss_leaves_out_does_not_decide(validated):
    given = validated()
    given["loss"].update(start_pref_v=0, limit_pref_v=0)
    given["validating"]["validation_metric"] = "S:MAE"
    with pytest.raises(InputError, match="loss/start_pref_v"):
        normalize(given)
