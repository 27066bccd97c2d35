"""An input of `dp explore` that takes seconds."""

#: Keys of an input of `dp explore` that takes seconds.
QUICK = {
    "input": "input.json",
    "models": "model.ckpt.pt",
    "rounds": 2,
    "dynamics": {
        "temperatures": [600, 1500],
        "copies": 2,
        "time": 0.05,
        "time_step": 2,
        "strains": [0.0, -0.04],
    },
    "selection": {"frames": 6, "per_copy": 2, "closest": 0.85},
    "labels": {"calculator": "ase.calculators.emt:EMT"},
    "check": {"time": 0.04, "copies": 2, "temperature": 600, "enough": "never"},
}
