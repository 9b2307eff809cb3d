"""What a run asks of its tasks: whose they are, how long their prompts are, and whether what they name can be made."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from support.chat.model_dirs import Family, renderer_for, write_model_dir
from support.chat.toy_renderer import ToyRenderer
from support.envs.task_envs import Closing
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.errors import ConfigError, RegistryError, TaskError
from turnwise.gateway.proxy.session import TextRenderer
from turnwise.rollout import preflight as task_checks
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.preflight import (
    PromptLimit,
    check_env_and_agent,
    check_room,
    check_specs,
    check_tools_shown,
    task_source,
)
from turnwise.tasks import Task


def rollout(env: str = "support.envs.task_envs:Paid", **more: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"env": {"name": env}, **more})


def test_an_environment_names_tasks_where_nobody_else_does() -> None:
    assert task_source("mine.jsonl", rollout(), "tasks") == "mine.jsonl"
    assert task_source(None, rollout(), "tasks") == "support.envs.task_rows:finite?n=3"
    assert task_source(None, rollout("lookup"), "tasks") == "turnwise.envs.basic.lookup:tasks"
    with pytest.raises(ConfigError, match="tasks: missing, and the environment 'single_turn' has no default_tasks"):
        task_source(None, rollout("single_turn"), "tasks")
    with pytest.raises(RegistryError, match="there is no environment 'lokup'"):
        task_source(None, rollout("lokup"), "tasks")


class TestPromptLimit:
    async def limit(self, limit: int = 1000, **config: Any) -> PromptLimit:
        prompt_limit = await PromptLimit.create(limit, ToyRenderer(), rollout(**config))
        assert prompt_limit is not None
        return prompt_limit

    async def test_prompt_limit_counts_the_first_request(self) -> None:
        """The toy renderer writes one id per character: the sum can be seen."""
        limit = await self.limit()
        short, long = (limit.tokens(Task("a", "x" * n)) for n in (10, 110))
        assert long - short == 100
        bare = await self.limit(agent={"name": "single_turn"})
        with_tools, without = limit.tokens(Task("a", "x")), bare.tokens(Task("a", "x"))
        assert with_tools > without
        # A task may select tools, and name another environment or agent.
        assert limit.tokens(Task("a", "x", {"tool_selection": []})) == without
        assert limit.tokens(Task("a", "x", agent="single_turn")) == without
        assert limit.tokens(Task("a", "x", env="lookup")) not in (with_tools, without)

    async def test_tasks_at_the_limit_stay(self) -> None:
        tokens = (await self.limit()).tokens(Task("a", "x"))
        assert (await self.limit(tokens))(Task("a", "x")) is None
        assert (await self.limit(tokens - 1))(Task("a", "x")) == f"more than {tokens - 1} tokens"

    async def test_tools_that_the_configuration_loads_are_counted(self, tmp_path: Path) -> None:
        file = tmp_path / "tools.py"
        file.write_text(
            "from turnwise import function_tool\n\n@function_tool\ndef extra_of_this_test(name: str) -> str:\n"
            "    '''More.'''\n    return name\n"
        )
        more = await PromptLimit.create(
            9, ToyRenderer(), RolloutConfig.model_validate({
                "env": {"name": "support.envs.task_envs:Paid", "tools": {"function_tool_path": str(file)}}
            }),
        )  # fmt: skip
        assert more is not None
        plain = await self.limit()
        assert more.tokens(Task("a", "x")) > plain.tokens(Task("a", "x"))
        assert more.tokens(Task("a", "x", env="lookup")) == plain.tokens(Task("a", "x", env="lookup"))

    async def test_no_limit_leaves_nothing_out(self) -> None:
        assert await PromptLimit.create(None, ToyRenderer(), rollout()) is None

    async def test_an_uncountable_prompt_raises_task_error(self) -> None:
        limit = await self.limit()
        with pytest.raises(TaskError, match=r"task 'a': .*tool_selection.* names 'nope'"):
            limit(Task("a", "x", {"tool_selection": ["nope"]}))
        with pytest.raises(TaskError, match="task 'a': its environment cannot be made: there is no environment 'nope'"):
            limit(Task("a", "x", env="nope"))


class TestSpecs:
    async def test_environments_of_tasks_are_made_once_and_closed(self) -> None:
        counts_before = (Closing.made, Closing.closed)
        name = "support.envs.task_envs:Closing"
        tasks = [Task(str(n), "p", env=name, env_config={"pays": n % 3}) for n in range(30)]
        await check_specs([*tasks, Task("agent", "p", agent="support.envs.task_envs:Greeting")], rollout())
        assert (Closing.made - counts_before[0], Closing.closed - counts_before[1]) == (3, 3)

    async def test_the_run_s_own_environment_is_not_made(self) -> None:
        await check_specs([Task("a", "p")], rollout("support.envs.task_envs:Broken"))
        check_env_and_agent(rollout("support.envs.task_envs:Broken"))

    def test_the_run_s_own_environment_and_agent_must_be_there(self) -> None:
        with pytest.raises(RegistryError, match="no environment 'lokup'; did you mean 'lookup'"):
            check_env_and_agent(rollout("lokup"))
        unknown = rollout(agent={"name": "raect"})
        with pytest.raises(RegistryError, match="no agent is called 'raect'; did you mean 'react'"):
            check_env_and_agent(unknown)

    async def test_no_more_than_some_environments_are_held_to_count_prompts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(task_checks, "_TOOLSETS_HELD", 4)
        limit = await PromptLimit.create(1000, ToyRenderer(), rollout())
        assert limit is not None
        made_before = Closing.made
        tasks = [Task(str(n), "p", env="support.envs.task_envs:Closing", env_config={"pays": n}) for n in range(9)]
        assert [limit(task) for task in [*tasks, *tasks[-1:]]] == [None] * 10
        assert Closing.made - made_before == 9
        gc.collect()
        assert sum(type(instance) is Closing for instance in gc.get_objects()) <= 4

    @pytest.mark.parametrize(
        ("task", "message"),
        [
            (Task("a", "p", env="lokup"), "task 'a': its environment .*no environment 'lokup'.*lookup"),
            (Task("a", "p", env_config={"pay": 1}), "task 'a': its environment .*does not take.*pay"),
            (
                Task("a", "p", env="support.envs.task_envs:Broken"),
                "task 'a': its environment .*OSError: no such database",
            ),
            (Task("a", "p", agent="raect"), "task 'a': its agent .*react"),
            (Task("a", "p", agent_config={"x": 1}), "task 'a': its agent .*rejects its configuration"),
        ],
    )
    async def test_an_environment_that_cannot_be_made_raises(self, task: Task, message: str) -> None:
        with pytest.raises(TaskError, match=message):
            await check_specs([Task("fine", "p"), task], rollout())


PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHY = "{% if tools and messages[0].role == 'system' %}{{ tools[0].function.name + '\\n' }}{% endif %}" + PLAIN


class TestToolsShown:
    """An environment offers tools, and a chat template may leave them out without a word."""

    @pytest.fixture
    def silent(self, tmp_path: Path) -> TemplateRenderer:
        return load_renderer(write_model_dir(tmp_path / "silent", Family("plain"), template=PLAIN))

    async def test_a_template_without_tools_is_refused_with_the_remedy(self, silent: TemplateRenderer) -> None:
        with pytest.raises(
            ConfigError,
            match=r"environment 'lookup' offers the model tools \(team_of, manager_of\), but the chat template shows "
            r"none: .* Set renderer\.chat_template to one that shows tools: hermes, hermes-short, or a jinja file",
        ):
            await check_tools_shown([Task("a", "x")], silent, rollout("lookup"))

    async def test_who_is_offered_none_needs_none(self, silent: TemplateRenderer) -> None:
        tasks = [Task("a", "x")]
        await check_tools_shown(tasks, silent, rollout("guess_number"))
        await check_tools_shown(tasks, silent, rollout("lookup", agent={"name": "single_turn"}))
        await check_tools_shown([Task("a", "x", {"tool_selection": []})], silent, rollout())
        await check_tools_shown(tasks, TextRenderer(), rollout("lookup"))

    async def test_environment_named_by_a_task_is_checked(self, silent: TemplateRenderer) -> None:
        tasks = [Task("a", "x"), Task("b", "x", env="lookup")]
        with pytest.raises(ConfigError, match="environment 'lookup' offers the model tools"):
            await check_tools_shown(tasks, silent, rollout("guess_number"))

    async def test_tools_loaded_by_the_configuration_are_checked(
        self, silent: TemplateRenderer, tmp_path: Path
    ) -> None:
        file = tmp_path / "tools.py"
        file.write_text(
            "from turnwise import function_tool\n\n@function_tool\ndef loaded_of_this_test(name: str) -> str:\n"
            "    '''More.'''\n    return name\n"
        )
        config = RolloutConfig.model_validate(
            {"env": {"name": "support.envs.task_envs:Paid", "tools": {"function_tool_path": str(file)}}}
        )
        with pytest.raises(ConfigError, match="loaded_of_this_test"):
            await check_tools_shown([Task("a", "x")], silent, config)

    async def test_template_is_checked_with_the_prompts_of_the_tasks(self, tmp_path: Path) -> None:
        renderer = load_renderer(write_model_dir(tmp_path / "shy", Family("plain"), template=SHY), format="plain")
        briefed = Task("a", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}])
        await check_tools_shown([briefed], renderer, rollout("lookup"))
        with pytest.raises(ConfigError, match="shows none"):
            await check_tools_shown(
                [briefed, Task("b", "x", env="support.envs.task_envs:Paid")], renderer, rollout("lookup")
            )

    async def test_template_that_drops_calls_is_refused_with_model_and_remedy(self, tmp_path: Path) -> None:
        path = write_model_dir(tmp_path / "dropping", Family("plain"), template="{{ tools|tojson }}" + PLAIN)
        with pytest.raises(
            ConfigError,
            match=r"environment 'lookup' offers the model tools \(team_of, manager_of\), but no call of them can be "
            r"read: model '.*dropping': its own chat template drops tool calls, .*; set renderer\.chat_template to one",
        ):
            await check_tools_shown([Task("a", "x")], load_renderer(path), rollout("lookup"))
        await check_tools_shown([Task("a", "x")], load_renderer(path), rollout("guess_number"))
        await check_tools_shown([Task("a", "x")], load_renderer(path, format="plain"), rollout("lookup"))

    async def test_no_environment_is_made_where_the_template_shows_tools(self) -> None:
        config = rollout("support.envs.task_envs:NoSuchEnvironment")
        await check_tools_shown([Task("a", "x")], renderer_for("qwen3"), config)
        await check_tools_shown([Task("a", "x")], ToyRenderer(), config)


class TestRoom:
    async def check(self, context: int, *prompts: str, **more: Any) -> list[str]:
        notices: list[str] = []
        tasks = [Task(f"t{number}", prompt) for number, prompt in enumerate(prompts)]
        await check_room(tasks, rollout(agent={"name": "single_turn"}, **more), ToyRenderer(), context, notices.append)
        return notices

    async def test_a_context_without_room_for_the_first_prompt_stops_the_run(self) -> None:
        """The toy renderer writes one id per character and three around them."""
        with pytest.raises(ConfigError) as error:
            await self.check(203, "w" * 200)
        for words in ("rollout.context_length", "'t0'", "takes 203 tokens", "the context has 203", "raise rollout."):
            assert words in str(error.value)

    async def test_little_room_is_told_and_enough_is_not(self) -> None:
        [warning] = await self.check(203 + 63, "w" * 200)
        assert "takes 203 of 266 tokens, which leaves 63 for turns" in warning
        assert await self.check(203 + 64, "w" * 200) == []
        assert await self.check(203 + 20, "w" * 200, max_tokens_per_turn=20) == []
        assert len(await self.check(203 + 19, "w" * 200, max_tokens_per_turn=20)) == 1

    async def test_error_if_none_of_three_prompts_fits(self) -> None:
        assert await self.check(100, "w" * 200, "w" * 300, "w") == []
        with pytest.raises(ConfigError, match="'t1' takes 153"):
            await self.check(100, "w" * 200, "w" * 150, "w" * 300, "w")

    async def test_prompt_length_includes_tools_that_the_agent_offers(self) -> None:
        notices: list[str] = []
        await check_room([Task("t", "x")], rollout(), ToyRenderer(), 4 + 64, notices.append)
        assert len(notices) == 1, "the tool's name is in the prompt"
        await check_room([Task("t", "x")], rollout(agent={"name": "single_turn"}), ToyRenderer(), 68, notices.append)
        assert len(notices) == 1

    async def test_check_room_skips_uncountable_prompts(self) -> None:
        assert await self.check(300) == []
        notices: list[str] = []
        broken = [Task("t", "x", env_config={"nonsense": 1})]
        await check_room(broken, rollout(), ToyRenderer(), 1, notices.append)
        assert notices == []
