"""Scores from hidden states: against numbers by hand, the plain formula, numerical gradients, and at any tile size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.property_tests import examples
from turnwise.trainer.model.chunked_logprobs import LogitTransform, score_states, tile_columns

PLAIN = LogitTransform()
TRANSFORMS = [
    PLAIN,
    LogitTransform(softcap=2.0),
    LogitTransform(divisor=3.0, factor=0.5),
    LogitTransform(1.5, 2.0, 3.0),
]


def problem(
    tokens: int = 7, hidden: int = 5, vocabulary: int = 11, *, seed: int = 0, bias: bool = False, dtype: Any = None
) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A head, states, ids and temperatures."""
    random = torch.Generator().manual_seed(seed)
    head = nn.Linear(hidden, vocabulary, bias=bias, dtype=dtype)
    for parameter in head.parameters():
        nn.init.normal_(parameter, generator=random)
    states = torch.randn(tokens, hidden, generator=random, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, vocabulary, (tokens,), generator=random)
    return head, states, ids, 0.5 + torch.rand(tokens, generator=random)


def plain(head: nn.Module, states: Tensor, ids: Tensor, temperatures: Tensor, transform: LogitTransform) -> Any:
    logs = (transform(head(states)) / temperatures[:, None]).log_softmax(-1)
    return logs.gather(1, ids[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def gradients(scores: Any, states: Tensor, head: nn.Module, *, entropy: bool = True) -> list[Tensor | None]:
    """Gradients of a sum that weighs every token and both results differently."""
    weights = torch.linspace(-1, 2, len(states), dtype=scores[0].dtype)
    total = (weights * scores[0]).sum()
    if entropy:
        total = total + (weights.square() * scores[1]).sum()
    trained = [tensor for tensor in (states, *head.parameters()) if tensor.requires_grad]
    return list(torch.autograd.grad(total, trained))


@pytest.mark.parametrize("tile_bytes", [1 << 20, 4])
def test_two_ids_by_hand(tile_bytes: int) -> None:
    """The state is 1 and the matrix (ln 9, 0), so the probabilities are 9/10 and 1/10; at temperature 2, 3/4 and 1/4.

    log p = ln 0.9 for id 0 and ln 0.25 for id 1 at temperature 2. Entropies: -0.9 ln 0.9 - 0.1 ln 0.1 and -0.75 ln 0.75
    - 0.25 ln 0.25. The gradient of log p(id 0) to the logits is (1 - 0.9, -0.1); that of log p(id 1) at temperature 2
    is (-0.75, 1 - 0.25) / 2. So to the matrix, summed over both: (0.1 - 0.375, -0.1 + 0.375). To the state: the logits'
    gradient times the matrix, 0.1 ln 9 and -0.375 ln 9.
    """
    head = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.weight[0] = math.log(9)
    states = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    logprobs, entropies = score_states(
        head, states, torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), PLAIN, entropy=True, tile_bytes=tile_bytes
    )
    assert entropies is not None
    assert logprobs.tolist() == pytest.approx([math.log(0.9), math.log(0.25)], rel=1e-14)
    by_hand = [-0.9 * math.log(0.9) - 0.1 * math.log(0.1), -0.75 * math.log(0.75) - 0.25 * math.log(0.25)]
    assert entropies.tolist() == pytest.approx(by_hand, rel=1e-13)
    logprobs.sum().backward()
    assert head.weight.grad is not None
    assert states.grad is not None
    assert head.weight.grad[:, 0].tolist() == pytest.approx([-0.275, 0.275], rel=1e-13)
    assert states.grad[:, 0].tolist() == pytest.approx([0.1 * math.log(9), -0.375 * math.log(9)], rel=1e-13)


def test_the_gradient_of_entropy_by_hand() -> None:
    """With p = (9/10, 1/10), dH/dz = -p (log p + H): the two are opposite, and the first is -0.9 (ln 0.9 + H)."""
    head = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[math.log(9)], [0.0]], dtype=torch.float64))
    for tile_bytes in (1 << 20, 4):
        head.weight.grad = None
        states = torch.ones(1, 1, dtype=torch.float64)
        scores = score_states(
            head, states, torch.tensor([0]), torch.ones(1), PLAIN, entropy=True, tile_bytes=tile_bytes
        )
        assert scores[1] is not None
        scores[1].sum().backward()
        entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
        first = -0.9 * (math.log(0.9) + entropy)
        assert head.weight.grad is not None
        assert head.weight.grad[:, 0].tolist() == pytest.approx([first, -first], rel=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("columns", [11, 4])
def test_gradients_are_those_of_finite_differences(transform: LogitTransform, columns: int) -> None:
    head, states, ids, temperatures = problem(3, 4, 11, bias=True, dtype=torch.float64)

    def scored(states: Tensor, weight: Tensor, bias: Tensor) -> Any:
        moved_head = nn.Linear(4, 11, dtype=torch.float64)
        del moved_head.weight, moved_head.bias
        moved_head.weight, moved_head.bias = weight, bias  # type: ignore[assignment] - what gradcheck moves
        return score_states(moved_head, states, ids, temperatures, transform, entropy=True, tile_bytes=4 * 3 * columns)

    assert torch.autograd.gradcheck(scored, (states, head.weight, head.bias))


@settings(max_examples=examples(20))
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    tile_bytes=st.integers(4, 2000),
    transform=st.sampled_from(TRANSFORMS),
    options=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_any_tile_size_gives_the_plain_formula(
    tokens: int, vocabulary: int, tile_bytes: int, transform: LogitTransform, options: tuple[bool, bool, bool]
) -> None:
    bias, warm, entropy = options
    head, states, ids, temperatures = problem(tokens, 3, vocabulary, seed=tokens, bias=bias, dtype=torch.float64)
    temperatures = temperatures if warm else torch.ones(tokens)
    want = plain(head, states, ids, temperatures, transform)
    got = score_states(head, states, ids, temperatures, transform, entropy=True, tile_bytes=tile_bytes)
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)
    changes = zip(
        gradients(got, states, head, entropy=entropy), gradients(want, states, head, entropy=entropy), strict=True
    )
    for actual, expected in changes:
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("columns", [50, 17])
def test_float32_equals_the_plain_formula_within_1e6(columns: int) -> None:
    """The gradients, sums over tokens, are held against their own size."""
    head, states, ids, temperatures = problem(20, 4, 50)
    want = plain(head, states, ids, temperatures, PLAIN)
    got = score_states(head, states, ids, temperatures, PLAIN, entropy=True, tile_bytes=4 * 20 * columns)
    torch.testing.assert_close(list(got), list(want), atol=1e-6, rtol=1e-6)
    for actual, expected in zip(gradients(got, states, head), gradients(want, states, head), strict=True):
        assert actual is not None
        assert expected is not None
        assert float((actual - expected).norm() / expected.norm()) < 1e-6


def test_splitting_the_tokens_keeps_scores_and_gradients() -> None:
    head, states, ids, temperatures = problem(12, 5, 17)
    room = 4 * 12 * 6
    unsplit = score_states(head, states, ids, temperatures, PLAIN, entropy=True, tile_bytes=room)
    parts = [
        score_states(head, states[a:b], ids[a:b], temperatures[a:b], PLAIN, entropy=True, tile_bytes=room)
        for a, b in ((0, 5), (5, 6), (6, 12))
    ]
    joined = [torch.cat(part) for part in zip(*parts, strict=True)]  # type: ignore[arg-type]
    torch.testing.assert_close(joined, list(unsplit), atol=1e-6, rtol=1e-6)
    for actual, expected in zip(gradients(joined, states, head), gradients(unsplit, states, head), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("columns", [11, 4])
def test_extreme_logits_give_finite_scores(columns: int) -> None:
    """Logits of +-3000: the chosen id has probability 1 or e**-6000; entropy 0, and no gradient is lost to NaN."""
    head = nn.Linear(1, 11, bias=False)
    with torch.no_grad():
        head.weight.fill_(-3000)
        head.weight[6] = 3000
    states = torch.ones(2, 1, requires_grad=True)
    logprobs, entropies = score_states(
        head, states, torch.tensor([6, 1]), torch.ones(2), PLAIN, entropy=True, tile_bytes=4 * 2 * columns
    )
    assert entropies is not None
    assert logprobs.tolist() == [0.0, -6000.0]
    assert entropies.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropies.sum()).backward()
    assert states.grad is not None
    # d log p(1) / d state = w[1] - w[6] = -6000.
    assert states.grad[:, 0].tolist() == [0.0, -6000.0]


@pytest.mark.parametrize("columns", [11, 4])
def test_a_frozen_matrix_gets_no_gradient_and_costs_none(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, states, ids, temperatures = problem(bias=True)
    want = gradients(plain(head, states, ids, temperatures, PLAIN), states, head)[0]
    head.requires_grad_(False)
    allocated: list[Any] = []
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **named: allocated.append(args) or empty_like(*args, **named)
    )
    scores = score_states(head, states, ids, temperatures, PLAIN, entropy=True, tile_bytes=4 * 7 * columns)
    (got,) = gradients(scores, states, head)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert not allocated


def test_tied_embedding_gets_the_gradients_of_both_uses() -> None:
    """Tied to the embedding, the matrix has two gradients: that of the look-up and that of the scores."""
    torch.manual_seed(0)
    table = nn.Embedding(11, 5)
    head = nn.Linear(5, 11, bias=False)
    head.weight = table.weight
    ids = torch.arange(6)
    results = []
    for tile_bytes in (None, 1 << 20, 4 * 6 * 4):
        table.weight.grad = None
        states = table(ids)
        if tile_bytes is None:
            scores = plain(head, states, ids, torch.ones(6), PLAIN)[0]
        else:
            scores = score_states(head, states, ids, torch.ones(6), PLAIN, entropy=False, tile_bytes=tile_bytes)[0]
        scores.sum().backward()
        assert table.weight.grad is not None
        results.append(table.weight.grad)
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(results[2], results[0], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("columns", [64, 20])
def test_bfloat16_products_keep_float32_sums(columns: int) -> None:
    head, states, ids, temperatures = problem(9, 16, 64)
    states = (states.detach() * 0.3).requires_grad_()
    want = plain(head, states, ids, temperatures, PLAIN)
    with torch.autocast("cpu", torch.bfloat16):
        got = score_states(head, states, ids, temperatures, PLAIN, entropy=True, tile_bytes=4 * 9 * columns)
    assert got[1] is not None
    assert {scores.dtype for scores in got if scores is not None} == {torch.float32}
    assert 0 < float((got[0] - want[0]).detach().abs().max()) < 0.1
    for actual, expected in zip(gradients(got, states, head), gradients(want, states, head), strict=True):
        assert actual is not None
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=0.08, rtol=0.05)


def test_backward_can_run_twice() -> None:
    head, states, ids, temperatures = problem()
    for tile_bytes in (1 << 20, 4 * 7 * 4):
        scores = score_states(head, states, ids, temperatures, TRANSFORMS[3], entropy=True, tile_bytes=tile_bytes)
        assert scores[1] is not None
        total = scores[0].sum() + scores[1].sum()
        first, second = (torch.autograd.grad(total, [states, head.weight], retain_graph=True) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@given(st.integers(0, 50), st.integers(1, 100), st.integers(0, 5000))
@settings(max_examples=examples(30))
def test_tiles_are_equal_and_as_few_as_fit(tokens: int, vocabulary: int, tile_bytes: int) -> None:
    columns = tile_columns(tokens, vocabulary, tile_bytes)
    assert 1 <= columns <= vocabulary
    assert columns == 1 or 4 * tokens * columns <= tile_bytes
    tiles = -(-vocabulary // columns)
    # Even with the largest tiles that fit it would take as many.
    assert tiles == -(-vocabulary // max(1, tile_bytes // (4 * max(1, tokens)))) or columns == vocabulary


@given(st.integers(1, 40_000), st.integers(600, 300_000))
@settings(max_examples=examples(30))
def test_wide_tiles_are_aligned(tokens: int, vocabulary: int) -> None:
    """On a GPU: 256 MiB."""
    columns = tile_columns(tokens, vocabulary, 1 << 28)
    assert columns == vocabulary or (columns % 64 == 0 and 4 * tokens * columns <= 1 << 28)
    # Not a tile more than tiles of the largest aligned width take.
    assert -(-vocabulary // columns) == -(-vocabulary // min(vocabulary, (1 << 28) // (4 * tokens) // 64 * 64))


class _Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.elements = max(self.elements, output.numel())
        return output


def test_no_tensor_is_larger_than_a_tile() -> None:
    """Neither forward nor backward, with and without a gradient of entropy: 40 x 90 logits, of which 40 x 9 fit."""
    head, states, ids, temperatures = problem(40, 3, 90)
    for entropy in (True, False):
        with _Largest() as seen:
            scores = score_states(head, states, ids, temperatures, TRANSFORMS[3], entropy=True, tile_bytes=4 * 40 * 9)
            gradients(scores, states, head, entropy=entropy)
        assert 40 * 8 <= seen.elements <= 40 * 9
