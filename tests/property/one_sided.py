"""The one-sided part of random programs: what is done, and what may be seen.

Every rank has a region with a stripe for each thread of each rank, into which only that
thread writes, so a read of it has one right answer; with two words for atomics by everybody;
and with a second region that is closed in the middle. A stripe begins with a mark, the `at`
of the newest write: whoever receives a message, or a notification, must find the marks of the
writes before it (case D5).
"""

import numpy as np
from property.model import ADDS, SWAPS, Outcome

from rocecomm import ANY_SOURCE, CompletionError, TimeoutError

STRIPE = 4096
MARK = 8
HEAD = 64
KINDS = ("put", "put", "iput", "putv", "iputv", "get", "iget", "getv", "igetv", "add", "add", "iadd", "swap",
         "mark", "mark", "notify", "notify", "listen", "closed", "close")


def stripe(program, rank, thread):
    """Where the stripe of that thread begins."""
    return HEAD + (rank * program.threads + thread) * STRIPE


def region_size(program):
    return HEAD + program.ranks * program.threads * STRIPE


def make(maker, rank):
    """Adds a random one-sided operation to the program that is being made."""
    rng = maker.rng
    do = rng.choice(KINDS)
    offset = rng.randrange(MARK, STRIPE)
    size = rng.choice((0, 1, 8, 100, STRIPE // 8, STRIPE))
    maker.op(rank, do, target=rng.randrange(maker.p.ranks), offset=offset,
             capacity=min(size, STRIPE - offset), value=rng.randrange(1, 1000), timeout=0.02)


def pieces(op):
    """The bytes of an operation in pieces, in any order on both sides: where each lies in the local
    buffer, where in the stripe, and how long it is. Up to 700, some of them empty, so that there are
    more than fit in one chain of work requests."""
    rng = np.random.default_rng([op.at, op.value])
    many = (0, 1, 3, 3, 40, 700)[op.value % 6]
    cuts = np.sort(rng.integers(0, op.capacity + 1, many))
    ends = np.concatenate([[0], cuts, [op.capacity]])
    lengths = np.diff(ends)
    remote = ends[:-1]
    local = np.empty_like(remote)
    order = rng.permutation(len(lengths))                   # of the pieces in the local buffer
    local[order] = np.cumsum(lengths[order]) - lengths[order]
    turn = rng.permutation(len(lengths))                    # in which they are named
    kind = ("i8", "u8", "i4", "u2")[op.value % 4]
    return local[turn].astype(kind), remote[turn].astype(kind), lengths[turn].astype(kind)


def strided(array):
    """The same numbers, every second cell of an array."""
    wide = np.full(2 * len(array), 7, array.dtype)
    wide[::2] = array
    return wide[::2]


class OneSided:
    """Mixed into execute.Rank."""

    def prepare(self):
        program, comm = self.program, self.comm
        self.memory = np.zeros(region_size(program), "u1")
        self.second = np.zeros(STRIPE, "u1")
        self.region, self.closable = (comm.register(m, "rwa") for m in (self.memory, self.second))
        mine = self.region.descriptor() + self.closable.descriptor()
        size = len(mine)
        found = {r: bytearray(size) for r in range(comm.size)}
        found[self.me][:] = mine
        engine, others = comm._engine, [r for r in range(comm.size) if r != self.me]
        comm.wait_all([engine.irecv(found[r], r, 2, 2**31 + 77) for r in others]
                      + [engine.isend(mine, r, 2, 2**31 + 77) for r in others])
        self.remote = [comm.open(bytes(found[r][:size // 2])) for r in range(comm.size)]
        self.remote_second = [comm.open(bytes(found[r][size // 2:])) for r in range(comm.size)]
        # what this rank's stripes hold: (target, thread) -> bytes
        self.shadow = {(r, t): np.zeros(STRIPE, "u1") for r in range(comm.size)
                       for t in range(program.threads)}
        self.writes = []                # (request, what it reads from)
        self.adds = []                  # (outcome, request)
        self.heard = {}                 # rank -> notifications in order of arrival
        self.closed_here = False
        # message -> (stripe at its receiver, the mark that must be there)
        self.marks, newest = {}, {}
        for op in program.ops:
            if op.do in ("mark", "notify"):
                newest[op.rank, op.thread, op.target] = op.at + 1
            if op.message >= 0:
                dst = program.messages[op.message][1]
                self.marks[op.message] = (stripe(program, op.rank, op.thread),
                                          newest.get((op.rank, op.thread, dst), 0))

    def mark_at(self, start):
        return int(self.memory[start:start + MARK].view("u8")[0])

    def check_mark(self, o):
        """After a receive: what its sender wrote before is here."""
        if self.program.one_sided and o.end == "got":
            start, mark = self.marks[o.number]
            if self.mark_at(start) < mark:
                o.faults += (f"message {o.number} is here, the write before it is not: mark "
                             f"{self.mark_at(start)}, not {mark}",)

    # ------------------------------------------------------------------------- operations
    def where(self, op):
        return self.remote[op.target], stripe(self.program, self.me, op.thread) + op.offset

    def bytes_of(self, op):
        """New bytes for a write, which the shadow has from now on."""
        data = np.random.default_rng([self.program.seed, op.at]).integers(0, 256, op.capacity, "u1")
        self.shadow[op.target, op.thread][op.offset:op.offset + op.capacity] = data
        return data

    def do_put(self, op):
        remote, at = self.where(op)
        data = self.bytes_of(op)
        self.comm.write(data, remote, at, timeout=20)
        data[:] = 0xEE

    def do_iput(self, op):
        remote, at = self.where(op)
        data = self.bytes_of(op)
        self.writes.append((self.comm.iwrite(data, remote, at), data))

    def vector(self, op):
        """The arguments of writev and readv behind the buffer, and where each byte of the local buffer is
        from in the order of the stripe."""
        remote, at = self.where(op)
        local, away, lengths = pieces(op)
        moved = np.empty(op.capacity, int)
        for here, there, n in zip(local.tolist(), away.tolist(), lengths.tolist(), strict=True):
            moved[here:here + n] = range(there, there + n)
        away = away.astype("i8") + at
        if op.value % 5 == 0:
            local, away, lengths = strided(local), strided(away), strided(lengths)
        return (remote, local, away, lengths), moved

    def do_putv(self, op):
        args, moved = self.vector(op)
        self.comm.writev(self.bytes_of(op)[moved], *args, timeout=20)

    def do_iputv(self, op):
        args, moved = self.vector(op)
        data = self.bytes_of(op)[moved]
        self.writes.append((self.comm.iwritev(data, *args), data))
        for array in args[1:]:
            array[:] = 0                # they were copied

    def read_back(self, op, read):
        got = np.full(op.capacity, 99, "u1")
        read(got, *self.where(op))
        expected = self.shadow[op.target, op.thread][op.offset:op.offset + op.capacity]
        self.outcomes[op.at, "get"] = o = Outcome(op.at, "get", "got", rank=self.me, thread=op.thread)
        if not np.array_equal(got, expected):
            o.faults = (f"read {got[:16]} where {expected[:16]} was written",)

    def do_get(self, op):
        self.read_back(op, lambda got, remote, at: self.comm.read(got, remote, at, timeout=20))

    def do_iget(self, op):
        self.read_back(op, lambda got, remote, at: self.comm.iread(got, remote, at).wait(20))

    def do_getv(self, op, wait=True):
        args, moved = self.vector(op)

        def read(got, remote, at):
            here = np.full(op.capacity, 99, "u1")
            if wait:
                self.comm.readv(here, *args, timeout=20)
            else:
                self.comm.ireadv(here, *args).wait(20)
            got[moved] = here
        self.read_back(op, read)

    def do_igetv(self, op):
        self.do_getv(op, wait=False)

    def atomic(self, op, word, compare=-1):
        self.outcomes[op.at, "atomic"] = o = Outcome(op.at, "atomic", "", rank=self.me, thread=op.thread)
        o.target, o.word, o.value, o.compare = op.target, word, op.value, compare
        return o

    def do_add(self, op):
        self.atomic(op, ADDS).old = self.comm.fetch_add(self.remote[op.target], ADDS, op.value, timeout=20)

    def do_iadd(self, op):
        self.adds.append((self.atomic(op, ADDS),
                          self.comm.ifetch_add(self.remote[op.target], ADDS, op.value)))

    def do_swap(self, op):
        known = np.zeros(1, "u8")
        self.comm.read(known, self.remote[op.target], SWAPS, timeout=20)
        o = self.atomic(op, SWAPS, int(known[0]))
        o.value = op.at + 1             # never the same twice
        o.old = self.comm.compare_swap(self.remote[op.target], SWAPS, o.compare, o.value, timeout=20)

    def mark(self, op, **options):
        data = np.array([op.at + 1], "u8")
        self.shadow[op.target, op.thread][:MARK] = data.view("u1")
        self.writes.append((self.comm.iwrite(data, self.remote[op.target],
                                             stripe(self.program, self.me, op.thread), **options), data))

    def do_mark(self, op):
        self.mark(op)

    def do_notify(self, op):
        self.mark(op, notify=op.at + 1)

    def do_listen(self, op):
        try:
            for source, number in self.comm.wait_notify(ANY_SOURCE, 1, timeout=op.timeout, with_source=True):
                self.hear(source, number)
        except TimeoutError:
            pass

    def hear(self, source, number):
        self.heard.setdefault(source, []).append(number)
        thread = self.program.ops[number - 1].thread if number <= len(self.program.ops) else 0
        here = self.mark_at(stripe(self.program, source, thread))
        if here < number:
            self.outcomes[number, source, "heard"] = Outcome(
                number, "get", "got", rank=self.me,
                faults=(f"notification {number} of rank {source} is here, its write is not: mark {here}",))

    def do_closed(self, op):
        """The region may have been closed: an error of this operation alone."""
        remote = self.remote_second[op.target]
        try:
            if op.value % 2:
                self.comm.write(np.full(8, op.value & 255, "u1"), remote, 8, timeout=20)
            else:
                self.comm.read(np.zeros(8, "u1"), remote, 8, timeout=20)
        except CompletionError as error:
            if not any(other.do == "close" and other.rank == op.target for other in self.program.ops):
                raise AssertionError("a region that nobody closed") from error

    def do_close(self, op):
        self.closed_here = True
        self.closable.close()
        self.closable.close()

    # -------------------------------------------------------------------------------- end
    def finish_one_sided(self):
        """All of this rank's operations end. A barrier has to follow."""
        for request, _ in self.writes:
            request.wait(30)
        for o, request in self.adds:
            o.old = request.wait(30)
        expected = {}
        for op in self.program.ops:
            if op.do == "notify" and op.target == self.me:
                expected.setdefault(op.rank, []).append(op)
        for source, ops in sorted(expected.items()):
            missing = len(ops) - len(self.heard.get(source, ()))
            if missing:
                for number in self.comm.wait_notify(source, missing, timeout=30):
                    self.hear(source, number)
            heard = self.heard[source]
            o = self.outcomes[source, "notified"] = Outcome(source, "get", "got", rank=self.me)
            if sorted(heard) != sorted(op.at + 1 for op in ops):
                o.faults = (f"rank {source} notified {sorted(op.at + 1 for op in ops)}, heard was {heard}",)
            for thread in range(self.program.threads):
                order = [op.at + 1 for op in ops if op.thread == thread]
                if [n for n in heard if n in order] != order:
                    o.faults += (f"notifications of rank {source}.{thread} came as {heard}",)

    def close_regions(self):
        """After the barrier: what the region holds in the end."""
        words = self.memory[:16].view("u8")
        self.outcomes[0, "total"] = o = Outcome(0, "total", "got", rank=self.me)
        o.value = (int(words[0]), int(words[1]))
        if self.closed_here and any(self.second[16:]):
            o.faults = ("bytes behind what was written changed",)
        self.region.close()
        self.closable.close()
