"""Who this process is, from what torchrun and srun set."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks import ranks, rendezvous
from deepmd_muon.train.ranks.launch import Place, find_place, first_node

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-09],x1",
}


def test_torchrun():
    assert find_place(TORCHRUN) == Place(3, 1, 4, "a", 1)
    agent = find_place({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent == Place(3, 1, 4, "a", 1, agent=True)
    assert [Place(0, 0, 2, "a", 1, agent=kept).hosts for kept in (False, True)] == [True, False]
    assert find_place({**SRUN, **TORCHRUN, "WORLD_SIZE": "8"}) == Place(3, 1, 8, "a", 1)


def test_srun_finds_the_first_node_and_a_port_of_the_job():
    assert find_place(SRUN) == Place(3, 1, 4, "gpu07", 15000 + (123456 + 202) % 15000, srun=True)
    assert find_place({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "77"}) == Place(
        3, 1, 4, "head", 77, srun=True
    )
    other_step = find_place({**SRUN, "SLURM_STEP_ID": "3"})
    assert other_step.meeting != find_place(SRUN).meeting


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", **{k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}},
        {**SRUN, "SLURM_NTASKS": "1"},
        # A batch script that starts the command without srun: one process, whatever the job has tasks for.
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"},
        # A shell that salloc opened.
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "5"},
    ],
)
def test_a_process_that_is_alone(environment):
    assert find_place(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "2 processes, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set",
        ),
        ({**TORCHRUN, "RANK": "one"}, "RANK must be a whole number; found 'one'"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 is not one of 4 processes, which are 0 to 3"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT must be from 1 to 65535; found 65536"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            "SLURM_LOCALID is not set; start with srun or torchrun",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            "set MASTER_ADDR to the name",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "a"},
            "set MASTER_PORT to a free port",
        ),
    ],
)
def test_what_is_missing_is_named(environment, message):
    with pytest.raises(TrainingError, match=message):
        find_place(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[007-012,020],login1", "node007"),
        ("r[3,5]n1", "r3n1"),
        ("gpu-a[01]", "gpu-a01"),
    ],
)
def test_first_node(nodes, first):
    assert first_node(nodes) == first


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import signal, sys, time
from deepmd_muon.train.ranks.launch import end_with_parent
signal.signal(signal.SIGTERM, lambda *_: (open("ended", "w").close(), sys.exit()))
end_with_parent()
print("begun", flush=True)
time.sleep(600)
"""


def test_a_process_whose_parent_is_killed_gets_sigterm(tmp_path):
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        parent.kill()
    end = time.monotonic() + 60.0
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def become_one_of_two(monkeypatch, rank):
    """Set what torchrun would tell this process, where the other one never comes."""
    port = free_port()
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in {**place, "DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_that_do_not_come_are_missed(monkeypatch, rank):
    become_one_of_two(monkeypatch, rank)
    monkeypatch.setattr(ranks, "Rendezvous", lambda place: rendezvous.Rendezvous(place, 1.0))
    message = {
        "0": r"rank 1 has not come to 127.0.0.1:\d+ .* within 1 s",
        "1": "rank 1 does not reach 127.0.0.1:.*refused",
    }
    with pytest.raises(TrainingError, match=message[rank]), ranks.joined():
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_says_so(monkeypatch, caplog, rank):
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.2)
    port = free_port()
    place = Place(rank, rank, 3, "127.0.0.1", port)
    with contextlib.suppress(TrainingError):
        rendezvous.Rendezvous(place, 1.0).report()
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    words = {0: "rank 0 waits for rank 1, 2 at", 1: "rank 1 waits for rank 0 at"}
    assert said.message.startswith(words[rank])


def test_the_lowest_rank_that_has_come_says_who_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.2)
    port = free_port()
    meetings = [
        rendezvous.Rendezvous(Place(rank, rank, 3, "127.0.0.1", port), 2.0) for rank in range(2)
    ]

    def report(meeting):
        with contextlib.suppress(TrainingError):
            meeting.report()

    threads = [threading.Thread(target=report, args=(meeting,)) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.message.startswith("rank 0 waits for rank 2 at")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host_ends_every_rank_at_once(monkeypatch, rank):
    """torch would look for it in a thread, which aborts the process if that ends meanwhile."""

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.2)
    monkeypatch.setattr(rendezvous.dist, "TCPStore", None)  # is not reached
    with pytest.raises(TrainingError, match="MASTER_ADDR must name the machine of rank 0"):
        rendezvous.Rendezvous(Place(rank, rank, 2, "no.such.host.invalid", free_port()), 1e9)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_who_hears_nothing_of_the_others_tells_what_is_wrong(monkeypatch, rank):
    become_one_of_two(monkeypatch, rank)
    monkeypatch.setattr(ranks, "ANSWER", 1.0)
    begin = time.monotonic()
    with ranks.prints_error("wrong") as mine:
        waited = time.monotonic() - begin
    assert mine
    assert (waited > 0.5) == (rank == "1")
    monkeypatch.delenv("RANK")  # nor does who does not know who it is
    with ranks.prints_error("wrong") as mine:
        assert mine


def test_rank_0_keeps_the_store_until_the_others_have_asked_all():
    places = [Place(rank, rank, 2, "127.0.0.1", free_port()) for rank in range(2)]
    places[1] = dataclasses.replace(places[1], port=places[0].port)
    keeper, other = (rendezvous.Rendezvous(place, 60.0) for place in places)
    assert other.report("wrong") == {
        1: "wrong"
    }  # it comes first and does not know yet what rank 0 will say
    assert keeper.report("wrong too") == {0: "wrong too", 1: "wrong"}
    ending = threading.Thread(target=keeper.leave, args=(60.0,))
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()
    assert other.problem_of(0, 60.0) == "wrong too"
    other.leave(60.0)
    ending.join(60.0)
    assert not ending.is_alive()


def listen(answer):
    """Return the port of a program that is not ours; `answer` takes each connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                answer(server.accept()[0])

    threading.Thread(target=serve, daemon=True).start()
    return server


def answer_http(connection):
    with connection:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("answer", [socket.socket.close, answer_http])
def test_another_program_at_the_port_is_an_error_of_every_rank(monkeypatch, answer):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.4)
    with listen(answer) as server:
        port = server.getsockname()[1]
        for rank in range(2):
            with pytest.raises(TrainingError, match="choose another MASTER_PORT"):
                rendezvous.Rendezvous(Place(rank, rank, 2, "127.0.0.1", port))


@pytest.mark.slow
def test_a_connection_that_takes_six_seconds_is_made(monkeypatch):
    """As where the resolver loses torch's question for a name, and asks again after five seconds."""
    monkeypatch.setattr(rendezvous, "_await_address", lambda *_: None)
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = server.getsockname()
    waiting = [socket.socket() for _ in range(4)]  # fill the queue of the server
    for each in waiting:
        each.setblocking(False)
        each.connect_ex(address)

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

    def accept():
        time.sleep(6.0)
        with contextlib.suppress(OSError):
            while True:
                ends = (server.accept()[0], socket.create_connection(("127.0.0.1", keeper.port)))
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with server:
        met = rendezvous.Rendezvous(Place(1, 1, 2, "127.0.0.1", address[1]))
        assert met.report("late") == {1: "late"}


def test_a_second_process_with_the_rank_of_another_is_refused():
    port = free_port()
    first, second, third = (
        rendezvous.Rendezvous(Place(rank, rank, 2, "127.0.0.1", port)) for rank in (0, 1, 1)
    )
    assert second.report("no data") == {1: "no data"}
    with pytest.raises(TrainingError, match="another process is rank 1 at"):
        third.report()
    assert first.report() == {1: "no data"}


def test_a_problem_reaches_all_before_all_have_come():
    port = free_port()
    first, second = (
        rendezvous.Rendezvous(Place(rank, rank, 3, "127.0.0.1", port)) for rank in (0, 1)
    )
    assert second.report("no data") == {1: "no data"}
    assert first.report() == {1: "no data"}
    assert (
        rendezvous.describe({1: "a", 0: "b", 2: "a"})
        == "rank 0 cannot begin: b; rank 1, 2 cannot begin: a"
    )


def test_a_rank_without_its_gpu_ends_the_others(monkeypatch):
    port = free_port()
    monkeypatch.setattr(ranks, "find_place", lambda: Place(0, 0, 2, "127.0.0.1", port))
    other = []

    def begin():
        met = rendezvous.Rendezvous(Place(1, 1, 2, "127.0.0.1", port))
        other.append(met.report("finds 1 GPUs"))
        met.leave(60.0)

    thread = threading.Thread(target=begin)
    thread.start()
    with pytest.raises(TrainingError, match="rank 1 cannot begin: finds 1 GPUs"), ranks.joined():
        pass
    thread.join()
    assert other == [{1: "finds 1 GPUs"}]


def test_the_last_exchange_of_ranks_outlives_the_run(monkeypatch):
    """A thread of gloo that were the last to hold it when the interpreter ends would abort the process."""
    port = free_port()
    exchange, made = dist.all_reduce, []

    def all_reduce(*args, **options):
        made.append(exchange(*args, **options))
        return made[-1]

    monkeypatch.setattr(ranks, "find_place", lambda: Place(0, 0, 1, "127.0.0.1", port))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with ranks.joined(5.0):
        pass
    assert made[-1] is not None
    assert made[-1] is ranks._last_exchanges[-1]
    assert not dist.is_initialized()
