"""Agent frameworks as clients of a gateway, each as it comes: what they leave of a task of three turns with calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.agents.isolated_programs import ROOT, caged, call, program, says
from turnwise.inference.scripted import Line

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SCRIPTS = ROOT / "tests" / "support" / "agents" / "sdk_scripts"
FRAMEWORKS = ".venv-frameworks/bin"
CREWAI = ".venv-crewai/bin"
AI_SDK = ".cache/ai-sdk"
FINAL = "They are 3 and 7; together 10."
SUMS: list[Line] = [
    says("Two sums first.", call("add", b=2, a=1), call("add", a=3, b=4)),
    says("", call("add", a=3, b=7)),
]
ANSWERED: list[Line] = [*SUMS, says(FINAL)]
PROBED: list[Line] = [says("hello, world"), *ANSWERED]
TYPED: list[Line] = [*SUMS, says("", call("final_result", first=3, second=7, total=10))]
CALLED: list[Line] = [*SUMS, says("", call("final_answer", answer=FINAL))]
WRITTEN: list[Line] = [
    says("Thought: add.\n<code>\nsums = add(1, 2), add(3, 4)\nprint(sums)\n</code>"),
    says("Thought: the sum.\n<code>\nprint(add(*sums))\n</code>"),
    says(f"Thought: done.\n<code>\nfinal_answer({FINAL!r})\n</code>"),
]
NODE, CHAT, RESPONSES = "node", "/v1/chat/completions", "/v1/responses"
BOTH, WHOLE = ("whole", "stream"), ("whole",)
CASES = {
    "ai-sdk": (NODE, "run_ai_sdk.mjs", "responses", ANSWERED, FINAL, RESPONSES, BOTH, 1),
    "ai-sdk-chat": (NODE, "run_ai_sdk.mjs", "chat", ANSWERED, FINAL, CHAT, BOTH, 1),
    "pydantic-ai": (FRAMEWORKS, "run_pydantic_ai.py", "chat", ANSWERED, FINAL, CHAT, BOTH, 1),
    "pydantic-ai-responses": (FRAMEWORKS, "run_pydantic_ai.py", "responses", ANSWERED, FINAL, RESPONSES, BOTH, 1),
    "pydantic-ai-typed": (FRAMEWORKS, "run_pydantic_ai.py", "typed", TYPED, "first=3 second=7 total=10", CHAT, BOTH, 1),
    "crewai": (CREWAI, "run_crewai.py", "chat", ANSWERED, FINAL, CHAT, BOTH, 1),
    # Calls and results come back as prose, code with the stop string that ended it: each turn begins a branch.
    "smolagents-tools": (FRAMEWORKS, "run_smolagents.py", "tools", CALLED, FINAL, CHAT, BOTH, 3),
    "smolagents-code": (FRAMEWORKS, "run_smolagents.py", "code", WRITTEN, FINAL, CHAT, BOTH, 3),
    "inspect": (FRAMEWORKS, "run_inspect.py", "chat", ANSWERED, FINAL, CHAT, WHOLE, 1),
    # A request without tools comes first, which asks whether the model is there.
    "inspect-responses": (FRAMEWORKS, "run_inspect.py", "responses", PROBED, FINAL, RESPONSES, WHOLE, 2),
}


@pytest.mark.alike("clients")
@pytest.mark.parametrize("name", CASES)
async def test_framework_runs_have_the_expected_branches(name: str, tmp_path: Path) -> None:
    folder, script, route, turns, final, wire, kinds, branches = CASES[name]
    if folder == NODE and not (ROOT / AI_SDK / "node_modules" / "ai").exists():
        pytest.skip("the AI SDK is not installed: make test-real installs it")
    interpreter = "node" if folder == NODE else program("python", folder)
    async with caged(tmp_path, turns, sessions=2, guides=True) as cage:
        env = {"AI_SDK": str(ROOT / AI_SDK), "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}
        run = await cage.run([interpreter, str(SCRIPTS / script), *cage.bases, route], env)
    assert run.code == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line] == [final, final]
    assert run.routes == {f"{wire} {kind}" for kind in kinds}
    for trajectory in run.trajectories:
        assert (len(trajectory.leaves()), trajectory.metrics["turns"]) == (branches, len(turns)), trajectory.forks()
