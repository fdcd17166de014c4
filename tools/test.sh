#!/usr/bin/env bash
# Sets up the environment, checks the code and runs every test; arguments go to pytest (`bash tools/test.sh -k log`).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/env.sh
bash tools/check.sh
# Most tests wait for servers, processes and signals: several workers use the time; each has servers of its own.
exec .venv/bin/python -m pytest -n "${OBJCKPT_TEST_WORKERS:-3}" --dist loadfile "$@"
