"""Certificates of runs: a changed one, and a run that changed since, are named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.errors import AuditError
from turnwise.recorder.ledger import LEDGER
from turnwise.rollout.audit import AuditReport
from turnwise.trainer.run.certificate import (
    CERTIFICATE,
    certificate_differences,
    certificate_notes,
    certificate_of,
    read_certificate,
    write_certificate,
)

COUNTS = {"sampled tokens": 1200, "logprobs recomputed": 1100, "rows trained": 0}


def report(**changes: int) -> AuditReport:
    return AuditReport(Counter(COUNTS | changes), {"largest difference of a logprob": 1.5e-7})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / LEDGER).write_text("{}\n")
    write_certificate(tmp_path / CERTIFICATE, certificate_of(tmp_path, report(), recompute=True, at_most=4))
    return tmp_path


def test_a_certificate_of_an_unchanged_run_holds(run: Path) -> None:
    certificate = read_certificate(run / CERTIFICATE)
    assert certificate["counts"] == {"sampled tokens": 1200, "logprobs recomputed": 1100}
    assert certificate_differences(certificate, certificate_of(run, report(), recompute=True, at_most=4)) == []
    (note,) = certificate_notes(run)
    assert "1,200 sampled tokens, and 1,100 log-probabilities within 1.5e-07" in note


def test_what_differs_from_a_certificate_is_named(run: Path) -> None:
    certificate = read_certificate(run / CERTIFICATE)
    (run / LEDGER).write_text("{} \n")
    lines = certificate_differences(
        certificate, certificate_of(run, report(**{"sampled tokens": 1199}), recompute=True, at_most=4)
    )
    assert [line.partition(":")[0] for line in lines] == ["counts sampled tokens", f"files {LEDGER}"]
    assert "the certificate has 1200, the run 1199" in lines[0]


def test_a_run_with_contradictions_gets_no_certificate(run: Path) -> None:
    wrong = report()
    wrong.contradictions.append("an id was trained twice")
    with pytest.raises(AuditError, match="gets no certificate: the audit found 1 contradictions"):
        certificate_of(run, wrong, recompute=True, at_most=4)


def test_runs_without_a_certificate_have_no_note(tmp_path: Path) -> None:
    assert certificate_notes(tmp_path) == []


@settings(max_examples=examples(200), deadline=None)
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255), counts=st.dictionaries(st.text(), st.integers(1)))
def test_each_changed_byte_of_a_certificate_is_found(position: int, byte: int, counts: dict[str, int]) -> None:
    with TemporaryDirectory() as folder:
        run, file = Path(folder), Path(folder) / CERTIFICATE
        counts = {name: min(count, 2**60) for name, count in counts.items()}
        write_certificate(file, certificate_of(run, report(**counts), recompute=False, at_most=1))
        certificate, data = read_certificate(file), bytearray(file.read_bytes())
        data[position % len(data)] = byte
        file.write_bytes(data)
        try:
            # White space, or another way to write the same number, is no change.
            assert read_certificate(file) == certificate
        except AuditError:
            assert len(certificate_notes(run)) == 1
