"""Rules about rewards: their sign, answers that a scorer does not read, hacks, and groups without signal."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from turnwise.envs.rewards.matching import extract_answer, last_number, normalize, parse_number
from turnwise.ext.explain.evidence import RunEvidence
from turnwise.ext.explain.findings import Finding, Level, bound, level_of, listed, percent
from turnwise.ext.explain.members import Member

_ANSWER_KEYS: Final = ("answer", "answers", "target", "expected", "solution", "ground_truth", "gold", "label")
_FORMS: Final = ("text", "last_line", "boxed", "hash", "tag:answer", r"regex:(?:is|=|:)\s*([^\n=:]+?)[.!]?\s*$")
_MOST_ANSWER: Final = 100
_SHOWN: Final = 60
_MOST_READ: Final = 2000


def find_sign(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield rewards that pay the members of a group that behave worse."""
    inverted = compared = 0
    example = ""
    for members in evidence.groups.values():
        for pair in combinations(members, 2):
            low, high = sorted(pair, key=lambda member: member.reward)
            if low.reward == high.reward or low.is_flawed == high.is_flawed:
                continue
            compared += 1
            if high.is_flawed:
                inverted += 1
                example = (
                    f"task {high.task}: {high.id} earned {high.reward:g} with {high.errors} errors"
                    f"{f' and the limit {high.cut}' if high.cut else ''}, {low.id} earned {low.reward:g} without"
                )
    if compared >= bound("least_count") and inverted >= bound("inverted_pairs") * compared:
        yield Finding.of(
            "reward_sign",
            Level.PROBLEM,
            1.0,
            "the reward pays what goes wrong: its sign looks turned",
            f"of {compared} pairs in a group of which one member had errors, refused calls, no answer or a limit, in "
            f"{percent(inverted / compared)} that one earned more",
            "rewards are from {:g} to {:g}".format(*evidence.reward_range),
            example,
        )


def find_unread_answers(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield right answers that earn no more than wrong ones."""
    lowest, highest = evidence.reward_range
    middle = (lowest + max(highest, evidence.success_reward)) / 2
    answered = [member for member in evidence.members if member.answer and not member.cut]
    answered = answered[:: 1 + len(answered) // _MOST_READ]
    if sum(member.reward < middle for member in answered) < bound("least_count"):
        return
    of_task = _matches_task(evidence)
    for label, is_right in (
        ("the right answer of their task", of_task),
        ("an answer that was paid in their group, written otherwise", _matches_group(evidence, middle)),
    ):
        right = [member for member in answered if is_right(member)]
        unread = [member for member in right if member.reward < middle]
        if len(unread) < bound("least_count") or len(unread) < bound("unread_answers") * len(right):
            continue
        wrong = [member.reward for member in answered if not is_right(member)]
        is_inverted = (
            is_right is of_task
            and bool(wrong)
            and statistics.fmean(member.reward for member in right) < statistics.fmean(wrong)
        )
        what = "is turned: wrong answers earn more than right ones" if is_inverted else "misses right answers"
        is_most = is_inverted or len(unread) > bound("problem_share") * len(right)
        different_tasks = {member.task: member for member in unread}.values()
        yield Finding.of(
            "reward_sign" if is_inverted else "unread_answers",
            Level.PROBLEM if is_most else Level.WARNING,
            sum(member.tokens for member in unread) / sum(member.tokens for member in answered),
            f"the reward {what}: {len(unread)} of {len(right)} final messages that hold {label} are not paid",
            *(
                f"task {member.task}: {member.answer[-_SHOWN:]!r} earned {member.reward:g} ({member.id})"
                for member in [*different_tasks][:3]
            ),
        )
        return


def _matches_task(evidence: RunEvidence) -> Callable[[Member], bool]:
    return lambda member: _is_answer(member.answer, evidence.task_data.get(member.task, {}))


def _is_answer(text: str, data: Mapping[str, Any]) -> bool:
    values = next((data[key] for key in _ANSWER_KEYS if data.get(key) is not None), ())
    for value in values if isinstance(values, list | tuple) else (values,):
        expected = str(value).rpartition("####")[2].strip()
        if not expected or len(expected) > _MOST_ANSWER:
            continue
        number, words = parse_number(expected), normalize(expected, "words")
        answers = filter(None, (extract_answer(text, form) for form in _FORMS))
        if (number is not None and number == last_number(text)) or any(
            normalize(answer, "words") == words for answer in answers
        ):
            return True
    return False


def _matches_group(evidence: RunEvidence, middle: float) -> Callable[[Member], bool]:
    """Return whether a member's answer is one that earned a success in its group, up to case and punctuation."""
    paid: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for member in evidence.members:
        if member.reward >= max(middle, evidence.success_reward) and member.answer:
            paid[member.group, member.calls].add(member.answer)

    def is_right(member: Member) -> bool:
        answers = paid.get((member.group, member.calls), set())
        words = {normalize(answer, "words") for answer in answers}
        return member.answer not in answers and normalize(member.answer, "words") in words

    return is_right


def find_hack(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield a reward that rises while what is rewarded loses its shape."""
    curves = evidence.curves
    lowest, highest = evidence.reward_range
    early = [member for member in evidence.early if member.reward >= (lowest + highest) / 2]
    late = [member for member in evidence.late if member.reward >= (lowest + highest) / 2]
    if highest == lowest or len(late) < bound("least_count"):
        return
    rise = (curves.late("reward/mean") or 0.0) - (curves.early("reward/mean") or 0.0)
    rises = rise > bound("reward_rise") * (highest - lowest)
    signs = _shape_changes(early, late)
    answer, coverage = _common_answer(late)
    shares = [
        sum(_key(member) == _key(answer) for member in part) / len(part) for part in (evidence.early, evidence.late)
    ]
    is_one_answer = coverage >= bound("one_answer")
    if is_one_answer:
        signs.append(
            f"{answer.answer[:_SHOWN]!r} is rewarded on {percent(coverage)} of the tasks: {percent(shares[0])} of all "
            f"episodes at first, {percent(shares[1])} at last"
        )
    evaluations = evidence.evaluations or [0.0]
    is_worse = rises and evaluations[0] - evaluations[-1] > bound("reward_rise")
    if is_worse:
        signs.append(f"success in evaluations fell from {evaluations[0]:.2f} to {evaluations[-1]:.2f}")
    spreads = is_one_answer and rises and shares[1] - shares[0] > bound("reward_rise")
    is_constant = is_one_answer and min(shares) > bound("always_fails")
    if signs and (rises or is_constant):
        is_hack = spreads or is_worse or len(signs) > 1
        yield Finding.of(
            "reward_hack",
            Level.PROBLEM if is_hack else Level.WARNING if is_constant else Level.NOTE,
            sum(member.tokens for member in late) / sum(member.tokens for member in evidence.late),
            "the reward is earned another way than the tasks mean"
            if is_hack
            else "rewarded answers changed their shape, or are all the same: read some",
            f"{curves.trend('reward/mean')}; half of it by step {_onset(evidence)}",
            *signs,
            f"a rewarded episode of the end: {late[-1].id}",
        )


def _key(member: Member) -> Any:
    """Return what equal episodes share: the answer up to case and punctuation; all ids where tools were called."""
    return member.digest if member.calls else normalize(member.answer, "words")


def _common_answer(members: Sequence[Member]) -> tuple[Member, float]:
    """Return one of the episodes that most tasks are rewarded for, and its share of the tasks; 0 of a few tasks."""
    tasks: defaultdict[Any, set[str]] = defaultdict(set)
    for member in members:
        tasks[_key(member)].add(member.task)
    common = max(members, key=lambda member: len(tasks[_key(member)]) if member.answer else 0)
    total = len({member.task for member in members})
    is_many = total >= bound("least_count") / 3 and bool(common.answer)
    return common, len(tasks[_key(common)]) / total if is_many else 0.0


def _shape_changes(early: Sequence[Member], late: Sequence[Member]) -> list[str]:
    """Return how rewarded episodes changed their shape, beyond what learning does."""
    if len(early) < bound("least_count"):
        return []
    changes = []
    lengths = [statistics.fmean(member.answer_tokens for member in members) for members in (early, late)]
    if lengths[1] > bound("shape_change") * lengths[0]:
        changes.append(f"rewarded final messages grew from {lengths[0]:.0f} to {lengths[1]:.0f} tokens")
    calls = [statistics.fmean(member.calls for member in members) for members in (early, late)]
    if calls[0] >= 1 and calls[1] * bound("shape_change") < calls[0]:
        changes.append(f"rewarded episodes call tools {calls[1]:.1f} times, {calls[0]:.1f} at first")
    variety = [len({member.digest for member in members}) / len(members) for members in (early, late)]
    if variety[1] * 2 * bound("shape_change") < variety[0]:
        changes.append(f"{percent(variety[1])} of rewarded episodes are different ones, {percent(variety[0])} at first")
    return changes


def _onset(evidence: RunEvidence) -> int:
    """Return the first step whose reward is nearer to the last third's than to the paid_early's."""
    early, late = evidence.curves.early("reward/mean") or 0.0, evidence.curves.late("reward/mean") or 0.0
    rewards = evidence.curves.at("reward/mean")
    return next((step for step, reward in rewards.items() if abs(reward - late) < abs(reward - early)), 0)


_DEAD: Final = {
    "all_solved": "every member solved its task",
    "never_rewarded": "no member was ever rewarded: the tasks are too hard for this model",
    "equal_rewards": "all members earned the same",
}


def find_dead_groups(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield groups whose members all earned the same: solved, unsolved, or paid alike."""
    by_kind: dict[str, list[Sequence[Member]]] = {name: [] for name in _DEAD}
    for members in evidence.groups.values():
        if len({member.reward for member in members}) == 1:
            by_kind[_kind_of(members[0].reward, evidence)].append(members)
    for name, groups in by_kind.items():
        share = sum(member.tokens for members in groups for member in members) / evidence.tokens
        if len(groups) < bound("least_count") / 3 or share < bound("warning_share") / 2:
            continue
        is_harmless = bool(evidence.setting("replay.filter_groups")) or not evidence.compares_groups
        is_harmless = is_harmless or (name == "all_solved" and _was_learned(evidence))
        tasks = [task for task, _ in Counter(members[0].task for members in groups).most_common()]
        rewards = Counter(members[0].reward for members in groups).most_common(3)
        yield Finding.of(
            name,
            Level.NOTE if is_harmless else level_of(share),
            share,
            f"{percent(share)} of the sampled tokens are in groups without signal: {_DEAD[name]}",
            f"{len(groups)} of {len(evidence.groups)} groups, of {len(tasks)} tasks: {listed(tasks)}",
            f"their rewards: {', '.join(f'{reward:g} ({count} groups)' for reward, count in rewards)}",
        )


def _kind_of(reward: float, evidence: RunEvidence) -> str:
    """Return what a group is whose members all have a reward."""
    lowest, highest = evidence.reward_range
    if reward >= evidence.success_reward or (reward == highest > max(0.0, lowest)):
        return "all_solved"
    return "never_rewarded" if reward <= lowest and (reward <= 0 or lowest < highest) else "equal_rewards"


def _was_learned(evidence: RunEvidence) -> bool:
    """Whether the tasks were not solved at first."""
    low, high = evidence.reward_range
    early = evidence.curves.early("reward/mean")
    return early is not None and high - early > bound("reward_rise") * (high - low)


RULES = (find_sign, find_unread_answers, find_hack, find_dead_groups)
