"""Inputs that are small in the file and large in memory, deep, or of many digits end in one message, at once."""

import time

import pytest

from deepmd_muon.argcheck import InputError, load

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 25))
MAPS = "a0: &a0 {x: 1}\n" + "".join(f"a{k}: &a{k} {{p: *a{k - 1}, q: *a{k - 1}}}\n" for k in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{k}: &a{k} {{<<: [*a{k - 1}, *a{k - 1}]}}\n" for k in range(1, 26))


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.yaml", LAUGHS, "values"),
        ("a.yaml", MAPS, "values"),
        ("a.yaml", MERGES, "merge"),
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
    ],
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
