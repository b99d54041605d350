# Sourced by asan.sh and tsan.sh, with $SAN set: makes a copy of the tree under build/$1 with softnic
# and the extensions under the sanitizers of $SAN, so that it never mixes with the normal build, goes there and
# sets the variables of a test run. Reports go to files of their process, $reports.PID: a child's would
# otherwise be lost, and some run as another user.
python=$root/.venv/bin/python
tree=$root/build/$1/tree
mkdir -p "$tree"
# what git knows and does not ignore; build/ and .venv stay out
git -C "$root" ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ -e "$root/$file" ] && printf '%s\0' "$file"
done | tar -C "$root" --null -T - -cf - | tar -C "$tree" -xf -
cd "$tree"
log=$root/build/$1/build.log
PYTHONPATH=$tree "$python" setup.py build_ext --inplace >"$log" 2>&1 || { tail -n 40 "$log"; exit 1; }

folder=$(mktemp -d "/tmp/rocecomm-$1-XXXXXX")
chmod 1777 "$folder"
trap 'rm -rf "$folder"' EXIT
reports=$folder/report
export PYTHONPATH=$tree ROCECOMM_TEST_SLOW=${ROCECOMM_TEST_SLOW:-4} ROCECOMM_TEST_SANITIZER=1
