"""The engine against transformers' own generate and forward, and its own promises about memory and order."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from support.crossed import crossed
from support.engine.tiny_lm import (
    EOS,
    VOCABULARY,
    greedy,
    logprobs,
    make_model,
    make_tokenizer,
    random_prompt,
    save_model,
)
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.engine.weights import read_weights, write_weights
from turnwise.errors import FormatError
from turnwise.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


class Desk:
    """An engine that is stepped by hand, and what came out of it."""

    def __init__(self, directory: Path, **options) -> None:
        self.outputs: list[Output] = []
        self.engine = Engine(CausalLM(directory), self.outputs.extend, tokenizer=make_tokenizer(), **options)
        self._count = 0

    def submit(self, prompt: np.ndarray, params: SamplingParams = GREEDY, **options) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.engine.submit(Generation(name, prompt.astype(np.int32), params, **options))
        return name

    def drain(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if not self.engine.step():
                return
        raise AssertionError(f"work is left after {steps} steps: {self.engine.refresh_stats()}")

    def result(self, name: str) -> Output:
        (output,) = [output for output in self.outputs if output.id == name and output.finish_reason is not None]
        return output

    def run(self, prompt: np.ndarray, params: SamplingParams = GREEDY, **options) -> Output:
        name = self.submit(prompt, params, **options)
        self.drain()
        return self.result(name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directories = {}

    def get(architecture: str, seed: int = 0):
        if (architecture, seed) not in directories:
            model = make_model(architecture, seed)
            directory = save_model(model, tmp_path_factory.mktemp(f"{architecture}-{seed}"))
            directories[architecture, seed] = (model, directory)
        return directories[architecture, seed]

    return get


@pytest.fixture(scope="module")
def greedy_completion(checkpoints):
    """What transformers generates of a prompt with a family's model, computed once."""

    @functools.cache
    def complete(architecture: str, prompt: tuple[int, ...]) -> list[int]:
        return greedy(checkpoints(architecture)[0], np.array(prompt, dtype=np.int32), 24)

    return complete


# Each test draws the same, whichever worker runs it after whichever others.
@pytest.fixture
def rng():
    return np.random.default_rng(7)


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# -- exactness


@pytest.mark.parametrize(
    ("architecture", "options"),
    crossed(
        ["qwen2", "qwen3", "llama", "mistral"],
        [{}, {"max_batch_tokens": 16}, {"kv_tokens": 512}, {"prefix_cache": False}],
    ),
)
def test_greedy_equals_generate(checkpoints, greedy_completion, architecture, options):
    model, directory = checkpoints(architecture)
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, size) for size in (1, 2, 7, 31, 32, 33, 64, 90, 90)]
    prompts.append(np.concatenate([prompts[7][:40], random_prompt(rng, 9)]))
    desk = Desk(directory, max_context=256 if "kv_tokens" in options else None, **options)
    names = [desk.submit(prompt) for prompt in prompts]
    desk.drain()
    for prompt, name in zip(prompts, names, strict=True):
        output = desk.result(name)
        expected = greedy_completion(architecture, tuple(prompt.tolist()))
        assert output.token_ids.tolist() == expected
        assert output.finish_reason == ("stop" if expected[-1] == EOS else "length")
        full = np.concatenate([prompt, output.token_ids])
        assert np.abs(output.logprobs - logprobs(model, full, len(prompt))).max() < 1e-4
    assert len({token for name in names for token in desk.result(name).token_ids.tolist()}) > 20, "degenerate model"


@pytest.mark.parametrize(("architecture", "temperature"), crossed(["qwen2", "qwen3", "llama"], [0.5, 1.0, 1.7]))
def test_sampled_logprobs_are_those_of_a_plain_forward(checkpoints, architecture, temperature, rng):
    model, directory = checkpoints(architecture)
    desk = Desk(directory)
    truncated = SamplingParams(temperature=temperature, top_k=20, top_p=0.9, min_p=0.01, max_tokens=30, ignore_eos=True)
    plain = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True, seed=5)
    prompts = [random_prompt(rng, size) for size in (5, 40)]
    names = [desk.submit(prompt, params) for prompt in prompts for params in (truncated, plain)]
    desk.drain()
    for number, name in enumerate(names):
        output, prompt = desk.result(name), prompts[number // 2]
        full = np.concatenate([prompt, output.token_ids])
        assert np.abs(output.logprobs - logprobs(model, full, len(prompt), temperature)).max() < 1e-4
        assert len(output.token_ids) == 30


def test_a_completion_does_not_depend_on_its_batch_mates(checkpoints, rng):
    _, directory = checkpoints("qwen3")
    prompts = [random_prompt(rng, size) for size in (4, 20, 50, 20)]
    params = [SamplingParams(temperature=1.0, max_tokens=20, seed=seed, ignore_eos=True) for seed in range(4)]
    alone = [Desk(directory).run(prompt, one).token_ids for prompt, one in zip(prompts, params, strict=True)]
    desk = Desk(directory)
    names = [desk.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    desk.engine.step()
    desk.engine.step()
    mates = [desk.submit(random_prompt(rng, 30), SamplingParams(max_tokens=9)) for _ in range(5)]
    desk.drain()
    for name, expected in zip(names, alone, strict=True):
        assert np.array_equal(desk.result(name).token_ids, expected)
    assert all(desk.result(name).finish_reason for name in mates)


def test_seeds_differ_and_no_seed_is_random(checkpoints, rng):
    _, directory = checkpoints("qwen3")
    desk = Desk(directory)
    prompt = random_prompt(rng, 10)
    free = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    one, two = desk.run(prompt, free), desk.run(prompt, free)
    assert not np.array_equal(one.token_ids, two.token_ids)


def test_bfloat16_serves_and_reports_its_own_logprobs(tmp_path, rng):
    model = make_model("qwen3").to(torch.bfloat16)
    desk = Desk(save_model(model, tmp_path))
    assert desk.engine.model.dtype == torch.bfloat16
    prompt = random_prompt(rng, 20)
    output = desk.run(prompt)
    full = np.concatenate([prompt, output.token_ids])
    assert np.abs(output.logprobs - logprobs(model, full, len(prompt))).mean() < 0.1


# -- prefixes


def test_siblings_read_their_prompt_once(checkpoints, rng):
    model, directory = checkpoints("llama")
    desk = Desk(directory)
    prompt = random_prompt(rng, 100)
    params = [SamplingParams(temperature=1.0, max_tokens=12, seed=seed, ignore_eos=True) for seed in range(8)]
    names = [desk.submit(prompt, one) for one in params]
    desk.drain()
    stats = desk.engine.refresh_stats()
    # Each further member runs the last prompt token, whose logits it samples from.
    assert stats.prefilled_tokens == 100 + 7
    assert stats.reused_tokens == 7 * 99
    assert stats.generated_tokens == 8 * 12
    separate = Desk(directory, prefix_cache=False)
    for name, one in zip(names, params, strict=True):
        assert np.array_equal(desk.result(name).token_ids, separate.run(prompt, one).token_ids)
    assert separate.engine.stats.prefilled_tokens == 800
    assert separate.engine.stats.reused_tokens == 0
    assert model is not None


def test_siblings_whose_prompt_is_read_in_pieces(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    desk = Desk(directory, max_batch_tokens=16)
    prompt = random_prompt(rng, 100)
    names = [desk.submit(prompt) for _ in range(4)]
    desk.drain()
    assert desk.engine.stats.prefilled_tokens == 100 + 3
    assert [desk.result(name).token_ids.tolist() for name in names] == [greedy(model, prompt, 24)] * 4


def test_a_common_beginning_of_different_prompts_is_read_once(checkpoints, rng):
    model, directory = checkpoints("qwen3")
    desk = Desk(directory)
    system = random_prompt(rng, 60)
    prompts = [np.concatenate([system, random_prompt(rng, 10)]) for _ in range(5)]
    names = [desk.submit(prompt) for prompt in prompts]
    desk.drain()
    assert desk.engine.stats.prefilled_tokens == 60 + 5 * 10
    for prompt, name in zip(prompts, names, strict=True):
        assert desk.result(name).token_ids.tolist() == greedy(model, prompt, 24)


def test_turns_of_a_session_prefill_only_new_tokens(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    desk = Desk(directory)
    ids = random_prompt(rng, 50)
    read = 0
    for turn in range(4):
        prefilled_before = desk.engine.stats.prefilled_tokens
        output = desk.run(ids, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True), session_id="s")
        read = desk.engine.stats.prefilled_tokens - prefilled_before
        assert output.token_ids.tolist() == greedy(model, ids, 10, eos=False)
        # The id sampled last has no keys and values yet: it is read with the 7 new ones.
        assert read == (50 if turn == 0 else 8)
        assert output.cached_tokens == len(ids) - read
        ids = np.concatenate([ids, output.token_ids, random_prompt(rng, 7)])


def test_two_branches_of_a_session_both_keep_their_prefix(checkpoints, rng):
    model, directory = checkpoints("llama")
    desk = Desk(directory)
    stem = random_prompt(rng, 40)
    first = np.concatenate([stem, random_prompt(rng, 20)])
    second = np.concatenate([stem, random_prompt(rng, 20)])
    desk.run(first, session_id="s")
    desk.run(second, session_id="s")
    prefilled_before = desk.engine.stats.prefilled_tokens
    repeated = desk.run(np.concatenate([first, random_prompt(rng, 5)]), session_id="s")
    assert desk.engine.stats.prefilled_tokens - prefilled_before == 5
    assert repeated.cached_tokens == 60
    assert model is not None


def test_retained_prefixes_make_room_least_recently_used_first(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    desk = Desk(directory, kv_tokens=512, max_context=128)
    prompts = [random_prompt(rng, 60) for _ in range(12)]
    short = SamplingParams(temperature=0.0, max_tokens=3)
    for prompt in prompts:
        desk.run(prompt, short)
    stats = desk.engine.refresh_stats()
    assert stats.kv_tokens <= 512
    assert 0 < stats.retained < 12
    prefilled_before = stats.prefilled_tokens
    desk.run(prompts[-1], short)
    assert desk.engine.stats.prefilled_tokens - prefilled_before == 1
    prefilled_before = desk.engine.stats.prefilled_tokens
    assert desk.run(prompts[0], short).token_ids.tolist() == greedy(model, prompts[0], 3)
    assert desk.engine.stats.prefilled_tokens - prefilled_before == 60


# -- memory


def test_too_many_for_memory_wait_and_all_end(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    desk = Desk(directory, kv_tokens=256, max_context=192)
    prompts = [random_prompt(rng, int(size)) for size in rng.integers(10, 60, 8)]
    names = [desk.submit(prompt, SamplingParams(temperature=0.0, max_tokens=60)) for prompt in prompts]
    peak = 0
    while desk.engine.step():
        peak = max(peak, desk.engine.refresh_stats().kv_tokens)
    assert peak <= 256
    assert desk.engine.stats.preemptions > 0
    for prompt, name in zip(prompts, names, strict=True):
        assert desk.result(name).token_ids.tolist() == greedy(model, prompt, 60)


def test_kv_tokens_below_one_sequence_are_refused(checkpoints):
    _, directory = checkpoints("qwen2")
    with pytest.raises(ValueError, match=r"kv_tokens is 100.*raise kv_tokens to at least 512"):
        Desk(directory, kv_tokens=100)


def test_max_seqs_bounds_running_sequences(checkpoints, rng):
    _, directory = checkpoints("qwen2")
    desk = Desk(directory, max_seqs=3)
    names = [desk.submit(random_prompt(rng, 5), SamplingParams(max_tokens=4)) for _ in range(10)]
    while desk.engine.step():
        assert desk.engine.refresh_stats().running <= 3
    assert all(desk.result(name).finish_reason in ("stop", "length") for name in names)


def test_a_completion_ends_at_the_context_length(checkpoints, rng):
    _, directory = checkpoints("qwen2")
    desk = Desk(directory, max_context=64)
    output = desk.run(random_prompt(rng, 50), SamplingParams(ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (14, "length")


# -- ends


def test_stop_ids_end_a_completion_and_are_its_last_id(checkpoints, rng):
    model, directory = checkpoints("qwen3")
    prompt = random_prompt(rng, 12)
    full = greedy(model, prompt, 24)
    stop = full[10]
    cut = full[: full.index(stop) + 1]
    output = Desk(directory).run(
        prompt, SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(1, stop, 2, 3, 4))
    )
    assert output.token_ids.tolist() == cut
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_the_models_own_end_stops_unless_ignored(tmp_path, rng):
    model = make_model("qwen2")
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 30
    desk = Desk(save_model(model, tmp_path))
    prompt = next(
        prompt for prompt in (random_prompt(rng, 8) for _ in range(200)) if EOS in greedy(model, prompt, 20)[1:]
    )
    output = desk.run(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    assert output.token_ids.tolist() == greedy(model, prompt, 20)
    assert (output.token_ids[-1], output.finish_reason, output.stop_reason) == (EOS, "stop", None)
    on = desk.run(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert on.token_ids.tolist() == greedy(model, prompt, 20, eos=False)


def test_stop_strings_end_with_the_completing_id(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    tokenizer = make_tokenizer()
    prompt = random_prompt(rng, 12)
    full = greedy(model, prompt, 24, eos=False)
    text = tokenizer.decode(full[:15], skip_special_tokens=False)
    piece = next(
        text[at : at + 2] for at in range(4, len(text) - 2) if "\N{REPLACEMENT CHARACTER}" not in text[at : at + 2]
    )
    expected = next(end for end in range(1, 25) if piece in tokenizer.decode(full[:end], skip_special_tokens=False))
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=("never said", piece), ignore_eos=True)
    output = Desk(directory).run(prompt, params)
    assert output.token_ids.tolist() == full[:expected]
    assert (output.finish_reason, output.stop_reason) == ("stop", piece)


def test_a_stop_string_may_begin_in_a_completion_that_goes_on(checkpoints):
    model, directory = checkpoints("qwen2")
    tokenizer = make_tokenizer()
    for seed in range(50):
        prompt = random_prompt(np.random.default_rng(seed), 12)
        full = greedy(model, prompt, 8, eos=False)
        characters = [tokenizer.decode([token], skip_special_tokens=False) for token in full]
        if all(len(one) == 1 and one.isascii() for one in characters[2:5]):
            break
    stop = "".join(characters[2:5])
    params = SamplingParams(temperature=0.0, max_tokens=4, stop=(stop,), ignore_eos=True)
    desk = Desk(directory)
    so_far = np.concatenate([prompt, np.asarray(full[:4], dtype=np.int32)])
    assert desk.run(so_far, params, continued=4).token_ids.tolist() == full[4:5]
    assert len(desk.run(so_far, params).token_ids) == 4


# -- interruptions


def test_abort_keeps_sampled_ids(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    desk = Desk(directory, max_seqs=2)
    prompts = [random_prompt(rng, 10) for _ in range(3)]
    names = [desk.submit(prompt, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)) for prompt in prompts]
    for _ in range(6):
        desk.engine.step()
    assert desk.engine.abort([names[0], names[2], "unknown"]) == 2
    running, waiting = desk.result(names[0]), desk.result(names[2])
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert running.token_ids.tolist() == greedy(model, prompts[0], 6, eos=False)
    assert running.weight_versions == ((0, 0, 6),)
    assert len(waiting.token_ids) == 0
    assert waiting.weight_versions == ()
    desk.drain()
    assert desk.result(names[1]).token_ids.tolist() == greedy(model, prompts[1], 50, eos=False)
    # What was aborted goes on from where it was, at the cost of one token.
    prefilled_before = desk.engine.stats.prefilled_tokens
    rest = desk.run(
        np.concatenate([prompts[0], running.token_ids]), SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True)
    )
    assert desk.engine.stats.prefilled_tokens - prefilled_before == 1
    assert [*running.token_ids.tolist(), *rest.token_ids.tolist()] == greedy(model, prompts[0], 50, eos=False)


def test_an_aborted_sample_goes_on_as_if_nothing_had_happened(checkpoints, rng):
    _, directory = checkpoints("llama")
    prompt = random_prompt(rng, 10)
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=11, ignore_eos=True)
    uninterrupted = Desk(directory).run(prompt, params)
    desk = Desk(directory)
    name = desk.submit(prompt, params)
    for _ in range(9):
        desk.engine.step()
    desk.engine.abort(None)
    part = desk.result(name)
    rest = SamplingParams(temperature=1.0, max_tokens=21, seed=11, ignore_eos=True)
    assert len(part.token_ids) == 9
    resumed = desk.run(np.concatenate([prompt, part.token_ids]), rest)
    assert [*part.token_ids, *resumed.token_ids] == uninterrupted.token_ids.tolist()


def test_pause_keeps_and_resume_goes_on(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    desk = Desk(directory)
    prompt = random_prompt(rng, 10)
    name = desk.submit(prompt)
    desk.engine.step()
    assert desk.engine.pause(abort=False) == 0
    assert not desk.engine.step()
    late = desk.submit(prompt)
    assert not desk.engine.step()
    desk.engine.resume()
    desk.drain()
    assert desk.result(name).token_ids.tolist() == desk.result(late).token_ids.tolist() == greedy(model, prompt, 24)


def test_pause_with_abort_answers_at_once(checkpoints, rng):
    _, directory = checkpoints("qwen2")
    desk = Desk(directory)
    name = desk.submit(random_prompt(rng, 10))
    desk.engine.step()
    assert desk.engine.pause(abort=True) == 1
    assert desk.result(name).finish_reason == "abort"
    assert len(desk.result(name).token_ids) == 1


# -- weights


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_greedy_equals_generate_after_an_update_with_a_cached_prefix(checkpoints, architecture, rng):
    _, directory = checkpoints(architecture)
    new, _ = checkpoints(architecture, 1)
    desk = Desk(directory)
    prompt = random_prompt(rng, 60)
    first = desk.run(prompt, session_id="s")
    assert desk.engine.refresh_stats().retained == 1
    desk.engine.update_weights(state(new), 5)
    assert desk.engine.refresh_stats().retained == 0
    longer = np.concatenate([prompt, first.token_ids, random_prompt(rng, 5)])
    for one in (prompt, longer):
        output = desk.run(one, session_id="s")
        assert output.token_ids.tolist() == greedy(new, one, 24)
        assert output.weight_versions == ((5, 0, len(output.token_ids)),)
        full = np.concatenate([one, output.token_ids])
        assert np.abs(output.logprobs - logprobs(new, full, len(one))).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_weights_are_served_without_a_copy_where_the_type_is_the_same(checkpoints, dtype, tmp_path, rng):
    model, directory = checkpoints("qwen2")
    new, _ = checkpoints("qwen2", 1)
    desk = Desk(directory)
    tensors = read_weights(
        write_weights([(name, tensor.to(getattr(torch, dtype))) for name, tensor in state(new).items()], tmp_path, 1)
    )
    desk.engine.update_weights(tensors, 1)
    served = dict(desk.engine.model._model.named_parameters())
    shared = [name for name, tensor in tensors.items() if tensor.data_ptr() == served[name].data_ptr()]
    assert shared == (list(tensors) if dtype == "float32" else [])
    prompt = random_prompt(rng, 30)
    if dtype == "float32":
        assert desk.run(prompt).token_ids.tolist() == greedy(new, prompt, 24)
    # A version that does not fit leaves them.
    copies = {name: tensor.clone() for name, tensor in served.items()}
    with pytest.raises(FormatError, match="has shape"):
        desk.engine.update_weights({**state(model), "model.norm.weight": torch.zeros(3)}, 2)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in served.items())


@pytest.mark.parametrize("names", ["embedding", "head", "both"])
def test_tied_embeddings_are_updated_under_any_of_their_names(checkpoints, names, rng):
    _, directory = checkpoints("qwen3")
    new, _ = checkpoints("qwen3", 1)
    tensors = state(new)
    if names == "embedding":
        del tensors["lm_head.weight"]
    elif names == "head":
        del tensors["model.embed_tokens.weight"]
    desk = Desk(directory)
    desk.engine.update_weights(tensors, 1)
    prompt = random_prompt(rng, 30)
    assert desk.run(prompt).token_ids.tolist() == greedy(new, prompt, 24)


def test_an_update_in_flight_is_seen_in_the_spans_and_in_the_tokens(checkpoints, rng):
    old, directory = checkpoints("qwen3")
    new, _ = checkpoints("qwen3", 1)
    desk = Desk(directory, max_seqs=4)
    prompts = [random_prompt(rng, size) for size in (10, 40, 40, 70)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    names = [desk.submit(prompt, params) for prompt in prompts]
    for _ in range(8):
        desk.engine.step()
    desk.engine.update_weights(state(new), 3)
    late = desk.submit(prompts[0], params)
    desk.drain()
    for prompt, name in zip(prompts, names, strict=True):
        output = desk.result(name)
        (first, zero, middle), (second, start, end) = output.weight_versions
        assert (first, zero, second, start, end) == (0, 0, 3, middle, 20)
        old_ids = output.token_ids[:middle]
        assert old_ids.tolist() == greedy(old, prompt, middle, eos=False)
        so_far = np.concatenate([prompt, old_ids])
        assert output.token_ids[middle:].tolist() == greedy(new, so_far, 20 - middle, eos=False)
        full = np.concatenate([prompt, output.token_ids])
        assert np.abs(output.logprobs[:middle] - logprobs(old, full[: len(so_far)], len(prompt))).max() < 1e-4
        assert np.abs(output.logprobs[middle:] - logprobs(new, full, len(so_far))).max() < 1e-4
    assert desk.result(late).weight_versions == ((3, 0, 20),)


def test_requests_waiting_during_an_update_are_sampled_by_the_new_version(checkpoints, rng):
    _, directory = checkpoints("qwen3")
    new, _ = checkpoints("qwen3", 1)
    desk = Desk(directory, max_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    running, waiting = (desk.submit(random_prompt(rng, size), params) for size in (10, 5))
    for _ in range(4):
        desk.engine.step()
    desk.engine.update_weights(state(new), 3)
    desk.drain()
    (first, _, middle), (second, start, end) = desk.result(running).weight_versions
    assert (first, second, start, end) == (0, 3, middle, 12)
    assert desk.result(waiting).weight_versions == ((3, 0, 12),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing 'model.norm.weight'"),
        (lambda t: t.update({"extra": torch.zeros(1)}), r"unknown name 'extra'"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\), not \(64,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}), r"has dtype torch.int32"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(VOCABULARY, 64)}), r"tied to .*values differ"),
    ],
)
def test_a_bad_update_changes_nothing(checkpoints, change, message, rng):
    old, directory = checkpoints("qwen3")
    new, _ = checkpoints("qwen3", 1)
    tensors = state(new)
    change(tensors)
    desk = Desk(directory)
    prompt = random_prompt(rng, 30)
    desk.run(prompt)
    with pytest.raises(FormatError, match=message):
        desk.engine.update_weights(tensors, 9)
    assert desk.engine.stats.weight_version == 0
    assert desk.engine.refresh_stats().retained == 1
    assert desk.run(prompt).token_ids.tolist() == greedy(old, prompt, 24)


def test_diverged_weights_are_an_error_and_leave_nothing_behind(checkpoints, rng):
    model, directory = checkpoints("qwen2")
    desk = Desk(directory)
    prompt = random_prompt(rng, 30)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in state(model).items()}
    desk.engine.update_weights(broken, 1)
    output = desk.run(prompt)
    assert (output.finish_reason, len(output.token_ids)) == ("error", 0)
    desk.engine.update_weights(state(model), 2)
    names = [desk.submit(prompt[:size]) for size in (3, 9, 30)]
    desk.drain()
    for size, name in zip((3, 9, 30), names, strict=True):
        assert desk.result(name).token_ids.tolist() == greedy(model, prompt[:size], 24)


# -- streaming


def test_streamed_pieces_are_the_completion(checkpoints, rng):
    _, directory = checkpoints("qwen2")
    desk = Desk(directory)
    prompt = random_prompt(rng, 10)
    output = desk.run(prompt)
    desk.outputs.clear()
    name = desk.submit(prompt, stream=True)
    desk.drain()
    pieces = [output for output in desk.outputs if output.id == name]
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == output.token_ids.tolist()
    assert np.allclose(np.concatenate([piece.logprobs for piece in pieces]), output.logprobs, atol=1e-5)
    assert pieces[-1].finish_reason == output.finish_reason


@pytest.mark.parametrize(("interval", "sizes"), [(5, [1, 5, 5, 5, 5, 3]), (100, [1, 23])])
def test_streamed_pieces_have_at_least_as_many_ids_as_asked(checkpoints, rng, interval, sizes):
    _, directory = checkpoints("qwen2")
    prompt = random_prompt(rng, 10)
    desk = Desk(directory)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    name = desk.submit(prompt, params, stream=True, stream_interval=interval)
    desk.drain()
    pieces = [output for output in desk.outputs if output.id == name]
    assert [len(piece.token_ids) for piece in pieces] == sizes
    ids = np.concatenate([piece.token_ids for piece in pieces]).tolist()
    assert ids == desk.run(prompt, params).token_ids.tolist()
    assert [piece.weight_versions[-1][2] for piece in pieces] == np.cumsum(sizes).tolist()


# -- scores of given ids


@pytest.mark.parametrize(
    ("architecture", "options"), crossed(["qwen3", "mistral"], [{}, {"max_batch_tokens": 16}, {"kv_tokens": 512}])
)
def test_scores_equal_a_plain_forward_whatever_else_runs(checkpoints, rng, architecture, options):
    model, directory = checkpoints(architecture)
    desk = Desk(directory, **options)
    shared = random_prompt(rng, 60)
    # The same prompt was read before, and is read by others meanwhile: it is read again all the same.
    desk.run(shared)
    prompts = [shared, np.concatenate([shared, random_prompt(rng, 9)]), *(random_prompt(rng, n) for n in (1, 2, 33))]
    names = [desk.submit(prompt, SamplingParams(temperature=0.7, max_tokens=3), scored=True) for prompt in prompts]
    unscored = [desk.submit(prompt) for prompt in prompts]
    desk.drain()
    for prompt, name, other in zip(prompts, names, unscored, strict=True):
        output = desk.result(name)
        assert output.prompt_logprobs.shape == (len(prompt) - 1,)
        assert np.abs(output.prompt_logprobs - logprobs(model, prompt, 1)).max(initial=0.0) < 1e-4
        assert desk.result(other).prompt_logprobs is None
        assert desk.result(other).token_ids.tolist() == greedy(model, prompt, 24)


def test_logits_of_scored_prompts_are_held_in_pieces(checkpoints, rng, monkeypatch):
    model, directory = checkpoints("qwen2")
    monkeypatch.setattr("turnwise.engine.engine._SCORED_LOGITS", 10 * VOCABULARY)
    desk = Desk(directory)
    prompts = [random_prompt(rng, size) for size in (47, 12)]
    sizes = []
    forward = desk.engine.model.forward

    def watched(ids, positions, plan, keep, **more):
        sizes.append(len(keep))
        return forward(ids, positions, plan, keep, **more)

    monkeypatch.setattr(desk.engine.model, "forward", watched)
    names = [desk.submit(prompt, GREEDY, scored=True) for prompt in prompts]
    desk.drain()
    assert max(sizes) <= 10 + len(prompts)
    for prompt, name in zip(prompts, names, strict=True):
        assert np.abs(desk.result(name).prompt_logprobs - logprobs(model, prompt, 1)).max() < 1e-4


def test_scores_after_an_update_are_those_of_the_new_weights_and_an_abort_has_none(checkpoints, rng):
    _, directory = checkpoints("qwen2")
    other, _ = checkpoints("qwen2", 1)
    desk = Desk(directory, max_batch_tokens=16)
    prompt = random_prompt(rng, 50)
    name = desk.submit(prompt, GREEDY, scored=True)
    desk.engine.step()
    desk.engine.update_weights(state(other), 1)
    desk.drain()
    assert np.abs(desk.result(name).prompt_logprobs - logprobs(other, prompt, 1)).max() < 1e-4
    name = desk.submit(prompt, GREEDY, scored=True)
    desk.engine.step()
    desk.engine.abort(None)
    assert desk.result(name).prompt_logprobs is None
