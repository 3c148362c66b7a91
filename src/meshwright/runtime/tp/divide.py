"""Dividing: from the styles of a model's modules to the slices of each parameter that the ranks hold."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.runtime.cuts import Cut, Segment, even_segments
from meshwright.runtime.tp.heads import Heads, find_heads
from meshwright.runtime.tp.plan import Assigned
from meshwright.runtime.units import owners

__all__ = ["APART", "HEAD_AFTER_HEAD", "Region", "Sharding", "divide"]

_COLUMNS = ("colwise", "gather-output")
_ROWS = ("rowwise", "split-input")
_WHOLE = ("replicate", "replicate-sum", "sequence")
#: Names of fused weights, by how their parts lie.
_QUERIES_KEYS_VALUES = ("qkv_proj", "c_attn", "qkv", "Wqkv", "wqkv", "in_proj")
HEAD_AFTER_HEAD = ("query_key_value",)
_GATE_AND_UP = ("gate_up_proj", "gate_up", "w13", "fc1_gate_up")
#: Arguments of attention that hold ALiBi's slopes, or learned biases, of all heads.
_BIASES_OF_HEADS = ("alibi", "position_bias", "relative_position_bias", "rel_pos_bias")
#: Attention divides so many matrices at most; where more stand together, an MLP's are among them.
APART = 3
Parts = list[list[Segment]]


@dataclass(frozen=True)
class Region:
    """Divided matrices between an activation that all ranks have and the sum of their results.

    Attributes:
        parent: the module that holds the first of them, by name.
        columns: its modules whose outputs are divided.
        gathers: whether these outputs are gathered again, and what follows is computed alike by all ranks.
        heads: where it is attention.
    """

    parent: str
    columns: tuple[str, ...]
    gathers: bool
    heads: Heads | None


@dataclass
class Sharding:
    """A model's modules over the tensor-parallel ranks.

    Attributes:
        styles: of every module that holds parameters.
        cuts: of every parameter, by its global name.
        regions: in the model's order.
        widths: of each divided module: all ranks' channels.
    """

    styles: Mapping[str, Assigned]
    cuts: dict[str, Cut] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    widths: dict[str, list[int]] = field(default_factory=dict)

    def is_whole(self, name: str) -> bool:
        """Whether every rank computes all outputs of a divided module."""
        return self.cuts[f"{name}.weight"].replicated


def divide(model: nn.Module, styles: Mapping[str, Assigned], ranks: int, *, blocks: Sequence[str] = ()) -> Sharding:
    """Find how every parameter is cut. Nothing of the model is changed.

    Args:
        model: any.
        styles: of its modules.
        ranks: tensor-parallel ones.
        blocks: names of the blocks in which sequences are cut; none where they are not.

    Raises:
        UnsupportedCombination: heads that `ranks` does not divide, or a module that cannot be divided as it is asked.
        ConfigError: divided outputs that nothing sums up.
    """
    modules = dict(model.named_modules())
    sharding = Sharding(styles)
    _find_regions(sharding, modules, ranks)
    heads = {name: _heads_of_column(region, name, modules) for region in sharding.regions for name in region.columns}
    cuts: dict[int, Cut] = {}
    for name, entry in styles.items():
        for parameter, cut in _cuts_of(sharding, name, modules[name], entry.style, heads, ranks):
            if cuts.setdefault(id(parameter), cut) != cut:
                raise _tied(name)
    for name, entry in styles.items():  # a module that is to be whole, but shares a weight that is not
        if entry.style in _WHOLE and any(id(own) in cuts for own in modules[name].parameters(recurse=False)):
            raise _tied(name)
    _norms_of_heads(sharding, modules, cuts, ranks)
    shares = _shares(sharding, modules, blocks)
    for name, places in owners(model).items():
        parameter = getattr(places[0].module, places[0].name)
        whole = Cut.whole(tuple(parameter.shape), ranks, partial=id(parameter) in shares)
        sharding.cuts[name] = cuts.get(id(parameter), whole)
    return sharding


def _tied(name: str) -> UnsupportedCombination:
    return UnsupportedCombination(
        f"{name} shares a weight that another module divides otherwise",
        why="a tied weight is divided once",
        fix="annotate the modules that share it alike",
    )


def _shares(sharding: Sharding, modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> set[int]:
    """The replicated parameters whose gradients are shares of each rank: of its heads, or of its tokens."""
    found: set[int] = set()
    gathering = [f"{region.parent}." for region in sharding.regions if region.gathers]
    inside = [f"{name}." for name in blocks]
    for name, entry in sharding.styles.items():
        of_heads = entry.style == "replicate-sum"
        if entry.style == "replicate" and entry.source != "annotation":
            of_heads = _stands_at_heads(sharding, modules, name)
        of_tokens = bool(blocks) and (
            entry.style == "sequence" or (name.startswith(tuple(inside)) and not name.startswith(tuple(gathering)))
        )
        if entry.style in _WHOLE and (of_heads or of_tokens):
            found.update(id(parameter) for parameter in modules[name].parameters(recurse=False))
        elif entry.style in _ROWS and blocks and name.startswith(tuple(inside)):  # a bias of its tokens
            found.update(id(bias) for bias in [getattr(modules[name], "bias", None)] if bias is not None)
    return found


def _stands_at_heads(sharding: Sharding, modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether a module of attention sees heads; a norm as wide as what enters it, in a block without a module of its
    own for attention, does not."""
    for region in sharding.regions:
        if region.heads is not None and name.startswith(f"{region.parent}."):
            entering = _sizes(region.columns[0], modules[region.columns[0]])[1]
            shapes = {tuple(parameter.shape) for parameter in modules[name].parameters(recurse=False)}
            return shapes != {(entering,)} or entering == region.heads.size
    return False


def _find_regions(sharding: Sharding, modules: Mapping[str, nn.Module], ranks: int) -> None:
    styles = sharding.styles
    by_parent: dict[str, list[str]] = {}
    for name in modules:
        if name in styles and styles[name].style in _COLUMNS:
            by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    rows = [name for name, entry in styles.items() if entry.style in _ROWS]
    for parent, columns in by_parent.items():
        kinds = {styles[name].style for name in columns}
        if kinds == {"colwise"} or len(kinds) > 1:
            _require_sum(parent, columns, rows)
        if len(kinds) > 1:
            raise UnsupportedCombination(
                f"{parent}: {', '.join(columns)} are partly colwise, partly gather-output",
                why="what follows would be computed on a part of one and all of the other",
                fix="annotate them alike",
            )
        gathers = kinds == {"gather-output"}
        if not gathers and hasattr(modules[parent], "mp_num"):  # CodeGen's, interleaved over shards of its own
            raise _unknown(
                columns[0], "queries, values and keys lie in it shard by shard, for a number of shards of its own"
            )
        outputs = {name.rpartition(".")[2]: _sizes(name, modules[name])[0] for name in columns}
        heads = None if gathers else find_heads(modules[parent], outputs, ranks)
        if heads is not None:
            _require_own_heads(parent, modules[parent])
            fused = any(leaf in _QUERIES_KEYS_VALUES for leaf in outputs) and heads.groups != heads.queries
            heads.require_divisible(parent, separate=not fused)
        sharding.regions.append(Region(parent, tuple(columns), gathers, heads))


def _require_own_heads(name: str, attention: nn.Module) -> None:
    """Refuse attention that is handed an entry for each head of the whole model."""
    taken = next((one for one in inspect.signature(attention.forward).parameters if one in _BIASES_OF_HEADS), None)
    if taken is not None:
        raise UnsupportedCombination(
            f"tensor parallelism of {name}",
            why=f"it is handed {taken}, which has an entry for each of all heads, and a rank has some of them",
            fix='annotate its projections as "replicate" and divide the MLPs alone, or set tp=1 and shard with zero=3',
        )


def _require_sum(parent: str, columns: list[str], rows: list[str]) -> None:
    """Some rowwise module must stand in the same block: under the same parent, or under its parent."""
    above = parent.rpartition(".")[0]
    if not any(name.startswith((f"{parent}.", f"{above}.") if above else f"{parent}.") for name in rows):
        raise ConfigError(
            f"{', '.join(columns)} are colwise, and nothing beside them is rowwise",
            why="their outputs stay divided until a rowwise module sums the ranks' results",
            fix="annotate the module that follows as rowwise, or these as gather-output",
        )


def _cuts_of(
    sharding: Sharding, name: str, module: nn.Module, style: str, heads: Mapping[str, Heads | None], ranks: int
) -> list[tuple[nn.Parameter, Cut]]:
    if style in _WHOLE:
        return []
    if style == "experts":
        return _experts(name, module, ranks)
    if style == "vocab" and not isinstance(module, (nn.Embedding, nn.Linear)):
        raise _unknown(
            name, f"a {type(module).__name__} has no vocabulary: nn.Embedding or nn.Linear are divided along it"
        )
    if style in _ROWS:
        _sizes(name, module)
    weight: nn.Parameter = module.weight  # type: ignore[assignment]  # all kinds that are divided have one
    bias: nn.Parameter | None = getattr(module, "bias", None)
    if style == "vocab":
        total = weight.shape[0]
        segments = [[one] for one in even_segments(total, ranks)]
        length = -(-total // ranks)
        found = [(weight, Cut.of(weight.shape, 0, segments, length=length))]
        if bias is not None:
            found.append((bias, Cut.of(bias.shape, 0, segments, length=length)))
        sharding.widths[name] = [sum(size for _, size in own) for own in segments]
        return found
    outputs, inputs, transposed = _sizes(name, module)
    if style in _COLUMNS:
        own = heads.get(name)
        segments, partial = _columns(name, outputs, own, ranks)
        found = [(weight, Cut.of(weight.shape, int(transposed), segments, partial=partial))]
        if bias is not None:
            found.append((bias, Cut.of(bias.shape, 0, segments, partial=partial)))
    else:
        own = _heads_of_row(sharding, name, inputs)
        segments = [[one] for one in _dealt(name, inputs, ranks, step=inputs // own.queries if own else 1)]
        found = [(weight, Cut.of(weight.shape, int(not transposed), segments))]
    sharding.widths[name] = [sum(size for _, size in own) for own in segments]
    return found


def _heads_of_column(region: Region, name: str, modules: Mapping[str, nn.Module]) -> Heads | None:
    """In a block without a module of its own for attention, an MLP's outputs are no heads."""
    heads = region.heads
    apart = len(region.columns) <= APART
    return heads if heads is None or apart or _sizes(name, modules[name])[0] % heads.queries == 0 else None


def _columns(name: str, outputs: int, heads: Heads | None, ranks: int) -> tuple[Parts, bool]:
    """The outputs that each rank takes, and whether they are copies whose gradients are shares."""
    leaf = name.rpartition(".")[2]
    if leaf in _GATE_AND_UP and outputs % 2 == 0:
        half = outputs // 2
        return _side_by_side(_dealt(name, half, ranks), _dealt(name, half, ranks, start=half)), False
    if heads is None:
        if leaf in (*_QUERIES_KEYS_VALUES, *HEAD_AFTER_HEAD):
            raise _unknown(name, "its parts are those of attention heads, and the module shows no heads")
        return [[one] for one in _dealt(name, outputs, ranks)], False
    queries, groups, size = heads.queries * heads.size, heads.groups * heads.size, heads.size
    if leaf in _QUERIES_KEYS_VALUES and outputs == queries + 2 * groups:
        q = heads.query_segments()
        k, v = (even_segments(groups, ranks, start=start, step=size) for start in (queries, queries + groups))
        return _side_by_side(q, k, v), False
    if outputs == groups and groups != queries:
        segments = heads.group_segments(size)
        return [[one] for one in segments], len(set(segments)) < ranks
    if outputs % heads.queries:
        raise _unknown(name, f"its {outputs} outputs are not those of {heads.queries} heads")
    if outputs > 2 * queries and leaf not in HEAD_AFTER_HEAD and heads.size * heads.queries * 3 == outputs:
        raise _unknown(name, "how queries, keys and values lie in it is not known by its name")
    return [[one] for one in even_segments(outputs, ranks, step=outputs // heads.queries)], False


def _dealt(name: str, total: int, ranks: int, *, start: int = 0, step: int = 1) -> list[Segment]:
    if total < ranks * step:
        raise UnsupportedCombination(
            f"tp={ranks} over the {total // step} channels of {name}",
            why="some ranks would hold nothing of it",
            fix=f"set tp to {total // step} or less",
        )
    return even_segments(total, ranks, start=start, step=step)


def _side_by_side(*parts: list[Segment]) -> Parts:
    return [list(own) for own in zip(*parts, strict=True)]


def _heads_of_row(sharding: Sharding, name: str, inputs: int) -> Heads | None:
    """The heads of the region that a rowwise module ends: the one it shares most of its name with."""
    best, length = None, -1
    for region in sharding.regions:
        shared = 0
        for mine, theirs in zip(name.split("."), f"{region.parent}.".split("."), strict=False):
            if mine != theirs:
                break
            shared += 1
        if shared > length:
            best, length = region, shared
    if best is None or best.heads is None or inputs % best.heads.queries:
        return None
    # A row that shares only the block with attention ends another region: its width is not that of the heads.
    return best.heads if inputs == best.heads.queries * best.heads.size or name.startswith(best.parent) else None


def _experts(name: str, module: nn.Module, ranks: int) -> list[tuple[nn.Parameter, Cut]]:
    """All experts in one parameter: experts x (gate and up) x inputs, experts x outputs x (gate)."""
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"gate_up_proj", "down_proj"}:
        raise _unknown(name, f"experts with parameters {', '.join(parameters)} are not known")
    up, down = parameters["gate_up_proj"], parameters["down_proj"]
    half = down.shape[2]
    if up.dim() != 3 or up.shape[1] != 2 * half:
        raise _unknown(name, f"its weights are {tuple(up.shape)} and {tuple(down.shape)}")
    pairs = _side_by_side(_dealt(name, half, ranks), _dealt(name, half, ranks, start=half))
    return [
        (up, Cut.of(up.shape, 1, pairs)),
        (down, Cut.of(down.shape, 2, [[one] for one in even_segments(half, ranks)])),
    ]


def _norms_of_heads(sharding: Sharding, modules: Mapping[str, nn.Module], cuts: dict[int, Cut], ranks: int) -> None:
    """What else stands between divided matrices: its gradients are shares, and norms of each head lie as the heads do.

    Raises:
        UnsupportedCombination: a parameter or buffer with an entry for each head that is not known.
    """
    for region in sharding.regions:
        if region.gathers or region.heads is None:
            continue
        heads, parent = region.heads, modules[region.parent]
        for place, module in parent.named_modules():
            full = f"{region.parent}.{place}" if place else region.parent
            entry = sharding.styles.get(full)
            if entry is not None and not entry.style.startswith("replicate"):
                continue
            for what, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if (
                    heads.groups > 1
                    and value.shape == (heads.groups,)
                    and heads.groups not in (heads.size, heads.queries)
                ):
                    raise _unknown(f"{full}.{what}", f"it has an entry for each of {heads.groups} key/value heads")
                if heads.queries not in value.shape or heads.size == heads.queries or what == "inv_freq":
                    continue
                of_keys = place.startswith("k_") and value.shape[0] == heads.groups
                if not isinstance(value, nn.Parameter) or value.shape[0] != heads.queries or of_keys:
                    raise _unknown(f"{full}.{what}", f"it has an entry for each of {heads.queries} heads")
                cuts[id(value)] = Cut.of(value.shape, 0, [[one] for one in even_segments(heads.queries, ranks)])
            if place.startswith("k_") and heads.groups != heads.queries:
                _norm_of_keys(module, full, heads, cuts)


def _norm_of_keys(module: nn.Module, name: str, heads: Heads, cuts: dict[int, Cut]) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1 and parameter.shape[0] == heads.groups:
            if heads.selects:
                raise _unknown(name, "keys are picked for each query, and it has an entry for each of them")
            segments = heads.group_segments(1)
            partial = len(set(segments)) < heads.ranks
            cuts[id(parameter)] = Cut.of(parameter.shape, 0, [[one] for one in segments], partial=partial)


def _sizes(name: str, module: Any) -> tuple[int, int, bool]:
    """Outputs, inputs, and whether the weight is stored as inputs x outputs."""
    if type(module) is nn.Linear:
        return module.out_features, module.in_features, False
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return module.nf, module.weight.shape[0], True
    raise _unknown(name, f"a {type(module).__name__} is not divided, only nn.Linear and Transformers' Conv1D are")


def _unknown(name: str, why: str) -> UnsupportedCombination:
    return UnsupportedCombination(
        f"tensor parallelism of {name}",
        why=why,
        fix='annotate it otherwise, sharding={"' + name + '": "replicate"}, or set tp=1 and shard with zero=3',
    )
