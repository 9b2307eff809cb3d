"""The command ``eval``, of one evaluation or a suite of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnwise.cli.options import CommandResult, Overrides, as_overrides

if TYPE_CHECKING:
    from turnwise.evaluation.config import EvalConfig
    from turnwise.evaluation.metrics import EvalResult


EvaluatedEnv = Annotated[
    str | None,
    typer.Argument(
        metavar="ENV",
        help="Registered environment, pkg.mod:Class or file.py:Class; several (a,b); or a suite.yaml.",
        show_default=False,
    ),
]


def evaluate(
    env: EvaluatedEnv = None,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML configuration file.")] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Directory of a Hugging Face model.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="URL of a running server; --model names its tokenizer.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option("--key-env", help="Environment variable with the API key of a hosted --url.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Task file, or pkg.mod:function?key=value.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Maximum number of tasks.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", "-n", help="Episodes per task.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Sampling temperature.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--no-greedy", help="Also run one episode per task at temperature 0.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Registered agent, pkg.mod:Name or file.py:Name.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Number of concurrent episodes.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory for trajectories and summary.")] = None,
    fail_under: Annotated[
        float | None, typer.Option("--fail-under", min=0.0, max=1.0, help="Exit with 1 if success is below this.")
    ] = None,
) -> CommandResult:
    """Evaluate a model on an environment: success with its standard error, turns, tool errors, stop reasons."""
    from turnwise.config import load_config
    from turnwise.evaluation.config import EvalConfig

    keys = list(overrides or ())
    if env is not None and "=" in env:
        # With --config the file may name the environment, so the first argument can already be an override.
        keys, env = [env, *keys], None
    options: dict[str, Any] = {
        "rollout.env.name": env,
        "rollout.agent.name": agent,
        "rollout.temperature": temperature,
        "rollout.concurrency": concurrency,
        "model": model,
        "url": url,
        "hosted.key_env": key_env,
        "tasks": tasks,
        "limit": limit,
        "samples": samples,
        "greedy": greedy,
        "out": out,
    }
    if env is not None and ("," in env or env.endswith((".yaml", ".yml"))):
        return _evaluate_suite(env, options, keys, config, fail_under)
    result = _evaluate(load_config(EvalConfig, config, [*as_overrides(options), *keys])).to_json()
    return CommandResult(result, failed=_below({"": result}, fail_under))


def _evaluate_suite(
    env: str, options: dict[str, Any], keys: list[str], config: Path | None, fail_under: float | None
) -> CommandResult:
    """Evaluate a suite's file, or several environments with the settings of the command line."""
    from turnwise.errors import ConfigError
    from turnwise.evaluation.suite import load_suite, run_suite

    if config is not None:
        raise ConfigError(f"--config is {config}, and ENV is {env}: write settings of all into the suite's defaults")
    overrides = {key: value for key, value in options.items() if value is not None and key != "rollout.env.name"}
    out = overrides.pop("out", None)
    defaults = as_overrides(overrides, "defaults.")
    if "," not in env:
        suite = load_suite(Path(env), [*defaults, *as_overrides({"out": out}), *keys])
    else:
        defaults += [f"defaults.{key}" for key in keys]
        names = [name.strip() for name in env.split(",") if name.strip()]
        evaluations = {name: {"rollout": {"env": {"name": name}}} for name in names}
        suite = load_suite(None, defaults, {"evaluations": evaluations, "out": str(out or "runs/eval-suite")})
    rows = run_suite(suite, _evaluate)
    result = {"out": suite.out, "evaluations": [row.to_json() for row in rows]}
    below = _below({f" of {row.model} on {row.evaluation}": row.figures for row in rows}, fail_under)
    return CommandResult(result, failed=below or any(row.error is not None for row in rows))


def _below(results: Mapping[str, Mapping[str, Any]], success: float | None) -> bool:
    """Print which success rates are below a threshold, if any; ``results`` are summaries by what they are of."""
    from turnwise.evaluation.metrics import rates_below

    shortfalls = [
        f"success{of}, {name}, is {rate:.3f}, below --fail-under {success:g}"
        for of, figures in results.items()
        for name, rate in (() if success is None else rates_below(success, figures).items())
    ]
    for shortfall in shortfalls:
        typer.secho(shortfall, fg="red", err=True)
    return bool(shortfalls)


def _evaluate(config: EvalConfig) -> EvalResult:
    from turnwise.inference.builtin import forked_servers

    if config.url is None and config.model is not None:
        from turnwise.engine.capacity import served_dtype_warning

        if warning := served_dtype_warning(config.model, config.inference):
            typer.secho(f"warning: {warning}", fg="yellow", err=True)
    # The servers import while this process reads its tasks.
    with forked_servers([] if config.url is not None else [config.inference]):
        from turnwise.evaluation.runner import run_eval

        return run_eval(config)
