// One trajectory as a conversation, by branches; or two of them side by side.

const LONG = 1600;
const MANY_REWARDS = 12;
const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,/;
const reading = { tokens: false, mode: "logprob" };
let serial = 0;

const viewTrajectory = async (main, route) => {
  const mine = ++serial;
  const rows = [route.parts, (route.query.get("with") || "").split("/")].map(findRow);
  if (!rows[0]) {
    fill(main, note("The report does not list this trajectory: ", el("code", null, route.parts[1] || ""), "."));
    return;
  }
  reading.tokens = route.query.get("tokens") === "1";
  reading.mode = route.query.get("by") || reading.mode;
  const chosen = rows.filter(Boolean);
  const records = await Promise.all(chosen.map((row) => row.run.record(row)));
  const words = reading.tokens ? await Promise.all(chosen.map((row) => row.run.vocabulary(row))) : chosen.map(() => ({}));
  if (mine !== serial) return;
  drawTrajectories(main, route, chosen, records, words);
};

function findRow([number, ...id]) {
  const run = runs[Number(number)];
  return run && number !== "" ? run.byId.get(id.join("/")) || null : null;
}

function drawTrajectories(main, route, rows, records, words) {
  const facts = el("div.facts", { hidden: true });
  const show = (pairs) => {
    facts.hidden = false;
    fill(
      facts,
      pairs.map(([name, value]) => el("span", null, el("b", null, name), ` ${value}`)),
    );
  };
  const columns = rows.map((row, side) => {
    const record = records[side];
    if (!record)
      return {
        head: headOf(row, null),
        blocks: [
          note(
            `The contents of this trajectory are not in the report. This shows it: turnwise view RUN --id '${row.id}'`,
          ),
        ],
        keys: [],
      };
    const leaves = leavesOf(record);
    const branch = Math.min(Number(route.query.get(side ? "branch2" : "branch") || 1), leaves.length);
    const path = pathOf(record, leaves[branch - 1]);
    const blocks = conversation(record, path, words[side], show);
    return { head: [headOf(row, record), branchTree(record, leaves, branch, side)], ...blocks };
  });
  const two = columns.length === 2;
  const differs = two ? firstDifference(columns[0].keys, columns[1].keys) : -1;
  fill(main, [
    navigation(rows, records, differs, columns),
    reading.tokens && tokenLegend(reading.mode),
    el(
      `div${two ? ".two" : ""}`,
      null,
      columns.map((column) => el("div", null, column.head, column.blocks)),
    ),
    facts,
  ]);
  showTurn(main);
  columns.forEach(
    (column) => differs >= 0 && column.blocks[differs] && column.blocks[differs].classList.add("differs"),
  );
}

/** Return the index of the first message in which two conversations differ, -1 if there is none. */
function firstDifference(first, second) {
  const place = first.findIndex((key, index) => key !== second[index]);
  if (place >= 0) return place;
  return second.length > first.length ? first.length : -1;
}

function navigation(rows, records, differs, columns) {
  const [row] = rows;
  const all = listed.length ? listed : row.run.rows;
  const place = all.indexOf(row);
  const go = (by) =>
    all[place + by] && place + by >= 0
      ? () => {
          location.hash = trajectoryAddress(all[place + by], readingQuery());
        }
      : null;
  const change = (key, value) => {
    setQuery({ [key]: value });
    render();
  };
  const others = runs
    .flatMap((run) => run.rows.filter((each) => each.task === row.task && each !== row && each.chunk !== null))
    .slice(-200);
  const named = (each) => [
    `${each.run.number}/${each.id}`,
    `${runs.length > 1 ? `${each.run.name}: ` : ""}${each.id} (reward ${figure(each.reward)})`,
  ];
  return el("div.controls.sticky", null, [
    el("button", { onclick: go(-1), disabled: !go(-1), title: "k" }, "‹ previous"),
    el("button", { onclick: go(1), disabled: !go(1), title: "j" }, "next ›"),
    el(
      "label.check",
      null,
      el("input", {
        type: "checkbox",
        checked: reading.tokens,
        onchange: () => change("tokens", reading.tokens ? null : 1),
      }),
      "tokens",
    ),
    reading.tokens && select("Coloured by", TOKEN_MODES, reading.mode, (value) => change("by", value)),
    select(
      "Side by side with",
      [["", "none"], ...others.map(named)],
      rows[1] ? `${rows[1].run.number}/${rows[1].id}` : "",
      (value) => change("with", value),
    ),
    rows[1] &&
      records.every(Boolean) &&
      (differs < 0
        ? el("span.hint", null, "these branches have equal messages")
        : el("button", { onclick: () => showBlock(columns, differs) }, "first difference")),
  ]);
}

function showBlock(columns, index) {
  const target = columns.map((column) => column.blocks[index]).find(Boolean);
  if (target) target.scrollIntoView({ block: "center" });
}

const readingQuery = () => ({ tokens: reading.tokens ? 1 : null, by: reading.tokens ? reading.mode : null });

function headOf(row, record) {
  const items = [
    ["reward", figure(row.reward)],
    ["stop reason", row.stop],
    ["part", row.part],
    ["turns", whole(row.turns)],
    ["sampled tokens", whole(row.tokens)],
    ["tool calls", `${whole(row.calls)}${row.errors ? `, ${whole(row.errors)} answered by an error` : ""}`],
  ];
  if (row.agent !== "main") items.push(["session", row.agent]);
  if (record) {
    if (record.search) {
      const { kind, scorer, ways, score } = record.search;
      const worth = score === null ? "" : `, ${scorer} ${figure(score)}`;
      items.push(["search", `${kind}: the best of ${plural(ways, "way")}${worth}`]);
    }
    items.push(["group", record.group_id], ["seed", record.seed]);
    if (record.attempt) items.push(["attempt", record.attempt + 1]);
    if (record.policy !== "main") items.push(["policy", record.policy]);
    if (record.baseline) items.push(["kind", "greedy baseline"]);
  }
  const measured = record && Object.entries(record.metrics);
  return el("section.card.head", null, [
    el("h2", null, runs.length > 1 && [runName(row.run), " · "], row.id),
    el("p", null, "task ", el("a", { href: address("trajectories", [], { task: row.task }) }, row.task)),
    el(
      "dl.pairs",
      null,
      items.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
    ),
    row.error !== null && el("p.error", null, record ? record.error : row.error),
    record && record.rewards.length > 0 && el("p", null, rewardChips(record.rewards)),
    measured &&
      measured.length > 0 &&
      el(
        "details",
        null,
        el("summary", null, "Metrics"),
        el(
          "dl.pairs",
          null,
          measured.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, figure(value)))),
        ),
      ),
  ]);
}

/** A chip for each reward; of many, one for each name with their sum. */
function rewardChips(rewards) {
  if (rewards.length <= MANY_REWARDS) return rewards.map(rewardChip);
  const sums = new Map();
  for (const [, name, value] of rewards) {
    const [count, sum] = sums.get(name) || [0, 0];
    sums.set(name, [count + 1, sum + value]);
  }
  return [...sums].map(([name, [count, sum]]) => [
    rewardChip([null, name, sum]),
    el("span.hint", null, ` in ${plural(count, "reward")} `),
  ]);
}

const rewardChip = ([turn, name, value]) =>
  el(
    `span.chip.reward${value > 0 ? ".good" : value < 0 ? ".bad" : ""}`,
    { title: turn === null ? "of the episode" : `of turn ${turn}` },
    `★ ${name} ${value > 0 ? "+" : ""}${figure(value)}`,
  );

/** Return the messages of a path as blocks, and a key for each that is equal where the messages are. */
function conversation(record, path, words, show) {
  const blocks = [];
  const keys = [];
  for (const segment of path) {
    const made = segment.messages.map((message) => messageBlock(message, segment, record));
    if (!made.length)
      made.push(
        note(
          `${segment.kind === "sampled" ? "A turn" : "Context"} of ${plural(segment.tokens, "token")}, recorded without messages.`,
        ),
      );
    if (segment.tools && segment.tools.length) {
      const header = made[0].querySelector("header");
      if (header) header.after(toolList(segment.tools));
      else made[0].prepend(toolList(segment.tools));
    }
    if (reading.tokens) made[made.length - 1].append(tokensOf(segment, words, record, show));
    if (segment.kind === "sampled") made[made.length - 1].append(...turnFooter(segment, record));
    blocks.push(...made);
    keys.push(...(segment.messages.length ? segment.messages.map(messageKey) : [String(segment.token_ids)]));
  }
  if (!path.length) blocks.push(note("Nothing was recorded: the episode ended before its first turn."));
  return { blocks, keys };
}

/** The tokens of a turn; those of context are folded, and are made when they are opened. */
function tokensOf(segment, words, record, show) {
  const make = () => segmentTokens(segment, reading.mode, words, record, show);
  if (segment.kind === "sampled" || !segment.token_ids) return make();
  const box = el("details", null, el("summary", null, plural(segment.tokens, "context token")));
  box.addEventListener("toggle", () => box.children.length === 1 && box.append(make()));
  return box;
}

function messageKey(message) {
  const calls = (message.tool_calls || [])
    .map((call) => call.function || call)
    .map((call) => [call.name, call.arguments]);
  return JSON.stringify([
    message.role,
    message.name || null,
    message.content || "",
    message.reasoning_content || "",
    calls,
  ]);
}

function toolList(tools) {
  return el(
    "details",
    null,
    el("summary", null, plural(tools.length, "tool")),
    tools.map((tool) => {
      const given = tool.function || tool;
      return el(
        "div.tool",
        null,
        el("code", null, given.name),
        " ",
        given.description || "",
        el("pre.code", null, JSON.stringify(given.parameters || {}, null, 1)),
      );
    }),
  );
}

function messageBlock(message, segment, record) {
  const sampled = segment.kind === "sampled";
  const versions = [...new Set((segment.weight_versions || []).map(([version]) => version))];
  const marks = [
    sampled && el("span.chip", null, `turn ${segment.turn_id}`),
    sampled && segment.tokens > 0 && el("span.chip", null, plural(segment.tokens, "token")),
    versions.length > 0 &&
      el("span.chip", { title: "weight versions that sampled it" }, `weights ${versions.join(", ")}`),
    segment.finish_reason === "length" && el("span.chip.bad", null, "cut off"),
    segment.fork && el("span.chip.fork", { title: "why this begins a branch" }, `fork: ${segment.fork}`),
  ];
  const role = String(message.role || "?");
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  return el(`article.message.${known}${sampled ? ".turn" : ""}`, { "data-turn": sampled ? segment.turn_id : null }, [
    el("header", null, el("strong", null, role), message.name && el("code", null, message.name), marks),
    message.reasoning_content &&
      el("div.reasoning", null, el("span.label", null, "reasoning"), foldable(String(message.reasoning_content), LONG)),
    contentOf(message.content, record),
    (message.tool_calls || []).map(callBlock),
  ]);
}

function contentOf(content) {
  if (content === null || content === undefined || content === "") return null;
  if (typeof content === "string") return foldable(content, LONG);
  if (!Array.isArray(content)) return foldable(JSON.stringify(content, null, 1), LONG);
  return content.map((part) => {
    if (part && part.type === "text") return foldable(String(part.text), LONG);
    const image = textsOf(part).find((text) => IMAGE.test(text));
    return image
      ? el("img", { src: image, alt: "image of the message" })
      : foldable(JSON.stringify(part, null, 1), 400, "pre.code");
  });
}

function callBlock(call) {
  const given = call.function || call;
  return el("div.call", null, [
    el(
      "header",
      null,
      "→ ",
      el("code", null, given.name === undefined ? "?" : String(given.name)),
      call.id && el("small", null, String(call.id)),
    ),
    argumentBlocks(given.arguments),
    call.error && el("p.error", null, typeof call.error === "string" ? call.error : JSON.stringify(call.error)),
  ]);
}

/** Arguments as JSON, or each for itself where one is a text of several lines, such as a program. */
function argumentBlocks(given) {
  if (given === undefined || given === null || given === "") return null;
  if (typeof given !== "object") return foldable(String(given), LONG, "pre.code");
  const entries = Object.entries(given);
  const lines = (value) => typeof value === "string" && value.includes("\n");
  if (!entries.some(([, value]) => lines(value)))
    return entries.length > 0 && foldable(JSON.stringify(given, null, 1), LONG, "pre.code");
  return entries.map(([name, value]) => [
    el("small.faint", null, name),
    foldable(lines(value) ? value : JSON.stringify(value, null, 1), LONG, "pre.code"),
  ]);
}

/** Rewards, figures, notes and the state of a turn. */
function turnFooter(segment, record) {
  const events = record.rewards.filter(([turn]) => turn !== null && turn === segment.turn_id);
  const measured = Object.entries(record.turn_metrics[segment.turn_id] || {}).map(([name, value]) => [
    name,
    figure(value),
  ]);
  const notes = Object.entries(record.turn_notes[segment.turn_id] || {});
  const state = record.states[segment.turn_id];
  const pairs = [...measured, ...notes, ...(state === undefined ? [] : [["state", state]])];
  const found = [];
  if (events.length) found.push(el("p", null, events.map(rewardChip)));
  if (pairs.length)
    found.push(
      el(
        "details",
        null,
        el("summary", null, "Measured in this turn"),
        el(
          "dl.pairs",
          null,
          pairs.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
        ),
      ),
    );
  return found;
}
