"""The plan of which rank orthogonalizes which matrix, and of the messages.

A plan consists of plain values, and every rank makes its own, without communication. It has three
levels: a `Plan` has domains, a `Domain` has jobs, and a `Job` is what moves for one matrix. The
glossary of `optim.sharded` has the words.

    file         content
    `domain`     parameters, jobs and domains; the sizes of messages
    `plan`       the plan: what ranks compare, and its description
    `planner`    how a plan is made (`make_plan`)

Ranks 0 and 1 have the rows of four parameters (`Shard(0)`); `experts` is a batch of two matrices, a
bucket takes 200 bytes of matrices from each owner:

    parameter    shape        block    elements by rank    owner    bucket
    a            (8, 6)       0        {0: 24, 1: 24}      0        0
    b            (7, 6)       0        {0: 24, 1: 18}      1        0
    c            (4, 4)       0        {0: 8, 1: 8}        1        1
    experts      (2, 4, 4)    0        {0: 16}             0        stays
    experts      (2, 4, 4)    1        {1: 16}             1        stays

These are one domain with five jobs, the most expensive first: a has most work and goes to rank 0, b
to rank 1, which has less to do, and so does c. In bucket 0 the directions of 24 elements of a go
from rank 1 to rank 0 and of 24 of b from rank 0 to rank 1, and the updates return. A message there
has 104 bytes: a header of 8, and 24 elements of 4. c does not fit: 168 bytes of b and 64 of c are
more than 200. The experts do not move.
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
