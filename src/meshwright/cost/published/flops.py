"""What a source counts as flops. TFLOP/s and MFU of a table become seconds only by its own way of counting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.cost.published.rows import Unpriced
from meshwright.spec import ModelSpec
from meshwright.spec.families import DecoderModel, Described

__all__ = ["COUNTINGS", "Counting", "counted_flops", "model_flops"]

Formula = Literal["model", "causal", "megatron", "layers"]


@dataclass(frozen=True, kw_only=True)
class Counting:
    """How a source counts the flops of a step.

    `formula`: `model` all matrix products and attention over all S x S pairs; `causal` the same with the pairs that a
    causal mask leaves; `megatron` 24 B s l h^2 (1 + s / 6h + V / 16 l h) forward and so many passes; `layers`
    24 B s l h^2 a pass. `recompute`: the forward that full recompute runs again is counted too.
    """

    formula: Formula = "model"
    recompute: bool = False
    source: str = "attention over all pairs, 6 flops per parameter and token (Chowdhery et al., arXiv 2204.02311, B)"


#: By the name that `sources` gives them.
COUNTINGS = {
    "model": Counting(),
    "causal": Counting(formula="causal", source="attention over the pairs that a causal mask leaves, half of all"),
    "megatron": Counting(
        formula="megatron",
        recompute=True,
        source="Narayanan et al., arXiv 2104.04473, eq. 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recompute",
    ),
    "layers": Counting(
        formula="layers",
        recompute=True,
        source="Megatron-DeepSpeed before its pull request 251: 8 flops per parameter of the layers and token "
        "(bigscience, chronicles-prequel.md, TFLOPs calculation improved)",
    ),
    "bridge": Counting(
        formula="causal",
        source="NVIDIA Megatron-Bridge performance summary, MODEL_TFLOP: 6 flops per parameter and token, causal "
        "attention (its TFLOP/s over its tokens/s agree with that to 0.1% for Llama 3 8B, 70B and 405B)",
    ),
    "ml-engineering": Counting(
        formula="causal",
        source="ml-engineering, insights/when-to-upgrade-gpus: model flops with causal attention (6 s^2), recompute "
        "not counted",
    ),
    "hardware": Counting(recompute=True, source="hardware flops, as its notes say: recompute is counted"),
}


def model_flops(whole: ModelSpec, *, causal: bool = False) -> int:
    """Flops of one sequence, forward and backward without recompute, of a model as one rank sees all of it."""
    # Not `backward_flops`: a flash kernel's own recompute of the scores is no model flop.
    return 3 * sum(block.forward_flops - (block.causal_flops if causal else 0) for block in whole.blocks)


def counted_flops(counting: Counting, whole: ModelSpec, described: Described, sequence: int, *, recompute: bool) -> int:
    """Flops of one sequence as a source counts them.

    Args:
        whole: the model as one rank sees all of it.
        recompute: whether the row recomputes all layers.

    Raises:
        Unpriced: the formula needs sizes that the model does not have.
    """
    passes = 4 if counting.recompute and recompute else 3
    if counting.formula in ("model", "causal"):
        return model_flops(whole, causal=counting.formula == "causal") * passes // 3
    if not isinstance(described, DecoderModel):
        raise Unpriced("the formula of its flops needs the sizes of a plain decoder")
    hidden, layers, vocabulary = described.hidden, len(described.layers), described.predicts
    of_layers = 24 * sequence * layers * hidden**2 * passes
    if counting.formula == "layers":
        return of_layers
    head = 6 * sequence * hidden * vocabulary  # never run again
    return of_layers + 4 * sequence**2 * layers * hidden * passes + head
