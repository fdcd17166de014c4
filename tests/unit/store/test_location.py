from __future__ import annotations

import pytest

from objckpt.errors import UsageError
from objckpt.store import Location, mask_url, parse_url
from objckpt.store.location import without_userinfo


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", Location("bucket", "")),
        ("s3://bucket/", Location("bucket", "")),
        ("s3://bucket/run1", Location("bucket", "run1/")),
        ("s3://bucket/a/b-1_2.3/", Location("bucket", "a/b-1_2.3/")),
        ("s3://b/p", Location("b", "p/")),
    ],
)
def test_accepted(url: str, expected: Location) -> None:
    assert parse_url(url) == expected
    assert parse_url(expected.url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/p?versionId=x", "s3:/b/p", "b/p", "S3://B/p", "s3:///p", "s3://", "s3://b/p ", " s3://b/p",
        "https://host/b/p", "s3://b//runs//x/", "s3://b/a/../b", "s3://b/./x", "s3://b/a//", "s3://b/a b", "s3://b/a\n",
        "s3://b/a#f", "s3://b/ü", "s3://b/%2e%2e", "s3://b/a\\b", "s3://u:p@b/x", "",
    ],
)  # fmt: skip
def test_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not a valid s3:// URI"):
        parse_url(url)


@pytest.mark.parametrize("url", ["s3://b/" + "a" * 1100, "s3://b/" + "/".join(["a" * 100] * 11)])
def test_refused_when_keys_would_be_too_long(url: str) -> None:
    with pytest.raises(ValueError, match="s3:// URI"):
        parse_url(url)


def test_keys_are_relative_to_the_prefix_and_never_a_siblings() -> None:
    place = parse_url("s3://b/run1")
    assert place.full("log/x") == "run1/log/x"
    assert place.relative("run1/log/x") == "log/x"
    for foreign in ("run10/log/x", "run1/", "run1", "log/x", "run1/log/"):
        assert place.relative(foreign) is None
    for bad in ("", "/x", "a//b", "a/../b", "./a", "a/"):
        with pytest.raises(UsageError):
            place.full(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:MARK@host:9000/x", "http://***@host:9000/x"),
        ("at https://MARK@h/ and http://a:MARK@b/", "at https://***@h/ and http://***@b/"),
        ('"http://user:p@MARK@host/"', '"http://***@host/"'),
        ("http://user:MA/RK@host/", "http://***@host/"),
        ("http://host/a@b", "http://host/a@b"),
        ("s3://bucket/key", "s3://bucket/key"),
    ],
)
def test_passwords_in_urls_are_masked(text: str, expected: str) -> None:
    assert mask_url(text) == expected
    assert "MARK" not in without_userinfo(text)
