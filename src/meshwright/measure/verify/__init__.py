"""verify: a small copy of a model under a strategy on local ranks, beside one process, in float64. No torch here.

All work is done by a process of its own (`lead.py`), which forks the ranks, so that nothing of the caller's takes part.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright import errors
from meshwright.errors import ConfigError, RankFailure
from meshwright.measure.local_ranks import LocalRanks
from meshwright.measure.verify.asked import ask_model, require_annotations, require_possible
from meshwright.spec import Strategy, parse_strategy
from meshwright.spec.verified import Verified

__all__ = ["verify", "verify_all"]

#: Set in the environment of the processes that verify.
_RUNNING = "MESHWRIGHT_VERIFYING"
#: How much longer than its own limit the leading process may take to say what was not done.
_MARGIN_S = 30.0
#: What is done now, how many strategies are through, and of how many.
Progress = Callable[[str, int, int], None]


def verify(
    model: Any,
    strategy: Strategy | str,
    *,
    sharding: Mapping[str, str] | None = None,
    sequence: int = 17,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> Verified:
    """Whether a strategy gives the numbers of one process on a model: loss, norm, every gradient and every update.

    A small copy of the model is trained for three steps with SGD and AdamW in float64, by the strategy on ranks of this
    machine, by the same engine in one process with the same microbatches, and in plain PyTorch on the whole batch at
    once. A model that is given as a module or by a function is run as it is, where it is small.

    Args:
        model: a name of the catalogue, the path of a `config.json` or its folder, or a mapping with its keys; a
            function that builds a module, or its name (`package.module:function`, `file.py:function`); a module. The
            function returns a module that takes token ids and returns logits, a Hugging Face model, or
            `(module, inputs, loss, targets)`.
        strategy: the strategy, or its text form.
        sharding: how tensor parallelism divides modules, as `Engine` takes it; the rest as the model's own plan has it.
        sequence: tokens per sequence.
        timeout_s: for the whole.
        progress: called while it runs.

    Raises:
        ConfigError: the model cannot be built or reduced, fails in one process, or cannot run under the strategy.
        UnsupportedCombination: the strategy is not executable by this version, or the model cannot be divided by it.
        RankFailure: it was not done in time.
    """
    (found,) = verify_all(
        [model], [strategy], sharding=sharding, sequence=sequence, timeout_s=timeout_s, progress=progress
    )
    return found


def verify_all(
    models: Sequence[Any],
    strategies: Sequence[Strategy | str],
    *,
    sharding: Mapping[str, str] | None = None,
    sequence: int = 17,
    timeout_s: float = 3600.0,
    progress: Progress | None = None,
) -> list[Verified]:
    """As `verify`, for every model under every strategy; model by model."""
    if os.environ.get(_RUNNING):
        raise ConfigError(
            "verify() is called while a model's own file is imported",
            why="its ranks import that file again",
            fix="put the call under if __name__ == '__main__':",
        )
    chosen = [parse_strategy(entry) if isinstance(entry, str) else entry for entry in strategies]
    for strategy in chosen:
        if not isinstance(strategy, Strategy):
            raise ConfigError(f"a strategy of type {type(strategy).__name__}", fix="give its text form: 'dp=2 zero=3'")
        require_possible(strategy, sequence)
    require_annotations(sharding or {})
    tell = progress or (lambda *_: None)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as scratch, LocalRanks(Path(scratch)) as started:
        folder = Path(scratch)
        request = {
            "models": [ask_model(model, folder / f"model-{index}.pt") for index, model in enumerate(models)],
            "strategies": [str(strategy) for strategy in chosen],
            "sharding": dict(sharding or {}),
            "sequence": sequence,
            "timeout_s": timeout_s,
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        tell("starting", 0, len(models) * len(chosen))
        path = os.pathsep.join(entry for entry in sys.path if entry)
        started.start("verify", "meshwright.measure.verify.lead", [scratch], **{"PYTHONPATH": path, _RUNNING: "1"})
        ended = started.follow(timeout_s + _MARGIN_S, tick=lambda: _tell(started.out_path("verify"), tell))
        answer = folder / "answer.json"
        if ended is not None:
            log = started.log("verify")
            raise RankFailure(
                f"the verification {ended.how}",
                why=log.splitlines()[-1] if log else "",
                fix="try fewer ranks, or a smaller model",
            )
        found = json.loads(answer.read_text(encoding="utf-8"))
    if isinstance(found, Mapping):
        raise _error(found)
    return [msgspec.convert(entry, Verified) for entry in found]


def _error(parts: Mapping[str, str]) -> Exception:
    kind = getattr(errors, parts["kind"], ConfigError)
    error: Exception = kind(parts["what"], why=parts["why"], fix=parts["fix"])
    return error


def _tell(out: Path, progress: Progress) -> None:
    lines = out.read_text(encoding="utf-8").splitlines()
    if lines and lines[-1].endswith("}"):
        last = json.loads(lines[-1])
        progress(last["what"], last["done"], last["of"])
