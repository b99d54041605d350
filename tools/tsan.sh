#!/bin/bash
# The C tests, then the tests that use threads, with softnic and the extensions under the thread
# sanitizer in Python processes (a copy of the tree under build/tsan). ARGS are pytest's and
# replace the selection below.
#
# CPython is not instrumented, but the mutexes and condition variables of its GIL are the C library's, which the
# sanitizer intercepts: it knows what the GIL orders. It sees one process at a time, so both ends only
# where they are threads of one (tests/link/test_threads.py). tools/tsan.supp says what is no race.
# Processes that fork with threads running, and tests that count what a process holds, stay out.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export SAN=thread
"$root/.venv/bin/python" tools/ctest.py
. tools/sanitizer_tree.sh tsan

[ $# -gt 0 ] || set -- tests/link/test_threads.py tests/link/test_close.py tests/link/test_waits.py \
    tests/test_asyncio.py tests/test_progress_thread.py tests/test_waiting.py tests/test_communicator_requests.py \
    tests/test_communicator_probe.py -k "not interpreter and not stopped and not dead"
export TSAN_OPTIONS=halt_on_error=0:exitcode=0:second_deadlock_stack=1:history_size=4:die_after_fork=0
export TSAN_OPTIONS=$TSAN_OPTIONS:suppressions=$tree/tools/tsan.supp:log_path=$reports
rc=0
LD_PRELOAD=$(gcc -print-file-name=libtsan.so) timeout 400 "$python" -m pytest -q -p no:cacheprovider "$@" || rc=$?
shopt -s nullglob
found=("$reports".*)
if [ ${#found[@]} -gt 0 ]; then
    cat "${found[@]}" | head -c 100000
    rc=1
fi
echo "tsan: ${#found[@]} processes with reports"
exit "$rc"
