"""The SDK's side of ``tinker_overhead``: a loop as the cookbook's ``rl_loop``, on a server of ``turnwise tinker``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.tinker_game import question, reward
from harness.trl_gate import Gate
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.model.canonical import canonical_messages

NAME = "small"


@contextmanager
def serving(model: Path, directory: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """Run a server while the context lasts; yield its URL."""
    command = [sys.executable, "-m", "turnwise", "tinker", "--model", str(model), "--name", NAME, "--port", "0"]
    inference = [f"{name}={value}" for name, value in settings["ours"]["inference"].items()]
    server = subprocess.Popen(
        [*command, "--out", str(directory / "out"), "device=cpu", "threads=1", *inference],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if "TINKER_BASE_URL=" not in line:
            raise RuntimeError(f"the server did not start, but said {line!r}")
        yield line.partition("TINKER_BASE_URL=")[2].split()[0]
    finally:
        server.terminate()
        server.wait(timeout=60)


def run(gate: Gate, model: Path, directory: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """Train for so many steps, and report what was done."""
    sys.path.insert(0, settings["sdk"])
    import tinker

    groups, size = settings["groups"], settings["group_size"]
    adam = tinker.AdamParams(
        learning_rate=settings["lr"], beta1=settings["betas"][0], beta2=settings["betas"][1], eps=settings["eps"],
        grad_clip_norm=settings["max_grad_norm"],
    )  # fmt: skip
    clip = {"clip_low_threshold": 1 - settings["clip_low"], "clip_high_threshold": 1 + settings["clip_high"]}
    renderer = load_renderer(model)
    stops, prompts = sorted(renderer.stop_ids), prompt_ids(renderer, steps * groups)
    params = tinker.SamplingParams(max_tokens=settings["max_tokens_per_turn"], temperature=1.0, stop=stops)
    with serving(model, directory, settings) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        training = client.create_lora_training_client(base_model=NAME, rank=settings["rank"]).result()
        gate.wait()
        for step in range(steps):
            sampler = training.save_weights_and_get_sampling_client().result()
            batch = prompts[step * groups : (step + 1) * groups]
            futures = [
                sampler.sample(tinker.ModelInput.from_ints(prompt), num_samples=size, sampling_params=params)
                for prompt in batch
            ]
            rows: list[Any] = []
            sampled = 0
            for prompt, future in zip(batch, futures, strict=True):
                sequences = future.result().sequences
                sampled += sum(len(sequence.tokens) for sequence in sequences)
                rows += group_rows(tinker, prompt, sequences)
            done = training.forward_backward(rows, loss_fn="ppo", loss_fn_config=clip), training.optim_step(adam)
            for future in done:
                future.result()
            mean = sum(map(reward, range(size))) / size
            gate.wait(episodes=len(rows), turns=len(rows), sampled=sampled, reward=mean, updates=1)
    config = {"adam": str(adam), "clip": clip, "params": str(params), "rank": settings["rank"]}
    gate.finish(config=config, prompts={f"{index:05d}": ids for index, ids in enumerate(prompts)}, answers={})


def prompt_ids(renderer: TemplateRenderer, count: int) -> list[list[int]]:
    """Return the ids of so many prompts, by the template of the model."""
    prompts = (canonical_messages([{"role": "user", "content": question(index)}]) for index in range(count))
    return [renderer.render(prompt, ()).tolist() for prompt in prompts]


def group_rows(tinker: Any, prompt: list[int], sequences: Sequence[Any]) -> list[Any]:
    """Return the rows of a group as the cookbook writes them: its advantages are rewards less their mean."""
    rewards = [reward(number) for number in range(len(sequences))]
    mean, unscored = sum(rewards) / len(rewards), len(prompt) - 1
    rows = []
    for sequence, earned in zip(sequences, rewards, strict=True):
        length = len(sequence.tokens)
        inputs = {
            "target_tokens": tinker.TensorData([0] * unscored + list(sequence.tokens), "int64"),
            "logprobs": tinker.TensorData([0.0] * unscored + list(sequence.logprobs), "float32"),
            "advantages": tinker.TensorData([0.0] * unscored + [earned - mean] * length, "float32"),
        }
        rows.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(prompt + list(sequence.tokens[:-1])), loss_fn_inputs=inputs
            )
        )
    return rows
