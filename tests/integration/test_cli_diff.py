"""`objckpt diff` over what training saved; once as a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from objckpt import Checkpointer, SaveOptions

ROOT = Path(__file__).resolve().parents[2]


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "objckpt", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_frozen_layer_is_the_same_and_a_trained_one_is_not(s3_server, s3_url, here):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 2))
    model[0].requires_grad_(False)
    optim = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state = {"model": model, "optim": optim, "epoch": 1, "extra": torch.ones(3)}
    with Checkpointer(s3_url, options=SaveOptions(uploader="thread")) as ckpt:
        ckpt.save(1, state)
        model(torch.randn(4, 8)).square().sum().backward()
        optim.step()
        ckpt.save(2, state | {"epoch": 2, "extra": torch.ones(3).double()})
    with Checkpointer(s3_url, options=SaveOptions(uploader="thread", compression="zstd", chunk_bytes=4096)) as ckpt:
        ckpt.restore(state | {"extra": torch.ones(3).double()})
        ckpt.save(3, state | {"epoch": 2})  # the same bytes, stored in another way
    done = (here if s3_server.name == "juicefs" else process)("diff", s3_url, "1", "2", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr, document["same"]) == (1, "", False)
    assert {row["fqn"]: row["what"] for row in document["changed"]} == {
        "model/1.weight": ["bytes"], "model/1.bias": ["bytes"], "epoch": ["value"], "extra": ["dtype"]
    }  # fmt: skip
    assert document["added"] == document["removed"] == document["not_compared"] == []
    done = here("diff", s3_url, "2")
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"^~  extra +float64 3 → float32 3$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(": 1 changed\n")
    assert here("diff", s3_url, "3").returncode == 0
    done = here("diff", s3_url, "4")
    assert done.returncode == 4 and done.stdout == "" and "step 4 is not committed" in done.stderr
    if s3_server.name == "juicefs":
        return
    code = "import sys; from objckpt.cli.main import run; run(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, "diff", s3_url, "1"], env=environment, timeout=60, check=False)
    assert done.returncode == 0, "torch was imported"
