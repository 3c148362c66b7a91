"""Models as users write them, cut into stages: as in one process, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import ConfigError
from meshwright.measure.equality import Run, compare, join, record, show
from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.equivalence import structures
from tests.equivalence.structures import CASES, CLASSES, WIDTH
from tests.harness.ranks import run_one, run_ranks

RATE, ROWS = 0.1, 8
JOB = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64", clip_norm=0.5)


class Mixed(nn.Module):
    """A block that takes and returns a tuple: a hidden state, an integer mask, a boolean tensor, None and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor, Tensor, None, bool]) -> tuple[Tensor, Tensor, Tensor, None, bool]:
        hidden, kept, odd, missing, flag = value
        assert missing is None
        hidden = hidden + torch.tanh(self.inner(hidden)) * kept[..., None] * (1 if flag else 2)
        return hidden.where(~odd[..., None], hidden * 0.5), (kept + 1) % 2, ~odd, None, not flag


class Tuples(nn.Module):
    """Blocks that hand on tuples of tensors of several dtypes beside plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixed() for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        kept, odd = (inputs[..., 0] > 0).long(), inputs[..., 1] > 0
        value = (self.enter(inputs), kept, odd, None, True)
        for block in self.blocks:
            value = block(value)
        logits: Tensor = self.head(value[0] + value[1][..., None])
        return logits


class Two(nn.Module):
    """A block of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, other: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(torch.cat([x, other], dim=-1)))


class Skips(nn.Module):
    """Skip connections: every block reads the embedding, and the last ones what the first ones have made."""

    def __init__(self, *, nested: bool = False) -> None:
        super().__init__()
        self.nested = nested
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Two() for _ in range(6))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        x = first = self.enter(inputs)
        made: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x, other=made[5 - number] if self.nested and number > 2 else first)
            made.append(x)
        logits: Tensor = self.leave(x + first)
        return logits


class Unused(Skips):
    """A module that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(WIDTH, WIDTH)


class Between(nn.Module):
    """A learned scale and a table that code between blocks uses, on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.7))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        for layer in self.layers:
            x = x + torch.tanh(layer(x * self.scale))
        logits: Tensor = self.leave(x)
        return logits


def frozen() -> nn.Module:
    model = Skips()
    model.enter.requires_grad_(False)
    return model


def plain_sequence() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def pairs(inputs: Tensor, labels: Tensor) -> Any:
    return inputs, labels


def loss(outputs: Any, targets: Any) -> tuple[Tensor, int]:
    if not isinstance(outputs, Tensor):
        return structures.loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


MODELS: dict[str, structures.Case] = CASES | {
    name: structures.Case(model, pairs)
    for name, model in {
        "tuples": Tuples,
        "skips": Skips,
        "nested skips": lambda: Skips(nested=True),
        "frozen embedding": frozen,
        "between": Between,
        "sequence": plain_sequence,
        "unused": Unused,
    }.items()
}


@dataclass(frozen=True)
class Laid:
    """A model under a strategy."""

    name: str
    strategy: Strategy

    def __str__(self) -> str:
        return f"{self.name}: {self.strategy}"


def engine(laid: Laid, job: Job = JOB) -> Engine:
    case = MODELS[laid.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = case.model().double()
    example = case.rows(2, seed=9)
    return Engine(model, loss, lambda p: torch.optim.SGD(p, lr=RATE), job, laid.strategy, example=example)


def run(laid: Laid) -> Run:
    return record(engine(laid), [MODELS[laid.name].rows(ROWS, seed) for seed in (1, 2)], float64=False)


#: In turn, so that every model is cut in two ways: whole on one rank a stage, and sharded with two stages a rank.
WHOLE = [Strategy(pp=2, schedule=name, microbatch=2) for name in ("1f1b", "zb-h1", "gpipe")]
SHARDED = [
    Strategy(pp=2, dp=2, zero=3, schedule="zb-h1", recompute="full"),
    Strategy(pp=2, dp=2, zero=3, schedule="1f1b"),
    Strategy(pp=2, dp=2, zero=2, schedule="gpipe"),
]
FOLDED = [
    Strategy(pp=2, schedule="zb-v", microbatch=2),
    Strategy(pp=2, schedule="interleaved-1f1b", virtual_stages=2, microbatch=2),
]
#: Strategies, each with the models it cuts in turn.
LAID: dict[Strategy, list[str]] = {
    kind[number]: [name for index, name in enumerate(MODELS) if index % len(kind) == number]
    for kind in (WHOLE, SHARDED, FOLDED)
    for number in range(len(kind))
}


def run_all(laid: list[Laid]) -> list[Run]:
    runs = []
    for one in laid:
        try:
            runs.append(run(one))
        except Exception as error:
            error.add_note(f"in {one}")
            raise
    return runs


@pytest.mark.parametrize("strategy", LAID, ids=str)
def test_models_of_any_structure(strategy: Strategy) -> None:
    laid = [Laid(name, strategy) for name in LAID[strategy]]
    alone = [Laid(name, Strategy(microbatch=strategy.microbatch)) for name in LAID[strategy]]
    wanted = run_one(run_all, alone)
    by_rank = run_ranks(strategy.world_size, run_all, laid, timeout_s=120)
    for one, right, ranks in zip(laid, wanted, zip(*by_rank, strict=True), strict=True):
        for joined in join(ranks):
            assert [step.report for step in joined.steps] == [step.report for step in ranks[0].steps], one
            beyond = compare(joined, right, dtype="float64", optimizer="sgd", learning_rate=RATE)
            assert not beyond, f"{one}\n{show(beyond)}"


class Hidden(nn.Module):
    """Blocks that hand on a plain object, whose tensors nobody can see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([structures.Block("opaque"), structures.Block("tensor")])

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        for block in self.blocks:
            x = block(x)
        return x


class Loop(Skips):
    """Its values decide how often its last layer runs."""

    def forward(self, inputs: Tensor) -> Tensor:
        x = first = self.enter(inputs)
        for layer in self.layers:
            x = layer(x, other=first)
        while bool((x.abs() < 1).any()):
            x = self.layers[5](x * 2 + 1, other=first)
        logits: Tensor = self.leave(x)
        return logits


class Wrapped(Skips):
    """What it returns hides what an early block has made."""

    def forward(self, inputs: Tensor) -> Any:
        first = self.enter(inputs)
        return structures.Carried(super().forward(inputs), (structures.Opaque(first),))  # type: ignore[arg-type]


PAIR = Strategy(pp=2, schedule="1f1b", microbatch=2)
REFUSED: dict[str, tuple[Callable[[], nn.Module], Strategy, str]] = {
    "a plain object": (Hidden, PAIR, "blocks.0 returns tensors inside a Opaque"),
    "a plain object at the end": (Wrapped, PAIR, "the model returns tensors inside a Opaque"),
    "numbers that decide": (Loop, PAIR, "looks at numbers of what layers.5 returns, before it calls layers.5"),
    "too many stages": (Skips, Strategy(pp=2, schedule="looped-bfs", virtual_stages=9), "18 stages for a model of"),
    "stages of too few blocks": (Skips, Strategy(pp=2, schedule="1f1b", stages=(2, 3)), "stages of 2, 3 blocks"),
}


def refusal(name: str) -> str:
    """What an engine says before its first step."""
    model, strategy, _ = REFUSED[name]
    example = CASES["tensor"].rows(2, seed=1)
    with pytest.raises(ConfigError) as refused:
        Engine(model().double(), loss, lambda p: torch.optim.SGD(p, lr=RATE), JOB, strategy, example=example)
    assert refused.value.fix
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_before_the_first_step(name: str) -> None:
    for text in run_ranks(2, refusal, name):
        assert REFUSED[name][2] in text
