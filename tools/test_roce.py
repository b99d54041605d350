"""make test-roce: the test suite on kernel Soft-RoCE, in a virtual machine.

    test_roce.py [PYTEST ARGUMENT...]

Boots the machine with tools/vm.sh and runs in it, on rxe0, every test that uses the
``device`` fixture, and tests/roce: interoperability with programs of rdma-core. (Tests that
use no device would do the same there as in make test, 20 times slower.) Pytest's own
output is shown; its junit file, report and log end up in build/roce. Exit status:
pytest's, or 1 where the machine did not boot, no test ran, or fewer than 90 % of the tests
that use the ``device`` fixture ran (not skipped) on rxe0 (checked for the whole suite only).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "roce"
DEVICE = "rxe0"
# seconds, boot included: about 15 minutes on 2 idle cores, and some room for slower ones
LIMIT = int(os.environ.get("ROCE_LIMIT", "1560"))
SHARE = 0.9
# for examples/train_digits.py
COPY = "sklearn scipy scipy.libs scikit_learn.libs joblib threadpoolctl.py"
# importing torch takes over a minute of CPU in there, in each process; its tensors become
# buffers above the device seam, which make test covers
WITHOUT = "torch"


def fail(text):
    print(f"test-roce: FAILED: {text}", file=sys.stderr)
    raise SystemExit(1)


def prepare(env):
    """What the host does faster: byte code for all, and the files that hold device tests.

    The guest can write no byte code, and it would collect a thousand tests only to leave
    them out.
    """
    for command in ([sys.executable, "-m", "compileall", "-q", "rocecomm", "tests", "examples"],
                    [sys.executable, "-m", "pytest", "--collect-only", "-qq"]):
        done = subprocess.run(command, cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            fail(f"{' '.join(command[1:])} failed:\n{done.stdout[-4000:]}")
    files = [line.partition(": ")[0] for line in done.stdout.splitlines() if ".py: " in line]
    return [f for f in files if (ROOT / f).is_file()] or fail("no test uses the device")


def main(arguments):
    OUT.mkdir(parents=True, exist_ok=True)
    for name in ("junit.xml", "report.json", "report.json.log", "pytest.log"):
        (OUT / name).unlink(missing_ok=True)
    env = dict(os.environ, ROCECOMM_TEST_DEVICE=DEVICE, ROCECOMM_TEST_ONLY_DEVICE="1",
               ROCECOMM_TEST_WITHOUT=WITHOUT)
    for name in ("ROCECOMM_IB_HCA", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    what = arguments or prepare(env)
    env["ROCECOMM_TEST_REPORT"] = str(OUT / "report.json")
    command = [
        str(ROOT / "tools/vm.sh"), "--timeout", str(LIMIT), "--out", str(OUT), "--copy", COPY, "--",
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no",
        f"--junitxml={OUT / 'junit.xml'}", *what]
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace") as vm, open(OUT / "pytest.log", "w") as log:
        for line in vm.stdout:
            print(line, end="", flush=True)
            log.write(line)
    took = time.monotonic() - start
    if vm.returncode == 124:
        fail(f"no end within {LIMIT} s; the log is in {OUT}")
    if vm.returncode == 125:
        fail("the virtual machine did not boot or did not get to the tests")
    if not (OUT / "report.json").exists():
        fail(f"pytest left no report (exit status {vm.returncode})")
    report = json.loads((OUT / "report.json").read_text())
    ran, total = report["ran"], report["total"]
    print(f"test-roce: {report['collected']} tests in {took:.0f} s; {ran} of {total} that use "
          f"the device ran on {report['device']}; junit and log in {OUT}")
    for test in report["skipped"]:
        print(f"test-roce: skipped on {report['device']}: {test}")
    if vm.returncode:
        fail(f"pytest ended with {vm.returncode}")
    if report["device"] != DEVICE or not report["collected"] or not ran:
        fail(f"no test ran on {DEVICE}")
    if not arguments and ran < SHARE * total:
        fail(f"only {ran} of {total} tests that use the device ran on {DEVICE}; 90 % must")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
