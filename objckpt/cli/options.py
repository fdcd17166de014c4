"""Arguments and options that several verbs have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from objckpt.config import StoreOptions
from objckpt.errors import UsageError

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where the checkpoints are: s3://bucket/prefix.", show_default=False)
]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP", help="The checkpoint: STEP, STEP@SEQ or a tag; the newest by default."),
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


def takes_store(verb: Callable[..., int]) -> Callable[..., int]:
    """Make a verb with a parameter `options: StoreOptions` a command: its own options, then the store's and --debug.

    typer reads the signature of what this returns: that of the verb, with the parameters of `_given` for `options`.
    """
    own = inspect.signature(verb, eval_str=True)
    shared = inspect.signature(_given, eval_str=True).parameters

    @functools.wraps(verb)
    def command(**values: Any) -> int:
        options = _given(**{name: values.pop(name) for name in shared})
        return verb(**values, options=options)

    kept = [p for p in own.parameters.values() if p.name != "options"]
    command.__signature__ = own.replace(parameters=[*kept, *shared.values()])  # type: ignore[attr-defined]
    return command


def _given(
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    addressing: Addressing = "path",
    ca_bundle: CaBundle = None,
    debug: Debug = False,  # read by `main` from the command line
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
