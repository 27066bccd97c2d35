"""Every descriptor passes the conformance tests for descriptors of other packages."""

import pytest

from deepmd_muon.testing import DescriptorChecks

EDGES = {"e_sel": 60, "e_rcut": 4.0, "e_rcut_smth": 2.0}
ANGLES = {"a_sel": 40, "a_rcut": 3.0, "a_rcut_smth": 1.5}
SIZES = {"n_dim": 6, "e_dim": 4, "a_dim": 4, "nlayers": 2, "axis_neuron": 2}
REPFLOW = {**EDGES, **ANGLES, **SIZES, "smooth_edge_update": True, "update_residual": 1.0}
DYNAMIC = {**REPFLOW, "use_dynamic_sel": True, "e_sel": 600, "a_sel": 200}
RADIAL = {"rcut": 4.0, "rcut_smth": 2.0, "neuron": [4, 8], "axis_neuron": 2}
ATTENTION = {**RADIAL, "sel": 60, "attn": 6, "smooth_type_embedding": True}
DESCRIPTORS = {
    "se_e2_a": {"type": "se_e2_a", "sel": [40, 40], **RADIAL},
    "dpa1": {"type": "se_atten", **ATTENTION},
    "dpa1_temperature": {
        "type": "se_atten",
        **ATTENTION,
        "type_one_side": True,
        "temperature": 1.0,
    },
    "dpa1_v2": {"type": "se_atten_v2", **RADIAL, "sel": 60, "attn_layer": 0, "set_davg_zero": True},
    "dpa3": {"type": "dpa3", "repflow": REPFLOW},
    "dpa3_dynamic": {"type": "dpa3", "repflow": DYNAMIC},
}


class TestEveryDescriptor(DescriptorChecks):
    @pytest.fixture(autouse=True, params=DESCRIPTORS)
    def _part(self, request):
        self.descriptor = {**DESCRIPTORS[request.param], "seed": 1}
