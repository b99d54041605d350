"""rocecomm soft: any program with the device in user space preloaded, in this process's place."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import ROOT, clean_environment, rocecomm

from rocecomm import soft_command
from rocecomm.errors import RocecommError

LIBRARY = os.environ.get("ROCECOMM_SOFTNIC", str(ROOT / "rocecomm" / "softnic" / "libsoftnic.so"))
PRELOAD = os.environ.get("LD_PRELOAD", "")       # a sanitizer's runtime


def soft(*arguments, **env):
    return rocecomm("soft", *arguments, **env)


def test_path():
    done = soft("--path")
    assert (done.returncode, done.stdout, done.stderr) == (0, LIBRARY + "\n", "")


def test_help_without_a_command():
    done = soft()
    assert done.returncode == 0 and done.stderr == ""
    examples = done.stdout.partition("examples:\n")[2].strip().splitlines()
    assert len(examples) == 3 and all("rocecomm soft" in line for line in examples)
    assert done.stdout == soft("--help").stdout and "soft" in rocecomm("--help").stdout


@pytest.mark.parametrize("dashes", [["--"], []])
def test_arguments_reach_the_program_as_they_are(dashes):
    text = ["-d", "--", "a b", "", "--devices", "é*$x"]
    done = soft(*dashes, sys.executable, "-c", "import sys; print(sys.argv[1:])", *text)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{text}\n", "")


def test_the_device_is_there_and_the_options_reach_it():
    code = ("import ctypes, os; n = ctypes.c_int();"
            "ctypes.CDLL(None).ibv_get_device_list(ctypes.byref(n));"
            "names = ['DEVICES', 'MTU', 'DIR', 'PART_ID'];"
            "print(n.value, [os.environ.get('ROCECOMM_SOFT_' + x) for x in names])")
    assert soft("--", sys.executable, "-c", code).stdout == "1 [None, None, None, None]\n"
    done = soft("--devices", 3, "--mtu", 1024, "--dir", "/x", "--part-id=7", "--", sys.executable, "-c", code)
    assert done.stdout == "3 ['3', '1024', '/x', '7']\n"


def test_existing_preloads_stay_behind_ours():
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
                if re.search(r"/libm\.so|/libm-", line) or "/libc.so" in line or "/libc-" in line)
    code = "import os; print(os.environ['LD_PRELOAD'])"
    before = f"{PRELOAD} {libc}:{LIBRARY}".strip()
    done = soft("--", sys.executable, "-c", code, LD_PRELOAD=before)
    assert done.stdout.strip() == ":".join([*PRELOAD.split(), LIBRARY, libc])


def test_a_sanitizer_comes_first():
    before = {"LD_PRELOAD": "/a/other.so /usr/lib/libasan.so.8 libubsan.so"}
    env = soft_command.environment("/l.so", base=before)
    assert env["LD_PRELOAD"] == "/usr/lib/libasan.so.8:libubsan.so:/l.so:/a/other.so"


def test_exit_status_and_signals_are_the_programs_own():
    assert soft("--", "sh", "-c", "exit 7").returncode == 7
    assert soft("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    # no process between: the program has our process id
    process = subprocess.Popen([sys.executable, "-m", "rocecomm", "soft", "sh", "-c", "echo $$"], text=True,
                               stdout=subprocess.PIPE, env=clean_environment(), cwd=ROOT)
    assert process.communicate(timeout=40)[0] == f"{process.pid}\n"


def test_a_broken_pipe_ends_the_program():
    """Python ignores SIGPIPE, the program must not inherit that."""
    done = soft("--", sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGPIPE).name)")
    assert done.stdout == "SIG_IGN\n"            # that is Python's own doing, so ask a shell
    done = soft("--", "sh", "-c", "grep SigIgn /proc/self/status")
    assert not int(done.stdout.split()[1], 16) & 1 << (signal.SIGPIPE - 1)


@pytest.mark.parametrize("command, status, words", [
    (["no-such-program-here"], 127, "cannot run 'no-such-program-here': no such program"),
    (["/etc/passwd"], 126, "cannot run '/etc/passwd': it may not be executed"),
])
def test_a_command_that_cannot_be_run(command, status, words):
    done = soft("--", *command)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"rocecomm soft: {words}\n")


@pytest.mark.parametrize("arguments, word", [
    (["--devices", "0", "true"], "from 1 to 8"), (["--devices", "x", "true"], "'x'"),
    (["--mtu", "9000", "true"], "9000"), (["--nope", "true"], "--nope"), (["--path", "true"], "--path"),
])
def test_usage_errors(arguments, word):
    done = soft(*arguments)
    assert done.returncode == 2 and word in done.stderr.splitlines()[-1] and done.stdout == ""


def test_a_library_that_cannot_be_preloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCECOMM_SOFTNIC", str(tmp_path / "nope.so"))
    with pytest.raises(RocecommError, match="there is no .*nope.so; ROCECOMM_SOFTNIC names it"):
        soft_command.library()
    (tmp_path / "a b").mkdir()
    shutil.copy(LIBRARY, tmp_path / "a b" / "l.so")
    done = soft("--", "true", ROCECOMM_SOFTNIC=str(tmp_path / "a b" / "l.so"))
    assert done.returncode == 1 and "space" in done.stderr and done.stderr.count("\n") == 1
