"""With each setting of a model changed, its frozen and its compressed form give the model's results, or refuse it."""

import dataclasses

import pytest
from model_changes import DESCRIPTORS, is_single, model_with, settings_of

from deepmd_muon.deploy import compress as compressing
from deepmd_muon.deploy import program as programs
from deepmd_muon.deploy.compress import compress, evaluate
from deepmd_muon.deploy.freeze import difference_of, program_of
from deepmd_muon.deploy.program import Program, check_coverage
from deepmd_muon.deploy.structures import random_structures
from deepmd_muon.infer import Predictor
from deepmd_muon.model import ModelError
from deepmd_muon.model.descriptor.se_e2_a.scripted import ScriptedSeE2A
from deepmd_muon.model.descriptor.se_e2_a.tabulated import TabulatedSeE2A
from deepmd_muon.model.fitting.ener.scripted import ScriptedEnergyFitting
from deepmd_muon.model.registry import DESCRIPTORS as REGISTRY
from deepmd_muon.model.registry import FITTING_NETS
from deepmd_muon.setting import setting


def forms_of(model):
    """Return the program of a model, and the compressed one where its descriptor has tables."""
    yield program_of(model)
    settings = model.settings.descriptor
    table = REGISTRY.tabulated(settings)
    if table is not None and not getattr(settings, "attn_layer", 0):
        compressed = program_of(model)
        compressed.descriptor = table(compressed.descriptor, step=0.02, nearest=0.5)
        yield compressed


@pytest.mark.parametrize(
    "kind",
    [
        # Its form is DPA-1's.
        pytest.param(kind, marks=pytest.mark.slow) if kind == "DPA-1 v2" else kind
        for kind in DESCRIPTORS
    ],
)
def test_each_setting_is_in_the_program(kind):
    for name, settings in settings_of(kind).items():
        model = model_with(settings)
        reference = Predictor(model, device="cpu")
        structures = random_structures(model, points=3)[1:3]  # a crystal, and a cluster in a cell
        expected = [reference.predict(*structure) for structure in structures]
        # Tables are less exact where a derivative of the activation jumps, as that of silut does.
        for form, allowed in zip(forms_of(model), (1e-11, 1e-4), strict=False):
            found = [evaluate(form, structure) for structure in structures]
            difference = difference_of(expected, found)
            assert difference.relative < (1e-4 if is_single(settings) else allowed), name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Louder:
    """A section with a setting that no form knows."""

    volume: float = setting(1.0, doc="Factor of the energy.")


def with_volume(settings):
    """Return settings of a class that derives from theirs and has the setting `volume`, at 1 and at 2."""
    bases = (type(settings), Louder)
    derived = dataclasses.dataclass(frozen=True, kw_only=True)(type("Derived", bases, {}))
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return derived(**values), derived(**values, volume=2.0)


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_a_setting_that_no_form_knows_is_refused(kind):
    model = model_with(settings_of(kind)["nothing"])
    settings = model.settings
    forms = [
        (REGISTRY.scripted(settings.descriptor), settings.descriptor),
        (FITTING_NETS.scripted(settings.fitting_net), settings.fitting_net),
    ]
    if REGISTRY.tabulated(settings.descriptor) is not None:
        forms.append((REGISTRY.tabulated(settings.descriptor), settings.descriptor))
    for form, part in forms:
        plain, louder = with_volume(part)
        check_coverage("part", form.covers, plain)
        with pytest.raises(ModelError, match="volume"):
            check_coverage("part", form.covers, louder)


def test_program_and_tables_ask_every_part(monkeypatch, tmp_path):
    asked = []

    def note(what, covers, settings):
        asked.append((type(settings).__name__, covers))
        check_coverage(what, covers, settings)

    for module in (programs, compressing):
        monkeypatch.setattr(module, "check_coverage", note)
    model = model_with(settings_of("se_e2_a")["nothing"])
    Program(model, {})
    of_program = [
        ("ModelSettings", programs.COVERAGE),
        ("SeE2ASettings", ScriptedSeE2A.covers),
        ("EnerSettings", ScriptedEnergyFitting.covers),
    ]
    assert asked == of_program
    asked.clear()
    compress(model, tmp_path / "c.pth", min_distance=0.7)
    assert asked == [("SeE2ASettings", TabulatedSeE2A.covers), *of_program]
    model.settings = with_volume(model.settings)[1]
    with pytest.raises(ModelError, match="volume"):
        Program(model, {})


def test_the_comparison_sees_a_setting_that_a_form_ignores():
    model = model_with(settings_of("se_e2_a")["nothing"])
    program = program_of(model)
    program.descriptor.protection = 0.1
    structure = random_structures(model, points=3)[2]
    expected = Predictor(model, device="cpu").predict(*structure)
    assert difference_of([expected], [evaluate(program, structure)]).relative > 1e-4
