"""Run commands of deepmd-kit one after another in one process: `python … JOBS.json RESULTS.json`.

A job is `{"folder": …, "words": [...]}` for the words after `dp --pt`, with `"losses": FILE` for the loss and its terms
in each training step, or `{"folder": …, "model": …, "given": …,
"out": …}` for predictions of a file for the structures of an npz file. RESULTS.json lists an empty text or the error
of each.
"""

import contextlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

# In TorchScript, a second model with `atom_ener` in a process fails.
os.environ["PYTORCH_JIT"] = "0"

import numpy as np
import torch
from deepmd.infer import DeepPot
from deepmd.main import main


def predict(model, given, out):
    """Write energy, force, virial that a model gives."""
    data = dict(np.load(given))
    found = DeepPot(model).eval(
        data["coord"],
        data["box"],
        data["atype"],
        fparam=data.get("fparam"),
        aparam=data.get("aparam"),
    )
    np.savez(out, energy=found[0], force=found[1], virial=found[2])


@contextlib.contextmanager
def recorded_losses(path):
    """Write a line for each loss that is differentiated."""
    if path is None:
        yield
        return
    from deepmd.pt.train.wrapper import ModelWrapper

    forward = ModelWrapper.forward

    def recording(self, *arguments, **options):
        prediction, loss, terms = forward(self, *arguments, **options)
        if torch.is_grad_enabled():
            record = {"loss": loss} | {
                name: x for name, x in terms.items() if name.startswith(("rmse", "mae"))
            }
            with Path(path).open("a") as file:
                print(json.dumps({name: float(x) for name, x in record.items()}), file=file)
        return prediction, loss, terms

    with mock.patch.object(ModelWrapper, "forward", recording):
        yield


results = []
for job in json.loads(Path(sys.argv[1]).read_text()):
    os.chdir(job["folder"])
    try:
        if "words" in job:
            with recorded_losses(job.get("losses")):
                main(["--pt", *job["words"], "-v", "3"])
        else:
            predict(job["model"], job["given"], job["out"])
        results.append("")
    except BaseException:
        results.append(traceback.format_exc())
    logging.getLogger("deepmd").handlers.clear()
Path(sys.argv[2]).write_text(json.dumps(results))
