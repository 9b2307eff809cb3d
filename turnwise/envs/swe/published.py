"""What published rows do not say of themselves: images, test commands and what activates their environments.

Owns: :func:`recipe_of` and :func:`image_of`. Facts of SWE-bench and SWE-Gym, by repository. Refuses: reading rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PYTEST: Final = "python -m pytest -rA --tb=short -p no:cacheprovider"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a repository's tests run.

    Attributes:
        command: The command; test files, or what the framework takes instead, are put behind it.
        framework: Whose log it writes.
        before: Shell lines that come first.
        protected: Patterns of files that run tests, besides those of every repository.
        files: What is put behind the command: ``paths``, Django's ``labels``, or mypy's ``cases``.
    """

    command: str = PYTEST
    framework: str = "pytest"
    before: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    files: str = "paths"


_DJANGO: Final = Recipe(
    "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "django",
    # The tests read files with names that are not ASCII.
    before=("export LANG=en_US.UTF-8 LC_ALL=en_US.UTF-8 PYTHONIOENCODING=utf8 LANGUAGE=en_US:en",),
    files="labels",
)
_SYMPY: Final = Recipe(
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
    "sympy",
    protected=("bin/*", "sympy/testing/*", "sympy/utilities/runtests.py", "setup.cfg"),
)
_SWE_BENCH: Final = {
    "astropy/astropy": Recipe("pytest -rA -vv -o console_output_style=classic --tb=no"),
    "django/django": _DJANGO,
    "matplotlib/matplotlib": Recipe("pytest -rA"),
    "mwaskom/seaborn": Recipe("pytest --no-header -rA"),
    "pallets/flask": Recipe("pytest -rA"),
    "psf/requests": Recipe("pytest -rA"),
    "pydata/xarray": Recipe("pytest -rA"),
    "pylint-dev/pylint": Recipe("pytest -rA"),
    "pytest-dev/pytest": Recipe("pytest -rA"),
    "scikit-learn/scikit-learn": Recipe("pytest -rA"),
    # tox passes no variables on, so its runs are read from the log.
    "sphinx-doc/sphinx": Recipe("tox --current-env -epy39 -v --", "tox"),
    "sympy/sympy": _SYMPY,
    "marshmallow-code/marshmallow": Recipe("pytest -rA"),
    "pvlib/pvlib-python": Recipe("pytest -rA"),
    "pydicom/pydicom": Recipe("pytest -rA"),
    "pylint-dev/astroid": Recipe("pytest -rA"),
    "pyvista/pyvista": Recipe("pytest -rA"),
    "sqlfluff/sqlfluff": Recipe("pytest -rA"),
}
_SWE_GYM: Final = {
    **dict.fromkeys(
        (
            "getmoto/moto",
            "pandas-dev/pandas",
            "dask/dask",
            "Project-MONAI/MONAI",
            "pydantic/pydantic",
            "conan-io/conan",
            "iterative/dvc",
            "facebookresearch/hydra",
            "bokeh/bokeh",
            "modin-project/modin",
        ),
        Recipe("pytest -n0 -rA --color=no"),
    ),
    "python/mypy": Recipe("pytest -n0 -rA --color=no", files="cases"),
}


def recipe_of(repo: str) -> Recipe:
    """Return how a repository's tests run; pytest where nothing is known of it."""
    return _SWE_BENCH.get(repo) or _SWE_GYM.get(repo) or Recipe()


def image_of(repo: str, name: str) -> str | None:
    """Return the image that was published for a row which names none, or None where none is known.

    Args:
        repo: ``owner/name``.
        name: The row's ``instance_id``.
    """
    if repo in _SWE_BENCH:
        return f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest".lower()
    if repo in _SWE_GYM:
        return f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest".lower()
    return None


IMAGE_WORKDIR: Final = "/testbed"
"""Where published images have the repository."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONDA_ENV: Final = {
    "PATH": f"/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:{_PATH}",
    "CONDA_DEFAULT_ENV": "testbed",
    "CONDA_PREFIX": "/opt/miniconda3/envs/testbed",
}
"""What activating the environment of SWE-bench's images sets."""
R2E_ENV: Final = {
    "PATH": f"/testbed/.venv/bin:{_PATH}",
    "VIRTUAL_ENV": "/testbed/.venv",
}
"""The same of R2E-Gym's images."""
