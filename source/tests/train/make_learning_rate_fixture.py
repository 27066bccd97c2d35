"""Write learning_rate_fixture.json: rates of deepmd-kit's own schedule classes at chosen steps.

Run with a Python that has deepmd-kit 3.2.0: `python make_learning_rate_fixture.py`.
"""

import json
from pathlib import Path

EXP = {"type": "exp", "start_lr": 1e-3}
WSD = {"type": "wsd", "start_lr": 1e-3}
DOUBLE = {"start_lr": 2e-3}
LINEAR = {"decay_phase_ratio": 1.0, "decay_type": "linear"}
LONG_WARMUP = {"warmup_steps": 1000, "warmup_start_factor": 0.01}
# (num_steps, section as in input.json)
CASES = [
    (1000000, {**EXP, "stop_lr": 3.51e-8, "decay_steps": 5000}),
    (3000, {**EXP, "stop_lr": 1e-6, "decay_steps": 5000}),
    (150, {**EXP, "stop_lr": 1e-6, "decay_steps": 5000}),
    (20000, {**EXP, **DOUBLE, "stop_lr_ratio": 1e-3, "decay_steps": 700, "smooth": True}),
    (20000, {**EXP, **DOUBLE, "stop_lr": 1e-5, "decay_steps": 1000, "decay_rate": 0.5}),
    (5000, {**EXP, "stop_lr": 1e-6, "warmup_steps": 300, "warmup_start_factor": 0.1}),
    (5000, {**EXP, "stop_lr": 0.0, "decay_steps": 50, "warmup_ratio": 0.05}),
    (5000, {"type": "cosine", "start_lr": 1e-3, "stop_lr": 1e-6}),
    (5000, {"type": "cosine", "start_lr": 1e-3, "stop_lr_ratio": 0.01, "warmup_ratio": 0.1}),
    (5000, {**WSD, "stop_lr": 1e-6}),
    (5000, {**WSD, "stop_lr": 1e-5, "decay_phase_ratio": 0.3, "decay_type": "cosine"}),
    (5000, {**WSD, "stop_lr_ratio": 1e-2, **LINEAR, **LONG_WARMUP}),
]


def steps_of(num_steps: int) -> list[int]:
    """Return early, middle, last and later steps of a run."""
    fractions = (0.02, 0.0601, 0.2, 0.5, 0.7, 0.81, 0.95, 0.999)
    middle = {int(fraction * num_steps) for fraction in fractions}
    return sorted({0, 1, 99, 100, *middle, num_steps - 1, num_steps, num_steps + 10})


def main() -> None:
    """Compute the table with deepmd-kit and write it beside this file."""
    from deepmd.dpmodel.utils.learning_rate import BaseLR

    table = []
    for num_steps, section in CASES:
        schedule = BaseLR(**section, num_steps=num_steps)
        rates = {str(step): schedule.value(step) for step in steps_of(num_steps)}
        table.append({"num_steps": num_steps, "section": section, "rates": rates})
    path = Path(__file__).with_name("learning_rate_fixture.json")
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
