"""What each real server can do, as `probe` finds out."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from support.servers import GIVEN, client_for

from objckpt.store import open_store
from objckpt.store.probe import probe

KNOWN = {
    "weed": {"conditional_put": True, "checksums_verified": True, "multipart_min_bytes": 5 * 1024 * 1024},
    "juicefs": {"conditional_put": False, "checksums_verified": False, "multipart_min_bytes": 1024},
}


def test_capabilities(s3_server, s3_url):
    store = open_store(s3_url)
    store.put("other", b"x")  # the first write of a server makes volumes
    began = time.monotonic()
    found = probe(store)
    took_s = time.monotonic() - began
    client = client_for(s3_server)
    prefix = s3_url.removeprefix(f"s3://{s3_server.bucket}/") + "/"
    listed = client.list_objects_v2(Bucket=s3_server.bucket, Prefix=prefix).get("Contents", [])
    # JuiceFS keeps and lists the empty folder
    assert {entry["Key"] for entry in listed} - {f"{prefix}probe/"} == {f"{prefix}other"}
    assert not client.list_multipart_uploads(Bucket=s3_server.bucket, Prefix=prefix).get("Uploads")
    assert found["conditional_put"] is not None and found["conditional_put_evidence"]
    if not GIVEN:
        assert {name: found[name] for name in KNOWN[s3_server.name]} == KNOWN[s3_server.name]
        assert (found["ranged_get"], found["checksum_crc64nvme"], found["delete"]) == (True, True, True)
        assert took_s < 10, took_s  # some tenths of a second on an idle machine
    store.close()


def test_several_probes_at_once_do_not_disturb_each_other(s3_server, s3_url):
    with ThreadPoolExecutor(3) as pool:
        stores = [open_store(s3_url) for _ in range(3)]
        found = list(pool.map(probe, stores))
    assert len({one["conditional_put"] for one in found}) == 1 and found[0]["conditional_put"] is not None
    assert stores[0].list() == [] and stores[0].list_uploads() == []
    for store in stores:
        store.close()
