"""Bundles: ten thousand records by some dozen requests; without one, or with a broken one, the records themselves."""

from __future__ import annotations

from collections import Counter

import pytest
from support.log_writer import commit, session, writer
from support.memory_store import MemoryBucket, MemoryStore

from objckpt import limits
from objckpt.errors import FormatError, StoreError
from objckpt.format import bundle, checksums, keys, wire
from objckpt.log import Log, read_log, write_bundles
from objckpt.save.commit import LogWriter


def long(store: MemoryStore, count: int) -> LogWriter:
    """A log of `count` records."""
    by = writer(store)
    for step in range(1, count):
        commit(by, step)
    return by


def requests(store: MemoryStore) -> Counter[str]:
    found = Counter(operation for operation, _ in store.bucket.operations)
    store.bucket.operations.clear()
    return found


def bundles(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list(keys.BUNDLES)]


def large(store: MemoryStore) -> list[str]:
    """The names of the large bundles."""
    found = [(name, keys.parse_bundle(name)) for name in bundles(store)]
    return [name for name, parsed in found if parsed is not None and parsed.last - parsed.first == 15]


def singly(store: MemoryStore) -> Log:
    """The log as it is without any bundle."""
    bare = MemoryStore(url=store.url)
    for info in store.list(keys.LOG):
        bare.put(info.key, store.get(info.key, max_bytes=1 << 20))
    return read_log(bare)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles of 16 and 4 records in place of 256 and 32."""
    assert bundle.SIZES == (256, 32)
    monkeypatch.setattr(bundle, "SIZES", (16, 4))


@pytest.fixture
def store() -> MemoryStore:
    """40 records, two large bundles and the small ones."""
    made = MemoryStore()
    long(made, 40)
    return made


def test_a_long_log_is_read_by_few_requests(store: MemoryStore) -> None:
    found = [keys.parse_bundle(name) for name in bundles(store)]
    slots = sorted((name.first, name.last) for name in found if name is not None)
    assert slots == sorted([(0, 15), (16, 31), *((n, n + 3) for n in range(0, 36, 4))])
    alone = singly(store)
    requests(store)
    log = read_log(store)
    assert requests(store) == {"list": 2, "get": 3 + (40 - 36)}
    assert log.records == alone.records and not log.damaged and log.next_seq == 40 and log.bundled == 36
    assert read_log(store, log) is log
    assert requests(store) == {"list": 1}


def test_a_bundle_is_written_by_the_commit_after_it_is_due_and_once() -> None:
    store = MemoryStore()
    by = long(store, 4)
    assert bundles(store) == []
    commit(by, 999)
    assert len(bundles(store)) == 1
    requests(store)
    commit(by, 1000)
    assert requests(store) == {"put_if_absent": 1, "get": 1}
    later = writer(store, 1)  # another session knows of it
    requests(store)
    commit(later, 1001)
    assert requests(store) == {"put_if_absent": 1, "get": 1}


def test_a_session_makes_up_for_bundles_that_others_did_not_write(store: MemoryStore) -> None:
    names = bundles(store)
    store.delete(names)
    by = writer(store, 1)
    commit(by, 1001)
    written = bundles(
        store
    )  # by whomever a bundle is written, its name is the same; but for the two large ones no small ones
    assert (
        len(written) == 4
        and set(written) <= {*names, written[-1]}
        and large(store) == [n for n in names if n in written][:2]
    )


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["missing", "damaged", "truncated", "empty", "twice"])
def test_without_a_bundle_the_records_are_read(
    store: MemoryStore, which: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = large(store)[which]
    alone, data = singly(store), store.get(name, max_bytes=bundle.MAX_BYTES)
    if how == "missing":
        store.delete([name])
    elif how == "twice":
        store.put(name.replace(name.split(".")[1], "0" * 32), data)
    else:
        at = len(data) // 2
        broken = {"damaged": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "truncated": data[:-1], "empty": b""}
        store.put(name, broken[how])
    log = read_log(store)
    assert log.records == alone.records and not log.damaged
    assert log.bundled == (36 if how in ("missing", "twice") else which * 16)  # the small ones are there still
    assert ("is not used" in caplog.text) == (how in ("damaged", "truncated", "empty"))


def test_a_bundle_that_is_there_in_the_list_only(store: MemoryStore) -> None:
    class Gone(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            if key.startswith(keys.BUNDLES):
                self.bucket.objects.pop(self._location.full(key), None)
            return super().get(key, max_bytes=max_bytes)

    assert read_log(Gone(store.bucket)).records == singly(store).records


def test_a_bundle_that_cannot_be_fetched_is_an_error(store: MemoryStore) -> None:
    """A store that is down must not turn one request into hundreds."""

    class Down(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            if key.startswith(keys.BUNDLES):
                raise StoreError("503")
            return super().get(key, max_bytes=max_bytes)

    with pytest.raises(StoreError, match="503"):
        read_log(Down(store.bucket))


def test_a_bundle_that_cannot_be_written_harms_no_save() -> None:
    class NoBundles(MemoryStore):
        tried: list[str] = []

        def put(self, key: str, data: bytes) -> None:
            self.tried.append(key)
            raise StoreError("denied")

    store = NoBundles()
    by = long(store, 5)
    requests(store)
    commit(by, 999)  # not tried again at once
    assert requests(store) == {"put_if_absent": 1, "get": 1}
    assert bundles(store) == [] and len(read_log(store).checkpoints) == 5
    for step in range(1000, 1016):
        commit(by, step)
    assert len(store.tried) == 5 and all(key.startswith(keys.BUNDLES) for key in store.tried)


def test_no_bundle_over_a_damaged_record() -> None:
    store = MemoryStore()
    long(store, 3)
    store.put(keys.record(2), b"garbage")
    by = writer(store, 1)
    for step in range(1000, 1008):
        commit(by, step)
    assert bundles(store) == [] and [seq for seq, _ in read_log(store).damaged] == [2]


def test_no_bundle_of_records_that_have_changed() -> None:
    store = MemoryStore()
    by = long(store, 4)
    store.put(keys.record(2), store.get(keys.record(1), max_bytes=1 << 20))
    commit(by, 999)
    assert bundles(store) == []


def test_no_bundles_in_a_keyed_log() -> None:
    store = MemoryStore(MemoryBucket(conditional=False))
    by = writer(store, conditional=False)
    for step in range(20):
        commit(by, step)
    assert bundles(store) == [] and len(read_log(store).checkpoints) == 20


def test_no_bundles_of_a_log_that_has_become_a_keyed_one() -> None:
    store = MemoryStore()
    long(store, 4)
    by = writer(store, 1, conditional=False)
    for step in range(10, 20):
        commit(by, step)
    assert bundles(store) == []


def test_a_bundle_has_fields_that_this_version_does_not_know() -> None:
    store = MemoryStore()
    by = long(store, 4)
    body = wire.unseal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, store.get(keys.record(2), max_bytes=1 << 20), "test")
    newer = wire.seal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, body | {"from_the_future": 1})
    store.put(keys.record(2), newer)
    write_bundles(store, by.log)
    (name,) = bundles(store)
    parsed = keys.parse_bundle(name)
    assert parsed is not None
    assert bundle.decode(store.get(name, max_bytes=bundle.MAX_BYTES), parsed)[2] == newer


def test_too_large_a_bundle_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BYTES", 1000)
    store = MemoryStore()
    long(store, 20)
    assert bundles(store) == [] and len(read_log(store).checkpoints) == 19


# ---- the format ----------------------------------------------------------------------------------------------------


def test_round_trip_and_names() -> None:
    made = bundle.encode(256, [b"a", b"", b"ccc"])
    assert made is not None
    key, data = made
    name = keys.parse_bundle(key)
    assert name is not None and (name.first, name.last, name.key) == (256, 258, key)
    assert bundle.decode(data, name) == [b"a", b"", b"ccc"]
    for other in (key + "x", key.replace("log-bundles", "log"), key.replace("-0", "_0"), key.upper()):
        assert keys.parse_bundle(other) is None
    assert keys.parse_record(key) is None


@pytest.mark.parametrize(
    "body",
    [
        {"first": 0, "records": [b"a", b"b"]},
        {"first": 1, "records": [b"a"]},
        {"first": 1, "records": [b"a", b"b", b"c"]},
        {"first": 1, "records": [b"a", "b"]},
        {"first": 1, "records": b"ab"},
        {"first": "1", "records": [b"a", b"b"]},
        {"records": [b"a", b"b"]},
        {"first": 1},
    ],
)
def test_other_contents_are_refused(body: dict[str, object]) -> None:
    data = wire.seal(bundle.MAGIC, limits.FORMAT_VERSION, body)
    name = keys.BundleName(1, 2, checksums.digest_hex(data))
    with pytest.raises(FormatError, match="log-bundles/"):
        bundle.decode(data, name)
    with pytest.raises(FormatError, match="promises"):
        bundle.decode(data, keys.BundleName(1, 2, "0" * 32))


def test_sessions_after_a_long_log_get_their_epoch() -> None:
    store = MemoryStore()
    long(store, 20)
    assert writer(store, 1).epoch == 2 and read_log(store).opens[-1].session == session(1)
