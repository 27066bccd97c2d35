import contextlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_dp
from compared import assert_same
from small_models import COPPER_DESCRIPTORS

from deepmd_muon.argcheck import normalize
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.model.statistics import descriptor_length
from deepmd_muon.optim import HybridMuon, RouteTable, omitted_scales
from deepmd_muon.train import NonFiniteError, TrainingError, start, trainer
from deepmd_muon.train.checkpoint.ownership import newest_checkpoint
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.report import TensorBoardError
from deepmd_muon.train.step.step import TrainingStep


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("HybridMuon", "float64"),
        ("HybridMuon", "float32"),
        ("Adam", "float32"),
        ("AdamW", "float64"),
        pytest.param("Adam", "float64", marks=pytest.mark.slow),
        pytest.param("AdamW", "float32", marks=pytest.mark.slow),
    ],
)
def test_restart_is_bitwise(small_input, check_restart, optimizer, precision):
    content = small_input(
        optimizer={"type": optimizer, "weight_decay": 0.01},
        training={"enable_ema": True, "ema_decay": 0.9, "gradient_max_norm": 5.0},
    )
    for part in ("descriptor", "fitting_net"):
        content["model"][part]["precision"] = precision
    whole, _ = check_restart(content, 5)
    assert whole.keys() >= {"model", "optimizer", "ema"}


def test_restart_after_interruption_equals_a_run_in_one_go(
    small_input, train, finished, load, monkeypatch
):
    whole = load()
    # The schedule depends on the length of the run: a signal cuts the first half out of the whole.
    half = small_input(training={"save_ckpt": "half", "save_freq": 100})
    calls = []

    def interrupting(step, batch, lr, lr_fraction, original=TrainingStep.__call__):
        found = original(step, batch, lr, lr_fraction)
        calls.append(lr)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(TrainingStep, "__call__", interrupting)
        assert train(half) == 128 + signal.SIGTERM
    assert load("half.pt")["deepmd_muon"]["step"] == 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train(half, restart="half-4.pt") == 0
    assert_same(whole, load("half-10.pt"))


def test_checkpoint_has_the_keys_and_names_of_deepmd_kit(finished, load):
    content = load()
    state = content["model"]
    assert state["_extra_state"]["train_infos"] == {"lr": pytest.approx(1e-4), "step": 9}
    assert (
        state["_extra_state"]["model_params"]["descriptor"]["sel"]
        == json.loads(Path("out.json").read_text())["model"]["descriptor"]["sel"]
    )
    for name in (
        "min_nbor_dist",
        "atomic_model.out_bias",
        "atomic_model.descriptor.sea.filter_layers.networks.0.layers.1.matrix",
        "atomic_model.descriptor.sea.filter_layers._networks.0.layers.1.matrix",
        "atomic_model.fitting_net.filter_layers.networks.0.layers.2.bias",
    ):
        assert f"model.Default.{name}" in state
    assert Path("model.ckpt.pt").resolve().name == "model.ckpt-10.pt"
    assert Path("checkpoint").read_text() == "model.ckpt-10.pt\n"
    routes = RouteTable.from_groups(content["optimizer"]["param_groups"])
    assert {entry.name: entry.route for entry in routes}[
        "atomic_model.descriptor.sea.filter_layers.networks.0.layers.1.matrix"
    ] == "muon"


@pytest.mark.parametrize(
    ("start_lr", "last"), [(1e-3, "check that dynamics"), (30.0, "do not use the model")]
)
def test_the_last_line_of_a_run_that_diverged_is_another_one(
    small_input, train, caplog, start_lr, last
):
    rate = {"start_lr": start_lr, "stop_lr": start_lr / 2}
    content = small_input(optimizer={"type": "Adam"}, learning_rate=rate)
    assert train(content, log_level="INFO") == 0
    assert last in caplog.messages[-1]
    assert ("training done" in caplog.text) == (start_lr < 1)


def test_changed_routes_stop_the_restart_and_are_all_named(small_input, train, finished):
    changed = small_input(optimizer={"min_matrix_dim": 7})
    with pytest.raises(CheckpointError) as caught:
        train(changed, restart="model.ckpt.pt")
    message = str(caught.value)
    # In (4, 8) and (6, 6) the smaller dimension is below 7; (24, 6) too: every Muon matrix is affected.
    for name in (
        "descriptor.sea.filter_layers.networks.0.layers.1.matrix",
        "fitting_net.filter_layers.networks.0.layers.0.matrix",
        "fitting_net.filter_layers.networks.0.layers.1.matrix",
    ):
        assert name in message
    assert "saved: route muon as 1x4x8" in message
    assert "present: route adam" in message
    assert not Path("model.ckpt-11.pt").exists()


@pytest.mark.parametrize("kind", ["HybridMuon", "Muon", "Adam"])
def test_a_restart_freezes_and_unfreezes_the_descriptor(small_input, train, load, kind):
    def run(steps, trainable, **options):
        content = small_input(optimizer={"type": kind}, training={"numb_steps": steps})
        content["model"]["descriptor"]["trainable"] = trainable
        assert train(content, **options) == 0
        saved = load(f"model.ckpt-{steps}.pt")
        weights = {name: x for name, x in saved["model"].items() if "networks.0.layers" in name}
        optimizer = saved["optimizer"]
        names = optimizer["param_groups"][0]["param_names"]
        state = {
            (names[number], key): x
            for number, values in optimizer["state"].items()
            for key, x in values.items()
            if "descriptor" in names[number]
        }
        return weights, state

    weights, state = run(2, trainable=True)
    frozen, kept = run(4, trainable=False, restart="model.ckpt-2.pt")
    again, _ = run(6, trainable=True, restart="model.ckpt-4.pt")
    for name, x in weights.items():
        assert torch.equal(frozen[name], x) == ("descriptor" in name)
        assert not torch.equal(again[name], frozen[name])
    if kind == "Adam":  # which knows trainable parameters alone
        assert not kept
    else:
        assert state.keys() == kept.keys()
        assert all(bool((torch.as_tensor(x) == kept[place]).all()) for place, x in state.items())


def test_a_checkpoint_of_another_optimizer_is_recognised(small_input, train, load):
    train(small_input(optimizer={"type": "Adam"}))
    with pytest.raises(CheckpointError, match="saved: route adam, shape 4x8; present: route muon"):
        train(small_input(), restart="model.ckpt.pt")
    longer = {"numb_steps": 11, "save_ckpt": "migrated"}
    migrating = small_input(optimizer={"on_route_change": "migrate"}, training=longer)
    train(migrating, restart="model.ckpt.pt")
    saved, migrated = load()["optimizer"]["state"], load("migrated.pt")["optimizer"]["state"]
    assert {key for state in saved.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert any("momentum_buffer" in state for state in migrated.values())
    assert {float(state["step"]) for state in migrated.values() if "step" in state} == {11.0}
    train(small_input(training={"save_ckpt": "muon"}))
    with pytest.raises(CheckpointError, match="HybridMuon's, the input asks for Adam"):
        train(small_input(optimizer={"type": "Adam"}), restart="muon.pt")


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ({}, "in_out"),
        ({"deepmd_kit_arithmetic": True}, "as_stored"),
        ({"layout": "as_stored"}, "as_stored"),
    ],
)
def test_the_optimizer_knows_how_weights_are_stored(small_input, train, load, optimizer, layout):
    train(small_input(training={"numb_steps": 1}, optimizer=optimizer))
    assert load()["optimizer"]["param_groups"][0]["layout"] == layout


def test_init_model_takes_weights_and_starts_at_zero(small_input, train, finished, load):
    before = load()
    content = small_input(training={"numb_steps": 0, "save_ckpt": "second"})
    assert train(content, init_model="model.ckpt.pt") == 0
    after = load("second-0.pt")
    assert after["deepmd_muon"]["step"] == 0
    assert_same(before, after, parts=("model",))
    assert after["optimizer"]["state"] == {}


def test_init_model_of_another_shape_lists_every_tensor(small_input, train, finished, load, caplog):
    wider = small_input(training={"numb_steps": 0, "save_ckpt": "wide"})
    wider["model"] = {**wider["model"], "fitting_net": {"neuron": [6, 7], "seed": 2}}
    with pytest.raises(
        CheckpointError, match=r"model/fitting_net/neuron was \[6, 6\], is \[6, 7\]"
    ):
        train(wider, init_model="model.ckpt.pt")
    assert train(wider, init_model="model.ckpt.pt", force_load=True) == 0
    assert "layers.1.matrix: shape (6, 6) in the checkpoint, (6, 7) here" in caplog.text
    assert "layers.2.matrix: shape (6, 1) in the checkpoint, (7, 1) here" in caplog.text
    name = "model.Default.atomic_model.fitting_net.filter_layers.networks.0.layers.0.matrix"
    assert torch.equal(load()["model"][name], load("wide.pt")["model"][name])
    assert train(wider, init_model="model.ckpt.pt", use_pretrain_script=True) == 0
    written = load("wide.pt")["model"]["_extra_state"]["model_params"]
    assert written["fitting_net"]["neuron"] == [6, 6]


def test_only_own_checkpoints_are_deleted(small_input, train, load):
    Path("model.ckpt-7000.pt").write_text("somebody else's")
    content = small_input(training={"save_freq": 2, "max_ckpt_keep": 2})
    train(content)
    assert Path("model.ckpt.1-7000.pt").read_text() == "somebody else's"
    assert {p.name for p in Path().glob("model.ckpt-*.pt")} == {
        f"model.ckpt-{n}.pt" for n in (8, 10)
    }
    Path("model.ckpt-7000.pt").write_text("somebody else's")
    content["training"]["numb_steps"] = 12
    train(content, restart="model.ckpt-10.pt")
    assert {p.name for p in Path().glob("model.ckpt-*.pt")} == {
        f"model.ckpt-{n}.pt" for n in (10, 12)
    }
    assert Path("model.ckpt.2-7000.pt").read_text() == "somebody else's"


def test_a_non_finite_gradient_stops_before_the_update(small_input, train, spoil_batches):
    content = small_input()
    content["training"].pop("validation_data")
    batches = spoil_batches(first=8)
    with pytest.raises(
        NonFiniteError, match=r"before update 8: .*the last good checkpoint is model\.ckpt-5\.pt"
    ) as caught:
        train(content)
    assert f"on a batch of {batches[7].origin}" in str(caught.value)
    ((_, numbers),) = batches[7].origin.parts
    assert all(str(number) in str(batches[7].origin).rpartition("(")[2] for number in numbers)
    assert sorted(p.name for p in Path().glob("model.ckpt-*.pt")) == ["model.ckpt-5.pt"]


def test_the_energy_bias_is_set_where_the_descriptor_standardises_nothing(small_input, train, load):
    biases = []
    for kind in ("dpa3", "se_e2_a"):
        content = small_input(training={"numb_steps": 1, "save_freq": 1})
        content["model"]["descriptor"] = COPPER_DESCRIPTORS[kind]
        train(content)
        biases.append(load("model.ckpt-1.pt")["model"]["model.Default.atomic_model.out_bias"])
    assert biases[0].abs().max() > 0
    torch.testing.assert_close(*biases)


def test_an_input_is_read_and_checked_once(small_input, monkeypatch):
    """Also where the data decide `sel` and a checkpoint the model."""
    checked = []
    module = sys.modules["deepmd_muon.argcheck.load"]
    original = module.check
    monkeypatch.setattr(module, "check", lambda *args: checked.append(args) or original(*args))
    Path("input.json").write_text(json.dumps(small_input(training={"numb_steps": 1})))
    for more in ("", "--finetune model.ckpt.pt --use-pretrain-script"):
        checked.clear()
        assert run_dp(f"--pt train input.json --log-level WARNING {more}") == 0
        assert len(checked) == 1


def test_sel_auto_is_a_number_in_the_output_and_cannot_be_skipped(small_input, train):
    with pytest.raises(TrainingError, match="statistics, and --skip-neighbor-stat"):
        train(small_input(), skip_neighbor_stat=True)
    train(small_input(training={"numb_steps": 1}))
    sel = json.loads(Path("out.json").read_text())["model"]["descriptor"]["sel"]
    assert len(sel) == 1
    assert sel[0] % 4 == 0
    once = Path("out.json").read_text()
    train(json.loads(once), output="out2.json")
    assert Path("out2.json").read_text() == once


def test_of_many_types_the_log_shows_those_with_neighbors(small_input, train, caplog):
    """The type map of a universal model has more than a hundred elements."""
    content = small_input(training={"numb_steps": 1})
    elements = ["H", "He", "Li", "Be", "B", "C", "N", "O", "F", "Ne", "Cu"]
    content["model"]["type_map"] = elements
    content["model"]["descriptor"] |= {"type": "dpa1", "attn_layer": 0, "sel": 60}
    assert train(content, log_level="INFO") == 0
    assert re.search(r"at most Cu [1-9]\d* per type", caplog.text)


def test_numb_epoch_and_averaged_display(small_input, train):
    content = small_input(training={"disp_avg": True, "disp_freq": 3})
    content["training"]["numb_epoch"] = 0.2
    del content["training"]["numb_steps"]
    assert train(content) == 0
    # 3 systems of 40 frames in batches of 2 are 60 batches; a fifth of them is 12 steps.
    assert Path("checkpoint").read_text() == "model.ckpt-12.pt\n"


def test_a_restart_with_other_data_keeps_all_but_the_order(
    small_input, train, finished, load, caplog
):
    before = load("model.ckpt-5.pt")["optimizer"]["state"]
    content = small_input(training={"save_ckpt": "more", "seed": 77, "save_freq": 100})
    content["training"]["training_data"] = {**content["training"]["training_data"], "batch_size": 3}
    assert train(content, restart="model.ckpt-5.pt", log_level="INFO") == 0
    assert "training_data is not that of model.ckpt-5.pt: its order starts anew" in caplog.text
    assert "training/training_data/batch_size was 2, is 3" in caplog.text
    assert "training/seed was 3, is 77 (without effect while the saved order" in caplog.text
    after = load("more-10.pt")["optimizer"]["state"]
    assert {int(v["step"]) for v in after.values() if "step" in v} == {10}
    assert before.keys() == after.keys()


def test_a_restart_beyond_the_end_is_an_error(small_input, train, finished, monkeypatch):
    epochs = small_input(training={"numb_epoch": 0.1})
    del epochs["training"]["numb_steps"]  # the data say how many steps these are
    with pytest.raises(CheckpointError, match="is at step 10, beyond the last step"):
        train(epochs, restart="model.ckpt-10.pt")
    monkeypatch.delattr(start, "open_training_systems")
    with pytest.raises(CheckpointError, match="is at step 10, beyond the last step 7"):
        train(small_input(training={"numb_steps": 7}), restart="model.ckpt-10.pt")


def test_the_last_good_checkpoint_may_be_the_restarts_source(
    small_input, train, finished, spoil_batches
):
    spoil_batches(first=1)
    content = small_input(training={"save_ckpt": "other/m"})
    with pytest.raises(NonFiniteError, match=r"the last good checkpoint is model\.ckpt-5\.pt"):
        train(content, restart="model.ckpt-5.pt")


def test_nothing_to_train_is_an_error(small_input, train):
    content = small_input()
    for part in ("descriptor", "fitting_net"):
        content["model"][part]["trainable"] = False
    with pytest.raises(TrainingError, match="nothing is trainable"):
        train(content)


def test_a_folder_as_stat_file_is_refused_at_once(small_input, train):
    Path("stat").mkdir()
    with pytest.raises(ValueError, match="stat is a folder"):
        train(small_input(training={"stat_file": "stat"}))
    assert not Path("out.json").exists()


def test_terms_without_labels_are_told_and_useless_systems_refused(small_input, train, caplog):
    content = small_input(
        loss={"start_pref_ae": 1.0, "limit_pref_ae": 1.0}, training={"numb_steps": 1}
    )
    assert train(content) == 0
    assert any("ae" in record.message for record in caplog.records)
    only_virial = small_input(
        loss={"start_pref_e": 0.0, "limit_pref_e": 0.0, "start_pref_f": 0.0, "limit_pref_f": 0.0}
    )
    with pytest.raises(TrainingError, match="cluster13"):
        train(only_virial)


def test_reading_what_all_ranks_have_shown_is_marked_as_waiting(small_input, train, monkeypatch):
    """On a GPU it is there that a rank which is lost meanwhile is waited for."""
    inside, seen, original = [], [], trainer.numbers

    @contextlib.contextmanager
    def waiting(ranks):
        inside.append(ranks)
        yield
        inside.pop()

    def numbers(metrics):
        seen.append(len(inside))
        return original(metrics)

    monkeypatch.setattr(Ranks, "waiting", waiting)
    monkeypatch.setattr(trainer, "numbers", numbers)
    monkeypatch.setattr("deepmd_muon.train.validation.run_validation.numbers", numbers)
    assert train(small_input(training={"numb_steps": 2})) == 0
    assert len(seen) >= 2  # training and validation
    assert set(seen) == {1}


def test_restart_says_where_an_automatic_sel_comes_from_and_names_another_one(
    small_input, train, finished, caplog
):
    saved = json.loads(Path("out.json").read_text())["model"]["descriptor"]["sel"]
    content = small_input()
    assert train(content, restart="model.ckpt-5.pt", log_level="INFO") == 0
    assert f"sel of model/descriptor becomes {saved}, as in model.ckpt-5.pt" in caplog.text
    content["model"]["descriptor"]["sel"] = [saved[0] + 4]
    with pytest.raises(
        CheckpointError, match=rf"model/descriptor/sel was \[{saved[0]}\], is \[{saved[0] + 4}\]"
    ):
        train(content, restart="model.ckpt-5.pt")


def test_what_reports_need_is_looked_at_before_the_data(small_input, train, monkeypatch):
    def too_late(*_):
        raise AssertionError

    monkeypatch.setattr("deepmd_muon.train.start.open_training_systems", too_late)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TensorBoardError, match="install tensorboard or set"):
        train(small_input(training={"tensorboard": True}))


def test_the_folder_of_the_normalised_input_is_made(small_input, train):
    assert train(small_input(training={"numb_steps": 1}), output="new/folder/out.json") == 0
    assert Path("new/folder/out.json").exists()


@pytest.mark.parametrize(
    ("given", "rise", "kept", "shown"),
    [
        ({"lr_adjust_coeff": 0.18}, 4, (0.18, 1.0), "0.18"),
        (
            {"lr_adjust_coeff": 0.18, "adam_lr_ratio": 3.0},
            1,
            (0.18, 3.0),
            "0.18 and adam_lr_ratio 3",
        ),
        ({}, 0.25, (8.64, 10.0), "8.64 and adam_lr_ratio 10"),
    ],
)
def test_a_restart_keeps_the_scales_that_its_input_omits(
    small_input, train, load, caplog, given, rise, kept, shown
):
    content = small_input(training={"numb_steps": 1}, optimizer=given)
    assert train(content) == 0
    longer = small_input(training={"numb_steps": 2}, optimizer={})
    longer["learning_rate"]["start_lr"] *= rise
    caplog.clear()
    assert train(longer, log_level="INFO", restart="model.ckpt-1.pt") == 0
    (group,) = load("model.ckpt-2.pt")["optimizer"]["param_groups"]
    assert (group["lr_adjust_coeff"], group["adam_lr_ratio"]) == kept
    (said,) = (r for r in caplog.records if "lr_adjust_coeff is not given" in r.message)
    assert said.message.endswith(f"is not given and stays {shown}, as in model.ckpt-1.pt")
    assert said.levelname == "INFO"
    section = json.loads(Path("out.json").read_text())["optimizer"]
    assert (section["lr_adjust_coeff"], section.get("adam_lr_ratio")) == kept


@pytest.mark.parametrize("rise", [4, 100])
def test_a_restart_with_a_higher_start_lr_takes_the_rates_of_a_fresh_run(
    small_input, train, load, caplog, rise
):
    assert train(small_input(training={"numb_steps": 1})) == 0
    raised = small_input(training={"numb_steps": 2})
    raised["learning_rate"]["start_lr"] *= rise
    caplog.clear()
    assert train(raised, restart="model.ckpt-1.pt") == 0
    (group,) = load("model.ckpt-2.pt")["optimizer"]["param_groups"]
    fresh = {**raised, "training": {**raised["training"], "save_ckpt": "fresh", "numb_steps": 1}}
    (said,) = (record for record in caplog.records if "instead of 8.64" in record.message)
    assert said.levelname == "WARNING"
    assert train(fresh) == 0
    (of_fresh,) = load("fresh-1.pt")["optimizer"]["param_groups"]
    for key in ("lr_adjust_coeff", "adam_lr_ratio"):
        assert group[key] == of_fresh[key]
    assert group["lr_adjust_coeff"] == pytest.approx(8.64 / rise, rel=5e-3)
    section = json.loads(Path("out.json").read_text())["optimizer"]
    assert section["lr_adjust_coeff"] == group["lr_adjust_coeff"]


@pytest.mark.parametrize(
    ("saved_rate", "rate", "length", "expected"),
    [
        (1e-4, 1e-3, 1.0, (8.64, 10.0)),  # as in a fresh run; the rates rise with start_lr
        (1e-3, 1e-2, 1.0, (0.864, 1.0)),
        (1e-3, 1e-2, 80.0, (0.864, 1.0)),  # descriptors of trained weights are longer
        (1e-4, 1e-3, 80.0, (0.864, 2.0)),
        (1e-3, 1e-4, 80.0, (8.64, 10.0)),
        (None, 1e-2, 80.0, (8.64, 10.0)),
    ],
)
def test_scales_of_a_restart_keep_its_rates_or_take_those_of_a_fresh_run(
    small_input, saved_rate, rate, length, expected
):
    group = {"lr_adjust_coeff": 8.64, "adam_lr_ratio": 10.0}
    given = normalize(small_input(learning_rate={"start_lr": rate}))
    scales = given.scales.kept_from(group, saved_rate, "model.ckpt-1.pt").for_descriptors(length)
    assert (scales.values["lr_adjust_coeff"], scales.values["adam_lr_ratio"]) == expected


def test_omitted_scales_suit_the_descriptors_of_the_run(
    small_input, train, load, caplog, monkeypatch
):
    """Descriptors of this small run count as long here; a restart that keeps its scales does not measure again."""
    lengths = []

    def measured(*args):
        lengths.append(descriptor_length(*args))
        return lengths[-1]

    monkeypatch.setattr("deepmd_muon.train.omitted_settings.descriptor_length", measured)
    monkeypatch.setattr(omitted_scales, "_LONG_FOR_MUON", 0.01)
    monkeypatch.setattr(omitted_scales, "_LONG_FOR_ADAM", 0.04)
    assert train(small_input(training={"numb_steps": 1}), log_level="INFO") == 0
    (length,) = lengths
    expected = (
        pytest.approx(0.0864 / length, rel=5e-3),
        pytest.approx(max(1.0, 0.4 / length), rel=5e-3),
    )
    section = json.loads(Path("out.json").read_text())["optimizer"]
    (group,) = load("model.ckpt-1.pt")["optimizer"]["param_groups"]
    for found in (section, group):
        assert (found["lr_adjust_coeff"], found["adam_lr_ratio"]) == expected
    (said,) = (r for r in caplog.records if "lr_adjust_coeff is not given" in r.message)
    assert f"{length:.3g} long" in said.message
    assert said.levelname == "INFO"
    assert train(small_input(training={"numb_steps": 2}), restart="model.ckpt-1.pt") == 0
    (group,) = load("model.ckpt-2.pt")["optimizer"]["param_groups"]
    assert (group["lr_adjust_coeff"], group["adam_lr_ratio"]) == expected
    assert lengths == [length]
    adam = small_input(training={"numb_steps": 1, "save_ckpt": "adam"}, optimizer={"type": "Adam"})
    assert train(adam) == 0  # a checkpoint without scales
    other = small_input(
        training={"numb_steps": 2, "save_ckpt": "adam"}, optimizer={"on_route_change": "reset"}
    )
    assert train(other, restart="adam-1.pt") == 0
    assert len(lengths) == 2
    section = json.loads(Path("out.json").read_text())["optimizer"]
    assert section["lr_adjust_coeff"] < 0.0865 / lengths[1]


def test_an_input_without_an_optimizer_says_once_what_hybrid_muon_would_do(
    small_input, train, load, caplog
):
    content = small_input(training={"numb_steps": 1})
    del content["optimizer"]
    assert train(content, log_level="INFO") == 0
    (said,) = (record for record in caplog.records if "HybridMuon" in record.message)
    assert said.levelname == "INFO"
    assert "the run uses Adam" in said.message
    assert '"optimizer": {"type": "HybridMuon"}' in said.message
    assert "betas" in load()["optimizer"]["param_groups"][0]


def test_restart_auto_starts_afresh_and_then_continues(small_input, train, load, caplog):
    for steps in (4, 10):
        content = small_input(training={"numb_steps": steps, "save_freq": 2})
        assert train(content, restart="auto") == 0
    assert "starting afresh" not in caplog.text  # that is no warning
    assert load()["deepmd_muon"]["step"] == 10
    ours = load()
    rows = np.loadtxt("lcurve.out", comments="#")
    assert rows[:, 0].tolist() == [1, 2, 4, 6, 8, 10]
    Path("whole").mkdir()
    os.chdir("whole")
    assert train(small_input(training={"numb_steps": 4, "save_freq": 2})) == 0
    assert train(content, restart="model.ckpt.pt") == 0
    assert_same(ours, load())


def test_a_restart_does_not_step_back_over_a_directory_of_earlier_versions(small_input, train):
    content = small_input(training={"numb_steps": 2})
    Path("model.ckpt-4.dcp").mkdir()
    Path("model.ckpt.dcp").symlink_to("model.ckpt-4.dcp")
    with pytest.raises(CheckpointError, match="3adbaabc"):
        train(content, restart="auto")
    assert train(content) == 0
    with pytest.raises(CheckpointError, match="3adbaabc"):
        newest_checkpoint("model.ckpt")
    Path("model.ckpt-2.pt").rename("model.ckpt-4.pt")
    link("model.ckpt.pt", "model.ckpt-4.pt")
    assert newest_checkpoint("model.ckpt") == "model.ckpt.pt"


def link(name, target):
    Path(name).unlink()
    Path(name).symlink_to(target)


def test_restart_latest_finds_what_a_kill_has_left_without_its_link(
    small_input, train, load, caplog
):
    settings = {"numb_steps": 6, "save_freq": 2, "max_ckpt_keep": 2}
    assert train(small_input(training=settings)) == 0
    link("model.ckpt.pt", "model.ckpt-4.pt")
    assert newest_checkpoint("model.ckpt") == "model.ckpt-6.pt"
    Path("model.ckpt-6.pt").write_bytes(b"damaged")
    assert newest_checkpoint("model.ckpt") == "model.ckpt.pt"
    assert "model.ckpt-6.pt cannot be read as a checkpoint" in caplog.text
    # A branch that was given up: the run went on from step 4 and saved step 5.
    shutil.copy("model.ckpt-4.pt", "model.ckpt-5.pt")
    link("model.ckpt.pt", "model.ckpt-5.pt")
    other = load("model.ckpt-4.pt")
    other["deepmd_muon"]["series"] = ["model.ckpt-4.pt", "model.ckpt-6.pt"]
    torch.save(other, "model.ckpt-6.pt")
    assert newest_checkpoint("model.ckpt") == "model.ckpt.pt"
    Path("model.ckpt.pt").unlink()  # a run that was killed before it made its first link
    assert newest_checkpoint("model.ckpt") == "model.ckpt-6.pt"


def test_a_sel_that_is_too_small_is_answered_with_one_that_is_not(small_input, train, caplog):
    content = small_input(training={"numb_steps": 1})
    content["model"]["descriptor"]["sel"] = [8]
    assert train(content) == 0
    (warning,) = [
        r.getMessage() for r in caplog.records if "most neighbours found" in r.getMessage()
    ]
    enough = json.loads(re.search(r"at least (\[\d+\])", warning)[1])
    assert enough[0] % 4 == 0
    caplog.clear()
    content["model"]["descriptor"]["sel"] = enough
    assert train(content) == 0
    assert "most neighbours found" not in caplog.text


def test_the_gradients_of_the_adam_routes_are_clipped_alone(small_input, train, monkeypatch):
    content = small_input(
        optimizer={"type": "HybridMuon"}, training={"adam_gradient_max_norm": 1e-3}
    )
    norms = {"muon": [], "adam": []}
    step = HybridMuon.step

    def spy(self, *given, **named):
        for route, found in norms.items():
            grads = [p.grad for p, entry, _ in self.routed_parameters() if entry.route == route]
            found.append(torch.nn.utils.get_total_norm(grads).item())
        return step(self, *given, **named)

    monkeypatch.setattr(HybridMuon, "step", spy)
    train(content)
    assert len(norms["adam"]) == 10
    assert max(norms["adam"]) <= 1e-3 * (1 + 1e-6)
    assert min(norms["muon"]) > 2e-3
