"""How long episodes take whose tools wait: 16 episodes of three calls, each answered after 0.2 seconds.

The tool is a plain ``def`` that sleeps, as a tool that asks a web service or starts a program does. The model is a list
of completions on both sides, the same ids on both. Ours runs the episodes through the rollout producer, whose runner
calls plain tools in threads. The peer is TRL's GRPOTrainer with ``tools=[...]``; it has no hook for a scripted model,
so ``_generate_single_turn``, which would ask one, is replaced; nothing else of it is. Timed is the rollout alone, by
the wall: ours from the request to the last trajectory, TRL's ``_generate``, which encodes the prompts, parses
completions and runs the tool loop. Start-up, scoring and training are outside.

Ours is run three times for each run of the peer, which takes longer than all three; the middle one counts.

The script fails unless both sides called the tool with the same arguments as often, and showed the model the same
prompts, id by id, at every turn of every episode.

What differs and could not be removed: TRL steps all episodes together, so an episode waits for the slowest one of its
batch in every turn; with equal times that costs it nothing here. Its tools may be ``async``, which then overlap within
one message only; these messages make one call each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.chat import chat_dir
from harness.measure import OFFLINE, ROOT, Sample, interleave, machine, measured, median, parse, parser, report, spread
from turnwise import RolloutConfig, RolloutProducer, RolloutRequest, Task, ToolEnv, function_tool
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.envs import register
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest, scripted_logprobs
from turnwise.rollout.core import RolloutParts
from turnwise.types import Completion, Message, ToolCall, ToolSchema, as_ids

EPISODES = 16
CALLS = 3
WAIT = 0.2
CITIES = (
    *("Amsterdam", "Berlin", "Cairo", "Delhi", "Edinburgh", "Florence", "Geneva", "Helsinki"),
    *("Istanbul", "Jakarta", "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague"),
)
# Where nothing waits for anything else: one episode after another within each, all episodes at once.
FLOOR = CALLS * WAIT

called: Counter[tuple[str, int]] = Counter()


# It names no return type: transformers would write that into the prompt too, which our schemas have no place for.
def forecast(city: str, day: int):
    """Tell the weather of a city.

    Args:
        city: Which city.
        day: How many days from now.
    """
    time.sleep(WAIT)
    called[city, day] += 1
    return f"{city} in {day} days: {(len(city) * 7 + day * 3) % 30} degrees"


Prompts = dict[tuple[int, int], list[int]]
"""The prompt's ids by episode and turn."""


def question(episode: int) -> list[Message]:
    return [{"role": "user", "content": f"What will the weather be in {CITIES[episode]} during the next days?"}]


def script(renderer: TemplateRenderer, schema: ToolSchema) -> list[list[Completion]]:
    """Return what the model says in each episode: three calls, then an answer."""
    said: list[list[Completion]] = []
    for city in CITIES:
        calls = [ToolCall("", "forecast", {"city": city, "day": day}) for day in range(1, CALLS + 1)]
        lines: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
        lines.append({"role": "assistant", "content": f"It will be mild in {city}."})
        ids = [renderer.completion(line, [schema]) for line in lines]
        said.append([Completion(each, scripted_logprobs(each), "stop", ((0, 0, len(each)),)) for each in ids])
    return said


class Ours:
    """Our side, ready to run."""

    def __init__(self, renderer: TemplateRenderer, said: list[list[Completion]], schema: ToolSchema) -> None:
        self._renderer = renderer
        self._said = said
        self.prompts: Prompts = {}
        self._episodes: dict[str, int] = {}

        class ForecastEnv(ToolEnv):
            tools = (function_tool(schema=schema)(forecast),)

        register("benchmark_forecast", ForecastEnv)

    def run(self) -> Sample:
        return asyncio.run(self._run())

    async def _run(self) -> Sample:
        config = RolloutConfig.model_validate(
            {"env": {"name": "benchmark_forecast"}, "concurrency": EPISODES, "group_size": 1, "max_turns": 2 * CALLS}
        )
        client = ScriptedClient(self._renderer, self._say)
        producer = await RolloutProducer.create(config, client, None, RolloutParts(self._renderer))
        requests = [RolloutRequest(Task(str(number), question(number), {})) for number in range(EPISODES)]
        with measured() as sample:
            groups = await producer.gather(requests)
        await producer.close()
        errors = [found.error for group in groups for found in group.trajectories if found.error is not None]
        if errors or sum(len(group.trajectories) for group in groups) != EPISODES:
            raise SystemExit(f"our episodes failed: {errors}")
        self.prompts = {
            (self._episode(request), request.number): request.prompt.tolist() for request in client.requests
        }
        return sample

    def _say(self, request: ScriptedRequest) -> Completion:
        return self._said[self._episode(request)][request.number]

    def _episode(self, request: ScriptedRequest) -> int:
        if request.session_id not in self._episodes:
            found = [number for number, city in enumerate(CITIES) if f"weather be in {city} " in request.text]
            (self._episodes[request.session_id],) = found
        return self._episodes[request.session_id]


class Theirs:
    """TRL's side, ready to run: a trainer of a tiny model that is never asked."""

    def __init__(self, folder: Path, said: list[list[Completion]]) -> None:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
        from trl import GRPOConfig, GRPOTrainer

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), padding_side="left")
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                max_position_embeddings=4096,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        self._inputs = [{"prompt": question(number)} for number in range(EPISODES)]
        self._said = said
        self._turn = 0
        self.prompts: Prompts = {}
        self._sample = Sample(0.0, 0.0)
        self._trainer: Any = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=GRPOConfig(
                output_dir=str(ROOT / ".cache" / "benchmarks" / "trl-output"),
                per_device_train_batch_size=EPISODES,
                num_generations=EPISODES,
                max_completion_length=2048,
                report_to=[],
                use_cpu=True,
                bf16=False,
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list(self._inputs),
            tools=[forecast],
        )
        self._trainer._generate_single_turn = self._say
        self._generate = self._trainer._generate
        self._trainer._generate = self._timed

    def run(self) -> Sample:
        self._turn = 0
        self.prompts = {}
        self._trainer._generate_and_score_completions(self._inputs)
        return self._sample

    def _timed(self, prompts: list[Any]) -> Any:
        with measured() as self._sample:
            return self._generate(prompts)

    def _say(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        # All episodes take as many turns, so every call is about all of them, in order.
        if len(prompt_ids) != EPISODES:
            raise SystemExit(f"TRL asks for {len(prompt_ids)} completions in turn {self._turn}, not {EPISODES}")
        turn, self._turn = self._turn, self._turn + 1
        self.prompts |= {(episode, turn): list(ids) for episode, ids in enumerate(prompt_ids)}
        return [self._said[episode][turn].token_ids.tolist() for episode in range(EPISODES)], None


def checked(run: Any) -> Sample:
    """Run a side and fail unless the tool was called as scripted."""
    called.clear()
    sample: Sample = run()
    wanted = Counter({(city, day): 1 for city in CITIES for day in range(1, CALLS + 1)})
    if called != wanted:
        raise SystemExit(
            f"the tool was called {called.total()} times; not wanted: {called - wanted}, missing: {wanted - called}"
        )
    return sample


def middle(run: Any) -> Sample:
    """Return the middle one of three runs: they take less than a second each, which a busy machine disturbs."""
    return sorted((checked(run) for _ in range(3)), key=lambda sample: sample.wall_s)[1]


def check_prompts(ours: Prompts, theirs: Prompts, renderer: TemplateRenderer) -> None:
    if ours.keys() != theirs.keys() or len(ours) != EPISODES * (CALLS + 1):
        raise SystemExit(f"the sides asked the model {len(ours)} and {len(theirs)} times")
    for place, ids in sorted(ours.items()):
        if ids != theirs[place]:
            texts = [renderer.decode(as_ids(prompt)) for prompt in (ids, theirs[place])]
            raise SystemExit(f"episode and turn {place}: our prompt is {texts[0]!r}, TRL's is {texts[1]!r}")


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=5, quick_repeats=1))
    os.environ.update(OFFLINE)
    from transformers.utils import get_json_schema

    folder = chat_dir()
    renderer = load_renderer(folder)
    function = get_json_schema(forecast)["function"]
    schema = ToolSchema(function["name"], function["description"], function["parameters"])
    said = script(renderer, schema)
    ours, theirs = Ours(renderer, said, schema), Theirs(folder, said)
    samples = interleave({"turnwise": lambda: middle(ours.run), "trl": lambda: checked(theirs.run)}, arguments.repeats)
    check_prompts(ours.prompts, theirs.prompts, renderer)
    seconds, peer_seconds = median(samples["turnwise"], "wall_s"), median(samples["trl"], "wall_s")
    table = Table(title=f"{EPISODES} episodes of {CALLS} calls to a tool that sleeps {WAIT} s")
    for column in ("side", "wall s", "CPU s"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side, taken in samples.items():
        table.add_row(side, f"{median(taken, 'wall_s'):.3f}", f"{median(taken):.3f}")
    table.add_row("no overhead at all", f"{FLOOR:.3f}", "")
    Console(stderr=True).print(table)
    report(
        {
            "seconds": round(seconds, 3),
            "peer_seconds": round(peer_seconds, 3),
            "ratio": round(peer_seconds / seconds, 2),
            "floor_seconds": FLOOR,
            "cpu_seconds": {side: round(median(taken), 4) for side, taken in samples.items()},
            "config": {
                "episodes": EPISODES,
                "calls_per_episode": CALLS,
                "tool_seconds": WAIT,
                "turnwise": {"concurrency": EPISODES, "group_size": 1, "agent": "react", "tool": "plain function"},
                "trl": {"tools": "[forecast]", "per_device_train_batch_size": EPISODES, "num_generations": EPISODES},
                "template": "qwen2_5 of trl",
                "repeats": arguments.repeats,
            },
            "machine": machine("turnwise-rl", "trl", "transformers", "torch", "datasets"),
            "samples": spread(samples),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
