"""Whatever is valid stays the same when its normalised form is given back."""

import json

import jsonschema
from dargs import Argument
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmd_muon.argcheck import gen_args, normalize
from deepmd_muon.argcheck.json_schema import json_schema

VALIDATOR = jsonschema.Draft202012Validator(json_schema())

rates = st.floats(1e-5, 1e-2)
prefactors = st.sampled_from([0, 1, 0.5, 1000])
widths = st.lists(st.integers(4, 64), min_size=1, max_size=3)
comments = st.dictionaries(
    st.sampled_from(["_comment", "_2"]), st.one_of(st.text(max_size=5), st.none()), max_size=1
)


def some(**optional):
    """Any subset of these keys, with a comment now and then."""
    parts = st.tuples(st.fixed_dictionaries({}, optional=optional), comments)
    return parts.map(lambda part: {**part[0], **part[1]})


def merged(*parts):
    """Dicts drawn from all parts as one."""
    return st.tuples(*parts).map(
        lambda drawn: {key: value for part in drawn for key, value in part.items()}
    )


def descriptors(ntypes):
    return merged(
        st.fixed_dictionaries({"type": st.sampled_from(["se_e2_a", "se_a"]), "neuron": widths}),
        some(
            sel=st.one_of(
                st.just("auto"),
                st.just("auto:1.3"),
                st.lists(st.integers(1, 90), min_size=ntypes, max_size=ntypes),
            ),
            rcut=st.floats(3, 9) | st.integers(3, 9),
            rcut_smth=st.floats(0, 2.9),
            seed=st.none() | st.integers(0, 2**32),
            exclude_types=st.lists(
                st.lists(st.integers(0, ntypes - 1), min_size=2, max_size=2), max_size=2
            ),
            activation_function=st.sampled_from(["tanh", "None", "silut:3.0", "gelu_tf"]),
            precision=st.sampled_from(["default", "float32"]),
            resnet_dt=st.booleans(),
        ),
        st.sampled_from(["axis_neuron", "n_axis_neuron"]).flatmap(
            lambda key: some(**{key: st.sampled_from([1, 4, 2.0])})
        ),
    )


@st.composite
def models(draw):
    type_map = draw(st.lists(st.sampled_from(["H", "C", "N", "O"]), min_size=1, unique=True))
    energies = st.lists(
        st.none() | st.floats(-9, 9), min_size=len(type_map), max_size=len(type_map)
    )
    fitting = some(
        type=st.just("ener"), n_neuron=widths, atom_ener=energies, rcond=st.none() | st.just(1e-3)
    )
    rest = some(
        fitting_net=fitting,
        data_stat_nbatch=st.integers(1, 9),
        info=st.just({}),
        type=st.just("standard"),
    )
    return {"type_map": type_map, "descriptor": draw(descriptors(len(type_map))), **draw(rest)}


STOPS = [{}, {"stop_lr": 1e-7}, {"stop_lr_ratio": 0.01}, {"stop_lr": None}]
WARMUPS = [{}, {"warmup_steps": 9}, {"warmup_ratio": 0.1}, {"warmup_start_factor": 0.1}]


@st.composite
def learning_rates(draw):
    decay_rates = st.none() | st.just(0.9)
    decay_types = st.sampled_from(["cosine", "linear"])
    kinds = {
        "exp": some(decay_steps=st.integers(1, 9999), decay_rate=decay_rates, smooth=st.booleans()),
        "cosine": some(),
        "wsd": some(decay_phase_ratio=st.just(0.2), decay_type=decay_types),
    }
    kind = draw(st.sampled_from(list(kinds)))
    stop = draw(st.sampled_from(STOPS))
    warmup = draw(st.sampled_from(WARMUPS))
    tag = {} if kind == "exp" and draw(st.booleans()) else {"type": kind}
    return {**tag, "start_lr": draw(rates), **stop, **warmup, **draw(kinds[kind])}


losses = some(
    type=st.just("ener"),
    start_pref_e=prefactors,
    start_pref_v=prefactors,
    limit_pref_v=prefactors,
    huber=st.booleans(),
    huber_delta=st.just(0.1) | st.just([0.1, 0.2, 0.3]),
)
optimizers = st.one_of(
    merged(
        st.just({"type": "HybridMuon"}),
        some(
            muon_momentum=st.floats(0, 0.99),
            lr_adjust=st.sampled_from([0, 10, -1.0]),
            scaling=st.sampled_from([None, "match_rms"]),
            min_matrix_dim=st.integers(1, 9),
            adam_patterns=st.lists(st.text(max_size=5), max_size=2),
        ),
        st.one_of(
            some(muon_mode=st.sampled_from(["2d", "flat", "slice"])),
            some(muon_2d_only=st.booleans()),
        ),
    ),
    merged(
        st.sampled_from([{}, {"type": "Adam"}, {"type": "AdamW"}]),
        some(weight_decay=st.floats(0, 0.1)),
    ),
)
data = merged(
    st.fixed_dictionaries({"systems": st.sampled_from(["data", ["a", "b.hdf5#/c"]])}),
    some(
        batch_size=st.sampled_from([1, 4.0, [2], "auto", "auto:16", "max:9"]),
        auto_prob_style=st.sampled_from(["prob_uniform", "prob_sys_size;0:2:0.5;2:3:1e-1"]),
        set_prefix=st.just("set"),
    ),
)
trainings = merged(
    st.fixed_dictionaries({"training_data": data}),
    st.sampled_from(
        [{"numb_steps": 100}, {"stop_batch": 1e6}, {"num_epoch": 2}, {"numb_epochs": 0.5}]
    ),
    some(
        validation_data=st.none() | data,
        seed=st.none() | st.integers(0, 99),
        gradient_max_norm=st.integers(0, 5),
        numb_test=st.just(10),
        enable_ema=st.booleans(),
        zero_stage=st.integers(0, 3),
    ),
)
inputs = merged(
    st.fixed_dictionaries(
        {"model": models(), "learning_rate": learning_rates(), "training": trainings}
    ),
    some(loss=losses, optimizer=optimizers, validating=some(full_validation=st.just(False))),
)


@given(inputs)
def test_normalising_twice_is_normalising_once(given_input):
    once = normalize(given_input)
    twice = normalize(once.normalized)
    assert twice.normalized == once.normalized
    assert twice.settings == once.settings
    assert twice.notices == ()
    assert json.loads(json.dumps(once.normalized, allow_nan=False)) == once.normalized


@given(inputs)
@settings(max_examples=20)  # the validator takes long
def test_every_normalised_input_satisfies_both_schemas(given_input):
    normalized = normalize(given_input).normalized
    assert [error.message for error in VALIDATOR.iter_errors(normalized)] == []
    Argument("base", dict, gen_args()).check_value(normalized, strict=True)
