"""Keys: a Hugging Face `config.json` that is asked for its values, and remembers what was never asked for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.families.attention import Heads
from meshwright.spec.families.parts import Head

__all__ = ["Keys"]

#: Keys that change neither the shapes of a decoder nor what its operations keep.
_HARMLESS = """
    model_type architectures auto_map transformers_version _name_or_path name_or_path torch_dtype dtype use_cache
    initializer_range init_std bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    cls_token_id tokenizer_class prefix return_dict output_attentions output_hidden_states torchscript use_bfloat16
    task_specific_params problem_type finetuning_task id2label label2id num_labels _num_labels max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences chunk_size_feed_forward output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    is_decoder tf_legacy_loss pruned_heads cross_attention_hidden_size cache_implementation pretraining_tp
    rms_norm_eps layer_norm_eps layer_norm_epsilon rope_theta rope_scaling rope_parameters max_position_embeddings
    quantization_config _attn_implementation attn_implementation _flash_attn_2_enabled use_flash_attention_2
    _attn_implementation_autoset license description max_sequence_length model_max_length unsloth_version
    unsloth_fixed keys_to_ignore_at_inference _commit_hash classifier_dropout
"""

#: Sizes that are told when a file leaves them to the class's defaults.
_SIZES = {
    *("hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head"),
    *("n_heads", "num_key_value_heads", "intermediate_size", "ffn_dim", "expansion_ratio", "vocab_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
_MOST_LAYERS = 100_000
_CAUSAL, _CLASSES, _BODY = ("ForCausalLM", "LMHeadModel"), "ForSequenceClassification", ("Model", "TextModel")


class Keys:
    """The table of a `config.json` for one family. Every value a family reads is checked here.

    Raises:
        ConfigError: a value that cannot be right, with its key; from `finish`, keys that nobody asked for.
    """

    def __init__(self, table: Mapping[str, Any], *, name: str, family: str, prefix: str) -> None:
        self._table, self._family, self._prefix = table, family, prefix
        self._read: set[str] = set()
        self._assumed: dict[str, int] = {}
        self.name = name

    def _find(self, names: Sequence[str]) -> tuple[str, Any, bool]:
        """The first of the names that is there, its value, and whether one is; names that contradict are refused."""
        self._read.update(names)
        there = [name for name in names if name in self._table]
        if not there:
            return names[0], None, False
        values = [self._table[name] for name in there]
        if any(value != values[0] for value in values):
            raise self._wrong(" and ".join(f"{n}={self._table[n]!r}" for n in there), "they name one thing", "keep one")
        return there[0], values[0], True

    def _wrong(self, what: str, why: str, fix: str) -> ConfigError:
        return ConfigError(f"config.json of {self.name}: {what}", why=why, fix=fix)

    def size(self, *names: str, default: int, null: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; `null` stands for null where that is allowed."""
        name, value, there = self._find(names)
        if not there:
            if name in _SIZES:
                self._assumed[name] = default
            return default
        if value is None and null is not None:
            return null
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(
                f"{name}={value!r} is not a whole number of {least} or more",
                f"{name} is a size of the model",
                f"write a number, for example {name}={default or null or least}",
            )
        if "layer" in name and value > _MOST_LAYERS:
            raise self._wrong(
                f"{name}={value} is more than {_MOST_LAYERS:,}", "no model is that deep", "write the number of layers"
            )
        return value

    def number(self, *names: str, default: float) -> float:
        """A number of 0 or more; null is 0."""
        name, value, there = self._find(names)
        if not there:
            return default
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self._wrong(f"{name}={value!r} is not a number of 0 or more", "it is a number", f"set {name}")
        return float(value)

    def share(self, *names: str, default: float = 0.0) -> float:
        """A probability below 1; null is 0."""
        value = self.number(*names, default=default)
        if value >= 1:
            raise self._wrong(f"{names[0]}={value} is not below 1", "it is a probability", f"set {names[0]}=0.0")
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """True or false; null is the default."""
        name, value, there = self._find(names)
        if not there or value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(f"{name}={value!r} is neither true nor false", "it is a switch", f"set {name}=false")
        return value

    def text(self, *names: str, default: str) -> str:
        """Text; null is the default."""
        name, value, there = self._find(names)
        if not there or value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(f"{name}={value!r} is not text", "it is a name", f"set {name}={default!r}")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """A table; null or missing is empty."""
        _, value, _ = self._find([name])
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(f"{name}={value!r} is not a table", "it holds keys of its own", f"remove {name}")
        return value or {}

    def choices(self, name: str, default: Sequence[str], known: Sequence[str], count: int) -> tuple[str, ...]:
        """One of `known` for each of `count` layers."""
        _, value, _ = self._find([name])
        if value is None:
            return tuple(default)
        if not isinstance(value, list) or len(value) != count or any(entry not in known for entry in value):
            raise self._wrong(
                f"{name} does not name one of {', '.join(known)} for each of {count} layers",
                "every layer is of one kind",
                f"give {name} {count} entries, or remove it",
            )
        return tuple(value)

    def places(self, name: str, count: int) -> frozenset[int]:
        """Indices of layers, of which there are `count`; null or missing is none."""
        _, value, _ = self._find([name])
        value = [] if value is None else value
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise self._wrong(f"{name}={value!r} is no list of layers", "it holds indices of layers", f"remove {name}")
        outside = [index for index in value if not 0 <= index < count]
        if outside:
            raise self._wrong(f"{name} names layer {outside[0]}", f"there are {count} layers", f"correct {name}")
        return frozenset(value)

    def at_most(self, name: str, value: int, limit_name: str, limit: int) -> None:
        """Refuse a value above what it is a part of."""
        if value > limit:
            what = f"{name}={value} is more than {limit_name}={limit}"
            raise self._wrong(what, "it is a part of it", f"lower {name}")

    def whole_parts(self, name: str, parts: int, whole_name: str, whole: int) -> None:
        """Refuse a number of parts that does not divide the whole."""
        if whole % parts:
            what = f"{name}={parts} does not divide {whole_name}={whole}"
            raise self._wrong(what, "parts are equal", f"correct {name}")

    def unused(self, *names: str) -> int:
        """Note keys that change nothing here; 0, for a size that is then not there."""
        self._read.update(names)
        return 0

    def refuse(self, name: str, *, allowed: Any, why: str) -> None:
        """Refuse a key that has any value but `allowed`, null or nothing."""
        _, value, _ = self._find([name])
        if value is not None and value != allowed:
            raise self._wrong(f"{name}={value!r} is not understood", why, "trace the model from its code instead")

    def causal(self) -> None:
        """Refuse attention in both directions."""
        self.refuse("use_bidirectional_attention", allowed=False, why="only causal attention is described")

    def heads(self, hidden: int, count: int, groups: int, size: int) -> Heads:
        """Heads that belong together; `size` 0 means hidden / count."""
        if count % groups:
            raise self._wrong(
                f"num_key_value_heads={groups} does not divide num_attention_heads={count}",
                "every key/value head serves the same number of query heads",
                "correct one of them",
            )
        if not size and hidden % count:
            raise self._wrong(
                f"num_attention_heads={count} does not divide hidden_size={hidden}",
                "without head_dim every head takes the same number of channels",
                "correct one of them, or give head_dim",
            )
        return Heads(heads=count, groups=groups, size=size or hidden // count)

    def rotary(self, *unused: str, size: int = 0, default: float = 1.0, named: str = "partial_rotary_factor") -> int:
        """Channels of each head that are rotated: int(size x factor). `unused` are keys of positions, read by none."""
        self.unused(*unused)
        inside = self.table("rope_parameters").get("partial_rotary_factor")
        factor = self.number(named, default=default) if inside is None else inside
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise self._wrong(f"{named}={factor!r} is not in (0, 1]", "it is a part of each head", f"set {named}=1.0")
        return int(size * factor)

    def head(self, *, default_vocabulary: int, tied: bool = False, softcap: bool = False, bias: bool = False) -> Head:
        """What stands on the last norm, from `architectures`; without it the causal language model."""
        is_tied = self.flag("tie_word_embeddings", default=tied)
        vocabulary = self.size("vocab_size", default=default_vocabulary)
        kind = self._architecture()
        if kind == _CLASSES:
            return Head(kind="labels", size=self._labels())
        if kind in _BODY:
            return Head(kind="none", size=0)
        return Head(kind="vocabulary", size=vocabulary, tied=is_tied, softcap=softcap, bias=bias)

    def _labels(self) -> int:
        labels = self.table("id2label")
        return self.size("num_labels", default=len(labels) or 2)

    def _architecture(self) -> str:
        """The ending of the class's name."""
        named = self._table.get("architectures") or [f"{self._prefix}{_CAUSAL[0]}"]
        known = {f"{self._prefix}{ending}": ending for ending in (*_CAUSAL, _CLASSES, *_BODY)}
        if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
            raise self._wrong(
                f"architectures={named!r} is not understood for model_type {self._family}",
                f"known are {', '.join(known)}",
                "trace the model from its code instead",
            )
        return known[named[0]]

    def source(self) -> str:
        """Where the figures come from, with what was left out on purpose."""
        ending = self._architecture()
        text = f"config.json, model_type {self._family}"
        if ending == _CLASSES:
            text += ", classification head"
        elif ending in _BODY:
            text += ", no language-model head"
        quantised = self._table.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else "unknown"
            text += f"; its quantised weights ({method}) are counted unquantised, as training needs them"
        if self._assumed:
            told = ", ".join(f"{name}={value}" for name, value in self._assumed.items())
            text += f"; not in the file, so as its class has it: {told}"
        return text

    def finish(self) -> None:
        """Refuse keys that nobody asked for, unless they are known to change nothing or are off.

        Raises:
            ConfigError: naming them, and the nearest known key of a single one.
        """
        harmless = _HARMLESS.split()
        left = [
            key
            for key, value in self._table.items()
            if key not in self._read and key not in harmless and value is not None and value is not False
        ]
        if left:
            near = difflib.get_close_matches(left[0], sorted(self._read), n=1)
            hint = f"did you mean {near[0]}? Otherwise remove" if near else "remove"
            raise self._wrong(
                f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} not understood for model_type {self._family}",
                "an unknown key may change the model's shape, and nothing is guessed",
                f"{hint} what changes nothing, or trace the model from its code",
            )
