"""Inputs that are small in the file and large in memory, deep, or of many digits end in one message, at once."""

import re
import time

import pytest
import yaml

from deepmd_muon.argcheck import InputError, load

LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 25)
)
MAPS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{k}: &a{k} {{p: *a{k - 1}, q: *a{k - 1}}}\n" for k in range(1, 40)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{k}: &a{k} {{<<: [*a{k - 1}, *a{k - 1}]}}\n" for k in range(1, 26)
)
# From PyYAML 6.0.4 on, a key is merged once, so that nothing multiplies.
ONCE = yaml.__version__ not in ("6.0", "6.0.1", "6.0.2", "6.0.3")
MERGES_WORD = "known key" if ONCE else "merge"


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.yaml", LAUGHS, "values"),
        ("a.yaml", MAPS, "values"),
        ("a.yaml", MERGES, MERGES_WORD),
        ("a.yaml", "a: " + "[" * 500 + "]" * 500, "deep"),
        ("a.yaml", "a: " + "9" * 5000, ""),
        ("a.yaml", "x" * 300_000, "KiB"),
        ("a.json", '{"model": {' + ", ".join(f'"k{k}": 0' for k in range(50_000)) + "}}", "model"),
        ("a.json", "[" + "0," * 10_000_000 + "0]", "KiB"),
        ("a.json", '{"model": ' + "9" * 5000 + "}", "digits"),
        ("a.json", '{"model": ' + "9" * 400 + "}", "400 digits"),
        ("a.json", '{"model": ' + "[" * 500 + "]" * 500 + "}", "deep"),
        ("a.json", '{"model": ' + "[" * 100_000 + "}", "deep"),
        ("a.json", '{"\\ud800": 1}', "surrogate"),
        ("a.json", '{"training": {"disp_file": "\\ud800"}}', "surrogate"),
        ("a.json", '{"training": {"save_ckpt": "a\\u0000b"}}', "NUL"),
        ("a.yaml", 'training: {save_ckpt: "a\\0b"}', "NUL"),
    ],
    ids=lambda value: value[:30],  # pytest 8 shows texts of megabytes in full
)
def test_a_large_input_is_refused_soon(tmp_path, name, text, word):
    (tmp_path / name).write_text(text)
    begin = time.process_time()
    with pytest.raises(InputError) as error:
        load(tmp_path / name)
    assert time.process_time() - begin < 5.0
    message = str(error.value)
    assert word in message
    message.encode()
    assert len(message) < 20_000


HUGE = {
    "model/descriptor/neuron": [[1e25], [10**12], [2**62]],
    "model/fitting_net/neuron": [[1e25], [2**40]],
    "model/descriptor/axis_neuron": [10**9],
    "model/descriptor/sel": [[10**15, 1], [1e25, 1], "auto:99999999999"],
    "model/descriptor/rcut": [1e300, 1e10],
    "learning_rate/start_lr": [1e300, 1e25],
    "learning_rate/stop_lr": [1e300],
    "loss/start_pref_f": [1e300],
    "training/numb_steps": [1e300, 1e19],
    "training/validation_data/numb_btch": [2**64, 2**40],
    "training/seed": [1e25],
    "training/rank_timeout": [1e25, 1e12],
    "training/gradient_max_norm": [1e300],
}


@pytest.mark.parametrize("path", HUGE)
def test_a_huge_number_is_named(water, problems, path):
    *sections, key = path.split("/")
    section = water
    for name in sections:
        section = section[name]
    for value in HUGE[path]:
        section[key] = value
        ((where, message),) = problems(water).items()
        assert where.startswith(path)
        assert re.search("at most|<= |exceed", message)
        assert len(message) < 200
