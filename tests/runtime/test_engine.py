"""The engine beyond equal numbers: what it refuses, evaluation, resume, schedule against what really ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from meshwright.errors import CheckpointError, ConfigError, UnsupportedCombination
from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.runtime import Engine, MeanLoss, global_rank
from meshwright.spec import Job, Strategy
from tests.harness.ranks import run_one, run_ranks

CONFIG = DecoderConfig(
    vocab_size=101,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
)
JOB = Job(global_batch=12, sequence=16, clip_norm=0.5, seed=5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def build() -> nn.Module:
    return Decoder(CONFIG)


def batch(seed: int, sequences: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 101, (sequences, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make(**changes: Any) -> Engine:
    arguments: dict[str, Any] = {
        "model": build,
        "loss": token_loss,
        "optimizer": adamw,
        "job": JOB,
        "strategy": Strategy(microbatch=2),
        "measure_memory": "never",
    }
    return Engine(**{**arguments, **changes})


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategy": Strategy(dp=2)}, "needs 2 ranks, but the world size is 1"),
        ({"strategy": Strategy(microbatch=5)}, "global_batch=12 cannot be split"),
        ({"batch_scope": "each"}, "batch_scope"),
        ({"model": 3}, "model of type int"),
        ({"model": lambda: 3}, "builder returned a int"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)}, "already built"),
        ({"optimizer": lambda parameters: 3}, "returned a int"),
        ({"optimizer": 3}, "optimizer of type int"),
        ({"blocks": ["model.layers.9"]}, "no such modules"),
        ({"strategy": Strategy(microbatch=2, recompute="full", recompute_blocks=9)}, "9 of 5 blocks"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**changes)


def test_a_legal_strategy_without_a_runtime_is_refused() -> None:
    with pytest.raises(UnsupportedCombination, match="context parallelism"):
        make(strategy=Strategy(cp=2))


def steps(sequences: int = 12) -> None:
    make().step(batch(0, sequences))


def test_wrong_batches_and_losses_are_refused() -> None:
    with pytest.raises(AssertionError, match="the batch has 7 sequences, expected 12"):
        run_one(steps, 7)
    for loss, says in (
        (lambda outputs, targets: outputs.sum(), "the loss returned a Tensor"),
        (lambda outputs, targets: (outputs, 3), "not a scalar"),
        (lambda outputs, targets: (outputs.sum(), targets), "not one number"),
    ):
        with pytest.raises(ConfigError, match=says):
            make(loss=loss).step(batch(0))
    for wrong, says in (
        (batch(0)[0], "cannot be used"),
        ((batch(0)[0], batch(1, 3)[0]), "leading sizes"),
        ((1, 2), "no tensor"),
    ):
        with pytest.raises(ConfigError, match=says):
            make().step(wrong)


def batch_norm_on_two_ranks() -> str:
    try:
        Engine(mlp(), token_loss, adamw, JOB, Strategy(dp=2))
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_batch_norm_is_refused_with_the_remedy() -> None:
    assert "SyncBatchNorm.convert_sync_batchnorm" in run_ranks(2, batch_norm_on_two_ranks)[0]


def non_finite(zero: int) -> tuple[list[bool], list[float], bool, int, int]:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = token_loss(outputs, targets)
        return total * poison.get("factor", 1.0), weight

    poison: dict[str, float] = {}
    world = torch.distributed.get_world_size()
    engine = make(
        loss=loss, strategy=Strategy(dp=world, zero=zero), scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.5)
    )
    reports = [engine.step(batch(0))]
    before = [local(p).clone() for p in engine.named_parameters().values()]
    poison["factor"] = float("inf") if torch.distributed.get_rank() == 0 else 1.0
    reports.append(engine.step(batch(1)))
    same = all(torch.equal(a, local(b)) for a, b in zip(before, engine.named_parameters().values(), strict=True))
    poison.clear()
    reports.append(engine.step(batch(2)))
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    return [r.skipped for r in reports], rates, same, engine.skipped_steps, engine.steps_done


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor.detach()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_with_an_infinite_gradient_on_one_rank_is_skipped_on_all(zero: int) -> None:
    for skipped, rates, same, count, done in run_ranks(2, non_finite, zero):
        assert skipped == [False, True, False]
        assert same
        assert (count, done) == (1, 3)
        assert rates == [1e-2 * 0.25]  # two optimizer steps, two scheduler steps


def evaluations(zero: int, scope: str) -> tuple[float, float, float]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy = Strategy(dp=world, zero=zero, microbatch=2)
    engine = make(strategy=strategy, batch_scope=scope, measure_memory="first")
    rows = 12 // world if scope == "local" else 12
    start = rank * rows if scope == "local" else 0
    engine.step(tuple(part[start : start + rows] for part in batch(0)))
    before = engine.evaluate(pieces(rank, scope))
    engine.step(tuple(part[start : start + rows] for part in batch(1)))
    return (
        before,
        engine.evaluate(pieces(rank, scope)),
        engine.step(tuple(p[start : start + rows] for p in batch(2))).loss,
    )


def pieces(rank: int, scope: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Seven sequences to evaluate: each rank the same, or rank 0 one batch and rank 1 three."""
    whole = batch(9, 7)
    if scope == "global":
        return [whole]
    cuts = [(0, 2)] if rank == 0 else [(2, 4), (4, 6), (6, 7)]
    return [tuple(part[a:b] for part in whole) for a, b in cuts]  # type: ignore[misc]


def evaluations_alone() -> tuple[float, float, float]:
    engine = make()
    engine.step(batch(0))
    before = engine.evaluate([batch(9, 7)])
    engine.step(batch(1))
    return before, engine.evaluate([batch(9, 7)]), engine.step(batch(2)).loss


@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_evaluation_is_the_same_for_every_stage_and_unequal_numbers_of_batches(zero: int, scope: str) -> None:
    expected = run_one(evaluations_alone)
    for found in run_ranks(2, evaluations, zero, scope):
        assert found == pytest.approx(expected, rel=1e-5)


def counted(zero: int, accumulation: int) -> tuple[dict[str, int], dict[str, int]]:
    world = torch.distributed.get_world_size()
    engine = make(strategy=Strategy(dp=world, zero=zero, microbatch=12 // world // accumulation))
    engine.step(batch(0))
    report = engine.step(batch(1))
    schedule = engine.schedule
    return report.collectives, {"gather": schedule.count("gather"), "reduce": schedule.count("reduce")}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_runs_is_what_the_schedule_says(zero: int, accumulation: int) -> None:
    for ran, said in run_ranks(2, counted, zero, accumulation):
        assert ran.get("all_gather", 0) == said["gather"]
        assert ran.get("reduce_scatter", 0) + ran.get("all_reduce", 0) == said["reduce"]
        assert ran["statistics"] == 1


def train_and_save(folder: Path, zero: int, shard: int, steps: int, resume: Path | None) -> list[float]:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    engine = make(
        strategy=Strategy(dp=world, zero=zero, shard=shard, microbatch=1),
        scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.9),
    )
    if resume is not None:
        assert engine.load(resume) == {"note": 7}
    losses = [engine.step(batch(engine.steps_done)).loss for _ in range(steps)]
    engine.save(folder, {"note": 7})
    return losses


def test_G1_any_layout_continues_from_any_other(tmp_path: Path) -> None:
    straight = run_ranks(4, train_and_save, tmp_path / "straight", 0, 1, 4, None)[0]
    layouts: list[tuple[int, int, int]] = [(4, 1, 4), (2, 2, 2), (3, 3, 3), (6, 3, 3), (4, 2, 2), (1, 0, 1)]
    for index, (world, zero, shard) in enumerate(layouts):
        later_world, later_zero, later_shard = layouts[(index + 1) % len(layouts)]
        first, last = tmp_path / f"{index}", tmp_path / f"{index}-resumed"
        begun = _run(world, first, zero, shard, 2, None)
        ended = _run(later_world, last, later_zero, later_shard, 2, first)
        assert begun + ended == pytest.approx(straight, rel=2e-5)


def _run(world: int, *args: Any) -> list[float]:
    return run_ranks(world, train_and_save, *args)[0] if world > 1 else run_one(train_and_save, *args)


def test_resume_on_the_same_layout_is_bit_for_bit(tmp_path: Path) -> None:
    straight = run_ranks(2, train_and_save, tmp_path / "a", 3, 2, 4, None)[0]
    begun = run_ranks(2, train_and_save, tmp_path / "b", 3, 2, 2, None)[0]
    assert begun + run_ranks(2, train_and_save, tmp_path / "c", 3, 2, 2, tmp_path / "b")[0] == straight


def other_model(folder: Path) -> None:
    make(
        scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.9),
        model=lambda: Decoder(DecoderConfig(hidden_size=24, num_attention_heads=6, num_hidden_layers=2)),
    ).load(folder)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_one(train_and_save, tmp_path / "checkpoint", 0, 1, 1, None)
    with pytest.raises(CheckpointError, match="another model"):
        other_model(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError):
        make().load(tmp_path / "nothing")


def initial(zero: int) -> dict[str, torch.Tensor]:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    engine = make(strategy=Strategy(dp=world, zero=zero))
    weights = engine.named_parameters()
    return {
        name: w.full_tensor() if isinstance(w, torch.distributed.tensor.DTensor) else w.detach()
        for name, w in weights.items()
    }


@pytest.mark.parametrize("zero", [0, 3])
def test_initial_weights_do_not_depend_on_the_layout(zero: int) -> None:
    alone = run_one(initial, 0)
    for found in run_ranks(3, initial, zero):
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def divergent_module() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    engine = make(model=Decoder(CONFIG), strategy=Strategy(dp=2, zero=3))
    losses = [engine.step(batch(s)).loss for s in range(2)]
    return [*losses, engine.model.model.norm.weight.full_tensor().sum().item()]


def test_a_module_built_differently_on_each_rank_starts_from_rank_0() -> None:
    first, second = run_ranks(2, divergent_module)
    assert first == second


def test_mean_loss_weighs_by_what_it_counts() -> None:
    loss = MeanLoss(nn.functional.cross_entropy, weight=lambda targets: (targets != -100).sum())
    outputs, targets = torch.randn(5, 3), torch.tensor([0, 2, -100, 1, -100])
    total, weight = loss(outputs, targets)
    assert weight == 3
    assert total == pytest.approx(nn.functional.cross_entropy(outputs, targets, reduction="sum").item(), rel=1e-6)
    empty, none = loss(outputs, torch.full((5,), -100))
    assert (empty, none) == (0, 0)


def raising_step(zero: int, compute: str) -> str:
    world = torch.distributed.get_world_size()
    job = Job(global_batch=12, sequence=16, compute_dtype=compute)
    engine = make(job=job, strategy=Strategy(dp=world, zero=zero, microbatch=3), loss=loss_that_fails)
    with pytest.raises(RuntimeError, match="the loss failed"):
        engine.step(batch(0))
    before = {name: p.dtype for name, p in engine.model.named_parameters()}
    assert set(before.values()) == {torch.float32}
    try:
        engine.step(batch(0))
    except ConfigError as error:
        return str(error)
    return "went on"


def loss_that_fails(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = len(targets) == 3  # the engine tries a loss on fewer rows first
    loss_that_fails.calls = getattr(loss_that_fails, "calls", 0) + whole  # type: ignore[attr-defined]
    if whole and loss_that_fails.calls == 2:  # type: ignore[attr-defined]
        raise RuntimeError("the loss failed")
    return token_loss(outputs, targets)


@pytest.mark.parametrize(("zero", "compute"), [(0, "bfloat16"), (1, "float32"), (3, "float32")])
def test_a_step_that_raised_is_not_trained_on(zero: int, compute: str) -> None:
    assert all("failed before" in text for text in run_ranks(2, raising_step, zero, compute))


class Loads(nn.Module):
    """A model whose constructor writes into its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))


def loaded() -> nn.Module:
    model = Decoder(CONFIG)
    model.load_state_dict(model.state_dict())
    return model


@pytest.mark.parametrize("builder", [Loads, loaded])
def test_a_builder_that_loads_weights_is_refused(builder: Any) -> None:
    with pytest.raises(ConfigError, match="pass the built model instead"):
        make(model=builder)


def random_buffers() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    before = torch.random.get_rng_state()

    def build() -> nn.Module:
        model = Decoder(CONFIG)
        model.register_buffer("table", torch.randn(4))
        return model

    engine = make(model=build, strategy=Strategy(dp=2))
    assert torch.equal(before, torch.random.get_rng_state())
    return engine.model.get_buffer("table").tolist()


def test_random_buffers_of_a_builder_are_the_same_on_all_ranks() -> None:
    first, second = run_ranks(2, random_buffers)
    assert first == second


def inside_out(zero: int) -> list[str]:
    """Call the model under `inference`, then go on training, and save."""
    world = torch.distributed.get_world_size()
    engine = make(
        job=Job(global_batch=12, sequence=16, compute_dtype="bfloat16"), strategy=Strategy(dp=world, zero=zero)
    )
    engine.model.model.norm.eval()
    engine.step(batch(0))
    with engine.inference() as model, torch.no_grad():
        shape = tuple(model(batch(1)[0]).shape)
    engine.step(batch(1))
    assert not engine.model.model.norm.training
    assert engine.model.training
    return [str(shape)]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_model_can_be_called_between_steps(zero: int) -> None:
    assert run_ranks(2, inside_out, zero) == [["(12, 16, 101)"]] * 2


def batch_for_one() -> list[float]:
    engine = make(strategy=Strategy(dp=2, zero=3), batch_scope="local")
    return [engine.evaluate(pieces(0, "local") if global_rank() == 0 else []), engine.evaluate(pieces(0, "local"))]


def test_an_evaluation_of_batches_that_one_rank_alone_has() -> None:
    (once, twice), other = run_ranks(2, batch_for_one)
    assert [once, twice] == other
    assert once == pytest.approx(twice, rel=1e-6)


class IntStep(torch.optim.SGD):
    """An optimizer that counts its steps in a plain number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_numbers_in_optimizer_states_and_nested_schedules_come_back(tmp_path: Path) -> None:
    from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, SequentialLR

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        later = [MultiStepLR(optimizer, [1, 3], gamma=0.1), LambdaLR(optimizer, lambda step: 0.5**step)]
        return SequentialLR(optimizer, [LinearLR(optimizer, 0.5, total_iters=2), *later], milestones=[2, 4])

    def engine() -> Engine:
        return make(optimizer=lambda parameters: IntStep(parameters, lr=0.1, momentum=0.9), scheduler=schedule)

    straight, first, second = engine(), engine(), engine()
    rates = []
    for index in range(6):
        straight.step(batch(index))
        rates.append(straight.optimizer.param_groups[0]["lr"])
    for index in range(3):
        first.step(batch(index))
    first.save(tmp_path / "c")
    second.load(tmp_path / "c")
    found = []
    for index in range(3, 6):
        second.step(batch(index))
        found.append(second.optimizer.param_groups[0]["lr"])
    assert found == rates[3:]
    assert {state["count"] for state in second.optimizer.state.values()} == {6}
    with pytest.raises(CheckpointError, match="written with optimizer IntStep"):
        make().load(tmp_path / "c")


@pytest.mark.parametrize("batches", [None, 3])
def test_what_are_no_batches_is_refused(batches: Any) -> None:
    with pytest.raises(ConfigError, match=f"batches of type {type(batches).__name__}"):
        list(make().steps(batches))
    with pytest.raises(ConfigError, match=f"batches of type {type(batches).__name__}"):
        make().evaluate(batches)


def test_a_file_holds_at_least_a_byte(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_shard_bytes=0"):
        make().export(tmp_path / "out", max_shard_bytes=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scheduler": 3}, "scheduler int cannot be used"),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)}, "ReduceLROnPlateau cannot be used"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
        ({"optimizer": lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)}, "not this model's"),
        ({"measure_memory": "always"}, "measure_memory"),
        ({"blocks": ["model.layers"]}, "not a block"),
        ({"weights": 3}, "weights of type int"),
        ({"model": lambda: Decoder(CONFIG).requires_grad_(False)}, "no parameter of the model is trainable"),
    ],
)
def test_more_wrong_arguments_are_refused_at_construction(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**changes)


def twice_under_reentrant_checkpoint(zero: int) -> str:
    from torch.utils.checkpoint import checkpoint

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(4, 6)
            self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for _ in range(2):
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=True)
            return x

    torch.manual_seed(0)
    loss = MeanLoss(nn.functional.mse_loss, weight=lambda targets: targets.numel())
    engine = make(model=Looped(), loss=loss, strategy=Strategy(dp=2, zero=zero, microbatch=2))
    try:
        engine.step((torch.randn(12, 4), torch.randn(12, 6)))
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("zero", [0, 1])
def test_reentrant_checkpoints_around_a_repeated_block_are_refused(zero: int) -> None:
    assert all("use_reentrant=False" in text for text in run_ranks(2, twice_under_reentrant_checkpoint, zero))


class ParentsInit(nn.Module):
    """A layer whose weight only its parent's init function knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"gate": Bare()})
        self.head = nn.Linear(3, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, ParentsInit):
            nn.init.ones_(self.inner["gate"].weight)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))


def test_a_weight_that_its_own_init_function_leaves_out_is_refused_instead_of_garbage() -> None:
    with pytest.raises(ConfigError, match=r"inner\.gate\.weight has no initial value"):
        make(model=ParentsInit)
