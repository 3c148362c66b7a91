"""The ZeRO table as formulas: bytes at rest, bytes at each moment of a step, collectives of a step, per rank.

P parameters, shard group d, U units of which the root unit is one, m microbatches; s bytes of the stored, c of the
compute and r of the reduce dtype (float32: 4), o = 8 bytes of AdamW states per parameter.
"""

from __future__ import annotations

from functools import cached_property

import torch

from tests.counting.runs import BLOCKS, Setting, model

__all__ = ["Table"]

STORED = REDUCED = 4
STATES = 8


class Table:
    """What one rank of a setting should count."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.compute = 2 if setting.compute == "bfloat16" else 4
        with torch.device("meta"):
            built = model(setting)()
        self.shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
        self.sizes = {name: parameter.numel() for name, parameter in built.named_parameters()}

    @property
    def total(self) -> int:
        """P."""
        return sum(self.sizes.values())

    @cached_property
    def units(self) -> list[int]:
        """Parameters of each unit that holds blocks, in forward order."""
        blocks = [
            sum(size for name, size in self.sizes.items() if name.startswith(f"model.layers.{index}."))
            for index in range(BLOCKS)
        ]
        step = self.setting.unit_blocks
        return [sum(blocks[index : index + step]) for index in range(0, BLOCKS, step)]

    @property
    def root(self) -> int:
        """Parameters of the root unit."""
        return self.total - sum(self.units)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, whose gradient arrives last."""
        return self.sizes["model.embed_tokens.weight"]

    @property
    def after_blocks(self) -> int:
        """Parameters of the root unit whose gradients arrive before those of any block: final norm and head."""
        return self.sizes["model.norm.weight"] + self.sizes.get("lm_head.weight", 0)

    def rest(self) -> tuple[int, int]:
        """Stored parameters (padded: each tensor's first dim is cut into d equal parts) and optimizer states."""
        d = self.setting.group
        padded = sum(-(-shape[0] // d) * (self.sizes[name] // shape[0]) for name, shape in self.shapes.items())
        return STORED * padded, STATES * self.total // d

    def collectives(self) -> dict[str, int]:
        """Per step: gathers, reduces and all-reduces of units; and the one that agrees on loss, weight and norm."""
        setting, units, m = self.setting, len(self.units) + 1, self.setting.microbatches
        statistics = {"statistics": 1} if setting.world > 1 else {}
        if setting.group == 1:
            return statistics | ({"all_reduce": units} if setting.world > 1 else {})
        gathers = {1: units, 2: units, 3: 2 * m * units}[setting.zero]
        reduces = {1: units, 2: m * units, 3: m * units}[setting.zero]
        found = statistics | {"all_gather": gathers, "reduce_scatter": reduces}
        return found | ({"all_reduce": units} if setting.group < setting.world else {})

    def moment(self, name: str) -> tuple[int, int]:
        """Bytes of gathered parameters and of gradients at a moment of a step.

        `before J`: between microbatches. `forward J block K`: block K is gathered. `forward J end`. `arrived J N`: all
        gradients of the N-th unit of a backward have arrived. `reduce J N`: inside its reduce. `optimizer`.
        """
        setting, kind, words = self.setting, name.split()[0], name.split()[1:]
        if setting.group == 1:
            return (self.compute * self.total if self.compute < STORED else 0), self._whole_gradients(kind, words)
        if kind == "optimizer":
            return 0, STORED * self.total // setting.group
        microbatch = int(words[0])
        if kind in ("arrived", "reduce"):
            position = int(words[1]) % (len(self.units) + 1)
            gathered, gradients = self._backward(microbatch, position, inside_reduce=kind == "reduce")
            return self.compute * gathered, gradients
        waiting = 0
        if microbatch:
            waiting = REDUCED * self.total if setting.zero == 1 else STORED * self.total // setting.group
        return self.compute * self._gathered_forward(microbatch, kind, words[1:]), waiting

    def moments(self) -> list[str]:
        """Every moment of a step at which memory may be largest."""
        names = ["optimizer"]
        for microbatch in range(self.setting.microbatches):
            names += [f"before {microbatch}", f"forward {microbatch} end"]
            names += [f"forward {microbatch} block {block}" for block in range(BLOCKS)]
            last = microbatch == self.setting.microbatches - 1
            reduced = self.setting.world > 1 and (self.setting.zero > 1 or last)
            for position in range(len(self.units) + 1):
                names += [f"arrived {microbatch} {position}"] + [f"reduce {microbatch} {position}"] * reduced
        return names

    def _whole_gradients(self, kind: str, words: list[str]) -> int:
        """Bytes of whole gradients: in flat buckets all the step long; of one process, as its first backward makes
        them. Later ones are added to them, and those of bf16 copies are stored wider at once."""
        if self.setting.world > 1 or kind == "optimizer" or int(words[0]) > 0:
            return STORED * self.total
        if kind != "arrived":
            return 0
        position = int(words[1])
        is_root = position == len(self.units)
        made = [*reversed(self.units), self.root][: position + 1]
        return STORED * (sum(made) + (0 if is_root else self.after_blocks))

    def _gathered_forward(self, microbatch: int, kind: str, words: list[str]) -> int:
        """Parameters that are gathered before a microbatch, before a block's forward, or after the last."""
        if self.setting.zero < 3 and microbatch:
            return self.total
        if kind == "before":
            return 0
        if words == ["end"]:
            return self.total if self.setting.zero < 3 else 0
        unit = int(words[1]) // self.setting.unit_blocks
        first = unit if self.setting.zero == 3 else 0
        return self.root + sum(self.units[first : unit + 1 + self.setting.prefetch])

    def _backward(self, microbatch: int, position: int, *, inside_reduce: bool) -> tuple[int, int]:
        """Gathered parameters, and bytes of gradients, when the unit at a position of the backward order is done.

        Blocks come last to first, then the root unit. Where units are released, one is before it is reduced.
        """
        zero, d, last = self.setting.zero, self.setting.group, microbatch == self.setting.microbatches - 1
        order = [*reversed(self.units), self.root]
        is_root, unit = position == len(self.units), order[position]
        done, left = sum(order[:position]), sum(order[position + 1 :])
        here = 0 if inside_reduce and (zero == 3 or last) else unit
        if zero == 3:
            ahead = [] if is_root else self.units[::-1][position + 1 : position + 1 + self.setting.prefetch]
            gathered = here + (0 if is_root else self.root + sum(ahead))
        else:
            gathered = here + left if last else self.total
        # Of the root unit, the gradients of norm and head arrive before those of any block.
        early = 0 if is_root else self.after_blocks
        own = REDUCED * unit + REDUCED * unit // d if inside_reduce else self.compute * unit
        if zero > 1:
            return gathered, own + self.compute * early + STORED * (self.total if microbatch else done) // d
        if microbatch == 0:
            reduced = STORED * done // d if last else REDUCED * done
            return gathered, own + self.compute * early + reduced
        # Gradients of earlier microbatches wait whole. In float32 later ones are added to them in place.
        waiting = REDUCED * (left if inside_reduce else left + unit)
        if self.compute == STORED:
            own, early = own if inside_reduce else 0, 0
        return gathered, own + self.compute * early + waiting + (STORED * done // d if last else REDUCED * done)
