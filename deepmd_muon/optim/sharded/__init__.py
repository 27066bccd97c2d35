"""HybridMuon's step on several ranks.

A plan says which rank orthogonalizes which matrix; a pipeline executes it.

Files, in reading order
-----------------------
    layout, owners, plan             which rank holds, and which rank owns, what
    jobs, pieces, messages           a rank's jobs in one bucket, their pieces, their messages
    transport                        the collectives that send these messages
    rule_state, owned_matrices       the state of rules in messages; an owner's matrices
    bucket, missing_gradients        all of these for one bucket; gradients on other ranks only
    rule_statistics                  sums over pieces, for rules that measure whole blocks
    pipeline                         the order of all buckets
    repeated, elements               the other parts of a step: repeated work, the Adam routes
    process_groups, agreement        what ranks compare before and in a step
    step_parts, step                 the whole step
    params, zero                     DTensors and state in parts; torch's Adam with such state

Glossary
--------
block
    One matrix of a parameter: the parameter itself, one expert of a batched weight, one part of a
    fused weight.
direction
    What is sent to be orthogonalized: the momentum, or Nesterov's combination of momentum and
    gradient. If a rule replaces the momentum, the direction is the gradient.
piece
    The part of a block that one rank holds. A block's pieces make up the whole matrix.
owner
    The rank that orthogonalizes a block.
holder
    A rank that has a piece of a block's momentum (a *source*), or updates a piece of its elements
    (a *destination*). A destination may have only rules' state of the block; its piece is empty.
replica
    One complete copy of a parameter, on one rank or several.
job
    What moves for one block. It names the owner, and the sources and destinations with their
    numbers of elements.
spread, repeat
    Replicas may spread the blocks among them: a block has one job. Or they repeat the work: each
    replica has a job for every block.
domain
    Parameters on the same ranks with updates of the same element size (4 or 8 bytes). Each domain
    has its own exchanges.
leg
    "gather": pieces of directions go to owners. "return": pieces of updates go to holders. The two
    other gathers are named in full: of momenta before a step (`RepeatedMuon`), and of parts that
    ranks have stepped (`GatheredParts`).
bucket
    The jobs that one exchange carries. It travels (`Pipeline.travelling`).
exchange
    The two collectives of one bucket: an all-to-all for each leg. A leg without a message between
    two different ranks takes none.
portion
    A bucket of jobs with all pieces on one rank. It stays (`Pipeline.staying`): there is no
    collective. In code both are of class `Bucket`.
score, line
    State of rules: a score is one number for a block. A line is a row or column of a block, where a
    rule keeps values for each of them.
stack
    Blocks of a bucket that their owner orthogonalizes together: one shape, one parameter group. In
    a stack, and in the messages of its blocks, a block is called a *matrix*.
header, plane
    A message has a header for each piece: whether there is a gradient, the scores and the sums of
    rules. Lines follow, and then the elements of each piece, plane by plane. The first plane has
    directions or updates. In the gather, each input that rules request (gradients, weights) is one
    more plane.
group
    A parameter group of the optimizer. In the tuples and dataclasses of this package, a field
    `group` is its number; a variable `group` may be the `Group` itself. Ranks form a process group,
    or `RankGroup`. Momenta of one parameter group and dtype form a `MomentumBatch`.
position in the plan
    The index of a parameter in `Plan.parameters`. Jobs and pieces call it `parameter`, loops `i`.
slot
    The two buffers of one bucket on its way: one as a holder, one as an owner.
sums, statistics
    What rules such as Magma measure on whole blocks. Each holder sends the sums over its piece; the
    owner combines the sums of a block into one statistic.
"""

from deepmd_muon.optim.config import ShardedSettings
from deepmd_muon.optim.sharded.layout import Layout, ShardPlacement
from deepmd_muon.optim.sharded.plan import Plan, PlannedParameter, make_plan, plan_from_routes

__all__ = [
    "Layout",
    "Plan",
    "PlannedParameter",
    "ShardPlacement",
    "ShardedSettings",
    "make_plan",
    "plan_from_routes",
]
