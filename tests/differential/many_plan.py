"""Random programs of many queue pairs whose outcome the specification determines.

A raw program is a world and a list of numbers. Each number is the seed of one operation, so
that leaving one out does not change the others. `plan` runs the model beside and waits for
what is due where the outcome would depend on time:

* the order of two queue pairs that send into one receive queue, or work on one word;
* a message that is dropped, or whose sender gives up, before anything else happens;
* arming a completion queue, and the events that are due from it.
"""

import random

from differential import many_steps as s
from differential.many_model import ERR, RTS, SQD, Many, More
from differential.many_steps import TAKES_RECEIVE
from differential.model import Rules, Undetermined
from differential.steps import ALL, ATOMIC, INBOUND, LOCAL, OPS, READ, WRITE

LENGTHS = (0, 1, 7, 8, 63, 64, 65, 200, 256, 257, 700, 1024, 1025, s.MOST)
MAX_POSTS = 40          # of one queue between two points where everything was taken
INLINE = 64

SENDS = ("send", "send_imm", "send_inv")
OPS_OF = {"RC": (*OPS, "send_inv"), "UC": ("send", "send_imm", "write", "write_imm"),
          "UD": ("send", "send_imm")}
FAULTS = ("",) * 60 + ("lkey", "rkey", "dead lkey", "dead rkey", "right", "unaligned", "short")
# what an operation is, and how often
KINDS = (("send", 34), ("recv", 26), ("sync", 6), ("arm", 8), ("events", 5), ("err", 1), ("again", 3),
         ("drain", 2), ("resume", 4), ("resize", 2), ("limit", 3), ("reg", 1), ("dereg", 1), ("asyncs", 1),
         ("bind", 6), ("unbind", 1))


def make_world(rng, windows=True):
    """A random world; without memory windows if the device has none."""
    channels = rng.random() < 0.6
    cqs = (rng.randint(1, 3), rng.randint(1, 3))
    srqs = (rng.randint(0, 2), rng.randint(0, 2))
    queues = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("RC", "RC", "RC", "UC", "UD", "UD"))
        queues.append(s.Queue(
            kind, *(tuple(rng.randrange(n) for n in cqs) for _ in range(2)),
            srq=tuple(rng.randrange(n) if n and kind == "RC" and rng.random() < 0.6 else None for n in srqs),
            sig_all=tuple(rng.random() < 0.2 for _ in range(2)),
            rnr_retry=tuple(7 if channels else rng.choice((7, 7, 7, 0, 2)) for _ in range(2))))
    return s.World(tuple(queues), cqs,
                   tuple(tuple(rng.randrange(2) for _ in range(n)) for n in cqs) if channels else ((), ()),
                   srqs, tuple(2 if windows and rng.random() < 0.6 else 0 for _ in range(2)),
                   (rng.random() < 0.4, rng.random() < 0.4))


class Skip(Exception):
    """This operation has no place here."""


class Planner:
    def __init__(self, world, rules=Rules(), more=More()):
        self.world, self.rules = world, rules
        self.model = Many(world, rules, more)
        self.program = []
        self.ids = 100
        self.next_free = [s.SOURCE + 8 * s.WORDS] * 2
        self.next_region = 1
        self.posts = {}         # since everything was taken
        self.user = {}          # who has used a receive queue or word since then
        self.unseen = {}        # ends whose last request completes unseen: the request
        self.failed = False     # something did just now: wait before anything else

    # -------------------------------------------------------------- adding steps
    def push(self, step):
        model = self.model.copy()       # Undetermined may be found half-way
        model.apply(step)
        self.model = model
        self.program.append(step)

    def sync(self, keys=None):
        """All of it, or what `keys` name, is waited for."""
        for key, step in list(self.unseen.items()):
            if keys is None or (*key, "send") in keys:
                step.signaled = True        # else nobody sees that it is done
                self.model._sent(*key, step, 0)
                del self.unseen[key]
        whole = keys is None
        due = {k: len(c) for k, c in self.model.completed.items() if whole or k in keys}
        self.program.append(s.Sync(due, self.model.dropped, whole))
        if whole:
            self.posts.clear()
            self.user.clear()
            self.failed = self.model.dropped = self.model.retried = False

    def shared_use(self, what, who):
        if self.user.setdefault(what, who) != who:
            self.sync()
            self.user[what] = who

    def end(self, rng, states=(RTS,), kinds=("RC", "UC", "UD")):
        keys = [k for k, e in self.model.ends.items() if e.state in states and
                self.world.queues[k[1]].kind in kinds]
        if not keys:
            raise Skip
        return rng.choice(keys)

    def waiting_for(self, name):
        """The ends whose head waits for a receive of a queue."""
        return [k for k in self.model.waiting() if self.world.queues[k[1]].kind == "RC" and
                self.model.rq_of(1 - k[0], k[1])[0] == name]

    def count(self, what):
        self.posts[what] = self.posts.get(what, 0) + 1
        if self.posts[what] > MAX_POSTS:
            self.sync()
            self.posts[what] = 1
        self.ids += 1
        return self.ids

    # -------------------------------------------------------------- memory
    def fresh(self, side, length, align=1):
        """The offset of bytes that nothing has used."""
        at = -(-self.next_free[side] // align) * align
        if at + length > s.AREA:
            raise Skip
        self.next_free[side] = at + length
        return at

    def lengths(self, rng, most):
        """Up to three lengths, some of them zero."""
        out = []
        for _ in range(rng.choice((1, 1, 1, 2, 3, 0))):
            out.append(min(rng.choice(LENGTHS), most))
            most -= out[-1]
        return out

    def region(self, rng, side, need):
        return rng.choice([r for (of, r), rights in self.model.regions.items()
                           if of == side and rights is not None and not need & ~rights])

    # -------------------------------------------------------------- operations
    def add(self, seed):
        rng = random.Random(seed)
        names, weights = zip(*KINDS, strict=True)
        kind = rng.choices(names, weights)[0]
        if self.failed:
            self.sync()
        try:
            getattr(self, "_" + kind)(rng)
        except (Skip, Undetermined):
            pass

    def _recv(self, rng):
        side = rng.randrange(2)
        shared = bool(self.world.srqs[side]) and rng.random() < 0.5
        if shared:
            to = rng.randrange(self.world.srqs[side])
            rq, most = self.model.shared[side, to], s.MOST
        else:
            ends = [i for (of, i), e in self.model.ends.items() if of == side and e.state != ERR and
                    self.world.queues[i].srq[side] is None]
            if not ends:
                raise Skip
            to = rng.choice(ends)
            rq, most = self.model.ends[side, to].rq, s.MOST
        if len(rq) >= 20:
            raise Skip
        name = (side, "srq" if shared else "qp", to)
        waiting = [self.model.ends[k].sq[0][0] for k in self.waiting_for(name)]
        if len(waiting) > 1:
            raise Skip
        lengths = self.lengths(rng, most)
        if rng.random() < 0.3:
            lengths.append(rng.choice((s.GRH, s.MOST + s.GRH)))
        lengths = lengths[:3]
        if waiting and sum(lengths) < waiting[0].length:
            lengths = [waiting[0].length]
        places = tuple(s.Place(self.fresh(side, n), n, self.region(rng, side, int(LOCAL)))
                       for n in lengths)
        self.push(s.Recv(side, to, self.count(name) + s.RECV_ID, places, shared))

    def _send(self, rng):
        side, i = self.end(rng, (RTS, RTS, SQD, ERR) if rng.random() < 0.1 else (RTS, SQD))
        q, end = self.world.queues[i], self.model.ends[side, i]
        op = rng.choice(("send", *OPS_OF[q.kind]))
        fault = rng.choice(FAULTS)
        if q.kind != "RC":
            fault = "rkey" if fault == "rkey" and q.kind == "UC" else ""
        to, qkey = None, s.QKEY
        if q.kind == "UD":
            to = (rng.choice((1 - side, 1 - side, side)),
                  rng.choice([k for k, x in enumerate(self.world.queues) if x.kind == "UD"]))
            qkey = s.QKEY + (rng.random() < 0.1)
        far_side, far_end = to or (1 - side, i)
        far = self.model.ends[far_side, far_end]
        if q.kind == "RC" and far.state == ERR and rng.random() < 0.8:
            raise Skip                      # it takes the device a while
        name, rq = self.model.rq_of(far_side, far_end)
        waits = bool(end.sq) or end.state == SQD
        if op in TAKES_RECEIVE and far.state != ERR:
            if waits and (self.world.channels[0] or name[1] == "srq"):
                raise Skip
            if not rq and not waits:
                self.no_receive(rng, side, i, name)
            elif not waits and any(k != (side, i) for k in self.waiting_for(name)):
                raise Skip
            self.shared_use(name, (side, i))
        step = s.Send(side, i, 0, op, signaled=rng.random() < 0.7, solicited=rng.random() < 0.4,
                      imm=rng.randrange(1, 2**32) if op.endswith("imm") else 0, to=to, qkey=qkey)
        step.fence = rng.random() < 0.15 and q.kind == "RC" and self.rules.fence_sent_again
        most = s.MOST if q.kind != "UD" else 1000
        if rq and op in SENDS and not waits:
            room = sum(p.length for p in rq[0].places) - (s.GRH if to else 0)
            if room < 0:
                raise Skip
            most = min(most, room)
        elif waits and op in SENDS:
            most = 0                        # what it will find, nobody knows yet
        self.shape(rng, step, most, fault)
        if fault and step.op not in INBOUND and fault.endswith("lkey") and waits:
            raise Skip                      # devices differ: see fault_behind_waiting
        if fault == "short" and (not rq or waits or op not in SENDS or op == "send_inv"):
            raise Skip
        if fault == "short":
            room = sum(p.length for p in rq[0].places)
            if room >= s.MOST:
                raise Skip
            step.places = (s.Place(0, room + 1),)
            step.inline = False
        if fault:
            self.sync()
        step.wr_id = self.count((side, "send", i))
        before = len(self.model.completed[side, i, "send"])
        states = [e.state for e in self.model.ends.values()]
        self.push(step)
        done = len(self.model.completed[side, i, "send"]) > before
        self.unseen.pop((side, i), None)
        if not done and not self.model.ends[side, i].sq:
            self.unseen[side, i] = step
        if states != [e.state for e in self.model.ends.values()] or self.model.dropped or self.model.retried:
            self.failed = True
            self.sync()

    def no_receive(self, rng, side, i, name):
        """The message will find no receive: is that of use here?"""
        q = self.world.queues[i]
        if rng.random() < 0.5:
            raise Skip
        if q.kind == "RC":
            # an armed completion queue may tell of a request that waits: no two events alike
            if self.world.channels[0] or self.waiting_for(name):
                raise Skip
            if name[1] == "srq" and q.rnr_retry[side] == 7 and rng.random() < 0.5:
                raise Skip
        self.sync()

    def shape(self, rng, step, most, fault):
        """The memory of a request."""
        side, op = step.side, step.op
        inbound = op in INBOUND
        step.inline = not inbound and fault == "" and op != "send_inv" and rng.random() < 0.3
        if op == "send_inv":
            bound = [w for (of, w), at in self.model.windows.items() if at[0] == (1 - side, step.qp)]
            end = self.model.ends[side, step.qp]
            if fault or not bound or end.sq or end.state != RTS or \
                    not self.model.rq_of(1 - side, step.qp)[1]:
                raise Skip
            step.window = rng.choice(bound)
        if op in ("add", "swap"):
            step.places = (s.Place(self.fresh(side, 8, 8), 8, self.region(rng, side, int(LOCAL))),)
            number = rng.randrange(s.WORDS)
            self.shared_use((1 - side, "word", number), (side, step.qp))
            step.far = s.Place(s.word(number), 8, self.region(rng, 1 - side, s.ALL))
            step.compare_add, step.swap = rng.getrandbits(64), rng.getrandbits(64)
            if op == "swap" and rng.random() < 0.6:
                step.compare_add = int.from_bytes(self.model._get(1 - side, step.far), "little")
        else:
            lengths = self.lengths(rng, min(most, INLINE) if step.inline else most)
            if op == "read":
                step.places = tuple(s.Place(self.fresh(side, n), n, self.region(rng, side, int(LOCAL)))
                                    for n in lengths)
            else:
                step.places = tuple(s.Place(rng.randrange(s.SOURCE - n + 1), n, self.region(rng, side, 0))
                                    for n in lengths)
            length = sum(lengths)
            if op == "read":
                step.far = s.Place(rng.randrange(s.SOURCE - length + 1), length,
                                   self.region(rng, 1 - side, int(READ)))
            elif op == "write" and fault == "" and self.through_window(rng, step, length):
                pass
            elif op in ("write", "write_imm"):
                step.far = s.Place(self.fresh(1 - side, length), length,
                                   self.region(rng, 1 - side, int(WRITE)))
        self.spoil(rng, step, fault)

    def through_window(self, rng, step, length):
        """The target of a write, in a window of the peer's queue pair; mostly it is allowed."""
        bound = [(w, at) for (of, w), at in self.model.windows.items() if at[0] == (1 - step.side, step.qp)]
        if not bound or not length or rng.random() < 0.1:
            return False
        window, (_, low, high, rights) = rng.choice(bound)
        if high - low >= length and rights & int(WRITE):
            step.far = s.Place(rng.randint(low, high - length), length, window=window)
            return True
        if rng.random() < 0.8:
            return False
        self.sync()
        step.far = s.Place(low, length, window=window)
        return True

    def _bind(self, rng):
        side, i = self.end(rng, kinds=("RC",))
        if not self.world.windows[side] or self.model.ends[side, i].sq:
            raise Skip
        window = rng.randrange(self.world.windows[side])
        if (side, window) in self.model.windows and rng.random() < 0.95:
            raise Skip
        self.sync()
        length = rng.choice((8, 300, 2000))
        place = s.Place(self.fresh(side, length), length)
        weak = [r for (of, r), rights in self.model.regions.items()
                if of == side and r and rights is not None]
        if weak and rng.random() < 0.03:
            place = place._replace(region=rng.choice(weak))     # one that no window may be bound to
        self.push(s.Send(side, i, self.count((side, "send", i)), "bind", (place,), window=window,
                         rights=rng.choice((int(WRITE | READ | ATOMIC), int(WRITE), int(READ)))))
        self.unseen.pop((side, i), None)
        self.sync()

    def _unbind(self, rng):
        bound = [(w, at[0]) for (of, w), at in sorted(self.model.windows.items())
                 if at[0] in self.model.ends and not self.model.ends[at[0]].sq and
                 self.model.ends[at[0]].state == RTS]
        if not bound:
            raise Skip
        window, end = rng.choice(bound)
        self.sync()
        self.push(s.Send(*end, self.count((end[0], "send", end[1])), "local_inv", window=window))
        self.unseen.pop(end, None)
        self.sync()

    def spoil(self, rng, step, fault):
        if fault in ("", "short"):
            return
        side = step.side
        dead = [r for (of, r), rights in self.model.regions.items() if rights is None and
                of == (side if fault == "dead lkey" else 1 - side)]
        weak = [r for (of, r), rights in self.model.regions.items() if rights == int(LOCAL) and of != side]
        if fault in ("lkey", "dead lkey"):
            # (an atomic with such a fault may have been carried out: the word would be undefined)
            if not step.places or not step.places[0].length or fault == "dead lkey" and not dead or \
                    step.op in ("add", "swap"):
                raise Skip
            first = step.places[0]._replace(wrong=True) if fault == "lkey" else \
                step.places[0]._replace(region=rng.choice(dead))
            step.places = (first, *step.places[1:])
            return
        if step.far is None or not step.length:
            raise Skip
        if fault == "unaligned":
            if step.op not in ("add", "swap"):
                raise Skip
            step.far = step.far._replace(offset=step.far.offset + 1 + rng.randrange(7))
        elif fault == "rkey":
            step.far = step.far._replace(wrong=True)
        elif not (dead if fault == "dead rkey" else weak):
            raise Skip
        else:
            step.far = step.far._replace(region=rng.choice(dead if fault == "dead rkey" else weak))

    def _sync(self, rng):
        if rng.random() < 0.5:
            return self.sync()
        # what one side has sent reliably, and no more: its peer's completions stay where they are
        keys = {(*k, "send") for k in self.model.ends if rng.random() < 0.5}
        if keys:
            self.sync(keys)

    def _arm(self, rng):
        side = rng.randrange(2)
        if not self.world.channels[side] or self.model.waiting():
            raise Skip
        # what is there before makes no event, polled or not: a sender's completion is proof enough
        if rng.random() < 0.3 and all(q.kind == "RC" for q in self.world.queues):
            self.sync({(*k, "send") for k in self.model.ends})
        else:
            self.sync()
        self.push(s.Arm(side, rng.randrange(self.world.cqs[side]), rng.random() < 0.5))

    def _events(self, rng):
        if not self.world.channels[0]:
            raise Skip
        self.sync()
        self.push(s.Events(sorted(self.model.events)))

    def _asyncs(self, rng):
        self.sync()
        self.push(s.Asyncs(sorted(self.model.asyncs)))

    def _err(self, rng):
        side, i = self.end(rng, (RTS, SQD))
        self.sync()
        self.push(s.Err(side, i))
        self.sync()

    def _again(self, rng):
        i = rng.randrange(len(self.world.queues))
        states = [self.model.ends[side, i].state for side in (0, 1)]
        if states == [RTS, RTS] and rng.random() < 0.7:
            raise Skip
        self.sync()
        self.push(s.Asyncs(sorted(self.model.asyncs)))     # what is not taken may be void after a RESET
        self.push(s.Again(i, rng.random() < 0.3))
        for side in (0, 1):
            self.unseen.pop((side, i), None)

    def _drain(self, rng):
        key = self.end(rng)
        if self.model.ends[key].sq or self.model.ends[key].idle:
            raise Skip
        self.sync()
        self.push(s.Drain(*key))

    def _resume(self, rng):
        self.resume(self.end(rng, (SQD,)))

    def resume(self, key):
        self.sync()
        for step, _ in self.model.ends[key].sq:
            self.shared_use(self.model.rq_of(1 - key[0], key[1])[0], key)
            if step.op in ("add", "swap"):
                self.sync()
        before = {k: len(c) for k, c in self.model.completed.items()}
        last = self.model.ends[key].sq[-1][0] if self.model.ends[key].sq else None
        self.push(s.Resume(*key))
        if last is not None and not self.model.ends[key].sq and self.model.ends[key].state == RTS and \
                not (last.signaled or self.world.queues[key[1]].sig_all[key[0]]):
            self.unseen[key] = last
        if before != {k: len(c) for k, c in self.model.completed.items()} or self.model.dropped:
            self.sync()

    def _resize(self, rng):
        side = rng.randrange(2)
        self.push(s.Resize(side, rng.randrange(self.world.cqs[side]), rng.choice((700, 1000, 1500, 2000))))

    def _limit(self, rng):
        side = rng.randrange(2)
        if not self.world.srqs[side]:
            raise Skip
        srq = rng.randrange(self.world.srqs[side])
        self.sync()
        if self.model.shared[side, srq]:
            self.push(s.Limit(side, srq, rng.randint(0, len(self.model.shared[side, srq]))))

    def _reg(self, rng):
        side = rng.randrange(2)
        self.push(s.Reg(side, self.next_region, rng.choice((ALL, ALL, int(LOCAL), int(LOCAL | READ)))))
        self.next_region += 1

    def _dereg(self, rng):
        side = rng.randrange(2)
        used = {p.region for key, e in self.model.ends.items() for step, _ in e.sq for p in
                (step.places if key[0] == side else (step.far,) if step.far else ())}
        queues = [e.rq for (of, _), e in self.model.ends.items() if of == side] + \
            [q for (of, _), q in self.model.shared.items() if of == side]
        used |= {p.region for q in queues for r in q for p in r.places}
        can = [r for (of, r), rights in self.model.regions.items()
               if of == side and r and rights is not None and r not in used]
        if not can:
            raise Skip
        self.sync()
        self.push(s.Dereg(side, rng.choice(can)))

    def finish(self):
        """Everything ends, and all that is due is taken."""
        self.sync()
        for side, i in sorted(self.model.ends, key=lambda k: not self.model.ends[k].sq):
            if self.model.ends[side, i].state != ERR:
                self.push(s.Err(side, i))
                self.sync()
        if self.world.channels[0]:
            self.push(s.Events(sorted(self.model.events)))
        self.push(s.Asyncs(sorted(self.model.asyncs)))


def plan(world, raw, rules=Rules(), more=More()):
    """(steps, the model after them)"""
    planner = Planner(world, rules, more)
    for seed in raw:
        planner.add(seed)
    planner.finish()
    return planner.program, planner.model
