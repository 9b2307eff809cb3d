"""What the walked line made, as the blocks of ``docs/walkthrough.md``.

Values come from the walk itself. What the product does not keep (a step's result, a micro-batch, the forward pass
before the update) is made once more by the same public functions from the same inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from blocks import Block
from line import ALGORITHM, BATCH, Parts, Walked, assembled, prepare, walk
from shown import Page, columns, decimals, fields, own, pieces, shown_canonical, shown_message, wrapped

from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.core import call_env, close_env, reset_env, schemas, step_env
from turnwise.envs.registration import make
from turnwise.model.canonical import canonical_messages
from turnwise.model.core import Renderer
from turnwise.recorder.ledger import read_ledger
from turnwise.rollout.records import read_batches
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trajectory import Segment, TrainSample, to_samples
from turnwise.types import ToolCall, as_ids

CLOSE = 1e-4


def printed(watch: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext) -> list[Block]:
    """Walk the line and return the blocks.

    Args:
        watch: Entered around the walk itself, without what is made before and quoted after.
    """
    with tempfile.TemporaryDirectory(prefix="turnwise-walkthrough-") as folder:
        directory = Path(folder)
        start = prepare(directory)

        async def run() -> list[Block]:
            async with assembled(start, directory) as parts:
                with watch():
                    walked = await walk(parts)
                return await quotes(parts, walked)

        return asyncio.run(run())


async def quotes(parts: Parts, walked: Walked) -> list[Block]:
    """Return the blocks of the page."""
    page = Page()
    task_and_group(page, parts, walked)
    await environment(page, walked)
    agent(page, walked)
    recorder(page, parts, walked)
    await model_and_tools(page, parts, walked)
    trajectory(page, walked)
    experience(page, walked)
    update(page, parts, walked)
    weights(page, parts, walked)
    return page.blocks


def task_and_group(page: Page, parts: Parts, walked: Walked) -> None:
    request = walked.request
    page.add("task", parts.start.rows.read_text().strip(), "", *fields(request.task))
    names = ("epoch", "group_size", "partition", "temperature")
    page.add("request", ", ".join(f"{name} {getattr(request, name)!r}" for name in names))
    lines = [f"group {walked.group.id}"]
    for member in walked.group.trajectories:
        seeds = [call.params.seed for call in parts.model.requests if call.session_id == member.id]
        lines += [
            f"episode {member.episode_id}",
            f"    reset seed {member.seed}",
            f"    seeds of its requests {' '.join(map(str, seeds))}",
        ]
    page.add("group", *lines)
    names = ("turns", "sampled_tokens", "tool_calls", "forks")
    lines = ["episode                          stop_reason  error  reward  " + "  ".join(names)]
    for member in walked.group.trajectories:
        counts = "  ".join(f"{member.metrics[name]:>{len(name)}.0f}" for name in names)
        head = f"{member.id:<33}{member.stop_reason.value:<13}{member.error!s:<7}{member.reward!s:<8}"
        lines.append(head + counts)
    page.add("episodes", *lines)


async def environment(page: Page, walked: Walked) -> None:
    """Play the first member's messages in a separate environment."""
    member = walked.group.trajectories[0]
    answers = [own(segment.messages[0]) for segment in member.segments if segment.sampled]

    env = make("lookup")
    assert isinstance(env, LookupEnv)
    messages, info = await reset_env(env, walked.request.task, seed=member.seed)
    steps = [await step_env(env, message) for message in answers]
    await close_env(env)
    page.add("rewards", *(f"{member.id}: {member.rewards}" for member in walked.group.trajectories))
    page.add("reset", f"observation  {messages}", f"info         {info}")
    lines = []
    for message, result in zip(answers, steps, strict=True):
        lines += [
            f"step({shown_message(message)})",
            f"    observation  {result.observation}",
            f"    reward {result.reward}, terminated {result.terminated}, truncated {result.truncated}, "
            f"rewards {result.info['rewards']}",
        ]
    page.add("steps", *lines)
    table = env.table
    page.add(
        "table",
        f"asked   {table.person}",
        f"team    {table.teams[table.person]}   (of {len(set(table.teams.values()))} teams)",
        f"answer  {table.answer}",
        "",
        *(json.dumps(schema.to_json()["function"]) for schema in schemas(env)),
    )


def agent(page: Page, walked: Walked) -> None:
    first = walked.group.trajectories[0]
    lines = []
    for turn in first.turns():
        roles = ", ".join(message["role"] for index in turn.path for message in first.segments[index].messages)
        lines.append(f"chat({roles}) -> {shown_message(own(turn.sampled.messages[0]))}")
    page.add("history", *lines)


def recorder(page: Page, parts: Parts, walked: Walked) -> None:
    first, renderer = walked.group.trajectories[0], parts.renderer
    lines = ["segment  parent  kind     ids  turn  messages"]
    for segment in first.segments:
        roles = ", ".join(message["role"] for message in segment.messages)
        lines.append(
            f"{segment.index:>7}  {segment.parent:>6}  {segment.kind:<7}{len(segment.token_ids):>5}  "
            f"{segment.turn_id or '-':<4}  {roles}"
        )
    params = parts.model.requests[0].params
    lines += ["", f"temperature {params.temperature}, max_tokens {params.max_tokens}, stop ids {params.stop_token_ids}"]
    page.add("segments", *lines)
    root = first.segments[0]
    rendered = renderer.render(canonical_messages([own(message) for message in root.messages]), schemas(LookupEnv()))
    check(np.array_equal(rendered, root.token_ids), "the first prompt is not what the renderer writes")
    page.add("prompt", *renderer.decode(root.token_ids).splitlines(), "", *pieces(renderer, root.token_ids))
    history = [message for segment in first.segments[:3] for message in segment.messages]
    canonical = canonical_messages([own(message) for message in history])
    page.add("canonical", *(shown_canonical(message) for message in canonical))
    ledger = read_ledger(parts.directory / "ledger.jsonl")
    lines = ["prompt  completion  session"]
    for entry in ledger.entries:
        lines.append(f"{len(entry.prompt_ids):>6}  {len(entry.completion_ids):>10}  {entry.session}")
    page.add("ledger", *lines)


async def model_and_tools(page: Page, parts: Parts, walked: Walked) -> None:
    first, renderer = walked.group.trajectories[0], parts.renderer
    sampled = first.segments[1]
    assert sampled.logprobs is not None
    page.add("completion", *pieces(renderer, sampled.token_ids))
    page.add(
        "logprobs",
        f"logprobs         {decimals(sampled.logprobs, 3)}",
        f"finish_reason    {sampled.finish_reason}",
        f"weight_versions  {sampled.weight_versions}",
        approximate=True,
    )
    message = renderer.parse(sampled.token_ids, first.segments[0].token_ids, schemas(LookupEnv()))
    issued = own(sampled.messages[0])["tool_calls"][0]
    [parsed] = message["tool_calls"]
    page.add(
        "call",
        f"decoded    {renderer.decode(sampled.token_ids)}",
        f"id         {issued.id!r}",
        *(f"{name:<10} {getattr(parsed, name)!r}" for name in ("name", "arguments", "raw", "error")),
    )
    calls = [
        issued,
        ToolCall("a", "team_of", {"person": "bob"}),
        ToolCall("b", "team_of", {}),
        ToolCall("c", "boss", {}),
    ]

    env = make("lookup")
    await reset_env(env, walked.request.task, seed=first.seed)
    lines = []
    for call in calls:
        response = await call_env(env, call)
        lines += [f"{call.name}({json.dumps(call.arguments)})", f"    {response.text}"]
    await close_env(env)
    page.add("answers", *lines)
    delta(page, renderer, first.segments)


def delta(page: Page, renderer: Renderer, segments: Sequence[Segment]) -> None:
    root, sampled, added = segments[:3]
    messages = canonical_messages([own(m) for segment in (root, sampled, added) for m in segment.messages])
    # The answer is rendered with the id and the name that the session issued for its call.
    new = [
        dataclasses.replace(m, call_id=said_call(sampled).id, call_name=said_call(sampled).name) for m in messages[2:]
    ]
    extended = renderer.extend(root.token_ids, sampled.token_ids, messages[1], new, schemas(LookupEnv()))
    check(
        extended is not None and np.array_equal(extended, added.token_ids),
        "the second context is not what extend() writes",
    )
    prompt = len(root.token_ids) + len(sampled.token_ids) + len(added.token_ids)
    page.add(
        "delta",
        *pieces(renderer, added.token_ids),
        "",
        f"prompt of turn t1: {len(root.token_ids)} ids known + {len(sampled.token_ids)} sampled "
        f"+ {len(added.token_ids)} encoded = {prompt}",
    )


def trajectory(page: Page, walked: Walked) -> None:
    first = walked.group.trajectories[0]
    names = ("id", "group_id", "task_id", "agent", "policy", "partition", "attempt", "schema_version")
    page.add("trajectory", *(f"{name:<15} {getattr(first, name)}" for name in names))
    [row] = to_samples(first).rows
    arrays = {
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask.astype(int),
        "turn_ids": row.turn_ids,
        "weight_versions": row.weight_versions,
    }
    tail = f"{len(row.input_ids)} ids, {row.trained_tokens} trained, from the root to leaf {row.leaf}"
    page.add("row", *columns(arrays), "", tail)
    ref, waiting = walked.batch, walked.waiting
    page.add(
        "batch",
        f"id         {ref.id}",
        f"group_ids  {ref.group_ids}",
        *(f"{name:<14} {waiting[name]:.0f}" for name in ("replay/ready", "replay/failed")),
    )


def experience(page: Page, walked: Walked) -> None:
    metrics = walked.experience.metrics
    names = ("reward/mean", "reward/std", "batch/groups", "batch/dead_groups", "batch/rows", "batch/trained_tokens")
    page.add("experience", *(f"{name:<20} {metrics[name]:.4f}" for name in names), approximate=True)
    lines = ["reward  advantage  tokens  row"]
    for row, member in zip(walked.experience.rows, walked.group.trajectories, strict=True):
        lines.append(f"{member.reward:>6}  {row.advantage:>9.4f}  {row.sample.trained_tokens:>6}  {member.id}")
    page.add("advantages", *lines, approximate=True)


def update(page: Page, parts: Parts, walked: Walked) -> None:
    """Make the micro-batch and the passes of the update once more, from the weights before it."""
    written = read_batches(parts.directory / "batches.jsonl")
    page.add("batches", *(f"step {r.step}  leaf {r.leaf}  {r.tokens} ids  trained {r.spans}" for r in written.rows))
    names = (
        "train/updates",
        "train/tokens",
        "train/loss",
        "train/ratio",
        "train/grad_norm",
        "train/entropy",
        "lr/adamw",
        "gap/max",
    )
    page.add("update", *(f"{name:<16} {walked.metrics[name]:.4f}" for name in names), approximate=True)
    check(walked.metrics["gap/max"] <= CLOSE, "the rollout and the trainer disagree about log-probabilities")
    weighed, normalizer = weigh(walked.experience.rows, ALGORITHM.aggregation)
    [micro] = pack(weighed, BATCH.max_tokens_per_micro_batch)
    page.add("weights", f"weights     {[row.weight for row in weighed]}", f"normaliser  {normalizer}")
    page.add("micro-batch", *micro_batch(micro))
    sums = [float(row.advantage) * row.weight * row.sample.trained_tokens for row in weighed]
    by_hand = -sum(sums) / normalizer
    old = TorchLearner.create(parts.start.policy, total_steps=1)
    stats = old.forward_backward([micro], PolicyObjective.of(ALGORITHM), normalizer)
    check(abs(stats.loss - walked.metrics["train/loss"]) < 1e-5, "the passes made again have another loss")
    check(abs(stats.loss - by_hand) < 1e-4, "the loss by hand is another one")
    page.add(
        "norms",
        f"loss {stats.loss:.4f}  gradient norm before clipping {walked.metrics['train/grad_norm']:.4f}",
        "",
        *norms(dict(old.export_weights()), dict(parts.learner.export_weights())),
        approximate=True,
    )
    page.add("policy", *policy(parts, weighed, micro, old.logprobs([micro])[0]), approximate=True)
    page.add(
        "loss",
        f"loss  -({' '.join(f'{value:+.4f}' for value in sums)}) / {normalizer} = {by_hand:.4f}",
        approximate=True,
    )


def policy(parts: Parts, rows: Sequence[TrainRow], micro: MicroBatch, before: torch.Tensor) -> list[str]:
    """Return by turn what the update did to the log-probabilities of the trained tokens."""
    [after] = parts.learner.logprobs([micro])
    samples = [rows[index].sample for index in micro.rows]
    owners = np.repeat(micro.rows, [sample.trained_tokens for sample in samples])
    turns = np.concatenate([sample.turn_ids[sample.loss_mask] for sample in samples])
    lines = [f"logprobs of shape {list(before.shape)}", "", "row  turn  advantage  sum before  sum after  first token"]
    for index in micro.rows:
        for turn in dict.fromkeys(turns[owners == index]):
            span = np.flatnonzero((owners == index) & (turns == turn))
            old, new = (float(scores[span].sum()) for scores in (before, after))
            first = micro.target_ids[span[0]].numpy()[None]
            head = f"{index:>3}  {f't{turn}':>4}  {float(rows[index].advantage):>9.4f}  {old:>10.4f} {new:>10.4f}"
            lines.append(
                f"{head}  {parts.renderer.decode(first)!r} {float(before[span[0]]):.4f} -> {float(after[span[0]]):.4f}"
            )
    return lines


def micro_batch(micro: MicroBatch) -> list[str]:
    """Return the shapes of a micro-batch, and of its tensors those that packing made."""
    lines = [
        f"{name:<17} {list(getattr(micro, name).shape)!s:<9} {str(getattr(micro, name).dtype).removeprefix('torch.')}"
        for name in (
            "input_ids",
            "position_ids",
            "predictors",
            "target_ids",
            "rollout_logprobs",
            "advantages",
            "weights",
        )
    ]
    lines += ["", f"segments  {micro.segments}", f"rows      {micro.rows}"]
    for name in ("position_ids", "predictors"):
        lines += wrapped(f"{name:<13}", getattr(micro, name).flatten().tolist())
    return lines


def norms(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the norms of some tensors and of all, before and after, and of the change."""
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.3.mlp.down_proj.weight",
    ]
    lines = [f"{'weights':<42} {'before':>9} {'after':>9} {'change':>9}"]
    flat = [torch.cat([w[name].flatten() for name in before]) for w in (before, after)]
    pairs = [(name, before[name], after[name]) for name in names]
    pairs.append((f"all {len(before)} tensors, {len(flat[0]):,} numbers", *flat))
    for name, old, new in pairs:
        lines.append(f"{name:<42} {old.norm():>9.4f} {new.norm():>9.4f} {(new - old).norm():>9.4f}")
    return lines


def weights(page: Page, parts: Parts, walked: Walked) -> None:
    manifest = walked.manifest
    total = sum(int(np.prod(entry.shape)) * 4 for entry in manifest.tensors)
    page.add(
        "manifest",
        f"version {manifest.version}, {len(manifest.tensors)} tensors, {total:,} bytes",
        *(f"{entry.name}  {entry.shape}  {entry.dtype}" for entry in manifest.tensors[:3]),
    )
    prompt, greedy = parts.model.requests[0].prompt, walked.greedy
    ids = as_ids([*prompt.tolist(), *greedy.token_ids.tolist()])
    sampled = np.arange(len(ids)) >= len(prompt)
    zeros = np.zeros(len(ids), np.float32)
    row = TrainRow(TrainSample(ids, sampled, zeros, zeros.astype(np.int32), zeros.astype(np.int32), "after", "", 0))
    [own_logprobs] = parts.learner.logprobs(pack([row], BATCH.max_tokens_per_micro_batch))
    gap = float(np.abs(own_logprobs.numpy() - greedy.logprobs).max())
    check(gap <= CLOSE, "the server and the trainer disagree about log-probabilities")
    page.add(
        "served",
        f"version served before {walked.served_before}, after {walked.served_after}",
        f"greedy completion of {len(greedy.token_ids)} ids: weight_versions {greedy.weight_versions}",
        f"largest |server - trainer| of their log-probabilities: {gap:.4f} (at most {CLOSE})",
        approximate=True,
    )
    counts = walked.audit.counts
    page.add(
        "audit",
        *(f"{name:<30} {counts[name]}" for name in sorted(counts) if counts[name]),
        f"contradictions: {walked.audit.contradictions}",
    )


def said_call(segment: Segment) -> ToolCall:
    return own(segment.messages[0])["tool_calls"][0]


def check(holds: bool, otherwise: str) -> None:
    """Raise where the page would say something that is not so."""
    if not holds:
        raise AssertionError(otherwise)
