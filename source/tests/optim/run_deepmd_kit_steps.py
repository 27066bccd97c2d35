"""Run under deepmd-kit's Python: take steps with its HybridMuon on given gradients, save weights and state.

Usage: python run_deepmd_kit_steps.py job.pt result.pt
"""

import sys

import torch
from deepmd.pt.optimizer import HybridMuonOptimizer


def main(job_file: str, result_file: str) -> None:
    """Read names, weights, gradients per step and settings; write weights after each step and the state dict."""
    job = torch.load(job_file)
    results = []
    for case in job["cases"]:
        params = {name: torch.nn.Parameter(w.clone()) for name, w in job["weights"].items()}
        optimizer = HybridMuonOptimizer(params.values(), named_parameters=params.items(), **case)
        after = []
        for gradients in job["gradients"]:
            for name, p in params.items():
                p.grad = gradients[name].clone()
            optimizer.step()
            after.append({name: p.detach().clone() for name, p in params.items()})
        results.append({"weights": after, "optimizer": optimizer.state_dict()})
    torch.save(results, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
