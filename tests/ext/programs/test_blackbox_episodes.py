"""A program acts in an episode: what it is given, what is recorded, and how its end is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.agents.blackbox_episodes import CHAT_LOOP, LINES, run_episode, running, say, spec, team
from support.chat.model_dirs import renderer_for
from turnwise.errors import AgentError, InferenceError, TrainError
from turnwise.ext.programs import ProgramError
from turnwise.ext.programs.program import StartError
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeOutcome, RolloutParts, RolloutRequest
from turnwise.rollout.producer import FailureWatch, RolloutProducer
from turnwise.tasks import Task
from turnwise.types import Message, StopReason, ToolCall

ECHO_JSON = f"""printf '{{"a": [{{"b": "%s"}}]}}' "$({CHAT_LOOP})\""""
LOOP = {"command": f"{CHAT_LOOP} {{prompt}}"}


def ended(outcome: EpisodeOutcome) -> tuple[StopReason, list[Any], float]:
    (trajectory,) = outcome.trajectories
    return trajectory.stop_reason, trajectory.rewards, trajectory.metrics["turns"]


async def test_a_program_acts_and_is_scored_as_any_agent_is() -> None:
    outcome = await run_episode(LINES, LOOP)
    assert outcome.error is None, outcome.error
    reason, rewards, turns = ended(outcome)
    assert (reason, turns) == (StopReason.COMPLETED, 3)
    (trajectory,) = outcome.trajectories
    turn_ids = [segment.turn_id for segment in trajectory.segments if segment.sampled]
    assert rewards == [(turn_ids[-1], "score", 1.0)]
    assert trajectory.metrics["tool_calls"] == 2
    # Each call is counted on the turn that made it, although the program did not say which that was.
    assert [trajectory.turn_metrics[turn]["tool_calls"] for turn in turn_ids[:2]] == [1, 1]
    assert (trajectory.metrics["blackbox/nonzero_exits"], trajectory.metrics["blackbox/killed_processes"]) == (0, 0)


@pytest.mark.parametrize(
    "agent",
    [
        {"command": CHAT_LOOP},
        {"command": f"sh -c '{CHAT_LOOP} \"$(cat {{prompt_file}})\"'"},
        {"command": f"{CHAT_LOOP} {{user}}", "env": {"IDS": "1"}, "dialect": "openai"},
        {"command": CHAT_LOOP, "stdin": "{task}", "result": "stdout"},
        {"command": f"sh -c '{CHAT_LOOP} > answer.txt'", "result": "file:answer.txt"},
        {"command": ["sh", "-c", ECHO_JSON], "result": "json:stdout#a.0.b"},
    ],
    ids=["stdin", "prompt-file", "call-ids", "stdout", "file", "json"],
)
async def test_every_input_and_result_channel_of_a_program_works(agent: dict[str, Any]) -> None:
    outcome = await run_episode(LINES, agent)
    assert outcome.error is None, outcome.error
    assert ended(outcome)[0] is StopReason.COMPLETED
    assert outcome.trajectories[0].reward == 1.0


async def test_an_answer_that_is_missing_is_none() -> None:
    outcome = await run_episode(LINES, {**LOOP, "result": "file:answer.txt"})
    assert (outcome.error, outcome.trajectories[0].reward) == (None, 0.0)


async def test_turns_that_are_used_up_end_a_program_that_goes_on_asking() -> None:
    # It dies of the refusal.
    outcome = await run_episode(LINES, LOOP, max_turns=2)
    assert (outcome.error, ended(outcome)[0]) == (None, StopReason.MAX_TURNS)
    # It asks again and again, and is ended.
    asking = f"sh -c 'while true; do {CHAT_LOOP} x; done'"
    outcome = await run_episode(LINES, {"command": asking, "grace": 0.3}, max_turns=2)
    assert (outcome.error, ended(outcome)) == (None, (StopReason.MAX_TURNS, [(None, "score", 0.0)], 2))
    assert outcome.trajectories[0].metrics["blackbox/lingered"] == 1


async def test_answer_that_is_a_pipe_or_a_device_is_no_answer() -> None:
    for act in ("mkfifo a", "ln -s /dev/zero a", "truncate -s 9G a"):
        outcome = await run_episode(LINES, {"command": f"sh -c '{CHAT_LOOP} x > /dev/null; {act}'", "result": "file:a"})
        assert [value for *_, value in ended(outcome)[1]] == [0.0], act


async def test_token_limit_stops_the_program() -> None:
    outcome = await run_episode(LINES, LOOP, max_total_tokens=200)
    assert (outcome.error, ended(outcome)[0]) == (None, StopReason.MAX_TOKENS)


async def test_too_many_unusable_calls_end_the_episode() -> None:
    wrong = [say("", ToolCall("", "nothing", {"x": n})) for n in range(9)]
    outcome = await run_episode(wrong, {**LOOP, "grace": 0.3})
    assert (outcome.error, ended(outcome)[0], ended(outcome)[2]) == (None, StopReason.INVALID_CALLS, 3)


@pytest.mark.long
async def test_only_a_program_without_requests_is_unscored() -> None:
    outcome = await run_episode(LINES, {**LOOP, "env": {"CRASH_AFTER": "2"}})
    assert outcome.error is None
    reason, rewards, turns = ended(outcome)
    assert (reason, turns, [value for *_, value in rewards]) == (StopReason.COMPLETED, 2, [0.0])
    assert outcome.trajectories[0].metrics["blackbox/nonzero_exits"] == 1
    strict = {**LOOP, "env": {"CRASH_AFTER": "2"}, "nonzero_exit": "error"}
    outcome = await run_episode(LINES, strict)
    assert type(outcome.error) is AgentError
    assert "exit status 3: the program is confused" in str(outcome.error)
    assert ended(outcome)[:2] == (StopReason.ERROR, [])
    # It never asked: that is no fault of the policy.
    outcome = await run_episode(LINES, {**LOOP, "env": {"CRASH_AFTER": "0"}})
    assert isinstance(outcome.error, ProgramError)
    assert outcome.error.retryable
    assert "never asked the model: the program is confused" in str(outcome.error)
    outcome = await run_episode(LINES, {"command": "sh -c 'kill -9 $$'"})
    assert "signal 9 ended it" in str(outcome.error)
    assert ended(outcome)[:2] == (StopReason.ERROR, [])


async def test_a_program_that_never_begins_ends_the_run_after_a_group_s_attempts() -> None:
    config = RolloutConfig(
        env=SpecConfig(name="lookup"),
        agent=NamedConfig(name="blackbox", config={"command": "false"}),
        concurrency=2,
        retries=1,
    )
    renderer, written = renderer_for("qwen3"), []
    parts = RolloutParts(renderer, write=written.append)
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, LINES), None, parts)
    requests = [RolloutRequest(Task(f"t{number}", "go"), "val", group_size=2) for number in range(9)]
    try:
        with pytest.raises(TrainError, match=r"began in no episode: the first 4 attempts.*'false' failed: exit"):
            await producer.gather(requests)
    finally:
        await producer.close()
    assert len(written) < 8
    # Not where an agent has begun before.
    watch = FailureWatch()
    watch.check_began(None, 1)
    watch.check_began(StartError("it exited"), 1)


async def test_a_server_that_fails_is_no_fault_of_the_policy() -> None:
    outcome = await run_episode([LINES[0], InferenceError("the server is gone")], LOOP)
    assert isinstance(outcome.error, InferenceError)
    assert ended(outcome)[:2] == (StopReason.ERROR, [])


@pytest.mark.long
async def test_time_limits_stop_the_program() -> None:
    sleeping = {"command": "sleep 1000", "timeout": 0.3}
    outcome = await run_episode(LINES, sleeping)
    assert (outcome.error, ended(outcome)[0]) == (None, StopReason.TIMEOUT)
    outcome = await run_episode(LINES, {"command": "sleep 1000"}, episode_timeout=0.5)
    assert (outcome.error, ended(outcome)[0]) == (None, StopReason.TIMEOUT)


@pytest.mark.parametrize("act", ["kill -9 $$", "kill -9 $PPID; sleep 1000", "yes", "kill -SEGV $$"])
async def test_model_that_ends_its_own_program_loses(act: str, caplog: pytest.LogCaptureFixture) -> None:
    command = f"sh -c '{CHAT_LOOP} \"$1\"; {act}' sh {{task}}"
    agent = {"command": command, "output_limit": 100_000, "env": {"CRASH_AFTER": "2"}}
    outcome = await run_episode(LINES, agent)
    assert outcome.error is None
    reason, rewards, turns = ended(outcome)
    assert (reason, turns, [value for *_, value in rewards]) == (StopReason.COMPLETED, 2, [0.0])
    assert outcome.trajectories[0].metrics["blackbox/nonzero_exits"] == 1
    assert "an episode is scored as it is: the program 'sh' failed: " in caplog.text


async def test_program_that_is_killed_while_the_machine_is_out_of_memory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 7\noom_kill 3\n")
    monkeypatch.setattr("turnwise.ext.programs.program._MACHINE", counters)
    command = f"sh -c '{CHAT_LOOP} \"$1\"; echo oom_kill 4 > {counters}; kill -9 $$' sh {{task}}"
    outcome = await run_episode(LINES, {"command": command})
    assert isinstance(outcome.error, ProgramError)
    assert outcome.error.retryable
    assert "signal 9 ended it while the machine was out of memory" in str(outcome.error)
    assert ended(outcome)[:2] == (StopReason.ERROR, [])


async def test_flooding_program_is_killed_and_its_turns_are_kept() -> None:
    flooding = {"command": f"sh -c '{CHAT_LOOP} \"$1\"; yes' sh {{task}}", "output_limit": 100_000}
    outcome = await run_episode(LINES, {**flooding, "nonzero_exit": "error"})
    assert type(outcome.error) is AgentError
    for words in ("wrote more than output_limit=100000 bytes and was killed", "raise that key of agent.config", "y\ny"):
        assert words in str(outcome.error)
    reason, rewards, turns = ended(outcome)
    assert (reason, rewards, turns) == (StopReason.ERROR, [], len(LINES))


async def test_an_environment_that_fails_ends_the_program_and_is_an_error() -> None:
    agent = {"command": f"sh -c '{CHAT_LOOP} x; sleep 1000'", "grace": 0.2}
    outcome = await run_episode([say("", team())] * 3, agent, env="support.agents.blackbox_episodes:Broken")
    assert "the table is gone" in str(outcome.error)
    assert ended(outcome)[:2] == (StopReason.ERROR, [])


async def test_an_answer_that_a_limit_cut_is_told_as_such() -> None:
    outcome = await run_episode([say("word " * 50)], LOOP, max_tokens_per_turn=8)
    assert (outcome.error, ended(outcome)[0]) == (None, StopReason.MAX_TOKENS)


async def test_max_concurrent_bounds_the_programs_that_run() -> None:
    live: set[str] = set()
    peak = 0
    several = asyncio.Event()

    async def by_turn(request: ScriptedRequest) -> Message:
        nonlocal peak
        turn = request.text.count("<|im_start|>assistant") - 1
        live.add(request.session_id)
        peak = max(peak, len(live))
        if peak > 1:
            several.set()
        # Programs are quick: the first one waits for a second, else they might just come one after the other.
        await several.wait()
        if turn == 2:
            live.discard(request.session_id)
        return LINES[turn]

    async with asyncio.timeout(90), running(by_turn, {**LOOP, "max_concurrent": 3}) as runner:
        outcomes = await asyncio.gather(*(runner.run(spec(member)) for member in range(8)))
    assert [outcome.error for outcome in outcomes] == [None] * 8
    assert [outcome.trajectories[0].reward for outcome in outcomes] == [1.0] * 8
    assert 1 < peak <= 3
