"""A configuration in the making, and what became of each option of the other trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from turnwise.config import write_yaml
from turnwise.errors import shown
from turnwise.ext.frameworks.convert.options import Options

UNSET: Final = object()


@dataclass(slots=True)
class Translation:
    """What the options of a command are here.

    Attributes:
        options: The options of the other trainer.
        config: The configuration, as nested sections.
        translated: The key here of each option that has one.
        harmless: Why an option needs none.
        remedies: What to do about an option that has no counterpart and matters.
    """

    options: Options
    config: dict[str, Any] = field(default_factory=dict)
    translated: dict[str, str] = field(default_factory=dict)
    harmless: dict[str, str] = field(default_factory=dict)
    remedies: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, *options: str) -> None:
        """Set a key, such as ``batch.groups``, which the options decided."""
        *sections, name = key.split(".")
        section = self.config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
        for option in options:
            if option in self.options:
                self.options.read(option)
                self.translated[option] = key

    def move(self, option: str, to: str, convert: Callable[[Any], Any] | None = None, default: Any = UNSET) -> None:
        """Set a key to the value of one option, or to the other trainer's default where that differs from ours.

        Args:
            option: The option.
            to: The key here.
            convert: From a value there to one here; by default numbers in texts, such as 1e-6 in YAML, are read.
            default: The default there; without one an absent option sets nothing.
        """
        value = self.options.read(option, default)
        if value is UNSET or value is None:
            return
        self.set(to, _number(value) if convert is None else convert(value), option)

    def note(self, option: str, remedy: str) -> None:
        """Report an option that has no counterpart and matters."""
        self.options.read(option)
        self.remedies[option] = remedy

    def excuse(self, reason: str, *options: str) -> None:
        """Report options that have no counterpart and need none, unless they are in another list already."""
        for option in options:
            if option in self.options:
                self.options.read(option)
                if option not in self.translated and option not in self.remedies:
                    self.harmless.setdefault(option, reason)

    def classify(self, rules: Mapping[str, Any]) -> None:
        """Put each option that is in no list into one, by the longest beginning that the rules have."""
        unread = dict(self.options.unread())
        for option, value in self.options.items():
            matches = [
                (len(start), kind, text)
                for kind in ("harmless", "remedies")
                for start, text in rules[kind].items()
                if option.startswith(start)
            ]
            _, kind, text = max(matches, default=(0, "remedies", ""))
            if kind == "harmless":
                self.excuse(text, option)
            elif option in unread and not text:
                self.note(option, f"no rule for it, and so {shown(value)} is not in the configuration")
            elif option in unread and is_off(value):
                self.excuse(f"{shown(value)} switches it off", option)
            elif option in unread:
                self.note(option, text)

    def yaml(self) -> str:
        """Return the configuration, with what matters and is missing as comments above it."""
        lines = [f"# {self.options.spelling(option)}: {remedy}\n" for option, remedy in self.remedies.items()]
        return "".join(lines) + write_yaml(self.config)

    def report(self) -> dict[str, dict[str, str]]:
        """Return the three lists by their titles, with options as they were written."""
        lists = {
            "translated": self.translated,
            "no counterpart, harmless": self.harmless,
            "no counterpart, matters": self.remedies,
        }
        return {
            title: {self.options.spelling(option): text for option, text in texts.items()}
            for title, texts in lists.items()
        }


def is_off(value: Any) -> bool:
    """Return whether a value switches a feature off: false, null, nothing, zero, or one part of a division."""
    return (value in (None, False, 0, 1, "", -1) and value is not True) or value in ([], {})


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
