"""Early stop: a run ends after full validations without a new best, and a branch without one is not drawn."""

import pytest
from compared import assert_same
from test_multi_task import EXAMPLE

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.train.validation import run_validation

PATIENT = {
    "full_validation": True,
    "full_val_start": 0,
    "validation_freq": 1,
    "early_stop_patience": 2,
}


@pytest.fixture
def scripted(monkeypatch):
    """Let the errors of branches be given ones: a list by name, an error for each step from the first on."""

    def script(**errors):
        def of_step(self, step):
            names = [f"{quantity}:{kind}" for quantity in "efsv" for kind in ("mae", "rmse")]
            return {name: dict.fromkeys(names, values[step - 1]) for name, values in errors.items()}

        monkeypatch.setattr(run_validation.Validation, "errors", of_step)

    return script


def positions(content):
    return {name: state["step"] for name, state in content["deepmd_muon"]["training_data"].items()}


def test_a_run_without_a_new_best_ends_with_its_checkpoint(small_input, train, load, scripted):
    scripted(Default=[5.0, 4.0, 4.5, 3.0, 3.0, 3.5, *[0.0] * 4])
    content = small_input(training={"save_freq": 5}, validating=PATIENT)
    assert train(content) == 0
    whole = load()
    assert whole["deepmd_muon"]["step"] == 6
    # From a step between, and from the end: the same end.
    content["training"]["save_ckpt"] = "again"
    assert train(content, restart="model.ckpt-5.pt") == 0
    assert load("again.pt")["deepmd_muon"]["step"] == 6
    assert_same(whole, load("again.pt"))
    assert train(content, restart="again-6.pt") == 0
    assert load("again.pt")["deepmd_muon"]["step"] == 6
    # More patience lets it go on.
    content["validating"]["early_stop_patience"] = 3
    assert train(content, restart="again-6.pt") == 0
    assert load("again.pt")["deepmd_muon"]["step"] == 10


def test_a_branch_without_a_new_best_is_not_drawn(two_branches, train, load, scripted):
    hot = [5.0, *[6.0] * 6, 4.0, *[5.0] * 12]  # waits after steps 3 to 7, and from step 10 on
    cold = [20.0 - k for k in range(14)] + [30.0] * 6  # waits from step 16 on
    scripted(hot=hot, cold=cold)
    content = two_branches(numb_steps=20, save_freq=1)
    content["training"] |= {"max_ckpt_keep": 20, "model_prob": {"hot": 3, "cold": 1}}
    content["training"]["data_dict"]["cold"]["validation_data"] = {
        "systems": str(EXAMPLE / "valid" / "triclinic8")
    }
    content["validating"] = PATIENT
    assert train(content) == 0
    seen = {step: positions(load(f"model.ckpt-{step}.pt")) for step in range(1, 17)}
    assert load()["deepmd_muon"]["step"] == 16
    assert seen[3]["hot"] == seen[8]["hot"] < seen[10]["hot"] == seen[16]["hot"]
    assert all(sum(each.values()) == step for step, each in seen.items())
    content["training"]["save_ckpt"] = "again"
    assert train(content, restart="model.ckpt-5.pt") == 0
    assert_same(load(), load("again.pt"))
    assert positions(load("again.pt")) == seen[16]


def test_a_branch_that_is_never_drawn_does_not_keep_a_run_alive(
    two_branches, train, load, scripted
):
    scripted(hot=[1.0] * 10)
    content = two_branches(numb_steps=10, model_prob={"hot": 1, "cold": 0})
    content["validating"] = PATIENT
    assert train(content) == 0
    assert load()["deepmd_muon"]["step"] == 3


@pytest.mark.parametrize("change", [{"full_validation": False}, {"full_val_start": 1}])
def test_patience_needs_full_validation(small_input, change):
    with pytest.raises(InputError) as caught:
        normalize(small_input(validating={**PATIENT, **change}))
    assert [problem.path for problem in caught.value.problems] == ["validating/early_stop_patience"]
