"""Claude Code and the AI SDK converse with a live policy while it learns: weights change, and nothing fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from support.agents.isolated_programs import ROOT, program
from support.agents.talking_programs import TalkingProgram, talking
from support.trainer.live_run import COLOURS, Live, build_colour_model, live_config, serving_live
from support.trainer.lookup_run import MODEL, silent
from turnwise.ext.live.sessions import session_digest
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, read_trajectories

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SWAPS = 3
AI_SDK = ROOT / ".cache" / "ai-sdk"
SCRIPT = ROOT / "tests" / "support" / "agents" / "sdk_scripts" / "talk_ai_sdk.mjs"


def claude_argv(base: str) -> list[str]:
    """Return the command line of a conversation with Claude Code, with short prompts for a small model."""
    del base
    streams = ["--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
    claude = program("claude", ".cache/npm/node_modules/.bin")
    return [claude, "-p", *streams, "--model", "live", "--tools", "Read", "--system-prompt", "Be brief."]


def claude_env(base: str) -> dict[str, str]:
    """Return its settings."""
    names = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "IS_SANDBOX")
    return {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": "user", **dict.fromkeys(names, "1")}


async def ask_claude(claude: TalkingProgram, text: str) -> None:
    """Say something to Claude Code, and check that it ends its turn without an error."""
    message = {"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": text}]}}
    result = await claude.say(json.dumps(message), lambda record: record["type"] == "result")
    assert (result["subtype"], result["is_error"]) == ("success", False), result["result"]


async def ask_ai_sdk(sdk: TalkingProgram, text: str) -> None:
    """Say something through the AI SDK, and check that it has an answer."""
    assert "text" in await sdk.say(text, lambda record: True)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose context has room for what Claude Code sends."""
    directory = tmp_path_factory.mktemp("reader")
    build_colour_model(directory, context=32_768)
    return directory / MODEL


async def open_session(live: Live, name: str) -> str:
    """Open a session with consent; return its URL."""
    status, opened = await live.post("/sessions", {"id": name, "consent": True, "task_type": name})
    assert status == 200
    return live.url + str(opened["path"])


async def learn_a_step(live: Live, step: int) -> None:
    """Have other users rate four answers, and wait until a step has been learned from them."""
    for number, word in enumerate(COLOURS):
        name = f"other-{step}-{number}"
        await live.ask(name, word, x_session_end="yes")
        assert await live.rate(name, score=number) is None
    while (await live.health())["step"] < step:
        assert not live.task.done()
        await asyncio.sleep(0.02)


def versions_of(trajectory: Trajectory) -> set[int]:
    """Return the weight versions that sampled a trajectory."""
    return {version for segment in trajectory.segments for version, _, _ in segment.weight_versions}


async def test_claude_code_and_the_ai_sdk_converse_across_three_swaps(reader: Path, tmp_path: Path) -> None:
    if not (AI_SDK / "node_modules" / "ai").exists():
        pytest.skip("the AI SDK is not installed: make test-real installs it")
    changes = {"rollout": {"max_tokens_per_turn": 16}, "custom": {"live": {"redact": []}}}
    config = live_config(reader, tmp_path, **changes)
    sessions = ("claude-code", "ai-sdk")
    async with serving_live(config) as live:
        urls = [await open_session(live, name) for name in sessions]
        ai_sdk_env: Any = {"AI_SDK": str(AI_SDK)}
        async with (
            talking(claude_argv, claude_env, urls[0], tmp_path / "claude") as claude,
            talking(lambda base: ["node", str(SCRIPT), base], lambda _: ai_sdk_env, urls[1], tmp_path / "sdk") as sdk,
        ):
            await asyncio.gather(ask_claude(claude, "Colour of sun?"), ask_ai_sdk(sdk, "Colour of sun?"))
            for step in range(1, SWAPS + 1):
                learning = asyncio.create_task(learn_a_step(live, step))
                while not learning.done():
                    await asyncio.gather(ask_claude(claude, f"{step}?"), ask_ai_sdk(sdk, f"{step}?"))
                await learning
            # By the weights of the last swap.
            await asyncio.gather(ask_claude(claude, "Colour of sea?"), ask_ai_sdk(sdk, "Colour of sea?"))
            for client in (claude, sdk):
                code, errors = await client.end()
                assert code == 0, errors
        for name in sessions:
            assert await live.rate(name, thumbs="up") is None
            assert await live.finish(name) == "finished"
    by_id = {
        trajectory.id.partition("-")[2]: trajectory for trajectory in read_trajectories(live.directory / TRAJECTORIES)
    }
    for name in sessions:
        assert len(versions_of(by_id[session_digest("user", name)])) > SWAPS
    assert audit_run(live.directory, console=silent()).contradictions == []
