"""Memory: rows and slots under random use, and the engine under random requests, aborts, pauses and updates."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.engine.tiny_lm import greedy, logprobs, make_model, save_model
from support.property_tests import examples
from turnwise.engine.batching.batch_state import Generation
from turnwise.engine.batching.kv_cache import ACTIVE, FREE, RETAINED, Geometry, KVCache, capacities
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.placement.usage import process_memory
from turnwise.types import SamplingParams

OPERATIONS = ("take", "share", "grow", "append", "retain", "release", "reuse", "compact")
GEOMETRY = Geometry(layers=2, heads=2, key_dim=3, value_dim=2)


def test_capacities_grow_by_at_most_half_and_cover():
    sizes = capacities(5000)
    assert sizes[:8] == [32, 64, 96, 128, 192, 256, 384, 512]
    assert sizes[-1] >= 5000 > sizes[-2]
    assert all(larger <= 1.5 * smaller for smaller, larger in itertools.pairwise(sizes[1:]))


def stored(cache: KVCache, slot: int) -> np.ndarray:
    """The keys of a slot's cached tokens in the last layer; every test token's key is its id."""
    pool, row = cache.pools[cache.pool_of[slot]], cache.row_of[slot]
    return pool.keys[1][row, 1, : cache.cached[slot], 2].numpy()


def fill(cache: KVCache, slot: int) -> None:
    """Write keys and values of all tokens of a slot."""
    pool, row, length = cache.pools[cache.pool_of[slot]], cache.row_of[slot], cache.length[slot]
    ids = torch.from_numpy(cache.token_ids[slot, :length].astype(np.float32))
    for layer in range(GEOMETRY.layers):
        pool.keys[layer][row, :, :length] = ids[None, :, None]
        pool.values[layer][row, :, :length] = ids[None, :, None]
    cache.cached[slot] = length


def check(cache: KVCache, contents: dict[int, np.ndarray]) -> None:
    """Every slot has exactly one row, rows know their owners, memory is within budget, contents are intact."""
    assert cache.allocated <= cache.budget
    used = np.flatnonzero(cache.state != FREE)
    assert sorted(owner for pool in cache.pools for owner in pool.owner.tolist() if owner >= 0) == used.tolist()
    for slot in used.tolist():
        pool = cache.pools[cache.pool_of[slot]]
        assert pool.owner[cache.row_of[slot]] == slot
        assert cache.cached[slot] <= cache.length[slot]
        assert cache.cached[slot] <= pool.capacity
        if cache.state[slot] == ACTIVE:
            assert np.array_equal(cache.token_ids[slot, : cache.length[slot]], contents[slot])
        assert np.array_equal(stored(cache, slot), cache.token_ids[slot, : cache.cached[slot]].astype(np.float32))


def refuse(*_: object, **__: object) -> None:
    raise OSError("Cannot allocate memory")


@pytest.mark.parametrize("reserves", [True, False])
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_rows_and_slots_under_random_use(reserves, data):  # noqa: C901 - one branch per operation
    longest = data.draw(st.sampled_from([40, 100, 200]), "longest")
    budget = capacities(longest)[-1] + data.draw(st.integers(0, 600), "more")
    with pytest.MonkeyPatch.context() as patch:
        # What a system does that reserves no address space; a GPU's memory is handled in the same way.
        if not reserves:
            patch.setattr("mmap.mmap", refuse)
        cache = KVCache(
            GEOMETRY,
            torch.float32,
            torch.device("cpu"),
            slots=data.draw(st.integers(2, 12)),
            longest=longest,
            budget=budget,
        )
    contents: dict[int, np.ndarray] = {}
    fresh = iter(range(1, 10**6))

    def tokens(count: int) -> np.ndarray:
        return np.array([next(fresh) for _ in range(count)], dtype=np.int32)

    with torch.inference_mode():
        for _ in range(data.draw(st.integers(1, 40), "operations")):
            active = np.flatnonzero(cache.state == ACTIVE)
            retained = np.flatnonzero(cache.state == RETAINED)
            choice = data.draw(st.sampled_from([*OPERATIONS, "trim", "drop"]))
            if choice == "take":
                new = tokens(data.draw(st.integers(1, longest - 1)))
                slot = cache.take(new)
                assert slot is not None or len(active), "memory is refused although nothing is in use"
            elif choice == "share" and len(active) + len(retained):
                source = int(data.draw(st.sampled_from([*active, *retained])))
                count = int(data.draw(st.integers(0, int(cache.cached[source]))))
                new = np.concatenate([cache.token_ids[source, :count].copy(), tokens(data.draw(st.integers(1, 9)))])[
                    : longest - 1
                ]
                slot = cache.take(new, source=source)
                if slot is not None:
                    cache.share(slot, source, min(count, len(new)))
                    assert np.array_equal(stored(cache, slot), new[: cache.cached[slot]].astype(np.float32))
            elif choice == "reuse" and len(retained):
                slot = int(data.draw(st.sampled_from(retained.tolist())))
                count = int(data.draw(st.integers(0, int(cache.cached[slot]))))
                new = np.concatenate([cache.token_ids[slot, :count].copy(), tokens(data.draw(st.integers(1, 30)))])[
                    : longest - 1
                ]
                if not cache.reuse(slot, new, min(count, len(new))):
                    assert cache.state[slot] == RETAINED
                    slot = None
            elif choice in ("grow", "append") and len(active):
                slot = int(data.draw(st.sampled_from(active.tolist())))
                if (
                    cache.length[slot] < longest - 1
                    and cache.grow(slot, int(cache.length[slot]) + 1)
                    and choice == "append"
                ):
                    cache.append(np.array([slot]), np.array([next(fresh)]), np.array([True]))
                    contents[slot] = cache.token_ids[slot, : cache.length[slot]].copy()
                check(cache, contents)
                continue
            elif choice == "retain" and len(active):
                cache.retain(int(data.draw(st.sampled_from(active.tolist()))))
                continue
            elif choice == "release" and len(active):
                cache.release(int(data.draw(st.sampled_from(active.tolist()))))
                continue
            elif choice in ("trim", "drop"):
                rows = cache.row_of.copy()
                if choice == "drop":
                    cache.drop_retained()
                    assert cache.allocated == sum(pool.used * pool.capacity for pool in cache.pools)
                elif not cache.trim():
                    assert np.array_equal(rows, cache.row_of)
                assert all(pool.rows - pool.used <= pool.spare for pool in cache.pools)
                check(cache, contents)
                continue
            elif choice == "compact" and len(active):
                for _ in range(9):
                    cache.compact(active)
                check(cache, contents)
                continue
            else:
                continue
            if slot is not None:
                contents[slot] = new
                check(cache, contents)
                fill(cache, slot)
            check(cache, contents)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_grows_on_demand_and_is_freed():
    """4 KiB a token: the budget is 512 MiB, and a row of 500 tokens 2 MB."""
    geometry = Geometry(layers=4, heads=2, key_dim=64, value_dim=64)
    resident_before = process_memory().resident

    def held() -> float:
        return (process_memory().resident - resident_before) / 2**20

    cache = KVCache(geometry, torch.float32, torch.device("cpu"), slots=64, longest=512, budget=2**17)
    assert held() < 16
    slots = [cache.take(np.full(20, number + 1, dtype=np.int32)) for number in range(32)]
    peak = 0.0
    for length in range(20, 500, 10):
        for slot in slots:
            assert cache.grow(slot, length)
            pool, row = cache.pools[cache.pool_of[slot]], cache.row_of[slot]
            pool._data[:, :, row, :, int(cache.cached[slot]) : length] = float(slot)
            cache.cached[slot] = length
        cache.trim()
        peak = max(peak, held())
    # Sequences moved through eight pools. Without giving back, each of them would hold its largest extent.
    assert 60 < held() < 90
    assert peak < 110
    for slot in slots:
        pool, row = cache.pools[cache.pool_of[slot]], cache.row_of[slot]
        assert bool((pool._data[:, :, row, :, :490] == slot).all())
        cache.release(slot)
    cache.trim()
    assert held() < 32
    cache.drop_retained()
    assert cache.allocated == 0
    assert held() < 16
    # Pages that come back are zeros.
    slot = cache.take(np.ones(490, dtype=np.int32))
    assert not cache.pools[cache.pool_of[slot]].keys[0][cache.row_of[slot]].any()


def test_compaction_moves_rows_only_when_holes_have_cost_as_much():
    cache = KVCache(GEOMETRY, torch.float32, torch.device("cpu"), slots=40, longest=32, budget=40 * 32)
    slots = [cache.take(np.full(9, slot + 1, dtype=np.int32)) for slot in range(30)]
    for slot in slots:
        fill(cache, slot)
    active = np.array([slot for index, slot in enumerate(slots) if index % 3 == 0])
    for slot in set(slots) - set(active.tolist()):
        cache.retain(slot)
    moved = [cache.compact(active) for _ in range(9)]
    assert moved.index(True) == 7
    assert sorted(cache.row_of[active].tolist()) == list(range(10))
    for slot in slots:
        assert np.array_equal(stored(cache, slot), np.full(9, slot + 1, dtype=np.float32))


def test_shared_prefixes_count_only_known_tokens():
    cache = KVCache(GEOMETRY, torch.float32, torch.device("cpu"), slots=4, longest=300, budget=4096)
    base = np.arange(1, 201, dtype=np.int32)
    slots = [cache.take(part) for part in (base, base[:50], np.concatenate([base[:100], base[:100]]), base[1:])]
    assert cache.shared_prefixes(base)[slots].tolist() == [200, 50, 100, 0]
    assert cache.shared_prefixes(base[:70])[slots].tolist() == [70, 50, 70, 0]
    assert cache.shared_prefixes(base[:3])[slots].tolist() == [3, 3, 3, 0]
    cache.release(slots[0])
    assert cache.shared_prefixes(base)[slots].tolist() == [0, 50, 100, 0]


@pytest.mark.parametrize("shared", [0, 100, 250])
def test_a_prompt_may_be_longer_than_everything_before(shared):
    cache = KVCache(GEOMETRY, torch.float32, torch.device("cpu"), slots=4, longest=2000, budget=8192)
    prompt = np.arange(1, 1501, dtype=np.int32)
    slots = [cache.take(prompt[:shared])] if shared else []
    assert cache.shared_prefixes(prompt)[slots].tolist() == [shared] * len(slots)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    model = make_model("qwen3", num_hidden_layers=1)
    return model, CausalLM(save_model(model, tmp_path_factory.mktemp("lm")))


@pytest.fixture(scope="module")
def expected(lm):
    completions: dict[tuple[int, ...], list[int]] = {}

    def get(prompt: np.ndarray, count: int) -> list[int]:
        key = tuple(prompt.tolist())
        if key not in completions or len(completions[key]) < count:
            completions[key] = greedy(lm[0], prompt, max(count, 40), eos=False)
        return completions[key][:count]

    return get


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_requests_all_end_and_equal_generate(lm, expected, data):
    """Any mix of shared prompts, aborts, pauses and updates, in any memory: everything ends, tokens are exact."""
    _, model = lm
    outputs = []
    longest = 128
    engine = Engine(
        model,
        outputs.extend,
        max_seqs=data.draw(st.integers(1, 6), "max_seqs"),
        max_context=longest,
        kv_tokens=128 + data.draw(st.integers(0, 600), "more memory"),
        max_batch_tokens=data.draw(st.sampled_from([16, 40, 2048])),
        prefix_cache=data.draw(st.booleans(), "prefix_cache"),
    )
    weights = {name: tensor.clone() for name, tensor in lm[0].state_dict().items()}
    stem = np.arange(100, 180, dtype=np.int32)
    requests: dict[str, np.ndarray] = {}
    lengths: dict[str, int] = {}
    version = 0
    for number in range(data.draw(st.integers(1, 40), "operations")):
        choice = data.draw(st.sampled_from(["submit"] * 4 + ["step"] * 4 + ["abort", "pause", "resume", "update"]))
        if choice == "submit":
            # Few different prompts, many shared beginnings.
            cut, tail = data.draw(st.sampled_from([1, 10, 31, 32, 60, 80])), data.draw(st.integers(0, 3))
            name = f"r{number}"
            requests[name] = np.concatenate([stem[:cut], np.arange(tail, dtype=np.int32) * 7])
            lengths[name] = data.draw(st.integers(1, 40))
            params = SamplingParams(temperature=0.0, max_tokens=lengths[name], ignore_eos=True)
            session = data.draw(st.sampled_from(["", "a", "b"]))
            engine.submit(Generation(name, requests[name], params, session_id=session))
        elif choice == "step":
            for _ in range(data.draw(st.integers(1, 12))):
                engine.step()
        elif choice == "abort" and requests:
            engine.abort([data.draw(st.sampled_from(sorted(requests)))])
        elif choice == "pause":
            engine.pause(abort=data.draw(st.booleans()))
        elif choice == "resume":
            engine.resume()
        elif choice == "update":
            version += 1
            engine.update_weights(weights, version)
    engine.resume()
    for _ in range(5000):
        if not engine.step():
            break
    stats = engine.refresh_stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert sorted(output.id for output in outputs) == sorted(requests)
    for output in outputs:
        got, prompt = output.token_ids.tolist(), requests[output.id]
        assert got == expected(prompt, len(got))
        full = np.concatenate([prompt, output.token_ids])
        assert np.allclose(output.logprobs, logprobs(lm[0], full, len(prompt)), atol=1e-4)
        assert output.finish_reason == (
            "length" if len(got) == min(lengths[output.id], longest - len(prompt)) else "abort"
        )
        ends = [0, *(end for _, _, end in output.weight_versions)]
        assert [start for _, start, _ in output.weight_versions] == ends[:-1]
        assert ends[-1] == len(got)
        versions = [one for one, _, _ in output.weight_versions]
        assert versions == sorted(set(versions))
    check_engine(engine)


def check_engine(engine: Engine) -> None:
    cache = engine._cache
    assert cache.allocated <= cache.budget
    used = np.flatnonzero(cache.state != FREE)
    assert sorted(owner for pool in cache.pools for owner in pool.owner.tolist() if owner >= 0) == used.tolist()
    assert not (cache.state == ACTIVE).any()


@pytest.mark.parametrize("poisoned", [True, False])
def test_values_that_are_not_finite_do_not_stay_for_the_next_sequence(poisoned: bool) -> None:
    cache = KVCache(GEOMETRY, torch.float32, torch.device("cpu"), slots=2, longest=32, budget=64)
    slot = cache.take(np.arange(1, 10, dtype=np.int32))
    fill(cache, slot)
    pool, row = cache.pools[cache.pool_of[slot]], int(cache.row_of[slot])
    for layer in range(GEOMETRY.layers):
        pool.keys[layer][row, 0, 3] = float("nan")
        pool.values[layer][row, 1, 4] = float("inf")
    cache.release(slot, poisoned=poisoned)
    finite = all(
        bool(torch.isfinite(tensors[layer][row]).all())
        for tensors in (pool.keys, pool.values)
        for layer in range(GEOMETRY.layers)
    )
    # What attention masks out is multiplied by 0, which leaves a NaN.
    assert finite == poisoned
