"""Keeps session tokens and passwords in URLs out of the debug logs of botocore, aiobotocore and urllib3."""

from __future__ import annotations

import logging
import re

from objckpt.store.location import mask_url

_TOKENS = re.compile(r"(?i)(x-amz-security-token['\"]?\s*[:=,]\s*b?['\"]?|<(?:token|sessiontoken)[^>]*>)[^\s'\"<>&;,]+")
_SECRETS = re.compile(
    r"(?i)((?:aws_secret_access_key|aws_session_token|secret_?key|secret_?access_?key)['\"]?\s*[:=]\s*b?['\"]?)[^\s'\"<>&;,]+"
)
# A filter works only on the logger that it is attached to, not on its children: so each is named.
_LOGGERS = (
    "botocore.auth", "botocore.endpoint", "botocore.hooks", "botocore.parsers", "botocore.httpsession",
    "botocore.regions",
    "botocore.credentials", "botocore.client", "botocore.awsrequest", "botocore.retryhandler", "botocore.utils",
    "botocore.httpchecksum", "botocore.handlers", "botocore.session", "botocore.configprovider", "botocore.loaders",
    "botocore.tokens", "botocore.crt.auth", "aiobotocore.httpsession", "aiobotocore.hooks", "aiobotocore.endpoint",
    "aiobotocore.credentials", "urllib3.connectionpool", "urllib3.util.retry", "aiohttp.client", "asyncio",
)  # fmt: skip


class _Mask(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        masked = mask(text)
        if masked != text:
            record.msg, record.args = masked, None
        if record.exc_info and record.exc_info[1] is not None:
            # The traceback's text may repeat the URL; its frames are botocore's and help nobody here.
            record.exc_text = mask(logging.Formatter().formatException(record.exc_info))
        return True


_MASK = _Mask()


def mask(text: str) -> str:
    """`text` without session tokens, secret keys written as settings, and user:password of URLs."""
    return mask_url(_SECRETS.sub(r"\1***", _TOKENS.sub(r"\1***", text)))


def install() -> None:
    """Mask from now on. Idempotent: a logger keeps one copy of a filter."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_MASK)
