"""What a rank can say of the others when they do not answer."""

from __future__ import annotations

import datetime
import os
import queue
import re
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from deepmd_muon.train.ranks import processes, watchdog
from deepmd_muon.train.ranks.processes import identify, life_of
from deepmd_muon.train.ranks.watchdog import (
    SAVING,
    STEPPING,
    WAITING,
    LostRankError,
    Watch,
    is_lost_connection,
    reason,
)

LIMIT = 0.4
HANG = 300.0  # seconds; no slow machine takes as long
GLOO = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36260. This is typically caused"


def make_watch(store, rank, size, give_up=lambda reason: None, errors_come=False):
    return Watch(store, rank, size, LIMIT, give_up, errors_come=errors_come)


def end_all(watches):
    """Close watches and wait for their threads, which would log into the next test."""
    for watch in watches:
        watch.close()
    for watch in watches:
        for thread in watch._threads:
            thread.join(HANG)


@pytest.fixture
def ranks():
    """A function that makes the watches of several ranks; all end with the test."""
    store = TCPStore("127.0.0.1", 0, 1, True)
    made = []

    def make(size, **options):
        made.extend(
            make_watch(store, rank, size, **(options if rank == 0 else {})) for rank in range(size)
        )
        return made

    yield make
    end_all(made)


def is_stuck(watch):
    watch.doing("reading its batch", 2)


def is_dead(watch):
    watch.close()


def has_stopped(watch):
    watch.stopped(MemoryError("had enough"))


# What rank 2 does, and how rank 0 names it.
VERDICTS = [
    (is_stuck, r"at step 2: rank 2 \(.*\) has been reading its batch \(step 2\) for 0 s"),
    (is_dead, r"at step 2: rank 2 \(.*\) is dead or stopped: .*last seen in its step \(step 2\)"),
    (has_stopped, r"at step 2: rank 2 \(.*\) stopped with MemoryError: had enough"),
]


@pytest.mark.parametrize(("act", "verdict"), VERDICTS)
def test_the_rank_that_is_to_blame_is_named_with_what_it_does(ranks, act, verdict):
    first, second, third = ranks(3)
    for watch in (first, second, third):
        watch.doing(STEPPING, 2)
    time.sleep(0.1)
    act(third)
    time.sleep(0.1)
    assert re.fullmatch(f"rank 0 has lost the others {verdict}", first.verdict())
    # A rank that has given up is not to blame.
    assert "rank 0" not in second.verdict()


def test_all_are_listed_when_none_is_to_blame(ranks):
    watches = ranks(3)
    for watch in watches:
        watch.doing(STEPPING, 4)
    time.sleep(0.1)
    assert watches[0].verdict().count("has been in its step (step 4)") == 2


def test_a_barrier_waits_for_ranks_that_live(ranks):
    """Longer than the limit, as long as notes are renewed; nobody leaves before all have come."""
    watches = ranks(3)
    left = []

    def arrive(watch, after):
        time.sleep(after)
        watch.barrier()
        left.append(time.monotonic())

    for late in (0, 2, 1):
        left.clear()
        start = time.monotonic()
        threads = [
            threading.Thread(target=arrive, args=(watch, 2 * LIMIT if rank == late else 0.0))
            for rank, watch in enumerate(watches)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert len(left) == 3
        assert min(left) - start >= 2 * LIMIT
        assert max(left) - start < HANG


def test_a_barrier_ends_when_a_rank_dies(ranks):
    first, second, third = ranks(3)
    third.close()
    found = queue.SimpleQueue()

    def arrive():
        try:
            second.barrier()
        except LostRankError as error:
            found.put(error)

    thread = threading.Thread(target=arrive)
    thread.start()
    start = time.monotonic()
    with pytest.raises(LostRankError) as lost:
        first.barrier()
    assert LIMIT < time.monotonic() - start < HANG
    assert is_lost_connection(lost.value)
    assert "rank 2 (process" in first.verdict()
    # Rank 1 looks at rank 0, which has given up.
    assert str(found.get(timeout=HANG)) == "rank 0 has ended"
    thread.join()


def test_work_for_others_that_have_died_is_given_up(ranks):
    found = queue.SimpleQueue()
    first, _, third = ranks(3, give_up=found.put, errors_come=True)
    with first.guarding():
        time.sleep(2 * LIMIT)
        assert found.empty()
        third.close()
        start = time.monotonic()
        assert "rank 2 (process" in found.get(timeout=HANG)
        assert time.monotonic() - start > LIMIT / 2


def test_a_store_that_does_not_answer_is_no_trap(ranks, monkeypatch):
    """Rank 0, which keeps the store, is stopped."""
    _, second = ranks(2)
    second.doing("counting neighbours")
    stuck = threading.Event()

    def check(*note):
        stuck.wait(HANG)
        raise RuntimeError("the store has gone")

    monkeypatch.setattr(second, "_store", SimpleNamespace(set=check, check=check))
    start = time.monotonic()
    with pytest.raises(LostRankError):
        second.barrier()
    found = second.verdict()
    stuck.set()
    assert time.monotonic() - start < HANG
    # The thread of rank 1 may have read a note of rank 0 before the store fell silent.
    place, seen = r"( \(process \d+ on .+\))?", "(, last seen starting)?"
    wanted = f"rank 1 has lost the others: rank 0{place}, through which they reach each other, is dead or stopped{seen}"
    assert re.fullmatch(wanted, found), found


@pytest.fixture
def follower():
    """A function that makes the watch of rank 1, and one that ends rank 0 with the store."""
    kept = [TCPStore("127.0.0.1", 0, 1, True)]
    made = [make_watch(kept[0], 0, 2)]

    def make(**options):
        store = TCPStore(
            "127.0.0.1", kept[0].port, 1, False, timeout=datetime.timedelta(seconds=60)
        )
        made.append(make_watch(store, 1, 2, **options))
        return made[-1]

    def end(error=None):
        made[0].doing(STEPPING, 4)
        time.sleep(LIMIT)  # a few intervals
        if error is not None:
            made[0].stopped(error)
        made.pop(0).close()
        kept.clear()

    yield make, end
    end_all(made)


def test_rank_0_that_dies_with_the_store_is_given_up(follower):
    """Where waiting does not end by itself; a note cannot be written either then."""
    make, end = follower
    found = queue.SimpleQueue()
    second = make(give_up=found.put)
    second.doing(STEPPING, 4)
    end()
    assert not second._refresh()
    start = time.monotonic()
    with second.waiting():
        story = found.get(timeout=HANG)
    assert LIMIT < time.monotonic() - start < HANG
    assert story.startswith("rank 1 has lost the others at step 4: rank 0 (process ")
    assert story.endswith(
        "through which they reach each other, is dead or stopped, last seen in its step (step 4)"
    )


@pytest.fixture
def child():
    """A process that can stand for a rank."""
    process = subprocess.Popen(["sleep", str(HANG)])
    yield process
    process.kill()
    process.wait()


def patient(ranks, process, **options):
    """Return three watches that would wait for long; the last one's process is another."""
    watches = ranks(3, **options)
    for watch in watches:
        watch._limit = HANG
    watches[2]._process = identify(process.pid)
    watches[2].doing(STEPPING, 7)
    watches[2]._refresh()
    watches[0]._refresh()
    return watches


def test_an_ended_process_is_told_from_one_that_runs(child):
    identity = identify(child.pid)
    assert life_of(identity) == "alive"
    assert life_of("") == life_of("another-boot/pid:[1] 1 1") == "unknown"
    machine, pid, start = identity.split()
    assert life_of(f"{machine} {pid} {int(start) + 1}") == "ended"  # its number is used again
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended; nobody asked for it
    assert life_of(identity) == "ended"
    child.wait()
    assert life_of(identity) == "ended"


def test_a_process_with_half_a_character_in_its_name_is_known(child):
    """Linux cuts names after 15 bytes."""
    own_name = Path(f"/proc/{os.getpid()}/comm")
    former = own_name.read_bytes()
    own_name.write_bytes("dp-Moleküle-Übung".encode()[:14])
    try:
        assert life_of(identify(os.getpid())) == "alive"
    finally:
        own_name.write_bytes(former.strip())


def test_a_process_of_a_machine_is_not_judged_by_one_without_a_name(child, monkeypatch):
    """For example where a container hides /proc/sys."""
    ended = identify(child.pid).rpartition(" ")[0] + " 1"
    assert life_of(ended) == "ended"

    def nameless():
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(processes, "_machine", nameless)
    assert life_of(ended) == "unknown"
    assert identify(child.pid) == ""


def test_a_container_with_the_proc_of_its_host_names_no_process(child, monkeypatch):
    """The numbers of its processes belong to others there."""
    processes._machine.cache_clear()
    monkeypatch.setattr(os, "getpid", lambda: child.pid)
    assert identify(child.pid) == ""


@pytest.mark.parametrize("phase", ["waiting", "guarding"])
def test_a_rank_whose_process_has_ended_is_not_waited_for(ranks, child, phase):
    """All others learn it, also those that do not look at that rank."""
    reasons = queue.SimpleQueue()
    first, second, third = patient(ranks, child, give_up=reasons.put)
    second._give_up = reasons.put
    with getattr(first, phase)(), second.waiting():
        time.sleep(LIMIT)
        assert reasons.empty()
        third.close()
        time.sleep(LIMIT)
        assert reasons.empty()  # no beats, but its process is there
        child.kill()
        both = sorted(reasons.get(timeout=60.0) for _ in range(2))
    place = rf"rank 2 \(process {os.getpid()} on .+\)"
    for rank, reason_of_end in enumerate(both):
        wanted = rf"rank {rank} has lost the others: {place} is dead: its process has ended, "
        assert re.fullmatch(wanted + r"last seen in its step \(step 7\)", reason_of_end)


def test_a_call_that_hangs_unmarked_is_ended_when_a_rank_has_died(ranks, child):
    """Not while it writes a checkpoint."""
    reasons = queue.SimpleQueue()
    first, _, third = patient(ranks, child, give_up=reasons.put)
    first._limit = 4 * LIMIT
    first.doing(SAVING)
    third.close()
    child.kill()
    time.sleep(3 * LIMIT)
    assert reasons.empty()
    first.doing(STEPPING, 8)
    start = time.monotonic()
    assert "rank 0 has lost the others at step 8: rank 2 (process " in reasons.get(timeout=60.0)
    assert time.monotonic() - start > LIMIT


def test_a_machine_that_vanishes_is_given_up_after_half_of_the_limit(ranks):
    reasons = queue.SimpleQueue()
    first, _, third = ranks(3, give_up=reasons.put)
    third._process = "another-boot/pid:[1] 1 1"
    third._refresh()
    first._limit = 8 * LIMIT
    with first.waiting():
        start = time.monotonic()
        third.close()
        assert "rank 2 (process " in reasons.get(timeout=60.0)
    assert 4 * LIMIT < time.monotonic() - start < 8 * LIMIT


@pytest.mark.parametrize("errors_come", [False, True])
def test_rank_0_that_stopped_with_an_error_is_named_with_it(follower, errors_come):
    """Its note goes with the store, so the others keep in mind what they have read."""
    make, end = follower
    found = queue.SimpleQueue()
    second = make(give_up=found.put, errors_come=errors_come)
    second.doing(STEPPING, 4)
    with second.waiting():
        end(MemoryError("had enough"))
        story = second.verdict() if errors_come else found.get(timeout=HANG)
    assert story.startswith("rank 1 has lost the others at step 4: rank 0 (process ")
    assert story.endswith(") stopped with MemoryError: had enough")


def test_a_wait_that_hangs_although_errors_come_ends_the_process(ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE", 2 * LIMIT)
    found = queue.SimpleQueue()
    first, second = ranks(2, give_up=found.put, errors_come=True)
    second.stopped(ValueError("no such file"))
    with first.waiting():
        time.sleep(1.5 * LIMIT)
        assert found.empty()  # the error that comes by itself is still awaited
        assert "stopped with ValueError: no such file" in found.get(timeout=HANG)


def lines_of_waiting(caplog, count):
    """Wait until so many lines say that a rank waits, and return them."""
    end = time.monotonic() + HANG
    while len(lines := [record for record in caplog.records if "waiting" in record.msg]) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return lines


def test_a_long_wait_is_logged_once_with_the_ranks_that_do_something_else(
    ranks, monkeypatch, caplog
):
    caplog.set_level("INFO", "deepmd_muon")
    monkeypatch.setattr(watchdog, "SILENCE", 0.2)
    first, second, third = ranks(3, errors_come=True)
    second.doing("reading its batch", 3)
    third.doing(WAITING, 3)
    while not all(note and note.step == 3 for note in map(first._notes.get, (1, 2))):
        time.sleep(0.01)
    monkeypatch.setattr(watchdog, "SILENCE", 2.0)
    with first.waiting(), first.waiting():
        lines_of_waiting(caplog, 1)
        time.sleep(1.0)
    with first.waiting():
        pass
    time.sleep(0.5)
    (line,) = lines_of_waiting(caplog, 1)
    assert line.levelname == "INFO"
    assert "rank 1 (process " in line.message
    assert "reading its batch (step 3)" in line.message
    assert "rank 2" not in line.message


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_waits_names_the_one_without_a_sign_of_life(ranks, monkeypatch, caplog, silent):
    """Rank 0 watches all others, and rank 1 watches rank 0."""
    made = ranks(3)
    watcher = made[1 - silent]
    made[silent].doing(STEPPING, 5)
    while (note := watcher._notes.get(silent)) is None or note.step != 5:
        time.sleep(0.01)
    made[silent].close()
    monkeypatch.setattr(watchdog, "SILENCE", 0.3)
    with watcher.waiting():
        (line,) = lines_of_waiting(caplog, 1)
    assert line.levelname == "WARNING"
    place = f"rank {silent} (process {os.getpid()} on {socket.gethostname()})"
    assert f"{place} is dead or stopped" in line.message
    assert "last seen in its step (step 5)" in line.message


def test_a_wait_that_is_too_long_ends_the_process(ranks):
    """Where waiting does not end by itself, the thread ends the process with the verdict."""
    found = queue.SimpleQueue()
    first, second = ranks(2, give_up=found.put)
    second.doing("reading its batch", 3)
    with first.waiting():
        time.sleep(LIMIT / 2)
    time.sleep(LIMIT)
    assert found.empty()
    start = time.monotonic()
    with first.waiting():
        assert "rank 1" in found.get(timeout=HANG)
    assert time.monotonic() - start > LIMIT


def test_an_error_elsewhere_ends_the_wait_at_once(ranks):
    found = queue.SimpleQueue()
    first, second = ranks(2, give_up=found.put)
    second.stopped(ValueError("no such file"))
    with first.waiting():
        start = time.monotonic()
        assert "stopped with ValueError: no such file" in found.get(timeout=HANG)
    assert time.monotonic() - start < HANG


def test_errors_of_the_exchange_are_told_from_others():
    lost = RuntimeError(GLOO)
    assert is_lost_connection(lost)
    assert reason(lost) == "Connection closed by peer [127.0.0.1]:36260"
    outer = ValueError("the file is incomplete")
    assert not is_lost_connection(outer)
    outer.__cause__ = lost
    assert is_lost_connection(outer)
    assert is_lost_connection(RuntimeError("Application timeout caused pair closure"))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
