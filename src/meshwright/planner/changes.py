"""What one change would bring: more memory, a faster network, a larger batch, shorter sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from meshwright.cost.floors import Floors
from meshwright.cost.pricer import Pricer
from meshwright.errors import MeshwrightError
from meshwright.planner.question import Question, permits
from meshwright.planner.rule import Candidate
from meshwright.spec import Change, Cluster, Link, Strategy

__all__ = ["changes"]

_MORE_MEMORY = 1.25
#: So many of the best are priced again.
_RANKED = 2


def changes(question: Question, ranking: list[Candidate]) -> tuple[Change, ...]:
    """The plan with one thing changed, the largest gain in tokens per second first.

    Each is the fastest that fits of the ranking and of its first strategy's neighbours (less recompute, a larger
    microbatch, a lower ZeRO stage, no offload): priced, not searched for anew.
    """
    found = []
    for what, changed in _changed(question, ranking[0]):
        options = [candidate.strategy for candidate in ranking[:_RANKED]]
        options += _neighbours(ranking[0].strategy, changed)
        pricer = question.pricer.on(changed.cluster) if changed.job == question.job else changed.pricer
        best = _fastest(pricer, options)
        if best is not None:
            strategy, step_s = best
            tokens = changed.job.global_batch * changed.job.sequence
            rate = tokens / max(step_s, 1e-12)
            found.append(Change(what=what, strategy=str(strategy), step_s=step_s, tokens_per_s=rate))
    return tuple(sorted(found, key=lambda change: -change.tokens_per_s))


def _changed(question: Question, best: Candidate) -> Iterator[tuple[str, Question]]:
    cluster, job = question.cluster, question.job
    yield "25% more device memory", replace(question, cluster=_roomier(cluster))
    per_node = min(group.devices for group in cluster.nodes)
    if best.strategy.world_size > per_node and cluster.between is not None:
        faster = replace(cluster, between=_faster(cluster.between))
        yield "twice the bandwidth between nodes", replace(question, cluster=faster)
    elif best.strategy.world_size > 1 and any(group.inside is not None for group in cluster.nodes):
        nodes = tuple(replace(group, inside=_faster(group.inside) if group.inside else None) for group in cluster.nodes)
        yield "twice the bandwidth inside a node", replace(question, cluster=replace(cluster, nodes=nodes))
    yield "twice the global batch", replace(question, job=replace(job, global_batch=2 * job.global_batch))
    if job.sequence % 2 == 0:
        yield "half the sequence", replace(question, job=replace(job, sequence=job.sequence // 2))


def _roomier(cluster: Cluster) -> Cluster:
    nodes = tuple(
        replace(group, device=replace(group.device, memory_bytes=int(group.device.memory_bytes * _MORE_MEMORY)))
        for group in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _faster(link: Link) -> Link:
    return replace(link, bytes_per_s=2 * link.bytes_per_s)


def _neighbours(strategy: Strategy, question: Question) -> Iterator[Strategy]:
    """Strategies that need more memory than this one and are faster where there is room, and those of its batch."""
    allowed = question.job.allow_recompute
    steps: list[dict[str, object]] = [{"microbatch": 2 * strategy.microbatch}]
    steps += [{"recompute": policy, "recompute_blocks": 0} for policy in ("selective", "none") if policy in allowed]
    if strategy.zero:
        steps.append({"zero": strategy.zero - 1, "shard": 0, "gather": "auto", "reduce": "auto", "prefetch": 0})
    if strategy.offload.optimizer != "device":
        steps.append({"offload": replace(strategy.offload, optimizer="device", parameters="device", path="")})
    for step in steps:
        try:
            found = replace(strategy, **step)  # type: ignore[arg-type]  # fields of a Strategy
        except MeshwrightError:
            continue
        if permits(question.pins, found):
            yield replace(found, stages=()) if found.stages and not question.pins.of("stages") else found


def _fastest(pricer: Pricer, options: list[Strategy]) -> tuple[Strategy, float] | None:
    """The fastest of these that fits, with its seconds; what bounds on time and memory rule out is not priced."""
    best, bounds, floors = None, [], Floors(pricer)
    for number, option in enumerate(dict.fromkeys(options)):
        with suppress(MeshwrightError):  # also of a traced model, which is known for the shapes of its inputs alone
            option.microbatches(pricer.job.global_batch)  # refuses what does not divide the batch
            if floors.bytes(option) <= pricer.budget_bytes(option):
                bounds.append((floors.strategy_s(option), number, option))
    for floor_s, _, option in sorted(bounds):
        if best is not None and floor_s >= best[1]:
            break
        with suppress(MeshwrightError):
            strategy = pricer.settled(option)
            if pricer.short_bytes(strategy, ends=True) > 0:
                continue
            step_s = pricer.step_s(strategy)
            if (best is None or step_s < best[1]) and pricer.fits(strategy):
                best = strategy, step_s
    return best
