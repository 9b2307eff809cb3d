"""The search of the recorder's tree: one that goes on from the last request finds what a search of everything finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.model.canonical import Canonical
from turnwise.recorder.matching import ToolsKey
from turnwise.recorder.tree import Node, Sampled, Tree, path_ids
from turnwise.types import Completion

KEYS: tuple[ToolsKey, ...] = ((), (("f", "", "{}"),))
STEPS = st.lists(
    st.tuples(
        st.integers(0, 8),  # how many messages of the last request are kept
        st.lists(st.sampled_from("ab"), min_size=1, max_size=2),  # what users say next
        st.sampled_from("xy"),  # what is sampled
        st.booleans(),  # whether the sampled message is handed back in the next request
        st.sampled_from((0, 0, 0, 1)),  # which tools
        st.booleans(),  # whether the request succeeds
    ),
    min_size=1,
    max_size=14,
)


def found_by_brute_force(tree: Tree, messages: list[Canonical], key: ToolsKey) -> tuple[set[int], int | None]:
    """Return the deepest turns of all branches, and the deepest context that means all messages, by definition."""

    def means(node: Node) -> list[Canonical]:
        return [message for ancestor in node.path() for message in ancestor.messages]

    matching = [node for node in tree.nodes if node.key == key and means(node) == messages[: node.end]]
    turns = [node for node in matching if node.sampled and node.end < len(messages)]
    deepest = {node.index for node in turns if not any(node in other.path()[:-1] for other in turns)}
    wholes = [node for node in matching if not node.sampled and node.end == len(messages)]
    context = max(wholes, key=lambda node: (node.turns, node.index), default=None)
    return deepest, None if context is None else context.index


def add(
    tree: Tree, parent: Node | None, messages: list[Canonical], key: ToolsKey, completion: Completion | None = None
) -> Node:
    return tree.add(
        Node(
            index=len(tree.nodes),
            parent=parent,
            sampled=completion is not None,
            messages=tuple(messages),
            start=0 if parent is None else parent.end,
            key=key,
            tools=(),
            turns=(0 if parent is None else parent.turns) + (completion is not None),
            completion=None if completion is None else Sampled.of(completion),
        ),
        np.full(len(tree.nodes) % 4, len(tree.nodes), np.int32),
    )


@given(st.lists(st.integers(0, 30), max_size=30))
def test_the_ids_of_a_path_are_those_of_its_nodes(parents: list[int]) -> None:
    tree = Tree()
    for draw in parents:
        # The last node most often, so that paths stand in rows; none at all makes another root.
        parent = tree.nodes[-1 - draw // 4] if draw // 4 < len(tree.nodes) else None
        add(tree, parent, [], ())
    more = np.array([7, 8], np.int32)
    assert path_ids(None, more).tolist() == [7, 8]
    for node in tree.nodes:
        assert node.token_ids.tolist() == [node.index] * (node.index % 4)
        assert node.tokens == len(node.token_ids)
        ids = [number for ancestor in node.path() for number in ancestor.token_ids.tolist()]
        assert path_ids(node, more).tolist() == [*ids, 7, 8]
        assert not node.token_ids.flags.writeable


@settings(max_examples=examples(300))
@given(STEPS)
def test_resumed_search_equals_a_full_search(steps: list[tuple[int, list[str], str, bool, int, bool]]) -> None:
    tree = Tree()
    messages: list[Canonical] = []
    for kept_count, words, sampled, handed_back, tools, succeeds in steps:
        key = KEYS[tools]
        # New objects each time: what counts is what they mean.
        messages = [Canonical(message.role, message.text) for message in messages[:kept_count]]
        messages += [Canonical("user", text) for text in words]
        turns, context = tree.find_matches(messages, key)
        expected = found_by_brute_force(tree, messages, key)
        assert ({node.index for node, _ in turns}, None if context is None else context.index) == expected
        ranks = [(node.turns, used, not node.children, node.index) for node, used in turns]
        assert all(used == node.end for node, used in turns)
        assert ranks == sorted(ranks, reverse=True)
        if not succeeds:
            continue
        parent = turns[0][0] if turns else None
        if context is None:
            context = add(tree, parent, messages[0 if parent is None else parent.end :], key)
        completion = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", ((0, 0, 1),))
        answer = Canonical("assistant", sampled)
        add(tree, context, [answer], key, completion)
        if handed_back:
            messages.append(answer)
