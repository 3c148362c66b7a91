"""The redirection of float32 upcasts: what it changes, what it leaves alone, and that it reaches into recompute."""

import torch
from torch.utils.checkpoint import checkpoint

from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from tests.harness.cases import Case, differences, run_case
from tests.harness.plain import run_plain
from tests.harness.ranks import run_one


def upcast() -> list[torch.dtype]:
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)
    with float32_upcasts_stay_float64():
        return [
            wide.float().dtype,
            wide.to(torch.float32).dtype,
            wide.to(dtype=torch.float32).dtype,
            torch.softmax(wide, -1, dtype=torch.float32).dtype,
            torch.nn.functional.softmax(wide, dim=-1, dtype=torch.float32).dtype,
            narrow.float().dtype,
            wide.to(torch.bfloat16).dtype,
            wide.float().dtype,
        ]


def test_what_is_redirected() -> None:
    wide, narrow = torch.float64, torch.float32
    assert run_one(upcast) == [wide, wide, wide, wide, wide, narrow, torch.bfloat16, wide]


def recomputed() -> list[torch.dtype]:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.float().dtype)
        return (x.float() ** 2).to(x.dtype)

    with float32_upcasts_stay_float64():
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        checkpoint(block, x, use_reentrant=False).sum().backward()
    return seen


def test_it_reaches_into_recompute() -> None:
    assert run_one(recomputed) == [torch.float64, torch.float64]


def without_redirection(case: Case) -> list[float]:
    from contextlib import nullcontext

    import tests.harness.plain

    tests.harness.plain.float32_upcasts_stay_float64 = nullcontext
    run = run_plain(case, run_case(case).initial)
    return [step.loss for step in run.steps]


def test_it_is_needed_for_hugging_face_models() -> None:
    case = Case(world=1, model="llama")
    reference = run_one(run_case, case)
    assert not differences(case, reference, run_one(run_plain, case, reference.initial))
    off = max(
        abs(a - b.loss) / b.loss for a, b in zip(run_one(without_redirection, case), reference.steps, strict=True)
    )
    assert off > 1e-10
