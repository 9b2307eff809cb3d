"""The whole line, once: a row of a dataset becomes two episodes, a train step, and new weights on a server.

What the model says is scripted; every other part is the product's own, called in the order in which
``turnwise/trainer/loops/steps.py`` calls them. :func:`walk` returns what each part made, for ``quotes.py`` to print.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.envs.basic.lookup import LookupEnv, tasks
from turnwise.envs.core import schemas
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.model.core import WeightManifest
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.audit import AuditReport, audit_files
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import BatchRef, RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.records import BatchWriter
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.strategies import Fifo
from turnwise.tasks import InMemoryOrder, load_tasks
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.experience import Experience, build_experience, collect
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.learn.learner import Learner, send_weights
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.run.task_scheduler import next_requests
from turnwise.trainer.weight_sync import SharedMemoryTransport
from turnwise.trajectory import TrajectoryGroup
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import Completion, Message, SamplingParams, TokenPrompt, ToolCall

sys.path.insert(0, str(Path(__file__).parents[1] / "lookup"))
sys.path.insert(1, str(Path(__file__).parents[1] / "small_model"))

from teacher import demonstrations

from turnwise.trainer.offline.small_model import make_model

DEMONSTRATIONS = 200
ROLLOUT = RolloutConfig(env=SpecConfig(name="lookup"), max_turns=4, max_tokens_per_turn=40)
ALGORITHM, BATCH = AlgorithmConfig(), BatchConfig(groups=1, max_tokens_per_micro_batch=2048)


@dataclass(frozen=True, slots=True)
class Start:
    """What is there before a run: a model in Hugging Face's format, and a dataset."""

    model: Path
    rows: Path
    parameters: int

    @property
    def policy(self) -> PolicyConfig:
        """How the model is trained."""
        return PolicyConfig(
            model=ModelConfig(path=self.model, device="cpu", threads=1), optim=OptimConfig(lr=1e-3, weight_decay=0.0)
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is assembled from; ``turnwise/trainer/run.py`` does the same for ``turnwise train``."""

    start: Start
    directory: Path
    renderer: TemplateRenderer
    model: ScriptedClient
    client: LedgerClient
    buffer: LocalReplayBuffer
    producer: RolloutProducer
    batches: BatchWriter
    learner: Learner
    weights: SharedMemoryTransport
    replica: BuiltinReplica
    server: HTTPClient
    served: int


@dataclass(frozen=True, slots=True)
class Walked:
    """What each part made, in order."""

    request: RolloutRequest
    batch: BatchRef
    waiting: dict[str, float]
    group: TrajectoryGroup
    experience: Experience
    metrics: dict[str, float]
    manifest: WeightManifest
    served_before: int
    served_after: int
    greedy: Completion
    audit: AuditReport


def prepare(directory: Path) -> Start:
    """Make an untrained model with its tokenizer, and a dataset of one row."""
    rows = directory / "rows.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(json.dumps(task.to_record()) + "\n" for task in tasks(1)))
    conversations = list(asyncio.run(demonstrations(DEMONSTRATIONS, seed=0)))
    return Start(directory / "model", rows, make_model(directory / "model", conversations, seed=0))


def script(start: Start) -> Callable[[ScriptedRequest], Completion]:
    """Return a model whose messages come from a script and whose log-probabilities come from its weights.

    Member 0 makes both calls and answers with the manager; member 1 stops after the first call and answers with the
    team. The log-probabilities are transformers' own.
    """
    model = AutoModelForCausalLM.from_pretrained(start.model)
    offered = schemas(LookupEnv())

    def say(request: ScriptedRequest) -> Completion:
        [person] = re.findall(r"Who manages (\w+)\?", request.text)
        answers = re.findall(r"<tool_response>(\w+)</tool_response>", request.text)
        message: Message = {"role": "assistant", "content": ""}
        if not answers:
            message["tool_calls"] = [ToolCall("", "team_of", {"person": person})]
        elif len(answers) == 1 and request.session_id.endswith("/0.0"):
            message["tool_calls"] = [ToolCall("", "manager_of", {"team": answers[0]})]
        else:
            message["content"] = answers[-1]
        ids = request.renderer.completion(message, offered)
        tokens = torch.tensor([[*request.prompt.tolist(), *ids.tolist()]])
        with torch.no_grad():
            logs = model(tokens).logits[0].log_softmax(-1)
        positions = torch.arange(len(request.prompt), tokens.shape[1])
        return Completion(ids, logs[positions - 1, tokens[0, positions]].numpy(), "stop", ((0, 0, len(ids)),))

    return say


@contextlib.asynccontextmanager
async def assembled(start: Start, directory: Path) -> AsyncIterator[Parts]:
    """Put the parts together, and take them apart."""
    async with contextlib.AsyncExitStack() as stack:
        renderer = load_renderer(start.model)
        model = ScriptedClient(renderer, script(start), context_length=512)
        client = LedgerClient(model, directory / "ledger.jsonl")
        stack.push_async_callback(client.close)
        writer = TrajectoryWriter(directory / "trajectories.twz")
        stack.callback(writer.close)
        batches = BatchWriter(directory / "batches.jsonl", part=0)
        stack.callback(batches.close)
        buffer = LocalReplayBuffer(Fifo("key"))
        parts = RolloutParts(renderer, run_seed=0, write=writer.write)
        producer = await RolloutProducer.create(ROLLOUT, client, buffer, parts)
        stack.push_async_callback(producer.close)
        learner = TorchLearner.create(start.policy, total_steps=1)
        weights = SharedMemoryTransport()
        stack.callback(weights.close)
        replica = BuiltinReplica(start.model, log_file=directory / "server.log")
        stack.push_async_callback(replica.close)
        await replica.launch()
        server = HTTPClient([replica.url])
        stack.push_async_callback(server.close)
        served = (await server.model_info()).weight_version
        yield Parts(
            start, directory, renderer, model, client, buffer, producer, batches, learner, weights, replica, server,
            served,
        )  # fmt: skip


async def walk(parts: Parts) -> Walked:
    """Walk the line: one train step."""
    # From the dataset to a finished group.
    order = InMemoryOrder(load_tasks(parts.start.rows), seed=0, shuffle=False)
    requests = next_requests(order, groups=1, group_size=2)
    parts.producer.generate_sequences(requests)
    batch, waiting = await parts.buffer.sample(1, "train", 1)
    [group] = await parts.buffer.fetch(batch)

    # From the group to changed weights.
    experience = build_experience(collect([group]), ALGORITHM, temperature=ROLLOUT.temperature)
    parts.batches.write(1, [row.sample for row in experience.rows])
    metrics = update_policy(parts.learner, experience.rows, ALGORITHM, BATCH, seed=1)

    # From changed weights to the server.
    manifest = await parts.weights.publish(partial(send_weights, parts.learner), [parts.replica], version=1)
    served = (await parts.server.model_info()).weight_version
    await parts.buffer.release(batch)

    # What the new weights say to the first prompt of the episode, greedily; and what the files of the run prove.
    prompt = TokenPrompt(parts.model.requests[0].prompt)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    greedy = await parts.server.generate(prompt, params, session_id="after")
    await parts.client.close()
    audit = audit_files(parts.directory)
    return Walked(
        requests[0], batch, waiting, group, experience, metrics, manifest, parts.served, served, greedy, audit
    )
