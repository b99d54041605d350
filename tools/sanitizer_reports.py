"""Judges the report files of a run under ASan and UBSan.

    sanitizer_reports.py FILE...

Every error counts. A leak counts if it is direct and libsoftnic or one of the package's
extensions is in its stack. Stock programs keep memory of their own to the end; what they got from
the device and never gave back hangs on that (an indirect leak), except for what FORGOTTEN names.
Memory that the library itself loses hangs on nothing. Exit status 1 if anything counts.
"""

import re
import sys
from pathlib import Path

OURS = re.compile(r"^\s*#\d+ .*(softnic|rocecomm)", re.M)
START = r"^(?:Direct|Indirect) leak of "
LEAK = re.compile(rf"{START}.*?(?={START}|^SUMMARY|\Z)", re.M | re.S)
# verb -> what perftest would have to call
FORGOTTEN = {"ibv_get_device_list": "ibv_free_device_list"}


def counts(text):
    """What of one report file counts: a list of texts."""
    found = []
    # one file may hold several reports of a process
    for report in re.split(r"^=+\n(?===\d+==)", text, flags=re.M):
        if "LeakSanitizer" not in report:
            if report.strip():
                found.append(report)
            continue
        for leak in LEAK.findall(report):
            ours = leak.startswith("Direct") and OURS.search(leak)
            if ours and not any(re.search(rf"\b{verb}\b", leak) for verb in FORGOTTEN):
                found.append(leak)
    return found


def main(paths):
    bad = 0
    for path in map(Path, paths):
        for text in counts(path.read_text(errors="replace")):
            bad += 1
            print(f"--- {path}\n{text.rstrip()[:4000]}")
    print(f"asan: {len(paths)} report files, {bad} reports that count", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
