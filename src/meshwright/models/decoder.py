"""A decoder-only transformer in one file: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names, shapes and arithmetic are those of Hugging Face Llama, so weights move between the two unchanged.

Shapes are written with B sequences, S tokens, H hidden_size, V vocab_size, N heads, K key/value heads, D head size.

Sources: Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary embedding), Ainslie et al. 2023 (grouped-query
attention), Shazeer 2020 (SwiGLU), Touvron et al. 2023 (Llama).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_LABEL = -100
"""Label of a position that carries no loss (PyTorch's and Hugging Face's convention)."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder, under Hugging Face Llama's `config.json` names. The defaults are a small model of bytes.

    Sizes may be odd and divide nothing; the limits are: `num_key_value_heads` divides `num_attention_heads`, the head
    size is even (rotary embedding turns pairs), and `num_attention_heads` divides `hidden_size` unless `head_dim`
    is given. Raises ValueError where one is broken.
    """

    vocab_size: int = 256
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int | None = None
    """Channels per head; None means hidden_size / num_attention_heads. Read it as `head_size`."""
    max_position_embeddings: int = 512
    """The longest sequence the model takes, in tokens."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    """Standard deviation of the initial weights, up to 1."""

    def __post_init__(self) -> None:
        self._check_values()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide "
                f"num_attention_heads = {self.num_attention_heads}. Every key/value head serves the same number of "
                f"query heads. Use one of {_divisors(self.num_attention_heads)}."
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} does not divide hidden_size = {self.hidden_size}. "
                f"Every head takes the same number of channels. Use one of {_divisors(self.hidden_size)}, or give "
                "head_dim."
            )
        if self.head_size % 2:
            given = "head_dim" if self.head_dim is not None else "hidden_size / num_attention_heads"
            raise ValueError(
                f"{given} = {self.head_size} is odd. Rotary embedding turns pairs of channels, so a head needs an even "
                "number of them. Change num_attention_heads or hidden_size, or give an even head_dim."
            )

    def _check_values(self) -> None:
        sizes = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ]
        for name in sizes if self.head_dim is None else [*sizes, "head_dim"]:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r} is not a size. Sizes are whole numbers from 1. Give one.")
        for name, most in (("rms_norm_eps", math.inf), ("rope_theta", math.inf), ("initializer_range", 1.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not 0 < value <= most:
                wanted = "above 0" if most == math.inf else f"above 0 and up to {most:g}"
                raise ValueError(f"{name} = {value!r} is not usable. It has to be a finite number {wanted}. Change it.")
        if not isinstance(self.tie_word_embeddings, bool):
            raise ValueError(f"tie_word_embeddings = {self.tie_word_embeddings!r} is neither true nor false. Use one.")

    @property
    def head_size(self) -> int:
        """Channels per head, D."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 256) + 1) if number % n == 0)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dim, computed in float32 or wider. [..., H] -> [..., H]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary embedding (Su et al. 2021, eq. 34), made anew in float32 at each forward.

    The only state is D/2 frequencies in a buffer that is not saved. It is real even where parameters are meta, and
    stays float32 with its values through `.to(bfloat16)` and `.to_empty()`: in bfloat16 far positions would collide.
    """

    inv_freq: Tensor

    def __init__(self, head_size: int, theta: float) -> None:
        super().__init__()
        default = torch.get_default_device()
        device = torch.device("cpu") if default.type == "meta" else default
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
        self.register_buffer("inv_freq", 1.0 / (theta**exponents), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        kept = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        self.inv_freq = kept.to(self.inv_freq.device)
        return self

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, S, H] -> cosines [S, D] and sines [S, D] of positions 0..S-1, in x's dtype and on its device.

        With position_ids [B, S] they are those of these positions, [B, 1, S, D].
        """
        if position_ids is None:
            positions = torch.arange(x.size(1), dtype=torch.float32, device=x.device)
        else:
            positions = position_ids[:, None].float()
        angles = positions[..., None] * self.inv_freq.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel pairs (i, i + D/2) of x [B, N, S, D] by their angles ([S, D] or [B, 1, S, D]); Llama's pairing."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention. [B, S, H] -> [B, S, H].

    Heads are counted from the projections' outputs, so it also runs on a share of the heads (tensor parallel).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        wide, narrow = config.num_attention_heads * self.head_size, config.num_key_value_heads * self.head_size
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.size(-1) // self.head_size, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        q = _rotate(self._heads(self.q_proj(x)), cos, sin)
        k = _rotate(self._heads(self.k_proj(x)), cos, sin)
        v = self._heads(self.v_proj(x))
        grouped = q.size(1) != k.size(1)
        if grouped and not _kernel_groups(q, mask):
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
            grouped = False
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _kernel_groups(q: Tensor, mask: Tensor | None = None) -> bool:
    """Whether a fused attention kernel takes fewer key/value than query heads, which saves their repeated copies.

    On CUDA only the flash kernel does (half precision, D <= 256, no mask). Asking it of the others falls back to a
    kernel that stores all S x S scores, which costs far more than the copies. The CPU kernel does for every dtype.
    """
    return not q.is_cuda or (mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.size(-1) <= 256)


def _causal(mask: Tensor | None, size: int) -> Tensor | None:
    """An attention mask as attention takes it: [B, 1, S, S] as it is, the tokens to see [B, S] made causal.

    A token always sees itself: one that sees none, padding on the left, would have no attention weights at all.
    """
    if mask is None or mask.dim() == 4:
        return mask
    earlier = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    own = torch.eye(size, dtype=torch.bool, device=mask.device)
    return (mask[:, None, None, :].bool() & earlier) | own


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). [B, S, H] -> [B, S, H]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """One block: attention and MLP, each on the normed residual stream. (x [B, S, H], cos, sin, mask) -> [B, S, H]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderBody(nn.Module):
    """Everything but the head: token ids [B, S] -> normed hidden states [B, S, H]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_size, config.rope_theta)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(x, position_ids)
        mask = _causal(attention_mask, x.size(1))
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """The language model. Its blocks are `model.layers`; with tied embeddings `lm_head.weight` is the embedding's own
    Parameter object.

    Built under `torch.device("meta")` it has meta parameters, real buffers and no initial values; otherwise its
    weights are drawn from torch's default generator by `_init_weights`.
    """

    #: How tensor parallelism divides it, in the words of Hugging Face's published plans.
    _tp_plan: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.apply(self._init_weights)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of its tokens (Hugging Face's convention)."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The projection to its vocabulary."""
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises the parameters that `module` itself holds (not its children's): matrices from
        normal(0, initializer_range), norm weights to one. Hugging Face's convention and values."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, S] int64 -> logits [B, S, V] of each next token, in the parameters' dtype.

        attention_mask: [B, S], 0 for padding; or [B, 1, S, S], boolean (true: sees) or added to the scores, which then
        says all, that no token sees later ones too. position_ids [B, S]: 0..S-1 by default.

        Raises ValueError when input_ids is not two-dimensional or S exceeds max_position_embeddings.
        """
        if input_ids.dim() != 2:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}. The decoder takes [sequences, tokens]. "
                "For one sequence pass input_ids[None]."
            )
        if input_ids.size(1) > self.config.max_position_embeddings:
            raise ValueError(
                f"A sequence of {input_ids.size(1)} tokens is longer than max_position_embeddings = "
                f"{self.config.max_position_embeddings}. Positions beyond it were never trained. "
                "Shorten the sequence, or build the model with a larger max_position_embeddings."
            )
        logits: Tensor = self.lm_head(self.model(input_ids, attention_mask, position_ids))
        return logits


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats, summed over the labels that count, and their number.

    logits [..., V]; labels [...] int64, already shifted (labels[i] is what logits[i] predicts); -100 does not count.
    Returns a scalar sum in float32 or wider and a scalar int64 count. Without any valid label both are 0 and
    backward gives zero gradients. Raises ValueError when the shapes do not belong together.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} and logits {tuple(logits.shape)}. There has to be one label for "
            "each position of the logits. Shift inputs and labels before the model, and pass both whole."
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = labels.flatten()
    total = F.cross_entropy(wide.flatten(0, -2), flat, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, (flat != IGNORED_LABEL).sum()


@torch.no_grad()
def generate(
    model: Decoder, ids: Tensor, *, max_new_tokens: int, temperature: float = 1.0, top_k: int = 0, seed: int = 0
) -> Tensor:
    """Continues token ids [S] or [B, S] (int64, S >= 1) and returns them with max_new_tokens more at the end.

    Each token sees at most the last max_position_embeddings tokens. temperature 0 takes the likeliest token; top_k 0
    draws from the whole vocabulary. Draws are made on the CPU in float64 from `seed` alone, the same for every device.
    Raises ValueError on an empty prompt, an id outside the vocabulary, wrong options, or non-finite logits.
    """
    config = model.config
    if ids.dim() not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"The prompt has shape {tuple(ids.shape)}. It needs at least one token. Give some text.")
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"The prompt has token ids from {int(ids.min())} to {int(ids.max())}. The model knows 0 to "
            f"{config.vocab_size - 1}. Encode the prompt with the model's own tokenizer."
        )
    for name, value in (("max_new_tokens", max_new_tokens), ("temperature", temperature), ("top_k", top_k)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} = {value!r} is not usable. It cannot be negative or infinite. Use 0 or more.")
    generator = torch.Generator().manual_seed(seed)
    tokens = ids if ids.dim() == 2 else ids[None]
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -config.max_position_embeddings :])[:, -1].double().cpu()
        following = _draw(logits, temperature, top_k, generator)
        tokens = torch.cat((tokens, following.to(tokens.device)), dim=1)
    return tokens if ids.dim() == 2 else tokens[0]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One token id per row of logits [B, V] -> [B, 1]."""
    if not bool(logits.isfinite().all()):
        raise ValueError("The model's logits are not finite. Its weights are damaged. Use an earlier checkpoint.")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k:
        values, names = logits.topk(min(top_k, logits.size(-1)), dim=-1)
    else:
        values, names = logits, torch.arange(logits.size(-1)).expand_as(logits)
    values = (values - values.amax(dim=-1, keepdim=True)) / temperature
    return names.gather(-1, torch.multinomial(values.softmax(dim=-1), 1, generator=generator))
