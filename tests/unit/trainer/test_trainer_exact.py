"""Exact numerics: log-probabilities that the engine reports are those of the trainer's forward pass, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.engine.families import save_family
from support.engine.tiny_lm import make_model, save_model
from support.property_tests import examples
from support.trainer.architectures import save_tiny
from support.trainer.ranks import WarmRanks, pair_of_ranks
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.engine.numerics.exact import digest_logits
from turnwise.engine.numerics.self_check import capability
from turnwise.errors import InferenceError, TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import LoRAConfig, PolicyConfig
from turnwise.trainer.core import TrainRow, consistently_routed
from turnwise.trainer.learn.fsdp_learner import FSDPLearner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.learn.rank_processes import Sharding
from turnwise.trainer.model.checks import check_exact
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trajectory import TrainSample
from turnwise.types import SamplingParams, last_rows

VOCABULARY = 60
FAMILIES = ("qwen3", "llama", "gemma3_text", "qwen3_moe")
TEMPERATURES = (1.0, 0.7, 0.0)


@cache
def model_of(family: str) -> Path:
    """Return the directory of a tiny model of a family."""
    folder = Path(mkdtemp()) / family
    if family == "gemma3_text":
        # A window that is shorter than most sequences.
        save_tiny(family, folder, vocab_size=VOCABULARY, max_position_embeddings=256, sliding_window=12)
    elif family == "qwen3_moe":
        save_family(family, folder, vocab_size=VOCABULARY, max_position_embeddings=256)
    else:
        save_model(make_model(family, max_position_embeddings=1024), folder)
    return folder


@cache
def loaded(family: str) -> tuple[CausalLM, Policy, dict[str, torch.Tensor]]:
    """Return a family's model in the engine and in the trainer, both exact, and its first weights."""
    directory = model_of(family)
    engine_side = CausalLM(directory, exact=True, routed_experts=family == "qwen3_moe")
    policy = load_model(directory, exact=True)
    return engine_side, policy, {name: weight.clone() for name, weight in policy.model.state_dict().items()}


@dataclass
class Sampler:
    """An engine stepped by hand, and the rows that its outputs make.

    Attributes:
        rows: By weight version: rows whose trained tokens that version sampled.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)
    requests: dict[str, Generation] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        model, policy, weights = loaded(self.family)
        policy.model.load_state_dict(weights)
        self.engine = Engine(model, self._take, **self.options)
        self.update(policy.named_weights(), 0)

    def _take(self, outputs: list[Output]) -> None:
        self.outputs |= {output.id: output for output in outputs}

    def submit(self, prompt: np.ndarray, tokens: int, temperature: float) -> str:
        name = str(len(self.requests))
        params = SamplingParams(
            temperature=temperature, max_tokens=tokens, seed=len(name), ignore_eos=True, routes_from=0
        )
        self.requests[name] = Generation(id=name, prompt=prompt.astype(np.int32), params=params)
        self.engine.submit(self.requests[name])
        return name

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def drain(self) -> None:
        while self.engine.step():
            pass

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> None:
        self.version = self.version + 1 if version is None else version
        self.engine.update_weights({name: tensor.clone() for name, tensor in weights}, self.version)

    def play(self, actions: list[tuple[Any, ...]]) -> Iterator[str]:
        """Do what happens to an engine, updates aside, and yield the kind of each action."""
        draw = np.random.default_rng(len(actions))
        common = draw.integers(3, VOCABULARY, 40)
        for kind, *numbers in actions:
            if kind == "submit":
                shared_tokens, more, budget, temperature = numbers
                prompt = np.concatenate([common[:shared_tokens], draw.integers(3, VOCABULARY, more)])
                self.submit(prompt, budget, TEMPERATURES[temperature])
            elif kind == "continue" and self.outputs:
                name = list(self.outputs)[numbers[0] % len(self.outputs)]
                ids = np.concatenate([self.requests[name].prompt, self.outputs[name].token_ids])
                if len(ids) < 200:
                    self.submit(np.concatenate([ids, draw.integers(3, VOCABULARY, numbers[1])]), numbers[2], 1.0)
            elif kind == "steps":
                self.steps(numbers[0])
            elif kind == "abort":
                self.engine.abort(None)
            elif kind == "drain":
                self.drain()
            yield kind

    def rows(self, version: int) -> list[TrainRow]:
        """Return a row for each completion that a version sampled some of."""
        rows = []
        for name, output in self.outputs.items():
            prompt = self.requests[name].prompt
            ids = np.concatenate([prompt, output.token_ids])
            mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
            logprobs[len(prompt) :] = output.logprobs
            zeros, versions = np.zeros(len(ids), np.int32), np.full(len(ids), -1, np.int32)
            for number, start, end in output.weight_versions:
                mask[len(prompt) + start : len(prompt) + end] = number == version
                versions[len(prompt) + start : len(prompt) + end] = number
            if mask.any():
                assert (output.routes is None) == (self.family != "qwen3_moe")
                temperature = self.requests[name].params.temperature or 1.0
                routes = None if output.routes is None else last_rows(output.routes, len(ids))
                sample = TrainSample(ids, mask, logprobs, versions, zeros, name, "g", 0, (), routes)
                rows.append(TrainRow(consistently_routed(sample), temperature=temperature))
        return rows


def differing(
    policy: Policy, rows: list[TrainRow], tokens: int, *, shared: bool, outputs: dict[str, Output] | None = None
) -> int:
    """Return how many log-probabilities, and digests of outputs, the trainer's forward pass computes otherwise."""
    count = 0
    for batch in pack(rows, max(tokens, *(len(row.sample.input_ids) for row in rows), 1), share_prefixes=shared):
        with torch.no_grad():
            states = policy.states(batch)
            count += int((policy.score(batch, states).logprobs != batch.rollout_logprobs).sum())
            if outputs is not None:
                count += differing_digests(policy, states, [rows[row].sample for row in batch.rows], outputs)
    return count


def differing_digests(
    policy: Policy, states: torch.Tensor, samples: list[TrainSample], outputs: dict[str, Output]
) -> int:
    """Return how many recorded digests of logits are others by the states of the samples' trained tokens."""
    recorded = [
        {position: digest for position, _, digest in (pair.partition(":") for pair in digests.split())}
        for digests in (outputs[sample.trajectory_id].digests or "" for sample in samples)
    ]
    tokens = [
        digests.get(str(position))
        for sample, digests in zip(samples, recorded, strict=True)
        for position in np.flatnonzero(sample.loss_mask).tolist()
    ]
    digested = [token for token, digest in enumerate(tokens) if digest is not None]
    logits = policy.logits(states[digested])
    return sum(digest_logits(row) != tokens[token] for token, row in zip(digested, logits, strict=True))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def actions() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Return what happens to an engine: requests that share prefixes, steps, aborts, updates, continuations."""
    prompt = st.tuples(st.just("submit"), st.integers(0, 40), st.integers(1, 50), st.integers(1, 25), st.integers(0, 2))
    follow = st.tuples(st.just("continue"), st.integers(0, 20), st.integers(1, 9), st.integers(1, 12))
    others = st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 9)), st.just(("abort",)), st.just(("update",)), st.just(("drain",))
    )
    return st.lists(st.one_of(prompt, prompt, follow, others), min_size=4, max_size=14)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    actions=actions(), chunk=st.sampled_from([16, 33, 2048]), threads=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    tokens=st.sampled_from([1, 100, 4096]), shared=st.booleans(),
)  # fmt: skip
def test_recorded_logprobs_equal_the_trainers_forward_bit_for_bit(
    family: str, actions: list[tuple[Any, ...]], chunk: int, threads: tuple[int, int], tokens: int, shared: bool
) -> None:
    torch.set_num_threads(threads[0])
    sampler, policy = Sampler(family, {"max_batch_tokens": chunk}), loaded(family)[1]
    policies = {0: {name: weight.clone() for name, weight in policy.model.state_dict().items()}}
    for kind in sampler.play(actions):
        if kind == "update":
            with torch.no_grad():
                for name, parameter in policy.model.named_parameters():
                    # Routers choose other experts for many tokens.
                    parameter.add_(
                        torch.randn_like(parameter), alpha=0.05 if name.endswith("mlp.gate.weight") else 1e-3
                    )
            sampler.update(policy.named_weights())
            policies[sampler.version] = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    sampler.drain()
    torch.set_num_threads(threads[1])
    for version, weights in policies.items():
        policy.model.load_state_dict(weights)
        if rows := sampler.rows(version):
            assert differing(policy, rows, tokens, shared=shared, outputs=sampler.outputs) == 0


@pytest.fixture(scope="module")
def ranks() -> Iterator[WarmRanks]:
    with pair_of_ranks() as pair:
        yield pair


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_logprobs_equal_those_of_two_ranks_bit_for_bit(family: str, together: int, ranks: WarmRanks) -> None:
    config = PolicyConfig.model_validate({"model": {"path": model_of(family)}, "inference": {"engine": "exact"}})
    learner = FSDPLearner(ranks, config, 100, sharding=Sharding(2, sequence_parallel=together))

    @settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
    @given(actions=actions(), tokens=st.sampled_from([1, 100, 4096]))
    def check(actions: list[tuple[Any, ...]], tokens: int) -> None:
        sampler = Sampler(family, {"max_batch_tokens": 33})
        sampler.update(learner.export_weights(), 0)
        for kind in chain(sampler.play(actions), ["update"]):
            if kind != "update":
                continue
            sampler.drain()
            if rows := sampler.rows(sampler.version):
                longest = max(len(row.sample.input_ids) for row in rows)
                batches = pack(rows, max(tokens, longest), share_prefixes=tokens > 1)
                scored = learner.logprobs(batches)
                assert all(
                    torch.equal(logprobs, batch.rollout_logprobs)
                    for logprobs, batch in zip(scored, batches, strict=True)
                )
                learner.forward_backward(batches, CrossEntropyObjective(), 10.0)
                learner.optim_step()
            sampler.update(learner.export_weights())

    check()


def test_paths_of_several_key_blocks_are_exact() -> None:
    sampler, draw = Sampler("llama", {"max_batch_tokens": 300}), np.random.default_rng(0)
    for length in (505, 511, 600, 12):
        sampler.submit(draw.integers(3, VOCABULARY, length), 20, 1.0)
    sampler.drain()
    policy = loaded("llama")[1]
    assert differing(policy, sampler.rows(0), 4096, shared=True, outputs=sampler.outputs) == 0
    assert any(output.digests for output in sampler.outputs.values())


def test_a_changed_bit_of_one_weight_changes_logprobs() -> None:
    sampler, draw = Sampler("qwen3"), np.random.default_rng(0)
    sampler.submit(draw.integers(3, VOCABULARY, 30), 30, 1.0)
    sampler.drain()
    policy = load_model(model_of("qwen3"), exact=True)
    assert differing(policy, sampler.rows(0), 4096, shared=True) == 0
    with torch.no_grad():
        weight = policy.model.model.layers[0].mlp.down_proj.weight
        weight.view(torch.int32)[0, 0] ^= 1 << 12
    assert differing(policy, sampler.rows(0), 4096, shared=True) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_default_to_rounding_and_of_checkpointing_to_the_bit(family: str) -> None:
    sampler, draw = Sampler(family), np.random.default_rng(0)
    common = draw.integers(3, VOCABULARY, 10)
    for length in (10, 10, 15):
        sampler.submit(np.concatenate([common, draw.integers(3, VOCABULARY, length)]), 20, 1.0)
    sampler.drain()
    gradients = []
    exact = {"exact": True}
    for options in (
        {},
        exact,
        {**exact, "gradient_checkpointing": True},
        {**exact, "gradient_checkpointing": "matmuls"},
    ):
        policy = load_model(model_of(family), **options)
        with policy.computing():
            for batch in pack(sampler.rows(0), 4096, share_prefixes=True):
                scores = policy.forward(batch, entropy=True)
                (scores.logprobs.sum() + scores.entropy.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in policy.model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max())), name
        assert all(torch.equal(others[name], gradients[1][name]) for others in gradients[2:]), name


@pytest.mark.parametrize(
    ("family", "settings_", "operation"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2}, "values of another size than keys"),
        ("olmoe", {}, "the products of its experts"),
        ("gpt_neox", {"hidden_act": "gelu"}, "the function gelu"),
    ],
)
def test_an_architecture_without_exact_form_is_refused_by_operation(
    tmp_path: Path, family: str, settings_: dict[str, Any], operation: str
) -> None:
    save_family(family, tmp_path, **settings_)
    with pytest.raises(InferenceError, match=operation):
        CausalLM(tmp_path, exact=True)
    with pytest.raises(TrainError, match=operation):
        load_model(tmp_path, exact=True)


def test_bfloat16_and_adapters_are_refused_by_operation() -> None:
    with pytest.raises(InferenceError, match="its weights are bfloat16"):
        CausalLM(model_of("qwen3"), dtype="bfloat16", exact=True)
    with pytest.raises(TrainError, match=r"products in bfloat16 \(compute_dtype\)"):
        load_model(model_of("qwen3"), compute_dtype="bfloat16", exact=True)
    with pytest.raises(TrainError, match="an adapter's product is added after"):
        load_model(model_of("qwen3"), lora=LoRAConfig(rank=2), exact=True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: setattr(layer.mlp, "up_proj", plain(layer.mlp.up_proj)), "layers.1.mlp.up_proj"),
        (lambda layer: setattr(layer.mlp, "act_fn", torch.nn.SiLU()), "the function silu"),
    ],
)
def test_the_self_check_names_the_first_inexact_operation(change: Callable[[Any], None], name: str) -> None:
    policy = load_model(model_of("qwen3"), exact=True)
    change(policy.model.model.layers[1])
    with pytest.raises(TrainError, match=name):
        check_exact(policy.model)


def plain(layer: torch.nn.Linear) -> torch.nn.Linear:
    copy = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
    copy.weight = layer.weight
    return copy


def test_the_capability_names_torch_and_is_one_string() -> None:
    assert torch.__version__ in capability()
    assert capability() == capability()
