"""Logits divided over ranks along the vocabulary: every loss has the value and the gradients of whole logits."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from meshwright import ConfigError, MeanLoss
from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.runtime.additive import require_additive
from meshwright.runtime.collectives import Traffic
from meshwright.runtime.cuts import even_segments
from meshwright.runtime.loss import call_loss
from meshwright.runtime.tensors import find_tensors, map_values
from meshwright.runtime.vocabulary import VocabularyLogits
from meshwright.runtime.vocabulary.columns import Columns, replicated
from tests.harness.every import some
from tests.harness.hugging_face import FAMILIES, make_model, rows_of
from tests.harness.ranks import run_ranks
from tests.runtime.vocabulary_losses import DIVIDED, GATHERED, Loss, sure

#: Ranks and vocabulary; of 5 columns over 4 ranks the last rank has none.
LAYOUTS = ((2, 101), (3, 101), (4, 101), (4, 5))


def columns_of(vocabulary: int) -> Columns:
    widths = tuple(size for _, size in even_segments(vocabulary, dist.get_world_size()))
    return Columns(widths, dist.GroupMember.WORLD, Traffic())


def values_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def labels_of(vocabulary: int, *shape: int) -> Tensor:
    labels = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1))
    labels[..., 1] = -100
    return labels


def divide(whole: Tensor, columns: Columns) -> tuple[VocabularyLogits, Tensor]:
    """Divided logits, and the leaf [..., Vl] that they are made of, by way of a local tensor with a padding column."""
    leaf = columns.take(whole.detach()).requires_grad_(whole.requires_grad)
    padded = F.pad(leaf * 1.0, (0, 1))
    return VocabularyLogits.of(padded[..., : columns.width], columns), leaf


def same(found: Tensor | None, wanted: Tensor | None, name: str, tolerance: float = 1e-12) -> None:
    assert (found is None) == (wanted is None), f"{name}: {found} is not {wanted}"
    if found is None or wanted is None:
        return
    assert found.shape == wanted.shape, f"{name}: {found.shape} is not {wanted.shape}"
    found, wanted = found.detach().double(), wanted.detach().double()
    assert torch.equal(found.isnan(), wanted.isnan()), f"{name}: {found} is not {wanted}"
    if wanted.numel():
        torch.testing.assert_close(
            found.nan_to_num(), wanted.nan_to_num(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )


def compare(
    loss: Loss, whole: Tensor, labels: Tensor, name: str, *, gathers: int | None = 0, tolerance: float = 1e-12
) -> Traffic:
    """Value and gradients of a loss of divided logits beside those of whole ones; the collectives of the former."""
    columns = columns_of(whole.shape[-1])
    source, scale = whole.detach().requires_grad_(), torch.tensor(0.8, dtype=whole.dtype).requires_grad_()
    own_scale = scale.detach().clone().requires_grad_()
    wanted = loss(source * 1.0, labels, scale)
    wanted.backward()
    logits, leaf = divide(source, columns)
    found = loss(logits, labels, own_scale)
    assert type(found) is Tensor
    same(found, wanted, name, tolerance)
    if gathers is not None:
        assert columns.traffic.counts["tp_all_gather"] == gathers, f"{name}: {columns.traffic.counts}"
    found.backward()
    assert source.grad is not None
    same(leaf.grad, columns.take(source.grad), f"{name}: gradient", tolerance)
    same(own_scale.grad, scale.grad, f"{name}: gradient of the scale", tolerance)
    if gathers == 0:
        assert columns.traffic.counts["tp_all_gather"] == 0, f"{name}: {columns.traffic.counts}"
    return columns.traffic


def failures(checks: dict[str, Callable[[], Any]]) -> None:
    """Runs all checks on this rank; fails with the text of each that did. Those fail alike on all ranks."""
    texts = []
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            texts.append(f"{name}: {type(error).__name__}: {error}")
            sys.stderr.write(texts[-1] + "\n")  # other ranks may fail for it first
    assert not texts, "\n\n".join(texts)


# --------------------------------------------------------------------------------------------- losses as people write


def all_losses(vocabulary: int) -> None:
    whole, labels = values_of(2, 4, vocabulary), labels_of(vocabulary, 2, 4)

    def without_gradients(loss: Loss) -> None:
        columns, scale = columns_of(vocabulary), torch.tensor(0.8, dtype=torch.float64)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                found = loss(divide(whole, columns)[0], labels, scale)
                same(found, loss(whole.clone(), labels, scale), context.__name__)

    with float32_upcasts_stay_float64():
        failures(
            {
                **{n: lambda n=n, f=f: compare(f, whole, labels, n) for n, f in DIVIDED.items()},
                **{n: lambda n=n, f=f: compare(f, whole, labels, n, gathers=None) for n, f in GATHERED.items()},
                **{f"{n}, no gradients": lambda f=f: without_gradients(f) for n, f in (DIVIDED | GATHERED).items()},
            }
        )


@pytest.mark.parametrize(("world", "vocabulary"), some([(2, 101), (3, 101), (4, 5)], LAYOUTS))
def test_any_loss_has_the_numbers_of_whole_logits(world: int, vocabulary: int) -> None:
    run_ranks(world, all_losses, vocabulary)


# -------------------------------------------------------------------------------------------------- Hugging Face models


class Head(nn.Module):
    """An output layer of which each rank has some rows."""

    def __init__(self, layer: Any, columns: Columns) -> None:
        super().__init__()
        rows = slice(columns.start, columns.start + columns.width)
        self.columns = columns
        self.weight = nn.Parameter(layer.weight.detach()[rows].clone())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach()[rows].clone())

    def forward(self, inputs: Tensor) -> VocabularyLogits:
        return VocabularyLogits.of(F.linear(replicated(inputs, self.columns), self.weight, self.bias), self.columns)


def decoder(name: str) -> nn.Module:
    if name in FAMILIES:
        return make_model(name, tied=False, dtype=torch.float64)
    sizes = {"vocab_size": 101, "hidden_size": 12, "intermediate_size": 23, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2}
    scale = {"logits_scaling": 3.0} if name == "granite" else {"logit_scale": 0.3}
    config = transformers.AutoConfig.for_model(name, **sizes, **heads, **scale, tie_word_embeddings=False)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def hugging_face(name: str) -> None:
    plain, divided, columns = decoder(name), decoder(name), columns_of(101)
    divided.load_state_dict(plain.state_dict())
    layer, head = plain.get_output_embeddings(), Head(plain.get_output_embeddings(), columns)
    divided.set_output_embeddings(head)
    batch = rows_of(name, seed=1, dtype=torch.float64)
    with float32_upcasts_stay_float64():
        wanted, found = plain(**batch), divided(**batch)
        same(found.loss, wanted.loss, "loss")
        assert isinstance(found.logits, VocabularyLogits)
        wanted.loss.backward()
        found.loss.backward()
    assert columns.traffic.counts["tp_all_gather"] == 0
    same(found.logits.whole(), wanted.logits, "logits")
    if layer.weight is plain.get_input_embeddings().weight:
        return  # the embedding has a gradient of its own then
    same(head.weight.grad, layer.weight.grad[columns.start : columns.start + columns.width], "head")
    body, other = dict(plain.named_parameters()), dict(divided.named_parameters())
    compared = [n for n, p in body.items() if n in other and p.shape == other[n].shape and p is not layer.weight]
    assert len(compared) > 5
    for parameter in compared:
        same(other[parameter].grad, body[parameter].grad, parameter, 1e-11)


NAMES = (*(name for name in FAMILIES if name != "vit"), "cohere", "granite")


def all_hugging_face() -> None:
    failures({name: partial(hugging_face, name) for name in NAMES})


def test_hugging_face_models_compute_their_own_loss_of_divided_logits() -> None:
    run_ranks(3, all_hugging_face, timeout_s=120)


# ------------------------------------------------------------------------------------------------------- hard numbers


def flat_mean(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return F.cross_entropy(logits, labels)


def flat_sum(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return F.cross_entropy(logits, labels, reduction="sum")


def flat_logs(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logs = logits.log_softmax(1)
    return F.nll_loss(logs, labels) + logs.gather(1, sure(labels)[:, None]).exp().sum()


def flat_logsumexp(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return (logits.logsumexp(1) / 1e3).sum()


def numbers(vocabulary: int) -> None:
    plain, labels = values_of(6, vocabulary), labels_of(vocabulary, 3, 2).flatten()
    beyond = plain.clone()
    beyond[0], beyond[2, 0], beyond[2, -1], beyond[4] = -torch.inf, 1e4, -1e4, 1e4
    beyond[4, labels[4]] = -torch.inf
    infinite = plain.clone()
    infinite[:, 1::2] = -torch.inf
    unlike = plain.clone()
    unlike[2, 3], unlike[4, 0] = torch.nan, torch.inf
    cases = {
        "all ignored": (plain, torch.full((6,), -100)),
        "no rows": (plain[:0], labels[:0]),
        "one row": (plain[:1], labels[:1]),
        "large": (plain * 1e4, labels),
        "large and equal": (torch.full_like(plain, 1e4), labels),
        "very small": (plain - 1e6, labels),
        "infinities": (beyond, labels),
        "half of the vocabulary forbidden": (infinite, labels),
        "no numbers": (unlike, labels),
    }
    losses = (flat_mean, flat_sum, flat_logs, flat_logsumexp)
    failures(
        {
            f"{name}, {loss.__name__}": partial(compare, loss, *case, name, gathers=0)
            for name, case in cases.items()
            for loss in losses
        }
    )


@pytest.mark.parametrize(("world", "vocabulary"), [(2, 101), (4, 5)])
def test_hard_numbers(world: int, vocabulary: int) -> None:
    run_ranks(world, numbers, vocabulary)


def narrow(vocabulary: int) -> None:
    """Losses of narrow logits are computed in float32, so that they are at least as near as PyTorch's."""
    labels = labels_of(vocabulary, 2, 4)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        whole = values_of(2, 4, vocabulary).to(dtype)
        for name in (
            "mean",
            "total",
            "hugging_face",
            "soft_capped",
            "built_in",
            "log_probabilities",
            "picked",
            "z_loss",
        ):
            compare(
                DIVIDED[name], whole, labels, f"{name} {dtype}", tolerance=tolerance * (10 if name == "total" else 1)
            )
        for name in ("probabilities", "with_accuracy"):
            compare(GATHERED[name], whole, labels, f"{name} {dtype}", gathers=None, tolerance=tolerance)
        found = F.cross_entropy(divide(whole, columns_of(vocabulary))[0].flatten(0, 1), labels.flatten())
        assert found.dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = divide(whole, columns_of(vocabulary))
            for name in ("mean", "picked", "z_loss", "totals"):
                scale = torch.tensor(0.8)
                wanted = DIVIDED[name](whole, labels, scale)
                assert DIVIDED[name](logits, labels, scale).dtype == wanted.dtype
        same(found, F.cross_entropy(whole.double().flatten(0, 1), labels.flatten()), str(dtype), tolerance)


def test_narrow_dtypes() -> None:
    run_ranks(3, narrow, 101)


def out_of_bounds() -> list[str]:
    logits = divide(values_of(2, 101), columns_of(101))[0]
    texts = []
    for label in (101, -1):
        labels = torch.tensor([3, label])
        for loss in (F.cross_entropy, F.nll_loss, lambda x, y: x.gather(1, y[:, None])):
            with pytest.raises(IndexError) as caught:
                loss(logits, labels)
            texts.append(str(caught.value))
    return texts


def test_labels_out_of_bounds_are_told_on_all_ranks() -> None:
    for texts in run_ranks(2, out_of_bounds):
        assert all("out of bounds: the vocabulary has 101 entries" in text for text in texts)


# ----------------------------------------------------------------------------------------------- memory and collectives


class Largest(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation made, and shapes with a whole row in them."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.elements, self.rows = vocabulary, 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in find_tensors(result):
            if not tensor.is_meta:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
                self.rows += [tuple(tensor.shape)] if self.vocabulary in tensor.shape else []
        return result


def memory(name: str) -> dict[str, int]:
    whole, labels, columns = values_of(16, 8, 101), labels_of(101, 16, 8), columns_of(101)
    logits, leaf = divide(whole.requires_grad_(), columns)
    with Largest(101) as seen:
        loss = DIVIDED[name](logits, labels, torch.tensor(0.8, dtype=torch.float64).requires_grad_())
        loss.backward()
    assert seen.rows == []
    assert seen.elements <= 16 * 8 * (columns.width + 1), seen.elements  # the local tensor has a padding column
    assert leaf.grad is not None
    return dict(columns.traffic.counts)


def all_memory(names: tuple[str, ...]) -> list[dict[str, int]]:
    return [memory(name) for name in names]


def test_no_rank_makes_whole_rows() -> None:
    for found in run_ranks(3, all_memory, ("hugging_face", "built_in", "soft_capped", "picked")):
        for counts, wanted in zip(found, (2, 2, 2, 5), strict=True):
            assert counts == {"tp_all_reduce": wanted}


def gathers() -> None:
    columns = columns_of(101)
    logits, _ = divide(values_of(2, 4, 101).requires_grad_(), columns)
    with torch.no_grad():
        logits.argmax(-1)
    assert logits.whole() is logits.whole()
    loss = logits.softmax(-1)[0, 0, 0] + logits.view(-1, 101).softmax(-1).sum() + logits[:, 1:].std()
    assert columns.traffic.take() == {"tp_all_gather": 1}
    loss.backward()
    assert columns.traffic.take() == {}


def test_logits_and_their_views_are_gathered_once() -> None:
    run_ranks(2, gathers)


def in_groups() -> None:
    """Two groups of two ranks, each with other rows."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = Columns((64, 37), groups[rank // 2], Traffic())
    assert (columns.rank, columns.start, columns.vocabulary) == (rank % 2, 64 * (rank % 2), 101)
    whole, labels = values_of(2, 4, 101, seed=rank // 2).requires_grad_(), labels_of(101, 2, 4)
    logits, leaf = divide(whole, columns)
    loss, wanted = DIVIDED["mean"](logits, labels, labels), DIVIDED["mean"](whole, labels, labels)
    same(loss, wanted, "loss")
    same(GATHERED["smoothed"](logits, labels, labels), GATHERED["smoothed"](whole, labels, labels), "smoothed")
    loss.backward()
    wanted.backward()
    assert whole.grad is not None
    same(leaf.grad, columns.take(whole.grad), "gradient")


def test_groups_of_ranks_compute_apart() -> None:
    run_ranks(4, in_groups)


# -------------------------------------------------------------------------------------------------- inside the runtime


@dataclass
class Output:
    logits: Any
    hidden: Any = None


def outputs() -> None:
    whole, columns = values_of(4, 3, 101), columns_of(101)
    labels = labels_of(101, 4, 3)
    logits, _ = divide(whole.requires_grad_(), columns)
    wanted = float(F.cross_entropy(whole.detach().flatten(0, 1), labels.flatten(), reduction="sum"))

    def loss(outputs: Any, targets: Any) -> Any:
        given = outputs if isinstance(outputs, Tensor) else find_tensors(outputs)[0]
        return F.cross_entropy(given.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()

    mean = MeanLoss(lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), weight=lambda y: (y >= 0).sum())
    for made in (logits, (logits,), {"logits": logits}, Output(logits), CausalLMOutputWithPast(logits=logits)):
        copied = map_values(lambda tensor: tensor.detach()[1:3], made)
        assert type(copied) is type(made)
        assert [tuple(tensor.shape) for tensor in find_tensors(copied)] == [(2, 3, 101)]
        require_additive(loss, made, labels, 4)
        total, weight = call_loss(loss, made, labels)
        assert (float(total.detach()), float(weight)) == (pytest.approx(wanted, rel=1e-12), 8.0)
    total, weight = call_loss(mean, logits, labels)
    assert float(total.detach()) == pytest.approx(wanted, rel=1e-12)
    nothing, weight = call_loss(mean, logits, torch.full_like(labels, -100))
    nothing.backward()
    assert (float(nothing.detach()), float(weight)) == (0.0, 0.0)
    assert columns.traffic.counts["tp_all_gather"] == 0
    with pytest.raises(ConfigError, match="the loss of two rows"):
        require_additive(lambda x, y: (x.softmax(0).sum() ** 2, len(y)), logits, labels, 4)


def test_divided_logits_go_through_what_takes_outputs() -> None:
    run_ranks(2, outputs)


def attributes() -> None:
    columns = columns_of(101)
    logits, leaf = divide(values_of(2, 4, 101).requires_grad_(), columns)
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.size(-1), logits.dim(), logits.ndim, len(logits)) == ((2, 4, 101), 101, 3, 3, 2)
    assert (logits.dtype, logits.device.type, logits.numel()) == (torch.float64, "cpu", 808)
    assert logits.requires_grad
    assert logits.is_floating_point()
    assert logits.is_contiguous()
    assert not logits[:, 1:].is_contiguous()
    assert not logits.is_cuda
    assert not logits.is_leaf
    assert logits._base is not None  # the local tensor is a view without padding
    assert not logits.detach().requires_grad
    assert logits.to("cpu") is logits.cpu() is logits.double() is logits.contiguous() is logits
    assert len({logits: 1}) == 1
    width = f"columns {columns.start} to {columns.start + columns.width} on rank {columns.rank} of 2"
    assert repr(logits) == str(logits) == f"{logits}"
    assert width in repr(logits)
    assert "(2, 4, 101)" in repr(logits)
    copied = copy.deepcopy({"logits": logits})["logits"]
    assert isinstance(copied, VocabularyLogits)
    assert torch.equal(copied.local, logits.local)
    assert copied.local.data_ptr() != logits.local.data_ptr()
    assert columns.traffic.counts == {}
    for refused in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(ConfigError, match="pickling logits"):
            refused({"logits": logits})
    with pytest.raises(AttributeError, match="data of logits"):
        logits.data = torch.zeros(2, 4, 101)
    with pytest.raises(ValueError, match="are not the"):
        VocabularyLogits.of(torch.zeros(2, 7), columns)
    with pytest.raises(RuntimeError, match="invalid"):
        logits.view(5, 101)
    with pytest.raises(TypeError, match=r"Pass it logits.whole\(\)"):
        torch.vmap(torch.sum)(logits)
    assert leaf.grad is None


def freed() -> None:
    """Nothing keeps logits, or what was gathered, alive in a cycle."""
    gc.collect()
    gc.disable()
    logits, _ = divide(values_of(2, 4, 101).requires_grad_(), columns_of(101))
    flat = logits.view(-1, 101)
    loss = flat.softmax(-1).sum() + F.cross_entropy(flat, labels_of(101, 8)) + logits.logsumexp(-1).sum()
    known = [weakref.ref(value) for value in (logits, flat, logits.local, logits.whole())]
    loss.backward()
    del logits, flat, loss
    assert [reference() for reference in known] == [None] * 4


def test_logits_are_freed_with_their_last_user() -> None:
    run_ranks(2, freed)


def test_what_the_logits_tell_of_themselves() -> None:
    run_ranks(2, attributes)


def gradients() -> None:
    whole, labels, columns = values_of(3, 101).requires_grad_(), torch.tensor([1, 99, -100]), columns_of(101)
    logits, leaf = divide(whole, columns)
    seen: list[Any] = []
    logits.register_hook(seen.append)
    plain = whole * 1.0
    logits.retain_grad()
    plain.retain_grad()
    loss = F.cross_entropy(logits, labels) + logits.softmax(-1).square().sum()
    wanted = F.cross_entropy(plain, labels) + plain.softmax(-1).square().sum()
    (found,) = torch.autograd.grad(loss, [logits], retain_graph=True)
    (right,) = torch.autograd.grad(wanted, [plain], retain_graph=True)
    same(found.whole(), right, "autograd.grad")
    for factor in (1, 2):
        loss.backward(retain_graph=True)
        wanted.backward(retain_graph=True)
        same(leaf.grad, factor * columns.take(right), f"{factor} times backward")
    assert isinstance(logits.grad, VocabularyLogits)
    same(logits.grad.whole(), plain.grad, "retained")
    logits.grad = None
    assert logits.grad is None
    assert [tuple(gradient.shape) for gradient in seen] == [(3, 101)] * 3
    same(seen[1].whole(), right, "hook")
    logits.backward(torch.ones_like(whole))
    same(leaf.grad, 2 * columns.take(right) + 1, "backward of logits")
    twice, source = divide(whole, columns)
    probabilities = twice.softmax(-1)
    (first,) = torch.autograd.grad(probabilities.square().sum(), source, create_graph=True)
    VocabularyLogits.of(first, columns).pow(2).sum().backward()
    (first,) = torch.autograd.grad(whole.softmax(-1).square().sum(), whole, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), whole)
    same(source.grad, columns.take(second), "gradient of a gradient")


class Divided(nn.Module):
    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, local: Tensor) -> VocabularyLogits:
        return VocabularyLogits.of(local * 1.0, self.columns)


def module_hooks() -> None:
    """Backward hooks of modules put a function of their own behind the outputs."""
    whole, labels, columns = values_of(3, 101).requires_grad_(), torch.tensor([1, 99, -100]), columns_of(101)
    leaf, seen = columns.take(whole.detach()).requires_grad_(), []
    module = Divided(columns)
    module.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    wanted = F.cross_entropy(whole, labels)
    F.cross_entropy(module(leaf), labels).backward()
    wanted.backward()
    same(leaf.grad, columns.take(whole.grad), "gradient")
    same(seen[0].whole(), whole.grad, "what the hook saw")


def test_module_hooks_see_divided_gradients() -> None:
    run_ranks(2, module_hooks)


def test_gradients_are_found_where_plain_ones_are() -> None:
    run_ranks(3, gradients)


def changed_after_use() -> str:
    logits, _ = divide(values_of(3, 101).requires_grad_(), columns_of(101))
    flat = logits.view(-1, 101)
    loss = Squares.apply(flat)
    logits.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * torch.ones(3, 101, dtype=torch.float64)


def test_gradients_that_would_be_wrong_after_a_change_in_place_are_refused() -> None:
    assert all("were changed in place" in text for text in run_ranks(2, changed_after_use))
