"""The end of the interpreter, in every way and every state (cases H4, C11)."""

import json
import subprocess
import sys
import time

import pytest
from worlds import ROOT, die_with_parent, rank_environment

WAYS = {
    "end of script": ("", 0), "sys.exit(3)": ("sys.exit(3)", 3),
    "uncaught": ("raise ZeroDivisionError('mine')", 1), "os._exit": ("os._exit(0)", 0),
    "in a cycle": ("class A: pass\na = A(); a.me = a; a.comm = comm; del comm, a", 0),
    "closed before": ("closed = True; comm.close()", 0),
    "closed at exit": ("import atexit\natexit.register(comm.close)", 0),
    "a thread waits": ("thread(lambda: comm.recv(x, comm.rank, tag=77))", 0),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -2),
}

#: What is under way when it ends. Daemon threads that wait end with the interpreter in silence; that another
#: rank has left is theirs to hear of.
STATES = {
    "idle": "",
    "pending": "pending = comm.irecv(np.zeros(4), other, tag=5)",
    "in recv": "thread(lambda: comm.recv(x, other, tag=71))",
    "in recv from any": "thread(lambda: comm.recv(x, rocecomm.ANY_SOURCE, tag=71))",
    "in send": "thread(lambda: comm.send(big, other, tag=72))",
    "in barrier": "if comm.rank == 0: thread(comm.barrier)",
    "in probe": "thread(lambda: comm.probe(other, tag=71))",
    "awaited": """
async def awaits():
    await comm.irecv(x, other, tag=71)
thread(lambda: asyncio.run(awaits()))""",
    "one-sided": """
region, found = comm.register(bytearray(4 << 20), "rw"), bytearray(64)
comm.sendrecv(region.descriptor(), other, found, other)
remote, data = comm.open(bytes(found)), np.ones(4 << 20, "u1")
flying = [comm.iwrite(data, remote) for _ in range(4)] + [comm.iread(np.empty(4 << 20, "u1"), remote)]""",
    "sent to nobody": """
pending = [comm.isend(x, other, tag=73) for _ in range(50)] + [comm.isend(big, other)]""",
    "the other has left": """
if comm.rank == 1:
    closed = True; comm.close()
else:
    try:
        comm.recv(x, 1, tag=74)
        raise SystemExit('nobody left')
    except rocecomm.PeerDeadError:
        pass""",
    "the other is dead": """
if comm.rank == 1:
    os._exit(77)
pending = [comm.isend(x, 1), comm.irecv(np.zeros(4), 1)]""",
}

SCRIPT = """
import asyncio, os, signal, sys, threading, time
import numpy as np
import rocecomm
comm = rocecomm.init()
other = 1 - comm.rank
x, big, closed = np.zeros(4), np.zeros(1 << 18), False
comm.sendrecv(x, other, np.zeros(4), other)
def thread(call):
    def run():
        try:
            call()
        except rocecomm.PeerDeadError:
            pass
        except rocecomm.ClosedError:
            if not closed:
                raise
    threading.Thread(target=run, daemon=True).start()
"""

DELIVERS = """
pending = comm.irecv(np.zeros(4), other, tag=5)
if comm.rank == 0:
    comm.send(np.full(1 << 17, 3.0), 1, tag=6)
else:
    time.sleep(0.3)
    comm.recv(big, 0, tag=6)
    assert (big[:1 << 17] == 3).all()
"""


@pytest.mark.parametrize("name", ["end of script"])
def test_the_end_of_the_script(device, scale, tmp_path, name):
    end_of_the_interpreter(device, scale, tmp_path, name)


# the other ways out do not depend on the device, and a slow machine starts Python slowly
@pytest.mark.parametrize("name", [n for n in WAYS if n not in ("end of script", "killed", "Ctrl-C")])
def test_the_end_of_the_interpreter(scale, tmp_path, name):
    end_of_the_interpreter("soft0", scale, tmp_path, name)


def end_of_the_interpreter(device, scale, tmp_path, name):
    code, expected = WAYS[name]
    (tmp_path / "s.py").write_text(SCRIPT + DELIVERS + code)
    start = time.monotonic()
    ranks = [subprocess.Popen([sys.executable, tmp_path / "s.py"], cwd=ROOT, text=True,
                              env=rank_environment(r, 2, tmp_path, device),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for r in range(2)]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=40 * scale.time)
            says_only(name, rank.returncode, expected, out, err)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    assert time.monotonic() - start < 15 * scale.time


def says_only(name, code, expected, out, err):
    """The exit status is right, and on stderr stands what the user's own code says, nothing else."""
    assert code == expected and out == "", (code, out, err)
    if name == "uncaught":
        assert err.count("Traceback") == 1 and err.endswith("ZeroDivisionError: mine\n"), err
    elif name == "Ctrl-C":
        assert err.count("Traceback") == 1 and err.endswith("KeyboardInterrupt\n"), err
    else:
        assert err == ""
    assert "Exception ignored" not in err


# What threads are in at the end, and who closes; how many errors are shown on stderr.
THREADS = {
    # the interpreter ends, so nobody waits for it: finally and `with` are carried out, and that is all
    "waits": ("t(lambda: comm.recv(x, 0))", 0, "let go"),
    "begins then": ("t(lambda: (ended.wait(), comm.recv(x, 0)))\natexit.register(ended.set)", 0, "let go"),
    "awaits": ("async def f(): await comm.irecv(x, 0)\nt(lambda: asyncio.run(f()))", 0, "let go"),
    # it is closed in the middle of the program, and then that is told
    "closed": ("a = t(lambda: comm.recv(x, 0))\ncomm.close()\na.join()", 1, "let go"),
    # a thread that is joined at the end is told, too
    "not a daemon": ("t(lambda: (threading.main_thread().join(), comm.recv(x, 0)), daemon=False)\n"
                     "comm.close()", 1, "let go"),
    # and so is who calls in an atexit handler of its own
    "atexit": ("def late():\n    try: comm.recv(x, 0)\n"
               "    except rocecomm.ClosedError: print('let go', end='')\n"
               "comm.close(); atexit.register(late)", 0, "let go"),
}

ALONE = """
import asyncio, atexit, sys, threading
import rocecomm
ended, x = threading.Event(), bytearray(8)
atexit.register(lambda: [a.join(20) for a in started])      # is carried out after the communicator's
started = []
comm = rocecomm.init(0, 1)
def t(call, daemon=True):
    inside = threading.Event()
    def run():
        inside.set()
        try:
            call()
        finally:
            sys.stdout.write('let go')
    started.append(threading.Thread(target=run, daemon=daemon))
    started[-1].start()
    inside.wait()
    return started[-1]
"""


@pytest.mark.parametrize("name", THREADS)
def test_daemon_threads_at_the_end(scale, tmp_path, name):
    code, complaints, said = THREADS[name]
    done = subprocess.run([sys.executable, "-c", ALONE + code], cwd=ROOT, text=True, capture_output=True,
                          timeout=40 * scale.time, env=rank_environment(0, 1, tmp_path, "soft0"))
    assert (done.returncode, done.stdout) == (0, said), done
    assert done.stderr.count("Traceback") == complaints, done.stderr
    assert done.stderr.count("ClosedError") == complaints and (complaints or done.stderr == ""), done.stderr


# --------------------------------------------------------------------------- fifty of each

#: Forks ranks that are as a fresh interpreter with numpy imported, and end as one: a rank goes on behind the
#: loop, to the end of this script. Several worlds at once. Prints each rank's exit status and when it ended.
HOST = """
import ctypes, json, os, signal, sys, time
import numpy, rocecomm, asyncio
runs, folder, at_once = json.load(sys.stdin)
end, living, ended, forked, code = time.monotonic() + 100, {}, {}, -1, None
todo = list(range(len(runs)))
while (todo or living) and time.monotonic() < end:
    while todo and len(living) < 2 * at_once:
        number = todo.pop(0)
        for rank in range(2):
            forked = os.fork()
            if forked == 0:
                break
            living[forked] = number, rank
        if forked == 0:
            break
    if forked == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        for fd, name in ((1, 'out'), (2, 'err')):
            os.dup2(os.open(f'{folder}/{name}-{number}-{rank}', os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
        os.environ.update(ROCECOMM_RANK=str(rank), ROCECOMM_LOCAL_RANK=str(rank),
                          ROCECOMM_JOB_ID=f'{folder}-{number}')
        code, way = runs[number]
        del runs, todo, living, ended
        break
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        ended[living.pop(pid)] = os.waitstatus_to_exitcode(status), time.monotonic()
    else:
        time.sleep(0.002)
if code is None:
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps([[*key, *value] for key, value in ended.items()]))
else:
    exec(compile(code, 'state', 'exec'))
    with open(f'{folder}/begun-{number}-{rank}', 'w') as f:
        f.write(repr(time.monotonic()))
    exec(compile(way, 'way', 'exec'))
"""


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WAYS)
def test_fifty_ends_of_each_kind(scale, tmp_path, name):
    states, rounds = list(STATES), scale.rounds(5 * len(STATES))
    runs = [(SCRIPT + STATES[states[i % len(states)]], WAYS[name][0]) for i in range(rounds)]
    host = subprocess.run([sys.executable, "-c", HOST], cwd=ROOT, text=True, capture_output=True,
                          timeout=200 * scale.time, input=json.dumps([runs, str(tmp_path), 6]),
                          preexec_fn=die_with_parent, env=rank_environment(0, 2, tmp_path, "soft0"))
    assert host.returncode == 0 and host.stderr == "", host.stderr
    ended = json.loads(host.stdout)
    assert len(ended) == 2 * rounds, "some did not end"
    for number, rank, code, at in ended:
        state = states[number % len(states)]
        err, out = ((tmp_path / f"{kind}-{number}-{rank}").read_text() for kind in ("err", "out"))
        if state == "the other is dead" and rank == 1:
            says_only("", code, 77, out, err)
            continue
        says_only(name, code, WAYS[name][1], out, err)
        took = at - float((tmp_path / f"begun-{number}-{rank}").read_text())
        # 5 s alone; here six worlds share the CPUs, and some wait 4 s for a receiver
        assert took < 10 * scale.time, (state, rank, took)
