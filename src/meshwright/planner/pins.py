"""Pins: what a person has decided; the planner completes the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec import Assignment, Offload, Strategy, parse_strategy
from meshwright.spec.files import to_table
from meshwright.spec.text import check_pins, pins_from_table, require_consistent

__all__ = ["FIXED", "Pins", "pins_of"]

#: What the planner does not search: pinned, or the default. Every other field of a Strategy is chosen.
FIXED = ("mesh_order", "unit_blocks")


class Pins:
    """Assignments (`=`, `<=`, `>=`) of fields of a Strategy.

    Raises:
        ConfigError: an unknown field, a value of the wrong type, or pins that contradict each other.
    """

    def __init__(self, assignments: Iterable[Assignment] = ()) -> None:
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

    def open_options(self, key: str, values: Sequence[int]) -> list[int]:
        """As `options`, for a field whose usual values are only some of the legal ones: where bounds allow none of
        them, the value of a bound itself."""
        found = self.options(key, values)
        bounds = sorted(pin.value for pin in self.of(key) if self.allows(key, pin.value))
        return found or bounds[:1]

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
        """Values of the fields that are not searched: pinned, or the default moved inside its bounds."""
        return {name: self._value(name, getattr(Strategy(), name)) for name in FIXED if self.of(name)}

    def listed(self, key: str, kind: type) -> tuple[Any, ...] | None:
        """The pinned list of a field; None where it is not pinned.

        Raises:
            ConfigError: an item has the wrong type.
        """
        value = self.exact(key)
        if value is None:
            return None
        if any(type(item) is not kind for item in value):
            wanted = "whole numbers" if kind is int else "text"
            raise ConfigError(
                f"strategy.{key}={value!r} has the wrong type", why=f"its items are {wanted}", fix="correct it"
            )
        return tuple(value)

    def _value(self, key: str, default: Any) -> Any:
        if isinstance(default, tuple):
            return self.listed(key, str)
        return self.options(key, [default])[0] if self.options(key, [default]) else self.open_options(key, [])[0]


def pins_of(strategy: Strategy | str) -> list[Assignment]:
    """Pins that leave only this strategy (or the one of this text form).

    Stages that are left out stay what they mean: layers spread evenly (`stages=[]`).

    Raises:
        ConfigError: the text is no strategy, or an illegal one.
    """
    whole = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    usual = {pin.key: pin.value for pin in pins_from_table(to_table(Strategy()))}
    kept = [name for name in (f.name for f in fields(Strategy)) if name not in FIXED]
    kept += [f"offload.{f.name}" for f in fields(Offload) if f.name != "path"]
    return [pin for pin in pins_from_table(to_table(whole)) if pin.key in kept or usual.get(pin.key) != pin.value]
