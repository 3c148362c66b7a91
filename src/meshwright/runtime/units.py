"""Units: what ZeRO gathers and reduces at once. Found in any module, without knowing the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.errors import ConfigError

__all__ = ["Blocks", "Owner", "Unit", "choose_blocks", "find_blocks", "finer_blocks", "make_units", "owners"]

Blocks = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Owner:
    """One place where a parameter hangs: a module and the parameter's name in it."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class Unit:
    """A unit: its name, the modules whose forward uses it, and its parameters by global name with all their owners.

    The first unit of a model is the root unit: everything outside the blocks.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: dict[str, tuple[Owner, ...]]


def owners(model: nn.Module) -> dict[str, tuple[Owner, ...]]:
    """Every parameter once, by its first global name, with all places where it hangs (several when it is tied)."""
    names: dict[int, str] = {}
    found: dict[str, list[Owner]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = names.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
            found.setdefault(full, []).append(Owner(module, name))
    return {name: tuple(places) for name, places in found.items()}


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model in order: the children of its outermost lists (`ModuleList`, `Sequential`, `ModuleDict`).

    A list counts when at least two of its children hold parameters. A model without such a list has no blocks: all of
    it is the root unit. A module that stands in a list twice is one block.
    """
    blocks: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(prefix: str, module: nn.Module) -> None:
        children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
        holding = [(name, child) for name, child in children if next(child.parameters(), None) is not None]
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and len(holding) >= 2:
            for name, child in holding:
                if id(child) not in seen and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                    seen.add(id(child))
                    blocks.append((name, child))
                elif id(child) not in seen:
                    walk(name, child)
            return
        for name, child in children:
            walk(name, child)

    walk("", model)
    return blocks


def choose_blocks(model: nn.Module, names: Sequence[str] | None) -> Blocks:
    """The blocks that are named, as `model.named_modules()` names them, or those that are found.

    Raises:
        ConfigError: there is no such module, or it is a container whose forward is never called.
    """
    if names is None:
        return find_blocks(model)
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ConfigError(
            f"blocks={', '.join(unknown)}: no such modules in the model",
            why=f"the model has {', '.join(list(modules)[1:8])}, ...",
            fix="name modules as model.named_modules() does",
        )
    for name in names:
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            raise ConfigError(
                f"blocks={name} is a {type(modules[name]).__name__}, not a block",
                why="a block is a module whose forward is called",
                fix=f"name its children: {name}.0, {name}.1, ...",
            )
    found = {id(modules[name]): (name, modules[name]) for name in reversed(names)}
    return list(reversed(found.values()))


def finer_blocks(model: nn.Module, count: int) -> list[tuple[str, nn.Module]]:
    """At least `count` blocks of a model that keeps no lists of them, where it has so many modules.

    Its outermost modules; of those the one with most parameters gives way to its children until there are enough.
    """
    found = [(name, child) for name, child in model.named_children() if _size(child)]
    while len(found) < count:
        splits = [entry for entry in found if any(_size(child) for child in entry[1].children())]
        if not splits:
            break
        name, module = max(splits, key=lambda entry: _size(entry[1]))
        at = next(index for index, entry in enumerate(found) if entry[1] is module)
        found[at : at + 1] = [(f"{name}.{part}", child) for part, child in module.named_children() if _size(child)]
    return [entry for entry in found if not isinstance(entry[1], (nn.ModuleList, nn.ModuleDict))]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def make_units(
    model: nn.Module, *, unit_blocks: int, blocks: Sequence[tuple[str, nn.Module]] | None = None
) -> list[Unit]:
    """Cut a model into the root unit and groups of `unit_blocks` consecutive blocks.

    Blocks that share a parameter, or a module with one, become one unit; a block that shares one with the rest of the
    model joins the root unit (a tied weight must be gathered and reduced once). Units without parameters are left out.

    Raises:
        ConfigError: the model has no parameters.
    """
    places = owners(model)
    if not places:
        raise ConfigError(
            "the model has no parameters", why="there is nothing to train", fix="give a model with parameters"
        )
    listed = list(find_blocks(model) if blocks is None else blocks)
    groups_of: dict[int, set[int]] = {id(module): {0} for module in _outside(model, [block for _, block in listed])}
    for index, (_, block) in enumerate(listed):
        for module in block.modules():
            groups_of.setdefault(id(module), set()).add(1 + index // unit_blocks)
    parent = list(range(1 + -(-len(listed) // unit_blocks)))

    def find(group: int) -> int:
        while parent[group] != group:
            group = parent[group]
        return group

    for where in places.values():
        groups = {find(group) for owner in where for group in groups_of[id(owner.module)]}
        lowest = min(groups)
        for group in groups:
            parent[group] = lowest
    members: dict[int, list[tuple[str, nn.Module]]] = {}
    for index, entry in enumerate(listed):
        members.setdefault(find(1 + index // unit_blocks), []).append(entry)
    parameters: dict[int, dict[str, tuple[Owner, ...]]] = {}
    for name, where in places.items():
        parameters.setdefault(find(min(groups_of[id(where[0].module)])), {})[name] = where
    units = [Unit("root", (model,), parameters[0])] if 0 in parameters else []
    for group, entries in sorted(members.items()):
        if group and group in parameters:
            units.append(Unit(_span([name for name, _ in entries]), tuple(m for _, m in entries), parameters[group]))
    return units


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are reached without going through a block."""
    found: dict[int, nn.Module] = {}
    stops, left = {id(block) for block in blocks}, [model]
    while left:
        module = left.pop()
        if id(module) not in found and id(module) not in stops:
            found[id(module)] = module
            left.extend(module.children())
    return list(found.values())


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
