"""An uploader that cannot start says why, whatever its kind and whichever message meets its end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.errors import ObjckptError


@pytest.mark.parametrize("uploader", ["thread", "process"])
def test_the_reason_of_a_failed_start_is_told(uploader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    store = StoreOptions(endpoint_url="http://127.0.0.1:9", profile="not-there")
    ckpt = Checkpointer("s3://bucket/run", store=store, options=SaveOptions(uploader=uploader))
    with pytest.raises(ObjckptError, match="not-there"):
        ckpt.save(1, {"n": 1}).wait_committed(30)
    with pytest.raises(ObjckptError, match="not-there"):
        ckpt.save(2, {"n": 1}).wait_committed(30)
    with contextlib.suppress(ObjckptError):  # told already
        ckpt.close()
