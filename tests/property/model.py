"""What a program may lead to: the rules of docs/explanation/ordering.md, and no more.

`check(program, outcomes)` says what is wrong with what the ranks saw. Where several
outcomes are right (wildcards, several senders, threads, withdrawals in flight) it asks whether there is an
order of arrival that explains this one: for two messages and two receives at a time, which is
enough since matching compares pairs only.
"""

import dataclasses

#: at of receives that are made when the program is over, to empty the stores
DRAIN = 10**6
#: offsets of the words for atomics in a region
ADDS, SWAPS = 0, 8


@dataclasses.dataclass
class Outcome:
    """What an operation saw. Receives: "got" (with the message's number), "truncated",
    "timeout", "cancelled", "left" (withdrawn when all was over). Sends: "sent", "withdrawn"
    (cancelled, timed out or refused as one of two that block). Probes: "seen" or "nothing"."""

    at: int
    kind: str                   # "send", "receive", "probe"
    end: str
    number: int = -1
    rank: int = -1
    thread: int = 0
    src: int | None = None      # asked for
    tag: int | None = None
    capacity: int = 0
    source: int | None = None   # told
    told_tag: int | None = None
    nbytes: int | None = None
    cancelled_at: int = -1
    # atomics: whose region, which word, what was added or stored, compared with and found
    target: int = -1
    word: int = 0
    value: object = 0
    compare: int = -1
    old: int = -1
    faults: tuple = ()          # what the rank itself found wrong: bytes that differ, ...


def fits(receive, message):
    src, _, tag, _ = message
    return receive.src in (None, src) and receive.tag in (None, tag)


def posted_before(a, b):
    """Whether receive `a` was certainly posted before `b`, of the same rank."""
    return a.at < b.at and (a.thread == b.thread or b.at >= DRAIN)


def check(program, outcomes):
    """A list of what is wrong; empty if all is right."""
    wrong = []
    for o in outcomes:
        wrong += [f"{fault} ({o})" for fault in o.faults]
    sends = {o.number: o for o in outcomes if o.kind == "send"}
    threads = {o.number: (o.thread, o.at) for o in outcomes if o.kind == "send"}
    withdrawn = {n for n, o in sends.items() if o.end == "withdrawn"}
    taken = {}
    for o in outcomes:
        if o.kind == "receive" and o.end in ("got", "truncated"):
            wrong += check_one(program, o, taken, sends)
            taken.setdefault(o.number, o)
    wrong += [f"message {n} {program.messages[n]} was sent and never received"
              for n, o in sends.items() if o.end == "sent" and n not in taken]
    wrong += [f"message {n} {program.messages[n]} was withdrawn and received all the same"
              for n in withdrawn if n in taken]
    if program.certain:
        wrong += [f"had to succeed: {o}" for o in outcomes
                  if o.end in ("timeout", "withdrawn", "cancelled")]
    wrong += check_atomics(program, outcomes)
    if not wrong:
        for rank in range(program.ranks):
            mine = [o for o in outcomes if o.kind == "receive" and o.rank == rank]
            wrong += check_order(program, mine, taken, withdrawn, threads)
            wrong += check_probes(program, [o for o in outcomes if o.kind == "probe" and o.rank == rank],
                                  mine, withdrawn)
    return wrong


def check_one(program, o, taken, sends):
    """A receive and its message alone."""
    src, dst, tag, size = message = program.messages[o.number]
    if o.number not in sends:
        yield f"a message that was never sent: {o}"
    elif dst != o.rank or not fits(o, message):
        yield f"message {o.number} {message} does not fit {o}"
    elif o.number in taken:
        yield f"message {o.number} was received twice: {taken[o.number]} and {o}"
    elif (o.end == "truncated") != (size > o.capacity):
        yield f"message {o.number} {message}: {o}"
    elif o.source not in (None, src) or o.told_tag not in (None, tag):
        yield f"the wrong source or tag was told of message {o.number} {message}: {o}"
    elif o.end == "got" and o.nbytes != size:
        yield f"{o.nbytes} bytes told of message {o.number} {message}"


def excused(program, o, withdrawn):
    """A receive that met a message which was withdrawn then waits on in its old place, and
    meanwhile others went by, or were seen by a probe."""
    return any(fits(o, program.messages[n]) and program.messages[n][1] == o.rank for n in withdrawn)


def check_order(program, receives, taken, withdrawn, threads):
    def before(m, n):
        """Whether `m` was certainly sent before `n`, by the same rank."""
        return (program.messages[m][0] == program.messages[n][0] and threads[m][0] == threads[n][0]
                and threads[m][1] < threads[n][1])

    to_rank = [n for n in taken if receives and program.messages[n][1] == receives[0].rank]
    done = [o for o in receives if o.end in ("got", "truncated")]
    for o in done:
        if excused(program, o, withdrawn):
            continue
        for m in to_rank:               # it took a message, while an earlier one was there
            if m != o.number and before(m, o.number) and fits(o, program.messages[m]) \
                    and posted_before(o, taken[m]):
                yield (f"message {m} {program.messages[m]} was overtaken by {o.number} "
                       f"{program.messages[o.number]}: {o}, {taken[m]}")
        message = program.messages[o.number]
        for r in receives:              # it took a message, while an earlier receive waited
            if r is o or not posted_before(r, o) or not fits(r, message) or excused(program, r, withdrawn):
                continue
            if r.end == "left" or (r.end in ("got", "truncated") and before(o.number, r.number)):
                yield f"message {o.number} {message} passed an earlier receive: {r} for {o}"


def check_probes(program, probes, receives, withdrawn):
    for o in probes:
        if o.end != "seen":
            continue
        fitting = [n for n, m in enumerate(program.messages)
                   if m[1] == o.rank and m[0] == o.source and m[2] == o.told_tag and m[3] == o.nbytes
                   and fits(o, m)]
        if not fitting:
            yield f"a probe told of a message that nobody sent: {o}"
            continue
        for r in receives:
            if r.end in ("got", "truncated") and r.number == fitting[0] and program.threads == 1 \
                    and posted_before(r, o) and not excused(program, r, withdrawn):
                yield f"a probe told of a message that was spoken for: {o}, {r}"


def check_atomics(program, outcomes):
    """Additions and swaps of each word must have happened one after the other."""
    totals = {o.rank: o.value for o in outcomes if o.kind == "total"}
    for target in totals:
        mine = [o for o in outcomes if o.kind == "atomic" and o.target == target]
        adds = sorted((o for o in mine if o.word == ADDS), key=lambda o: o.old)
        total = 0
        for o in adds:
            if o.old != total:
                yield f"an addition found {o.old}, not {total}: {o}"
                break
            total += o.value
        if total != totals[target][0]:
            yield f"additions to rank {target} make {total}, and {totals[target][0]} is there"
        for a in adds:
            for b in adds:
                if (a.rank, a.thread) == (b.rank, b.thread) and a.at < b.at and a.old > b.old:
                    yield f"additions of one thread in another order: {a}, {b}"
        swaps = [o for o in mine if o.word == SWAPS]
        after = {o.compare: o for o in swaps if o.old == o.compare}
        if len(after) != sum(o.old == o.compare for o in swaps):
            yield f"two swaps of the same value at rank {target} succeeded"
        value, seen = 0, {0}
        while value in after:
            value = after.pop(value).value
            seen.add(value)
        if after or value != totals[target][1] or any(o.old not in seen for o in swaps):
            yield f"swaps at rank {target} make {value}, and {totals[target][1]} is there; {swaps}"
