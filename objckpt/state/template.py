"""Match what the user wants filled with what a checkpoint holds. Touches nothing: the result says what to do.

Rules. Tensors are filled in place; those of a module on the meta device are made anew. In an `nn.Module` and in plain
mappings the keys must agree in both directions. For any other object with `load_state_dict` (optimizers, schedulers,
loaders) what was saved counts: a fresh optimizer has no state yet; but what it has already must be in the checkpoint.
Mappings and lists of plain values, and tuples that hold one, are replaced by what was saved.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from objckpt.errors import MismatchError, UsageError
from objckpt.format.fqn import to_fqn
from objckpt.format.values import TensorLeaf
from objckpt.state import shards
from objckpt.state.dtypes import dtype_name

Path = tuple[Any, ...]
Info = Callable[[TensorLeaf], tuple[str, tuple[int, ...]]]  # dtype name and shape of a stored leaf


@dataclass(slots=True)
class Match:
    """What to do, in this order: fill, then assign, then load."""

    fills: list[tuple[Path, torch.Tensor, TensorLeaf]] = field(default_factory=list)
    assigns: list[tuple[Any, Any, Path, Any]] = field(default_factory=list)  # container, key, path, neutral subtree
    loads: list[Load] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # in the state, not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, not in the state
    wrong: list[str] = field(default_factory=list)  # differences that no option lifts


@dataclass(slots=True)
class Load:
    """An object whose `load_state_dict` is to be called, with its filled own state or with the saved subtree."""

    owner: Any
    path: Path
    state: Any  # of a module: its state_dict(), filled in place
    tree: Any  # of another object: the neutral subtree
    reuse: dict[Path, torch.Tensor] = field(default_factory=dict)  # the optimizer's own tensors, filled in place

    def param_of(self, path: Path) -> torch.Tensor | None:
        """The parameter whose state in an optimizer a leaf at `path` is: `(*self.path, "state", number, name)`."""
        inner = path[len(self.path) :]
        if not isinstance(self.owner, torch.optim.Optimizer) or len(inner) != 3 or inner[0] != "state":
            return None
        params = [p for group in self.owner.param_groups for p in group["params"]]
        number = inner[1]
        return params[number] if type(number) is int and 0 <= number < len(params) else None


def patterns(only: str | list[str] | None) -> Callable[[str], bool]:
    """The test for `only`: fnmatch patterns of FQNs; "model.*" is understood as "model/*"."""
    if only is None:
        return lambda fqn: True
    wanted = [only] if isinstance(only, str) else list(only)
    if not wanted or not all(isinstance(p, str) for p in wanted):
        raise UsageError(f"only must be a pattern or a list of patterns, not {only!r}")
    wanted += [p.replace(".", "/", 1) for p in wanted if "/" not in p and "." in p]
    return lambda fqn: any(fnmatch.fnmatchcase(fqn, p) for p in wanted)


def match(into: Mapping[Any, Any], tree: Any, info: Info, *, only: str | list[str] | None, cast: bool) -> Match:
    """Compare `into` with the tree of a checkpoint. Objects are asked for their `state_dict()` once."""
    if not isinstance(into, Mapping):
        raise UsageError(f"restore fills a mapping of names to parts, not {type(into).__name__}")
    walk = _Walk(info, patterns(only), cast)
    walk.mapping(into, tree, ())
    return walk.out


def check(found: Match, *, strict: bool, step: int) -> None:
    """Raise ONE MismatchError that lists every difference in full; absent leaves are none if `strict=False`."""
    parts = [("differ", found.wrong)]
    if strict:
        parts = [("not in the checkpoint", found.missing), ("not in the state given", found.unexpected), *parts]
    lines = [f"  {title}: {name}" for title, names in parts for name in names]
    count = len(lines)
    if strict and _without_wrapper(found.missing) == _without_wrapper(found.unexpected) and found.missing:
        lines.append(
            '  one of the two is wrapped (DistributedDataParallel adds "module."): pass what is inside, model.module'
        )
    elif strict and (below := _moved(found.missing, found.unexpected)):
        lines.append(
            f"  in the checkpoint they are below {below!r}: give restore() a mapping that has the state under this name"
        )
    elif strict and (below := _moved(found.unexpected, found.missing)):
        lines.append(f"  in the state they are below {below!r}, and in the checkpoint they are not")
    if lines:
        leaves = f"{count} {'leaf' if count == 1 else 'leaves'}"
        hint = "\nstrict=False restores what agrees" if strict and not found.wrong else ""
        raise MismatchError(
            f"the checkpoint of step {step} and the state differ in {leaves}; nothing was changed\n"
            + "\n".join(lines)
            + hint,
            step=step,
            missing=found.missing,
            unexpected=found.unexpected,
            wrong=found.wrong,
        )


def _without_wrapper(names: list[str]) -> list[str]:
    return sorted(name.replace("/module.", "/").removeprefix("module.") for name in names)


def _moved(names: list[str], others: list[str]) -> str:
    """The mapping below which all of `names` are found among `others`; "" when there is none."""
    if not names:
        return ""
    there = set(others)
    tops = [other.removesuffix(f"/{names[0]}") for other in others if other.endswith(f"/{names[0]}")]
    return next((top for top in tops if all(f"{top}/{name}" in there for name in names)), "")


class _Walk:
    def __init__(self, info: Info, wanted: Callable[[str], bool], cast: bool) -> None:
        self.info, self.wanted, self.cast = info, wanted, cast
        self.out = Match()
        self.filled: dict[tuple[Any, ...], str] = {}

    def mapping(self, target: Mapping[Any, Any], saved: Any, path: Path) -> None:
        if not isinstance(saved, dict):
            self._differs(path, "a mapping in the state, another kind of value in the checkpoint")
            return
        inside_optimizer = (
            len(path) >= 2 and path[-2] == "state" and all(isinstance(v, torch.Tensor) for v in target.values())
        )
        if inside_optimizer and set(target) & set(saved) and set(target) != set(saved):
            # The state of one parameter in an optimizer: half of it is worse than none.
            both = ", ".join(sorted(map(str, set(target) ^ set(saved))))
            self._differs(path, f"the state of this parameter is there in part only; not in both: {both}")
            return
        for key in target:
            if key in saved:
                self.visit(target, key, target[key], saved[key], (*path, key))
            else:
                self.out.missing += self._names(target[key], (*path, key))
        for key in saved:
            if key not in target:
                self.out.unexpected += self._names(saved[key], (*path, key))

    def visit(self, parent: Any, key: Any, target: Any, saved: Any, path: Path) -> None:
        if isinstance(target, (torch.Tensor, np.ndarray)):
            self.tensor(target, saved, path)
        elif callable(getattr(target, "load_state_dict", None)) and callable(getattr(target, "state_dict", None)):
            self.owner(target, saved, path)
        elif isinstance(target, Mapping) and _holds_tensors(target):
            self.mapping(target, saved, path)
        elif type(target) in (list, tuple) and _holds_tensors(target) and type(saved) in (list, tuple):
            if len(target) == len(saved) and not _is_value(target):
                for i, (t, s) in enumerate(zip(target, saved, strict=True)):
                    self.visit(target, i, t, s, (*path, i))
            else:
                self.assign(parent, key, saved, path)
        else:
            self.assign(parent, key, saved, path)

    def assign(self, parent: Any, key: Any, saved: Any, path: Path) -> None:
        if not self.wanted(to_fqn(path)) and not any(map(self.wanted, _leaf_names(saved, path))):
            return
        if not isinstance(parent, (MutableMapping, MutableSequence)):
            self._differs(path, f"a value inside a {type(parent).__name__} cannot be replaced; use a dict or a list")
            return
        self.out.assigns.append((parent, key, path, saved))

    def tensor(self, target: torch.Tensor | np.ndarray[Any, Any], saved: Any, path: Path) -> None:
        fqn = to_fqn(path)
        if not self.wanted(fqn):
            return
        if type(saved) is not TensorLeaf:
            self._differs(path, "a tensor in the state, a plain value in the checkpoint")
            return
        if isinstance(target, np.ndarray):
            if not target.flags.writeable or any(s < 0 for s in target.strides):
                self._differs(path, "the array in the state cannot be written to")
                return
            tensor = torch.from_numpy(target)
        else:
            tensor = target.detach()
        dtype, shape = self.info(saved)
        known = type(target) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, np.ndarray)
        if not known and not shards.is_distributed(target):
            self._differs(path, f"a tensor subclass {type(target).__qualname__} in the state cannot be filled")
        elif tuple(tensor.shape) != shape:
            self._differs(path, f"shape {shape} in the checkpoint, {tuple(tensor.shape)} in the state")
        elif dtype_name(tensor.dtype, fqn) != dtype and not (self.cast and self._castable(dtype, tensor)):
            remedy = "; cast=True permits it" if self._castable(dtype, tensor) else ""
            self._differs(
                path, f"dtype {dtype} in the checkpoint, {dtype_name(tensor.dtype, fqn)} in the state{remedy}"
            )
        elif known and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            self._differs(path, "the tensor in the state is expanded: its elements share memory and cannot be filled")
        else:
            self.out.fills.append((path, tensor, saved))

    @staticmethod
    def _castable(stored: str, target: torch.Tensor) -> bool:
        return target.dtype.is_floating_point and "float" in stored

    def owner(self, target: Any, saved: Any, path: Path) -> None:
        if not any(map(self.wanted, _leaf_names(saved, path))):
            return
        own = target.state_dict()
        if isinstance(target, torch.nn.Module):
            fresh = _off_meta(target) if _on_meta(own) else None
            own = own if fresh is None else fresh.state
            self.out.loads.append(Load(fresh or target, path, own, None))
            self.mapping(own, saved, path)
            return
        load = Load(target, path, None, saved)
        self.out.loads.append(load)
        before = len(self.out.fills), len(self.out.unexpected)
        if isinstance(own, Mapping) and isinstance(saved, dict):
            self._optimizer(own, saved, path)
        if isinstance(target, torch.optim.Optimizer) and isinstance(saved, dict):
            self._params(saved, path)
        if isinstance(target, torch.optim.Optimizer):
            load.reuse = {p: t for p, t, _ in self.out.fills[before[0] :]}
        else:
            del self.out.fills[before[0] :]
        del self.out.unexpected[before[1] :]  # what was saved counts

    def _params(self, saved: dict[Any, Any], path: Path) -> None:
        """torch drops the state of parameters that no group has, without a word: training would begin with fresh moments."""
        groups, state = saved.get("param_groups"), saved.get("state")
        if not isinstance(groups, list) or not isinstance(state, dict):
            return
        known = {p for group in groups if isinstance(group, dict) for p in group.get("params", ())}
        lost = [repr(key) for key in state if type(key) is str and key.isdigit() and int(key) in known]
        if lost:
            self._differs(
                (*path, "state"),
                f"the state of {', '.join(lost[:3])} belongs to no parameter of its groups; torch.distributed.checkpoint makes "
                "text of the numbers: save get_optimizer_state_dict() with it, which has names",
            )

    def _optimizer(self, own: Mapping[Any, Any], saved: dict[Any, Any], path: Path) -> None:
        """Only the tensors of the object's own state are compared; its values are the checkpoint's business."""
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                if key in saved:
                    self.tensor(value, saved[key], (*path, key))
                else:
                    self.out.missing.append(to_fqn((*path, key)))
            elif isinstance(value, Mapping) and _holds_tensors(value):
                inner = saved.get(key)
                if not isinstance(inner, dict):
                    self.out.missing += self._names(value, (*path, key))
                elif all(isinstance(v, torch.Tensor) for v in value.values()):
                    self.mapping(value, inner, (*path, key))
                else:
                    self._optimizer(value, inner, (*path, key))

    def _differs(self, path: Path, why: str) -> None:
        if self.wanted(to_fqn(path)):
            self.out.wrong.append(f"{to_fqn(path)}: {why}")

    def _names(self, value: Any, path: Path) -> list[str]:
        return [name for name in _leaf_names(value, path) if self.wanted(name)]


class _Fresh:
    """A module built on the meta device, to be loaded with tensors that have memory. Ties stay ties."""

    def __init__(self, module: torch.nn.Module, state: dict[str, Any]) -> None:
        self.module, self.state = module, state

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        return self.module.load_state_dict(state, assign=True)


def _on_meta(state: Mapping[str, Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.device.type == "meta" for v in state.values())


def _off_meta(module: torch.nn.Module) -> _Fresh:
    """The module's state with a new CPU tensor for each on meta; all others are the module's own, so that they stay."""
    state = module.state_dict(keep_vars=True)
    made: dict[int, torch.Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            continue
        if id(value) not in made:
            new = torch.empty_like(value.detach(), device="cpu")
            is_parameter = isinstance(value, torch.nn.Parameter)
            made[id(value)] = torch.nn.Parameter(new, value.requires_grad) if is_parameter else new
        state[key] = made[id(value)]
    return _Fresh(module, state)


def _leaf_names(value: Any, path: Path) -> list[str]:
    if callable(getattr(value, "state_dict", None)):
        value = value.state_dict()
    if isinstance(value, Mapping) and value:
        return [name for key, child in value.items() for name in _leaf_names(child, (*path, key))]
    if type(value) in (list, tuple) and value:
        return [name for i, child in enumerate(value) for name in _leaf_names(child, (*path, i))]
    return [to_fqn(path)]


def _is_value(value: Any) -> bool:
    """Whether a sequence is a tuple that mixes tensors with values, such as numpy's RNG state: replaced as a whole."""
    mixed = type(value) is tuple and not all(map(_holds_tensors, value))
    return mixed and not any(callable(getattr(v, "load_state_dict", None)) for v in value)


def _holds_tensors(value: Any) -> bool:
    """Whether something inside can be filled in place or loaded."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if type(value) in (list, tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, (torch.Tensor, np.ndarray)) or callable(getattr(value, "load_state_dict", None))
