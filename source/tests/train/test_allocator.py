"""Memory that a training process keeps; each case in a process of its own, since it cannot be undone."""

import platform
import resource

import forked
import numpy as np
import pytest

from deepmd_muon.train.process.allocator import keep_freed_memory


def faults(connection, environment):
    """Send whether freed memory is kept, and the page faults of taking and freeing 40 MB ten times."""
    kept = keep_freed_memory(environment)
    np.empty(5_000_000).fill(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.empty(5_000_000).fill(1.0)
    connection.send((kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def measured(environment):
    receiver, sender = forked.context().Pipe(duplex=False)
    process = forked.context().Process(target=faults, args=(sender, environment))
    process.start()
    process.join()
    assert process.exitcode == 0
    return receiver.recv()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_taken_again():
    kept, few = measured({"HOME": "/"})
    left, many = measured({"MALLOC_ARENA_MAX": "2"})
    assert (kept, left) == (True, False)
    assert measured({"GLIBC_TUNABLES": ""})[0] is False
    assert few < 10 <= 190 < many
