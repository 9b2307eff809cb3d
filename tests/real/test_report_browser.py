"""The report in Debian's Chromium: a file of recorded runs, ten thousand trajectories, and a training that goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from support.browser import Browser, missing
from support.report_pages import played, write_metrics, write_run
from support.trainer.lookup_run import MODEL, Turnwise, build_model, held_config, shared, training, wait_until
from turnwise.ext.report.page import write_report
from turnwise.trajectory import Segment, Trajectory
from turnwise.types import Branch, StopReason, as_ids

pytestmark = [pytest.mark.real, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

TOOL = {"type": "function", "function": {"name": "search", "description": "Looks up.", "parameters": {}}}
VIEWS = (
    "#/overview", "#/curves?all=1", "#/tasks", "#/trajectories", "#/trajectories?part=val&sort=-reward", "#/failures",
    "#/compare?only=all", "#/trajectory/0/e0", "#/trajectory/0/forked?tokens=1&by=logprob",
    "#/trajectory/0/forked?tokens=1&by=mask", "#/trajectory/0/forked?branch=2&with=0%2Fe8",
    "#/trajectory/0/grown?branch=3",
)  # fmt: skip


def forked(name: str) -> Trajectory:
    """Two branches: a tool's answer was edited, so the conversation went on from its first turn again."""
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"q": "zoe"}}}
    logprobs = np.log(np.array([0.95, 0.4, 0.02, 0.0005], np.float32))

    def said(index: int, parent: int, turn: str, text: str, **more: Any) -> Segment:
        message = {"role": "assistant", "content": text, **more}
        return Segment(
            index, parent, "sampled", as_ids([7, 8, 9, 10]), (message,), turn, logprobs, ((2, 0, 4),), "stop"
        )

    def heard(index: int, parent: int, text: str, fork: str | None = None) -> Segment:
        message = {"role": "tool", "tool_call_id": "c1", "content": text}
        return Segment(index, parent, "context", as_ids([1, 2, 3]), (message,), fork=fork)

    opening = ({"role": "system", "content": "Answer."}, {"role": "user", "content": "Where does Zoe live?"})
    segments = [
        Segment(0, -1, "context", as_ids(range(20)), opening, tools=(TOOL,)),
        said(1, 0, "t0", "I look it up.", tool_calls=[call], reasoning_content="The tool knows."),
        heard(2, 1, "Zoe lives in Oslo."),
        said(3, 2, "t1", "In Oslo."),
        heard(4, 1, "Zoe: Oslo", fork="edited"),
        said(5, 4, "t2", "Zoe lives in Oslo."),
    ]
    one = played(name, "task-0", partition="val", group_id="g-task-0~sampled")
    one.segments, one.rewards, one.metrics = segments, [("t2", "score", 1.0)], {"tool_calls": 1.0}
    return one


def grown(name: str) -> Trajectory:
    """Three ways through an episode that was forked before its second and before its first turn."""
    turns = [("t0", 0), ("t1", 1), ("t2", 1), ("t3", 0), ("t4", 4)]
    segments = [Segment(0, -1, "context", as_ids([1, 2]), ({"role": "user", "content": "Guess."},))]
    for index, (turn, parent) in enumerate(turns, 1):
        message = {"role": "assistant", "content": f"answer {turn}"}
        logprobs, versions = np.zeros(2, np.float32), ((0, 0, 2),)
        fork = "branch" if turn in ("t2", "t3") else None
        segments.append(
            Segment(index, parent, "sampled", as_ids([3, 4]), (message,), turn, logprobs, versions, fork=fork)
        )
    one = played(name, "task-0")
    one.segments, one.rewards = segments, []
    one.branches = [
        Branch(turns=("t0", "t1"), rewards=(("t1", "score", 0.25),)),
        Branch(parent=0, after="t0", again="t1", turns=("t2",), rewards=((None, "score", 1.0),)),
        Branch(parent=0, again="t0", turns=("t3", "t4"), stop_reason=StopReason.MAX_TURNS),
    ]
    return one


def small_run(folder: Path, solved: int) -> Path:
    """A training of nine tasks that was evaluated; of every ``solved`` episodes one is right."""
    trajectories = [forked("forked")]
    for number in range(27):
        error = "SandboxError: the container is gone" if number == 13 else None
        one = played(
            f"e{number}", f"task-{number % 9}", f"It is number {number}.", group_id=f"g{number % 9}~sampled",
            partition="val" if number % 3 else "train", rewards=[("t0", "score", float(number % solved == 0))],
            error=error, stop_reason=StopReason.ERROR if error else StopReason.COMPLETED,
        )  # fmt: skip
        one.metrics |= {"tool_calls": 2.0, "tool_errors/timeout": float(number % 4 == 1)}
        trajectories.append(one)
    write_run(folder, [*trajectories, grown("grown")])
    steps = [
        {"kind": "train", "step": step, "reward/mean": step / 20, "train/entropy": 1 / step, "gap/mean": 0.01}
        for step in range(1, 13)
    ]
    warning = {"kind": "warning", "step": 4, "name": "entropy", "text": "the entropy fell by half in one step"}
    write_metrics(folder, *steps, warning)
    (folder / "config.yaml").write_text("name: small\nhosted:\n  api_key: sk-very-secret\n  model: hosted-1\n")
    return folder


@pytest_asyncio.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with Browser(tmp_path / "profile") as opened:
        yield opened


async def check(browser: Browser, root: str) -> None:
    """Check that the page complained of nothing, and asked for nothing beyond its own address."""
    seen = await browser.run("return seen")
    assert seen["errors"] == []
    assert [address for address in seen["requests"] if not address.startswith((root, "data:"))] == []


DRAWN = """
await page.waitForFunction(() => document.querySelector("main")?.dataset.shown === location.hash);
"""
# The page's scripts are modules, of which nothing is global.
RANGE = """
    const texts = await page.evaluate(() => [...document.scripts].map((script) => script.textContent).join("\\n"));
    const [source] = /function linearRange[^]*?\\n}/.exec(texts);
    const uPlot = { rangeNum: (low, high) => ["rangeNum", low, high] };
    return new Function("uPlot", `return ${source}`)(uPlot)(null, ...given);
"""
OPEN = f"await page.goto(given[0] + given[1]);{DRAWN}"


async def do(browser: Browser, script: str) -> None:
    """Run a script, and wait until the page shows what its address names."""
    await browser.run(f"{script};{DRAWN}")


async def test_a_file_is_read_by_mouse_and_keyboard(tmp_path: Path, browser: Browser) -> None:
    runs = [small_run(tmp_path / "before", 5), small_run(tmp_path / "after", 2)]
    write_report(runs, tmp_path / "report.html")
    root = (tmp_path / "report.html").as_uri()
    await browser.run(OPEN, [root, ""])
    overview = await browser.run("return page.innerText('main')")
    assert "the entropy fell by half" in overview
    assert "before" in overview
    assert "trains hosted-1" in overview
    # The axis of zeros alone; that of other values is uPlot's.
    assert await browser.run(RANGE, [0, 0]) == [0, 1]
    assert await browser.run(RANGE, [0.25, 0.75]) == ["rangeNum", 0.25, 0.75]
    assert "sk-very-secret" not in await browser.run("return page.content()")
    # Filters and order.
    await do(browser, "await page.keyboard.press('4'); await page.waitForURL(/trajectories/)")
    await browser.run("await page.selectOption('select[aria-label=Run]', '0')")
    assert "29 trajectories" in await browser.run("return page.innerText('.pages')")
    await browser.run("await page.selectOption('select[aria-label=Outcome]', 'error')")
    assert await browser.run("return page.locator('tbody tr').allInnerTexts()") != []
    assert "SandboxError" in await browser.run("return page.innerText('tbody')")
    assert "1 trajectory" in await browser.run("return page.innerText('.pages')")
    await browser.run("await page.selectOption('select[aria-label=Outcome]', ''); await page.keyboard.press('Escape')")
    await browser.run("await page.fill('input[data-search]', 'e1'); await page.waitForURL(/q=e1/)")
    rewards = "return (await page.locator('tbody td:nth-child(5)').allInnerTexts()).map(Number)"
    await browser.run("await page.click('th button:has-text(\"Reward\")')")
    assert (shown_rewards := await browser.run(rewards)) == sorted(shown_rewards, reverse=True)
    await browser.run("await page.click('th button:has-text(\"Reward\")')")
    assert await browser.run(rewards) == sorted(shown_rewards)
    assert len(set(shown_rewards)) == 2
    # A text in messages, which only one conversation has.
    await browser.run(
        "await page.fill('input[data-search]', ''); await page.fill('input[placeholder=\"press Enter\"]', 'NUMBER 17');"
        "await page.keyboard.press('Enter'); await page.waitForSelector('text=2 hits')"
    )
    assert await browser.run("return page.innerText('tbody a')") == "e17"
    # Walked by keyboard.
    await browser.run(OPEN, [root, "#/trajectories?run=0"])
    await do(browser, "await page.click('tbody a'); await page.waitForSelector('article')")
    assert await browser.run("return page.innerText('h2')") == "before · forked"
    for key, then in (("j", "e0"), ("j", "e1"), ("k", "e0"), ("k", "forked")):
        await do(browser, f"await page.keyboard.press('{key}'); await page.waitForURL(/{then}$/)")
    # Tokens, and what is known of one.
    await do(browser, "await page.keyboard.press('t'); await page.waitForSelector('.tokens .token')")
    kinds = "return page.locator('article.turn .token').evaluateAll((all) => all.map((each) => each.className))"
    expected = [f"token {kind}" for kind in ("h0", "h3", "h6", "h8")]
    assert await browser.run(kinds) == expected * 2
    await browser.run("await page.hover('article.turn .token >> nth=2')")
    assert "probability 0.02" in (await browser.run("return page.innerText('.facts')")).replace("\n", " ")
    # The branch tree.
    tabs = await browser.run("return page.locator('.branches .tab').allInnerTexts()")
    assert [tab.split("\n")[0] for tab in tabs] == ["branch 1", "branch 2"]
    assert "edited, 1 turn after 1 shared turn" in tabs[1]
    await do(browser, "await page.click('.branches .tab >> nth=1'); await page.waitForURL(/branch=2/)")
    assert "Zoe: Oslo" in await browser.run("return page.innerText('main')")
    # What each way of an episode that was forked was worth; a turn that is clicked is shown in its branch.
    await browser.run(OPEN, [root, "#/trajectory/0/grown"])
    assert await browser.run("return page.locator('.drawing .worth').allTextContents()") == ["0.25", "1", "0"]
    titles = await browser.run("return page.locator('.drawing circle title').allTextContents()")
    assert titles[0] == "turn t0, 2 tokens; the 2 ways through it earned 0.625 on average"
    assert titles[4] == "turn t4, 2 tokens; its way earned 0"
    await do(browser, "await page.click('.drawing circle >> nth=2'); await page.waitForURL(/branch=2/)")
    assert "answer t2" in await browser.run("return page.innerText('main')")
    await do(browser, "await page.keyboard.press(']'); await page.waitForURL(/branch=3/)")
    assert "answer t4" in await browser.run("return page.innerText('main')")
    assert "2 turns, max_turns" in await browser.run("return page.innerText('.branches .tab.now')")
    await do(browser, "await page.keyboard.press('Escape'); await page.waitForURL(/trajectories/)")
    # Two runs compared, down to two trajectories side by side.
    await browser.run(OPEN, [root, "#/compare?only=all"])
    assert "in common" in await browser.run("return page.innerText('.tiles')")
    await browser.run("await page.click('text=side by side'); await page.waitForSelector('.two')")
    assert await browser.run("return page.locator('.two > div').count()") == 2
    await check(browser, "file:///")


async def test_every_address_leads_to_the_same_page_again(tmp_path: Path, browser: Browser) -> None:
    runs = [small_run(tmp_path / "before", 5), small_run(tmp_path / "after", 2)]
    write_report(runs, tmp_path / "report.html")
    root = (tmp_path / "report.html").as_uri()
    for view in VIEWS:
        await browser.run(OPEN, [root, view])
        # Not innerText: it leaves out what is off the screen and not drawn yet.
        first_visit = await browser.run("return [page.url(), await page.textContent('main')]")
        await browser.run("await page.goto('about:blank')")
        await browser.run(OPEN, [first_visit[0], ""])
        assert await browser.run("return [page.url(), await page.textContent('main')]") == first_visit, view
    await check(browser, root)


CONTRAST = """
return page.evaluate(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const read = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  };
  const over = (top, below) => [0, 1, 2].map((each) => top[each] * top[3] + below[each] * (1 - top[3])).concat(1);
  const light = (color) => {
    const [red, green, blue] = color.map((each) => {
      const share = each / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  // All colours that a text may stand on: of a gradient each of its stops.
  const grounds = (element) => {
    if (!element) return [[255, 255, 255, 1]];
    const style = getComputedStyle(element);
    const below = element.tagName === "DIALOG" ? [[255, 255, 255, 1]] : grounds(element.parentElement);
    const stops = style.backgroundImage.match(/(rgba?|color)\\([^()]*\\)/g) || ["rgba(0, 0, 0, 0)"];
    return below.flatMap((each) => stops.map((stop) => over(read(stop), over(read(style.backgroundColor), each))));
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility({ visibilityProperty: true }) || element.closest(":disabled")) continue;
    if (!element.getClientRects().length) continue;
    texts += 1;
    const style = getComputedStyle(element);
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) opacity *= Number(getComputedStyle(each).opacity);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    for (const ground of grounds(element)) {
      const color = read(style.color);
      color[3] *= opacity;
      const [one, other] = [light(over(color, ground)), light(ground)];
      const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
      const name = `${element.tagName}.${element.className}`;
      if (ratio < least) found.push(`${name} "${text.slice(0, 30)}" ${ratio.toFixed(2)}`);
    }
  }
  return { texts, found: [...new Set(found)] };
});
"""


async def test_texts_have_the_contrast_of_wcag_aa_in_light_and_dark(tmp_path: Path, browser: Browser) -> None:
    runs = [small_run(tmp_path / "before", 5), small_run(tmp_path / "after", 2)]
    write_report(runs, tmp_path / "report.html")
    texts = 0
    for scheme in ("light", "dark"):
        await browser.run("await page.emulateMedia({ colorScheme: given })", scheme)
        for view in VIEWS:
            await browser.run(OPEN, [(tmp_path / "report.html").as_uri(), view])
            measured = await browser.run(CONTRAST)
            assert measured["found"] == [], f"{view}, {scheme}"
            texts += measured["texts"]
    assert texts > 1000


async def test_ten_thousand_trajectories_open(tmp_path: Path, browser: Browser) -> None:
    many = (
        played(f"e{number}", f"task-{number % 400}", f"It is {number}.", rewards=[("t0", "score", float(number % 2))])
        for number in range(10_000)
    )
    run = write_run(tmp_path / "run", many)
    write_report([run], tmp_path / "report.html")
    root = (tmp_path / "report.html").as_uri()
    times: list[float] = []
    # The bar is two seconds; beside other work not every attempt gets the processor.
    while min(times, default=9.0) > 2 and len(times) < 4:
        begins = time.monotonic()
        await browser.run(OPEN, [root, "#/trajectories?sort=-id"])
        times.append(time.monotonic() - begins)
    assert min(times) < 2, times
    assert "1–100 of 10,000" in await browser.run("return page.innerText('.pages')")
    await browser.run("await page.click('tbody a'); await page.waitForSelector('article.turn')")
    assert "It is 9999." in await browser.run("return page.innerText('main')")
    await browser.run("await page.keyboard.press('t'); await page.waitForSelector('.token')")
    assert "⟨3⟩" in await browser.run("return page.innerText('.tokens')")
    await check(browser, root)
    print(f"10,000 trajectories open in {min(times):.2f} s")


async def test_open_page_of_a_run_that_goes_on_is_loaded_again_where_it_was_scrolled_to(
    tmp_path: Path, browser: Browser
) -> None:
    run = small_run(tmp_path / "run", 2)
    out = tmp_path / "report.html"
    write_report([run], out, reload_s=0.5)
    await browser.run(OPEN, [out.as_uri(), "#/trajectories"])
    await browser.run(
        "await page.setViewportSize({ width: 900, height: 300 });"
        "await page.evaluate(() => { window.old = true; scrollTo(0, 240) })"
    )
    # Under a focused field nothing is loaded: the text that is typed would be lost.
    await browser.run("await page.focus('input[type=search]'); await page.evaluate(() => scrollTo(0, 240))")
    write_run(run, [played(f"late-{number}") for number in range(3)])
    write_report([run], out)
    await browser.run("await page.waitForTimeout(1500)")
    assert await browser.run("return page.evaluate(() => window.old)")
    await browser.run("await page.evaluate(() => document.activeElement.blur())")
    await browser.run("await page.waitForFunction(() => !window.old && document.querySelector('.pages'))")
    assert "32 trajectories" in await browser.run("return page.innerText('.pages')")
    await browser.run("await page.waitForFunction(() => scrollY === 240)")
    # The run has ended: what is open stays.
    await browser.run("await page.evaluate(() => { window.old = true }); await page.waitForTimeout(1500)")
    assert await browser.run("return page.evaluate(() => window.old)")
    await check(browser, out.as_uri())


@pytest.fixture(scope="session")
def lookup_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


async def test_open_report_of_a_training_follows_it_to_its_end(
    tmp_path: Path, lookup_model: Path, browser: Browser
) -> None:
    out, gate = tmp_path / "report.html", tmp_path / "gate"
    with training(held_config(lookup_model, tmp_path / "runs", hold=20, gate=gate, steps=12)) as train:
        wait_until(gate.exists, "the episode that waits", train)
        with Turnwise(tmp_path / "report.log", "report", tmp_path / "runs/run", "--follow", "-o", out) as report:
            wait_until(out.exists, "the first report", report)
            await browser.run(f"await page.goto(given);{DRAWN}", f"{out.as_uri()}#/trajectories")
            assert report.poll() is None, "the training goes on"
            # Also a process that is killed has ended.
            train.kill()
            assert report.wait() == 0, report.output()
        assert "written: " in report.output()
        await browser.run("await page.click('tbody a'); await page.waitForSelector('article.turn')")
        await browser.run("await page.keyboard.press('t'); await page.waitForSelector('.token')")
        tokens = await browser.run("return page.locator('article.turn .token').allInnerTexts()")
        assert any(token.strip().isalpha() for token in tokens), "by the run's tokenizer"
        await check(browser, out.as_uri())
