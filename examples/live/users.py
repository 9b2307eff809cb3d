"""Plays the users of a live policy: asks for colours, and rates what is answered.

    python examples/live/users.py                  # you rate, until you have enough
    python examples/live/users.py--scripted 400    # ten users at a time, who know the colours

After every twenty answers it shows how many were wrong, and what the service has learned and promoted by then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

COLOURS = {"sun": "yellow", "sea": "blue", "leaf": "green", "rose": "red"}
QUESTION = "Colour of {}?"
AT_ONCE, SHOWN, STEP = 10, 20, 8
WIDTH, HEIGHT, MARGIN = 640, 240, 40


@dataclass
class Users:
    """Users of a service, one session for each question.

    Attributes:
        wrong: Of each answer in order, whether its user said that it is wrong.
        promotions: The number of answers after which a promotion was seen.
    """

    http: aiohttp.ClientSession
    url: str
    wrong: list[bool] = field(default_factory=list)
    promotions: list[int] = field(default_factory=list)

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        """Post to a route, and return its answer. Raises RuntimeError for an error."""
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            content: dict[str, Any] = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"{path}: {content['error']['message']}")
            return content

    async def ask(self, session: str, word: str) -> str:
        """Ask for a word's colour in a new session, which is recorded and ends with the answer."""
        body = {"model": "live", "messages": [{"role": "user", "content": QUESTION.format(word)}]}
        headers = {"x-session-id": session, "x-session-consent": "yes", "x-session-end": "yes"}
        answer = await self.post("/v1/chat/completions", body, **headers)
        return str(answer["choices"][0]["message"]["content"])

    async def rate(self, session: str, *, right: bool) -> None:
        """Say whether the answer of a session is right."""
        await self.post(f"/sessions/{session}/rewards", {"thumbs": "up" if right else "down"})
        self.wrong.append(not right)
        if len(self.wrong) % SHOWN == 0:
            await self.show()

    async def show(self) -> None:
        """Show how many of the last answers were wrong, and the counts of the service."""
        async with self.http.get(f"{self.url}/health") as answer:
            health = await answer.json()
        count = len(self.wrong)
        self.promotions += [count] * (health.get("promotions", 0) - len(self.promotions))
        corrected = sum(self.wrong[-SHOWN:])
        counts = "  ".join(
            f"{name} {health[name]}" for name in ("step", "approved_step", "promotions") if name in health
        )
        print(
            f"answers {count - SHOWN + 1:3} to {count:3}: {corrected:2} wrong {'#' * corrected:20} {counts}", flush=True
        )


async def play_scripted(users: Users, questions: int) -> None:
    """Ask so many questions, ten at a time, and rate every answer rightly."""

    async def serve(number: int) -> None:
        session, word = uuid.uuid4().hex, list(COLOURS)[number % len(COLOURS)]
        await users.rate(session, right=await users.ask(session, word) == COLOURS[word])

    for first in range(0, questions, AT_ONCE):
        await asyncio.gather(*map(serve, range(first, min(first + AT_ONCE, questions))))
        await learned(users)


async def learned(users: Users) -> None:
    """Wait until no step can be learned."""
    while True:
        async with users.http.get(f"{users.url}/health") as answer:
            if (await answer.json())["waiting"] < STEP:
                return
        await asyncio.sleep(0.05)


async def play_yourself(users: Users) -> None:
    """Ask one question after the other, and let the person at the terminal rate the answers."""
    for number in range(sys.maxsize):
        session, word = uuid.uuid4().hex, list(COLOURS)[number % len(COLOURS)]
        answer = await users.ask(session, word)
        typed = await asyncio.to_thread(input, f"{QUESTION.format(word)} {answer}   right? [Y/n/q] ")
        if typed.strip().lower() == "q":
            return
        await users.rate(session, right=not typed.strip().lower().startswith("n"))


def picture(wrong: Sequence[bool], promotions: Sequence[int]) -> str:
    """Return the share of wrong answers among the last twenty, by the number of answers, as SVG."""
    width, height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def x(answers: int) -> float:
        return MARGIN + width * answers / len(wrong)

    def y(share: float) -> float:
        return MARGIN + height * (1 - share)

    ends = range(SHOWN, len(wrong) + 1)
    points = " ".join(f"{x(end):.1f},{y(sum(wrong[end - SHOWN : end]) / SHOWN):.1f}" for end in ends)
    parts = [f'<polyline fill="none" stroke="#3b5bdb" stroke-width="2" points="{points}"/>']
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(share)}" y2="{y(share)}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(share) + 4}" text-anchor="end">{share:g}</text>')
    for answers in promotions:
        line = f'x1="{x(answers):.1f}" x2="{x(answers):.1f}" y1="{y(1)}" y2="{y(0)}"'
        parts.append(f'<line {line} stroke="#2b8a3e" stroke-dasharray="4"/>')
        parts.append(f'<text x="{x(answers):.1f}" y="{y(1) - 6}" text-anchor="middle" fill="#2b8a3e">promoted</text>')
    parts.append(f'<text x="{MARGIN}" y="16">share of the last {SHOWN} answers that users called wrong</text>')
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">{len(wrong)} answers</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *parts, "</svg>\n"])


async def play(arguments: argparse.Namespace) -> Users:
    """Play the users of the command line."""
    async with aiohttp.ClientSession(headers={"authorization": "Bearer me"}) as http:
        users = Users(http, arguments.url)
        await (play_scripted(users, arguments.scripted) if arguments.scripted else play_yourself(users))
        return users


def main() -> int:
    """Play the users, and draw what they saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service (default: %(default)s)")
    parser.add_argument(
        "--scripted", type=int, default=0, metavar="N", help="users who know the colours ask N questions"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curve of corrections as SVG")
    arguments = parser.parse_args()
    users = asyncio.run(play(arguments))
    if arguments.picture and len(users.wrong) >= SHOWN:
        arguments.picture.write_text(picture(users.wrong, users.promotions))
    wrong = [sum(users.wrong[first : first + SHOWN]) for first in range(0, len(users.wrong), SHOWN)]
    print(json.dumps({"wrong": wrong, "promoted_after": users.promotions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
