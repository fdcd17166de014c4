"""Arguments and options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

from objckpt.config import StoreOptions
from objckpt.errors import UsageError

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where the checkpoints are: s3://bucket/prefix.", show_default=False)
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="The checkpoint of this step; the newest by default.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on errors, as OBJCKPT_DEBUG=1 does.")]
EndpointUrl = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", help="The S3 server, http:// or https://; AWS's chain by default."),
]
Region = Annotated[str | None, typer.Option("--region", metavar="NAME", help="The region of the bucket.")]
Profile = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="A profile of the AWS configuration files.")
]
Addressing = Annotated[
    str,
    typer.Option("--addressing", metavar="path|virtual", help="Bucket in the path or in the host name of requests."),
]
CaBundle = Annotated[
    str | None, typer.Option("--ca-bundle", metavar="FILE", help="PEM file of the authorities to trust.")
]


def store_options(
    endpoint_url: str | None, region: str | None, profile: str | None, addressing: str, ca_bundle: str | None
) -> StoreOptions:
    """The options of the store that a command line gave. UsageError for a value that is not acceptable."""
    if addressing not in ("path", "virtual"):
        raise UsageError(f'--addressing must be "path" or "virtual", not {addressing!r}')
    return StoreOptions(
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
        addressing="path" if addressing == "path" else "virtual",
        ca_bundle=ca_bundle,
    )
