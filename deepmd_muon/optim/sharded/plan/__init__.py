"""The plan of which rank orthogonalizes which matrix, and of the messages.

A plan consists of plain values, and every rank makes its own, without communication. It has three
levels: a `Plan` has domains, a `Domain` has jobs, and a `Job` is what moves for one matrix. The
glossary of `optim.sharded` has the words.

    file         content
    `domain`     parameters, jobs and domains; the sizes of messages
    `plan`       the plan: what ranks compare, and its description
    `planner`    how a plan is made (`make_plan`)

For example, ranks 0 and 1 share the rows of four parameters (`Shard(0)`), and each owner takes 200
bytes of matrices into a bucket. `experts` is a batch of two matrices, one on each rank:

    parameter    shape        block    elements by rank    owner    bucket
    a            (8, 6)       0        {0: 24, 1: 24}      0        0
    b            (7, 6)       0        {0: 24, 1: 18}      1        0
    c            (4, 4)       0        {0: 8, 1: 8}        1        1
    experts      (2, 4, 4)    0        {0: 16}             0        stays
    experts      (2, 4, 4)    1        {1: 16}             1        stays

This is one domain with five jobs, in decreasing order of work. Rank 0 owns a. Rank 1 owns b, and c
as well, because it still has less work. In bucket 0, rank 1 sends its 4 rows of a to rank 0, and
rank 0 sends its 4 rows of b to rank 1; their updates go back. Each of these messages has 104 bytes:
a header of 8, and 24 elements of 4. c does not fit into bucket 0, because b takes 168 bytes of
rank 1 and c takes 64.
"""

from deepmd_muon.optim.sharded.plan.domain import (
    LEGS,
    WORD_BYTES,
    Domain,
    Job,
    Leg,
    MessageKey,
    PlannedParameter,
    RuleValues,
    newton_schulz_flops,
    rule_values,
)
from deepmd_muon.optim.sharded.plan.plan import Plan
from deepmd_muon.optim.sharded.plan.planner import make_plan, plan_from_routes, plan_of_one_process

__all__ = [
    "LEGS",
    "WORD_BYTES",
    "Domain",
    "Job",
    "Leg",
    "MessageKey",
    "Plan",
    "PlannedParameter",
    "RuleValues",
    "make_plan",
    "newton_schulz_flops",
    "plan_from_routes",
    "plan_of_one_process",
    "rule_values",
]
