"""One run over everything, watched: no secret is logged, printed or stored, and nothing is ever unpickled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from support.servers import client_for, lead_to

from objckpt.errors import UsageError
from objckpt.store import open_store

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SENTINEL = "s3nt1nelPASSw0rd"


def everything(url: str, folder: Path, env: dict[str, str]) -> tuple[str, str]:
    """What a run printed, and what all of its processes logged."""
    watched = folder / "watched"
    watched.mkdir()
    path = os.pathsep.join(
        [str(HERE / "watched"), str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "everything.py"), url, str(folder)],
        env=os.environ | {"PYTHONPATH": path, "WATCHED": str(watched)} | env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=110, check=False,
    )  # fmt: skip
    logs = [path.read_text(errors="replace") for path in watched.glob("*.log")]
    assert all("objckpt.watched INFO watched" in log for log in logs) and len(logs) >= 2, "the agent was not watched"
    tried = [path.read_text() for path in watched.glob("*.unpickled")]
    assert not tried, tried[0]
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, "\n".join(logs)


def stored(server: object, url: str) -> str:
    """Keys and bytes of all objects under the URL."""
    client: boto3.client = client_for(server)  # type: ignore[arg-type,valid-type]
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])]
    bodies = [client.get_object(Bucket=bucket, Key=key)["Body"].read().decode("latin-1") for key in keys]
    return "\n".join(keys + bodies)


@pytest.mark.slow
def test_with_the_right_credentials(weed_server, monkeypatch, tmp_path):
    url = lead_to(weed_server, monkeypatch)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    endpoint = os.environ["AWS_ENDPOINT_URL"].replace("://", f"://user:{SENTINEL}@")
    printed, logged = everything(url, tmp_path, {"AWS_ENDPOINT_URL": endpoint, "UNRELATED_TOKEN": SENTINEL})
    assert "committed None" in printed and "verify 0" in printed and (tmp_path / "a.pt").exists(), printed
    found = stored(weed_server, url)
    assert "rank-00000" in found
    for name, text in (("printed", printed), ("logged", logged), ("stored", found)):
        assert secret not in text and SENTINEL not in text, _around(name, text, secret if secret in text else SENTINEL)


@pytest.mark.slow
def test_with_wrong_credentials(weed_server, monkeypatch, tmp_path):
    url = lead_to(weed_server, monkeypatch)
    wrong = {"AWS_SECRET_ACCESS_KEY": SENTINEL, "AWS_SESSION_TOKEN": f"{SENTINEL}+/token=="}
    wrong["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"].replace("://", f"://{SENTINEL}:x@")
    printed, logged = everything(url, tmp_path, wrong)
    assert "The access key or the secret is wrong" in printed, printed
    for name, text in (("printed", printed), ("logged", logged)):
        assert SENTINEL not in text, _around(name, text, SENTINEL)


def _around(name: str, text: str, secret: str) -> str:
    at = text.index(secret)
    return f"{name}: …{text[max(0, at - 300) : at + 100]}…"


@pytest.mark.parametrize(
    "url",
    [f"s3://bucket/p?X-Amz-Signature={SENTINEL}", f"https://b.s3.amazonaws.com/p?X-Amz-Security-Token={SENTINEL}",
     f"s3://user:{SENTINEL}@bucket/p", f"s3://bucket/p#{SENTINEL}", f"http://user:{SENTINEL}@host/p?x={SENTINEL}"],
)  # fmt: skip
def test_urls_that_are_refused_are_not_repeated_with_their_secrets(url):
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert SENTINEL not in str(caught.value) + repr(caught.value) + str(caught.value.context)
