"""Environments by name, and as specs that travel."""

import json
import pickle

import pytest

from turnwise.envs import Env, EnvSpec, ToolEnv, env_names, make, register
from turnwise.envs.basic.lookup import LookupEnv
from turnwise.errors import RegistryError


@register("registration_test", size=3)
class Registered(ToolEnv):
    def __init__(self, size: int, colour: str = "red"):
        self.size, self.colour = size, colour


class Unregistered(Env):
    pass


class NoEnv:
    pass


def test_by_name_with_defaults_and_overrides():
    env = make("registration_test", colour="blue")
    assert isinstance(env, Registered)
    assert (env.size, env.colour) == (3, "blue")
    assert make("registration_test", size=5).size == 5
    assert "registration_test" in env_names()


def test_shipped_environments_and_references_are_made():
    assert type(make("lookup")) is LookupEnv
    assert type(make("turnwise.envs.basic.lookup:LookupEnv")) is LookupEnv
    assert type(make(f"{__name__}:Unregistered")) is Unregistered


def test_environment_of_a_file_is_made(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from turnwise.envs import Env\nclass Mine(Env):\n    def __init__(self, n=1):\n        self.n = n\n"
    )
    assert make(f"{path}:Mine", n=4).n == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lokup", "no environment 'lokup'; did you mean 'lookup'"),
        ("zzz", "registered are .*lookup"),
        ("no_such_module_at_all:Env", "no module"),
        ("turnwise.envs.basic.lookup:LookupEnvs", "did you mean 'LookupEnv'"),
        (f"{__name__}:NoEnv", "must be a subclass of turnwise.Env"),
        ("/no/such/file.py:Env", "no such file"),
    ],
)
def test_unknown_or_invalid_names_raise_registry_error(name, words):
    with pytest.raises(RegistryError, match=words):
        make(name)


def test_unknown_configuration_raises_registry_error():
    with pytest.raises(
        RegistryError, match=r"'registration_test' does not take .*did you mean 'colour'.*size: int, colour"
    ):
        make("registration_test", color="blue")


def test_a_taken_name_names_both():
    with pytest.raises(RegistryError, match=r"taken by .*Registered; .*Unregistered needs another"):
        register("registration_test", Unregistered)
    assert register("registration_test", Registered, size=3) is None


def test_invalid_registrations_raise_registry_error():
    with pytest.raises(RegistryError, match="is not a name"):
        register("a:b", Unregistered)
    with pytest.raises(RegistryError, match="must be a subclass"):
        register("not_an_env")(NoEnv)


def test_reference_is_registered_and_made():
    register("registration_lazy", f"{__name__}:Registered", size=9)
    assert make("registration_lazy").size == 9


def test_specs_survive_json_and_pickle():
    spec = EnvSpec("registration_test", {"size": 7})
    for other in (EnvSpec(**json.loads(json.dumps(spec.to_record()))), pickle.loads(pickle.dumps(spec))):
        assert other == spec
        assert other.make().size == 7
    with pytest.raises(RegistryError, match=r"config\['fn'\].*cannot be sent"):
        EnvSpec("registration_test", {"fn": print})
