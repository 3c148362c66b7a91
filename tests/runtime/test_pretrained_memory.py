"""What starting from weight files costs in memory: a rank's share and one tensor, whatever the size of the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.runtime import Engine
from meshwright.runtime.boxes import Held
from meshwright.runtime.init import meta_parameters
from meshwright.runtime.pretrained import Pretrained
from meshwright.spec import Job, Strategy
from tests.harness.ranks import RankError, run_ranks

CONFIG = DecoderConfig(
    vocab_size=8003,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=16,
)
MIB = 2**20


def build() -> nn.Module:
    return Decoder(CONFIG)


def sizes() -> tuple[int, int]:
    """Bytes of the model and of its largest tensor in float32."""
    with meta_parameters():
        every = [4 * parameter.numel() for parameter in build().parameters()]
    return sum(every), max(every)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model in bfloat16: what is read must also be converted."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    torch.manual_seed(3)
    with meta_parameters():
        named = {name: torch.rand(p.shape, dtype=torch.bfloat16) for name, p in build().named_parameters()}
    save_file(named, path)
    yield path
    path.unlink()


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Peak:
    """The most anonymous memory inside, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.bytes, self._ended = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes())


def start(path: Path, whole: bool) -> int:
    """Bytes that starting takes at its peak beyond what the process had; a rank's values are those of the file."""
    if whole:
        Pretrained.fill = reads_whole_tensors(Pretrained.fill)  # type: ignore[method-assign]
    before = anonymous_bytes()
    with Peak() as peak:
        ranks = torch.distributed.get_world_size()
        engine = Engine(
            build,
            token_loss,
            lambda parameters: torch.optim.AdamW(parameters),
            Job(global_batch=4),
            Strategy(dp=ranks, zero=3, microbatch=1),
            weights=path,
        )
    with safe_open(path, framework="pt") as file:
        for name, parameter in engine.named_parameters().items():
            part, rows = own_rows(parameter)
            wanted = file.get_slice(name)[rows.start : rows.stop]
            assert part.shape == wanted.shape
            # A sum would do for the large ones; every element is compared.
            assert all(a.equal(b.float()) for a, b in zip(part.split(512), wanted.split(512), strict=True)), name
    assert not engine.optimizer.state
    return peak.bytes - before


def own_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """A rank's part and where it lies, told by the rank alone: sizes here are cut along their first dim."""
    if not isinstance(parameter, torch.distributed.tensor.DTensor):
        return parameter.detach(), slice(0, len(parameter))
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    share = -(-len(parameter) // ranks)
    return parameter.detach().to_local(), slice(rank * share, min((rank + 1) * share, len(parameter)))


def reads_whole_tensors(fill: Any) -> Any:
    """The fault: every rank has the whole model in memory before it takes its share."""

    def filled(self: Pretrained, targets: dict[str, Held]) -> None:
        wholes = {name: torch.empty(held.shape) for name, held in targets.items()}
        for name, tensor in wholes.items():
            self._files.read(self._keys[name][0], tuple(slice(0, size) for size in tensor.shape), tensor)
        fill(self, targets)

    return filled


def check(path: Path, ranks: int, whole: bool = False) -> list[int]:
    total, largest = sizes()
    found = run_ranks(ranks, start, path, whole)
    limit = total / ranks + largest + 64 * MIB
    assert max(found) <= limit, f"{[size // MIB for size in found]} MiB, at most {limit / MIB:.0f}"
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_Q1_a_rank_holds_its_share_and_never_the_model(weights: Path, ranks: int) -> None:
    """Every rank loaded the whole model into memory, or kept random weights: peak while starting, and values."""
    assert sizes()[0] > 512 * MIB
    assert min(check(weights, ranks)) > 0.9 * sizes()[0] / ranks  # the measure sees what is there


def test_Q1_reading_whole_tensors_is_seen(weights: Path) -> None:
    with pytest.raises(AssertionError, match="MiB, at most") as red:
        check(weights, 4, whole=True)
    assert not isinstance(red.value, RankError)
