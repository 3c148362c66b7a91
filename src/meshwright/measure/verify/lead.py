"""The process that leads a verification: `python -m meshwright.measure.verify.lead FOLDER`.

It imports once what all ranks need and forks them; it never runs a model itself, for a process that has run autograd
cannot be forked. It reads `request.json`, says on its standard output how far it is, and leaves `answer.json`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.measure.local_ranks import LocalRanks
from meshwright.measure.verify.outcome import compare_runs, failed
from meshwright.measure.verify.reduced import depth_for
from meshwright.measure.verify.runs import OPTIMIZERS, Facts, Prepared, prepare, run_by_strategy, run_in_one_process
from meshwright.measure.verify.subject import load_code
from meshwright.spec import Strategy, parse_strategy
from meshwright.spec.verified import Verified

__all__ = ["main"]

#: What is slow to import and every rank needs; fully_shard imports the first at its first call.
_NEEDED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.checkpoint")
#: After the first failure, how long other ranks may still report theirs.
_GRACE_S = 0.3


class _Lead:
    """All verifications of a request, one after the other."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self._folder, self._sequence = folder, request["sequence"]
        self._deadline = time.monotonic() + request["timeout_s"]
        self._models = request["models"]
        self._strategies = [parse_strategy(text) for text in request["strategies"]]
        self._sharding = request["sharding"]
        self._parent = os.getppid()
        self._facts: dict[tuple[Any, ...], Facts] = {}
        self._of, self._done = len(self._models) * len(self._strategies), 0

    def all(self) -> list[Verified]:
        """Every model under every strategy."""
        found = []
        for index, asked in enumerate(self._models):
            self._say(f"building {asked['name']}")
            load_code(asked)
            for strategy in self._strategies:
                found.append(self._one(index, asked, strategy))
                self._done += 1
        return found

    def _one(self, index: int, asked: dict[str, Any], strategy: Strategy) -> Verified:
        depth = depth_for(strategy.unit_blocks, strategy.recompute_blocks, strategy.pp * strategy.virtual_stages)
        key = (index, depth, strategy.microbatch, strategy.dp, strategy.tp, strategy.pp)
        named = self._folder / "-".join(map(str, key))
        place = named.with_suffix(".values")
        prepared = Prepared(asked, strategy, depth, self._sequence, place, self._sharding)
        engine = {name: Path(f"{named}.engine-{name}") for name in OPTIMIZERS}
        plain = {name: Path(f"{named}.plain-{name}") for name in OPTIMIZERS}
        fresh = key not in self._facts
        with LocalRanks(self._folder) as processes:
            if fresh:
                self._facts[key] = self._prepare(processes, prepared)
            facts = self._facts[key]
            self._say(f"{strategy} on {asked['name']}")
            ranks = self._fork_ranks(processes, prepared)
            alone = ["alone"] if fresh else []
            if fresh:
                self._fork(processes, "alone", lambda: run_in_one_process(prepared, engine, plain))
            ended = processes.follow(self._left_s, names=[*alone, *ranks], tick=self._watch)
            if ended is not None:
                why, log = self._failure(processes, alone, ranks)
                return failed(strategy, facts, self._sequence, why, log)
            made = {name: [self._folder / f"{rank}.{name}" for rank in ranks] for name in OPTIMIZERS}
            found = compare_runs(strategy, facts, self._sequence, made, {"engine": engine, "plain": plain})
            for places in made.values():
                for place in places:
                    place.unlink()
            return found

    def _prepare(self, processes: LocalRanks, prepared: Prepared) -> Facts:
        """Build the model in a process of its own, and import here what it has imported."""
        place = self._folder / "facts.json"
        known = set(sys.modules)

        def work() -> None:
            facts = prepare(prepared, known, lambda: list(sys.modules))
            place.write_text(json.dumps(asdict(facts)), encoding="utf-8")

        self._fork(processes, "prepare", work)
        ended = processes.follow(self._left_s, names=["prepare"], tick=self._watch)
        if ended is not None:
            raise self._error("prepare") or ConfigError(
                f"{prepared.asked['name']} cannot be built",
                why=f"the process that builds it {ended.how}",
                fix="give a function that builds a small model",
            )
        processes.end(["prepare"])
        facts = msgspec.json.decode(place.read_bytes(), type=Facts)
        for name in facts.imported:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.freeze()  # forked ranks do not look through what was made here
        return facts

    def _fork_ranks(self, processes: LocalRanks, prepared: Prepared) -> list[str]:
        world = prepared.strategy.world_size
        names = [f"rank-{rank}" for rank in range(world)]
        store, timeout = self._folder / f"store-{self._done}", timedelta(seconds=self._left_s + 30)

        def work(rank: int) -> Callable[[], None]:
            def run() -> None:
                if world > 1:
                    meeting = f"file://{store}"
                    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timeout)
                run_by_strategy(prepared, {name: self._folder / f"rank-{rank}.{name}" for name in OPTIMIZERS})
                if world > 1:
                    dist.barrier()

            return run

        for rank, name in enumerate(names):
            self._fork(processes, name, work(rank))
        return names

    def _fork(self, processes: LocalRanks, name: str, work: Callable[[], None]) -> None:
        """Fork a process that leaves a record of what it raises."""
        place = self._folder / f"{name}.failed"
        place.unlink(missing_ok=True)

        def run() -> None:
            torch.set_num_threads(1)
            try:
                work()
            except BaseException as error:
                known = isinstance(error, MeshwrightError)
                record = {
                    "kind": type(error).__name__,
                    "what": error.what if isinstance(error, MeshwrightError) else str(error),
                    "why": error.why if isinstance(error, MeshwrightError) else "",
                    "fix": error.fix if isinstance(error, MeshwrightError) else "",
                    "known": known,
                    "at_s": time.monotonic(),
                }
                place.with_suffix(".part").write_text(json.dumps(record), encoding="utf-8")
                place.with_suffix(".part").rename(place)
                raise

        processes.fork(name, run)

    def _failure(self, processes: LocalRanks, alone: list[str], ranks: list[str]) -> tuple[str, str]:
        """Why the ranks failed, in words and by the log of the first, where one process does not fail.

        Raises:
            MeshwrightError: a mistake of the user's: the model fails in one process too, or the engine refuses it.
        """
        time.sleep(_GRACE_S)
        records = {name: record for name in ranks if (record := self._record(name)) is not None}
        states = [state for name in ranks if (state := processes.follow(0.0, names=[name])) is not None]
        states.sort(key=lambda state: state.exit_code is None)  # those that still run were not the first to fail
        died = [state for state in states if state.name not in records and (state.exit_code or 0) < 0]
        processes.end(ranks)
        # One that died explains what the others then say of a lost connection.
        ended = next(iter(died or states), None)
        told = min(records, key=lambda name: records[name]["at_s"]) if records and not died else ""
        first = told or (ended.name if ended else "")
        if first in records and records[first]["known"]:
            raise _rebuilt(records[first])
        if alone and processes.follow(self._left_s, names=alone, tick=self._watch) is not None:
            raise self._error("alone") or ConfigError(
                "the model was not done in one process in time", fix="give a smaller model, or a longer --timeout"
            )
        who, log = f"{first.replace('-', ' ')} of {len(ranks)}", processes.log(first)
        if first in records:
            lines = records[first]["what"].strip().splitlines() or ["without a text"]
            return f"{who} raised {records[first]['kind']}: {lines[0]}", log
        if ended is None or ended.exit_code is None:
            late = [state.name.removeprefix("rank-") for state in states] or ["?"]
            return f"not done in time by rank {', '.join(late)} of {len(ranks)}, as one process was", log
        return f"{who} {ended.how}", log

    def _error(self, name: str) -> MeshwrightError | None:
        """What a process has raised, as an error of the user's model."""
        record = self._record(name)
        if record is None:
            return None
        if record["known"]:
            return _rebuilt(record)
        lines = record["what"].strip().splitlines()
        return ConfigError(
            "the model fails in one process" if name == "alone" else "the model cannot be built",
            why=f"{record['kind']}: {lines[0] if lines else 'without a text'}",
            fix="it is run in float64 on this machine's CPU; let it run there by itself first",
        )

    def _record(self, name: str) -> dict[str, Any] | None:
        place = self._folder / f"{name}.failed"
        found: dict[str, Any] | None = json.loads(place.read_text(encoding="utf-8")) if place.exists() else None
        return found

    @property
    def _left_s(self) -> float:
        return float(max(1.0, self._deadline - time.monotonic()))

    def _watch(self) -> None:
        if os.getppid() != self._parent:  # whoever asked is gone
            sys.exit(1)

    def _say(self, what: str) -> None:
        sys.stdout.write(json.dumps({"what": what, "done": self._done, "of": self._of}) + "\n")
        sys.stdout.flush()


def _rebuilt(record: Mapping[str, Any]) -> MeshwrightError:
    from meshwright import errors

    kind = getattr(errors, record["kind"], ConfigError)
    error: MeshwrightError = kind(record["what"], why=record["why"], fix=record["fix"])
    return error


def main(folder: Path) -> None:
    """Do what the request asks; an error of the user's is an answer too."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    for name in _NEEDED:
        importlib.import_module(name)
    answer: Any
    try:
        answer = [msgspec.to_builtins(entry) for entry in _Lead(folder, request).all()]
    except MeshwrightError as error:
        answer = {"kind": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
