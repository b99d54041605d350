#!/usr/bin/env python3
"""make conformance: rdma-core's own test suite on soft0 and on rxe0, test by test.

    conformance.py [--device soft0|rxe0|both] [--rxe-from FILE] [--only REGEX] [--limit SECONDS]
                   [--markdown FILE] [--record FILE] [--quiet]

Debian's rdma-core ships the suite in /usr/share/doc/rdma-core/tests. It is unpacked into
build/conformance and run with the system's Python and pyverbs: on soft0 here, with
libsoftnic.so preloaded, and on rxe0 in the virtual machine (tools/vm.sh; about two minutes).
rxe0's verdicts are kept in build/conformance/rxe0.json; ``--rxe-from`` takes them from such
a file instead of booting.

A verdict ranks as passed, then skipped, then the rest (failed, error, crashed, hung). Exit
status 1 if soft0's ranks lower than rxe0's for any test, or, without rxe0, if soft0 does not pass a
test of the recorded list (tests/stock/conformance.txt). ``--record`` writes that list: the
tests that any device passes in this run. ``--markdown`` writes the page in docs/reference.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/conformance"
SHIPPED = Path("/usr/share/doc/rdma-core/tests")
RECORDED = ROOT / "tests/stock/conformance.txt"
RUNNER = ROOT / "tools/pyverbs_suite.py"
LIBRARY = ROOT / "rocecomm/softnic/libsoftnic.so"
PYTHON = "/usr/bin/python3"
RANK = {"passed": 2, "skipped": 1}


class Missing(Exception):
    """What the suite needs is not installed or not built."""


def version():
    """The Debian package that the suite comes from."""
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", "rdma-core"],
                          capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def unpack(folder):
    """Unpacks the suite into ``folder``/tests; returns the folder."""
    if not SHIPPED.is_dir():
        raise Missing(f"{SHIPPED} is missing; install Debian's rdma-core (without dpkg's "
                      "path-exclude of /usr/share/doc)")
    if subprocess.run([PYTHON, "-c", "import pyverbs.device"], capture_output=True).returncode:
        raise Missing(f"{PYTHON} cannot import pyverbs; install Debian's python3-pyverbs")
    tests = Path(folder) / "tests"
    shutil.rmtree(tests, ignore_errors=True)
    tests.mkdir(parents=True)
    for path in SHIPPED.iterdir():
        if path.name.endswith(".py.gz"):
            (tests / path.name[:-3]).write_bytes(gzip.decompress(path.read_bytes()))
        elif path.suffix == ".py":
            shutil.copyfile(path, tests / path.name)
    return Path(folder)


def command(suite, device, out, limit, only):
    return [PYTHON, str(RUNNER), "--suite", str(suite), "--device", device, "--out", str(out),
            "--limit", str(limit), "--only", only]


def run_soft0(suite, out, limit=60, only="", preload=(), timeout=600, env=None, quiet=False):
    """Runs the suite on soft0 in a fabric of its own; returns {test: result}."""
    if not LIBRARY.exists():
        raise Missing(f"{LIBRARY} is not built")
    shm = tempfile.mkdtemp(prefix="rocecomm-conformance-",
                           dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    env = {**os.environ, "LD_PRELOAD": " ".join([*map(str, preload), str(LIBRARY)]),
           "ROCECOMM_SOFT_DIR": shm, **(env or {})}
    try:
        done = subprocess.run(command(suite, "soft0", out, limit, only), env=env, timeout=timeout,
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if quiet else None)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"conformance: the suite did not run on soft0 (exit status {done.returncode})")
    return read(out)


def run_rxe0(suite, limit, only):
    """Runs the suite on rxe0 in the virtual machine; returns {test: result} and the kernel."""
    out = BUILD / "vm"
    out.mkdir(parents=True, exist_ok=True)
    for name in ("rxe0.jsonl", "rxe0.jsonl.log", "kernel"):
        (out / name).unlink(missing_ok=True)
    words = command(suite, "rxe0", "/tmp/rxe0.jsonl", limit, only)
    # the guest's own memory is quicker than a file of the host
    script = '"$@"; rc=$?; cp /tmp/rxe0.jsonl* "$OUT"; uname -r >"$OUT/kernel"; exit $rc'
    done = subprocess.run([str(ROOT / "tools/vm.sh"), "--timeout", "1200", "--out", str(out), "--",
                           "bash", "-c", script, "suite", *words], cwd=ROOT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"conformance: the suite did not run on rxe0 (exit status {done.returncode})")
    return read(out / "rxe0.jsonl"), (out / "kernel").read_text().strip()


def read(path):
    return {r["id"]: r for r in map(json.loads, Path(path).read_text().splitlines())}


def short(test):
    return test.removeprefix("tests.")


def below(soft, rxe):
    """The tests in which soft0 ranks lower than rxe0."""
    nothing = {"verdict": "absent", "reason": ""}
    return [t for t in rxe if RANK.get(soft.get(t, nothing)["verdict"], 0) < RANK.get(rxe[t]["verdict"], 0)]


def recorded():
    """The tests that soft0 must pass, as the repository has them."""
    return [line for line in RECORDED.read_text().splitlines() if line and not line.startswith("#")]


def reason(result):
    """A reason in one line, without what differs from run to run."""
    text = " ".join(result["reason"].split())
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def tally(results):
    counts = Counter(r["verdict"] for r in results)
    order = ("passed", "skipped", "failed", "error", "crashed", "hung")
    return ", ".join(f"{counts[v]} {v}" for v in order if counts[v]) or "not run"


def by_file(results):
    files = {}
    for test, result in results.items():
        files.setdefault(test.split(".")[1], {})[test] = result
    return files


def cell(results, test, why=True):
    """One verdict, with its reason if it is not a pass."""
    if test not in results:
        return "-"
    result = results[test]
    text = reason(result)
    return result["verdict"] + (f": {text}" if why and text and result["verdict"] != "passed" else "")


def print_table(devices):
    """The table, test by test, then a summary per file and device."""
    tests = list(dict.fromkeys(t for results in devices.values() for t in results))
    width = max((len(short(t)) for t in tests), default=10)
    print(f"{'test':{width}}  " + "  ".join(f"{d:42}" for d in devices).rstrip())
    for test in tests:
        words = [f"{cell(results, test)[:42]:42}" for results in devices.values()]
        print(f"{short(test):{width}}  " + "  ".join(words).rstrip())
    print()
    files = {d: by_file(r) for d, r in devices.items()}
    for name in dict.fromkeys(n for f in files.values() for n in f):
        words = [f"{device}: {tally(found.get(name, {}).values()):32}" for device, found in files.items()]
        print(f"{name:28}" + "  ".join(words).rstrip())
    for device, results in devices.items():
        print(f"{device}: {len(results)} tests, {tally(results.values())}")


def markdown(soft, rxe, kernel):
    """The page of docs/reference; nothing in it varies from run to run."""
    tests = list(dict.fromkeys([*rxe, *soft]))
    ran = [t for t in tests if any(r.get(t, {}).get("verdict") not in (None, "skipped") for r in (soft, rxe))]
    more = [t for t in ran if soft[t]["verdict"] == "passed" and rxe.get(t, {}).get("verdict") != "passed"]
    lower = below(soft, rxe)
    lines = [
        "# Conformance: rdma-core's test suite on soft0 and rxe0", "",
        "Written by `make conformance`. The suite is the one that Debian's package rdma-core "
        f"{version()} ships, run with pyverbs; soft0 is `libsoftnic.so` preloaded, rxe0 is the "
        f"kernel's Soft-RoCE (Linux {kernel}) in the virtual machine of `tools/vm.sh`.", "",
        "| device | tests | passed | skipped | failed or error | crashed or hung |",
        "|---|---|---|---|---|---|"]
    for name, results in (("soft0", soft), ("rxe0", rxe)):
        c = Counter(r["verdict"] for r in results.values())
        lines.append(f"| {name} | {len(results)} | {c['passed']} | {c['skipped']} | "
                     f"{c['failed'] + c['error']} | {c['crashed'] + c['hung']} |")
    lines += ["", f"Tests in which soft0 does worse than rxe0: {len(lower) or 'none'}."
              + (f" Tests that only soft0 passes: {len(more)}." if more else ""), ""]
    lines += [f"* `{short(t)}`: {cell(soft, t)}" for t in lower] + ([""] if lower else [])
    lines += ["## Tests that run on either device", "", "| test | soft0 | rxe0 |", "|---|---|---|"]
    lines += [f"| `{short(t)}` | {md(cell(soft, t))} | {md(cell(rxe, t))} |" for t in ran]
    lines += ["", "## What the others were skipped for", "",
              "Tests that both devices skip, by soft0's reason: mostly extensions of one vendor's "
              "hardware, and what an Ethernet device of a host has and a device in user space has not.",
              "", "| tests | soft0's reason | rxe0's reasons | in |", "|---|---|---|---|"]
    groups = {}
    for test in tests:
        if test not in ran:
            groups.setdefault(generic(reason(soft[test])), []).append(test)
    for why, members in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0])):
        others = Counter(generic(reason(rxe[t])) for t in members if t in rxe)
        others = "the same" if set(others) == {why} else "; ".join(sorted(others))
        files = ", ".join(sorted({f"`{t.split('.')[1]}`" for t in members}))
        lines.append(f"| {len(members)} | {md(why)} | {md(others)} | {files} |")
    return "\n".join(lines) + "\n"


def generic(text):
    """A reason without the device's name and without numbers that a seed chooses."""
    return re.sub(r"\b(soft|rxe)\d\b", "DEVICE", text)


def md(text):
    return text.replace("|", "\\|").replace("<", "&lt;")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("soft0", "rxe0", "both"), default="both")
    parser.add_argument("--rxe-from", metavar="FILE", help="rxe0's verdicts from this file")
    parser.add_argument("--only", default="", help="regular expression on the tests' names")
    parser.add_argument("--limit", type=float, default=60, help="seconds without a verdict until a "
                        "test counts as hung (rxe0: three times that)")
    parser.add_argument("--markdown", metavar="FILE")
    parser.add_argument("--record", metavar="FILE", nargs="?", const=str(RECORDED))
    parser.add_argument("--quiet", action="store_true", help="only what is wrong, and the counts")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        suite = unpack(BUILD / "suite")
        devices, kernel = {}, "unknown"
        if args.device != "rxe0":
            devices["soft0"] = run_soft0(suite, BUILD / "soft0.jsonl", args.limit, args.only,
                                         quiet=args.quiet)
    except Missing as missing:
        sys.exit(f"conformance: {missing}")
    if args.device != "soft0" or args.rxe_from:
        if args.rxe_from:
            kept = json.loads(Path(args.rxe_from).read_text())
            devices["rxe0"], kernel = {r["id"]: r for r in kept["tests"]}, kept["kernel"]
            if kept["version"] != version():
                sys.exit(f"conformance: {args.rxe_from} is of rdma-core {kept['version']}, "
                         f"installed is {version()}")
        else:
            devices["rxe0"], kernel = run_rxe0(suite, 3 * args.limit, args.only)
            if not args.only:
                kept = {"version": version(), "kernel": kernel, "tests": list(devices["rxe0"].values())}
                (BUILD / "rxe0.json").write_text(json.dumps(kept, indent=1))
    if not args.quiet:
        print_table(devices)
    else:
        for device, results in devices.items():
            print(f"{device}: {len(results)} tests, {tally(results.values())}")
    if args.only and "rxe0" in devices:
        devices["rxe0"] = {t: r for t, r in devices["rxe0"].items() if re.search(args.only, t)}
    return judge(args, devices, kernel)


def judge(args, devices, kernel):
    """Writes what was asked for and says what soft0 lacks; returns the exit status."""
    soft, rxe = devices.get("soft0"), devices.get("rxe0")
    for device, results in devices.items():
        if not results:
            sys.exit(f"conformance: no test ran on {device}")
    if args.record:
        must = sorted({test for results in devices.values() for test, result in results.items()
                       if result["verdict"] == "passed"})
        Path(args.record).write_text(f"# Tests of rdma-core {version()} that soft0 must pass; written by\n"
                                     "# tools/conformance.py --record\n" + "\n".join(must) + "\n")
    if soft is None:
        return 0
    if rxe is not None:
        if args.markdown and not args.only:
            Path(args.markdown).write_text(markdown(soft, rxe, kernel))
        wrong, than = below(soft, rxe), "rxe0 does better"
    else:
        wrong, than = [t for t in recorded() if t in soft and soft[t]["verdict"] != "passed"], "must pass"
    for test in wrong:
        print(f"conformance: {than}: {short(test)}: soft0 {cell(soft, test)}")
    print(f"conformance: {len(wrong)} tests in which soft0 falls short" if wrong else
          "conformance: soft0 passes what it must")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
