"""Stock programs meet the faults of ROCECOMM_SOFT_FAULT as they would meet a NIC's."""

import re

import conftest
import pytest
from stock.programs import Programs


@pytest.fixture
def with_faults(need):
    """``with_faults(rules)``: programs on soft0 that find these rules in their environment."""
    need("ibv_rc_pingpong", "ib_write_bw")
    return lambda rules: Programs("soft0", conftest.SLOW, ROCECOMM_SOFT_FAULT=rules)


@pytest.mark.parametrize("program", [f"ibv_{kind}_pingpong" for kind in ("rc", "uc", "ud", "srq")])
@pytest.mark.parametrize("events", [(), ("-e",)], ids=["polling", "events"])
def test_delayed_messages_arrive(with_faults, program, events):
    outputs = with_faults("delay:ms=1,op=send").pair(program, "-g", 1, "-n", 50, "-c", *events)
    for output in outputs:
        per_message = float(re.search(r"= ([\d.]+) usec/iter", output)[1])
        assert per_message > 1000 / 16, output      # sixteen queue pairs at most answer at a time
        assert "invalid data" not in output, output


@pytest.mark.parametrize("program, options", [
    ("ib_write_bw", ()), ("ib_send_bw", ("-e",)), ("ib_read_lat", ()), ("ib_send_bw", ("-q", "4"))])
def test_perftest_survives_what_passes(with_faults, program, options):
    rules = "delay:us=300,p=0.05,seed=1;rnr:op=send,ms=1,p=0.02,seed=2;drop:lost=1,times=1,after=50"
    server, client = with_faults(rules).pair(program, "-n", 500, *options)
    assert "Completion with error" not in client + server, client + server
    assert re.search(r"^ \d+ +(500|2000) ", client, re.M), client


@pytest.mark.parametrize("rules, program, words", [
    ("general_err:after=10", "ibv_rc_pingpong", "Failed status general error"),
    ("access:after=10", "ib_write_bw", "(?s)Completion with error.*status 10"),
    ("port_down:after=5", "ibv_rc_pingpong", "transport retry counter exceeded"),
    ("peer_death:after=5", "ib_send_lat", "(?s)Completion with error.*status 12")])
def test_a_failed_request_is_named(with_faults, rules, program, words):
    programs = with_faults(rules)
    programs.seconds = 5 * conftest.SLOW        # the other end may wait for ever, as beside a NIC
    with pytest.raises(AssertionError, match=words):
        programs.pair(program, "-n", 100, *(("-g", 1) if program.startswith("ibv") else ()))


def test_rules_that_cannot_be_used_are_said_on_stderr(with_faults):
    output = with_faults("delay:us=5;drop:p=much").alone("ibv_devinfo", "-d", "soft0", expect=1)
    assert 'softnic: ROCECOMM_SOFT_FAULT: the rule "drop:p=much" has p=much' in output, output
