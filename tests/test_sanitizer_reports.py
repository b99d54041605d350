"""What make asan counts of a sanitizer's report, and what it leaves to stock programs."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools/sanitizer_reports.py"
LEAKS = """
=================================================================
==77==ERROR: LeakSanitizer: detected memory leaks

Direct leak of 912 byte(s) in 1 object(s) allocated from:
    #0 0x7 in calloc asan_malloc_linux.cpp:77
    #1 0x5  (/usr/bin/ib_send_bw+0x9bc2)

Direct leak of 16 byte(s) in 1 object(s) allocated from:
    #0 0x7 in calloc asan_malloc_linux.cpp:77
    #1 0x7 in ibv_get_device_list rocecomm/softnic/device.c:87
    #2 0x5  (/usr/bin/ib_send_bw+0x1b8f6)

Indirect leak of 16 byte(s) in 1 object(s) allocated from:
    #0 0x7 in malloc asan_malloc_linux.cpp:69
    #1 0x7 in sn_seg_create rocecomm/softnic/segment.c:69
{more}
SUMMARY: AddressSanitizer: 944 byte(s) leaked in 3 allocation(s).
"""
OWN = """
Direct leak of 64 byte(s) in 1 object(s) allocated from:
    #0 0x7 in malloc asan_malloc_linux.cpp:69
    #1 0x7 in sn_create_cq rocecomm/softnic/cq.c:27
"""
OVERFLOW = """=================================================================
==78==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x6
    #0 0x7 in main (/usr/bin/ib_send_bw+0x1)
"""
UNDEFINED = "rocecomm/softnic/cq.c:3:5: runtime error: shift exponent 32 is too large\n"


@pytest.mark.parametrize("text, count", [
    (LEAKS.format(more=""), 0), (LEAKS.format(more=OWN), 1), (OVERFLOW, 1), (UNDEFINED, 1),
    (UNDEFINED + LEAKS.format(more=OWN), 2), (OVERFLOW + LEAKS.format(more=""), 1)])
def test_what_counts(tmp_path, text, count):
    path = tmp_path / "report.77"
    path.write_text(text)
    done = subprocess.run([sys.executable, str(TOOL), str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("--- ")) == (min(count, 1), count), done.stdout
