from __future__ import annotations

import pytest

from objckpt.errors import StoreError
from objckpt.store.retry import Fault
from objckpt.store.translate import Where, error_of


@pytest.mark.parametrize(
    ("operation", "off", "advised"),
    [("UploadPart", False, True), ("UploadPart", True, False), ("GetObject", False, False)],
)
def test_a_bad_upload_names_the_option_that_sends_no_checksum(operation: str, off: bool, advised: bool) -> None:
    """Some servers refuse the header without saying what it is that they refuse."""
    fault = Fault("answer", "InvalidRequest", "", 400)
    found = error_of(fault, Where(operation, "http://x", "bucket", "data/x"), checksums_off=off)
    assert type(found) is StoreError and ('checksums="off"' in str(found)) is advised


def test_missing_credentials_name_what_to_set() -> None:
    missing = Fault("credentials", "NoCredentialsError", "Unable to locate credentials")
    at_aws, elsewhere = (
        str(error_of(missing, Where("ListObjectsV2", endpoint, "bucket")))
        for endpoint in ("https://s3.eu-west-1.amazonaws.com", "http://127.0.0.1:9000")
    )
    assert "Set AWS_ACCESS_KEY_ID" in at_aws and "for another store set AWS_ENDPOINT_URL" in at_aws
    assert "Set AWS_ACCESS_KEY_ID" in elsewhere and "AWS_ENDPOINT_URL" not in elsewhere
    profile = str(error_of(Fault("credentials", "ProfileNotFound", "nope"), Where("Connect", "x", "bucket")))
    assert "AWS_PROFILE" in profile and "AWS_ACCESS_KEY_ID" not in profile
