// Overview and failures of each run.

const viewOverview = (main) =>
  fill(
    main,
    shownRuns().map((run) => overviewOf(run)),
  );

function overviewOf(run) {
  const facts = [
    run.kind,
    ...(run.model ? [run.kind === "training" ? `trains ${run.model}` : `model ${run.model}`] : []),
    plural(run.total, "trajectory", "trajectories"),
    plural(Object.keys(run.series).length, "curve"),
  ];
  return el("section.card", null, [
    el("h2", null, runName(run), el("small", null, facts.join(" · "))),
    run.notes.length > 0 &&
      el(
        "ul.notes",
        null,
        run.notes.map((each) => el("li", null, each)),
      ),
    partsTable(run),
    run.warnings.length > 0 && el("h3", null, "Warnings"),
    run.warnings.length > 0 &&
      el(
        "ul.warnings",
        null,
        run.warnings.map((each) =>
          el("li", null, [
            el("strong", null, each.name),
            el(
              "span.chip",
              null,
              each.count > 1 ? `${each.count} times, steps ${each.first} to ${each.last}` : `step ${each.last}`,
            ),
            el("div", null, each.text),
          ]),
        ),
      ),
    run.config && el("details", null, el("summary", null, "Configuration"), el("pre.code", null, run.config)),
  ]);
}

function partsTable(run) {
  const rows = run.partNames.map((part) => ({ part, ...run.parts[part] }));
  if (!rows.length) return null;
  const stops = (row) =>
    Object.entries(row.stops).map(([stop, count]) =>
      el(
        "a.chip",
        { href: address("trajectories", [], { run: run.number, part: row.part, stop }) },
        `${stop} ${whole(count)}`,
      ),
    );
  return sortable(
    [
      {
        name: "Part",
        key: "part",
        cell: (row) => el("a", { href: address("trajectories", [], { run: run.number, part: row.part }) }, row.part),
      },
      {
        name: "Success",
        key: "success",
        number: true,
        sort: (row) => row.success[0],
        text: (row) => estimate(row.success),
        title: "share of episodes with a reward of at least success_reward; ± standard error, tasks as clusters",
      },
      {
        name: "Reward",
        key: "reward",
        number: true,
        sort: (row) => row.reward[0],
        text: (row) => estimate(row.reward),
        title: "mean over episodes; ± standard error, tasks as clusters",
      },
      { name: "Episodes", key: "episodes", number: true, text: (row) => whole(row.episodes) },
      { name: "Tasks", key: "tasks", number: true, text: (row) => whole(row.tasks) },
      {
        name: "Failed",
        key: "failed",
        number: true,
        text: (row) => whole(row.failed),
        title: "episodes that ended with an error; they are in no mean",
      },
      { name: "Turns", key: "turns", number: true, text: (row) => figure(row.turns) },
      {
        name: "Tokens",
        key: "tokens",
        number: true,
        text: (row) => figure(row.tokens),
        title: "sampled tokens per episode",
      },
      ...(rows.some((row) => row.search) ? searchColumns() : []),
      { name: "Stop reasons", key: "stops", sort: (row) => Object.keys(row.stops)[0], cell: stops },
    ],
    rows,
    { noun: "part" },
  );
}

/** What searches cost, and between which rewards their choice lies; all other columns are of the chosen ways. */
function searchColumns() {
  const column = (name, key, title) => ({
    name,
    key: `search ${key}`,
    number: true,
    title,
    sort: (row) => (row.search ? row.search[key] : null),
    text: (row) => (row.search ? figure(row.search[key]) : ""),
  });
  return [
    column("Ways", "ways", "ways through an episode, mean"),
    column("Tokens of all ways", "tokens", "sampled tokens per episode, over all its ways"),
    column("Reward of any way", "mean", "mean over the ways of an episode: what a blind choice earns"),
    column("Reward of the best", "best", "highest among the ways of an episode: what a choice without mistakes earns"),
  ];
}

// Failures: why episodes end, by part; errors, tool errors, and tasks that are never solved.

const viewFailures = (main) =>
  fill(
    main,
    shownRuns().map((run) => el("section.card", null, el("h2", null, runName(run)), failuresOf(run))),
  );

function failuresOf(run) {
  const kinds = new Map();
  for (const row of run.rows) {
    for (const [kind, count] of Object.entries(row.kinds || {})) {
      const known = kinds.get(kind) || { kind, count: 0, rows: 0, examples: [] };
      known.count += count;
      known.rows += 1;
      if (row.chunk !== null) known.examples = [...known.examples.slice(-2), row];
      kinds.set(kind, known);
    }
  }
  const example = (row, text) => el("a.chip", { href: trajectoryAddress(row) }, text || row.task);
  const never = run.partNames
    .map((part) => {
      const tasks = [...tasksOf(run, part).values()].filter((each) => each.success === 0);
      return { part, count: tasks.length, tasks: tasks.slice(0, 6) };
    })
    .filter((each) => each.count);
  return [
    el("h3", null, "Stop reasons"),
    stopsTable(run),
    run.errors.length > 0 && el("h3", null, "Errors"),
    run.errors.length > 0 &&
      sortable(
        [
          { name: "Error", key: "text", cell: (row) => el("code", null, row.text) },
          { name: "Trajectories", key: "count", number: true, text: (row) => whole(row.count) },
          { name: "Last", key: "id", cell: (row) => (run.byId.has(row.id) ? example(run.byId.get(row.id)) : row.id) },
        ],
        run.errors.map(([text, count, id]) => ({ text, count, id })),
        { noun: "error" },
      ),
    kinds.size > 0 && el("h3", null, "Tool errors"),
    kinds.size > 0 &&
      sortable(
        [
          {
            name: "Kind",
            key: "kind",
            cell: (row) =>
              el("a", { href: address("trajectories", [], { run: run.number, kind: row.kind }) }, row.kind),
          },
          { name: "Calls", key: "count", number: true, text: (row) => whole(row.count) },
          { name: "Trajectories", key: "rows", number: true, text: (row) => whole(row.rows) },
          {
            name: "Examples",
            key: "examples",
            sort: () => 0,
            cell: (row) => row.examples.map((each) => example(each)),
          },
        ],
        [...kinds.values()],
        { noun: "kind", sort: "-count" },
      ),
    run.listed < run.total &&
      kinds.size > 0 &&
      note(`Tool errors are counted in the ${whole(run.listed)} trajectories of the table.`),
    never.length > 0 && el("h3", null, "Tasks that are never solved"),
    never.length > 0 &&
      sortable(
        [
          { name: "Part", key: "part" },
          {
            name: "Tasks",
            key: "count",
            number: true,
            cell: (row) =>
              el("a", { href: address("tasks", [], { part: row.part, solved: "never" }) }, whole(row.count)),
          },
          {
            name: "Some of them",
            key: "tasks",
            sort: () => 0,
            cell: (row) =>
              row.tasks.map((each) =>
                el(
                  "a.chip",
                  { href: address("trajectories", [], { run: run.number, part: row.part, task: each.task }) },
                  each.task,
                ),
              ),
          },
        ],
        never,
        { noun: "part" },
      ),
  ];
}

function stopsTable(run) {
  const stops = [...new Set(run.partNames.flatMap((part) => Object.keys(run.parts[part].stops)))];
  const rows = run.partNames.map((part) => ({ part, ...run.parts[part] }));
  if (!rows.length) return note("This run has no trajectories.");
  const columns = stops.map((stop) => ({
    name: stop,
    key: stop,
    number: true,
    sort: (row) => (row.stops[stop] || 0) / row.episodes,
    cell: (row) =>
      row.stops[stop]
        ? el(
            "a",
            { href: address("trajectories", [], { run: run.number, part: row.part, stop }) },
            bar(row.stops[stop] / row.episodes, whole(row.stops[stop])),
          )
        : "",
  }));
  return sortable(
    [
      { name: "Part", key: "part" },
      { name: "Episodes", key: "episodes", number: true, text: (row) => whole(row.episodes) },
      ...columns,
    ],
    rows,
    { noun: "part" },
  );
}
