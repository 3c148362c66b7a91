"""The sharding plan: which modules of a model are divided over the tensor-parallel ranks, and how.

In this order: what the user names, what the model publishes (Hugging Face's `base_model_tp_plan`), what is known here
of families that publish none; embedding and head over the vocabulary; all else is replicated.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.runtime.units import find_blocks

__all__ = ["Assigned", "Style", "embedding_of", "head_of", "plan_sharding"]

#: colwise: outputs divided; rowwise: inputs divided, outputs summed; vocab: an embedding or head divided along the
#: vocabulary; sequence: runs on this rank's tokens where sequences are cut; replicate: whole on every rank;
#: gather-output: colwise, its outputs gathered; split-input: rowwise, of an input that all ranks have; experts: a
#: module whose parameters hold all experts, each divided like an MLP; replicate-sum: whole, but used for this rank's
#: heads only, so that gradients are summed.
Style = Literal[
    "colwise", "rowwise", "vocab", "sequence", "replicate", "gather-output", "split-input", "experts", "replicate-sum"
]
#: What users may say.
ANNOTATIONS: tuple[Style, ...] = ("colwise", "rowwise", "vocab", "sequence", "replicate", "gather-output")

#: Hugging Face's names of styles. Those of parameters inside of experts say nothing new.
_PUBLISHED: dict[str, Style | None] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "gather-output",
    "rowwise_split_input": "split-input",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "replicate-sum",
    "replicate": "replicate",
    "moe_tp_experts": "experts",
    "packed_colwise": None,
    "packed_rowwise": None,
}
#: Plans of families that publish none, by model_type; names as seen from the base model.
_OWN: dict[str, dict[str, Style]] = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
}
#: Fused projections that published plans gather, not knowing their parts; here they are divided part by part.
_FUSED = {"qkv_proj": "o_proj", "gate_up_proj": "down_proj"}
#: Final norms with nothing but the head behind them. (GPT-2's `ln_f` is not among them: its output is given the shape
#: of the whole sequence.)
_FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm")
_NAMED = 5
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Assigned:
    """How a module is held, and who said so: `annotation`, `published`, `known`, `completed` or `default`."""

    style: Style
    source: str


def plan_sharding(model: nn.Module, annotations: Mapping[str, str]) -> dict[str, Assigned]:
    """The style of every module that holds parameters, by its global name.

    Args:
        model: any; nothing of it is changed.
        annotations: name patterns (`*` stands for one part of a name) to styles.

    Raises:
        ConfigError: an annotation of an unknown style, or one that no module has the name of.
        UnsupportedCombination: the model publishes a style that is not known, or nothing says how to divide it.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    _require_no_adapters(model, modules)
    chosen = {
        name: Assigned("replicate", "default")
        for name, module in modules.items()
        if next(module.parameters(recurse=False), None) is not None
    }
    chosen.update(_published(model, modules))
    _divide_fused(chosen)
    for found in (embedding_of(model), head_of(model)):
        name = next((name for name, module in modules.items() if module is found), None)
        if name is not None and chosen.get(name, Assigned("replicate", "default")).style != "vocab":
            chosen[name] = Assigned("vocab", "completed")
    given = _annotated(modules, annotations)
    chosen.update(given)
    if not any(entry.style in ("colwise", "gather-output", "experts") for entry in chosen.values()):
        raise UnsupportedCombination(
            f"tensor parallelism of a {type(model).__name__}",
            why="it publishes no plan (base_model_tp_plan), none is known of it, and no annotation divides a module",
            fix=f"name what is divided, Engine(..., sharding={_example(model)}), or set tp=1 and shard with zero=3",
        )
    _complete_norm(model, modules, chosen)
    return chosen


def _example(model: nn.Module) -> str:
    """An annotation as a user would write it: of the two matrices of an MLP in the model's blocks, where they show."""
    for prefix, block in find_blocks(model):
        linear = [(f"{prefix}.{name}", module) for name, module in block.named_modules() if type(module) is nn.Linear]
        for (up, one), (down, other) in pairwise(linear):
            if one.in_features == other.out_features and one.out_features == other.in_features > one.in_features:
                return json.dumps({_NUMBER.sub("*", up): "colwise", _NUMBER.sub("*", down): "rowwise"})
    return '{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}'


def _require_no_adapters(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    adapted = next((name for name, module in modules.items() if hasattr(module, "base_layer")), None)
    if adapted is not None:
        raise UnsupportedCombination(
            f"tensor parallelism of a {type(model).__name__} with adapters ({adapted})",
            why="each half of an adapter would have to be divided as the matrix that it adapts",
            fix="set tp=1 and shard with zero=3, which takes PEFT's adapters as they are",
        )


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The embedding of a model's tokens, as Hugging Face's models and the built-in decoder tell it."""
    return _told(model, "get_input_embeddings", nn.Embedding)


def head_of(model: nn.Module) -> nn.Module | None:
    """The projection to a model's vocabulary, where it has one."""
    return _told(model, "get_output_embeddings", nn.Linear)


def _told(model: Any, method: str, kind: type[nn.Module]) -> nn.Module | None:
    if not hasattr(model, method):
        return None
    try:
        found = getattr(model, method)()
    except (NotImplementedError, AttributeError):  # models without one say so in either way
        return None
    return found if isinstance(found, kind) else None


def _published(model: Any, modules: Mapping[str, nn.Module]) -> dict[str, Assigned]:
    plan: Mapping[str, str] | None = getattr(model, "_tp_plan", None)
    source = "published"
    if not plan or all("lm_head" in name for name in plan):  # the class publishes its head alone
        kind = getattr(getattr(model, "config", None), "model_type", "")
        prefix = str(getattr(model, "base_model_prefix", ""))
        own, source = _OWN.get(kind, {}), "known"
        plan = {f"{prefix}.{name}" if hasattr(model, prefix) and prefix else name: own[name] for name in own}
    found = {}
    for pattern, style in plan.items():
        if style not in _PUBLISHED:
            raise UnsupportedCombination(
                f"the style {style} of {pattern} in the plan of a {type(model).__name__}",
                why="this version does not know what it divides",
                fix="annotate the model's modules: Engine(..., sharding=...), or set tp=1",
            )
        known = _PUBLISHED[style]
        for name in _matching(pattern, modules):
            if known is not None and next(modules[name].parameters(), None) is not None:
                found[name] = Assigned(known, source)
    return found


def _divide_fused(chosen: dict[str, Assigned]) -> None:
    for name, entry in list(chosen.items()):
        prefix, _, leaf = name.rpartition(".")
        partner = f"{prefix}.{_FUSED.get(leaf, '')}"
        if entry.style == "gather-output" and chosen.get(partner, entry).style == "split-input":
            chosen[name], chosen[partner] = Assigned("colwise", "corrected"), Assigned("rowwise", "corrected")


def _annotated(modules: Mapping[str, nn.Module], annotations: Mapping[str, str]) -> dict[str, Assigned]:
    found: dict[str, Assigned] = {}
    for pattern, said in annotations.items():
        style = _PUBLISHED.get(said, said)
        if style is None or style not in (*ANNOTATIONS, "replicate-sum"):
            raise ConfigError(
                f"sharding: {pattern} = {said!r}", why="no such style", fix=f"use one of {', '.join(ANNOTATIONS)}"
            )
        names = _matching(pattern, modules)
        if not names:
            known = list(dict.fromkeys(_NUMBER.sub("*", name) for name in modules))
            near = difflib.get_close_matches(_NUMBER.sub("*", pattern), known, n=_NAMED, cutoff=0.4)
            raise ConfigError(
                f"sharding: no module is named {pattern}",
                why="`*` stands for one part of a name" + (f"; there are {', '.join(near)}" if near else ""),
                fix="name modules as model.named_modules() does",
            )
        found.update({name: Assigned(style, "annotation") for name in names})
    return found


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> Sequence[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in modules if expression.fullmatch(name)]


def _complete_norm(model: nn.Module, modules: Mapping[str, nn.Module], chosen: dict[str, Assigned]) -> None:
    """The final norm of a causal language model runs on cut sequences: the head gathers them."""
    head = head_of(model)
    divided = any(modules.get(name) is head and entry.style == "vocab" for name, entry in chosen.items())
    if head is None or not divided or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "Decoder")):
        return
    finals = [name for name in chosen if name.rpartition(".")[2] in _FINAL_NORMS and name.count(".") <= 2]
    if len(finals) == 1 and chosen[finals[0]].source == "default":
        chosen[finals[0]] = Assigned("sequence", "completed")
