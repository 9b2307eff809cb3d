// The branches of a trajectory as a tree: a row for each, a dot for each turn, and what each way was worth.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 26;
const DOT = 4;
const WIDEST_STEP = 26;
const NARROWEST_STEP = 9;
const TREE_WIDTH = 780;

/** Id of a turn that was clicked, to be scrolled to when its branch is drawn. */
let wanted = null;

function drawn(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  append(element, children);
  return element;
}

function leavesOf(record) {
  const parents = new Set(record.segments.map((segment) => segment.parent));
  return record.segments.map((segment) => segment.index).filter((index) => !parents.has(index));
}

function pathOf(record, leaf) {
  const path = [];
  for (let index = leaf; index !== undefined && index >= 0; index = record.segments[index].parent)
    path.push(record.segments[index]);
  return path.reverse();
}

const sampledOf = (path) => path.filter((segment) => segment.kind === "sampled");

/** What is known of each branch: its turns, those that no branch before it has, why it forked, what it was worth. */
function branchesOf(record, leaves) {
  const seen = new Set();
  return leaves.map((leaf) => {
    const path = pathOf(record, leaf);
    const own = path.filter((segment) => !seen.has(segment.index));
    own.forEach((segment) => seen.add(segment.index));
    const ends = (each) => path.some(({ index }) => index === each[0]);
    return {
      turns: sampledOf(path),
      own: sampledOf(own),
      fork: own.map((segment) => segment.fork).find(Boolean),
      way: record.ways.find(ends),
      found: record.search && record.search.leaves.find(ends),
    };
  });
}

/** The tree of a trajectory with more than one branch: a button for each, and the turns they share and have alone. */
function branchTree(record, leaves, branch, side) {
  if (leaves.length < 2) return null;
  const branches = branchesOf(record, leaves);
  const open = (number, turn) => {
    wanted = turn || null;
    setQuery({ [side ? "branch2" : "branch"]: number + 1 });
    render();
  };
  return el("section.card.branches", null, [
    el(
      "div.tabs",
      null,
      branches.map((each, number) =>
        el(
          `button.tab${number + 1 === branch ? ".now" : ""}`,
          { onclick: () => open(number), "aria-pressed": String(number + 1 === branch) },
          [el("span", null, `branch ${number + 1}`), el("small", null, branchText(each))],
        ),
      ),
    ),
    el("div.drawing", null, treeDrawing(branches, branch - 1, open)),
  ]);
}

function branchText({ turns, own, fork, way, found }) {
  const shared = turns.length - own.length;
  return [
    found && `${found[2] ? "chosen, " : ""}${found[1] === null ? "" : `score ${figure(found[1])}, `}`,
    fork && `${fork}, `,
    plural(own.length, "turn"),
    shared > 0 && ` after ${plural(shared, "shared turn")}`,
    way && `, ${way[2]}`,
  ];
}

/** The drawing: turns from left to right, branches from top to bottom, coloured by the mean reward of what follows. */
function treeDrawing(branches, now, open) {
  const longest = Math.max(...branches.map(({ turns }) => turns.length));
  const step = Math.max(NARROWEST_STEP, Math.min(WIDEST_STEP, Math.floor(TREE_WIDTH / (longest + 1))));
  const x = (place) => DOT + 3 + place * step;
  const y = (row) => ROW / 2 + row * ROW;
  const worth = worthOf(branches);
  const row = new Map();
  branches.forEach(({ own }, number) => own.forEach((segment) => row.set(segment.index, number)));
  const onPath = new Set(branches[now].turns.map(({ index }) => index));
  const lines = [];
  const dots = [];
  branches.forEach(({ turns, own, way }, number) => {
    const first = turns.length - own.length;
    const from = first ? row.get(turns[first - 1].index) : 0;
    const chosen = (index) => (onPath.has(index) ? "now" : null);
    if (own.length) {
      const bend = x(first) + step / 2;
      const path = `M${x(first)} ${y(from)}H${bend}V${y(number)}H${x(first + 1)}`;
      lines.push(drawn("path", { d: path, class: chosen(own[0].index) }));
    }
    own.forEach((segment, place) => {
      const column = first + place + 1;
      if (place) lines.push(drawn("path", { d: `M${x(column - 1)} ${y(number)}H${x(column)}`, class: chosen(segment.index) }));
      const target = onPath.has(segment.index) ? now : number;
      dots.push(turnDot(segment, worth.get(segment.index), { cx: x(column), cy: y(number), class: chosen(segment.index) }, () =>
        open(target, segment.turn_id),
      ));
    });
    if (way) dots.push(drawn("text", { x: x(turns.length) + DOT + 6, y: y(number) + 4, class: "worth" }, figure(way[1])));
  });
  const root = drawn("rect", { x: x(0) - DOT, y: y(0) - DOT, width: 2 * DOT, height: 2 * DOT }, drawn("title", null, "reset"));
  const width = x(longest) + DOT + (branches.some(({ way }) => way) ? 60 : 6);
  const size = { width, height: branches.length * ROW, viewBox: `0 0 ${width} ${branches.length * ROW}` };
  const label = `${plural(branches.length, "branch", "branches")} of at most ${plural(longest, "turn")}`;
  return drawn("svg", { ...size, role: "img", "aria-label": label }, lines, root, dots);
}

function turnDot(segment, worth, place, onclick) {
  const [mean, ways, share] = worth || [null, 0, null];
  const facts = [
    `turn ${segment.turn_id}, ${plural(segment.tokens, "token")}`,
    segment.fork && `fork: ${segment.fork}`,
    mean !== null && (ways > 1 ? `the ${ways} ways through it earned ${figure(mean)} on average` : `its way earned ${figure(mean)}`),
  ].filter(Boolean);
  const fill = share === null ? null : `fill: color-mix(in oklch, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
  return drawn("circle", { ...place, r: DOT, style: fill, onclick }, drawn("title", null, facts.join("; ")));
}

/** Return by segment the mean reward of the ways through it, their number, and where that mean lies between all ways. */
function worthOf(branches) {
  const earned = new Map();
  for (const { turns, way } of branches)
    if (way) for (const { index } of turns) earned.set(index, [...(earned.get(index) || []), way[1]]);
  const rewards = branches.filter(({ way }) => way).map(({ way }) => way[1]);
  const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
  return new Map(
    [...earned].map(([index, found]) => {
      const mean = found.reduce((sum, each) => sum + each, 0) / found.length;
      return [index, [mean, found.length, most > least ? (mean - least) / (most - least) : null]];
    }),
  );
}

/** Scroll to the turn whose dot was clicked, once. */
function showTurn(main) {
  const turn = wanted === null ? null : main.querySelector(`[data-turn="${CSS.escape(wanted)}"]`);
  wanted = null;
  if (turn) turn.scrollIntoView({ block: "center" });
}

/** Open the next or the previous branch. */
function stepBranch(by) {
  const tabs = [...document.querySelectorAll(".branches .tab")];
  const now = tabs.findIndex((tab) => tab.classList.contains("now"));
  const next = tabs[now + by];
  if (next) next.click();
}
