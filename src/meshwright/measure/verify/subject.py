"""The model that is verified, on any process alike: how it is built, its batches, its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.measure.target import load_built, load_function
from meshwright.measure.verify.hugging_face import (
    IGNORED,
    batch_for,
    find_class,
    kind_of,
    labels_of,
    lengths,
    require_transformers,
    small_config,
)
from meshwright.runtime import ModelLoss
from meshwright.runtime._torch import BatchNormBase
from meshwright.runtime.loss import LossFunction
from meshwright.runtime.tensors import find_tensors, map_values

__all__ = ["MOST_PARAMETERS", "Subject", "find_subject", "load_code"]

#: A model that is run as it is may have so many: all its gradients and updates are kept, in float64, on every rank.
MOST_PARAMETERS = 10_000_000
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_FORMS = "a module that takes token ids, a Hugging Face model, or (module, inputs, loss, targets)"


@dataclass(frozen=True)
class Subject:
    """A model with real values in float64 and without dropout, its loss, and how its batches are made."""

    name: str
    model: nn.Module
    loss: LossFunction
    batch: Callable[[int, int], Any]
    """A global batch of (rows, seed)."""
    labels: str
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def load_code(asked: Mapping[str, Any]) -> None:
    """Import what building a model by its config needs, so that forked ranks have it.

    Raises:
        ConfigError: Transformers is not installed, or has no such class.
    """
    if asked["kind"] == "config":
        require_transformers(asked["name"])
        config, _ = small_config(asked["table"], name=asked["name"], depth=3, sequence=17)
        find_class(config, asked["table"].get("architectures"), asked["name"])


def find_subject(
    asked: Mapping[str, Any], *, depth: int, sequence: int, tp: int = 1, annotated: bool = False
) -> Subject:
    """The subject that `ask_model` described; `depth` blocks at least, where it can be chosen.

    Raises:
        ConfigError: it cannot be built, is too large, or has no loss that is understood.
        UnsupportedCombination: `tp` does not divide its heads.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if asked["kind"] == "config":
            made = _of_config(asked, depth=depth, sequence=sequence, tp=tp, annotated=annotated)
        else:
            made = _of_code(asked, sequence)
    _require_small(made.model, made.name, asked["kind"])
    _require_rows_apart(made.model, made.name)
    quiet = _without_dropout(made.model.to(torch.float64).train())
    notes = dict.fromkeys([*made.notes, *(["dropout off"] if quiet else [])])
    return replace(made, notes=tuple(notes))


def _require_rows_apart(model: nn.Module, name: str) -> None:
    norm = next((key for key, module in model.named_modules() if isinstance(module, BatchNormBase)), None)
    if norm is not None:
        raise ConfigError(
            f"{name} has batch norms ({norm})",
            why="they normalise over the rows of all ranks; one process with the same microbatches has others",
            fix="verify a copy with GroupNorm or LayerNorm in their place",
        )


def _of_config(asked: Mapping[str, Any], *, sequence: int, **sizes: Any) -> Subject:
    name, table = asked["name"], asked["table"]
    require_transformers(name)
    config, reduced = small_config(table, name=name, sequence=sequence, **sizes)
    kind = find_class(config, table.get("architectures"), name)
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in kind(config).parameters())
        if count > MOST_PARAMETERS:
            raise ConfigError(
                f"the small copy of {name} still has {count:,} parameters",
                why=f"at most {MOST_PARAMETERS:,} are run, and {config.model_type} has sizes that are not known here",
                fix="give a function that builds a small one: file.py:function",
            )
        model = kind(config)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(
            f"a small copy of {name} cannot be built: {kind.__name__}",
            why=f"{type(error).__name__}: {error}; made smaller were {', '.join(reduced.changes)}",
            fix="give a function that builds a small one: file.py:function",
        ) from error
    found = _hugging_face(name, model, sequence)
    return replace(found, changes=tuple(reduced.changes), notes=(*reduced.notes, *found.notes))


def _hugging_face(name: str, model: Any, sequence: int) -> Subject:
    """A Hugging Face model with its own loss."""
    config, notes = model.config, []
    sort = kind_of(model, config)
    if getattr(config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation("eager")
        notes.append("experts one after the other, for their fused product has no float64")
    if sort == "texts" and config.pad_token_id is None:  # it tells where each text ends
        config.pad_token_id = 0

    def batch(rows: int, seed: int) -> dict[str, Tensor]:
        return batch_for(sort, config, rows=rows, sequence=sequence, seed=seed)

    return Subject(name, model, ModelLoss(), batch, labels_of(sort), notes=tuple(notes))


def _of_code(asked: Mapping[str, Any], sequence: int) -> Subject:
    name = asked["name"]
    torch.set_default_dtype(torch.float64)  # what a forward makes by itself goes with the parameters
    if asked["kind"] == "module":
        return _of_module(name, torch.load(asked["file"], weights_only=False), sequence)
    light, function = None, load_function(asked["text"])
    with contextlib.suppress(MeshwrightError):  # what cannot be built without values is built with them
        light = load_built(asked["text"])
    _require_small(light[0] if isinstance(light, tuple) and light else light, name, "function")
    torch.manual_seed(5)
    try:
        built = function()
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} failed", why=f"{type(error).__name__}: {error}", fix="let the function build the model by itself"
        ) from error
    if isinstance(built, nn.Module):
        return _of_module(name, built, sequence)
    if isinstance(built, tuple) and len(built) in (2, 4) and isinstance(built[0], nn.Module):
        return _with_inputs(name, *built)
    raise ConfigError(f"{name} returned a {type(built).__name__}", fix=f"return {_FORMS}")


def _of_module(name: str, model: nn.Module, sequence: int) -> Subject:
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(model, "loss_function") and kind_of(model, config):
        return _hugging_face(name, model, sequence)
    embedding = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
    if embedding is None:
        raise ConfigError(
            f"{name} is a {type(model).__name__} without an embedding",
            why="a module alone is taken for a language model",
            fix=f"let the function return {_FORMS}",
        )
    words = embedding.num_embeddings

    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(words, (rows, sequence + 1), generator=generator)
        kept = torch.arange(sequence)[None] < lengths(rows, sequence)[:, None]
        return tokens[:, :-1], tokens[:, 1:].where(kept, IGNORED)

    return Subject(name, model, _next_token, batch, "labels that are not -100")


def _next_token(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy over the labels that count."""
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ConfigError(
            "the model returns no logits of batch x sequence x vocabulary",
            why="a module alone is taken for a language model",
            fix=f"let the function return {_FORMS}",
        )
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, labels.ne(IGNORED).sum()


def _with_inputs(name: str, model: nn.Module, inputs: Any, loss: Any = None, targets: Any = None) -> Subject:
    own = loss is None and isinstance(inputs, Mapping) and "labels" in inputs and hasattr(model, "loss_function")
    if loss is None and not own:
        raise ConfigError(
            f"{name} returned (module, inputs), without a loss",
            why="the loss says what is added up over ranks and microbatches",
            fix="return (module, inputs, loss, targets), with loss(outputs, targets) -> (sum, weight)",
        )
    given = inputs if isinstance(inputs, Mapping) and targets is None else (inputs, targets)

    def batch(rows: int, seed: int) -> Any:
        return _varied(given, rows, seed)

    return Subject(name, model, ModelLoss() if own else loss, batch, "what its loss counts")


def _varied(example: Any, rows: int, seed: int) -> Any:
    """So many rows like those of an example: its own and others, none twice.

    Numbers get noise of their own size; ids, masks and labels are those of the example, turned along the sequence.
    """
    found = [tensor.shape[0] for tensor in find_tensors(example) if tensor.dim() and tensor.shape[0]]
    if not found:
        raise ConfigError(
            "the example inputs hold no tensor with a dim",
            why="the first dim of the inputs counts sequences",
            fix="give a tensor, a tuple of tensors, or a mapping of the model's keyword arguments",
        )
    count, generator = found[0], torch.Generator().manual_seed(seed)
    first = seed * rows

    def vary(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.double()
        if not tensor.dim() or tensor.shape[0] != count:
            return tensor
        made = []
        for row in range(rows):
            turn, place = divmod(first + row, count)
            entry = tensor[place]
            if tensor.is_floating_point():
                entry = entry + torch.randn(entry.shape, generator=generator, dtype=torch.float64) * _spread(tensor)
            elif turn and entry.dim():
                entry = entry.roll(turn, 0)
            elif turn:
                entry = tensor[(place + turn) % count]
            made.append(entry)
        return torch.stack(made)

    return map_values(vary, example)


def _spread(tensor: Tensor) -> float:
    size = float(tensor.abs().mean()) if tensor.numel() else 0.0
    return size or 1.0


def _require_small(model: Any, name: str, kind: str) -> None:
    if not isinstance(model, nn.Module) or kind == "config":
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise ConfigError(
            f"{name} has {count:,} parameters",
            why=f"a model that is not known by its config.json is run as it is, and at most {MOST_PARAMETERS:,} are",
            fix="give a function that builds a small one of the same classes",
        )


def _without_dropout(model: nn.Module) -> bool:
    """Turn dropout off wherever a module keeps a probability for it; whether there was any."""
    found = False
    for module in model.modules():
        names = ["p"] if isinstance(module, _DROPOUTS) else []
        names += [name for name in vars(module) if "drop" in name.lower()]
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                found = True
    return found
