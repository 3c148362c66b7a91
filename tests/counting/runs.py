"""The counted run: two steps of a decoder whose sizes divide by eight, with few activations beside its weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist

from meshwright.models import Decoder, DecoderConfig
from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.counting.census import Census, CollectiveCounter, optimizer_bytes, parameter_bytes
from tests.harness.models import loss_of
from tests.harness.patience import patient
from tests.harness.ranks import run_ranks

__all__ = ["BLOCKS", "Counted", "Setting", "counted", "model"]

BLOCKS = 4
# Threads of gloo let go of a buffer a moment after its collective is done: memory is counted in several steps, and the
# least of each moment is taken.
COUNTED_STEPS = 2
SEQUENCE = 2
HIDDEN = 96
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One counted run."""

    zero: int
    world: int
    compute: str = "float32"
    microbatches: int = 2
    shard: int = 0
    prefetch: int = 0
    unit_blocks: int = 1
    tied: bool = False
    odd: bool = False

    def __str__(self) -> str:
        words = [f"zero={self.zero} world={self.world} {self.compute} m={self.microbatches}"]
        words += [
            f"{name}={getattr(self, name)}" for name in ("shard", "prefetch", "tied", "odd") if getattr(self, name)
        ]
        return " ".join(words + ([f"unit_blocks={self.unit_blocks}"] if self.unit_blocks > 1 else []))

    @property
    def rank_is_measured(self) -> bool:
        """The first and the last rank count memory in step; that takes time, and all ranks are alike."""
        return self.world == 1 or dist.get_rank() in (0, self.world - 1)

    @property
    def group(self) -> int:
        """Ranks over which states are sharded."""
        return 1 if self.zero == 0 else self.shard or self.world


@dataclass(frozen=True)
class Counted:
    """What one rank counted. `moments` are bytes that were not there before the step, by moment."""

    parameters: int
    optimizer: int
    reported_rest: dict[str, int]
    reported_peak: dict[str, int]
    reported_collectives: dict[str, int]
    calls: dict[str, int]
    moments: dict[str, int]


def model(setting: Setting) -> Callable[[], Decoder]:
    """Builds the counted decoder; an odd one has sizes that divide by nothing."""
    config = DecoderConfig(
        vocab_size=VOCABULARY - (5 if setting.odd else 0),
        hidden_size=HIDDEN - (6 if setting.odd else 0),
        intermediate_size=256 - (7 if setting.odd else 0),
        num_hidden_layers=BLOCKS,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=8,
        tie_word_embeddings=setting.tied,
    )
    return partial(Decoder, config)


@cache
def counted(settings: tuple[Setting, ...]) -> list[dict[Setting, Counted]]:
    """What each rank counted in runs of one world, which follow each other on the same ranks."""
    return run_ranks(settings[0].world, _run_all, settings, timeout_s=240)


def _run_all(settings: tuple[Setting, ...]) -> dict[Setting, Counted]:
    gc.freeze()  # what was imported holds no tensor of a run, and need not be looked through each time
    return {setting: _run(setting) for setting in settings}


def _run(setting: Setting) -> Counted:
    """Counts steps of a run on this rank after the first: the optimizer has its states by then."""
    sequences = setting.world * setting.microbatches
    engine = Engine(
        model(setting),
        loss_of("decoder"),
        partial(torch.optim.AdamW, fused=True),
        Job(global_batch=sequences, sequence=SEQUENCE, compute_dtype=setting.compute),
        Strategy(
            dp=setting.world,
            zero=setting.zero,
            shard=setting.shard,
            prefetch=setting.prefetch,
            unit_blocks=setting.unit_blocks,
        ),
        measure_memory="every" if setting.rank_is_measured else "never",
    )
    ids = torch.randint(0, 100, (sequences, SEQUENCE), generator=torch.Generator().manual_seed(0))
    engine.step((ids, ids))
    with CollectiveCounter() as counter, patient():
        report = engine.step((ids, ids))
    peaks, moments = [report.peak_bytes], {}
    if setting.rank_is_measured:
        census = Census(engine, [engine.model.get_submodule(f"model.layers.{index}") for index in range(BLOCKS)])
        engine.on_gradients = lambda gradients: census.take("optimizer")
    for _ in range(COUNTED_STEPS):
        if setting.rank_is_measured:
            census.begin()
            with CollectiveCounter(census), patient():
                peaks.append(engine.step((ids, ids)).peak_bytes)
            moments = {name: min(size, moments.get(name, size)) for name, size in census.moments.items()}
        else:
            engine.step((ids, ids))
    return Counted(
        parameters=sum(parameter_bytes(engine).values()),
        optimizer=sum(optimizer_bytes(engine).values()),
        reported_rest=engine.bytes_at_rest(),
        reported_peak=min(peaks, key=lambda peak: peak.get("total", 0)),
        reported_collectives=report.collectives,
        calls=dict(counter.calls),
        moments=moments,
    )
