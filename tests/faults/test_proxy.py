"""Saves and restores end to end, real processes and a real server, with a proxy between them that breaks what it is told to.

Whatever happens on the way: the checkpoint is committed once, or a clear error comes in bounded time; and the next save works.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.proxy import Proxy, Rule, s3_error
from support.servers import GIVEN, WeedServer, lead_to

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.errors import FormatError, IntegrityError, ObjckptError, SaveError, StoreError
from objckpt.format import keys
from objckpt.log import Log, read_log
from objckpt.store import open_store

pytestmark = pytest.mark.skipif(GIVEN, reason="its own server: some cases kill it")
MiB = 1 << 20
STATE_MIB = 18  # three parts
LIMIT_S = 60.0  # of anything that is waited for
STORE = StoreOptions(request_timeout_s=4.0, connect_timeout_s=4.0, retry_deadline_s=25.0, connections=4)
OPTIONS = SaveOptions(part_bytes=8 * MiB)

PART = r"partNumber=\d"
CREATE = r"\?uploads"
COMPLETE = r"uploadId=[^&]*$"
RECORD = r"/log/\d{20}\.msgpack"
INDEX = r"\.index(\?|$)"
PACK = r"\.pack(\?|$)"
HTML = (200, "text/html", b"<html><body>captive portal: please log in</body></html>")


class Line:
    """A server, a proxy before it, and a Checkpointer whose uploader goes through the proxy."""

    def __init__(self, server: WeedServer, proxy: Proxy, url: str, ckpt: Checkpointer) -> None:
        self.server, self.proxy, self.url, self.ckpt = server, proxy, url, ckpt
        self.step, self.log = 0, Log(url)
        self.past = open_store(url, StoreOptions(endpoint_url=server.endpoint_url))  # past the proxy

    def committed(self) -> list[int]:
        """The steps of the commit records, read past the proxy."""
        self.log = read_log(self.past, self.log)
        assert not self.log.damaged and not self.log.fenced
        return [commit.step for commit in self.log.commits]

    def save(self, rules: list[Rule], meanwhile: Callable[[], None] = lambda: None) -> ObjckptError | None:
        """A save under the rules, then a clean one. Returns how the first one failed, if it did."""
        before = self.committed()
        self.step += 1
        step, failed, began_s = self.step, None, time.monotonic()
        self.proxy.rules = rules
        try:
            handle = self.ckpt.save(step, state(step))
            meanwhile()
            handle.wait_committed(LIMIT_S)
        except SaveError as err:
            failed = err
        finally:
            self.proxy.rules = []
        assert time.monotonic() - began_s < LIMIT_S
        assert all(rule.hit for rule in rules), "a rule never acted"
        found = self.committed()
        assert found == (before if failed else [*before, step]), (found, failed)
        self.step += 1
        self.ckpt.save(self.step, state(self.step, 1)).wait_committed(LIMIT_S)
        assert self.committed() == [*found, self.step]
        if failed is None:
            assert same(self.ckpt.load(step), step)
        else:
            assert f"step {step}" in str(failed)
        return failed

    def restore(self, rules: list[Rule]) -> ObjckptError | None:
        """Restore under the rules, then again without. Returns how the first one failed, if it did."""
        first = self.committed()
        if 0 not in first:
            self.ckpt.save(0, state(0), overwrite=True).wait_committed(LIMIT_S)
        with Checkpointer(self.url, store=STORE) as reader:
            failed, into, began_s = None, state(9), time.monotonic()
            self.proxy.rules = rules
            try:
                assert reader.restore(into, step=0) == 0
                assert same(into, 0)
            except ObjckptError as err:
                failed = err
                assert into["step"] == 9  # values are handed over last
            finally:
                self.proxy.rules = []
            assert time.monotonic() - began_s < LIMIT_S
            assert all(rule.hit for rule in rules), "a rule never acted"
            into = state(9)
            assert reader.restore(into, step=0) == 0 and same(into, 0)
        return failed


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    server = WeedServer(tmp_path_factory.mktemp("weed"))
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch, Proxy(server.endpoint_url) as proxy:
            url = lead_to(server, patch)
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            with Checkpointer(url, store=STORE, options=OPTIONS) as ckpt:
                ckpt.prepare(state(0))
                made = Line(server, proxy, url, ckpt)
                with contextlib.closing(made.past):
                    yield made
    finally:
        server.stop()


def state(step: int, mib: int = STATE_MIB) -> dict[str, object]:
    base = step << 40
    return {"w": torch.arange(base, base + mib * MiB // 8), "step": step}


def same(found: dict[str, object], step: int, mib: int = STATE_MIB) -> bool:
    wanted = state(step, mib)
    return found["step"] == step and torch.equal(found["w"], wanted["w"])  # type: ignore[arg-type]


WHICH = {
    "part": ("PUT", PART),
    "create": ("POST", CREATE),
    "complete": ("POST", COMPLETE),
    "index": ("PUT", INDEX),
    "record": ("PUT", RECORD),
    "read-back of the record": ("GET", RECORD),
}


@pytest.mark.parametrize("which", WHICH)
def test_the_answer_is_lost_after_the_effect(line, which):
    assert line.save([Rule(*WHICH[which], times=1, answer_after=-1)]) is None


def test_an_orderly_end_in_place_of_an_answer(line):
    rules = [Rule(*WHICH[which], times=1, answer_after=-1, then="close") for which in ("part", "complete", "record")]
    assert line.save(rules) is None


def test_every_answer_of_a_commit_record_is_lost(line):
    """The record is there, whatever the writer hears: one commit, not two."""
    assert line.save([Rule("PUT", RECORD, times=3, answer_after=-1)]) is None


@pytest.mark.parametrize(("after", "then"), [(0, "reset"), (MiB, "reset"), (MiB, "close")])
def test_a_part_breaks_in_the_middle(line, after, then):
    before = len(line.proxy.requests)
    assert line.save([Rule("PUT", PART, times=3, request_after=after, then=then)]) is None
    assert sum("partNumber" in target for _, target in line.proxy.requests[before:]) >= 6


@pytest.mark.parametrize("which", ["index", "record"])
def test_a_small_object_breaks_in_the_middle(line, which):
    assert line.save([Rule(*WHICH[which], times=2, request_after=20)]) is None


@pytest.mark.parametrize("which", ["part", "record"])
def test_a_request_that_stalls(line, which):
    """Nothing moves any more, and nobody says so: the time-out of the request has to end it."""
    assert line.save([Rule(*WHICH[which], times=1, answer_after=-1, then="stall")]) is None


@pytest.mark.parametrize(
    ("which", "answer", "times"),
    [
        ("part", s3_error(503, "SlowDown"), 4),
        ("part", HTML, 1),
        ("create", s3_error(500, "InternalError"), 1),
        ("complete", s3_error(200, "InternalError"), 1),
        ("complete", HTML, 1),
        ("record", s3_error(503, "SlowDown"), 2),
        ("record", s3_error(500, "InternalError"), 1),
        ("record", s3_error(409, "ConditionalRequestConflict"), 1),
        ("record", HTML, 1),
        ("index", HTML, 1),
    ],
    ids=lambda value: f"{value[0]} {value[1][-4:]}" if type(value) is tuple else str(value),
)
@pytest.mark.parametrize("effect", [False, True], ids=["unsent", "sent"])
def test_wrong_answers(line, which, answer, times, effect):
    """Committed once, or a clear error: an answer that is none must never be taken for a success."""
    failed = line.save([Rule(*WHICH[which], times=times, canned=answer, effect=effect)])
    assert failed is None or answer[0] == 200


def test_a_storm_of_slow_down(line):
    """For some seconds everything is refused."""
    storm = Rule(canned=s3_error(503, "SlowDown"))

    def pass_over() -> None:
        end = time.monotonic() + LIMIT_S
        while storm.hit < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(2.0)
        storm.times = 0

    assert line.save([storm], pass_over) is None
    assert 3 <= storm.hit < 200  # they back off


def test_long_trouble_is_told_while_it_lasts_and_when_it_is_over(line, caplog):
    """The uploader's warnings come out of the trainer's logging; one for all requests, not one each."""
    storm = Rule("PUT", PART, canned=s3_error(503, "SlowDown"))

    def pass_over() -> None:
        end = time.monotonic() + LIMIT_S
        while "has not succeeded for" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.05)
        storm.times = 0

    assert line.save([storm], pass_over) is None
    told = [record.getMessage() for record in caplog.records if "succe" in record.getMessage()]
    assert len(told) == 2, told
    assert "UploadPart s3://" in told[0] and "SlowDown" in told[0] and "tried again for up to" in told[0]
    assert "succeeds again, after" in told[1]


def test_a_refusal_without_end_is_an_error_in_bounded_time(line):
    failed = line.save([Rule("PUT", PART, canned=s3_error(403, "AccessDenied"))])
    assert failed is not None and "AccessDenied" in str(failed)


def test_a_slow_way_to_the_server(line):
    assert line.save([Rule("PUT", PART, request_rate=8 * MiB), Rule(delay_s=0.1)]) is None


@pytest.mark.parametrize("moment", ["part", "complete", "record"])
def test_a_server_killed_in_mid_save_and_restarted(line, moment):
    """The proxy holds the request back until the server is down; then it is started again, with what it had."""
    held = Rule(*WHICH[moment], times=1, delay_s=0.7)

    def restart() -> None:
        end = time.monotonic() + LIMIT_S
        while not held.hit:
            assert time.monotonic() < end
            time.sleep(0.01)
        line.server.restart()

    line.save([held], restart)


def test_nothing_of_a_failed_save_stays(line):
    """Its parts are aborted, and the data of the attempt is deleted."""
    failed = line.save([Rule("PUT", INDEX, canned=s3_error(403, "AccessDenied"))])
    assert failed is not None
    gone, end = f"{keys.DATA}s{line.step - 1:012d}", time.monotonic() + LIMIT_S
    store = line.past
    while left := [info.key for info in store.list(gone)] + [upload.key for upload in store.list_uploads(gone)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


# ---- restore ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "after", "then"),
    [(PACK, 3 * MiB, "reset"), (PACK, 3 * MiB, "close"), (PACK, 3 * MiB, "stall"), (PACK, 0, "close"), (INDEX, 10, "reset"),
     (INDEX, 10, "close"), (RECORD, 10, "reset"), (RECORD, 10, "close"), ("list-type=2", 30, "reset"),
     ("list-type=2", 30, "close")],
)  # fmt: skip
def test_an_answer_breaks_in_the_middle(line, match, after, then):
    assert line.restore([Rule("GET", match, times=1 if then == "stall" else 2, answer_after=after, then=then)]) is None


@pytest.mark.parametrize("match", [PACK, INDEX, RECORD, "list-type=2"])
def test_a_page_of_somebody_else_is_no_data(line, match):
    """A log-in page with status 200. "No checkpoint" would be the worst of answers."""
    failed = line.restore([Rule("GET", match, times=1, canned=HTML)])
    assert failed is None or isinstance(failed, (StoreError, IntegrityError, FormatError))


def test_a_slow_way_from_the_server(line):
    assert line.restore([Rule("GET", PACK, answer_rate=8 * MiB), Rule(delay_s=0.1)]) is None


def test_a_store_that_refuses_is_an_error_and_no_missing_checkpoint(line):
    failed = line.restore([Rule("GET", "list-type=2", canned=s3_error(403, "AccessDenied"))])
    assert isinstance(failed, StoreError)
