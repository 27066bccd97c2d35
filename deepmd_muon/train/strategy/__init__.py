"""Ways of training: alone, replicated on several ranks (stages 0 and 1), or fully sharded over them (2 and 3).

The training loop knows one object, `Strategy`; which one decides who owns parameters, gradients and optimizer state.
"""

from deepmd_muon.train.strategy.base import Reduced, Strategy
from deepmd_muon.train.strategy.choose import choose_strategy

__all__ = ["Reduced", "Strategy", "choose_strategy"]
