"""Initial weights that do not depend on the layout, each rank keeping only its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.errors import ConfigError
from meshwright.runtime.absent import absent_of
from meshwright.runtime.adapters import adapter_init, original_name
from meshwright.runtime.boxes import Held, zeros_like_own
from meshwright.runtime.cuts import Cut, Cuts
from meshwright.runtime.pretrained import Pretrained
from meshwright.runtime.seeds import preserved_random_state, seed_for
from meshwright.runtime.units import Owner, owners

__all__ = ["materialise", "meta_parameters", "share_values", "store_parameters_as"]


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device and their buffers real.

    (`to_empty` on a model that was built on the meta device would leave garbage in every buffer.) Values that a
    constructor gives its parameters are not kept, so loading weights inside is refused.

    Raises:
        ConfigError: weights are loaded inside, or a parameter is replaced by one with other values.
    """
    register, load = nn.Module.register_parameter, nn.Module.load_state_dict

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if self._parameters.get(name) is not None:
                raise _values_lost(f"parameter {name} of a {type(self).__name__} is given new values")
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise _values_lost(f"weights are loaded into a {type(self).__name__}")

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]  # put back below
    nn.Module.load_state_dict = refuse  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module.load_state_dict = load  # type: ignore[method-assign]


def _values_lost(what: str) -> ConfigError:
    return ConfigError(
        f"{what} while the model builder runs",
        why="a builder's model gets its initial values from its init functions, so these would be lost",
        fix="pass the built model instead of the function: Engine(build(), ...), or the files: Engine(build, ..., "
        "weights=folder)",
    )


def materialise(
    model: nn.Module,
    *,
    device: torch.device,
    seed: int,
    given: Pretrained | None = None,
    cuts: Cuts | None = None,
    tp_rank: int = 0,
) -> None:
    """Give every parameter its initial values: those that are given, and what is meta still from the init functions.

    The init functions run module by module: a module's own parameters are allocated whole, initialised with the random
    stream of (seed, module name), and cut to this rank's slices before the next module is touched, so at most one
    module is whole at a time. The init function is the model's `_init_weights(module)` (Hugging Face's convention) or
    the module's `reset_parameters()`; adapters have PEFT's. A module whose parameters are all given is passed over.

    Args:
        model: its parameters have the shapes that this tensor-parallel rank holds.
        device: where they get their values.
        seed: of all random streams.
        given: files with values of some of them, or of all.
        cuts: how parameters lie over the tensor-parallel ranks, by name; one without an entry is whole on each.
        tp_rank: this rank's number among them.

    Raises:
        ConfigError: a module has parameters but no init function.
        CheckpointError: what is given cannot be read.
    """
    cuts = cuts or {}
    if given is not None:
        _take_given(model, device, given, cuts, tp_rank)
    names = {id(module): name for name, module in model.named_modules()}
    whole_shapes = {owner: cuts[name].shape for name, where in owners(model).items() if name in cuts for owner in where}
    places = {name: where for name, where in owners(model).items() if _get(where[0]).is_meta}
    by_module: dict[int, tuple[nn.Module, dict[str, tuple[Owner, ...]]]] = {}
    for name, where in places.items():
        by_module.setdefault(id(where[0].module), (where[0].module, {}))[1][name] = where
    with preserved_random_state(device), torch.no_grad():
        for module, parameters in by_module.values():
            sharded = {name: _get(where[0]) for name, where in parameters.items()}
            for where in parameters.values():
                _put_whole(where[0], whole_shapes, device)
                if _get(where[0]).is_floating_point():
                    _get(where[0]).fill_(torch.nan)  # what stays so has no initial value
            own = {where[0].name for where in parameters.values()}
            borrowed = {name: p for name, p in module.named_parameters(recurse=False) if name not in own}
            for name in borrowed:  # what has its values, here or in another module, keeps them
                _put_whole(Owner(module, name), whole_shapes, device)
            elsewhere = absent_of(module)  # drawn too, so that what follows is drawn as where all are
            for name, zeros in elsewhere.items():
                shape = cuts[full].shape if (full := f"{names[id(module)]}.{name}") in cuts else zeros.shape
                module.__dict__[name] = torch.empty(shape, dtype=zeros.dtype, device=device)
            torch.manual_seed(seed_for(seed, "init", original_name(model, names[id(module)])))
            _init_function(model, module, names[id(module)])()
            for name, tied in borrowed.items():
                setattr(module, name, tied)
            module.__dict__.update(elsewhere)
            for name, where in parameters.items():
                _require_values(name, module, _get(where[0]))
                _place(where, _sliced(_get(where[0]), sharded[name], cuts.get(name), tp_rank))
    if given is not None:
        given.fill_buffers(model)


def _require_values(name: str, module: nn.Module, parameter: nn.Parameter) -> None:
    if parameter.isnan().any():
        raise ConfigError(
            f"parameter {name} has no initial value after the init function of its {type(module).__name__}",
            why="a builder's model is initialised module by module, and another module's function may set this one",
            fix="pass the built model instead of the function: Engine(build(), ...), or the files: Engine(build, ..., "
            "weights=folder)",
        )


def _take_given(model: nn.Module, device: torch.device, given: Pretrained, cuts: Cuts, tp_rank: int) -> None:
    """Give the parameters that are stored in files their values, allocating only this rank's part of each."""
    targets: dict[str, Held] = {}
    for name, where in owners(model).items():
        if name in given:
            parameter = _get(where[0])
            if parameter.is_meta:
                room = zeros_like_own(parameter.detach(), device)
                parameter = nn.Parameter(room, requires_grad=parameter.requires_grad)
                _place(where, parameter)
            targets[name] = Held(parameter, cuts.get(name), tp_rank)
    given.fill(targets)


def share_values(model: nn.Module, device: torch.device, given: Pretrained | None = None) -> None:
    """Move what is real of a model (all, or the buffers beside meta parameters) to the device, with rank 0's values.

    What is given is read by every rank itself, so nothing of it is sent.
    """
    with torch.no_grad():
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if not tensor.is_meta and (given is None or name not in given):
                    value = tensor.contiguous()
                    dist.broadcast(value, src=0)
                    tensor.copy_(value)


def store_parameters_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Store every floating-point parameter in `dtype`."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _get(owner: Owner) -> nn.Parameter:
    parameter: nn.Parameter = getattr(owner.module, owner.name)
    return parameter


def _place(where: tuple[Owner, ...], parameter: nn.Parameter) -> None:
    for owner in where:
        setattr(owner.module, owner.name, parameter)


def _put_whole(owner: Owner, whole_shapes: Mapping[Owner, tuple[int, ...]], device: torch.device) -> None:
    """Room for a whole parameter in place of what this rank has of it: init functions look at shapes."""
    held = _get(owner)
    whole = torch.empty(whole_shapes.get(owner, held.shape), dtype=held.dtype, device=device)
    setattr(owner.module, owner.name, nn.Parameter(whole, requires_grad=held.requires_grad))


def _sliced(whole: nn.Parameter, meta: nn.Parameter, cut: Cut | None, tp_rank: int) -> nn.Parameter:
    """This rank's part: what its tensor-parallel rank has of it, and of that its shard."""
    if cut is None and not isinstance(meta, DTensor):
        return whole
    local = whole.detach() if cut is None else cut.take(whole.detach(), tp_rank)
    if isinstance(meta, DTensor):
        local = distribute_tensor(local, meta.device_mesh, meta.placements, src_data_rank=None)
    return nn.Parameter(local, requires_grad=meta.requires_grad)


def _init_function(model: nn.Module, module: nn.Module, name: str) -> Callable[[], Any]:
    adapter = adapter_init(model, module, name)
    if adapter is not None:
        return adapter
    whole_model = getattr(model, "_init_weights", None)
    if callable(whole_model):
        return lambda: whole_model(module)
    own = getattr(module, "reset_parameters", None)
    if callable(own):
        return own  # type: ignore[no-any-return]  # whatever it returns is not looked at
    raise ConfigError(
        f"module {name or 'root'} ({type(module).__name__}) has parameters but no init function",
        why="a model that is given as a builder is initialised module by module",
        fix="give it a reset_parameters() method or the model an _init_weights(module) method, or pass a built model",
    )
