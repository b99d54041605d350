"""Where devices depart from the specification, found by trying, and known by name.

Each departure is one field of `Rules` and a small program that tells the values apart. A
device that answers with neither of them fails the tests. docs/reference/device-differences.md
says the same in words, with the versions on which each was seen.
"""

from typing import NamedTuple

from differential.model import Model, Rules
from differential.steps import ARENA, QUEUES, Config, Err, Recv, Reg, Remote, Send, Sge, Sync

from rocecomm import verbs as v


class Departure(NamedTuple):
    name: str
    field: str          # of Rules
    value: object       # that a device which departs has
    seen: str           # where
    steps: tuple        # after the registration of all memory as regions 0 and 1


RXE = "rdma_rxe, Linux 6.1"
DATA = (Sge(0, 8, 100),)

DEPARTURES = (
    Departure("a bad local key of a send is an operation error", "gather_key",
              v.IBV_WC_LOC_QP_OP_ERR, RXE, (Send(0, 1, "send", (Sge(0, 8, 100, True),)),)),
    Departure("a bad receive is an operation error", "bad_receive", v.IBV_WC_LOC_QP_OP_ERR, RXE,
              (Recv(1, 1, (Sge(1, 0, 100, True),)), Send(0, 2, "send", DATA))),
    Departure("a receive that is too short is an operation error", "short_receive",
              (v.IBV_WC_REM_OP_ERR, v.IBV_WC_LOC_QP_OP_ERR), RXE,
              (Recv(1, 1, (Sge(1, 0, 99),)), Send(0, 2, "send", DATA))),
    Departure("a refused write with immediate data completes a receive", "refused_immediate",
              v.IBV_WC_REM_ACCESS_ERR, RXE,
              (Recv(1, 1), Recv(1, 2), Send(0, 3, "write_imm", DATA, Remote(1, 0, True)))),
    Departure("an unaligned atomic is refused when it is posted", "unaligned_atomic", "refused", RXE,
              (Send(0, 1, "add", (Sge(0, 8, 8),), Remote(1, 4)),)),
    Departure("a receive posted in the error state stays", "late_receive", "stays", RXE,
              (Err(0), Sync, Recv(0, 1, (Sge(0, 0, 8),)))),
    Departure("a local fault behind a request that waits stops both", "fault_behind_waiting", False, RXE,
              (Send(0, 1, "send", DATA), Send(0, 2, "write", (Sge(0, ARENA - 9, 10),), Remote(1, 0)),
               Recv(1, 3, (Sge(1, 0, 100),)))),
    Departure("a fence waits for what is behind it when sent again", "fence_sent_again", False, RXE,
              (Send(0, 1, "send", DATA), Send(0, 2, "read", DATA, Remote(1, 512), fence=True),
               Recv(1, 3, (Sge(1, 0, 100),)))),
)


def find_rules(driver):
    """The Rules of the driver's device, and the departures that they contain.

    Raises AssertionError where it does neither what the specification says nor what is known.
    """
    rules, found = Rules(), []
    for d in DEPARTURES:
        known = Rules()._replace(**{d.field: d.value})
        # the departure first: it may be that nothing comes, and then the other way takes long
        if not driver.differences(Config(), complete(d.steps, known), known, quiet=driver.patience / 100):
            rules = rules._replace(**{d.field: d.value})
            found.append(d)
            continue
        other = driver.differences(Config(), complete(d.steps, Rules()), Rules())
        assert not other, f"{d.name}: the device departs in a way that is not known: {other}"
    return rules, found


def complete(steps, rules, config=Config()):
    """A program of `steps` with all memory registered, as regions 0 and 1, and with what is
    due filled in where it says Sync; all is waited for at the end."""
    model = Model(config, rules)
    out = []
    for step in (Reg(0, 0, 0, ARENA), Reg(1, 1, 0, ARENA), *steps, Sync):
        if step is Sync:
            step = Sync({q: model.due(*q) for q in QUEUES})
        model.apply(step)
        out.append(step)
    return out
