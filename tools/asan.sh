#!/bin/bash
# The C tests and the test suite, stock programs and rdma-core's suite included, with softnic and
# the extensions under ASan and UBSan, in a copy of the tree under build/asan, so that it
# never mixes with the normal build. ARGS are pytest's: tests/stock runs the stock programs only.
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

tree=$root/build/asan/tree
mkdir -p "$tree"
# what git knows and does not ignore; build/ and .venv stay out
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ -e "$file" ] && printf '%s\0' "$file"
done | tar --null -T - -cf - | tar -C "$tree" -xf -
cd "$tree"
log=$root/build/asan/build.log
PYTHONPATH=$tree "$root/.venv/bin/python" setup.py build_ext --inplace >"$log" 2>&1 || { tail -n 40 "$log"; exit 1; }

# every report goes to a file of its process: a child's would otherwise be lost; some run as another user
folder=$(mktemp -d /tmp/rocecomm-asan-XXXXXX)
chmod 1777 "$folder"
trap 'rm -rf "$folder"' EXIT
reports=$folder/report
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:log_path=$reports
export UBSAN_OPTIONS=print_stacktrace=1:log_path=$reports
export PYTHONMALLOC=malloc PYTHONPATH=$tree ROCECOMM_TEST_SLOW=${ROCECOMM_TEST_SLOW:-4} ROCECOMM_TEST_SANITIZER=1
preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
rc=0
LD_PRELOAD=$preload "$root/.venv/bin/python" -m pytest -q -p no:cacheprovider --ignore=tests/roce "$@" || rc=$?
shopt -s nullglob
found=("$reports".*)
if [ ${#found[@]} -gt 0 ]; then
    "$root/.venv/bin/python" tools/sanitizer_reports.py "${found[@]}" || rc=1
fi
exit "$rc"
