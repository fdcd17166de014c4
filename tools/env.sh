#!/usr/bin/env bash
# Makes .venv with objckpt (editable) and its tools; does nothing while pyproject.toml and tools/constraints.txt are unchanged.
#   bash tools/env.sh           extras dev, local
#   bash tools/env.sh bench     … and the peers that the benchmarks compare with
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="${1:-}"
stamp=".venv/.objckpt-env${extra:+-$extra}"
wanted="$(cat pyproject.toml tools/constraints.txt | sha256sum | cut -d' ' -f1) $PWD" # a moved .venv does not work
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

if [ ! -x .venv/bin/python ] || ! grep -qsF "$PWD/.venv" .venv/pyvenv.cfg .venv/bin/activate; then
    rm -rf .venv
    "${PYTHON:-python3}" -m venv .venv
fi
.venv/bin/python -c 'import sys; sys.exit("env: objckpt needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
rm -f .venv/.objckpt-env*
echo "env: installing objckpt[dev,local${extra:+,$extra}] into .venv; this takes some minutes, once" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c tools/constraints.txt -e ".[dev,local${extra:+,$extra}]"
for done in .venv/.objckpt-env "$stamp"; do echo "$wanted" >"$done"; done
