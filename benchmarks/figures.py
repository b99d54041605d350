"""Rows: what a benchmark hands to the runner, and when a row passes.

A row is a dictionary: ``name unit ours against theirs ratio difference target pass note``. ``ours`` and
``theirs`` are :func:`spread` of one figure per round. ``target`` is text:

* ``"<= 0.8x"``, ``">= 0.9x"``: the median of the rounds' ratios ours/theirs
* ``"<= +0.4"``: the median of the rounds' differences ours - theirs, in the row's unit
* ``"<= 5"``, ``">= 5"``: the median of ours
* None: a figure without a target; ``pass`` is then None
"""

import re
import statistics


class Missing(Exception):
    """A benchmark cannot run here; the message says why and what to install."""


def spread(values):
    """Median and percentiles of a few figures; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    at = lambda share: ordered[round(share * (len(ordered) - 1))]   # noqa: E731
    return {"median": statistics.median(ordered), "p10": at(0.1), "p90": at(0.9), "all": list(values)}


def passes(target, value):
    """Whether ``value`` meets a target such as ``"<= 0.8x"``; ValueError for other text."""
    found = re.fullmatch(r"(<=|>=) \+?([0-9.]+)x?", target)
    if not found:
        raise ValueError(f"a target reads like '<= 0.8x', '>= 5' or '<= +0.4', not {target!r}")
    bound = float(found[2])
    return value <= bound if found[1] == "<=" else value >= bound


def row(name, unit, ours, theirs=None, against=None, target=None, note=None):
    """One row of the table, of figures that were measured in turn: ``ours[i]`` and ``theirs[i]`` in
    round i. ``against`` names the competitor. Without ``theirs`` the row has no ratio. A round in
    which the competitor printed no figure above 0 (seen of perftest in a virtual machine) is left
    out, and the row's note says so; Missing if all were so."""
    ratio = difference = None
    if theirs:
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b > 0]
        if not pairs:
            raise Missing(f"{name}: {against} printed no figure above 0 in {len(theirs)} rounds")
        if len(pairs) < len(theirs):
            left = f"{len(theirs) - len(pairs)} of {len(theirs)} rounds left out: {against} printed 0"
            note = f"{note}; {left}" if note else left
        ours, theirs = map(list, zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        difference = statistics.median(a - b for a, b in pairs)
    value = None
    if target:
        value = ratio if target.endswith("x") else difference if "+" in target else statistics.median(ours)
        if value is None:
            raise ValueError(f"row {name!r}: the target {target!r} needs theirs")
    return {"name": name, "unit": unit, "ours": spread(ours), "against": against, "theirs": spread(theirs),
            "ratio": ratio, "difference": difference, "target": target,
            "pass": None if value is None else passes(target, value), "note": note}


def text(value):
    """A figure as people read it: three digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def cells(r):
    """What one line of a table shows: name, unit, ours, its spread, rival, theirs, its spread, ratio, target,
    verdict."""
    def both(s):
        return ("", "") if s is None else (text(s["median"]), f"{text(s['p10'])}..{text(s['p90'])}")

    ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}" if r["ratio"] >= 0.1 else f"{r['ratio']:.3f}"
    if r["target"] and "+" in r["target"]:
        ratio = f"{r['difference']:+.2f}"
    verdict = {True: "pass", False: "MISS", None: ""}[r["pass"]]
    return (r["name"], r["unit"], *both(r["ours"]), r["against"] or "", *both(r["theirs"]), ratio,
            r["target"] or "", verdict)
