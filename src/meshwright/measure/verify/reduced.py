"""A Hugging Face config made small: fewer blocks and small sizes; every switch (norms, biases, tying, ...) stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.measure.verify.heads import few_heads

__all__ = ["VOCABULARY", "Reduced", "depth_for", "reduce_config"]

#: Sizes that divide neither 2 nor 3 ranks evenly.
VOCABULARY, _INNER, _LABELS = 101, 23, 7
_POSITIONS, _WINDOW, _FRAMES, _PATCH = 64, 7, 20, 8
_EXPERTS, _MOST_DEPTH = 5, 12

_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZE = ("head_dim", "d_kv")
_INNERS = (
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "decoder_intermediate_size"),
)
_WINDOWS = ("sliding_window", "attention_window")
_LEARNED = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_len",
)
_ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_pct", "rotary_dim", "rotary")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_CHOICES = ("num_experts_per_tok", "moe_top_k", "moe_k")
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
#: Heads of latent attention: its ranks and the parts of a head.
_LATENT = {
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "qk_head_dim": 10,
}
#: Neither sizes nor switches of a model in training.
_LEFT_OUT = (
    *("quantization_config", "auto_map", "dtype", "torch_dtype", "_name_or_path", "transformers_version"),
    *("task_specific_params", "begin_suppress_tokens", "suppress_tokens", "forced_decoder_ids"),
)


@dataclass
class Reduced:
    """A table of a small config, and what was changed in it."""

    table: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, before: Any, after: Any, *, told: bool = True) -> None:
        """Set a key."""
        self.table[key] = after
        told_already = any(change.startswith(f"{key} ") for change in self.changes)
        if told and before != after and not told_already:
            self.changes.append(f"{key} {before} -> {after}")


def depth_for(unit_blocks: int, recompute_blocks: int, stages: int = 1) -> int:
    """Blocks that a strategy needs: for several units, blocks with and without recompute, and stages that differ."""
    return max(3, 2 * unit_blocks + 1, recompute_blocks + 1, stages + 1)


def reduce_config(
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    depth: int,
    sequence: int,
    tp: int = 1,
    annotated: bool = False,
) -> Reduced:
    """The keys of a small config of the same kind.

    Args:
        given: the keys of the user's file.
        values: what his class makes of them, with its defaults.
        depth: blocks at least; for one stack a few more.
        sequence: tokens that it must take.
        tp: tensor-parallel ranks, over which its heads are divided as those of the whole model would be.
        annotated: whether the user says which modules are divided: those with heads may not be among them.

    Raises:
        ConfigError: sizes that do not belong together.
        UnsupportedCombination: `tp` does not divide the heads.
    """
    small = Reduced({key: value for key, value in given.items() if key not in _LEFT_OUT})
    if given.get("quantization_config"):
        small.notes.append("unquantised, as training needs it")
    _blocks(small, values, depth)
    size = _heads(small, values, tp, annotated)
    _latent(small, values)
    for key in _INNERS:
        _shrink(small, values, key, _INNER)
    _experts(small, values)
    _words(small, values)
    _places(small, values, sequence, size)
    _pictures_and_sounds(small, values)
    _switch_off(small, values)
    return small


def _number(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _first(values: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((found for key in keys if (found := _number(values, key)) is not None), None)


def _shrink(small: Reduced, values: Mapping[str, Any], key: str, size: int) -> None:
    before = _number(values, key)
    if before is not None and before > size:
        small.put(key, before, size)


def _blocks(small: Reduced, values: Mapping[str, Any], depth: int) -> None:
    depths = {key: found for key in _DEPTHS if (found := _number(values, key)) is not None}
    if not depths:
        raise ConfigError(
            f"config.json of a {values.get('model_type')} names no number of blocks",
            why=f"known keys are {', '.join(_DEPTHS)}",
            fix="give a function that builds a small model: file.py:function",
        )
    several = len(depths) > 1 or values.get("is_encoder_decoder")
    wanted = depth if several else max(depth, 5)
    longest = max(depths.values())
    lists = {key: value for key, value in values.items() if isinstance(value, (list, tuple)) and len(value) == longest}
    lists = {key: value for key, value in lists.items() if all(isinstance(entry, (str, int, float)) for entry in value)}
    while wanted < min(longest, _MOST_DEPTH) and any(set(v[:wanted]) != set(v) for v in lists.values()):
        wanted += 1  # until every kind of block is there
    for key, before in depths.items():
        small.put(key, before, min(before, wanted))
    kept = min(longest, wanted)
    for key, value in lists.items():
        small.put(key, None, list(value[:kept]), told=False)
    for key, value in values.items():
        if key.endswith("_layers") and isinstance(value, list) and key not in lists:  # indices of layers
            small.put(key, value, [index for index in value if isinstance(index, int) and index < kept], told=False)
    _shrink(small, values, "first_k_dense_replace", 1)


def _heads(small: Reduced, values: Mapping[str, Any], tp: int, annotated: bool) -> int:
    """Heads, groups of heads, and channels that fit; the new size of a head."""
    heads, hidden = _first(values, _HEADS), _first(values, _HIDDEN)
    if heads is None or hidden is None:
        raise ConfigError(
            f"config.json of a {values.get('model_type')} names no heads or no channels",
            why=f"known keys are {', '.join((*_HEADS, *_HIDDEN))}",
            fix="give a function that builds a small model: file.py:function",
        )
    groups = _first(values, _GROUPS) or heads
    if heads % tp and not annotated:
        legal = ", ".join(str(ranks) for ranks in range(1, heads + 1) if heads % ranks == 0)
        raise UnsupportedCombination(
            f"tp={tp} does not divide the {heads} heads of a {values.get('model_type')}",
            why="every rank takes the same number of whole heads",
            fix=f"set tp to one of {legal}; other ranks can go to dp with zero",
        )
    few, few_groups = few_heads(heads, groups, 1 if heads % tp else tp)
    head_size = _first(values, _HEAD_SIZE)
    size, channels = _sizes(values, heads, hidden, head_size, few)
    for key in _HEADS:
        _shrink(small, values, key, few)
    for key in _GROUPS:
        _shrink(small, values, key, few_groups)
    for key in _HIDDEN:
        _shrink(small, values, key, channels)
    if head_size is not None:
        for key in _HEAD_SIZE:
            _shrink(small, values, key, size)
        if _number(values, "query_pre_attn_scalar"):
            small.put("query_pre_attn_scalar", values["query_pre_attn_scalar"], size)
    for key, value in values.items():  # what is as wide as the model stays so
        if key.endswith(("_size", "_dim")) and value == hidden and key not in (*_HIDDEN, *_INNERS, "vocab_size"):
            small.put(key, value, channels)
        elif key in ("word_embed_proj_dim", "embedding_size") and _number(values, key):
            small.put(key, value, max(1, channels // 2))
    if "rotary_dim" in values and _number(values, "rotary_dim"):
        small.put("rotary_dim", values["rotary_dim"], max(2, size // 2 // 2 * 2))
    return size


def _sizes(values: Mapping[str, Any], heads: int, hidden: int, head_size: int | None, few: int) -> tuple[int, int]:
    """Channels of a head and of the model: as many heads' channels as the model has, or more, or fewer, as before."""
    part = _rotated(values)
    size = 4
    while int(size * part) < 2 or int(size * part) % 2:
        size += 4
    if head_size is None or head_size * heads == hidden or "qk_rope_head_dim" in values:
        return size, few * size
    if head_size * heads > hidden:
        return 2 * size, few * size
    return size, 2 * few * size


def _rotated(values: Mapping[str, Any]) -> float:
    rope = values.get("rope_parameters")
    inside = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    part = inside or values.get("partial_rotary_factor") or values.get("rotary_pct") or 1.0
    return max(float(part), 1 / 16)


def _latent(small: Reduced, values: Mapping[str, Any]) -> None:
    if "kv_lora_rank" in values:
        for key, size in _LATENT.items():
            _shrink(small, values, key, size)
        _shrink(small, values, "head_dim", _LATENT["qk_rope_head_dim"])


def _experts(small: Reduced, values: Mapping[str, Any]) -> None:
    grouped = (_number(values, "n_group") or 1) > 1
    for key in _EXPERT_COUNTS:
        _shrink(small, values, key, 8 if grouped else _EXPERTS)
    for key in _EXPERT_CHOICES:
        _shrink(small, values, key, 2)
    if grouped:
        _shrink(small, values, "n_group", 4)
        _shrink(small, values, "topk_group", 2)


def _words(small: Reduced, values: Mapping[str, Any]) -> None:
    before = _number(values, "vocab_size")
    if before is None:
        return
    size = min(before, VOCABULARY)
    small.put("vocab_size", before, size)
    for key, value in values.items():
        if key.endswith("_token_id") or key == "forced_eos_token_id":
            if isinstance(value, list):
                small.put(key, value, [entry if entry < size else _SPECIAL.get(key, 4) for entry in value], told=False)
            elif isinstance(value, int) and value >= size:
                small.put(key, value, _SPECIAL.get(key, 4), told=False)
    if values.get("is_encoder_decoder"):
        for key in ("pad_token_id", "decoder_start_token_id"):
            if values.get(key) is None:
                small.put(key, None, 0, told=False)
    if (_number(values, "num_labels") or len(values.get("id2label") or ())) > _LABELS:
        small.table.pop("id2label", None)
        small.table.pop("label2id", None)
        small.put("num_labels", len(values.get("id2label") or ()) or values.get("num_labels"), _LABELS)


def _places(small: Reduced, values: Mapping[str, Any], sequence: int, size: int) -> None:
    for key in _WINDOWS:
        _shrink(small, values, key, min(_WINDOW, max(2, sequence // 2)))
    most = max(_POSITIONS, sequence)
    if not any(values.get(key) for key in _ROTARY):  # learned ones are parameters, rotations are not
        for key in _LEARNED:
            _shrink(small, values, key, most)
    turned = int(size * _rotated(values)) // 2
    if isinstance(values.get("rope_parameters"), Mapping):
        small.table.pop("rope_scaling", None)  # the name that older files have for it
        small.put("rope_parameters", None, _thinned(values["rope_parameters"], turned), told=False)


def _thinned(rope: Any, turned: int) -> Any:
    """Rotations with factors for so many frequencies, taken evenly from those there were."""
    if isinstance(rope, Mapping):
        return {key: _thinned(value, turned) for key, value in rope.items()}
    if isinstance(rope, list) and len(rope) > turned and all(isinstance(entry, (int, float)) for entry in rope):
        return [rope[index * len(rope) // turned] for index in range(turned)]
    return rope


def _pictures_and_sounds(small: Reduced, values: Mapping[str, Any]) -> None:
    patch, picture = values.get("patch_size"), values.get("image_size")
    if _number(values, "patch_size") and _number(values, "image_size"):
        small.put("patch_size", patch, _PATCH)
        small.put("image_size", picture, 2 * _PATCH)
    _shrink(small, values, "num_mel_bins", 8)
    _shrink(small, values, "max_source_positions", _FRAMES)


def _switch_off(small: Reduced, values: Mapping[str, Any]) -> None:
    """Dropout, and what keeps keys and values for generation."""
    off = [key for key, value in values.items() if "drop" in key and isinstance(value, float)]
    for key in off:
        small.put(key, values[key], 0.0, told=False)
    if any(values[key] for key in off):
        small.notes.append("dropout off")
    if "use_cache" in values:
        small.put("use_cache", True, False, told=False)
    for key in ("initializer_range", "init_std"):  # so that no gradient is tiny
        if isinstance(values.get(key), float):
            small.put(key, values[key], 0.1, told=False)
