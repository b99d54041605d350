#!/bin/bash
# The C tests and the test suite, stock programs and rdma-core's suite included, with softnic and
# the extensions under ASan and UBSan, in a copy of the tree under build/asan. ARGS are pytest's:
# tests/stock runs the stock programs only.
#
# Leaks: the C tests count every one as an error. In stock programs those count that the library
# made (tools/sanitizer_reports.py). In Python processes detect_leaks is off, since CPython
# and NumPy keep memory to the end on purpose; what the library itself may keep is bounded by
# the tests of repeated connect and register.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export SAN=address,undefined
"$root/.venv/bin/python" tools/ctest.py
. tools/sanitizer_tree.sh asan

export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:log_path=$reports
export UBSAN_OPTIONS=print_stacktrace=1:log_path=$reports
export PYTHONMALLOC=malloc
preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
rc=0
LD_PRELOAD=$preload "$python" -m pytest -q -p no:cacheprovider --ignore=tests/roce "$@" || rc=$?
shopt -s nullglob
found=("$reports".*)
if [ ${#found[@]} -gt 0 ]; then
    "$python" tools/sanitizer_reports.py "${found[@]}" || rc=1
fi
exit "$rc"
