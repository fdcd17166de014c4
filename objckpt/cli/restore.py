"""`objckpt restore`: a checkpoint into local files. A file appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objckpt.cli import output
from objckpt.cli.options import Json, Step, Url, takes_store
from objckpt.config import StoreOptions
from objckpt.errors import FormatError, MismatchError, UsageError

if TYPE_CHECKING:
    from objckpt.events import Progress
    from objckpt.restore import Checkpoint
    from objckpt.store import Store

_MAX_NAME_BYTES = 200  # file systems allow 255, and temporary names are longer
_LISTED = 20

Out = Annotated[
    str,
    typer.Option("--out", "-o", metavar="PATH", help="FILE.pt, FILE.safetensors, or a folder.", show_default=False),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="PATTERN", help='Leaves to restore, such as "model/*"; repeatable.'),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace files that exist.")]
Pickle = Annotated[
    bool, typer.Option("--pickle", help="Unpickle pickled values. This runs code that is in the checkpoint.")
]


@takes_store
def command(
    url: Url,
    out: Out,
    step: Step = None,
    only: Only = None,
    force: Force = False,
    pickle: Pickle = False,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Restore a checkpoint to local files; checks every byte.

    FILE.pt is written by torch.save and holds the nested state. FILE.safetensors holds the tensors by name; values
    that are not tensors are not written, and named on stderr. A folder gets one .pt file for each part of the state
    (model.pt, optim.pt, …).
    """
    from objckpt.log import read_log
    from objckpt.restore import open_checkpoint
    from objckpt.restore.removed import unless_removed
    from objckpt.store import open_store

    kind = _kind_of(out)
    if kind != "folder":
        _check_target(out, force)
    store = open_store(url, options)
    commit = read_log(store).find(step)
    write = {"pt": _write_pt, "safetensors": _write_safetensors, "folder": _write_folder}[kind]
    with unless_removed(store, commit), output.progress("restore") as progress:
        checkpoint = open_checkpoint(store, commit)
        job = _Job(store, checkpoint, only or None, pickle, progress, force)
        files = write(job, out)
    if json:
        output.document({"url": store.url, "step": commit.step, "files": files, "not_written": job.left_out})
    else:
        for file in files:
            output.line(output.printable(f"step {commit.step}: {file['path']}: {output.human(file['bytes'])}"))
    if job.left_out:
        shown = ", ".join(job.left_out[:_LISTED])
        more = f" and {len(job.left_out) - _LISTED} more" if len(job.left_out) > _LISTED else ""
        output.message(f"not written, as they are not tensors: {shown}{more}")
    return 0


class _Job:
    """What is to be restored. `left_out` names the leaves that the file format has no place for."""

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        only: list[str] | None,
        pickle: bool,
        progress: Progress,
        force: bool,
    ) -> None:
        from objckpt.restore.match import prune
        from objckpt.state.template import patterns

        self.store, self.progress, self.pickle, self.force = store, progress, pickle, force
        self.wanted, self.step = patterns(only), checkpoint.commit.step
        tree = prune(checkpoint.tree, self.wanted) if only else checkpoint.tree
        if tree is None:
            raise MismatchError(f"step {self.step}: no leaf matches --only {' --only '.join(only or ())}")
        self.checkpoint = replace(checkpoint, tree=tree)
        self.left_out: list[str] = []

    def state(self) -> Any:
        """The nested state."""
        from objckpt.restore import load

        return load(self.store, self.checkpoint, pickle=self.pickle, progress=self.progress)

    def tensors(self) -> dict[str, Any]:
        """FQN → tensor, of the tensors alone; the rest is noted in `left_out`."""
        from objckpt.format.fqn import to_fqn
        from objckpt.format.values import TensorLeaf
        from objckpt.restore import load
        from objckpt.restore.match import leaves

        flat: dict[str, Any] = {}
        for path, leaf in leaves(self.checkpoint.tree):
            fqn = to_fqn(path)
            if type(leaf) is TensorLeaf and self.wanted(fqn):
                flat[fqn] = replace(leaf, numpy=False)
            elif path and self.wanted(fqn):
                self.left_out.append(fqn)
        if not flat:
            raise MismatchError(f"step {self.step}: there is no tensor to write")
        tensors: dict[str, Any] = load(self.store, replace(self.checkpoint, tree=flat), progress=self.progress)
        return tensors


# ---- the three forms -----------------------------------------------------------------------------------------------


def _write_pt(job: _Job, out: str) -> list[dict[str, Any]]:
    from objckpt.integrations.export import write_pt

    state = job.state()
    with _replacing(out, job.force) as temporary:
        with open(temporary, "wb") as file:
            write_pt(state, file)
    return [_written(out)]


def _write_safetensors(job: _Job, out: str) -> list[dict[str, Any]]:
    from objckpt.integrations.export import write_safetensors

    tensors = job.tensors()
    metadata = {"format": "pt", "objckpt.url": job.store.url, "objckpt.step": str(job.step)}
    with _replacing(out, job.force) as temporary:
        write_safetensors(tensors, temporary, metadata)
    return [_written(out)]


def _write_folder(job: _Job, out: str) -> list[dict[str, Any]]:
    from objckpt.integrations.export import write_pt

    names = {key: file_name(key) for key in job.checkpoint.tree}
    for name in names.values():
        _check_target(os.path.join(out, name), job.force, folder_may_be_missing=True)
    state = job.state()
    made = not os.path.isdir(out)
    os.makedirs(out, exist_ok=True)
    try:
        with ExitStack() as all_or_none:  # the renames come last, together
            for key, part in state.items():
                temporary = all_or_none.enter_context(_replacing(os.path.join(out, names[key]), job.force))
                with open(temporary, "wb") as file:
                    write_pt(part, file)
    except BaseException:
        if made:
            _remove_empty(out)
        raise
    return [_written(os.path.join(out, names[key])) for key in state]


def file_name(key: Any) -> str:
    """The file for one part of a state. FormatError for a key that is no plain name: it could lead elsewhere."""
    good = (
        type(key) is str
        and key.isprintable()
        and not key.startswith((".", "-"))
        and not any(c in key for c in '/\\:*?"<>|')
        and 0 < len(key.encode()) <= _MAX_NAME_BYTES
    )
    if not good:
        shown = repr(key)
        shown = shown if len(shown) <= 80 else shown[:80] + "…"
        raise FormatError(f"{shown} is not a safe file name; restore to a .pt file instead of a folder")
    return f"{key}.pt"


# ---- files ---------------------------------------------------------------------------------------------------------


def _kind_of(out: str) -> str:
    suffix = os.path.splitext(out)[1].lower()
    if out.endswith("/") or os.path.isdir(out) or not suffix:
        return "folder"
    if suffix in (".pt", ".pth"):
        return "pt"
    if suffix == ".safetensors":
        return "safetensors"
    raise UsageError(f"--out {out}: end it in .pt, in .safetensors, or in / for a folder")


def _check_target(path: str, force: bool, folder_may_be_missing: bool = False) -> None:
    """Before anything is downloaded."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists; --force replaces it")
    if os.path.isdir(folder):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write to the folder {folder}")
    elif os.path.lexists(folder) or not folder_may_be_missing:
        raise UsageError(f"there is no folder {folder}")


@contextmanager
def _replacing(path: str, force: bool) -> Iterator[str]:
    """A temporary file beside `path`, which takes its name when the block has succeeded, and is removed when not."""
    folder, name = os.path.split(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name[:40]}.", suffix=".tmp", dir=folder or ".")
    os.close(descriptor)
    with output.removed_on_end(temporary) as keep:
        yield temporary
        _finish(temporary)
        if not force and os.path.lexists(path):
            raise UsageError(f"{path} has appeared meanwhile; --force replaces it")
        os.replace(temporary, path)
        keep()


def _finish(temporary: str) -> None:
    """To disk before the rename: else a crash of the machine could leave the name without the bytes."""
    umask = os.umask(0)
    os.umask(umask)
    descriptor = os.open(temporary, os.O_RDWR)
    try:
        os.fchmod(descriptor, 0o666 & ~umask)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(path: str) -> dict[str, Any]:
    return {"path": path, "bytes": os.path.getsize(path)}


def _remove_empty(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        pass
