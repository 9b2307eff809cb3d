"""Certificates: what an audit proved of a run, in a JSON file whose hash covers all of it.

::

    {"schema_version": 1, "recompute": true, "at_most": 256, "files": {"ledger.jsonl": "3f...", ...},
     "weights": {"step_000001/model.safetensors": "9a...", ...}, "counts": {...}, "unchecked": {...}, "figures": {...},
     "bounds": {...}, "sha256": "c0..."}

The hash finds a change and no forgery: whoever doubts a certificate verifies the run again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from turnwise.append_file import replace_file
from turnwise.errors import AuditError, shown
from turnwise.recorder.ledger import LEDGER
from turnwise.rollout.audit import BATCHES, AuditReport
from turnwise.rollout.journal.state import JOURNAL
from turnwise.trainer.manifest import digest_input
from turnwise.trainer.run.audit import BOUNDS, CHECKPOINTS, CONFIG, audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore, weight_digests
from turnwise.trajectory_file import TRAJECTORIES

CERTIFICATE = "certificate.json"
"""Where the report looks for the certificate of a run, in its directory."""
SCHEMA_VERSION = 1


def audit_certified(
    run: Path, *, recompute: bool, at_most: int, certificate: Path | None = None, check: Path | None = None
) -> list[str]:
    """Audit a run, print the findings, and return what differs from a certificate that is verified again.

    Args:
        run: Its directory.
        recompute: Whether log-probabilities are recomputed; with ``check`` as the certificate says.
        at_most: Turns to recompute per weight version; likewise.
        certificate: Where to write the certificate of the run as it is now.
        check: The certificate to verify.

    Raises:
        AuditError: The run lacks required files or has contradictions; or ``check`` is no certificate, or was changed.
        CheckpointError: A checkpoint is incomplete.
    """
    stated = None if check is None else read_certificate(check)
    if stated is not None:
        recompute, at_most = stated["recompute"], stated["at_most"]
    report = audit_run(run, recompute=recompute, at_most=at_most)
    present = certificate_of(run, report, recompute=recompute, at_most=at_most)
    if certificate is not None:
        write_certificate(certificate, present)
    return [] if stated is None else certificate_differences(stated, present)


def certificate_of(run: Path, report: AuditReport, *, recompute: bool, at_most: int) -> dict[str, Any]:
    """Return the certificate of a run.

    Args:
        run: Its directory.
        report: What the audit of it found.
        recompute: Whether log-probabilities were recomputed.
        at_most: Turns per weight version that were.

    Raises:
        AuditError: The audit found contradictions.
        CheckpointError: A checkpoint is incomplete.
    """
    if not report.sound:
        raise AuditError(f"{run} gets no certificate: the audit found {len(report.contradictions)} contradictions")
    files = [run / name for name in (CONFIG, LEDGER, "ledgers", TRAJECTORIES, BATCHES, JOURNAL)]
    store = CheckpointStore(run / CHECKPOINTS)
    saved = [(store.path(step).name, names) for step, names in weight_digests(store).items()]
    content = {
        "schema_version": SCHEMA_VERSION,
        "recompute": recompute,
        "at_most": at_most,
        "files": {file.name: digest_input(file) for file in files if file.exists()},
        "weights": {f"{folder}/{name}": digest for folder, names in saved for name, digest in names.items()},
        "counts": dict(+report.counts),
        "unchecked": dict(+report.unchecked),
        "figures": report.figures,
        "bounds": BOUNDS,
    }
    return {**content, "sha256": _digest(content)}


def write_certificate(file: Path, certificate: dict[str, Any]) -> None:
    """Write a certificate. Raises AuditError where it cannot be written."""
    try:
        replace_file(file, orjson.dumps(certificate, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise AuditError(f"the certificate {file} cannot be written: {error}") from error


def read_certificate(file: Path) -> dict[str, Any]:
    """Read a certificate. Raises AuditError where there is none, or it was changed since it was written."""
    try:
        certificate = orjson.loads(file.read_bytes())
        content = {name: value for name, value in certificate.items() if name != "sha256"}
        version, digest = certificate["schema_version"], certificate["sha256"]
    except (OSError, orjson.JSONDecodeError, AttributeError, KeyError) as error:
        raise AuditError(f"{file} cannot be read as a certificate (turnwise audit --certificate): {error!r}") from error
    if _digest(content) != digest:
        raise AuditError(f"{file} was changed after it was written: its sha256 is not that of its content")
    if version != SCHEMA_VERSION:
        raise AuditError(f"{file} has schema version {version}; this version reads {SCHEMA_VERSION}")
    return {**content, "sha256": digest}


def certificate_differences(certificate: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return what a certificate states otherwise than one of the run as it is now, in words."""
    old, new = _flat(certificate), _flat(present)
    return [
        f"{name}: the certificate has {shown(old.get(name))}, the run {shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name != "sha256"
    ]


def certificate_notes(run: Path) -> list[str]:
    """Return in words what the certificate in a run's directory states; empty where it has none."""
    file = run / CERTIFICATE
    if not file.is_file():
        return []
    try:
        certificate = read_certificate(file)
    except AuditError as error:
        return [str(error)]
    counts = certificate["counts"]
    return [
        f"{file.name} proves {counts.get('sampled tokens', 0):,} sampled tokens, and "
        f"{counts.get('logprobs recomputed', 0):,} log-probabilities within "
        f"{certificate['figures'].get('largest difference of a logprob', 0.0):.2g} "
        f"(sha256 {certificate['sha256'][:12]}; turnwise audit --check verifies it)"
    ]


def _flat(certificate: dict[str, Any]) -> dict[str, Any]:
    """Return what a certificate states by one name."""
    parts = {name: value for name, value in certificate.items() if isinstance(value, dict)}
    flat = {f"{part} {name}": value for part, values in parts.items() for name, value in values.items()}
    return flat | {name: value for name, value in certificate.items() if name not in parts}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()
