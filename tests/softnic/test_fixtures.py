"""rocecomm.testing: the fixtures that users import, run in a pytest of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rocecomm.errors import VerbsError
from rocecomm.verbs import soft

CONFTEST = 'pytest_plugins = ["rocecomm.testing"]\n'


@pytest.fixture
def user(tmp_path):
    """Runs a user's test file in a fresh pytest: (return code, its words)."""
    (tmp_path / "conftest.py").write_text(CONFTEST)

    def run(code, *arguments, **env):
        (tmp_path / "test_user.py").write_text(code)
        full = {k: v for k, v in os.environ.items() if not k.startswith(("ROCECOMM_SOFT", "PYTEST"))}
        full.update(PYTHONPATH=str(Path(__file__).resolve().parents[2]), **env)
        done = subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-m", "pytest", "-q", "-p", "no:cacheprovider",
             *arguments, "test_user.py"], cwd=tmp_path, env=full, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=100)
        return done.returncode, done.stdout

    return run


def left_over():
    """What softnic or the fixtures have in the usual place."""
    return {p.name for p in Path("/dev/shm").glob("rocecomm-fixture-*")}


def test_every_fixture(user):
    before = left_over()
    code, words = user('''
import os, subprocess, sys
import numpy as np
from rocecomm import verbs as v
from rocecomm.verbs import soft
seen = []

def test_dir(soft_dir):
    assert os.environ["ROCECOMM_SOFT_DIR"] == soft_dir and os.listdir(soft_dir) == []

def test_device(soft_device, soft_dir):
    assert soft_device.name == "soft0" and os.listdir(soft_dir)
    seen.append((soft_device, soft_dir))

def test_device_is_gone():
    (ctx, where), = seen
    assert ctx.closed and not os.path.exists(where) and "ROCECOMM_SOFT_DIR" not in os.environ

def test_pair(soft_pair):
    a, b = soft_pair.a, soft_pair.b
    a.data[:] = np.arange(4096) % 251
    b.qp.post_recv(b.mr, wr_id=5)
    a.qp.post_send(v.IBV_WR_SEND, a.mr, wr_id=6)
    (sent,), (got,) = a.wait(), b.wait()
    assert (sent.wr_id, got.wr_id, got.byte_len) == (6, 5, 4096) and sent.ok and got.ok
    assert (b.data == a.data).all()

def test_pairs(make_soft_pair):
    small, datagram = make_soft_pair(nbytes=64, timeout=10), make_soft_pair(v.IBV_QPT_UC)
    assert len(small.a.data) == 64 and small.a.qp.query().timeout == 10
    assert datagram.a.qp.query().qp_type == v.IBV_QPT_UC
    seen.append(small)

def test_pairs_are_gone():
    assert seen[-1].a.ctx.closed and seen[-1].b.ctx.closed

def test_faults(soft_pair, soft_faults):
    fault = soft_faults("rem_op_err", op="send")
    soft_pair.a.qp.post_send(v.IBV_WR_SEND, soft_pair.a.mr)
    assert soft_pair.a.wait()[0].status == v.IBV_WC_REM_OP_ERR and fault.hit == 1
    seen.append(fault)

def test_faults_are_gone(soft_pair):
    assert not seen[-1].active
    soft_pair.b.qp.post_recv(soft_pair.b.mr)
    soft_pair.a.qp.post_send(v.IBV_WR_SEND, soft_pair.a.mr)
    assert soft_pair.a.wait()[0].ok

def test_faults_of_children(soft_dir, soft_faults):
    soft_faults.environment("general_err:op=send")
    code = """if True:
        from rocecomm.testing import Pair
        from rocecomm import verbs as v
        pair = Pair()
        pair.a.qp.post_send(v.IBV_WR_SEND, pair.a.mr)
        print(pair.a.wait()[0].status.name)
        pair.close()"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout == "IBV_WC_GENERAL_ERR\\n"
    assert os.listdir(soft_dir) == []

def test_environment_is_gone():
    assert "ROCECOMM_SOFT_FAULT" not in os.environ
''')
    assert code == 0 and "10 passed" in words, words
    assert left_over() == before


def test_a_test_that_fails_leaves_nothing(user):
    before = left_over()
    code, words = user('''
def test_fails(soft_pair, soft_faults):
    soft_faults("drop")
    soft_pair.a.wait(timeout=0.1)

def test_dies_in_setup(make_soft_pair):
    make_soft_pair(nbytes=-1)

def test_next(soft_pair):
    assert soft_pair.a.qp.query()
''')
    assert code == 1 and "2 failed, 1 passed" in words, words
    assert "0 of 1 completions came in 0.1 s" in words
    assert left_over() == before


def test_names_are_listed_with_a_sentence(user):
    code, words = user("", "--fixtures")
    for name in ("soft_dir", "soft_device", "soft_pair", "make_soft_pair", "soft_faults"):
        assert f"\n{name} -- " in words, words
    assert code == 0


PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/test-rdma-code-without-hardware.md"


def test_the_page_shows_what_works(user):
    """The tests that the how-to page shows pass, and what it sets is understood."""
    text = PAGE.read_text()
    code, words = user(re.search(r"```python\n# test_errors\.py\n(.*?)```", text, re.S)[1])
    assert code == 0 and "2 passed" in words, words
    shown = re.findall(r'ROCECOMM_SOFT_FAULT="([^"]*)"|softnic_inject\(\w+, "([^"]*)"', text)
    assert len(shown) >= 4
    for rules in map("".join, shown):
        soft.inject(rules).remove()


def test_every_kind_and_key_of_the_page_is_known():
    section = PAGE.read_text().partition("\n## Make it fail\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`[ :|]", section, re.M)
    kinds = [row for row in rows if "soft_" not in row]
    assert {"delay", "drop", "rnr", "access", "port_down", "peer_death", "cq_overrun"} <= set(kinds)
    for kind in kinds:
        needs = {"delay": {"seconds": 1}, "refuse": {"verb": "reg_mr"}}.get(kind, {})
        soft.inject(kind, **needs).remove()
    for key in re.findall(r"`(\w+)=", section):
        with pytest.raises(VerbsError) as caught:
            soft.inject(f"{'refuse' if key in ('verb', 'errno') else 'drop'}:{key}=?")
        assert "it takes op, qp," not in str(caught.value), key
