"""The decorator, BaseTool, ToolResponse and the registry of function tools."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.pictures import PNG, URI
from turnwise.errors import EnvError, RegistryError, ToolSchemaError
from turnwise.tools import BaseTool, FunctionTool, ToolResponse, as_tool, function_tool, get_tool, tool_names
from turnwise.tools.core import register_tool
from turnwise.tools.response import OutputLimit
from turnwise.types import ToolSchema


@function_tool
def core_bare(a: int) -> int:
    """Adds one."""
    return a + 1


@function_tool("core_named")
async def core_other(a: int) -> int:
    return a


@function_tool(name="core_keyword", description="said here", timeout=2.0, concurrent=False, max_output=10)
def core_third(a: int) -> int:
    return a


class Echo(BaseTool):
    def __init__(self, config=None):
        super().__init__(
            config, {"name": "core_echo", "description": "", "parameters": {"type": "object", "properties": {}}}
        )


class Owner:
    @function_tool(inline=True)
    def method(self, a: int) -> str:
        return f"{self.__class__.__name__} {a}"


class TestDecorator:
    def test_decorator_without_arguments_with_a_name_and_with_keywords(self):
        assert (core_bare.name, core_bare.schema.description) == ("core_bare", "Adds one.")
        assert core_other.name == "core_named"
        assert core_other.is_async
        assert (core_third.name, core_third.schema.description) == ("core_keyword", "said here")
        assert (core_third.timeout, core_third.concurrent, core_third.max_output) == (2.0, False, 10)

    async def test_decorated_functions_stay_callable(self):
        assert core_bare(1) == 2
        assert await core_other(3) == 3
        assert core_bare.__name__ == "core_bare"
        assert core_bare.__doc__ == "Adds one."

    def test_a_method_stays_a_method(self):
        assert Owner().method(1) == "Owner 1"
        assert Owner.method.is_method
        assert not Owner.method.concurrent
        assert list(Owner.method.schema.parameters["properties"]) == ["a"]

    def test_functions_are_concurrent_unless_said_otherwise(self):
        assert core_bare.concurrent

    def test_two_names_raise_schema_error(self):
        with pytest.raises(ToolSchemaError, match="two names"):
            function_tool("a", name="b")

    @pytest.mark.parametrize(
        ("keywords", "words"),
        [
            ({"timeout": 0}, "timeout is 0"),
            ({"timeout": float("nan")}, "timeout is nan"),
            ({"max_output": -1}, "max_output is -1"),
            ({"inline": True, "timeout": 1.0}, "inline"),
        ],
    )
    def test_invalid_keywords_raise_schema_error(self, keywords, words):
        with pytest.raises(ToolSchemaError, match=words):

            @function_tool(**keywords)
            def fn(a: int):
                pass

    def test_inline_is_not_for_async(self):
        with pytest.raises(ToolSchemaError, match="plain functions"):

            @function_tool(inline=True)
            async def fn(a: int):
                pass

    def test_only_functions(self):
        with pytest.raises(ToolSchemaError, match="takes a function"):
            function_tool(3)
        with pytest.raises(ToolSchemaError, match="write @staticmethod above"):
            function_tool(staticmethod(lambda a: a))
        with pytest.raises(ToolSchemaError, match="see BaseTool"):
            function_tool(Echo)

    def test_pickles_by_reference(self):
        assert pickle.loads(pickle.dumps(core_bare)) is core_bare
        assert pickle.loads(pickle.dumps(Owner.method)) is Owner.method
        assert copy.copy(core_bare) is core_bare


class TestRegistry:
    def test_functions_of_modules_are_registered_methods_and_inner_functions_are_not(self):
        @function_tool("core_inner")
        def inner(a: int):
            pass

        assert get_tool("core_bare") is core_bare
        assert "core_inner" not in tool_names()
        assert "method" not in tool_names()

    def test_another_function_of_the_same_name_names_both_places(self):
        def imposter(a: int):
            pass

        imposter.__name__ = "core_bare"
        imposter.__qualname__ = "imposter"
        with pytest.raises(RegistryError) as error:
            register_tool(FunctionTool(imposter))
        assert "test_tools_core.core_bare" in str(error.value)
        assert "test_tools_core.imposter" in str(error.value)
        assert get_tool("core_bare") is core_bare

    def test_the_same_function_again_is_fine(self):
        same_tool = FunctionTool(core_bare.fn)
        register_tool(same_tool)
        assert get_tool("core_bare") is same_tool
        register_tool(core_bare)

    def test_unknown_names_get_the_nearest(self):
        with pytest.raises(RegistryError, match="did you mean 'core_bare'"):
            get_tool("core_bear")


class TestAsTool:
    def test_everything_that_may_stand_in_tools(self):
        def plain(a: int) -> int:
            return a

        echo = Echo()
        assert as_tool(core_bare) is core_bare
        assert as_tool("core_bare") is core_bare
        assert as_tool(echo) is echo
        assert isinstance(as_tool(Echo), Echo)
        assert as_tool(plain) is as_tool(plain)
        assert as_tool(plain).concurrent

    def test_a_bound_method_keeps_its_order(self):
        class Shop:
            def buy(self, item: str) -> str:
                return item

        tool = as_tool(Shop().buy)
        assert not tool.concurrent
        assert list(tool.schema.parameters["properties"]) == ["item"]

    def test_a_class_that_needs_arguments(self):
        class Needs(BaseTool):
            def __init__(self, key):
                super().__init__({}, {"name": key})

        with pytest.raises(ToolSchemaError, match=r"Needs cannot be made without arguments.*list an instance"):
            as_tool(Needs)

    @pytest.mark.parametrize("item", [3, len, Owner, None])
    def test_object_that_is_no_tool_raises_schema_error(self, item):
        with pytest.raises(ToolSchemaError, match="is not a tool"):
            as_tool(item)


class TestBaseTool:
    async def test_defaults(self):
        tool = Echo({"k": 1})
        assert (tool.name, tool.config) == ("core_echo", {"k": 1})
        assert tool.schema == ToolSchema("core_echo", "", {"type": "object", "properties": {}})
        first, response = await tool.create()
        second, _ = await tool.create()
        assert first != second
        assert (await tool.create("mine"))[0] == "mine"
        assert response == ToolResponse()
        assert await tool.calc_reward(first) is None
        assert await tool.release(first) is None

    def test_without_a_schema(self):
        with pytest.raises(ToolSchemaError, match="BaseTool has no schema"):
            BaseTool({})


class TestToolResponse:
    def test_content(self):
        assert ToolResponse().content() == ""
        assert ToolResponse("hi").content() == "hi"
        assert ToolResponse("hi", image=[PNG], video=[[PNG]], audio=["a"]).content() == [
            {"type": "image_url", "image_url": {"url": URI}},
            {"type": "video", "video": [URI]},
            {"type": "audio", "audio": "a"},
            {"type": "text", "text": "hi"},
        ]

    def test_an_explicit_none_is_no_media(self):
        assert ToolResponse("x", image=None).content() == "x"

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"text": 3}, "text is 3"),
            ({"image": "one"}, "image is 'one': it must be a list"),
            ({"image": [b"%PDF-1.7"]}, r"image\[0\] is no image of a known type .* give png, jpeg"),
            ({"image": ["cat.png"]}, r"image\[0\] is 'cat.png': URLs and file names are not read"),
            ({"image": [3]}, r"image\[0\] is 3, which is no image"),
            ({"video": [b"ftyp"]}, r"video\[0\] is b'ftyp': a video is a list of images"),
            ({"reward": float("nan")}, "reward is nan"),
            ({"reward": 10**400}, "reward is 1000"),
            ({"reward": "1"}, "reward is '1'"),
        ],
    )
    def test_broken_contracts(self, fields, words):
        with pytest.raises(EnvError, match=words):
            ToolResponse(**fields)

    def test_failures_are_json(self):
        response = ToolResponse.failure("unknown_tool", "there is none", available=["a"])
        assert response.error == "unknown_tool"
        assert json.loads(response.text) == {
            "error": {"type": "unknown_tool", "message": "there is none", "available": ["a"]}
        }

    def test_a_long_failure_stays_json(self):
        body = json.loads(ToolResponse.failure("tool_error", "x" * 100_000).text)
        assert len(body["error"]["message"]) <= 4000


@given(st.text(max_size=300), st.integers(1, 200))
def test_truncation_keeps_head_and_tail_and_counts_removed_characters(text, limit):
    shortened = OutputLimit(limit).cut(text)
    assert len(shortened) <= max(limit, 0)
    if len(text) <= limit:
        assert shortened == text
    elif "characters cut ...]" in shortened and "characters cut" not in text:
        head, _, rest = shortened.partition("\n[... ")
        count, _, tail = rest.partition(" characters cut ...]\n")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert head
        assert tail
        assert len(head) + int(count) + len(tail) == len(text)
    else:
        assert shortened == text[:limit]
