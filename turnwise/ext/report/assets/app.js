// The page: its bar, its views, keys, and what is shown where something fails.

const VIEWS = {
  overview: viewOverview,
  curves: viewCurves,
  tasks: viewTasks,
  trajectories: viewTrajectories,
  failures: viewFailures,
  compare: viewCompare,
  trajectory: viewTrajectory,
};
const TABS = [
  ["overview", "Overview"],
  ["curves", "Curves"],
  ["tasks", "Tasks"],
  ["trajectories", "Trajectories"],
  ["failures", "Failures"],
  ["compare", "Compare"],
];
const KEYS = [
  ["1 – 6", "the tabs"],
  ["/", "search"],
  ["j, k", "next and previous trajectory"],
  ["n, p", "next and previous turn"],
  ["[, ]", "previous and next branch"],
  ["t", "tokens of a trajectory"],
  ["Esc", "back to the list"],
  ["?", "these keys"],
];

const main = el("main", { id: "main", tabindex: "-1" });
const bar_ = el("nav.bar", { "aria-label": "views" });
const help = el(
  "dialog",
  null,
  el("h2", null, "Keys"),
  el(
    "dl.pairs",
    null,
    KEYS.map(([key, text]) => el("div", null, el("dt", null, el("kbd", null, key)), el("dd", null, text))),
  ),
  el("form", { method: "dialog" }, el("button", null, "close")),
);

function drawBar() {
  const { view } = readRoute();
  const now = view === "trajectory" ? "trajectories" : view;
  const chip = (run) =>
    el(
      `button.chip.run${run.shown ? ".now" : ""}`,
      { "aria-pressed": String(run.shown), title: `${run.name}: ${run.kind}`, onclick: () => toggle(run) },
      runMark(run),
      run.name,
    );
  fill(bar_, [
    el("strong.brand", null, "Turnwise"),
    el(
      "div.tabs",
      null,
      TABS.map(([name, title]) =>
        el(
          `a${now === name ? ".now" : ""}`,
          { href: name === "trajectories" ? listAddress : address(name), "aria-current": now === name ? "page" : null },
          title,
        ),
      ),
    ),
    el("div.runs", null, runs.length > 1 ? runs.map(chip) : runs.map(runName)),
    el("button.icon", { onclick: changeTheme, title: "dark or light", "aria-label": "dark or light" }, "◐"),
    el("button.icon", { onclick: () => help.showModal(), title: "keys", "aria-label": "keys" }, "?"),
  ]);
}

function toggle(run) {
  run.shown = !run.shown;
  if (!shownRuns().length) runs.forEach((each) => (each.shown = true));
  render();
}

function changeTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  render();
}

let drawings = 0;

async function render() {
  const mine = ++drawings;
  const route = readRoute();
  drawBar();
  try {
    await (VIEWS[route.view] || viewOverview)(main, route);
  } catch (error) {
    fill(main, el("p.error", null, `This view cannot be shown: ${error.message || error}`));
  }
  // For scripts that read the page: the address whose view is there.
  if (mine === drawings) main.dataset.shown = location.hash;
}

function nextTurn(by) {
  const turns = [...document.querySelectorAll("article.turn")];
  const line = 120;
  const tops = turns.map((turn) => turn.getBoundingClientRect().top);
  const place = by > 0 ? tops.findIndex((top) => top > line + 8) : tops.findLastIndex((top) => top < line - 8);
  if (place >= 0) scrollBy({ top: tops[place] - line });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const press = (title) =>
    [...document.querySelectorAll(".controls button")]
      .find((button) => button.title === title && !button.disabled)
      ?.click();
  const reader = readRoute().view === "trajectory";
  const actions = {
    "/": () => document.querySelector(".controls input[type=search]")?.focus(),
    "?": () => help.showModal(),
    j: () => press("j"),
    k: () => press("k"),
    n: () => nextTurn(1),
    p: () => nextTurn(-1),
    "[": () => reader && stepBranch(-1),
    "]": () => reader && stepBranch(1),
    t: () => reader && document.querySelector(".controls input[type=checkbox]")?.click(),
    Escape: () => reader && (location.hash = listAddress),
  };
  const tab = TABS[Number(event.key) - 1];
  const action = tab
    ? () => (location.hash = tab[0] === "trajectories" ? listAddress : address(tab[0]))
    : actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

/** Load the page again and again while its runs go on, but under nobody's hands; the scroll position stays. */
function reloadEvery(seconds) {
  setInterval(() => {
    const active = document.activeElement.matches("input, select");
    if (active || help.open || document.querySelector(":active") || !getSelection().isCollapsed) return;
    history.replaceState({ top: scrollY, theme: document.documentElement.dataset.theme }, "");
    location.reload();
  }, seconds * 1000);
}

async function start() {
  // Read now: what is drawn replaces it.
  const { top, theme } = history.state || {};
  if (theme) document.documentElement.dataset.theme = theme;
  let reload;
  document.body.append(bar_, main, help);
  fill(main, note("reading …"));
  if (typeof DecompressionStream === "undefined") {
    fill(
      main,
      el(
        "p.error",
        null,
        "This browser cannot read the report: it needs Chrome 103, Firefox 113, Safari 16.4 or a newer one.",
      ),
    );
    return;
  }
  try {
    reload = await loadRuns();
  } catch (error) {
    fill(main, el("p.error", null, `The report cannot be read: ${error.message || error}`));
    return;
  }
  addEventListener("hashchange", () => {
    scrollTo({ top: 0 });
    render();
  });
  addEventListener("keydown", onKey);
  await render();
  if (top) scrollTo({ top });
  if (reload) reloadEvery(reload);
}

start();
