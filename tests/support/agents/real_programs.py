"""Claude Code, Codex and mini-swe-agent, run on the task of making ``calc.py`` print 5."""

from __future__ import annotations

import shlex
from pathlib import Path

from support.agents.isolated_programs import MODEL, Caged, ProgramRun, program

BUGGY = "def add(a, b):\n    return a - b\n\n\nprint(add(2, 3))\n"
CODEX = """model = "{model}"
model_provider = "local"
{more}
[model_providers.local]
name = "local"
base_url = "{base}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
{provider}
"""


async def claude(cage: Caged, *flags: str, then: str = "", **env: str) -> ProgramRun:
    """Run Claude Code, and perhaps a second time on what the user says then."""
    argv = [program("claude", ".cache/npm/node_modules/.bin"), "-p", "Make calc.py print 5, then say so."]
    argv += ["--output-format", "json", "--model", MODEL, "--dangerously-skip-permissions", *flags]
    if then:
        second_argv = [argv[0], "-p", then, "--continue", *argv[3:]]
        argv = ["sh", "-ec", f"{shlex.join(argv)}; {shlex.join(second_argv)}"]
    settings = {
        "ANTHROPIC_BASE_URL": cage.base,
        "ANTHROPIC_API_KEY": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
        **env,
    }
    return await cage.run(argv, {name: value for name, value in settings.items() if value})


async def codex(cage: Caged, more: str = "", *, provider: str = "", then: str = "", model: str = MODEL) -> ProgramRun:
    """Run Codex with more settings (of the provider), and perhaps a second time on what the user says then."""
    settings = cage.home / ".codex"
    settings.mkdir()
    text = CODEX.format(model=model, base=cage.base, more=more, provider=provider)
    (settings / "config.toml").write_text(text)
    start = [program("codex", ".cache/npm/node_modules/.bin"), "exec"]
    flags = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
    argv = [*start, *flags, "Make calc.py print 5, then say so."]
    if then:
        argv = ["sh", "-ec", f"{shlex.join(argv)}; {shlex.join([*start, 'resume', '--last', *flags, then])}"]
    return await cage.run(argv, {"LOCAL_KEY": "any"})


async def mini(cage: Caged, *flags: str, route: str = "chat") -> ProgramRun:
    """Run mini-swe-agent by one of litellm's routes."""
    argv = [program("mini", ".venv-agents/bin"), "-t", "Make calc.py print 5, then submit.", "-y", "--exit-immediately"]
    argv += ["-m", f"{'anthropic' if route == 'messages' else 'openai'}/{MODEL}", "-l", "0"]
    argv += ["-o", str(cage.home / "left.json"), *flags]
    if route == "responses":
        argv += ["--model-class", "litellm_response"]
    settings = {
        "OPENAI_API_BASE": f"{cage.base}/v1",
        "OPENAI_API_KEY": "any",
        "ANTHROPIC_API_BASE": cage.base,
        "ANTHROPIC_API_KEY": "any",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PATH": str(Path(argv[0]).parent) + ":/usr/bin:/bin",
    }
    return await cage.run(argv, settings)
