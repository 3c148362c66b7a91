"""Pins: what a person has decided; the planner completes the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec import Assignment, Offload, Strategy, parse_strategy
from meshwright.spec.files import to_table
from meshwright.spec.text import check_pins, pins_from_table, require_consistent

__all__ = ["FREE", "Pins", "pins_of"]

#: What the planner chooses. Every other field of a Strategy is pinned or keeps its default.
FREE = ("dp", "zero", "shard", "microbatch", "recompute", "recompute_blocks")


class Pins:
    """Assignments (`=`, `<=`, `>=`) of fields of a Strategy.

    Raises:
        ConfigError: an unknown field, a value of the wrong type, or pins that contradict each other.
    """

    def __init__(self, assignments: Iterable[Assignment]) -> None:
        self._all = list(assignments)
        check_pins(self._all)
        require_consistent(self._all, "pins")

    def of(self, key: str) -> list[Assignment]:
        """The pins of one field."""
        return [pin for pin in self._all if pin.key == key]

    def exact(self, key: str) -> Any:
        """The value a field is pinned to; None when it is not."""
        return next((pin.value for pin in self.of(key) if pin.operator == "="), None)

    def allows(self, key: str, value: Any) -> bool:
        """Whether a value satisfies the pins of a field."""
        return all(pin.allows(value) for pin in self.of(key))

    def options(self, key: str, values: Iterable[Any]) -> list[Any]:
        """The values to try: the pinned one as it is (it may be illegal), otherwise those that the bounds allow."""
        exact = self.exact(key)
        return [exact] if exact is not None else [value for value in values if self.allows(key, value)]

    def show(self, *keys: str) -> str:
        """The pins of these fields as text, for messages."""
        return " ".join(str(pin) for pin in self._all if pin.key in keys)

    def table(self) -> dict[str, str]:
        """Every pinned field with what it is pinned to: `{"zero": "3", "dp": "<=4"}`."""
        found: dict[str, str] = {}
        for pin in self._all:
            shown = str(pin)[len(pin.key) :].removeprefix("=")
            if shown not in found.get(pin.key, "").split(" "):
                found[pin.key] = f"{found[pin.key]} {shown}" if pin.key in found else shown
        return found

    def without(self, key: str) -> Pins:
        """The same without those of one field."""
        return Pins(pin for pin in self._all if pin.key != key)

    @property
    def keys(self) -> list[str]:
        """Pinned fields, each once, in the order given."""
        return list(dict.fromkeys(pin.key for pin in self._all))

    def fixed(self) -> dict[str, Any]:
        """Values of the fields that the planner does not choose: pinned, or the default moved inside its bounds."""
        default, found = Strategy(), dict[str, Any]()
        for entry in fields(Strategy):
            if entry.name not in (*FREE, "offload") and self.of(entry.name):
                found[entry.name] = self._value(entry.name, getattr(default, entry.name))
        if found.get("pp", 1) > 1 and "schedule" not in found:
            found["schedule"] = "1f1b"
        tiers = {f.name: self.exact(f"offload.{f.name}") for f in fields(Offload)}
        given = {name: value for name, value in tiers.items() if value is not None}
        if given:
            found["offload"] = Offload(**given)
        return found

    def _value(self, key: str, default: Any) -> Any:
        value = self.exact(key)
        if value is None:
            value = default
            for pin in self.of(key):
                if not pin.allows(value):
                    value = pin.value
        if not isinstance(value, list):
            return value
        wanted = int if key == "stages" else str
        if any(type(item) is not wanted for item in value):
            kind = "whole numbers" if wanted is int else "text"
            raise ConfigError(
                f"strategy.{key}={value!r} has the wrong type", why=f"its items are {kind}", fix="correct it"
            )
        return tuple(value)


def pins_of(strategy: Strategy | str) -> list[Assignment]:
    """Pins that leave only this strategy (or the one of this text form): what the planner would choose, and the rest
    where it is not the default.

    Raises:
        ConfigError: the text is no strategy, or an illegal one.
    """
    whole = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    usual = {pin.key: pin.value for pin in pins_from_table(to_table(Strategy(dp=whole.dp, zero=whole.zero)))}
    return [pin for pin in pins_from_table(to_table(whole)) if pin.key in FREE or usual.get(pin.key) != pin.value]
