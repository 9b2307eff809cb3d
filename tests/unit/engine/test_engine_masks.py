import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.property_tests import examples
from turnwise.engine.sampling import RowParams, sample
from turnwise.trainer.kept_sets import KeptSets
from turnwise.trainer.model.chunked_logprobs import LogitTransform, score_states
from turnwise.types import BY_GRAMMAR, LISTED_BY_GRAMMAR, SamplingMask, decode_mask, digest_bits, join_masks, pack_bits


@st.composite
def truncations(draw):
    rows = draw(st.integers(1, 5))
    return {
        "rows": rows,
        "vocabulary": draw(st.sampled_from([7, 33, 130, 700])),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "top_p": draw(st.lists(st.sampled_from([1.0, 0.95, 0.5, 0.01]), min_size=rows, max_size=rows)),
        "top_k": draw(st.lists(st.sampled_from([0, 1, 5, 20]), min_size=rows, max_size=rows)),
        "min_p": draw(st.lists(st.sampled_from([0.0, 0.05, 0.9]), min_size=rows, max_size=rows)),
        "temperature": draw(st.lists(st.sampled_from([0.0, 0.7, 1.0, 1.5]), min_size=rows, max_size=rows)),
        "guided": draw(st.booleans()),
        "exact": draw(st.booleans()),
    }


def sampled_masks(case, logits):
    rng = np.random.default_rng(case["seed"])
    params = RowParams(
        np.asarray(case["temperature"], np.float32),
        np.asarray(case["top_p"], np.float32),
        np.asarray(case["top_k"], np.int64),
        np.asarray(case["min_p"], np.float32),
    )
    allowed = None
    if case["guided"]:
        allowed = rng.random((case["rows"], case["vocabulary"])) < rng.choice([0.1, 0.8])
        allowed[:, rng.integers(case["vocabulary"])] = True
        allowed[0] = True
    sampled = sample(logits, params, rng.random(case["rows"]), allowed, exact=case["exact"])
    sets = sampled.sets(np.arange(case["rows"]), params.truncated, allowed)
    sizes = np.asarray([size for size, _ in sets], np.int32)
    words = np.concatenate([words for _, words in sets]).astype(np.int32)
    bits = {
        int(digest_bits(pack_bits(row)).view(np.int64)[0]): pack_bits(row)
        for row in ([] if allowed is None else allowed)
    }
    return sampled, SamplingMask(sampled.kept_logprobs, sizes, words, None, bits), allowed, params


def kept_of(mask, row, vocabulary):
    excluded = KeptSets.of([mask.select(np.asarray([row]))])
    return np.ones(vocabulary, bool) if excluded is None else ~excluded.excluded(0, vocabulary).numpy()[0]


@given(truncations())
@settings(max_examples=examples(100), deadline=None)
def test_kept_sets_renormalise_to_the_distribution_that_was_sampled_from(case):
    torch.manual_seed(case["seed"])
    head = nn.Linear(6, case["vocabulary"], bias=False)
    states = torch.randn(case["rows"], 6, requires_grad=True)
    with torch.no_grad():
        head.weight.mul_(4)
        logits = head(states)
    sampled, mask, allowed, params = sampled_masks(case, logits)
    temperatures = torch.from_numpy(np.where(params.temperature == 0, 1, params.temperature).astype(np.float32))
    ids = torch.from_numpy(sampled.token_ids)
    scaled = (logits / temperatures[:, None]).double().numpy()
    expected, entropies = [], []
    for row in range(case["rows"]):
        ids_kept = kept_of(mask, row, case["vocabulary"])
        assert ids_kept[ids[row]]
        if allowed is not None:
            assert not (ids_kept & ~allowed[row]).any()
        if params.truncated[row] and case["top_k"][row]:
            assert ids_kept.sum() <= case["top_k"][row]
        total = np.logaddexp.reduce(scaled[row][ids_kept])
        logs = scaled[row][ids_kept] - total
        expected.append(scaled[row][ids[row]] - total)
        entropies.append(-(np.exp(logs) * logs).sum())
    np.testing.assert_allclose(sampled.kept_logprobs, expected, atol=5e-6)

    sets = KeptSets.of([mask])
    if sets is not None:
        part = torch.arange(case["rows"])[case["rows"] // 2 :]
        excluded = sets.excluded(3, case["vocabulary"])
        assert torch.equal(sets.select(part).excluded(3, case["vocabulary"]), excluded[part])
    gradients = []
    for tile_bytes, fused in ((None, False), (4 * case["rows"] * 5, False)):
        scores, entropy = score_states(
            head,
            states,
            ids,
            temperatures,
            LogitTransform(),
            entropy=True,
            tile_bytes=tile_bytes,
            fused=fused,
            sets=sets,
        )
        np.testing.assert_allclose(scores.detach(), expected, atol=1e-5)
        np.testing.assert_allclose(entropy.detach(), entropies, atol=2e-5)
        gradients.append(torch.autograd.grad(scores.sum() + 0.3 * entropy.sum(), [states, head.weight]))
    plain = (head(states) / temperatures[:, None]).double()
    if sets is not None:
        plain = plain.masked_fill(sets.excluded(0, case["vocabulary"]), -torch.inf)
    logs = plain.log_softmax(-1)
    entropy = -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(-1)
    loss = logs.gather(1, ids[:, None]).sum() + 0.3 * entropy.sum()
    for tiled, one, reference in zip(*gradients, torch.autograd.grad(loss, [states, head.weight]), strict=True):
        torch.testing.assert_close(tiled, reference, atol=3e-5, rtol=1e-4)
        torch.testing.assert_close(one, reference, atol=3e-5, rtol=1e-4)


@given(truncations())
@settings(max_examples=examples(40), deadline=None)
def test_masks_survive_encoding_selection_and_joining(case):
    logits = torch.randn(case["rows"], case["vocabulary"], generator=torch.Generator().manual_seed(case["seed"]))
    _, mask, _, _ = sampled_masks(case, logits)
    read = decode_mask(mask.encode())
    for name in ("logprobs", "sizes", "words"):
        np.testing.assert_array_equal(getattr(read, name), getattr(mask, name))
    middle = case["rows"] // 2
    parts = [mask.select(np.arange(middle)), mask.select(np.arange(middle, case["rows"]))]
    joined = join_masks([(part.logprobs, part) for part in parts])
    for name in ("logprobs", "sizes", "words"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(mask, name))
    behind = join_masks([(np.zeros(3, np.float32), None), (mask.logprobs, mask)])
    assert len(behind) == 3 + len(mask)
    assert not behind.sizes[:3].any()


def test_sets_of_grammars_are_listed_or_named_by_digest():
    allowed = np.zeros((2, 400), bool)
    allowed[0, :LISTED_BY_GRAMMAR] = True
    allowed[1, : LISTED_BY_GRAMMAR + 1] = True
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    params = RowParams(ones, ones, zeros.astype(np.int64), zeros)
    sampled = sample(torch.zeros(2, 400), params, np.asarray([0.5, 0.5]), allowed)
    (listed, ids), (size, digest) = sampled.sets(np.arange(2), params.truncated, allowed)
    assert (listed, ids.tolist()) == (LISTED_BY_GRAMMAR, list(range(LISTED_BY_GRAMMAR)))
    assert size == BY_GRAMMAR
    assert digest.tolist() == digest_bits(pack_bits(allowed[1])).tolist()


@pytest.mark.parametrize("text", ["", "no masks", 3, SamplingMask(*np.zeros((3, 2))).encode()[:-8]])
def test_malformed_masks_are_refused(text):
    with pytest.raises(ValueError, match="sampling masks"):
        decode_mask(text)


def test_grammar_of_masks_is_recorded():
    sizes = np.asarray([BY_GRAMMAR, 2], np.int32)
    mask = SamplingMask(np.zeros(2, np.float32), sizes, np.arange(4, dtype=np.int32), ("{}", (7, 9)))
    read = decode_mask(mask.encode())
    assert read.grammar == ("{}", (7, 9))
    assert read.digests().tolist() == mask.digests().tolist()
    assert read.select(np.asarray([1])).words.tolist() == [2, 3]
