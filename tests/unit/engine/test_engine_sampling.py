"""The draws are uniform and independent; what is sampled has the distribution it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.engine.sampling import RowParams, sample, seed_key, uniforms


def keys(seeds) -> np.ndarray:
    return np.array([seed_key(int(seed)) for seed in seeds], dtype=np.uint64)


def chi_square(draws: np.ndarray, bins: int) -> float:
    """Standardised chi-square statistic: about N(0, 1) for uniform draws."""
    counts = np.bincount((draws * bins).astype(int), minlength=bins)
    mean = len(draws) / bins
    return float((((counts - mean) ** 2 / mean).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1)))


class TestUniforms:
    def test_along_positions_and_along_seeds(self):
        positions = np.arange(40_000)
        for seed in (0, 1, 2, 10**12, -5):
            draws = uniforms(np.repeat(keys([seed]), len(positions)), positions)
            assert draws.min() >= 0.0
            assert draws.max() < 1.0
            assert abs(chi_square(draws, 256)) < 5
            assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
        by_seed = uniforms(keys(range(20_000)), np.full(20_000, 17))
        assert abs(chi_square(by_seed, 256)) < 5
        assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.03

    def test_neighbouring_seeds_and_positions_are_no_shifted_copies(self):
        table = np.stack([uniforms(np.repeat(keys([seed]), 300), np.arange(300)) for seed in range(40)])
        assert len(np.unique(table)) == table.size
        flat = np.corrcoef(table)
        assert np.abs(flat - np.eye(40)).max() < 0.3
        for shift in (1, 2, 5):
            pairs = np.corrcoef(table[:-1, shift:].ravel(), table[1:, :-shift].ravel())[0, 1]
            assert abs(pairs) < 0.03

    def test_two_dimensional_uniformity(self):
        draws = uniforms(np.repeat(keys([3]), 80_000), np.arange(80_000)).reshape(-1, 2)
        cells = (np.floor(draws[:, 0] * 16) * 16 + np.floor(draws[:, 1] * 16)) / 256
        assert abs(chi_square(cells, 256)) < 5

    @given(st.integers(-(2**200), 2**200), st.integers(0, 2**40))
    def test_any_integer_is_a_seed_and_draws_repeat(self, seed, position):
        one, two = (uniforms(keys([seed]), np.array([position])) for _ in range(2))
        assert one == two
        assert 0.0 <= one[0] < 1.0

    def test_known_values_stay(self):
        # Saved runs are continued with the same draws: a change here is a change of the format.
        draws = uniforms(keys([0, 1, 12345]), np.array([0, 7, 123]))
        assert np.allclose(draws, KNOWN, rtol=0, atol=0)


KNOWN = [0.9995385979782201, 0.39367721087753405, 0.8277409810369638]


def params(rows: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> RowParams:
    return RowParams(
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, top_p, dtype=np.float32),
        np.full(rows, top_k, dtype=np.int64),
        np.full(rows, min_p, dtype=np.float32),
    )


def allowed(logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """What may be sampled, written from the definitions, in double precision: probabilities, 0 where excluded."""
    scaled = logits.astype(np.float64) / temperature
    full = np.exp(scaled - scaled.max())
    full /= full.sum()
    order = np.argsort(-full, kind="stable")
    mask = np.zeros(len(full), dtype=bool)
    mask[order[: top_k or len(full)]] = True
    after_k = np.where(mask, full, 0)
    after_k /= after_k.sum()
    mass = 0.0
    for index in order:
        if top_p < 1 and mass >= top_p:
            mask[index] = False
        mass += after_k[index]
    mask &= full >= min_p * full.max()
    return np.where(mask, full, 0) / full[mask].sum()


CASES = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.8, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 10_000},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("vocabulary", "count"), [(40, 30_000), (1500, 3000), pytest.param(1500, 30_000, marks=pytest.mark.long)]
)
def test_frequencies_follow_the_definition(case, vocabulary, count):
    given_params = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **case}
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2.0, vocabulary).astype(np.float32)
    expected = allowed(logits, **given_params)
    draws = uniforms(keys([9]).repeat(count), np.arange(count))
    ids = np.concatenate(
        [
            sample(torch.from_numpy(logits).repeat(len(part), 1), params(len(part), **given_params), part)[0]
            for part in np.array_split(draws, count // 1000)
        ]
    )
    seen = np.bincount(ids, minlength=vocabulary)
    assert not seen[expected == 0].any(), "an excluded id was sampled"
    large = expected * count > 20
    error = (seen - expected * count)[large] / np.sqrt(count * expected * (1 - expected) + 1e-9)[large]
    assert np.abs(error).max() < 5


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_any_row_of_a_mixed_batch(data):
    """Each row is sampled by its own parameters, whatever stands beside it; logprobs are before truncation."""
    rows, vocabulary = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 600))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = (rng.normal(0, 3, (rows, vocabulary)) * data.draw(st.sampled_from([0.1, 1.0, 20.0]))).astype(np.float32)
    temperature = np.array(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=rows, max_size=rows)), np.float32
    )
    top_p = np.array(data.draw(st.lists(st.sampled_from([0.01, 0.5, 1.0]), min_size=rows, max_size=rows)), np.float32)
    top_k = np.array(data.draw(st.lists(st.sampled_from([0, 1, 3]), min_size=rows, max_size=rows)), np.int64)
    min_p = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=rows, max_size=rows)), np.float32)
    draws = np.array(data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=rows, max_size=rows)))
    ids, logprobs, cut = sample(torch.from_numpy(logits), RowParams(temperature, top_p, top_k, min_p), draws)[:3]
    for row in range(rows):
        scaled = logits[row].astype(np.float64) / (temperature[row] or 1.0)
        full = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        assert logprobs[row] == pytest.approx(full[ids[row]], abs=1e-4, rel=1e-5)
        if temperature[row] == 0:
            assert ids[row] == logits[row].argmax()
            continue
        chances = allowed(logits[row], float(temperature[row]), float(top_p[row]), int(top_k[row]), float(min_p[row]))
        # Rounding may move the border of a nucleus by one id of the same weight.
        near = full - full[chances > 0].min() > -0.001
        assert chances[ids[row]] > 0 or near[ids[row]]
        likeliest = int(chances.argmax())
        remaining_mass = np.exp(full[likeliest]) / chances[likeliest]
        border = np.exp(full[near & (full - full[chances > 0].min() < 0.001)]).sum()
        assert 1 - (0.0 if cut is None else cut[row]) == pytest.approx(remaining_mass, abs=1e-5 + border)


def test_the_largest_draw_hits_an_id_with_weight():
    logits = torch.tensor([[0.0, 1.0, -float("inf"), -200.0]])
    ids, logprobs, cut = sample(logits, params(1), np.array([1.0 - 2.0**-53]))[:3]
    assert ids[0] == 1
    assert cut is None
    assert np.isfinite(logprobs[0])
    ids, _, _ = sample(torch.tensor([[-200.0, 0.0, 1.0]]), params(1), np.array([0.0]))[:3]
    assert ids[0] in (0, 1)


def test_logprobs_of_non_finite_rows_are_nan():
    logits = torch.tensor([[float("nan"), 1.0], [0.0, 1.0]])
    _, logprobs, _ = sample(logits, params(2), np.array([0.3, 0.3]))[:3]
    assert np.isnan(logprobs[0])
    assert np.isfinite(logprobs[1])
    _, logprobs, _ = sample(logits, params(2, temperature=0.0), np.array([0.3, 0.3]))[:3]
    assert np.isnan(logprobs[0])


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_grammar_mask_applies_before_truncation_and_keeps_logprobs(data):
    rows, vocabulary = 3, 12
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Some so far below the likeliest that their weight beside it is nothing.
    logits = rng.choice([-400.0, -3.0, 0.0, 2.0, 90.0], (rows, vocabulary)).astype(np.float32)
    logits += rng.normal(0, 0.5, logits.shape).astype(np.float32)
    mask = rng.random((rows, vocabulary)) < 0.4
    mask[np.arange(rows), rng.integers(0, vocabulary, rows)] = True
    temperatures = rng.choice([0.0, 0.7, 1.0, 1.5], rows).astype(np.float32)
    given_params = RowParams(
        temperatures,
        rng.choice([0.5, 1.0], rows).astype(np.float32),
        rng.choice([0, 2], rows).astype(np.int64),
        rng.choice([0.0, 0.1], rows).astype(np.float32),
    )
    ids, logprobs, cut = sample(torch.from_numpy(logits), given_params, rng.random(rows), mask)[:3]
    for row, token in enumerate(ids):
        assert mask[row, token]
        divisor = temperatures[row] or 1.0
        free = torch.log_softmax(torch.from_numpy(logits[row]) / divisor, -1)
        assert abs(float(free[token]) - logprobs[row]) < 1e-4 * max(1.0, abs(float(free[token])))
        masked = np.where(mask[row], logits[row], -np.inf)
        if given_params.top_p[row] == 1 and given_params.top_k[row] == 0 and given_params.min_p[row] == 0:
            assert cut is not None
            assert cut[row] == pytest.approx(float(free.exp()[torch.from_numpy(~mask[row])].sum()), abs=1e-5)
        if temperatures[row] == 0:
            assert token == masked.argmax()
        elif given_params.top_k[row] == 2:
            assert token in np.argsort(-masked)[:2]
