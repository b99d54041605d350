"""Builds and runs the C tests of softnic: tests/c/*.c, one behaviour each.

    ctest.py [NAME...]          all, or those whose name contains one of the words

A test exits with 0 (pass), 1 or by a signal (fail), or 77 (skip, reason on stdout).
Some run a second time in staging mode (``STAGED``), as if the system refused process_vm.
Each is linked against libsoftnic.so and has 30 s (``ROCECOMM_TEST_SLOW`` multiplies).
``SAN=address,undefined`` or ``SAN=thread`` builds library and tests with sanitizers; leaks
are then errors too. Exit status: 1 if any test failed or nothing was there to run.
"""

import atexit
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAN = os.environ.get("SAN", "")
SLOW = float(os.environ.get("ROCECOMM_TEST_SLOW", "3" if SAN else "1"))
LIMIT = 30 * SLOW
OUT = ROOT / "build" / ("c" + ("-" + SAN.replace(",", "-") if SAN else ""))
# these again with ROCECOMM_SOFT_STAGING=1; the thread sanitizer sees only what one process does
STAGED = ["chain_errors", "chains", "datagram", "forked", "heartbeat", "keys", "lengths", "mapped",
          "one_sided", "order", "purge", "refusals", "send_recv", "shared_receive", "threads"]
if "thread" not in SAN:
    STAGED += ["crowd", "kill_storm", "killed", "lost_receive", "peer_leaves", "sleeper", "stopped",
               "stopped_executor", "two_processes"]
else:
    STAGED.remove("forked")     # a thread in a child of a process with threads: not supported
    STAGED.remove("mapped")
CC = shlex.split(os.environ.get("CC", "gcc"))
FLAGS = ["-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-pthread", "-D_GNU_SOURCE"]
if SAN:
    FLAGS += [f"-fsanitize={SAN}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def library():
    """Builds libsoftnic.so for these sanitizers and returns its path."""
    done = subprocess.run([sys.executable, "setup.py", "-q", "build_softnic"], cwd=ROOT,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    path = [line for line in done.stdout.splitlines() if line.startswith("softnic: /")]
    if done.returncode or not path:
        sys.exit(done.stdout + "\nctest: libsoftnic.so could not be built")
    return Path(path[-1].partition(": ")[2])


def build(source, lib):
    """Compiles and links one test; returns (source, binary or None, compiler's words)."""
    binary = OUT / source.stem
    inputs = [source, lib, *source.parent.glob("*.h"), *(ROOT / "rocecomm/softnic").glob("*.h")]
    if binary.exists() and all(i.stat().st_mtime < binary.stat().st_mtime for i in inputs):
        return source, binary, ""
    part = binary.with_suffix(".part")
    command = [*CC, *FLAGS, "-I", str(source.parent), "-I", str(ROOT / "rocecomm/softnic"),
               str(source), str(lib), f"-Wl,-rpath,{lib.parent}", "-lm", "-ldl", "-o", str(part)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        return source, None, done.stdout
    part.replace(binary)
    return source, binary, done.stdout


def run(binary, staged):
    """Runs one test; returns (verdict, seconds, output)."""
    env = dict(os.environ)
    if staged:
        env["ROCECOMM_SOFT_STAGING"] = "1"
    env.setdefault("ASAN_OPTIONS", "detect_leaks=1:abort_on_error=0:exitcode=99")
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1")
    env.setdefault("TSAN_OPTIONS", "halt_on_error=0:exitcode=99:second_deadlock_stack=1")
    start = time.monotonic()
    proc = subprocess.Popen([str(binary)], cwd=ROOT, env=env, text=True, errors="replace",
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = proc.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(proc.pid, signal.SIGKILL)
        output, _ = proc.communicate()
        return "FAIL", time.monotonic() - start, output + f"\nno end within {LIMIT:.0f} s"
    took = time.monotonic() - start
    if proc.returncode == 0:
        return "ok", took, output
    if proc.returncode == 77:
        return "skip", took, output
    how = f"exit status {proc.returncode}"
    if proc.returncode < 0:
        how = f"killed by {signal.Signals(-proc.returncode).name}"
    return "FAIL", took, output + "\n" + how


def main(words):
    sources = sorted(p for p in (ROOT / "tests/c").glob("*.c")
                     if not words or any(w in p.stem for w in words))
    if not sources:
        sys.exit("ctest: no test in tests/c" + (f" matches {words}" if words else ""))
    lib = library()
    OUT.mkdir(parents=True, exist_ok=True)
    counts = {"ok": 0, "skip": 0, "FAIL": 0}
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda s: build(s, lib), sources))
    shm_root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    shm = tempfile.mkdtemp(prefix="rocecomm-ctest-", dir=shm_root)
    os.environ["ROCECOMM_SOFT_DIR"] = shm  # apart from other programs of this user
    atexit.register(shutil.rmtree, shm, ignore_errors=True)
    runs = [(*b, False) for b in built]
    runs += [(*b, True) for b in built if b[0].stem in STAGED and b[1]]
    runners = ThreadPoolExecutor(3)     # most of their time they wait
    results = runners.map(lambda r: run(r[1], r[3]) if r[1] else ("FAIL", 0.0, "does not compile"),
                          runs)
    for (source, _, words_of_cc, staged), (verdict, took, output) in zip(runs, results,
                                                                         strict=True):
        if words_of_cc and not staged:
            print(words_of_cc)
        counts[verdict] += 1
        line = f"{verdict:4} {source.stem}{' (staging)' if staged else ''} ({took:.2f} s)"
        if verdict == "skip":
            line += " " + (output.strip().splitlines() or ["no reason given"])[-1]
        print(line, flush=True)
        if verdict == "FAIL":
            print(output[-8000:])
    print("C tests" + (f" ({SAN})" if SAN else "") + ": "
          + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n))
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
