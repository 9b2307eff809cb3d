"""Rows that share prefixes, computed once, against the plain Hugging Face forward of each row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.losses import LossSums
from turnwise.trainer.batch import packing as prefix_tree
from turnwise.trainer.batch.packing import PrefixTree, pack
from turnwise.trainer.config.policy import ModelConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TokenScores, TrainRow
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trajectory import TrainSample

Ids = list[int]
SMALL = settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
OBJECTIVE = PolicyObjective.of(AlgorithmConfig(entropy_coef=0.05))


@st.composite
def ids_of_rows(draw: st.DrawFn, limit: int = 7) -> list[Ids]:
    """Rows that begin as others do: forks anywhere, one-token tails, identical rows, and some of their own."""
    rows: list[Ids] = []
    for _ in range(draw(st.integers(1, limit))):
        earlier = draw(st.sampled_from(rows)) if rows and draw(st.integers(0, 3)) else []
        begin = earlier[: draw(st.integers(0, len(earlier)))]
        # Few different ids, so that rows also meet by chance.
        tail = draw(st.lists(st.integers(3, 6), min_size=0 if len(begin) > 1 else 2, max_size=9))
        rows.append(begin + tail)
    return rows


def row_of(ids: Ids, number: int) -> TrainRow:
    """A row whose trained tokens, advantages, weight and temperature are drawn from its number."""
    random = np.random.default_rng(number)
    mask = random.random(len(ids)) < 0.6
    mask[0] = False
    mask[-1] |= number % 3 > 0
    advantage: Any = random.normal(size=len(ids)).astype(np.float32) if number % 2 else float(random.normal())
    sample = TrainSample(
        np.asarray(ids, np.int32),
        mask,
        np.where(mask, -random.random(len(ids)) - 1.0, 0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
        np.where(mask, np.arange(len(ids)) // 3, -1).astype(np.int32),
        f"t{number}",
        "g",
        0,
    )
    return TrainRow(sample, advantage, weight=0.5 + random.random(), temperature=0.7 + 0.1 * (number % 4))


def with_old(batch: MicroBatch, rows: list[TrainRow]) -> MicroBatch:
    """What the ratio is taken against, by row, as the update does it."""
    masked = [rows[index].sample for index in batch.rows]
    batch.old_logprobs = torch.from_numpy(
        np.concatenate([sample.rollout_logprobs[sample.loss_mask] for sample in masked])
    )
    return batch


def plain_loss(model: Any, rows: list[TrainRow]) -> LossSums:
    """The loss of all rows, each computed alone by the model's own forward."""
    trained = [row for row in rows if row.sample.trained_tokens]
    logprobs, entropies = [], []
    for row in trained:
        ids = torch.from_numpy(row.sample.input_ids).long()
        logs = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / row.temperature).log_softmax(-1)
        mask = torch.from_numpy(row.sample.loss_mask)[1:]
        logprobs.append(logs.gather(1, ids[1:, None])[:, 0][mask])
        entropies.append(-(logs.exp() * logs).sum(-1)[mask])
    # One micro-batch of all rows in their order: its tensors are put together by row, as these are.
    (batch,) = pack(trained, 10**9)
    order = batch.rows
    scores = TokenScores(torch.cat([logprobs[n] for n in order]), torch.cat([entropies[n] for n in order]))
    return OBJECTIVE(with_old(batch, trained), scores)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return by_name


def shared_loss(
    policy: Policy, rows: list[TrainRow], budget: int, share: bool = True
) -> tuple[float, dict[str, torch.Tensor]]:
    total = 0.0
    trained = sum(row.sample.trained_tokens for row in rows)
    for batch in pack(rows, budget, share_prefixes=share):
        result = OBJECTIVE(with_old(batch, rows), policy.forward(batch, entropy=True))
        loss = result.loss / trained
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total, gradients(policy.model)


@cache
def both(directory: Path) -> tuple[Policy, Any]:
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return load_model(directory), plain.eval()


@pytest.fixture
def every_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share even one token."""
    monkeypatch.setattr(prefix_tree, "SHORTEST_SHARED", 1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.usefixtures("every_fork")
def test_loss_and_gradients_equal_the_unpacked_computation(model_dir: Callable[..., Path], family: str) -> None:
    policy, plain = both(model_dir(family))

    @SMALL
    @given(ids=ids_of_rows(), budget=st.integers(1, 60))
    def check(ids: list[Ids], budget: int) -> None:
        rows = [row_of(row_ids, number) for number, row_ids in enumerate(ids)]
        trained = sum(row.sample.trained_tokens for row in rows)
        if not trained:
            assert pack(rows, budget, share_prefixes=True) == []
            return
        reference = plain_loss(plain, rows).loss / trained
        reference.backward()  # type: ignore[no-untyped-call]
        loss, actual = shared_loss(policy, rows, budget)
        assert loss == pytest.approx(float(reference.detach()), abs=1e-5)
        expected = gradients(plain)
        assert set(actual) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-5, msg=name)

    check()


@pytest.mark.parametrize("family", ["mistral_window", "gemma2", "gpt_oss"])
@pytest.mark.usefixtures("every_fork")
def test_windows_caps_and_sinks(model_dir: Callable[..., Path], family: str) -> None:
    """A window of 4 tokens over a prefix of 6: what a token sees ends inside what it shares."""
    policy, plain = both(model_dir(family))
    begin = [3, 9, 4, 8, 5, 7]
    ids = [begin + tail for tail in ([11], [12, 13, 14, 15, 16], [12, 13, 17, 18], [])] + [[20, 21, 22]]
    rows = [row_of(row_ids, number + 1) for number, row_ids in enumerate(ids)]
    trained = sum(row.sample.trained_tokens for row in rows)
    reference = plain_loss(plain, rows).loss / trained
    reference.backward()  # type: ignore[no-untyped-call]
    loss, actual = shared_loss(policy, rows, 1000)
    assert loss == pytest.approx(float(reference.detach()), abs=1e-5)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(actual[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.usefixtures("every_fork")
def test_neither_budget_nor_sharing_changes_loss_or_gradients(model_dir: Callable[..., Path]) -> None:
    """A group of four, two trajectories with two branches each, an identical pair, and one row alone."""
    prompt = list(range(10, 30))
    ids = [prompt + [31 + n] * (3 + n) for n in range(4)]
    ids += [[*prompt[:12], 40, 41, 42, *tail] for tail in ([43], [44, 45, 46], [44, 45, 47])]
    ids += [[50, 51, 52, 53]] * 2 + [[3, 4, 5, 6, 7, 8]]
    rows = [row_of(row_ids, number) for number, row_ids in enumerate(ids)]
    policy, _ = both(model_dir("qwen3"))
    wanted_loss, expected = shared_loss(policy, rows, 10**6, share=False)
    for budget in (1, 26, 40, 1000):
        loss, actual = shared_loss(policy, rows, budget)
        assert loss == pytest.approx(wanted_loss, abs=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_gradient_checkpointing_with_shared_prefixes(model_dir: Callable[..., Path]) -> None:
    prompt = list(range(10, 30))
    rows = [row_of(prompt + [31 + n] * (3 + n), n) for n in range(4)]
    expected = shared_loss(both(model_dir("qwen3"))[0], rows, 1000)
    loss, actual = shared_loss(load_model(model_dir("qwen3"), gradient_checkpointing=True), rows, 1000)
    assert loss == pytest.approx(expected[0], abs=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


# What is laid where.


@given(ids=ids_of_rows(limit=12), budget=st.integers(1, 80), shortest=st.sampled_from([1, 2, 4]))
@settings(max_examples=examples(40), deadline=None)
def test_every_row_is_a_path(ids: list[Ids], budget: int, shortest: int) -> None:
    rows = [np.asarray(row_ids, np.int32) for row_ids in ids]
    tree = PrefixTree.of(rows, shortest)
    parts = tree.partition(budget)
    assert sorted(position for part in parts for position in part) == list(range(len(rows)))
    for part in parts:
        laid = tree.as_segments(part)
        tokens = np.concatenate([rows[tree.order[part[row]]][first:end] for row, first, end in laid.sources])
        assert len(tokens) <= budget or len(part) == 1
        assert [start for start, _, _ in laid.segments] == np.cumsum([0, *(n for _, n, _ in laid.segments)])[
            :-1
        ].tolist()
        for position, path in zip(part, laid.paths, strict=True):
            pieces = [tokens[start : start + length] for start, length, _ in (laid.segments[n] for n in path)]
            assert np.concatenate(pieces).tolist() == ids[tree.order[position]]
            assert [laid.segments[n][2] for n in path] == [-1, *path[:-1]]
    if shortest == 1:
        # With room for all of them each prefix of any row stands there once.
        (partition,) = tree.partition(10**6)
        prefixes = {tuple(row_ids[:n]) for row_ids in ids for n in range(1, len(row_ids) + 1)}
        assert sum(length for _, length, _ in tree.as_segments(partition).segments) == len(prefixes)


def test_targets_behind_a_fork_are_predicted_by_the_parent() -> None:
    """Two rows of 1 2 3 | 4 5 and 1 2 3 | 6 7 8. The last trained token is predicted, and never read."""
    rows = [row_of([1, 2, 3, 4, 5], 0), row_of([1, 2, 3, 6, 7, 8], 1)]
    masks = [[0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 1]]
    rows = [
        TrainRow(
            TrainSample(
                row.sample.input_ids,
                np.asarray(mask, np.bool_),
                *(np.zeros(len(mask), kind) for kind in (np.float32, np.int32, np.int32)),
                row.sample.trajectory_id,
                "g",
                0,
            )
        )
        for row, mask in zip(rows, masks, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "SHORTEST_SHARED", 3)
        (batch,) = pack(rows, 100, share_prefixes=True)
    assert batch.segments == ((0, 3, -1), (3, 1, 0), (4, 2, 0))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert batch.rows == (0, 1)
    # Row 0 trains 3, 4 and 5, predicted by 2, 3 and 4; row 1 trains 6 and 8, predicted by 3 and 7.
    assert batch.target_ids.tolist() == [3, 4, 5, 6, 8]
    assert batch.predictors.tolist() == [1, 2, 3, 2, 5]
    assert batch.sequences.tolist() == [0, 0, 0, 1, 1]


def test_groups_stay_together_and_split_groups_repeat_their_prefix() -> None:
    """Two groups of four: prompts of 20 tokens, completions of 10 of which the last is not read."""
    rows = [
        row_of([*range(30 * group, 30 * group + 20), *[200 + 10 * group + n] * 10], 3 * n + 1)
        for group in range(2)
        for n in range(4)
    ]
    # A whole group has 20 + 4 * 9 = 56 tokens; two have 112.
    assert [sorted(b.rows) for b in pack(rows, 112, share_prefixes=True)] == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert [(sorted(b.rows), b.tokens) for b in pack(rows, 60, share_prefixes=True)] == [
        ([0, 1, 2, 3], 56),
        ([4, 5, 6, 7], 56),
    ]
    # Room for a prompt and two completions: 38.
    split = pack(rows, 40, share_prefixes=True)
    assert [len({index // 4 for index in batch.rows}) for batch in split] == [1, 1, 1, 1]
    assert [batch.tokens for batch in split] == [38, 38, 38, 38]


def test_short_common_beginnings_are_repeated() -> None:
    """7 tokens in common are fewer than the 8 from which a segment of its own pays; 8 are enough."""
    for common, segments in ((7, 2), (8, 3)):
        rows = [row_of([*range(common), 40 + n, 41, 42 + n, 43, 44], 3 * n + 1) for n in range(2)]
        (batch,) = pack(rows, 100, share_prefixes=True)
        assert len(batch.segments) == segments


def test_the_update_counts_packed_tokens(model_dir: Callable[..., Path]) -> None:
    """Four rows of 20 + 5 tokens with one prompt, two epochs; recomputed log-probabilities share it, too."""
    rows = [row_of([*range(20), *[40 + n] * 5], 3 * n + 1) for n in range(4)]
    algorithm = AlgorithmConfig(epochs=2, old_logprobs="recompute")
    counts = []
    for share, tokens in ((True, 20 + 4 * 4), (False, 4 * 25)):
        learner = TorchLearner.create(PolicyConfig(model=ModelConfig(path=model_dir(), device="cpu")), 10)
        counts.append(update_policy(learner, rows, algorithm, BatchConfig(share_prefixes=share), seed=0))
        assert counts[-1].pop("batch/packed_tokens") == 2 * tokens
    assert counts[0] == pytest.approx(counts[1], abs=1e-5, rel=1e-4)
