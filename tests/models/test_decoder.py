"""The built-in decoder: its numbers against Hugging Face Llama, its loss and its initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from meshwright.models import Decoder, DecoderConfig, decoder, token_loss
from meshwright.models.decoder import RMSNorm, RotaryEmbedding
from tests.models.tiny import SIZES, hugging_face, ids_for, off, scrambled, small


@pytest.fixture
def wide_llama_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's norm computes in float32 even in a float64 model; here it keeps the input's width."""

    def forward(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


# --- against Hugging Face ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wide_llama_norms")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sizes", SIZES)
def test_logits_loss_and_gradients_equal_hugging_face_in_float64(sizes: str, tied: bool) -> None:
    ours = scrambled(small(sizes, tie_word_embeddings=tied)).double()
    theirs = hugging_face(ours)
    ids = ids_for(ours.config)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = labels[0, :5] = -100

    logits, wanted = ours(ids), theirs(ids).logits
    assert logits.shape == (3, 19, ours.config.vocab_size)
    assert logits.dtype == torch.float64
    assert off(logits, wanted) <= 1e-12

    total, count = token_loss(logits, labels)
    mean = nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    assert (total / count).item() == pytest.approx(mean.item(), rel=1e-12)
    (total / count).backward()
    mean.backward()
    gradients: dict[str, Tensor] = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    scale = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in gradients.values()))
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert float((parameter.grad - gradients[name]).norm()) <= 1e-10 * float(gradients[name].norm()) + 1e-14 * scale


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sizes", SIZES)
def test_logits_equal_hugging_face_in_float32(sizes: str, tied: bool) -> None:
    ours = scrambled(small(sizes, tie_word_embeddings=tied))
    ids = ids_for(ours.config)
    logits = ours(ids)
    assert logits.dtype == torch.float32
    assert off(logits, hugging_face(ours)(ids).logits) <= 1e-5


def test_hugging_face_initial_values_are_ours() -> None:
    """`_init_weights` draws what Hugging Face's draws: same standard deviation, same ones, module by module."""
    config = small(hidden_size=120, vocab_size=400, intermediate_size=200, initializer_range=0.3)
    torch.manual_seed(0)
    ours = Decoder(config)
    torch.manual_seed(0)
    theirs = hugging_face(Decoder(config))
    for name, wanted in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], wanted)
    for name, module in ours.named_modules():
        before = {key: value.clone() for key, value in ours.state_dict().items()}
        ours._init_weights(module)
        changed = {key for key, value in ours.state_dict().items() if not torch.equal(before[key], value)}
        own = {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)}
        assert changed <= own
    for name, parameter in ours.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones(120)), name
        else:
            assert parameter.std().item() == pytest.approx(0.3, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.02, name


# --- the parts --------------------------------------------------------------------------------------------------------


def test_repeated_and_grouped_attention_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways to give few key heads to many query heads (which one runs depends on device and dtype)."""
    model = scrambled(small()).double()
    ids = ids_for(model.config)
    grouped = model(ids)
    monkeypatch.setattr(decoder, "_kernel_groups", lambda q, mask: False)
    assert off(model(ids), grouped) <= 1e-14


@pytest.mark.usefixtures("wide_llama_norms")
def test_masks_and_positions_equal_hugging_face() -> None:
    """Padding on either side, and documents in one row: the logits that count are Hugging Face's."""
    ours = scrambled(small()).double()
    theirs = hugging_face(ours)
    ids = ids_for(ours.config)
    kept = torch.arange(ids.size(1))[None] < torch.tensor([19, 4, 11])[:, None]
    documents = torch.arange(ids.size(1)) // 7
    block = (documents[:, None] == documents).tril().expand(len(ids), 1, -1, -1)
    for mask, positions in (
        (kept, None),
        (kept.flip(1), (kept.flip(1).cumsum(1) - 1).clamp(min=0)),
        (block, (torch.arange(ids.size(1)) % 7).expand_as(ids)),
        (torch.zeros(block.shape, dtype=torch.float64).masked_fill(~block, float("-inf")), None),
    ):
        counts = mask if mask.dim() == 2 else torch.ones_like(kept)
        wanted = theirs(ids, attention_mask=mask, position_ids=positions).logits[counts]
        assert off(ours(ids, attention_mask=mask, position_ids=positions)[counts], wanted) <= 1e-12
        assert off(ours(ids)[counts], wanted) > 1e-3 or positions is None
    whole = torch.arange(ids.size(1)).expand_as(ids)
    assert off(ours(ids, torch.ones_like(ids), whole), ours(ids)) <= 1e-13


def test_a_token_sees_only_earlier_ones() -> None:
    model = scrambled(small()).double()
    ids = ids_for(model.config)
    changed = ids.clone()
    changed[:, 10] = (ids[:, 10] + 1) % model.config.vocab_size
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.isclose(before[:, 10:], after[:, 10:]).all(dim=-1).any()


def test_norm_is_computed_in_float32_or_wider() -> None:
    x = torch.linspace(-3, 5, 4096, dtype=torch.float64)[None]
    exact = x / (x.pow(2).mean() + 1e-5).sqrt()
    norm = RMSNorm(4096, 1e-5)
    assert off(norm.double()(x), exact) <= 1e-15
    x16 = x.bfloat16()
    exact16 = x16.double() / (x16.double().pow(2).mean() + 1e-5).sqrt()
    assert torch.equal(norm.bfloat16()(x16), exact16.bfloat16())  # one rounding, at the end


def test_all_parameters_in_bfloat16() -> None:
    model = scrambled(small("every head its own key"))
    ids = ids_for(model.config)
    wanted = model(ids)
    model.bfloat16()
    logits = model(ids)
    assert logits.dtype == torch.bfloat16
    assert off(logits.float(), wanted) <= 0.05
    total, count = token_loss(logits, ids)
    assert total.dtype == torch.float32
    (total / count).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "change",
    [
        lambda rotary: rotary.to(torch.bfloat16),
        lambda rotary: rotary.double(),
        lambda rotary: rotary.to_empty(device="cpu"),
    ],
    ids=["bfloat16", "float64", "to_empty"],
)
def test_rotary_frequencies_survive(change: Callable[[RotaryEmbedding], RotaryEmbedding]) -> None:
    """In bfloat16, positions 500 and 501 would turn alike; after to_empty the frequencies would be garbage."""
    x = torch.zeros(1, 502, 8)
    cos, sin = RotaryEmbedding(8, 10000.0)(x)
    rotary = change(RotaryEmbedding(8, 10000.0))
    assert rotary.inv_freq.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(rotary(x), (cos, sin), strict=True))
    angles = 501 * 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.allclose(cos[501].double(), angles.cos().repeat(2), atol=1e-4)
    assert torch.allclose(sin[501].double(), angles.sin().repeat(2), atol=1e-4)
    assert rotary(x.bfloat16())[0].dtype == torch.bfloat16
    assert rotary.state_dict() == {}


# --- meta parameters --------------------------------------------------------------------------------------------------


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters go to meta as they are registered, buffers stay where they are."""
    register = nn.Module.register_parameter

    def to_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "register_parameter", to_meta)
        yield


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("on_meta", [lambda: torch.device("meta"), parameters_on_meta], ids=["device", "registered"])
def test_meta_construction_keeps_buffers_real(on_meta: Callable[[], Any], tied: bool) -> None:
    state = torch.get_rng_state()
    with on_meta():
        model = Decoder(small(tie_word_embeddings=tied))
    assert torch.equal(torch.get_rng_state(), state) or on_meta is parameters_on_meta
    assert all(parameter.is_meta for parameter in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    buffers = dict(model.named_buffers())
    wanted = dict(Decoder(small()).named_buffers())
    assert buffers
    assert all(not buffer.is_meta and torch.equal(buffer, wanted[name]) for name, buffer in buffers.items())
    source = scrambled(small(tie_word_embeddings=tied))
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    ids = ids_for(model.config)
    assert torch.equal(model(ids), source(ids))


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = Decoder(small(tie_word_embeddings=True)), Decoder(small())
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_loss_equals_hand_computation() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], [[-1.0, 0.5, 4.0], [9.0, 0.0, 0.0]]])
    labels = torch.tensor([[2, -100], [0, 1]])
    by_hand = 0.0
    for row, label in (([0.0, 1.0, 2.0], 2), ([-1.0, 0.5, 4.0], 0), ([9.0, 0.0, 0.0], 1)):
        by_hand += math.log(sum(math.exp(value) for value in row)) - row[label]
    for dtype, wanted in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        total, count = token_loss(logits.to(dtype), labels)  # these values are exact in bfloat16
        assert total.dtype == torch.promote_types(dtype, torch.float32)
        assert total.shape == count.shape == ()
        assert (count.dtype, int(count)) == (torch.int64, 3)
        assert float(total) == pytest.approx(by_hand, rel=wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_loss_without_valid_labels_is_zero_with_a_backward(dtype: torch.dtype) -> None:
    model = scrambled(small()).to(dtype)
    ids = ids_for(model.config)
    total, count = token_loss(model(ids), torch.full_like(ids, -100))
    assert (total.item(), int(count)) == (0.0, 0)
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no sequence", "no token"])
def test_an_empty_batch_runs_forward_and_backward(shape: tuple[int, int]) -> None:
    """A rank may get no sequence of a batch, and still takes part in every collective of the step."""
    model = scrambled(small())
    ids = torch.zeros(shape, dtype=torch.int64)
    logits = model(ids)
    assert logits.shape == (*shape, 101)
    total, count = token_loss(logits, ids)
    assert (total.item(), int(count)) == (0.0, 0)
    total.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_loss_refuses_labels_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"labels have shape \(2, 3\) and logits \(2, 4, 5\)"):
        token_loss(torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.int64))


# --- wrong input ------------------------------------------------------------------------------------------------------


def test_forward_refuses_wrong_shapes() -> None:
    model = Decoder(small(max_position_embeddings=8))
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        model(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="9 tokens is longer than max_position_embeddings = 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_attention_heads": 5}, r"num_key_value_heads = 2 does not divide num_attention_heads = 5.*one of 1, 5\."),
        (
            {"hidden_size": 10},
            r"num_attention_heads = 6 does not divide hidden_size = 10.*1, 2, 5, 10, or give head_dim",
        ),
        ({"hidden_size": 18}, r"hidden_size / num_attention_heads = 3 is odd"),
        ({"head_dim": 5}, r"head_dim = 5 is odd"),
        ({"head_dim": 0}, r"head_dim = 0 is not a size"),
        ({"vocab_size": 0}, r"vocab_size = 0 is not a size"),
        ({"hidden_size": -12}, r"hidden_size = -12 is not a size"),
        ({"intermediate_size": 2.5}, r"intermediate_size = 2.5 is not a size"),
        ({"num_hidden_layers": True}, r"num_hidden_layers = True is not a size"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads = 0 is not a size"),
        ({"num_attention_heads": "6"}, r"num_attention_heads = '6' is not a size"),
        ({"max_position_embeddings": 0}, r"max_position_embeddings = 0 is not a size"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps = 0.0 is not usable.*above 0"),
        ({"rope_theta": math.inf}, r"rope_theta = inf is not usable"),
        ({"rope_theta": "big"}, r"rope_theta = 'big' is not usable"),
        ({"initializer_range": 1.5}, r"initializer_range = 1.5 is not usable.*up to 1"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings = 1 is neither"),
    ],
)
def test_wrong_configs_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        small(**changes)


def test_config_is_frozen_and_by_keyword() -> None:
    config = small()
    with pytest.raises(AttributeError):
        config.vocab_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        DecoderConfig(101)  # type: ignore[call-arg]
    assert config == small()
    assert hash(config) == hash(small())
    assert (config.head_size, small(head_dim=4).head_size) == (2, 4)
