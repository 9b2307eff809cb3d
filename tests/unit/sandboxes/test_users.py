"""Users of sandboxes."""

from __future__ import annotations

from turnwise.sandboxes.users import FIRST_USER, USERS, SandboxUsers


def test_each_sandbox_has_its_own_user_while_there_are_some() -> None:
    users = SandboxUsers()
    numbers = [users.take(f"box {number}") for number in range(USERS)]
    assert sorted(numbers) == list(range(FIRST_USER, FIRST_USER + USERS))
    users.release("box 7")
    assert users.take("next") == numbers[7]
    assert users.take("one more") in numbers


def test_named_user_is_not_given_to_others() -> None:
    users = SandboxUsers()
    first = users.take("origin")
    assert users.take("fork", first) == first
    users.release("origin")
    assert users.take("other") != first
