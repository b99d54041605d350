"""The table as people read it: on the terminal and in docs/reference/softnic-performance.md."""

import os
import platform
import re
import subprocess
from pathlib import Path

BEGIN, END = "<!-- written by make bench-softnic: begin -->", "<!-- end -->"


def figure(value):
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def cells(result):
    """What one line of the table shows."""
    def both(s):
        return ("-", "") if s is None else (figure(s["median"]), f"{figure(s['p10'])}..{figure(s['p90'])}")

    sign = "<=" if result["unit"] == "usec" else ">="
    return (result["row"], result["unit"], *both(result["raw"]), *both(result["device"]),
            "-" if result["ratio"] is None else f"{result['ratio']:.2f}",
            f"{sign} {result['target']:g}" + ("x" if result["raw"] else ""),
            "pass" if result["pass"] else "MISS")


def said(command, pattern):
    """What a program prints that matches, or '?'."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    found = re.search(pattern, done.stdout + done.stderr)
    return found[1].strip() if found else "?"


def machine(cpus):
    """One sentence about where this was measured."""
    model = said(["lscpu"], r"Model name:\s*(.*)")
    virtual = said(["lscpu"], r"Hypervisor vendor:\s*(.*)")
    perftest = said(["dpkg-query", "-W", "-f", "${Version}", "perftest"], r"(\S+)")
    l2, l3 = (said(["lscpu"], name + r" cache:\s*(.*)") for name in ("L2", "L3"))
    return (f"{model}, {os.cpu_count()} CPUs" + (f" of a {virtual} guest" if virtual != "?" else "")
            + f" (L2 {l2}, L3 {l3}), Linux {platform.release()}, perftest {perftest}, "
            f"CPU {cpus[1]} for the client and the loops, CPU {cpus[0]} for the other end")


def block(results, cpus):
    """The generated part of the page."""
    rounds = sorted({r["rounds"] for r in results})
    rounds = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    lines = [f"Machine: {machine(cpus)}. Medians of {rounds} rounds, in brackets the 10th and 90th "
             "percentile; ratio: median of the rounds' ratios.", "",
             "| row | perftest | unit | raw loop | raw | soft0 | ratio | target | |",
             "|---|---|---|---|---|---|---|---|---|"]
    for result in results:
        row, unit, raw, raw_spread, device, spread, ratio, target, verdict = cells(result)
        raw += f" ({raw_spread})" if raw_spread else ""
        lines.append(f"| {row} | `{result['command']}` | {unit} | {result['raw program'] or '-'} | {raw} | "
                     f"{device} ({spread}) | {ratio} | {target} | {verdict} |")
    return "\n".join(lines)


def write(path, results, cpus):
    """Puts the table between the marks of a page; what stands around them stays."""
    text = Path(path).read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"bench-softnic: {path} lacks the lines {BEGIN} and {END}")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    Path(path).write_text(f"{head}{BEGIN}\n\n{block(results, cpus)}\n\n{END}{tail}")
