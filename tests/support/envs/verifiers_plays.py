"""Recorded messages in environments of verifiers, and a program that plays them with verifiers alone.

``python verifiers_plays.py`` prints JSON: for each episode its row, the messages of the model, each part of the reward,
the sum, the stop condition, and the requests that the model was asked. The model is a scripted endpoint that verifiers'
own client asks, and the program that asks is verifiers' own ``null`` harness, run in this process.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).with_name("verifiers_envs")


def call(tool, /, **arguments):
    return {"content": "", "tool_calls": [{"id": "c1", "name": f"shelf_{tool}", "arguments": arguments}]}


def texts(*contents):
    return [{"content": content} for content in contents]


PLAYS = {
    "vf_sums": [texts(f"It is {number}." if number % 3 else str(number)) for number in range(40)],
    "vf_guess": [
        texts("50", "25", "what?", "1"),
        texts("2"),
        texts("90", "80", "70", "60", "50", "40"),
        texts("9", "I give up", "4"),
    ],
    "vf_store": [
        [call("take", name="apple"), call("pay")],
        [call("take", name="apple"), call("take", name="milk"), *texts("That is all.")],
        [call("take", name="cheese", count=2), call("steal"), call("take", amount=1), call("pay")],
    ],
}


class Endpoint:
    """An OpenAI-compatible endpoint that says one message after the other."""

    async def start(self):
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    def say(self, messages):
        self.left, self.asked = list(messages), []

    async def answer(self, request):
        from aiohttp import web

        body = await request.json()
        self.asked.append({"messages": body["messages"], "tools": body.get("tools")})
        answer = self.left.pop(0)
        delta = {"role": "assistant", "content": answer["content"]}
        calls = answer.get("tool_calls") or ()
        if calls:
            delta["tool_calls"] = [
                {
                    "index": at,
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
                }
                for at, call in enumerate(calls)
            ]
        if not body.get("stream"):
            choice = {"index": 0, "message": delta, "finish_reason": "tool_calls" if calls else "stop"}
            completion = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            return web.json_response(completion)
        choice = {"index": 0, "delta": delta, "finish_reason": "tool_calls" if calls else "stop"}
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        return web.Response(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


def install_harness():
    """Let the null harness run its program here: a program of its own takes seconds to import what it needs."""
    from verifiers.v1 import ProgramResult
    from verifiers.v1.harnesses.null import NullHarness

    class Inline:
        def __init__(self, runtime):
            self.runtime = runtime

        async def write(self, path, data):
            Path(path).write_bytes(data)

        async def prepare_uv_script(self, source, env, activate=True):
            if not hasattr(type(self), "program"):
                type(self).program = {"__name__": "chat_program"}
                exec(compile(source, "chat_program", "exec"), self.program)
            return ["chat"]

        async def run_program(self, argv, env):
            sys.argv = argv
            try:
                await self.program["main"]()
            except Exception as error:
                return ProgramResult(exit_code=1, stdout="", stderr=repr(error))
            return ProgramResult(exit_code=0, stdout="", stderr="")

    class InlineHarness(NullHarness):
        async def setup(self, runtime):
            pass

        async def launch(self, ctx, trace, runtime, *rest, **more):
            return await super().launch(ctx, trace, Inline(runtime), *rest, **more)

    InlineHarness.__module__ = "vf_inline"
    module = type(sys)("vf_inline")
    module.InlineHarness, module.__all__ = InlineHarness, ["InlineHarness"]
    sys.modules["vf_inline"] = module


async def main():
    import verifiers.v1 as vf

    install_harness()
    endpoint, rows = Endpoint(), []
    client = vf.EvalClientConfig(base_url=await endpoint.start(), api_key_var="NO_SUCH_KEY")
    for name, plays in PLAYS.items():
        seat = "player" if name == "vf_guess" else "agent"
        inline = {"harness": {"id": "vf_inline"}, "runtime": {"type": "subprocess"}}
        env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}, seat: inline}))
        async with env.serving():
            for task, answers in zip(itertools.islice(env.taskset, len(plays)), plays, strict=True):
                endpoint.say(answers)
                [slot] = env.slots(task)
                episode = await env.run_slot(slot, vf.ModelContext(model="m", client=client))
                assert episode.ok, [*episode.errors, *episode.traces[0].errors]
                [trace] = episode.traces
                row = {
                    "name": name,
                    "row": task.data.model_dump(mode="json", exclude_none=True),
                    "messages": answers[: len(answers) - len(endpoint.left)],
                    "rewards": {key: reward.value for key, reward in trace.rewards.items()},
                    "reward": trace.reward,
                    "metrics": trace.metrics,
                    "stop": trace.stop_condition,
                    "truncated": trace.is_truncated,
                    "asked": endpoint.asked,
                }
                rows.append(row)
    await endpoint.runner.cleanup()
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    os.environ["PYTHONPATH"] = str(FOLDER)
    importlib.import_module("vf_sums")
    os.chdir(tempfile.mkdtemp())
    print(json.dumps(asyncio.run(main())))
