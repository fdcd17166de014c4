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
