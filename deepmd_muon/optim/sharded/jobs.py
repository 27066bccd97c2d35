"""The jobs of one rank in one bucket, and the stacks of matrices that it owns.

Each rank picks its jobs from those of a domain, without communication. A rank takes part in a job
as its owner, as a source, as a destination, or as several of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from deepmd_muon.optim.sharded.layout import RankSet
from deepmd_muon.optim.sharded.plan import Domain, Job, Plan

_FULL_PRECISION = {4: torch.float32, 8: torch.float64}  # by bytes of an element


@dataclasses.dataclass(frozen=True)
class RankJobs:
    """The jobs of one bucket, or portion, in which a rank takes part.

    Attributes
    ----------
    plan, domain, rank
        The plan, the domain of the jobs, and the rank.
    bucket
        Number of the bucket in its domain; None for a portion.
    jobs
        In the global order of `Domain.jobs`. A *job number* is a position in this tuple.
    """

    plan: Plan
    domain: Domain
    bucket: int | None
    jobs: tuple[Job, ...]
    rank: int

    @property
    def peers(self) -> RankSet:
        """The ranks at the other end of its messages, ascending, itself included.

        In a portion the rank has messages to itself only.
        """
        return (self.rank,) if self.bucket is None else self.domain.ranks

    @property
    def full_dtype(self) -> torch.dtype:
        """Element type of directions, matrices and updates outside messages."""
        return _FULL_PRECISION[self.domain.itemsize]


def travelling_jobs(plan: Plan, domain: Domain, rank: int) -> list[RankJobs]:
    """Return a rank's jobs of every bucket of its domain.

    A bucket without jobs is among them: the rank joins its collectives all the same.
    """
    jobs_of_bucket: list[list[Job]] = [[] for _ in range(domain.n_buckets)]
    for job in domain.jobs:
        takes_part = rank == job.owner or rank in job.sources or rank in job.destinations
        if job.bucket is not None and takes_part:
            jobs_of_bucket[job.bucket].append(job)
    return [
        RankJobs(plan, domain, number, tuple(jobs), rank)
        for number, jobs in enumerate(jobs_of_bucket)
    ]


def staying_jobs(plan: Plan, domain: Domain, rank: int) -> list[RankJobs]:
    """Return the jobs that stay on a rank, in portions of at most `bucket_bytes`, or of one job."""
    portions: list[list[Job]] = []
    free_bytes = 0  # of the last portion
    for job in domain.jobs:
        if job.bucket is None and job.owner == rank:
            n_bytes = sum(job.sources.values()) * domain.itemsize
            # A job that is larger than a bucket is a portion by itself.
            if n_bytes > free_bytes or not portions:
                portions.append([])
                free_bytes = plan.settings.bucket_bytes
            portions[-1].append(job)
            free_bytes -= n_bytes
    return [RankJobs(plan, domain, None, tuple(portion), rank) for portion in portions]


class Stack(NamedTuple):
    """Matrices of one parameter group and shape that a rank orthogonalizes together."""

    group: int  # number of the parameter group
    shape: tuple[int, int]  # rows and columns of one matrix
    job_numbers: list[int]  # of the jobs, one per matrix

    @property
    def elements(self) -> int:
        """Number of elements of all matrices."""
        rows, columns = self.shape
        return len(self.job_numbers) * rows * columns


def stacks_of(rank_jobs: RankJobs, group_numbers: Mapping[int, int]) -> list[Stack]:
    """Return the stacks of all matrices that a rank owns in these jobs.

    `group_numbers` has the parameter group of each parameter, by position in the plan.
    """
    stacks: dict[tuple[int, tuple[int, int]], Stack] = {}
    for job_number, job in enumerate(rank_jobs.jobs):
        if job.owner == rank_jobs.rank:
            group = group_numbers[job.parameter]
            shapes = rank_jobs.plan.parameters[job.parameter].view.block_shapes
            shape = shapes[job.block % len(shapes)]  # the parts of all matrices are alike
            stack = stacks.setdefault((group, shape), Stack(group, shape, []))
            stack.job_numbers.append(job_number)
    return list(stacks.values())


class MatrixPlace(NamedTuple):
    """Where a rank has a matrix that it owns."""

    stack: int  # number of the stack
    index_in_stack: int
    number: int  # of the matrix among those of all stacks, counted stack by stack


def matrix_places(stacks: Sequence[Stack]) -> dict[int, MatrixPlace]:
    """Return the places of owned matrices by job number, in the order of `MatrixPlace.number`."""
    places: dict[int, MatrixPlace] = {}
    for stack_number, stack in enumerate(stacks):
        for index_in_stack, job_number in enumerate(stack.job_numbers):
            places[job_number] = MatrixPlace(stack_number, index_in_stack, number=len(places))
    return places
