"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Values over those of the file, such as optim.lr=1e-4.", show_default=False
    ),
]
