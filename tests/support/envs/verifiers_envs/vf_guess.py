"""Guess a number for verifiers: the environment answers each guess as the user of the conversation."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=0.5)
    async def patience(self, trace: vf.Trace) -> float:
        return trace.num_turns / 8

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0 and "give up" in trace.last_reply


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=6)


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: NumberTask, agents: vf.Agents) -> None:
        guessed = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and not guessed:
                answer = segment.last_reply
                guess = int(answer) if answer.isdigit() else None
                guessed = guess == task.data.number
                if not guessed:
                    hint = "A number." if guess is None else "Higher." if guess < task.data.number else "Lower."
                    segment = await interaction.turn(hint)
        interaction.trace.record_reward("found", float(guessed))


class GuessConfig(vf.TasksetConfig):
    most: int = 100


class Guess(vf.Taskset[NumberTask, GuessConfig]):
    def load(self) -> Iterator[NumberTask]:
        for number in range(1, self.config.most + 1):
            data = NumberData(prompt=f"Guess my number, from 1 to {self.config.most}.", number=number)
            yield NumberTask(data, self.config.task)
