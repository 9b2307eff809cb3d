"""A hook that notes ends of runs in a file. Named ``support.ended_hooks:Ended`` in configurations."""

from __future__ import annotations

import turnwise


class Ended(turnwise.Hooks):
    """Adds a line to ``ended.txt`` beside the run's directory: after which step, and by what."""

    def on_train_end(self):
        with (self.config.runs / "ended.txt").open("a") as file:
            file.write(f"{self.global_steps} {type(self.error).__name__}\n")
