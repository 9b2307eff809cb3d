// Tasks and trajectories.

// Tasks: one row for each, the runs side by side.

const viewTasks = (main, route) => {
  const parts = [...new Set(shownRuns().flatMap((run) => run.partNames))];
  const state = {
    q: route.query.get("q") || "",
    part: route.query.get("part") || defaultPart(parts),
    solved: route.query.get("solved") || "",
    sort: route.query.get("sort") || "",
  };
  const holder = el("div");
  const draw = () => {
    setQuery(state);
    fill(holder, tasksTable(state));
  };
  const set = (key) => (value) => {
    state[key] = value;
    draw();
  };
  fill(main, [
    el("div.controls", null, [
      select(
        "Part",
        parts.map((part) => [part, part]),
        state.part,
        set("part"),
      ),
      select(
        "Success",
        [
          ["", "all"],
          ["never", "never solved"],
          ["some", "sometimes solved"],
          ["always", "always solved"],
        ],
        state.solved,
        set("solved"),
      ),
      input("Task", state.q, set("q"), { placeholder: "part of a name" }),
    ]),
    holder,
  ]);
  draw();
};

/** The last sampled evaluation, else the last part. */
function defaultPart(parts) {
  return [...parts].reverse().find((part) => part.endsWith("sampled")) || parts[parts.length - 1] || "";
}

function tasksOf(run, part) {
  const found = new Map();
  const columns = run.tasks;
  (columns.task || []).forEach((task, place) => {
    if (columns.part[place] !== part) return;
    const row = { task };
    for (const name of ["episodes", "failed", "reward", "success", "turns", "tokens"]) row[name] = columns[name][place];
    found.set(task, row);
  });
  return found;
}

function tasksTable(state) {
  const having = shownRuns()
    .map((run) => [run, tasksOf(run, state.part)])
    .filter(([, tasks]) => tasks.size);
  const names = [...new Set(having.flatMap(([, tasks]) => [...tasks.keys()]))];
  const kinds = {
    never: (rates) => rates.every((value) => value === 0),
    always: (rates) => rates.every((value) => value === 1),
    some: (rates) => rates.some((value) => value > 0 && value < 1) || new Set(rates).size > 1,
  };
  const rows = names
    .map((task) => ({ task, of: having.map(([, tasks]) => tasks.get(task)) }))
    .filter((row) => {
      const rates = row.of.filter((each) => each && each.success !== null).map((each) => each.success);
      return (
        row.task.toLowerCase().includes(state.q.toLowerCase()) &&
        (!state.solved || (rates.length > 0 && kinds[state.solved](rates)))
      );
    });
  if (!having.length) return note("No run that is shown has tasks of this part.");
  const value = (place, name) => (row) => (row.of[place] ? row.of[place][name] : null);
  const columns = [
    {
      name: "Task",
      key: "task",
      cell: (row) => el("a", { href: address("trajectories", [], { task: row.task, part: state.part }) }, row.task),
    },
  ];
  having.forEach(([run], place) => {
    const label = (name) => (having.length > 1 ? [runMark(run), name] : name);
    columns.push(
      {
        name: label("Success"),
        key: `success${place}`,
        number: true,
        sort: value(place, "success"),
        cell: (row) => bar(value(place, "success")(row)),
      },
      {
        name: label("Reward"),
        key: `reward${place}`,
        number: true,
        sort: value(place, "reward"),
        text: (row) => figure(value(place, "reward")(row)),
      },
      {
        name: label("Episodes"),
        key: `episodes${place}`,
        number: true,
        sort: value(place, "episodes"),
        text: (row) => whole(value(place, "episodes")(row)),
      },
    );
    if (having.length === 1) {
      columns.push(
        {
          name: "Failed",
          key: "failed",
          number: true,
          sort: value(place, "failed"),
          text: (row) => whole(value(place, "failed")(row)),
        },
        {
          name: "Turns",
          key: "turns",
          number: true,
          sort: value(place, "turns"),
          text: (row) => figure(value(place, "turns")(row)),
        },
        {
          name: "Tokens",
          key: "tokens",
          number: true,
          sort: value(place, "tokens"),
          text: (row) => figure(value(place, "tokens")(row)),
        },
      );
    }
  });
  return sortable(columns, rows, {
    noun: "task",
    sort: state.sort,
    onsort: (sort) => setQuery({ ...state, sort: (state.sort = sort) }),
  });
}

function bar(share, text) {
  if (share === null || share === undefined) return "–";
  return el(
    "span.bar",
    { title: rate(share), style: { "--share": `${Math.max(0, Math.min(1, share)) * 100}%` } },
    text || rate(share),
  );
}

// Trajectories: filters, a search in their texts, and a table. The order of the table is that of j and k.

let listed = [];

const viewTrajectories = (main, route) => {
  const keys = ["q", "run", "part", "stop", "task", "kind", "outcome", "min", "max", "text", "sort"];
  const state = Object.fromEntries(keys.map((key) => [key, route.query.get(key) || ""]));
  const holder = el("div");
  const search = { found: null, wanted: "", serial: 0 };
  const draw = () => {
    setQuery(state);
    fill(holder, trajectoriesTable(state, search.found));
  };
  const set = (key) => (value) => {
    state[key] = value;
    draw();
  };
  const progress = el("span.hint");
  const searchTexts = async (wanted) => {
    state.text = wanted.trim();
    const mine = ++search.serial;
    // A later search, or another view, ends this one.
    const current = () => mine === search.serial && holder.isConnected;
    search.found = state.text ? new Set() : null;
    fill(progress, "");
    if (state.text) await findTexts(state.text, search.found, current, (done) => fill(progress, done));
    if (current()) draw();
  };
  const choices = (of) => {
    const found = new Set(shownRuns().flatMap((run) => run.rows.flatMap(of)));
    return [["", "all"], ...[...found].sort().map((each) => [each, each])];
  };
  const kinds = choices((row) => Object.keys(row.kinds || {}));
  fill(main, [
    el("div.controls", null, [
      runs.length > 1 &&
        select("Run", [["", "all"], ...shownRuns().map((run) => [run.number, run.name])], state.run, set("run")),
      select(
        "Part",
        choices((row) => row.part),
        state.part,
        set("part"),
      ),
      select(
        "Stop reason",
        choices((row) => row.stop),
        state.stop,
        set("stop"),
      ),
      select(
        "Outcome",
        [
          ["", "all"],
          ["success", "success"],
          ["failure", "no success"],
          ["error", "ended with an error"],
          ["tools", "with tool errors"],
          ["forks", "with forks"],
        ],
        state.outcome,
        set("outcome"),
      ),
      kinds.length > 1 && select("Tool error", kinds, state.kind, set("kind")),
      input("Reward from", state.min, set("min"), { type: "number", step: "any", class: "short" }),
      input("to", state.max, set("max"), { type: "number", step: "any", class: "short" }),
      input("Task, id or error", state.q, set("q"), { placeholder: "filter", "data-search": true }),
      el(
        "label.field",
        null,
        el("span", null, "Text in messages"),
        el("input", {
          type: "search",
          value: state.text,
          placeholder: "press Enter",
          onkeydown: (event) => event.key === "Enter" && searchTexts(event.target.value),
          onsearch: (event) => event.target.value || searchTexts(""),
        }),
      ),
      progress,
      state.task &&
        el(
          "button.chip",
          {
            onclick: () => {
              location.hash = address("trajectories", [], { ...state, task: "" });
            },
          },
          `task ${state.task} ✕`,
        ),
    ]),
    holder,
  ]);
  draw();
  if (state.text) searchTexts(state.text);
};

/** Find a text in the contents that the report holds. */
async function findTexts(wanted, found, current, say) {
  for (const run of shownRuns()) await run.search(wanted, found, current, say);
  const missing = shownRuns().reduce((sum, run) => sum + run.total - run.kept, 0);
  say(
    `${plural(found.size, "hit")}${missing ? `; the report does not hold the contents of ${whole(missing)} trajectories` : ""}`,
  );
}

/** All texts in a value, keys of arguments included. */
function textsOf(value) {
  if (typeof value === "string") return [value];
  if (typeof value !== "object" || value === null) return [String(value)];
  return Object.entries(value).flatMap(([key, each]) => [key, ...textsOf(each)]);
}

function trajectoriesTable(state, found) {
  const [least, most] = [state.min, state.max].map((text) => (text === "" ? null : Number(text)));
  const words = state.q.toLowerCase();
  const outcomes = {
    success: (row) => row.success,
    failure: (row) => !row.success,
    error: (row) => row.error !== null,
    tools: (row) => row.errors > 0,
    forks: (row) => row.forks > 0,
  };
  const rows = shownRuns()
    .flatMap((run) => run.rows)
    .filter(
      (row) =>
        (state.run === "" || row.run.number === Number(state.run)) &&
        (!state.part || row.part === state.part) &&
        (!state.stop || row.stop === state.stop) &&
        (!state.task || row.task === state.task) &&
        (!state.kind || (row.kinds && row.kinds[state.kind])) &&
        (!state.outcome || outcomes[state.outcome](row)) &&
        (least === null || row.reward >= least) &&
        (most === null || row.reward <= most) &&
        (!words || `${row.task}\n${row.id}\n${row.error || ""}`.toLowerCase().includes(words)) &&
        (!found || found.has(`${row.run.number} ${row.id}`)),
    );
  const agents = rows.some((row) => row.agent !== "main");
  const link = (row) =>
    el(
      "a",
      {
        href: trajectoryAddress(row),
        class: row.chunk === null ? "faint" : null,
        title: row.chunk === null ? "its contents are not in the report" : null,
      },
      row.id,
    );
  const count = (name, key, title) => ({ name, key, title, number: true, text: (row) => whole(row[key]) });
  const columns = [
    runs.length > 1 && { name: "Run", key: "run", sort: (row) => row.run.number, cell: (row) => runName(row.run) },
    { name: "Trajectory", key: "id", cell: link },
    { name: "Task", key: "task" },
    { name: "Part", key: "part" },
    agents && { name: "Session", key: "agent" },
    {
      name: "Reward",
      key: "reward",
      number: true,
      cell: (row) => el(`span${row.success ? ".good" : row.error !== null ? ".bad" : ""}`, null, figure(row.reward)),
    },
    {
      name: "Stop reason",
      key: "stop",
      cell: (row) => [row.stop, row.error !== null && el("div.error", { title: row.error }, row.error.slice(0, 80))],
    },
    count("Turns", "turns"),
    count("Tokens", "tokens", "sampled tokens, over all branches"),
    count("Calls", "calls", "tool calls"),
    count("Errors", "errors", "tool calls that were answered by an error"),
    count("Forks", "forks", "branches beyond the first"),
    count("Weights", "version", "newest weight version that sampled a token"),
  ].filter(Boolean);
  return sortable(columns, rows, {
    noun: "trajectory",
    nouns: "trajectories",
    sort: state.sort,
    onsort: (sort) => setQuery({ ...state, sort: (state.sort = sort) }),
    ondraw: (all) => (listed = all),
  });
}
