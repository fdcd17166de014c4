"""`objckpt doctor`: says whether a store can be used, as it is reached from here, and how it is used best."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from objckpt import limits
from objckpt.cli import output
from objckpt.cli.options import Json, Url, takes_store
from objckpt.config import StoreOptions
from objckpt.errors import AccessError, BucketError, ObjckptError, StoreError

if TYPE_CHECKING:
    from objckpt.store.s3 import S3Store
    from objckpt.store.speed import Rate

Quick = Annotated[bool, typer.Option("--quick", help="Measure no throughput.")]

_BUDGET_S = 9.0  # of the throughput
_ANSWER_S = 20.0  # a store that takes longer for a small request is reported as not answering
_WARN_SKEW_S, _MOST_SKEW_S = 60.0, 900.0  # S3 refuses requests from 15 minutes on

Status = Literal["ok", "FAIL", "warn", "-"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. "FAIL": no saving and restoring; "warn": something else does not work; "-": not known."""

    name: str
    status: Status
    detail: str


@dataclass
class Report:
    """What was found out, as far as it came."""

    url: str
    checks: list[Check] = field(default_factory=list)
    capabilities: dict[str, Any] = field(default_factory=dict)
    clock_skew_s: float | None = None
    put_s: float | None = None
    get_s: float | None = None
    rates: Sequence[Rate] = ()
    log: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0

    def add(self, name: str, status: Status, detail: str) -> None:
        self.checks.append(Check(name, status, detail))

    def fail(self, name: str, error: ObjckptError) -> None:
        self.add(name, "FAIL", str(error))
        self.exit_code = self.exit_code or error.exit_code


@takes_store
def command(
    url: Url,
    quick: Quick = False,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Try out a store: credentials, permissions, what the server can do, its clock and its speed.

    Each request that objckpt sends is really tried, with small objects under URL/probe/ that are deleted again; the
    throughput takes about ten seconds and up to 1.5 GB of traffic. Nothing else is written, and nothing need be there yet.
    The exit code is 0 when states can be saved and restored, else that of the first error.
    """
    from objckpt.store import parse_url
    from objckpt.store.s3 import S3Store

    short = replace(options, retry_deadline_s=_ANSWER_S, request_timeout_s=_ANSWER_S)
    store = S3Store(parse_url(url), short)
    report = Report(store.url)
    with _raised_signals() as seen:
        try:
            _examine(store, report, quick=quick)
        except KeyboardInterrupt:  # not left to typer, which would say nothing
            output.message("interrupted")
            return 128 + (seen[0] if seen else signal.SIGINT)
        finally:
            store.close()
    advice = recommend(report, options)
    if json:
        output.document(_document(report, advice))
    else:
        for text in _lines(report, advice):
            output.line(output.printable(text))
    return report.exit_code


@contextmanager
def _raised_signals() -> Iterator[list[int]]:
    """Signals that would end the process at once raise KeyboardInterrupt here: what was written is deleted first.

    Gives the list that SIGTERM is noted in.
    """
    seen: list[int] = []
    before = {}

    def terminated(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        # By way of SIGINT, as an event loop knows that one: it cancels its task, rather than lose the exception somewhere.
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminated}
    for number, handler in handlers.items():
        if callable(signal.getsignal(number)):  # nohup and the background jobs of scripts ignore them on purpose
            before[number] = signal.signal(number, handler)
    try:
        yield seen
    finally:
        for number, former in before.items():
            signal.signal(number, former)


# ---- the examination, one thing after the other: what comes later needs what came before -----------------------------


def _examine(store: S3Store, report: Report, *, quick: bool) -> None:
    from objckpt.store.probe import PROBES

    root = f"{PROBES}{secrets.token_hex(8)}-"
    if not _reach(store, root, report):
        return
    try:
        _try(store, root, report, quick)
    except ObjckptError as err:
        report.fail("endpoint", err)
    finally:
        _sweep(store, root, report)


def _reach(store: S3Store, root: str, report: Report) -> bool:
    from objckpt.store import trials

    bucket = store.url.removeprefix("s3://").partition("/")[0]
    try:
        who = store.identity()
        report.add("endpoint", "-", f"{who['endpoint']}, region {who['region']}, {store.options.addressing} style")
        report.add(
            "credentials",
            "-",
            f"from {who['provider']}" + (f", access key {who['key_id']}" if len(who["key_id"]) > 1 else ""),
        )
        clock = trials.contact(store, root)
    except StoreError as err:
        skewed = err.context.get("code") == "RequestTimeTooSkewed"
        name = "clock" if skewed else "credentials" if isinstance(err, AccessError) else "bucket"
        name = name if isinstance(err, (AccessError, BucketError)) else "endpoint"
        report.checks = [check for check in report.checks if check.name != name]
        report.fail(name, err)
        return False
    report.checks = [replace(check, status="ok") for check in report.checks]
    if clock is None:
        report.add("bucket", "-", f"{bucket}: not known, as listing is refused")
        return True
    report.add("bucket", "ok", bucket)
    report.clock_skew_s = round(clock.skew_s, 1)
    if abs(clock.skew_s) < _WARN_SKEW_S:
        report.add("clock", "ok", f"within {max(1, round(abs(clock.skew_s)))} s of the store's")
    else:
        report.add(
            "clock",
            "warn",
            f"this host's is {clock.skew_s:+.0f} s from the store's: set it by NTP, as S3 refuses requests "
            f"from {_MOST_SKEW_S:.0f} s on",
        )
    return True


def _try(store: S3Store, root: str, report: Report, quick: bool) -> None:
    from objckpt.store import speed, trials
    from objckpt.store.probe import probe

    works = {}
    for trial in trials.try_all(store, root):
        works[trial.name] = trial.ok is True
        if trial.ok:
            report.add(trial.name, "ok", trial.action)
        elif trial.error is not None and trial.needed:
            report.fail(trial.name, trial.error)
        elif trial.ok is None:
            report.add(trial.name, "-", trial.why)
        else:
            report.add(trial.name, "warn", f"{trial.why} Without it: {trial.without}.")
    if works["put"] and works["get"]:
        report.capabilities = probe(store, at_once=4)
        report.put_s, report.get_s = speed.latency_s(store, root)
    if works["list"] and works["get"]:
        _read_log(store, report)
    if quick or not report.capabilities:
        return
    if not (works["multipart abort"] and works["delete"] and works["multipart part"]):
        report.add("throughput", "-", "not measured: what that writes could not be removed")
        return
    report.rates = speed.rates(store, root, budget_s=_BUDGET_S)


def _read_log(store: S3Store, report: Report) -> None:
    from objckpt.log import read_log

    exclusive = report.capabilities.get("conditional_put")
    try:
        log = read_log(store)
    except ObjckptError as err:
        report.fail("log", err)
        return
    keyed = log.keyed if log.capabilities else None if exclusive is None else not exclusive
    mode = None if keyed is None else "keyed" if keyed else "plain"
    report.log = {"mode": mode, "records": len(log.records), "checkpoints": len(log.checkpoints)}
    told = f"{len(log.records)} records, {len(log.checkpoints)} checkpoints" if log.records else "empty"
    status: Status = "ok"
    if mode is None:
        status, told = "-", f"{told}; its form is not known: {report.capabilities.get('conditional_put_evidence', '')}"
    elif keyed:
        status = "warn"
        told += f"; {mode} form: this store has no conditional writes, so two jobs that write here at once are not kept apart"
    else:
        told += f"; {mode} form: a second writer is kept out"
    if log.capabilities and exclusive is not None and exclusive == keyed:
        status = "warn"
        told += "; the store answers otherwise now than the last session has recorded"
    if log.damaged:
        status, told = "warn", f"{told}; {len(log.damaged)} records cannot be read: {log.damaged[0][1]}"
    report.add("log", status, told)


def _sweep(store: S3Store, root: str, report: Report) -> None:
    """Remove what is there still, such as a write whose answer came after its deletion."""
    try:
        left = [info.key for info in store.list(root)]
    except ObjckptError:  # told already; what was written was deleted by its name
        return
    try:
        left = [key for key, _ in store.delete(left)]
    except ObjckptError:  # told already, too
        pass
    try:
        for upload in store.list_uploads(root):
            store.abort_upload(upload.key, upload.upload_id)
    except ObjckptError:
        pass
    if left:
        report.add("left behind", "warn", f"the store refuses to delete {', '.join(left)}")


# ---- what follows from it ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """Options that differ from the defaults, each with its reason."""

    store: dict[str, Any]
    save: dict[str, Any]
    reasons: list[str]

    def lines(self) -> list[str]:
        """Python, to be pasted."""
        pairs = (("StoreOptions", self.store), ("SaveOptions", self.save))
        return [f"{cls}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for cls, given in pairs if given]


def recommend(report: Report, given: StoreOptions) -> Advice:
    """Pure: the options for this store. Those given on the command line stay."""
    store = {f.name: getattr(given, f.name) for f in fields(given) if getattr(given, f.name) != f.default}
    save: dict[str, Any] = {}
    reasons: list[str] = []
    if report.capabilities.get("checksum_crc64nvme") is False:
        store["checksums"] = "off"
        reasons.append("the store does not know CRC-64/NVME headers")
    speeds = {(r.part_bytes, r.concurrency): r.bytes_per_s for r in report.rates if r.direction == "write"}
    some, many = (speeds.get((16 * limits.MiB, n)) for n in (4, 8))
    if some and many and many > 1.3 * some:
        store["connections"] = 16
        reasons.append(f"8 connections are {many / some:.1f} times as fast as 4, so more may be faster still")
    elif some and many and many < 0.7 * some:
        store["connections"] = 4
        reasons.append(f"4 connections are {some / many:.1f} times as fast as 8")
    large = speeds.get((64 * limits.MiB, 8))
    if many and large and large > 1.2 * many:
        save["part_bytes"] = 64 * limits.MiB
        reasons.append(f"parts of 64 MiB are {large / many:.1f} times as fast as those of 16 MiB")
    slowest = min((v / n for (_, n), v in speeds.items() if v), default=None)
    if slowest and 64 * limits.MiB / slowest > given.request_timeout_s / 2:
        store["request_timeout_s"] = float(round(3 * 64 * limits.MiB / slowest))
        reasons.append("a part of 64 MiB takes long on one connection")
    return Advice(store, save, reasons)


# ---- printing ------------------------------------------------------------------------------------------------------


def _document(report: Report, advice: Advice) -> dict[str, Any]:
    latency = None if report.put_s is None else {"put": report.put_s, "get": report.get_s}
    return {
        "url": report.url,
        "ok": report.exit_code == 0,
        "checks": [asdict(check) for check in report.checks],
        "capabilities": report.capabilities,
        "clock_skew_s": report.clock_skew_s,
        "latency_s": latency,
        "throughput": [asdict(rate) for rate in report.rates],
        "log": report.log,
        "recommended": {"store_options": advice.store, "save_options": advice.save, "reasons": advice.reasons},
    }


def _lines(report: Report, advice: Advice) -> Iterator[str]:
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        yield f"{check.status:<4}  {check.name:<{width}}  {check.detail}"
    if report.capabilities:
        yield ""
        yield "the store:"
        for name, value in report.capabilities.items():
            yield f"  {name.replace('_', ' ')}: {'not known' if value is None else _plain(value)}"
    if report.put_s is not None and report.get_s is not None:
        yield f"  latency: PUT {report.put_s * 1000:.1f} ms, GET {report.get_s * 1000:.1f} ms (4 KiB, median)"
    yield from _speeds(report.rates)
    yield ""
    if report.exit_code:
        failed = next(check.name for check in report.checks if check.status == "FAIL")
        yield f"verdict: this store cannot be used yet: {failed} failed"
        return
    yield "verdict: states can be saved here and restored"
    yield "recommended: " + (", ".join(advice.lines()) or "the default options")
    for reason in advice.reasons:
        yield f"  {reason}"


def _plain(value: Any) -> str:
    return "yes" if value is True else "no" if value is False else str(value)


def _speeds(rates: Sequence[Rate]) -> Iterator[str]:
    if not rates:
        return
    counts = sorted({rate.concurrency for rate in rates})
    rows: dict[tuple[str, int], list[str]] = {}
    for rate in rates:
        shown = "-" if rate.bytes_per_s is None else f"{rate.bytes_per_s / 1e6:.0f}"
        rows.setdefault((rate.direction, rate.part_bytes), []).append(shown)
    yield ""
    yield "MB/s by size of the parts and number of connections:"
    head = ["", "part", *map(str, counts)]
    body = [[direction, output.human(size), *shown] for (direction, size), shown in rows.items()]
    for text in output.table(head, body, right=head[1:]):
        yield "  " + text
    if any(rate.bytes_per_s is None for rate in rates):
        yield "  -: not measured, as it would take too long or more connections than the options allow"
