"""What the synchronous and the asynchronous client share: the AWS chain, settings, and the taming of botocore.

botocore does several things by itself that a checkpoint store must decide: repeating requests, following regions,
asking for `100-continue`, adding checksum trailers. All of that is off here; the callers own it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import ssl
from typing import Any

import botocore.loaders
import botocore.session
from botocore import exceptions as boto
from botocore.handlers import add_expect_header

from objckpt.config import StoreOptions
from objckpt.errors import AccessError, UsageError
from objckpt.store import logmask
from objckpt.store.location import mask_url, without_userinfo

DEFAULT_REGION = "us-east-1"
DEFAULT_ENDPOINT = "https://s3.amazonaws.com"


def make_session(options: StoreOptions, cls: type[Any] = botocore.session.Session) -> Any:
    """A session of the standard AWS chain. `cls` is botocore's or aiobotocore's session class; nothing is requested."""
    logmask.install()
    session = cls(profile=options.profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    # One for both clients: it keeps the description of S3 that it has read, 12 MB and 50 ms for each.
    return botocore.loaders.create_loader(data_path)


def client_settings(session: Any, options: StoreOptions) -> dict[str, Any]:
    """Keyword arguments of `create_client`, without `config`.

    Raises:
        AccessError: the profile or the configuration files cannot be read.
        UsageError: the endpoint or the CA bundle cannot be used.
    """
    try:
        region = options.region or session.get_config_variable("region") or DEFAULT_REGION
        endpoint = options.endpoint_url or _configured_endpoint(session)
        bundle = options.ca_bundle or session.get_config_variable("ca_bundle")
    except (boto.ProfileNotFound, boto.ConfigParseError, boto.ConfigNotFound) as error:
        raise AccessError(f"the AWS configuration cannot be used: {error}", code=type(error).__name__) from error
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"the endpoint must start with http:// or https://, not {mask_url(endpoint)!r}")
    if bundle and not (endpoint or "").startswith("http://"):
        _check_bundle(bundle)
    return {
        "service_name": "s3",
        "region_name": region,
        "endpoint_url": without_userinfo(endpoint) if endpoint else None,
        "verify": bundle,
    }


def _check_bundle(path: str) -> None:
    # Later it would be an error of each connection, and those are repeated.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError as error:
        raise UsageError(f"the CA bundle {path} (ca_bundle or AWS_CA_BUNDLE) cannot be used: {error}") from error


def _configured_endpoint(session: Any) -> str | None:
    """AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile's; read here so that botocore sees no password in it."""
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.utils import ensure_boolean

    if ensure_boolean(session.get_config_variable("ignore_configured_endpoint_urls") or False):
        return None
    provider = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3")
    found = provider.provide()
    return str(found) if found else None


def config_settings(options: StoreOptions, read_timeout_s: float) -> dict[str, Any]:
    """Keyword arguments of botocore's `Config`."""
    return {
        "signature_version": "s3v4",
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": read_timeout_s,
        "max_pool_connections": options.connections,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": options.addressing, "payload_signing_enabled": options.sign_payload},
    }


def tame(client: Any) -> None:
    """Remove what botocore would do by itself."""
    events = client.meta.events
    events.unregister("before-call.s3", add_expect_header)  # a server that never answers 100 hangs the request for ever
    events.register_last("before-parameter-build.s3", _no_redirect)
    events.register_last("before-call.s3.DeleteObjects", _content_md5)


def _no_redirect(context: dict[str, Any], **_: Any) -> None:
    # A bucket elsewhere is an error that names the region: following it would hide a slow and costly mistake.
    context.setdefault("s3_redirect", {})["redirected"] = True


def _content_md5(params: dict[str, Any], **_: Any) -> None:
    # Every server takes the MD5 that this operation demanded from the start; several refuse botocore's newer CRC32.
    params["headers"]["Content-MD5"] = md5_of(params["body"])
    params["context"].pop("checksum", None)


def md5_of(data: Any) -> str:
    """The value of a Content-MD5 header: a guard against damage on the way, not against an attacker."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def swap_credentials(client: Any, credentials: Any) -> None:
    """Let an existing client sign with other credentials, keeping its open connections."""
    client._request_signer._credentials = credentials


def current_credentials(client: Any) -> Any:
    """The credentials object that the client signs with."""
    return client._request_signer._credentials
