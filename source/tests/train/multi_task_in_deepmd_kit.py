"""Train in deepmd-kit with a given order of tasks: `python … ORDER.json RECORD.json train INPUT …`.

RECORD.json becomes a list of the learning rate and each branch's errors of every step, with all digits.
"""

import json
import sys
from pathlib import Path

from deepmd.main import main
from deepmd.pt.train import training

order, recorded = iter(json.loads(Path(sys.argv[1]).read_text())), []


class Random:
    """In the place of deepmd-kit's random numbers, of which the trainer draws its tasks."""

    @staticmethod
    def choice(numbers, p):
        return next(order)


class Recorded(training.Trainer):
    def print_on_training(self, fout, step_id, cur_lr, train_results, valid_results):
        errors = {
            name: {key: float(x) for key, x in found.items()}
            for name, found in train_results.items()
        }
        recorded.append({"lr": cur_lr, **errors})


training.dp_random = Random
training.Trainer = Recorded
main(["--pt", *sys.argv[3:]])
Path(sys.argv[2]).write_text(json.dumps(recorded))
