"""The rule for complex operators of SO(2) layers: its polar factor, and turned frames."""

import pytest
import torch
from so2_operators import ComplexOperators

from deepmd_muon.optim import HybridMuon, register_rule

INPUTS, OUTPUTS, FOCI = 12, 10, 2
SHAPE = (INPUTS, 2 * OUTPUTS * FOCI)


def random_unitary(size, generator):
    """Return a random unitary matrix."""
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.complex128, generator=generator)).Q


def as_complex(stored):
    """Return U + iV (foci, in, out) of [U | V] of each focus."""
    u, v = stored.view(INPUTS, FOCI, 2, OUTPUTS).permute(2, 1, 0, 3)
    return torch.complex(u, v)


def as_stored(operators):
    """Return the stored matrix of operators (foci, in, out)."""
    pairs = torch.stack([operators.real, operators.imag])  # (2, foci, in, out)
    return pairs.permute(2, 1, 0, 3).reshape(SHAPE)


def updates(gradients, rules):
    """Return the updates of some steps."""
    register_rule(ComplexOperators((SHAPE,), FOCI))
    weight = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    optimizer = HybridMuon(
        [("weight", weight)],
        lr=0.1,
        weight_decay=0.0,
        rules=rules,
        precision="float64",
        muon_mode="slice",
    )
    results = []
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.step()
        results.append(weight.detach() - before)
    return results


@pytest.mark.parametrize(
    ("rules", "turns_along"), [(["complex_operators"], True), ([], False)], ids=["rule", "slice"]
)
def test_update_turns_with_the_frames_of_edges(rules, turns_along):
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, *SHAPE, dtype=torch.float64, generator=generator)
    phases = torch.polar(
        torch.ones(INPUTS, dtype=torch.float64),
        6.28 * torch.rand(INPUTS, dtype=torch.float64, generator=generator),
    )
    right = random_unitary(OUTPUTS, generator)

    def turned(stored):
        return as_stored(phases[:, None] * as_complex(stored) @ right)

    plain = updates(gradients, rules)
    after_turn = updates([turned(gradient) for gradient in gradients], rules)
    gap = max(
        float((turned(a) - b).norm() / b.norm()) for a, b in zip(plain, after_turn, strict=True)
    )
    assert (gap < 1e-12) == turns_along, gap


def test_update_is_the_polar_factor_of_each_operator():
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    update = as_complex(updates([gradient], ["complex_operators"])[0])
    left, _, right = torch.linalg.svd(as_complex(gradient), full_matrices=False)
    expected = left @ right
    scale = (update.norm() / expected.norm()).item()
    torch.testing.assert_close(-update / scale, expected, rtol=0, atol=2e-3)
