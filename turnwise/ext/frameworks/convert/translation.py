"""A configuration in the making, and what became of each option of the other trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from turnwise.config import write_yaml
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

    def move(self, option: str, key: str, convert: Callable[[Any], Any] | None = None, default: Any = UNSET) -> None:
        """Set a key to the value of one option, or to the other trainer's default where that differs from ours.

        Args:
            option: The option.
            key: The key here.
            convert: From a value there to one here.
            default: The default there; without one an absent option sets nothing.
        """
        value = self.options.read(option, default)
        if value is UNSET or value is None:
            return
        self.set(key, value if convert is None else convert(value), option)

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
