"""The runs of rule_files.tar.xz: checkpoints with and without Magma, of one and two ranks, which later versions continue.

Revision 8046313 wrote them (torch 2.13, one thread, 2026-11-23), in which Magma was not yet a rule of its own. The
runs of two ranks wrote directories at half of their steps, which are no longer read; these were taken out of the
archive.
"""

from __future__ import annotations

from pathlib import Path

ARCHIVE = Path(__file__).parent / "rule_files.tar.xz"
HALF, STEPS = 3, 6
# What each run adds to the input; the last two take two ranks.
RUNS: dict[str, tuple[int, dict[str, object], dict[str, object]]] = {
    "magma": (1, {}, {"enable_ema": True, "ema_decay": 0.9}),
    "no_magma": (1, {"magma_muon": False}, {}),
    "offload": (1, {"offload": True}, {}),
    "zero_1": (2, {}, {"zero_stage": 1}),
    "zero_2": (2, {}, {"zero_stage": 2}),
}


def content(name: str, steps: int = STEPS) -> dict[str, object]:
    """Return the input of a run; its data are the folder `train` beside the folder of the run."""
    from test_train_parallel import content as common

    world, optimizer, training = RUNS[name]
    given = common(ARCHIVE.parent, world)
    training_data = {
        **given["training"]["training_data"],
        "systems": ["../train"],
        "batch_size": 2 // world,
    }
    kept = {key: given["training"][key] for key in ("numb_steps", "seed", "disp_freq", "save_freq")}
    given["optimizer"] |= optimizer
    given["training"] = {**kept, **training, "training_data": training_data, "numb_steps": steps}
    return given
