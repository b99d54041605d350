#!/bin/bash
# Do the .pyi files parse and agree with the built modules?
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/mypy --no-error-summary --ignore-missing-imports --follow-imports=silent --disable-error-code=misc \
    $(find rocecomm -name '*.pyi')
