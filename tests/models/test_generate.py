"""Generation: the same for a seed, inside the window, shaped by its options, clear about wrong input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from meshwright.models import Decoder, generate
from tests.models.tiny import ids_for, scrambled, small


def test_generation_is_deterministic_for_a_seed() -> None:
    model = scrambled(small())
    prompt = ids_for(model.config, sequences=2, tokens=4)
    torch.manual_seed(1)
    first = generate(model, prompt, max_new_tokens=20, temperature=1.5, top_k=0, seed=7)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(generate(model, prompt, max_new_tokens=20, temperature=1.5, top_k=0, seed=7), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(generate(model, prompt, max_new_tokens=20, temperature=1.5, top_k=0, seed=8), first)
    assert first.shape == (2, 24)
    assert torch.equal(first[:, :4], prompt)
    assert not first.requires_grad


def test_generation_stays_inside_the_window() -> None:
    model = scrambled(small(max_position_embeddings=8))
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].size(1)))
    prompt = ids_for(model.config, sequences=1, tokens=6)[0]
    out = generate(model, prompt, max_new_tokens=5, temperature=0.0)
    assert lengths == [6, 7, 8, 8, 8]
    assert out.shape == (11,)
    assert int(out[-1]) == int(model(out[None, 2:10])[0, -1].argmax())  # from the last eight tokens alone
    assert torch.equal(generate(model, out, max_new_tokens=0), out)
    generate(model, out, max_new_tokens=1)
    assert lengths[-1] == 8


def test_temperature_and_top_k_shape_the_draws() -> None:
    model = scrambled(small())
    prompt = ids_for(model.config, sequences=1, tokens=3).expand(400, 3)
    logits = model(prompt[:1])[0, -1]
    best = int(logits.argmax())
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-300}):
        assert set(generate(model, prompt[:5], max_new_tokens=1, **options)[:, -1].tolist()) == {best}
    top = set(logits.topk(3).indices.tolist())
    drawn = generate(model, prompt, max_new_tokens=1, temperature=3.0, top_k=3)[:, -1].tolist()
    assert set(drawn) == top
    weights = (logits.topk(3).values / 3.0).softmax(dim=0).tolist()
    for token, weight in zip(logits.topk(3).indices.tolist(), weights, strict=True):
        assert drawn.count(token) / 400 == pytest.approx(weight, abs=0.1)
    beyond = generate(model, prompt, max_new_tokens=1, temperature=100.0, top_k=10**6)[:, -1].tolist()
    assert len(set(beyond)) > 50


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ([], {}, "at least one token"),
        ([[]], {}, "at least one token"),
        ([[[1]]], {}, "at least one token"),
        ([101], {}, "model knows 0 to 100"),
        ([3, -1], {}, "model knows 0 to 100"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens = -1"),
        ([1], {"temperature": -0.5}, "temperature = -0.5"),
        ([1], {"temperature": math.nan}, "temperature = nan"),
        ([1], {"top_k": -2}, "top_k = -2"),
    ],
)
def test_generation_refuses(prompt: list[Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate(Decoder(small()), torch.tensor(prompt, dtype=torch.int64), **{"max_new_tokens": 1, **options})


def test_generation_refuses_a_damaged_model() -> None:
    model = scrambled(small())
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        generate(model, torch.tensor([1]), max_new_tokens=1)
