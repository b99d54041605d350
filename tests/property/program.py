"""Random programs of one communicator: who sends what, who receives how, in which order.

A program is made in one global order, so that a blocking receive stands behind the send that
it is meant for; every thread carries out its own operations in that order. So no program
without wildcards and withdrawals can wait for ever, and one with them is bounded by timeouts.
`generate(seed, ranks)` always makes the same one, and `Program.to_json` writes it down.

Sizes are all different at one receiver: from its size a message is known again.
"""

import dataclasses
import json
import random

from property import one_sided

SIZES = (0, 1, 8, 64, 100, 390, 1000, 4090, 8080, 8192, 8290, 20000, 65530, 70000, 300000, 1 << 20)
TAGS = (0, 0, 0, 1, 7)


@dataclasses.dataclass
class Op:
    """One call. ``at`` is its place in the global order, ``thread`` the thread of ``rank``."""

    at: int
    rank: int
    thread: int
    do: str                     # see execute.py
    message: int = -1           # what is sent
    src: int | None = None      # None: any
    tag: int | None = None
    capacity: int = 0
    cut: int = 0                # seed of how the buffer is cut into a list; 0: it is not
    timeout: float = 0.0
    of: tuple = ()              # `at` of the requests that it is about
    value: int = 0
    target: int = -1            # one-sided: whose region
    offset: int = 0             # and where in the stripe


@dataclasses.dataclass
class Program:
    seed: int
    ranks: int
    threads: int
    wild: bool                  # has wildcards
    cancels: bool               # has withdrawals
    one_sided: bool             # has one-sided operations
    messages: list              # (src, dst, tag, size), by number
    ops: list

    def of(self, rank, thread):
        return [op for op in self.ops if (op.rank, op.thread) == (rank, thread)]

    @property
    def certain(self):
        """Whether every blocking call must succeed: no other receive can take its message."""
        return not (self.wild or self.cancels) and self.threads == 1

    def without(self, ats):
        """The program without these operations and what is about them."""
        ops = []
        for op in self.ops:
            if op.at in ats:
                continue
            if op.of:
                left = tuple(at for at in op.of if at not in ats)
                if not left:
                    continue
                op = dataclasses.replace(op, of=left)
            ops.append(op)
        return dataclasses.replace(self, ops=ops)

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text):
        raw = json.loads(text)
        raw["messages"] = [tuple(m) for m in raw["messages"]]
        raw["ops"] = [Op(**{**op, "of": tuple(op["of"])}) for op in raw["ops"]]
        return cls(**raw)

    def __str__(self):
        flags = [w for w in ("wild", "cancels", "one_sided") if getattr(self, w)]
        lines = [f"seed {self.seed}, {self.ranks} ranks of {self.threads} threads {' '.join(flags)}"]
        for op in self.ops:
            parts = [f"{op.at:4} rank {op.rank}.{op.thread} {op.do}"]
            if op.message >= 0:
                src, dst, tag, size = self.messages[op.message]
                parts.append(f"message {op.message}: {size} bytes to {dst}, tag {tag};")
            if op.do in RECEIVING or op.do in ("iprobe", "probe"):
                parts.append(f"from {op.src} tag {op.tag} into {op.capacity}")
            if op.target >= 0:
                parts.append(f"at rank {op.target}, {op.capacity} bytes at {op.offset}, value {op.value}")
            if op.of:
                parts.append(f"of {op.of}")
            if op.timeout:
                parts.append(f"within {op.timeout}")
            lines.append(" ".join(parts) + (" as a list" if op.cut else ""))
        return "\n".join(lines)


SENDING = ("send", "isend", "sendrecv")
RECEIVING = ("recv", "irecv", "sendrecv", "probe_recv")


class Maker:
    def __init__(self, seed, ranks, length, largest, stored):
        self.rng = rng = random.Random(seed)
        self.stored = stored            # whether a small blocking send needs no receive
        threads = rng.choice((1, 1, 1, 2, 3))
        self.p = Program(seed, ranks, threads, wild=rng.random() < 0.4, cancels=rng.random() < 0.35,
                         one_sided=rng.random() < 0.5, messages=[], ops=[])
        self.largest = largest
        self.sizes = [set() for _ in range(ranks)]
        self.open = [[[] for _ in range(threads)] for _ in range(ranks)]    # requests not waited for
        self.late = {}                  # (src, dst, tag) -> receives that are made later
        self.patience = 20.0 if self.p.certain else 0.15
        for _ in range(length):
            self.step()
        for key in sorted(self.late):
            for kwargs in self.late[key]:
                self.receive(**kwargs)

    def op(self, rank, do, thread=None, **details):
        thread = self.rng.randrange(self.p.threads) if thread is None else thread
        op = Op(len(self.p.ops), rank, thread, do, **details)
        self.p.ops.append(op)
        if do in ("isend", "irecv"):
            self.open[rank][thread].append(op)
        return op

    def message(self, src, dst, tag=None, size=None):
        rng = self.rng
        if size is None:
            size = min(self.largest, rng.choice(SIZES) + rng.choice((0, 0, 0, 1, 13)))
        while size in self.sizes[dst]:
            size += 1
        self.sizes[dst].add(size)
        self.p.messages.append((src, dst, rng.choice(TAGS) if tag is None else tag, size))
        return len(self.p.messages) - 1

    def cut(self):
        return self.rng.randrange(1, 1 << 30) if self.rng.random() < 0.2 else 0

    def step(self):
        rng = self.rng
        what = rng.random()
        rank = rng.randrange(self.p.ranks)
        if what < 0.015:
            self.flood(rank)
        elif what < 0.04:
            self.op(rank, "sleep", timeout=rng.random() * 0.004)
        elif what < 0.07:
            self.op(rank, "progress")
        elif what < 0.13:
            do = rng.choice(("iprobe", "iprobe", "probe"))
            self.op(rank, do, src=rng.choice((None, rng.randrange(self.p.ranks))),
                    tag=rng.choice((None, *TAGS)), timeout=rng.choice((0.0, 0.003)))
        elif what < 0.36 and self.p.one_sided and self.rng.random() < 0.6:
            one_sided.make(self, rank)
        elif what < 0.24:
            self.about_requests(rank)
        elif what < 0.30 and self.p.ranks > 1 and self.p.certain:
            self.exchange(rank)
        else:
            self.transfer(rank)
        if rng.random() < 0.2 and self.late:
            for kwargs in self.late.pop(rng.choice(sorted(self.late))):
                self.receive(**kwargs)

    def flood(self, src):
        """Many small messages before the first is asked for: they have to be stored."""
        dst, tag = self.rng.randrange(self.p.ranks), self.rng.choice(TAGS)
        for _ in range(self.rng.randint(20, 70)):
            number = self.message(src, dst, tag, self.rng.choice((8, 100, 1000)))
            self.op(src, "isend", message=number, timeout=20.0)
            self.late.setdefault((src, dst, tag), []).append(dict(
                src=src, dst=dst, tag=tag, capacity=self.p.messages[number][3], blocking=False))

    def about_requests(self, rank):
        rng = self.rng
        thread = rng.randrange(self.p.threads)
        waiting = self.open[rank][thread]
        if not waiting:
            return
        some = rng.sample(waiting, rng.randint(1, min(4, len(waiting))))
        if self.p.cancels and rng.random() < 0.6:
            if rng.random() < 0.3:
                self.op(rank, "awaits", thread, of=tuple(op.at for op in some),
                        timeout=rng.choice((0.0, 0.003)))
            else:
                self.op(rank, "cancel", thread, of=(some[0].at,))
            return
        do = rng.choice(("wait_all", "wait_any", "test", "wait"))
        self.op(rank, do, thread, of=tuple(op.at for op in some[:1 if do in ("test", "wait") else 4]),
                timeout=rng.choice((0.0, 0.002)))

    def exchange(self, rank):
        other = self.rng.choice([r for r in range(self.p.ranks) if r != rank])
        tag = self.rng.choice(TAGS)
        if not all(self.alone(key) for key in ((rank, other, tag), (other, rank, tag))):
            return                      # an earlier message would be taken, and the exchange wait
        pair = (self.message(rank, other, tag), self.message(other, rank, tag))
        for number, back in (pair, pair[::-1]):
            me, peer, _, _ = self.p.messages[number]
            self.op(me, "sendrecv", message=number, src=peer, tag=tag,
                    capacity=self.p.messages[back][3] + 3, timeout=20.0)

    def transfer(self, src):
        rng = self.rng
        dst = rng.randrange(self.p.ranks)
        number = self.message(src, dst)
        _, _, tag, size = self.p.messages[number]
        key = (src, dst, tag)
        short = size > 0 and rng.random() < 0.08
        receive = dict(src=src, dst=dst, tag=tag, blocking=False,
                       capacity=size - 1 if short else size + rng.choice((0, 0, 5)))
        if self.p.cancels and self.stored and rng.random() < 0.08 and size > 8:
            # nobody is asked to receive it
            self.op(src, "send", message=number, timeout=0.02, cut=self.cut())
            return
        first = rng.random() < 0.3 and key not in self.late
        if first:
            self.receive(**receive)
        # a blocking send of more than is stored needs a receive that waits for it already; where nothing
        # is stored, small ones wait until the store is empty
        may_block = src != dst and self.stored and (size <= 64 or (
            first and self.p.certain and key not in self.late and self.alone(key)))
        do = "send" if may_block and rng.random() < 0.6 else "isend"
        self.op(src, do, message=number, cut=self.cut(), timeout=20.0)
        if first:
            return
        if rng.random() < 0.3 or key in self.late:
            self.late.setdefault(key, []).append(receive)
        else:
            receive["blocking"] = rng.random() < 0.5
            self.receive(**receive)

    def alone(self, key):
        """Whether all earlier messages of that key have a receive already."""
        sent = sum(1 for s, d, t, _ in self.p.messages if (s, d, t) == key)
        asked = sum(1 for op in self.p.ops if op.do in RECEIVING and (op.src, op.rank, op.tag) == key)
        return asked >= sent

    def receive(self, src, dst, tag, capacity, blocking):
        rng = self.rng
        if self.p.wild:
            if rng.random() < 0.3:
                tag = None
            if rng.random() < 0.3:
                src = None
        do = "irecv"
        if blocking and capacity >= 0:
            do = rng.choice(("recv", "recv", "probe_recv"))
        if do == "probe_recv" and self.p.threads > 1:
            do = "recv"                 # another thread may take it in between
        self.op(dst, do, src=src, tag=tag, capacity=capacity, cut=self.cut(), timeout=self.patience)


def generate(seed, ranks, length=60, largest=1 << 20, stored=True):
    """The program of this seed. `stored`: receivers store small messages that nobody waits for."""
    return Maker(seed, ranks, length, largest, stored).p
