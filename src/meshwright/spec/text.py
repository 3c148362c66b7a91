"""The one text form: `dp=2 zero=3 offload.optimizer=host`, for `--strategy`, `--pin` and `--set`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from meshwright.errors import ConfigError
from meshwright.spec.files import from_table
from meshwright.spec.strategy import Offload, Strategy
from meshwright.spec.values import parse_value, show_value

__all__ = [
    "Assignment",
    "apply_assignments",
    "check_pins",
    "parse_assignments",
    "parse_strategy",
    "pins_from_table",
    "require_consistent",
]

Operator = Literal["=", "<=", ">="]
_NAME_WITH_OPERATOR = re.compile(r"[\w.\-]+(<=|>=|=)")
_OPERATOR_FIRST = re.compile(r"\s*[<>=]")
_WORD = re.compile(r"^\s*([A-Za-z_][\w.\-]*)\s*(<=|>=|=)(?!=)\s*(.*?)\s*$", re.DOTALL)


@dataclass(frozen=True)
class Assignment:
    """One `key=value`, `key<=value` or `key>=value`; the key may be dotted."""

    key: str
    operator: Operator
    value: Any

    def __str__(self) -> str:
        return f"{self.key}{self.operator}{show_value(self.value)}"

    def allows(self, value: Any) -> bool:
        """Whether a value satisfies it."""
        if isinstance(value, tuple):
            value = list(value)
        if self.operator == "=":
            return bool(value == self.value)
        if not isinstance(value, (int, float)):
            return False
        return bool(value <= self.value) if self.operator == "<=" else bool(value >= self.value)


def parse_assignments(words: Iterable[str], *, option: str, bounds: bool = False) -> list[Assignment]:
    """Parse words of the text form. One word may hold several assignments separated by blanks.

    Args:
        words: such as `["dp=2 zero=3", "microbatch=4"]`.
        option: the option they were given to, for errors.
        bounds: whether `<=` and `>=` are allowed.

    Raises:
        ConfigError: a word is not an assignment, or a key is given two values that contradict.
    """
    found: list[Assignment] = []
    for text in words:
        for word in _split(text):
            match = _WORD.match(word)
            if match is None or not match[3]:
                raise ConfigError(
                    f"{option} {word!r} is not an assignment",
                    why="the form is key=value",
                    fix=f"write for example {option} zero=3",
                )
            key, operator, value = match[1], match[2], parse_value(match[3])
            if isinstance(value, list) and any(isinstance(item, str) and _WORD.match(item) for item in value):
                raise ConfigError(
                    f"{option} {word!r} holds several assignments",
                    why="commas separate the items of a list",
                    fix=f"separate them with blanks: {option} '{word.replace(',', ' ')}'",
                )
            if operator != "=" and not bounds:
                raise ConfigError(f"{option} {word!r}: only key=value is possible here", fix="use = instead")
            if operator != "=" and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ConfigError(
                    f"{option} {word!r} compares with {value!r}",
                    why="bounds need a number",
                    fix=f"write for example {key}<=4",
                )
            found.append(Assignment(key, operator, value))  # type: ignore[arg-type]  # the pattern matches only operators
    require_consistent(found, option)
    return found


def parse_strategy(text: str) -> Strategy:
    """A Strategy from its text form.

    Raises:
        ConfigError: a word, key, type or value is wrong, or the combination is illegal.
    """
    table: dict[str, Any] = {}
    apply_assignments(table, parse_assignments([text], option="--strategy"))
    return from_table(Strategy, table, "strategy")


def pins_from_table(table: Any, where: str = "strategy") -> list[Assignment]:
    """The pins that a `[strategy]` table of a job file makes: each value it names.

    Raises:
        ConfigError: an unknown key or a wrong type.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table", why=f"found {table!r}", fix=f"write a [{where}] table")
    pins = []
    for key, value in table.items():
        if key == "offload" and isinstance(value, dict):
            pins += [Assignment(f"offload.{name}", "=", item) for name, item in value.items()]
        else:
            pins.append(Assignment(key, "=", value))
    check_pins(pins)
    return pins


def check_pins(pins: Iterable[Assignment]) -> None:
    """Refuse pins of unknown fields or of values with a wrong type (legality of combinations comes later).

    Raises:
        ConfigError: naming the field and, for an unknown one, the nearest known.
    """
    known = [f.name for f in fields(Strategy) if f.name != "offload"] + [f"offload.{f.name}" for f in fields(Offload)]
    for pin in pins:
        if pin.key not in known:
            near = difflib.get_close_matches(pin.key, known, n=1)
            raise ConfigError(
                f"unknown key strategy.{pin.key}",
                why=f"a strategy has {', '.join(known)}",
                fix=f"did you mean {near[0]}?" if near else "remove it",
            )
        probe = pin.value
        default = getattr(Offload(), pin.key[8:]) if pin.key.startswith("offload.") else getattr(Strategy(), pin.key)
        wanted = type(default)
        right = isinstance(probe, list) if wanted is tuple else type(probe) is wanted
        if not right:
            name = {"str": "text", "int": "a whole number", "bool": "true or false", "tuple": "a list"}[wanted.__name__]
            raise ConfigError(
                f"strategy.{pin.key}={probe!r} has the wrong type",
                why=f"expected {name}",
                fix=f"write for example {pin.key}={show_value(default)}",
            )


def apply_assignments(table: dict[str, Any], assignments: Iterable[Assignment]) -> None:
    """Set dotted keys in a nested table, in place.

    Raises:
        ConfigError: a key runs through something that is not a table.
    """
    for assignment in assignments:
        *parents, last = assignment.key.split(".")
        place = table
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{assignment.key}: {parent} is a value, not a table", fix="set the value itself")
        place[last] = assignment.value


def _split(text: str) -> list[str]:
    """Split at blanks outside quotes and brackets; blanks around an operator do not split."""
    words, word, depth, quote, escaped = [], "", 0, "", False
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and quote == '"' and not escaped
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if not char.isspace() or quote or depth > 0:
            word += char
        elif not _NAME_WITH_OPERATOR.fullmatch(word) and not _OPERATOR_FIRST.match(text, index):
            words.append(word)
            word = ""
    return [w for w in [*words, word] if w]


def require_consistent(found: list[Assignment], option: str) -> None:
    """Refuse assignments of one key that no value satisfies together.

    Raises:
        ConfigError: naming the assignments that contradict.
    """
    by_key: dict[str, list[Assignment]] = {}
    for entry in found:
        by_key.setdefault(entry.key, []).append(entry)
    for key, entries in by_key.items():
        exact = [entry.value for entry in entries if entry.operator == "="]
        low = max((entry.value for entry in entries if entry.operator == ">="), default=None)
        high = min((entry.value for entry in entries if entry.operator == "<="), default=None)
        crossed = low is not None and high is not None and low > high
        if crossed or any(not entry.allows(value) for value in exact for entry in entries):
            raise ConfigError(
                f"{option} contradicts itself: {' and '.join(map(str, entries))}",
                why=f"no {key} satisfies all of them",
                fix="keep one",
            )
