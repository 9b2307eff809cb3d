"""Audit of a run directory: sampled ids, recorded ids and trained ids are the same.

1. A session's calls in the ledger are, as a multiset of (prompt, completion, logprobs, version spans, finish reason),
   its trajectory's turns: the ids of a branch, concatenated, are what the engine saw.
2. Segments are sound: sampled and context segments alternate; logprobs and spans cover exactly the sampled ids.
3. Over all rows of a trajectory each sampled id is trained exactly once, and no other.
   A gateway that resumes after a kill may name calls as lost before they were committed, and sessions as abandoned.
4. A step trained what the journal gave it; the journal accounts for every finished trajectory.
   Of a session that its user deleted, and episodes of its task, all may be missing: ``deleted.jsonl`` names them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from turnwise.errors import AuditError, FormatError
from turnwise.media_files import MediaSpan, media_spans
from turnwise.recorder.ledger import LEDGER, Ledger, LedgerEntry, Resumption, read_ledgers
from turnwise.rollout.journal.journal import PENDING
from turnwise.rollout.journal.state import JOURNAL, read_journal
from turnwise.rollout.journal.summary import summarize_journal
from turnwise.rollout.records import Batches, BatchRow, read_batches, row_digest
from turnwise.trajectory import Segment, Trajectory, branch_paths, path_media, to_samples
from turnwise.trajectory_file import TRAJECTORIES, read_trajectories
from turnwise.types import Branch, StopReason, TokenIds

BATCHES, DELETED, RUN_FILE = "batches.jsonl", "deleted.jsonl", "run.json"
_TEXT = "text"
_OF_TEXT = "trajectories of text: not audited"


@dataclass(slots=True)
class AuditReport:
    """Result of an audit.

    Attributes:
        counts: Number of checked items by kind.
        figures: Largest differences.
        contradictions: Each contradiction in words; empty for a sound run.
        unchecked: Number of sampled tokens that cannot be recomputed, by the reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)

    @property
    def sound(self) -> bool:
        """Whether there are no contradictions."""
        return not self.contradictions


def audit_files(run: Path) -> AuditReport:
    """Audit a run directory.

    Args:
        run: Holds ``ledger.jsonl``, ``ledgers/`` of rollout workers and ``trajectories.twz``, and
            ``batches.jsonl`` if something was trained.

    Raises:
        AuditError: A file is missing, or all sessions were recorded as text only.
    """
    if (run / TRAJECTORIES).is_file() and not (run / LEDGER).is_file():
        forms = _forms(run)
        if forms.keys() == {_TEXT}:
            raise _nothing_to_audit(run, forms.total())
    for name in (LEDGER, TRAJECTORIES):
        if not (run / name).is_file():
            raise AuditError(f"{run} holds no {name}: this run cannot be audited")
    report = AuditReport()
    try:
        ledger = read_ledgers(run)
        batches = read_batches(run / BATCHES) if (run / BATCHES).is_file() else Batches([], 0, 0, (), False)
        pending = run / PENDING
        waiting = {trajectory.id for trajectory in read_trajectories(pending)} if pending.is_file() else set()
        deleted = {str(event["id"]) for _, event in read_journal(run / DELETED).events}
        audit = _Audit(ledger, batches, report, waiting, deleted)
        audit.check(read_trajectories(run / TRAJECTORIES))
        journal = summarize_journal(run / JOURNAL)
        report.contradictions += journal.misused([(row.trajectory, row.step) for row in batches.rows])
        if (run / JOURNAL).is_file():
            report.counts.update(journal.fates(audit.finished))
            report.contradictions += journal.unreferenced(audit.finished, run / TRAJECTORIES)
        begins = {JOURNAL: journal.begins_after, BATCHES: next((step for _, step in batches.starts), 0)}
        report.contradictions += _missing_records(run, begins)
    except FormatError as error:
        report.contradictions.append(str(error))
    if report.sound and report.counts["trajectories"] and report.counts[_OF_TEXT] == report.counts["trajectories"]:
        raise _nothing_to_audit(run, report.counts[_OF_TEXT])
    return report


def _missing_records(run: Path, begins_after: Mapping[str, int]) -> Iterator[str]:
    """Yield which records of training a run lacks, by the step after which each of its files begins."""
    for name, step in begins_after.items() if (run / RUN_FILE).is_file() else ():
        if not (run / name).is_file():
            yield f"{run / name} is missing: restore it from a copy; what was trained cannot be checked without it"
        elif step:
            yield f"{run / name} begins after step {step}: restore it from a copy; earlier steps cannot be checked"


def _forms(run: Path) -> Counter[str]:
    try:
        return Counter(trajectory.recorded for trajectory in read_trajectories(run / TRAJECTORIES))
    except FormatError:
        return Counter()


def _nothing_to_audit(run: Path, count: int) -> AuditError:
    return AuditError(
        f"{run} holds {count} trajectories, all recorded as text from a hosted endpoint, which returns no token ids: "
        "there is nothing to audit"
    )


class _Audit:
    """One pass over the trajectories, with ledger and batches in memory."""

    def __init__(
        self, ledger: Ledger, batches: Batches, report: AuditReport, pending: Collection[str], deleted: set[str]
    ) -> None:
        self._report = report
        self._pending, self._deleted = pending, deleted
        self._batches = batches
        self._calls: defaultdict[str, list[LedgerEntry]] = defaultdict(list)
        self._closed = ledger.closed_parts
        self._resumptions = ledger.resumptions
        for entry in ledger.entries:
            self._calls[entry.session].append(entry)
        self._lost = self._without_lost()
        self._rows: defaultdict[str, list[BatchRow]] = defaultdict(list)
        for row in batches.rows:
            self._rows[row.trajectory].append(row)
        self.finished: list[str] = []
        report.counts.update({"model calls in the ledger": len(ledger.entries), "train steps": batches.steps})
        sessions = sum("/" not in name for name in deleted)
        report.counts.update({"rows trained": len(batches.rows), "sessions deleted by their users": sessions})
        report.counts["train steps that went back to approved weights"] = batches.rollbacks
        if batches.rolled_back:
            report.counts["train steps undone by a kill"] = batches.rolled_back

    def check(self, trajectories: Iterator[Trajectory]) -> None:
        seen: set[str] = set()
        for trajectory in trajectories:
            counts = self._report.counts
            counts["trajectories"] += 1
            counts["turns"] += sum(segment.sampled for segment in trajectory.segments)
            counts["sampled tokens"] += trajectory.sampled_tokens
            counts["forks"] += sum(trajectory.forks().values())
            if any(trajectory.id in resumption.abandoned for resumption in self._resumptions):
                self._note(trajectory, "was abandoned by a gateway that was started again, and is on disk")
            if trajectory.id in seen:
                self._note(trajectory, "occurs twice in the file")
                continue
            seen.add(trajectory.id)
            completed = trajectory.error is None and trajectory.stop_reason is not StopReason.CANCELLED
            if completed and trajectory.partition == "train" and not trajectory.frozen:
                self.finished.append(trajectory.id)
            if trajectory.recorded == _TEXT:
                counts[_OF_TEXT] += 1
                self._check_text(trajectory)
                continue
            unsound = list(_structure(trajectory.segments)) + list(_events(trajectory))
            unsound += _branches(trajectory) if trajectory.branches else ()
            unsound += _search(trajectory)
            for text in unsound:
                self._note(trajectory, text)
            if not unsound:
                self._against_ledger(trajectory)
                self._against_batches(trajectory)
        self._check_missing(seen)

    def _note(self, trajectory: Trajectory, text: str) -> None:
        self._report.contradictions.append(f"trajectory {trajectory.id}: {text}")

    def _check_text(self, trajectory: Trajectory) -> None:
        if any(len(segment.token_ids) for segment in trajectory.segments):
            self._note(trajectory, "was recorded as text, but holds ids")
        for what, by_session in (
            ("calls of it in the ledger", self._calls),
            ("rows of it that were trained", self._rows),
        ):
            if trajectory.id in by_session:
                self._note(trajectory, f"was recorded as text, but there are {what}")

    # Against the ledger

    def _against_ledger(self, trajectory: Trajectory) -> None:
        calls = [call for call in self._calls.get(trajectory.id, ()) if call.finish_reason in ("stop", "length")]
        self._report.counts["calls that ended without a completion"] += len(self._calls.get(trajectory.id, ())) - len(
            calls
        )
        waiting: defaultdict[bytes, list[LedgerEntry]] = defaultdict(list)
        for call in calls:
            waiting[_call_key(call)].append(call)
        strange: list[tuple[Segment, _Prompt]] = []
        for segment in trajectory.segments:
            if segment.sampled:
                prompt = _Prompt.of(trajectory.path(segment.parent))
                equal = waiting.get(_turn_key(segment, prompt))
                if equal:
                    equal.pop()
                    self._report.counts["turns equal to a call"] += 1
                else:
                    strange.append((segment, prompt))
        unmatched = [call for call in calls if any(call is other for other in waiting[_call_key(call)])]
        for segment, prompt in strange:
            where = f"segment {segment.index} (turn {segment.turn_id})"
            if unmatched:
                self._note(
                    trajectory,
                    f"{where}: {_difference(segment, prompt, unmatched.pop(_best_match(segment, prompt, unmatched)))}",
                )
            elif _turn_key(segment, prompt) in self._lost.get(trajectory.id, ()):
                self._note(trajectory, f"{where}: the ledger names its call as lost before it was committed")
            else:
                self._note(trajectory, f"{where}: no call in the ledger sampled it")
        if trajectory.error is not None and unmatched and unmatched[-1] is calls[-1]:
            # The session refused a completion that broke the client's contract, and the episode ended there.
            unmatched.pop()
            self._report.counts["completions that a session refused"] += 1
        for call in unmatched:
            self._note(
                trajectory,
                f"a call of the ledger is in no segment: prompt of {len(call.prompt_ids)} ids, "
                f"completion of {len(call.completion_ids)} ids beginning {call.completion_ids[:8].tolist()}",
            )

    def _without_lost(self) -> dict[str, set[bytes]]:
        """Take the calls that a kill lost out of the ledger's; return them by session. Unexplained ones stay."""
        lost: defaultdict[str, set[bytes]] = defaultdict(set)
        for resumption in self._resumptions:
            for session, offsets in resumption.lost.items():
                if session in self._deleted:
                    continue
                calls = self._calls.get(session, [])
                for at in offsets:
                    why = _unexplained(resumption, at, offsets, calls, self._closed)
                    if why is not None:
                        problem = f"session {session}: the ledger names its call at byte {at} as lost, {why}"
                        self._report.contradictions.append(problem)
                        continue
                    call = next(call for call in calls if call.at == at)
                    lost[session].add(_call_key(call))
                    self._report.counts["calls that a kill lost before they were committed"] += 1
                    # By place: a call that was repeated is equal to it.
                    self._calls[session] = calls = [call for call in calls if call.at != at]
        return lost

    # Against what was trained

    def _against_batches(self, trajectory: Trajectory) -> None:
        rows = self._rows.get(trajectory.id, ())
        if not rows:
            return
        self._report.counts["trajectories trained"] += 1
        if trajectory.error is not None:
            self._note(
                trajectory, f"was trained (step {rows[0].step}) although it ended in an error: {trajectory.error}"
            )
        if trajectory.frozen:
            self._note(
                trajectory, f"was trained (step {rows[0].step}) although its policy {trajectory.policy!r} is frozen"
            )
        policies = sorted({row.policy for row in rows if row.policy != trajectory.policy})
        if policies:
            self._note(
                trajectory,
                f"was trained (step {rows[0].step}) by the policy {policies[0]!r}, but {trajectory.policy!r} sampled "
                "it",
            )
        if trajectory.baseline:
            self._note(trajectory, f"was trained (step {rows[0].step}) although it is a greedy baseline")
        if trajectory.partition != "train":
            self._note(
                trajectory, f"was trained (step {rows[0].step}) although its partition is {trajectory.partition}"
            )
        by_pass: defaultdict[tuple[int, int], list[BatchRow]] = defaultdict(list)
        for row in rows:
            by_pass[row.step, row.epoch].append(row)
        expected = {
            sample.leaf: sample for sample in to_samples(trajectory, max_tokens=rows[0].max_tokens, reported=True).rows
        }
        for (step, epoch), members in by_pass.items():
            for row in members:
                sample = expected.get(row.leaf)
                if sample is None or row.digest != row_digest(sample):
                    self._note(
                        trajectory, f"step {step}: the row of leaf {row.leaf} that was trained is not what is on disk"
                    )
            self._check_coverage(trajectory, f"step {step}" if epoch == 0 else f"step {step}, pass {epoch}", members)

    def _check_coverage(self, trajectory: Trajectory, when: str, rows: Sequence[BatchRow]) -> None:
        """Count how often each id was trained: sampled ids once, others never."""
        trained = [np.zeros(len(segment.token_ids), np.int32) for segment in trajectory.segments]
        reachable = [np.zeros(len(segment.token_ids), np.bool_) for segment in trajectory.segments]
        for row in rows:
            if not 0 <= row.leaf < len(trajectory.segments):
                self._note(trajectory, f"{when}: a row names leaf {row.leaf}, which is no segment")
                continue
            path = trajectory.path(row.leaf)
            total = sum(len(segment.token_ids) for segment in path)
            length = total if row.max_tokens is None else min(total, row.max_tokens)
            if row.tokens != length:
                self._note(trajectory, f"{when}: the row of leaf {row.leaf} has {row.tokens} ids, its branch {length}")
                continue
            mask = np.zeros(total, np.int32)
            for start, end in row.spans:
                mask[start:end] += 1
            start = 0
            for segment in path:
                end = start + len(segment.token_ids)
                trained[segment.index] += mask[start:end]
                reachable[segment.index] |= np.arange(start, end) < length
                start = end
        for segment in trajectory.segments:
            in_reach = reachable[segment.index] if rows[0].max_tokens is not None else np.True_
            expected = (in_reach & segment.trained).astype(np.int32)
            wrong = np.flatnonzero(trained[segment.index] != expected)
            self._report.counts["ids trained once"] += int((trained[segment.index] == 1).sum())
            self._report.counts["sampled ids that an agent left out"] += int(segment.sampled) * int(
                (~segment.trained).sum()
            )
            if len(wrong):
                position = int(wrong[0])
                times = int(trained[segment.index][position])
                self._note(
                    trajectory,
                    f"{when}: id {position} of segment {segment.index} ({segment.kind}) was trained {times} times"
                    f"{'' if len(wrong) == 1 else f', as were others: {len(wrong)} in this segment'}",
                )

    def _check_missing(self, seen: set[str]) -> None:
        report = self._report
        abandoned = {session for resumption in self._resumptions for session in resumption.abandoned}
        resumed = {session for resumption in self._resumptions for session in resumption.lost}
        report.counts["sessions that a gateway could not rebuild after a kill"] += len(abandoned)
        for session in sorted((self._calls.keys() | resumed) - seen - abandoned - self._deleted):
            calls = self._calls.get(session, [])
            if session in self._pending:
                report.counts["sessions whose group reward is still to come"] += 1
                continue
            resumed_in = [resumption.part for resumption in self._resumptions if session in resumption.lost]
            last_part = max([call.part for call in calls[-1:]] + resumed_in)
            if last_part in self._closed:
                report.contradictions.append(f"session {session}: {len(calls)} calls in the ledger, but no trajectory")
            elif any(resumption.part > last_part for resumption in self._resumptions):
                problem = "its process was killed, and the next one neither resumed nor abandoned it"
                report.contradictions.append(f"session {session}: {problem}")
            else:
                report.counts["sessions that a kill cut off"] += 1
        for name, rows in self._rows.items():
            if name not in seen and name not in self._deleted:
                report.contradictions.append(f"trajectory {name}: trained in step {rows[0].step}, but not on disk")


def _structure(segments: Sequence[Segment]) -> Iterator[str]:
    turns: set[str] = set()
    parents: set[int] = set()
    for position, segment in enumerate(segments):
        where = f"segment {position}"
        if segment.index != position or not -1 <= segment.parent < position:
            yield f"{where} has index {segment.index} and parent {segment.parent}"
            return
        above = None if segment.parent < 0 else segments[segment.parent]
        if segment.kind not in ("context", "sampled"):
            yield f"{where} is of kind {segment.kind!r}"
        elif segment.sampled and (above is None or above.sampled):
            yield f"{where} was sampled, but no context stands before it"
        elif not segment.sampled and above is not None and not above.sampled:
            yield f"{where} is context after context"
        if (segment.fork is not None) != (segment.parent in parents):
            yield f"{where} is {'no' if segment.fork else 'a'} fork, but its fork reason is {segment.fork!r}"
        parents.add(segment.parent)
        yield from _sampled_parts(segment, where)
        if segment.turn_id is not None:
            if segment.turn_id in turns:
                yield f"{where} is the second one with turn {segment.turn_id}"
            turns.add(segment.turn_id)


def _sampled_parts(segment: Segment, where: str) -> Iterator[str]:
    # A turn may be empty: its server stopped at once.
    if not (segment.sampled or len(segment.token_ids)) or bool((segment.token_ids < 0).any()):
        yield f"{where} holds no ids, or a negative one"
    for span in segment.media:
        if segment.sampled or span.length < 1 or span.position < 0 or span.end > len(segment.token_ids):
            yield f"{where} has an image at {span.position} to {span.end}, outside of its {len(segment.token_ids)} ids"
    if not segment.sampled:
        if segment.logprobs is not None or segment.weight_versions or segment.turn_id is not None or segment.left_out:
            yield f"{where} is context, but carries what only sampled segments have"
        return
    if segment.turn_id is None or segment.finish_reason is None:
        yield f"{where} was sampled, but has no turn id or no finish reason"
    if segment.logprobs is None or len(segment.logprobs) != len(segment.token_ids):
        size = None if segment.logprobs is None else len(segment.logprobs)
        yield f"{where} has {len(segment.token_ids)} ids and {size} logprobs"
    elif not np.isfinite(segment.logprobs).all():
        yield f"{where} has a logprob that is not finite"
    if any(not 0 <= start < end <= len(segment.token_ids) for start, end in segment.left_out or ()):
        yield f"{where} leaves {segment.left_out} out of its {len(segment.token_ids)} ids"
    covered = 0
    for _, start, end in segment.weight_versions:
        if start != covered or end <= start:
            break
        covered = end
    if covered != len(segment.token_ids):
        yield f"{where}: weight version spans {segment.weight_versions} do not cover its {len(segment.token_ids)} ids"


def _events(trajectory: Trajectory) -> Iterator[str]:
    turns = {segment.turn_id for segment in trajectory.segments if segment.sampled}
    for turn, name, value in trajectory.rewards:
        if turn is not None and turn not in turns:
            yield f"reward {name!r} ({value}) is noted on turn {turn}, which does not exist"


def _branches(trajectory: Trajectory) -> Iterator[str]:
    """Check that each trained turn is of one branch, and that a branch samples again the turn that it names."""
    sampled = {segment.turn_id: segment for segment in trajectory.segments if segment.sampled}
    owners = Counter(turn for branch in trajectory.branches for turn in branch.turns)
    try:
        paths = branch_paths(trajectory.branches)
    except FormatError as error:
        yield str(error)
        return
    for turn, count in owners.items():
        if turn not in sampled or count > 1:
            yield f"turn {turn} is in {count} branches" if turn in sampled else f"a branch names turn {turn}, not there"
    for name, segment in sampled.items():
        if name not in owners and segment.trained.any():
            yield f"turn {name} is trained, but in no branch"
    for number, branch in enumerate(trajectory.branches):
        if branch.again is None:
            continue
        sibling = sampled.get(branch.again)
        # Not its first one: where parts of an agent act at the same time, another's may have been sampled sooner.
        begins = {sampled[turn].parent for turn in branch.turns if turn in sampled}
        if branch.again not in paths[branch.parent] or sibling is None:
            yield f"branch {number} samples turn {branch.again} again, which its parent does not have"
        elif begins and sibling.parent not in begins:
            yield f"branch {number} does not begin where turn {branch.again}, which it samples again, does"


def _search(trajectory: Trajectory) -> Iterator[str]:
    """Check that a search chose the branch with the highest score."""
    search, branches = trajectory.search, trajectory.branches or [Branch()]
    if search is None:
        return
    if not 0 <= search.chosen < len(branches) or len(search.scores) != len(branches):
        yield f"its search chose branch {search.chosen} of {len(search.scores)}, but it has {len(branches)}"
        return
    score, best = search.scores[search.chosen], max(search.scores)
    if score < best:
        yield f"its search chose branch {search.chosen}, whose score is {score}, although another has {best}"


def _unexplained(
    resumption: Resumption, at: int, lost: Collection[int], calls: Sequence[LedgerEntry], closed: Collection[int]
) -> str | None:
    """Return what is wrong with a lost call: only what a killed process sampled last may be lost."""
    call = next((entry for entry in calls if entry.at == at), None)
    if call is None:
        return "where it has none"
    if call.part >= resumption.part:
        return "before its process had ended"
    if call.part in closed:
        return "but its process ended in order"
    later = [entry.at for entry in calls if entry.part == call.part and entry.at > at]
    return None if set(later) <= set(lost) else "but a later call of the same process was committed"


class _Prompt(NamedTuple):
    """What a model saw: ids and images."""

    token_ids: TokenIds
    media: tuple[MediaSpan, ...]

    @classmethod
    def of(cls, path: Sequence[Segment]) -> _Prompt:
        return cls(np.concatenate([segment.token_ids for segment in path]), tuple(media_spans(path_media(path))))


def _call_key(call: LedgerEntry) -> bytes:
    prompt = _Prompt(call.prompt_ids, call.media)
    return _key(prompt, call.completion_ids, call.logprobs, call.weight_versions, call.finish_reason)


def _turn_key(segment: Segment, prompt: _Prompt) -> bytes:
    return _key(prompt, segment.token_ids, segment.logprobs, segment.weight_versions, segment.finish_reason)


def _key(prompt: _Prompt, completion: TokenIds, logprobs: object, versions: object, finish: object) -> bytes:
    images = "".join(" ".join(map(str, span)) + ";" for span in prompt.media)
    sizes = f"{len(prompt.token_ids)} {len(completion)} {versions} {finish} {images} ".encode()
    return sizes + prompt.token_ids.tobytes() + completion.tobytes() + np.asarray(logprobs, np.float32).tobytes()


def _best_match(segment: Segment, prompt: _Prompt, calls: Sequence[LedgerEntry]) -> int:
    """Return the index of the best matching call: equal prompt or completion first, then order."""
    for number, call in enumerate(calls):
        if np.array_equal(call.prompt_ids, prompt.token_ids) or np.array_equal(call.completion_ids, segment.token_ids):
            return number
    return 0


def _difference(segment: Segment, prompt: _Prompt, call: LedgerEntry) -> str:
    for name, recorded, theirs in (
        ("the prompt", prompt.token_ids, call.prompt_ids),
        ("the completion", segment.token_ids, call.completion_ids),
        ("the logprobs", segment.logprobs, call.logprobs),
    ):
        if recorded is None or len(recorded) != len(theirs):
            size = None if recorded is None else len(recorded)
            return f"{name} has length {size} in the trajectory and {len(theirs)} in the ledger"
        wrong = np.flatnonzero(recorded != theirs)
        if len(wrong):
            at = int(wrong[0])
            return f"{name} differs at {at}: {recorded[at]} in the trajectory, {theirs[at]} in the ledger"
    if prompt.media != call.media:
        recorded_media, logged = (
            ", ".join(f"{span.digest[:12]} at {span.position}" for span in media) or "none"
            for media in (prompt.media, call.media)
        )
        return f"the images are {recorded_media} in the trajectory, {logged} in the ledger"
    if segment.weight_versions != call.weight_versions:
        return f"weight versions are {segment.weight_versions} in the trajectory, {call.weight_versions} in the ledger"
    return f"finish reason is {segment.finish_reason} in the trajectory, {call.finish_reason} in the ledger"
