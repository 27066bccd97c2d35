"""deepmd-kit itself accepts what we write, and we accept what it writes."""

import json

from deepmd_kit_program import MARKS, python

from deepmd_muon.argcheck import normalize

pytestmark = MARKS

# Answers each input of a list with deepmd-kit's normalised form, or the text of its error.
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
from deepmd.utils.argcheck import normalize
from deepmd.utils.compat import update_deepmd_input
answers = []
for data in json.load(sys.stdin):
    try:
        answers.append(normalize(update_deepmd_input(data, warning=False)))
    except Exception as error:
        answers.append(repr(error))
print("ANSWER" + json.dumps(answers))
"""


def as_deepmd_kit(inputs):
    """Return deepmd-kit's normalised forms of some inputs."""
    return json.loads(
        python("-c", SCRIPT, given=json.dumps(inputs)).split("ANSWER")[1].splitlines()[0]
    )


def test_both_ways(water):
    plain = json.loads(json.dumps(water))
    changed = json.loads(json.dumps(water))
    changed["model"]["descriptor"].update(
        sel="auto:1.2", exclude_types=[[0, 1]], precision="float32"
    )
    changed["model"]["fitting_net"].update(atom_ener=[None, 1.5], rcond=1e-3, trainable=False)
    changed["loss"].update(
        start_pref_v=1, limit_pref_v=1, use_huber=True, huber_delta=[0.1, 0.2, 0.3]
    )
    changed["learning_rate"] = {
        "type": "wsd",
        "start_lr": 1e-3,
        "stop_lr_ratio": 0.01,
        "warmup_ratio": 0.1,
    }
    inputs = [plain, changed]
    ours = [normalize(data).normalized for data in inputs]
    # Our model section inside their input, and their input as it is.
    theirs = as_deepmd_kit(
        [{**data, "model": own["model"]} for data, own in zip(inputs, ours, strict=True)] + inputs
    )

    for own, answer, their in zip(ours, theirs[:2], theirs[2:], strict=True):
        assert isinstance(answer, dict), answer
        assert {
            key: answer["model"][key]
            for key in own["model"]
            if key not in ("descriptor", "fitting_net")
        } == {
            key: value
            for key, value in own["model"].items()
            if key not in ("descriptor", "fitting_net")
        }
        for section in ("descriptor", "fitting_net"):
            assert {key: answer["model"][section][key] for key in own["model"][section]} == own[
                "model"
            ][section]
        # What deepmd-kit fills in is what we fill in.
        checked = normalize(their)
        assert checked.notices == ()
        assert checked.normalized == own


def test_defaults_are_theirs():
    """With nothing but the required keys, every key that both know has the same value, except for Muon's scale."""
    least = {
        "model": {"type_map": ["O", "H"], "descriptor": {"type": "se_e2_a"}, "fitting_net": {}},
        "loss": {},
        "learning_rate": {"start_lr": 1e-3},
        "training": {"training_data": {"systems": "a"}, "numb_steps": 10},
    }
    # One system as a string is a list of one here; clipping is off by 0 here and by absence there.
    always = {"training/training_data/systems": (["a"], "a")}
    # 0.18 suits deepmd-kit's arithmetic, which this package uses on request (doc/learning-rate.md).
    precise = {"optimizer/lr_adjust_coeff": (8.64, 0.18)}
    inputs = [
        {**least, "optimizer": {"type": kind}}
        for kind in ("Adam", "AdamW", "HybridMuon", "HybridMuon")
    ]
    further = [{}, {}, {}, {"deepmd_kit_arithmetic": True}]
    expected = [always, always, always | precise, always]
    for data, own, theirs, different in zip(
        inputs, further, as_deepmd_kit(inputs), expected, strict=True
    ):
        ours = normalize({**data, "optimizer": {**data["optimizer"], **own}}).normalized
        assert dict(compare(ours, theirs, ())) == different


def compare(ours, theirs, path):
    """Yield the values that differ below keys that both sides have."""
    for key in ours.keys() & theirs.keys():
        if isinstance(ours[key], dict) and isinstance(theirs[key], dict):
            yield from compare(ours[key], theirs[key], (*path, key))
        elif ours[key] != theirs[key]:
            yield "/".join((*path, key)), (ours[key], theirs[key])
