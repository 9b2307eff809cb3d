"""From a run's directory to findings in the order of causes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from turnwise.ext.explain import episode_rules, reward_rules, setup_rules, update_rules
from turnwise.ext.explain.evidence import RunEvidence
from turnwise.ext.explain.findings import KINDS, Finding, in_order

RULES: Final = (*setup_rules.RULES, *reward_rules.RULES, *episode_rules.RULES, *update_rules.RULES)
"""All rules; of equal findings that of an earlier rule comes first."""
_CAUSES_OF_GAPS: Final = {"temperature", "stale"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What holds a run back, the first cause first.

    Attributes:
        run: Its directory.
        steps: Number of its train steps.
        trajectories: Number of its trajectories that were read.
        findings: In the order of causes.
        unread: What could not be looked at, and why.
    """

    run: str
    steps: int
    trajectories: int
    findings: tuple[Finding, ...]
    unread: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return {**asdict(self), "findings": [finding.to_json() for finding in self.findings]}


def explain_run(run: Path) -> Explanation:
    """Say what holds a training run back, from what it recorded; a run in progress is read as it stands.

    Args:
        run: Directory of a training run.

    Raises:
        FormatError: It is no training run, or a file of it is damaged.
        ConfigError: It has too few train steps; the message says how many it needs.
    """
    evidence = RunEvidence.read(run)
    findings = [finding.of_policy(evidence.policy) for rule in RULES for finding in rule(evidence)]
    if _CAUSES_OF_GAPS & {finding.name for finding in findings}:
        findings = [finding for finding in findings if finding.name != "gap"]
    return Explanation(
        str(run), len(evidence.curves.steps), len(evidence.members), in_order(findings), tuple(evidence.unread)
    )


_STYLES: Final = {"problem": ("✗", "red"), "warning": ("!", "yellow"), "note": ("·", "cyan")}


def show_explanation(explanation: Explanation, console: Console, number: int | None = None) -> None:
    """Print findings, the first ``number`` of them."""
    lines = [Text(f"{explanation.run}: {explanation.steps} steps, {explanation.trajectories:,} trajectories")]
    if not explanation.findings:
        lines.append(Text("nothing that it recorded holds it back"))
    for finding in explanation.findings[:number]:
        level = finding.level.name.lower()
        mark, style = _STYLES[level]
        share = f" ({finding.share:.0%} of the signal)" if finding.share else ""
        lines += [Text(), Text.assemble((f"{mark} {level} {finding.name}: ", f"bold {style}"), finding.text, share)]
        lines += [Text(f"    {line}") for line in finding.evidence]
        remedy, keys = KINDS[finding.name].remedy, ", ".join(finding.keys)
        lines.append(Text.assemble(("    change: ", "bold"), remedy, f" ({keys})" if keys else ""))
    lines += [Text(f"not looked at: {reason}", style="dim") for reason in explanation.unread]
    for line in lines:
        console.print(line, soft_wrap=True)
