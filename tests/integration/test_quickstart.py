"""The README's first command does what the README says, and leaves nothing running."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "OBJCKPT_"))}
    done = subprocess.run(
        "bash tools/quickstart.sh",
        shell=True,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "upload in flight" in done.stdout
    assert re.search(r"^resumed from step \d+", done.stdout, re.MULTILINE)
    assert "losses are equal to the last bit" in done.stdout
    server = int(re.search(r"OBJCKPT_LOCAL_PID=(\d+)", done.stdout).group(1))
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
