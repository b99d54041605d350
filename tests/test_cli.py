"""The command line: rocecomm run, info, devices."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def clean_environment():
    skip = ("ROCECOMM_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(skip)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
                 "PYTHONUNBUFFERED"):
        env.pop(name, None)
    env["PYTHONPATH"] = str(ROOT)
    return env


def rocecomm(*arguments, timeout=40, **env):
    return subprocess.run([sys.executable, "-m", "rocecomm", *map(str, arguments)], timeout=timeout,
                          env={**clean_environment(), **env}, capture_output=True, text=True,
                          cwd=ROOT)


@contextlib.contextmanager
def running(*arguments, **env):
    """A ``rocecomm run`` in the background, ended at the end whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rocecomm", "run", *map(str, arguments)], text=True, cwd=ROOT,
        env={**clean_environment(), **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def pids_in(folder, count):
    """Waits until ``count`` ranks wrote their pids; a rank writes as it starts."""
    wait_for(lambda: [path.stat().st_size > 0 for path in folder.glob("pid-*")] == [True] * count, 20)
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]


SLEEPER = 'echo $$ > "$0/part-$ROCECOMM_RANK"; mv "$0/part-$ROCECOMM_RANK" ' \
          '"$0/pid-$ROCECOMM_RANK"; '


def test_ranks_know_who_they_are():
    program = "import os; print(*(os.environ['ROCECOMM_' + n] for n in " \
              "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'JOB_ID')))"
    one = rocecomm("run", "-n", 3, sys.executable, "-c", program)
    two = rocecomm("run", "-n", 3, sys.executable, "-c", program)
    assert one.returncode == 0 and one.stderr == ""
    rows = sorted(line.split() for line in one.stdout.splitlines())
    assert [row[:3] for row in rows] == [[str(r), "3", str(r)] for r in range(3)]
    jobs = {row[3] for row in rows} | {line.split()[3] for line in two.stdout.splitlines()}
    assert len(jobs) == 2 and all(len(job) == 32 for job in jobs)


def test_a_job_without_any_setting(tmp_path, device):
    script = tmp_path / "job.py"
    script.write_text("import numpy, rocecomm\n"
                      "with rocecomm.init() as comm:\n"
                      "    a = comm.all_reduce(numpy.full(5, comm.rank + 1.0))\n"
                      "    print(comm.rank, comm.size, a[0])\n")
    done = rocecomm("run", "-n", 4, script, ROCECOMM_IB_HCA=device)
    assert sorted(done.stdout.splitlines()) == [f"{r} 4 10.0" for r in range(4)], done.stderr
    assert done.returncode == 0 and done.stderr == ""


def test_lines_of_ranks_do_not_mix():
    script = "import sys\nfor i in range(300): print('a' * 50, 'b' * 50)"
    done = rocecomm("run", "-n", 3, sys.executable, "-u", "-c", script)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["a" * 50 + " " + "b" * 50] * 900


def test_modules_arguments_and_labels():
    done = rocecomm("run", "-n", 2, "--label", "-m", "json.tool", "--help")
    assert done.returncode == 0
    assert {line[:4] for line in done.stdout.splitlines()} == {"[0] ", "[1] "}
    done = rocecomm("run", "-n", 1, "echo", "-n", "--", "a b")
    assert done.stdout == "-- a b"
    done = rocecomm("run", "-n", 2, "-l", "sh", "-c", "printf no-newline; echo bad >&2")
    assert sorted(done.stdout.splitlines()) == ["[0] no-newline", "[1] no-newline"]
    assert sorted(done.stderr.splitlines()) == ["[0] bad", "[1] bad"]


def test_the_first_failure_is_named_and_returned(tmp_path):
    start = time.monotonic()
    done = rocecomm("run", "-n", 3, "--grace", 0.5, "sh", "-c",
                    SLEEPER + "[ $ROCECOMM_RANK = 1 ] && exit 7; sleep 60", tmp_path)
    assert done.returncode == 7 and time.monotonic() - start < 20
    assert "rank 1 of 3 ended with status 7" in done.stderr
    assert "ending ranks 0, 2 with SIGTERM" in done.stderr
    assert not any(map(alive, pids_in(tmp_path, 3)))


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    done = rocecomm("run", "-n", 2, "--grace", 0.2, "sh", "-c",
                    "[ $ROCECOMM_RANK = 1 ] && kill -9 $$; sleep 60")
    assert done.returncode == 128 + 9 and "rank 1 of 2 ended with signal SIGKILL" in done.stderr


def test_others_may_end_by_themselves_in_the_grace_time():
    done = rocecomm("run", "-n", 2, "sh", "-c",
                    "[ $ROCECOMM_RANK = 1 ] && exit 3; sleep 0.5; echo tidy")
    assert done.returncode == 3 and done.stdout == "tidy\n" and "ending" not in done.stderr


def test_ctrl_c_once_ends_all_and_each_rank_sees_it_once(tmp_path):
    program = ("import os, signal, sys, time\n"
               "count = 0\n"
               "def note(*_):\n"
               "    global count\n"
               "    count += 1\n"
               "signal.signal(signal.SIGINT, note)\n"
               "open(sys.argv[1] + '/pid-' + os.environ['ROCECOMM_RANK'], 'w')"
               ".write(str(os.getpid()))\n"
               "end = time.time() + 20\n"
               "while not count and time.time() < end: time.sleep(0.01)\n"
               "time.sleep(0.3)\n"
               "print('seen', count)\n")
    with running("-n", "3", sys.executable, "-u", "-c", program, tmp_path) as job:
        pids = pids_in(tmp_path, 3)
        os.killpg(job.pid, signal.SIGINT)              # as the terminal does
        out, err = job.communicate(timeout=20)
    assert out.splitlines() == ["seen 1"] * 3 and job.returncode == 130
    assert err == "" and not any(map(alive, pids))


def test_ranks_that_ignore_ctrl_c_are_ended(tmp_path):
    with running("-n", "2", "--grace", "0.3", "sh", "-c",
                 "trap '' INT TERM; " + SLEEPER + "while :; do sleep 0.1; done", tmp_path) as job:
        pids = pids_in(tmp_path, 2)
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=20)
    assert job.returncode == 130 and "SIGKILL" in err and not any(map(alive, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ending_signals(tmp_path, number):
    with running("-n", "2", "sh", "-c", SLEEPER + "sleep 60", tmp_path) as job:
        pids = pids_in(tmp_path, 2)
        job.send_signal(number)
        job.communicate(timeout=20)
    assert job.returncode == 128 + number and not any(map(alive, pids))


def test_other_signals_are_passed_on(tmp_path):
    with running("-n", "2", "sh", "-c",
                 "trap 'echo usr1; exit 0' USR1; " + SLEEPER + "while :; do sleep 0.05; done",
                 tmp_path) as job:
        pids_in(tmp_path, 2)
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=20)
    assert (job.returncode, out, err) == (0, "usr1\nusr1\n", "")


def test_what_a_rank_started_does_not_outlive_it(tmp_path):
    done = rocecomm("run", "-n", 2, "sh", "-c",
                    'sleep 60 & echo $! > "$0/pid-$ROCECOMM_RANK"', tmp_path)
    assert done.returncode == 0
    pids = pids_in(tmp_path, 2)
    wait_for(lambda: not any(map(alive, pids)))


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    with running("-n", "2", "sh", "-c", SLEEPER + "exec sleep 60", tmp_path) as job:
        pids = pids_in(tmp_path, 2)
        job.kill()
        wait_for(lambda: not any(map(alive, pids)))


def test_a_program_that_does_not_exist():
    done = rocecomm("run", "-n", 2, "/no/such/program")
    assert done.returncode == 127 and "/no/such/program" in done.stderr


@pytest.mark.parametrize("arguments", [("run", "-n", "0", "x"), ("run", "x"), ("fly",), (),
                                       ("run", "-n", "2", "--grace", "-1", "x")])
def test_usage_errors(arguments):
    done = rocecomm(*arguments)
    assert done.returncode == 2 and "usage: rocecomm" in done.stderr


def test_devices_and_info(device):
    assert device in rocecomm("devices").stdout.split()
    done = rocecomm("info", ROCECOMM_IB_HCA=device)
    assert done.returncode == 0 and done.stderr == ""
    assert f"would use {device} port 1" in done.stdout and "GID" in done.stdout


def test_info_config():
    done = rocecomm("info", "--config", ROCECOMM_IB_TC="104", ROCECOMM_IB_HCAS="x",
                    ROCECOMM_SECRET="a secret that stays one")
    row = next(line for line in done.stdout.splitlines() if line.startswith("ROCECOMM_IB_TC"))
    assert row.split()[:4] == ["ROCECOMM_IB_TC", "104", "environment", "ROCECOMM_IB_TC"]
    assert "did you mean ROCECOMM_IB_HCA?" in done.stdout
    assert "a secret" not in done.stdout


def test_bad_settings_are_one_line_on_stderr():
    done = rocecomm("info", ROCECOMM_IB_TC="high")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "ROCECOMM_IB_TC is 'high'" in done.stderr
    done = rocecomm("info", ROCECOMM_IB_HCA="mlx5_77")
    assert done.returncode == 1 and "mlx5_77" in done.stdout
