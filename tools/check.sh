#!/usr/bin/env bash
# Format, lint, types and layers. `--fix` rewrites what can be rewritten.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/env.sh
bin=.venv/bin

if [ "${1:-}" = "--fix" ]; then
    "$bin/ruff" check --quiet --fix . || true
    "$bin/ruff" format --quiet .
fi
failed=0
check() {
    if ! output=$("$@" 2>&1); then
        printf 'check: %s\n%s\n' "$(basename "$1") ${*:2}" "$output"
        failed=1
    fi
}
check "$bin/ruff" format --check .
check "$bin/ruff" check .
check "$bin/mypy" --strict objckpt
check "$bin/lint-imports" --no-logo
[ "$failed" = 0 ] && echo "check: format, lint, types and layers are fine"
exit "$failed"
