"""Several adapters on one server: each samples as if it had a server of its own, and leaves the others as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from support.engine.tiny_lm import make_model, make_tokenizer, random_prompt, save_model
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.engine.weights import write_weights
from turnwise.errors import FormatError, RequestRefused
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.model.core import AdapterInfo, ModelInfo, WeightManifest
from turnwise.types import SamplingParams, TokenPrompt

# Of different ranks and targets, one matrix in both.
SOLVER = AdapterInfo(2, 6.0, ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"), "solver")
CRITIC = AdapterInfo(5, 5.0, ("model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"), "critic")
PARAMS = [SamplingParams(temperature=1.0, max_tokens=20, seed=seed, ignore_eos=True) for seed in range(6)]
LONG = SamplingParams(temperature=1.0, max_tokens=30, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3"), tmp_path_factory.mktemp("base"))


def factors(info: AdapterInfo, seed: int, architecture: str = "qwen3") -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    model, tensors = make_model(architecture), {}
    for target in info.targets:
        out, into = model.get_submodule(target).weight.shape
        tensors[f"{target}.lora_A.weight"] = 0.3 * torch.randn(info.rank, into, generator=draw)
        tensors[f"{target}.lora_B.weight"] = 0.3 * torch.randn(out, info.rank, generator=draw)
    return tensors


class Desk:
    """An engine that is stepped by hand."""

    def __init__(self, directory: Path, **options: object) -> None:
        self.outputs: dict[str, Output] = {}
        self.engine = Engine(CausalLM(directory), self._take, tokenizer=make_tokenizer(), **options)  # type: ignore[arg-type]

    def _take(self, outputs: list[Output]) -> None:
        self.outputs |= {output.id: output for output in outputs if output.finish_reason is not None}

    def submit(self, name: str, prompt: np.ndarray, params: SamplingParams, adapter: str | None = None) -> None:
        number = 0 if adapter is None else self.engine.model.adapters.numbers[adapter]
        self.engine.submit(Generation(name, prompt.astype(np.int32), params, session_id=name, adapter=number))

    def drain(self) -> dict[str, Output]:
        for _ in range(2000):
            if not self.engine.step():
                return self.outputs
        raise AssertionError("work is left")


def alone(directory: Path, tensors: Mapping[str, torch.Tensor] | None, info: AdapterInfo) -> Desk:
    """Return an engine for one adapter, merged into its weights as on a server of its own."""
    desk = Desk(directory)
    if tensors is not None:
        desk.engine.update_weights(tensors, 1, replace(info, name=None))
    return desk


def same(one: Output, other: Output) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert np.abs(one.logprobs - other.logprobs).max() < 1e-4


@pytest.mark.parametrize("options", [{}, pytest.param({"max_batch_tokens": 16, "max_seqs": 5}, marks=pytest.mark.long)])
def test_a_batch_of_two_adapters_and_the_model_equals_three_servers(directory: Path, options: dict[str, int]) -> None:
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, size) for size in (3, 20, 41, 41, 9, 60)]
    adapters = {"solver": (SOLVER, factors(SOLVER, 1)), "critic": (CRITIC, factors(CRITIC, 2))}
    shared = Desk(directory, adapters=("solver", "critic"), **options)
    for info, tensors in adapters.values():
        shared.engine.update_weights(tensors, 1, info)
    for number, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        # All prompts by all: only the adapter tells them apart.
        for who in ("solver", "critic", None):
            shared.submit(f"{who}-{number}", prompt, params, who)
    outputs = shared.drain()
    completions = set()
    for who in ("solver", "critic", None):
        info, tensors = adapters.get(str(who), (SOLVER, None))
        single = alone(directory, tensors, info)
        for number, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
            single.submit(f"{who}-{number}", prompt, params)
        for name, output in single.drain().items():
            same(outputs[name], output)
        completions.add(tuple(outputs[f"{who}-2"].token_ids.tolist()))
    assert len(completions) == 3, "the adapters change nothing"


def test_the_model_under_adapters_sleeps_in_main_memory_and_is_not_dropped(directory: Path) -> None:
    prompt = random_prompt(np.random.default_rng(6), 12)
    shared = Desk(directory, adapters=("solver",))
    shared.engine.update_weights(factors(SOLVER, 1), 1, SOLVER)
    memory = shared.engine.memory
    with pytest.raises(FormatError, match=r"level is 2, which drops the launch weights that adapters .*: send level=1"):
        memory.sleep(2)
    assert memory.complete
    shared.submit("before", prompt, LONG, "solver")
    before = shared.drain()["before"]
    memory.sleep(1)
    shared.submit("after", prompt, LONG, "solver")
    assert shared.drain().keys() == {"before"}
    assert [memory.wake([part]) for part in ("weights", "kv_cache")] == [False, True]
    same(shared.drain()["after"], before)


def test_an_adapter_that_is_not_loaded_yet_is_the_bare_model(directory: Path) -> None:
    prompt = random_prompt(np.random.default_rng(5), 12)
    shared = Desk(directory, adapters=("solver", "critic"), weight_version=4)
    shared.engine.update_weights(factors(CRITIC, 2), 5, CRITIC)
    shared.submit("a", prompt, LONG, "solver")
    shared.submit("b", prompt, LONG, "critic")
    outputs = shared.drain()
    bare = Desk(directory)
    bare.submit("a", prompt, LONG)
    same(outputs["a"], bare.drain()["a"])
    assert [outputs[name].weight_versions for name in "ab"] == [((4, 0, 30),), ((5, 0, 30),)]


def test_update_of_one_adapter_keeps_requests_and_prefixes_of_the_other(directory: Path) -> None:
    rng = np.random.default_rng(3)
    prompt = random_prompt(rng, 40)
    shared = Desk(directory, adapters=("solver", "critic"))
    shared.engine.update_weights(factors(SOLVER, 1), 1, SOLVER)
    shared.engine.update_weights(factors(CRITIC, 2), 1, CRITIC)
    for who in ("solver", "critic"):
        shared.submit(f"{who}-first", prompt, PARAMS[0], who)
    shared.drain()
    assert shared.engine.refresh_stats().retained == 2
    more = np.concatenate([prompt, random_prompt(rng, 10)])
    for who in ("solver", "critic"):
        shared.submit(f"{who}-running", random_prompt(rng, 30), LONG, who)
    for _ in range(10):
        shared.engine.step()
    prefilled_before = shared.engine.refresh_stats().prefilled_tokens
    shared.engine.update_weights(factors(SOLVER, 7), 2, SOLVER)
    stats = shared.engine.refresh_stats()
    # The critic's prefix and its running request are still there; the solver's prefix is not, its request waits.
    assert (stats.retained, stats.running, stats.waiting) == (1, 1, 1)
    for who in ("solver", "critic"):
        shared.submit(f"{who}-second", more, PARAMS[1], who)
    outputs = shared.drain()
    assert outputs["critic-running"].weight_versions == ((1, 0, 30),)
    [(_, _, end), (version, start, _)] = outputs["solver-running"].weight_versions
    assert version == 2
    assert 0 < start == end < 30
    # What the critic computed before is used again, what the solver's earlier weights computed is not.
    assert outputs["critic-second"].cached_tokens == 40
    assert outputs["solver-second"].cached_tokens == 0
    prefilled = shared.engine.refresh_stats().prefilled_tokens - prefilled_before
    assert prefilled == (30 + start) + len(more) + (len(more) - 40)
    single = alone(directory, factors(SOLVER, 7), SOLVER)
    single.submit("solver-second", more, PARAMS[1])
    same(outputs["solver-second"], single.drain()["solver-second"])
    single = alone(directory, factors(CRITIC, 2), CRITIC)
    single.submit("critic-second", more, PARAMS[1])
    same(outputs["critic-second"], single.drain()["critic-second"])


def test_sequences_go_on_where_the_rows_of_dropped_prefixes_were(directory: Path) -> None:
    rng = np.random.default_rng(4)
    shared = Desk(directory, adapters=("solver", "critic"), max_seqs=16)
    shared.engine.update_weights(factors(SOLVER, 1), 1, SOLVER)
    shared.engine.update_weights(factors(CRITIC, 2), 1, CRITIC)
    prompts = [random_prompt(rng, 20) for _ in range(9)]
    # Finished and running ones of both in turn, so that free rows lie between those that are still read.
    for number, prompt in enumerate(prompts):
        shared.submit(f"solver-{number}", prompt, replace(PARAMS[0], max_tokens=2 + number % 2), "solver")
        shared.submit(f"critic-{number}", prompt, replace(LONG, max_tokens=8, seed=number), "critic")
    for _ in range(5):
        shared.engine.step()
    rows_before = shared.engine._cache.row_of[shared.engine._roster.running].tolist()
    shared.engine.update_weights(factors(SOLVER, 3), 2, SOLVER)
    rows_after = shared.engine._cache.row_of[shared.engine._roster.running].tolist()
    assert len(rows_before) == len(rows_after) > 3
    assert rows_before != rows_after == sorted(rows_after)
    outputs = shared.drain()
    single = alone(directory, factors(CRITIC, 2), CRITIC)
    for number, prompt in enumerate(prompts):
        single.submit(f"critic-{number}", prompt, replace(LONG, max_tokens=8, seed=number))
    for name, output in single.drain().items():
        same(outputs[name], output)


def test_diverged_adapter_fails_its_own_requests_only(directory: Path) -> None:
    prompt = random_prompt(np.random.default_rng(6), 30)
    shared = Desk(directory, adapters=("solver", "critic"))
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in factors(CRITIC, 2).items()}
    shared.engine.update_weights(factors(SOLVER, 1), 1, SOLVER)
    shared.engine.update_weights(broken, 1, CRITIC)
    shared.submit("critic", prompt, LONG, "critic")
    shared.submit("solver", prompt, LONG, "solver")
    outputs = shared.drain()
    assert outputs["critic"].finish_reason == "error"
    single = alone(directory, factors(SOLVER, 1), SOLVER)
    single.submit("solver", prompt, LONG)
    same(outputs["solver"], single.drain()["solver"])


def test_targets_that_a_next_version_does_not_name_are_the_model_s(directory: Path) -> None:
    prompt = random_prompt(np.random.default_rng(8), 15)
    less = replace(SOLVER, targets=SOLVER.targets[:1])
    shared = Desk(directory, adapters=("solver",))
    shared.engine.update_weights(factors(SOLVER, 1), 1, SOLVER)
    shared.engine.update_weights(factors(less, 4), 2, less)
    shared.submit("a", prompt, LONG, "solver")
    single = alone(directory, factors(less, 4), less)
    single.submit("a", prompt, LONG)
    same(shared.drain()["a"], single.drain()["a"])


def test_incompatible_adapters_are_refused_and_change_nothing(directory: Path) -> None:
    table = replace(SOLVER, targets=("lm_head",))
    shared = Desk(directory, adapters=("critic",))
    shared.engine.update_weights(factors(CRITIC, 2), 1, CRITIC)
    with pytest.raises(FormatError, match=r"adapter 'solver' does not fit.*lora_A.weight has shape"):
        shared.engine.update_weights(factors(replace(SOLVER, rank=3), 1), 2, SOLVER)
    with pytest.raises(FormatError, match="lm_head is the output matrix or the embedding, which adapters beside"):
        shared.engine.update_weights(factors(table, 1), 2, table)
    assert list(shared.engine.model.adapters.numbers) == ["critic"]
    for tensors, info in ((factors(SOLVER, 1), replace(SOLVER, name=None)), (make_model("qwen3").state_dict(), None)):
        with pytest.raises(FormatError, match="would change the model under the adapters critic"):
            shared.engine.update_weights(tensors, 2, info)
    single = alone(directory, factors(SOLVER, 1), SOLVER)
    with pytest.raises(FormatError, match="but other weights were loaded since: relaunch it"):
        single.engine.update_weights(factors(CRITIC, 2), 2, CRITIC)


def manifest_of(info: AdapterInfo, seed: int, version: int, home: Path) -> WeightManifest:
    return write_weights(factors(info, seed).items(), home / str(info.name), version, adapter=info)


@pytest.mark.long
async def test_a_server_serves_both_by_name_and_brings_both_back(directory: Path, tmp_path: Path) -> None:
    config = InferenceConfig(max_context=256)
    fleet = ReplicaSet(config, directory, logs=tmp_path / "logs", adapters={"solver": 2, "critic": 5})
    prompts = [random_prompt(np.random.default_rng(seed), 30) for seed in range(3)]
    want = {}
    for info, seed in ((SOLVER, 1), (CRITIC, 2)):
        single = alone(directory, factors(info, seed), info)
        for number, prompt in enumerate(prompts):
            single.submit(str(number), prompt, PARAMS[number])
        want[str(info.name)] = single.drain()

    async def check(versions: Mapping[str, int]) -> None:
        keys = [(who, number) for who in ("solver", "critic") for number in range(len(prompts))]
        requests = (
            fleet.client_of(who).generate(TokenPrompt(prompts[number]), PARAMS[number], session_id=f"{who}{number}")
            for who, number in keys
        )
        for (who, number), got in zip(keys, await asyncio.gather(*requests), strict=True):
            expected = want[who][str(number)]
            assert got.token_ids.tolist() == expected.token_ids.tolist()
            assert np.abs(got.logprobs - expected.logprobs).max() < 1e-4
            assert got.weight_versions == ((versions[who], 0, 20),)

    try:
        await fleet.launch(updates=())
        [replica] = fleet.replicas
        assert isinstance(replica, BuiltinReplica)
        assert await replica.update_weights(manifest_of(SOLVER, 1, 3, tmp_path)) == 3
        assert await replica.update_weights(manifest_of(CRITIC, 2, 8, tmp_path)) == 8
        await check({"solver": 3, "critic": 8})
        # The same weights are only numbered anew, and only those of the name.
        [file] = (tmp_path / "critic").iterdir()
        same_weights = replace(manifest_of(CRITIC, 2, 8, tmp_path), version=9, path=str(file))
        assert await replica.update_weights(same_weights) == 9
        assert (await replica.stats())["adapters"] == {"solver": 3, "critic": 9}
        assert await fleet.client_of("critic").model_info() == ModelInfo("critic", 256, 9, guides=True)
        assert replica.pid is not None
        death = asyncio.create_task(replica.wait_died())
        replica._process.kill("the test")
        await death
        await fleet.with_recovery(replica.stats)
        assert fleet.restarts == 1
        await check({"solver": 3, "critic": 9})
        stranger = HTTPClient([replica.url], model="judge")
        with pytest.raises(
            RequestRefused, match=r"model is 'judge', which is not served: name one of .*solver, critic"
        ):
            await stranger.generate(TokenPrompt(prompts[0]), PARAMS[0], session_id="s")
        await stranger.close()
    finally:
        await fleet.close()


def test_small_changes_are_held_in_full_by_name_and_mostly_rounded_away_when_merged(directory: Path) -> None:
    [target] = info_targets = ("model.layers.1.self_attn.o_proj",)
    info = AdapterInfo(4, 8.0, info_targets, "solver")
    tensors = factors(info, 0)
    down, up = (tensors[f"{target}.{part}.weight"] for part in ("lora_A", "lora_B"))
    up *= 1e-5
    change = 2.0 * up @ down

    def share_of(served: torch.Tensor) -> float:
        return float((served.double() * change).sum() / (change.double() ** 2).sum())

    base = CausalLM(directory, dtype="bfloat16")
    before = base._model.get_submodule(target).weight.float().clone()
    base.load_adapter(tensors, replace(info, name=None), 1)
    assert share_of(base._model.get_submodule(target).weight.float() - before) < 0.5
    named = CausalLM(directory, dtype="bfloat16")
    number = named.load_named(tensors, info, 1)
    served_down, served_up = named.adapters._factors[target][number]
    assert 0.98 < share_of(served_up.float() @ served_down.float()) < 1.02


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside the model's own tokens"])
def test_a_bfloat16_layer_shows_a_change_of_a_ten_thousandth_in_full(tmp_path: Path, beside: bool) -> None:
    # Of a layer with a bias. What a change adds is far below a rounding step of what the layer returns.
    target = "model.layers.1.self_attn.q_proj"
    info = AdapterInfo(4, 8.0, (target,), "solver")
    served = CausalLM(save_model(make_model("qwen2"), tmp_path / "base"), dtype="bfloat16")
    tensors = factors(info, 0, "qwen2")
    tensors[f"{target}.lora_B.weight"] *= 1e-4 / 5
    zero = tensors | {f"{target}.lora_B.weight": torch.zeros_like(tensors[f"{target}.lora_B.weight"])}
    rows = torch.randn((20_000, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    numbers = np.arange(len(rows)) % 3 if beside else np.ones(len(rows), int)
    adapted = torch.from_numpy(numbers == 1)
    outputs = []
    for version, factors_of_version in enumerate((zero, tensors)):
        assert served.load_named(factors_of_version, info, version) == 1
        with torch.inference_mode(), served.adapters.applied(numbers % 2, served.device):
            outputs.append(served._model.get_submodule(target)(rows).double())
    assert torch.equal(outputs[0][~adapted], outputs[1][~adapted])
    shown = (outputs[1] - outputs[0])[adapted]
    down, up = (tensors[f"{target}.{part}.weight"].double() for part in ("lora_A", "lora_B"))
    change = rows[adapted].double() @ down.T @ up.T * info.scale
    assert 5e-5 < float(change.square().mean().sqrt()) < 2e-4
    assert float((shown * change).sum() / change.square().sum()) == pytest.approx(1.0, abs=0.05)


def test_a_float32_layer_adds_the_change_to_its_output(directory: Path) -> None:
    served, target = CausalLM(directory), SOLVER.targets[0]
    tensors = factors(SOLVER, 1)
    number, layer = served.load_named(tensors, SOLVER, 1), served._model.get_submodule(target)
    rows = torch.randn((50, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = layer(rows)
        with served.adapters.applied(np.full(len(rows), number), served.device):
            output = layer(rows)
    down, up = (tensors[f"{target}.{part}.weight"] for part in ("lora_A", "lora_B"))
    assert torch.equal(output, before + linear(linear(rows, down), SOLVER.scale * up))
