"""`objckpt verify`: reads a whole checkpoint and compares it with what was recorded."""

from __future__ import annotations

from objckpt.cli import output
from objckpt.cli.options import (
    Addressing,
    CaBundle,
    Debug,
    EndpointUrl,
    Json,
    Profile,
    Region,
    Step,
    Url,
    store_options,
)
from objckpt.errors import FormatError, IntegrityError


def command(
    url: Url,
    step: Step = None,
    json: Json = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    addressing: Addressing = "path",
    ca_bundle: CaBundle = None,
    debug: Debug = False,
) -> int:
    """Download a checkpoint and check every byte.

    Checksums and lengths of all chunks, and the digest of each tensor, are compared with those recorded. Prints a line
    for each problem; the exit code is then 5.
    """
    from objckpt.log import read_log
    from objckpt.restore import open_checkpoint, verify
    from objckpt.store import open_store

    store = open_store(url, store_options(endpoint_url, region, profile, addressing, ca_bundle))
    commit = read_log(store).find(step)
    try:
        checkpoint = open_checkpoint(store, commit)
        with output.progress("verify") as progress:
            problems = [
                {"kind": p.kind, "key": p.key, "fqn": p.fqn, "rank": p.rank, "message": p.message}
                for p in verify(store, checkpoint, progress=progress)
            ]
    except (FormatError, IntegrityError) as err:  # of an index: nothing behind it can be read
        key = err.context.get("key")
        problems = [{"kind": err.kind, "key": key, "fqn": None, "rank": None, "message": str(err)}]
    if json:
        sizes = {"stored_bytes": commit.stored_bytes, "tensors": commit.tensors}
        output.document({"url": store.url, "step": commit.step, "ok": not problems} | sizes | {"problems": problems})
    elif problems:
        for problem in problems:
            output.line(output.printable(f"step {commit.step}: {problem['kind']}: {problem['message']}"))
    else:
        size = output.human(commit.stored_bytes)
        output.line(f"step {commit.step}: {commit.tensors} tensors, {size}: every byte is as recorded")
    return IntegrityError.exit_code if problems else 0
