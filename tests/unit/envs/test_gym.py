"""Environments of this package through Gymnasium: ids, spaces, the checker, the private loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import turnwise
from support.envs.shipped import SHIPPED
from support.envs.unshipped import UNSHIPPED
from turnwise.envs import Env, SingleTurnEnv, StepResult, env_names, register
from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.gym.to_gymnasium import ActionSpace, GymnasiumAdapter, ObservationSpace, to_gymnasium
from turnwise.errors import EnvError, RegistryError, TaskError
from turnwise.tasks import Task
from turnwise.types import ToolCall, ToolSchema, text_of

gymnasium.register_envs(turnwise)


def word(task, final):
    return float(final is not None and text_of(final) == task.data["word"])


def words():
    yield Task("one", "say ho", {"word": "ho"})
    yield Task("two", "say hi", {"word": "hi"})


# Arguments of environments without defaults.
NEEDS = {
    "gymnasium": {"env_id": "FrozenLake-v1"},
    "gymnasium_tools": {"env_id": "Blackjack-v1"},
    "nim": {"opponent": "random"},
    "single_turn": {"scorer": f"{__name__}:word", "tasks": f"{__name__}:words"},
    "task": {"tasks": f"{__name__}:words"},
    "tool": {"scorer": f"{__name__}:word", "tasks": f"{__name__}:words"},
}


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Of those with sandboxes, one is quick.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in ("swe", "terminal", "code") else name
        for name in (*SHIPPED, *UNSHIPPED)
    ],
)
def test_every_shipped_environment_passes_the_checker_of_gymnasium(name):
    env = gymnasium.make(f"turnwise/{name}-v0", render_mode="ansi", **NEEDS.get(name, {}))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped)
    finally:
        env.close()


@pytest.mark.parametrize(
    "code",
    [
        "import gymnasium, turnwise; gymnasium.register_envs(turnwise)",
        pytest.param("import turnwise, gymnasium; gymnasium.register_envs(turnwise)", marks=pytest.mark.long),
        pytest.param(
            "import turnwise; import importlib.util; importlib.util.find_spec('gymnasium'); import gymnasium",
            marks=pytest.mark.long,
        ),
        pytest.param("import turnwise; from gymnasium import spaces; import gymnasium", marks=pytest.mark.long),
        pytest.param("from turnwise.envs.basic.lookup import LookupEnv; import gymnasium", marks=pytest.mark.long),
        "from turnwise.envs.gym.to_gymnasium import to_gymnasium; import gymnasium",
    ],
)
def test_the_ids_are_there_whatever_was_imported_first(code):
    printed = child(
        f"{code}\nenv = gymnasium.make('turnwise/lookup-v0')\nprint(env.reset(seed=1)[0][0]['content']); env.close()"
        "\nimport sys; print([each for each in sys.meta_path if 'Gymnasium' in type(each).__name__])"
    )
    assert printed.startswith("Who manages ")
    assert printed.endswith("[]\n")


def test_gymnasium_module_form_imports_the_named_module():
    code = (
        "import gymnasium\nenv = gymnasium.make('turnwise.envs.gym.to_gymnasium:turnwise/lookup-v0')\n"
        "print(env.reset(seed=1)[0][0]['content'])\nenv.close()"
    )
    assert child(code).startswith("Who manages ")


def test_importing_the_package_imports_no_gymnasium():
    assert child("import turnwise, sys; print('gymnasium' in sys.modules)") == "False\n"


def test_environments_registered_later_have_gymnasium_ids():
    register("later.one", LookupEnv)
    env = gymnasium.make("turnwise/later.one-v0")
    assert isinstance(env.unwrapped.env, LookupEnv)
    env.close()
    register("not for gymnasium", LookupEnv)
    assert "not for gymnasium" in env_names()


def test_an_episode_step_by_step_and_its_conversation():
    with gymnasium.make("turnwise/lookup-v0", render_mode="ansi") as env:
        observation, info = env.reset(seed=5, options={"task": 3})
        assert info["task_id"] == "lookup-train-0-3"
        person = observation[0]["content"].split()[-1].rstrip("?")
        calls = [{"name": "team_of", "arguments": {"person": person}}]
        observation, reward, terminated, truncated, info = env.step({"tool_calls": calls})
        assert (reward, terminated, truncated) == (0.0, False, False)
        [team] = observation
        assert team["role"] == "tool"
        assert info["metrics"] == {"tool_calls": 1.0, "tool_errors": 0.0, "tool_calls/team_of": 1.0}
        call = ToolCall("c", "manager_of", {"team": team["content"]})
        observation, *_ = env.step({"role": "assistant", "content": "", "tool_calls": [call]})
        observation, reward, terminated, truncated, _ = env.step(observation[0]["content"])
        assert (observation, reward, terminated, truncated) == ((), 1.0, True, False)
        rendered = env.render()
        assert rendered.splitlines()[0].startswith("[user] Who manages ")
        assert f"[assistant] team_of({{'person': '{person}'}})" in rendered
        assert "[tool] " in rendered


def test_seeds_decide_the_task_and_the_world():
    one, other = to_gymnasium("lookup"), to_gymnasium("lookup")
    first = [one.reset(seed=3), one.reset(), one.reset(), one.reset(seed=3)]
    second = [other.reset(seed=3), other.reset(), other.reset(), other.reset(seed=3)]
    assert first == second
    assert first[0] == first[3]
    assert len({str(observation) for observation in first}) == 3
    one.close()
    other.close()


def test_a_truncated_episode_is_scored_in_its_last_step():
    class Limited(Env):
        def reset(self, task=None, *, seed=None):
            return "go", {}

        def step(self, action):
            return StepResult("on", 0.25, False, True, {})

        def score(self, final):
            return {"late": 0.5}

    env = to_gymnasium(Limited)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("go")
    assert (reward, terminated, truncated) == (0.75, False, True)
    assert info["rewards"] == {"step": 0.25, "late": 0.5}
    env.close()


async def test_adapter_works_inside_a_running_loop_and_leaves_no_thread():
    threads_before = threading.active_count()
    env = to_gymnasium("lookup")
    observation, _ = env.reset(seed=1)
    assert observation[0]["role"] == "user"
    assert threading.active_count() == threads_before + 1
    env.close()
    env.close()
    assert threading.active_count() == threads_before
    observation, _ = env.reset(seed=1)
    env.close()


def test_an_environment_that_is_async_keeps_its_loop():
    class Loops(Env):
        async def reset(self, task=None, *, seed=None):
            self.lock = asyncio.Lock()
            await self.lock.acquire()
            self.waiting = asyncio.ensure_future(self.lock.acquire())
            return "go", {}

        async def step(self, action):
            self.lock.release()
            await self.waiting
            return StepResult([], 1.0, True, False, {})

    env = to_gymnasium(Loops)
    env.reset()
    assert env.step("x")[1] == 1.0
    env.close()


def test_vectors_of_environments():
    envs = gymnasium.make_vec("turnwise/lookup-v0", num_envs=3, vectorization_mode="sync")
    observations, _ = envs.reset(seed=7)
    assert len(observations) == 3
    _, rewards, terminated, *_ = envs.step(tuple("nobody" for _ in range(3)))
    assert list(rewards) == [0.0] * 3
    assert all(terminated)
    envs.close()


def test_wrong_arguments_raise_errors():
    with pytest.raises(EnvError, match="render_mode is 'human'"):
        to_gymnasium("lookup", render_mode="human")
    with pytest.raises(RegistryError, match="does not take"):
        to_gymnasium("lookup", nonsense=1)
    with pytest.raises(EnvError, match="applies to an environment's name"):
        to_gymnasium(LookupEnv, size=3)
    with pytest.raises(TaskError, match="it contains no tasks"):
        to_gymnasium("lookup", tasks=list)
    env = to_gymnasium("lookup", tasks=[Task("a", "x", {"person": "ana"})])
    assert env.reset(options={"task": "a"})[1]["task_id"] == "a"
    assert env.reset(options={"task": {"id": "b", "prompt": "y"}})[1]["task_id"] == "b"
    for option in (1, "b", 1.5, [1], True):
        with pytest.raises(TaskError, match=r"there are 1 tasks"):
            env.reset(options={"task": option})
    for action in (3, {"role": "user"}, {"tool_calls": [3]}, {"tool_calls": 3}, {"content": 3}):
        with pytest.raises(EnvError):
            env.step(action)
    env.close()


def test_closing_before_the_first_reset_closes_the_environment_and_once():
    class Counts(LookupEnv):
        closed = 0

        async def close(self):
            self.closed += 1

    inner = Counts()
    env = to_gymnasium(inner)
    env.close()
    env.close()
    assert inner.closed == 1
    env.reset(seed=1)
    env.close()
    assert inner.closed == 2


def test_invalid_environments_and_observations_raise_errors():
    with pytest.raises(EnvError, match="made 3: it must make an environment"):
        to_gymnasium(lambda: 3)

    class Half(LookupEnv):
        def reset(self, task=None, *, seed=None):
            return "\ud800", {}

    env = to_gymnasium(Half)
    with pytest.raises(EnvError, match="an observation is not JSON"):
        env.reset(seed=1)
    env.close()


def test_environment_error_is_raised_and_reset_works_after():
    env = to_gymnasium(lambda: SingleTurnEnv(lambda task, final: 1 / 0))
    with pytest.raises(EnvError, match="got no task"):
        env.reset()
    env.reset(options={"task": Task("a", "hi")})
    with pytest.raises(EnvError, match="ZeroDivisionError"):
        env.step("x")
    env.reset(options={"task": Task("a", "hi")})
    env.close()


TOOLS = (
    ToolSchema("go", "", {"type": "object", "properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"]}),
    ToolSchema("count", "", {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}}),
)


def test_the_space_of_actions():
    space = ActionSpace(TOOLS)
    space.seed(3)
    samples = [space.sample() for _ in range(200)]
    space.seed(3)
    assert samples == [space.sample() for _ in range(200)]
    assert all(sample in space for sample in samples)
    called = [call for sample in samples for call in sample.get("tool_calls", ())]
    assert {call["name"] for call in called} == {"go", "count"}
    assert {call["arguments"]["to"] for call in called if call["name"] == "go"} == {"a", "b"}
    assert {call["arguments"].get("n", 3) for call in called if call["name"] == "count"} == {3, 4, 5}
    assert any(sample["content"] for sample in samples)
    assert "text" in space
    assert {"tool_calls": [ToolCall("a", "go", {})]} in space
    for wrong in (3, None, {"role": "user"}, {"tool_calls": [{}]}, {"content": 1}):
        assert wrong not in space
    assert space.from_jsonable(space.to_jsonable(["a", samples[0]]))[0] == {"role": "assistant", "content": "a"}
    assert space == ActionSpace(TOOLS)
    assert space != ActionSpace()
    with pytest.raises(ValueError, match="mask"):
        space.sample(mask=1)


def test_the_space_of_observations():
    space = ObservationSpace()
    space.seed(3)
    samples = [space.sample() for _ in range(20)]
    space.seed(3)
    assert samples == [space.sample() for _ in range(20)]
    assert all(sample in space for sample in samples)
    assert () in space
    for wrong in ([], "text", ({"role": "nobody"},), ({"role": "user", "content": object()},)):
        assert wrong not in space
    assert space.from_jsonable(space.to_jsonable(samples)) == samples
    assert space == ObservationSpace()


def test_gymnasium_ids_name_the_adapter_class():
    env = gymnasium.make("turnwise/lookup-v0")
    assert isinstance(env.unwrapped, GymnasiumAdapter)
    assert env.spec.id == "turnwise/lookup-v0"
    env.close()
