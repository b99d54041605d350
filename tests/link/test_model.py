"""Random programs of sends and receives, on several ranks, against a pure model.

A program is one global order of events. Every rank carries out its own events in that order;
a blocking receive comes after its send, so no program can deadlock. The model: the k-th
receive of (source, tag) gets the k-th message of that source with that tag.
"""

import os
import random
import time

import numpy as np
import pytest

from rocecomm import ANY_TAG, MessageTruncatedError

SIZES = (0, 1, 8, 100, 1000, 8088, 8192, 8193, 20000, 70000, 300000)


def make_program(seed, ranks, messages, largest, stored=True):
    """``[(rank, action, details)]`` in global order. Without ``stored`` nothing is sent by
    a blocking send: a receiver without memory for messages would hold it up."""
    rng = random.Random(seed)
    any_tag = rng.random() < 0.3            # then all receives of the program take any tag
    events, waiting, counts, number = [], {}, {}, 0
    for _ in range(messages):
        src, dst = rng.randrange(ranks), rng.randrange(ranks)
        tag = rng.choice((0, 0, 1, 7))
        size = min(largest, rng.choice(SIZES) + rng.choice((0, 0, 1)))
        message = (number, src, dst, tag, size)
        number += 1
        key = (src, dst) if any_tag else (src, dst, tag)
        how = rng.choice(("before", "after", "after", "late"))
        # order matters per key: once one waits, the later ones wait behind it
        started = size > 64 or src == dst or not stored or rng.random() < 0.5
        send = (src, "isend" if started else "send", message)
        short = rng.random() < 0.1 and size > 0
        receive = [dst, "irecv", message, size - 1 if short else size + rng.choice((0, 0, 5))]
        if how == "before" and not waiting.get(key):
            events += [tuple(receive), send]
            continue
        events.append(send)
        if how == "late" or waiting.get(key):
            waiting.setdefault(key, []).append(receive)
        else:
            receive[1] = rng.choice(("irecv", "recv"))
            events.append(tuple(receive))
        if rng.random() < 0.2 and waiting:
            for late in waiting.pop(rng.choice(sorted(waiting))):
                late[1] = rng.choice(("irecv", "recv"))
                events.append(tuple(late))
        counts[key] = counts.get(key, 0) + 1
        if rng.random() < 0.03:
            events.append((rng.randrange(ranks), "sleep", rng.random() * 0.01))
    for key in sorted(waiting):
        events += [tuple(late) for late in waiting[key]]
    return any_tag, events


def payload(seed, number, size):
    return np.random.default_rng([seed, number]).integers(0, 256, size, "u1")


def run_programs(comm, seeds, messages, largest):
    stored = comm.config.unexpected_limit > 0 and comm.config.eager_limit > 64
    for seed in seeds:
        any_tag, events = make_program(seed, comm.size, messages, largest, stored)
        pending = []

        def check(message, buffer, call, seed=seed):
            number, src, _, tag, size = message
            try:
                got = call()
            except MessageTruncatedError as error:
                assert (error.sent, error.capacity) == (size, len(buffer)), (seed, message)
                assert (buffer == 99).all(), (seed, message)
                return
            assert len(buffer) >= size, (seed, message)
            assert got == size, (seed, message, got)
            assert (buffer[:size] == payload(seed, number, size)).all(), (seed, message)
            assert (buffer[size:] == 99).all(), (seed, message)

        for rank, action, *details in events:
            if rank != comm.rank:
                continue
            if action == "sleep":
                time.sleep(details[0])
                continue
            number, src, dst, tag, size = details[0]
            if action == "send":
                comm.send(payload(seed, number, size), dst, tag)
            elif action == "isend":
                pending.append((None, None, comm.isend(payload(seed, number, size), dst, tag)))
            else:
                buffer = np.full(details[1], 99, "u1")
                wanted = ANY_TAG if any_tag else tag
                if action == "recv":
                    check(details[0], buffer, lambda b=buffer, s=src, w=wanted: comm.recv(b, s, w))
                else:
                    pending.append((details[0], buffer, comm.irecv(buffer, src, wanted)))
        random.Random(seed + comm.rank).shuffle(pending)
        for message, buffer, request in pending:
            if message is None:
                request.wait()
            else:
                check(message, buffer, request.wait)
        for connection in comm._engine.peers():
            for what in ("sends", "announced", "posted", "pulls", "reading", "strangers"):
                assert connection[what] == 0, (seed, connection)
        other = (comm.rank + 1) % comm.size         # programs do not run into each other
        comm.sendrecv(b"", other, bytearray(0), (comm.rank - 1) % comm.size, 99, 99)
        comm.barrier()


def length(scale):
    return 150 if scale.share == 1 else 40


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_random_programs(world, scale, ranks):
    first = int(os.environ.get("ROCECOMM_TEST_SEED", "1000"))
    ranks = min(ranks, scale.ranks)
    programs = scale.rounds(12, 2)
    world(ranks, run_programs, range(first, first + programs), length(scale), scale.bytes, timeout=50)


@pytest.mark.parametrize("limits", [
    {"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "16", "ROCECOMM_EAGER_LIMIT": "1024"},
    {"ROCECOMM_EAGER_LIMIT": "0"},
    {"ROCECOMM_UNEXPECTED_LIMIT": "0", "ROCECOMM_EAGER_LIMIT": "65536"}])
def test_random_programs_at_the_limits(world, scale, limits):
    world(min(3, scale.ranks), run_programs, range(50, 50 + scale.rounds(8, 1)), length(scale),
          scale.bytes,
          env=limits, timeout=50)


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_five_hundred_random_programs(world, scale):
    first = int(os.environ.get("ROCECOMM_TEST_SEED", str(random.randrange(10**6))))
    print(f"ROCECOMM_TEST_SEED={first}")
    for ranks in (2, 3, 4, 5):
        world(min(ranks, scale.ranks), run_programs, range(first, first + 125), 200, scale.bytes,
              timeout=280)
