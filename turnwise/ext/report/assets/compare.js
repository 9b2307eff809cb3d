// Two parts (of two runs, or of one) compared task by task.

const viewCompare = (main, route) => {
  const sides = runs.flatMap((run) => run.partNames.map((part) => ({ key: `${run.number}/${part}`, run, part })));
  const holder = el("div");
  if (sides.length < 2) {
    fill(
      main,
      note("A comparison needs two evaluations: give turnwise report two runs, or one that was evaluated twice."),
    );
    return;
  }
  const [before, after] = defaultSides(sides);
  const state = {
    a: route.query.get("a") || before.key,
    b: route.query.get("b") || after.key,
    metric: route.query.get("metric") || "success",
    only: route.query.get("only") || "changed",
  };
  function draw() {
    setQuery(state);
    const [first, second] = [state.a, state.b].map((key) => sides.find((side) => side.key === key));
    fill(holder, first && second ? comparisonOf(first, second, state) : note("One of the two is not in this report."));
  }
  const set = (key) => (value) => {
    state[key] = value;
    draw();
  };
  const options = sides.map((side) => [side.key, runs.length > 1 ? `${side.run.name}: ${side.part}` : side.part]);
  fill(main, [
    el("div.controls", null, [
      select("Before", options, state.a, set("a")),
      select("After", options, state.b, set("b")),
      select(
        "Metric",
        [
          ["success", "success"],
          ["reward", "reward"],
        ],
        state.metric,
        set("metric"),
      ),
      select(
        "Tasks",
        [
          ["changed", "that differ"],
          ["lost", "worse"],
          ["gained", "better"],
          ["all", "all"],
        ],
        state.only,
        set("only"),
      ),
    ]),
    holder,
  ]);
  draw();
};

/** Of one run its first and last sampled evaluation; of several the same part of the first two, where there is one. */
function defaultSides(sides) {
  const last = (run) =>
    sides.find((side) => side.run === run && side.part === defaultPart(run.partNames)) ||
    sides.find((side) => side.run === run);
  const having = runs.filter((run) => run.partNames.length);
  if (having.length === 1) {
    const sampled = sides.filter((side) => side.part.endsWith("sampled"));
    return sampled.length > 1 ? [sampled[0], sampled[sampled.length - 1]] : [sides[0], sides[1]];
  }
  return [last(having[0]), last(having[1])];
}

function paired(first, second, metric) {
  const [before, after] = [first, second].map((side) => tasksOf(side.run, side.part));
  const rows = [];
  for (const [task, one] of before) {
    const other = after.get(task);
    if (other && one[metric] !== null && other[metric] !== null)
      rows.push({ task, before: one[metric], after: other[metric], difference: other[metric] - one[metric] });
  }
  const mean = (of) => rows.reduce((sum, row) => sum + of(row), 0) / rows.length;
  const difference = mean((row) => row.difference);
  const spread =
    rows.length > 1
      ? Math.sqrt(
          rows.reduce((sum, row) => sum + (row.difference - difference) ** 2, 0) / (rows.length - 1) / rows.length,
        )
      : null;
  return {
    rows,
    before: mean((row) => row.before),
    after: mean((row) => row.after),
    difference,
    spread,
    only: [before.size - rows.length, after.size - rows.length],
  };
}

/** The trajectory of a task with the largest reward, or with the least one where `sign` is negative. */
function extreme({ run, part }, task, sign) {
  const rows = run.rows.filter((row) => row.task === task && row.part === part && row.chunk !== null);
  return rows.reduce(
    (best, row) => (best && (sign < 0 ? best.reward <= row.reward : best.reward >= row.reward) ? best : row),
    null,
  );
}

function comparisonOf(first, second, state) {
  const found = paired(first, second, state.metric);
  if (!found.rows.length) return note("These two have no task in common, so there is nothing to compare task by task.");
  const better = found.rows.filter((row) => row.difference > 0).length;
  const worse = found.rows.filter((row) => row.difference < 0).length;
  const kinds = {
    all: () => true,
    changed: (row) => row.difference !== 0,
    lost: (row) => row.difference < 0,
    gained: (row) => row.difference > 0,
  };
  const rows = found.rows.filter(kinds[state.only] || kinds.all);
  const sign = (value) => `${value > 0 ? "+" : ""}${rate(value)}`;
  const both = (row) => {
    // Those that show the difference: where the task got worse, the best before and the worst after.
    const [one, other] = [extreme(first, row.task, -row.difference), extreme(second, row.task, row.difference)];
    if (!one || !other) return el("span.faint", null, "not in the report");
    return el("a", { href: trajectoryAddress(one, { with: `${other.run.number}/${other.id}` }) }, "side by side");
  };
  const tile = (name, value, hint) =>
    el("div.tile", null, el("span", null, name), el("strong", null, value), hint && el("small", null, hint));
  return [
    el("div.tiles", null, [
      tile("before", rate(found.before), `${first.run.name}, ${first.part}`),
      tile("after", rate(found.after), `${second.run.name}, ${second.part}`),
      tile(
        "difference",
        sign(found.difference),
        found.spread === null
          ? "one common task"
          : `95 % interval ${sign(found.difference - 1.96 * found.spread)} to ${sign(found.difference + 1.96 * found.spread)}`,
      ),
      tile(
        "tasks",
        `${whole(better)} better, ${whole(worse)} worse`,
        `${whole(found.rows.length - better - worse)} equal, ${whole(found.rows.length)} in common`,
      ),
    ]),
    found.only.some(Boolean) &&
      note(
        `${whole(found.only[0])} tasks are only in the first, ${whole(found.only[1])} only in the second, or have no episode without an error; they are not compared.`,
      ),
    note(
      "Every task has the same weight. The interval is 1.96 standard errors of the paired differences; turnwise compare computes a bootstrap interval and a permutation test.",
    ),
    sortable(
      [
        {
          name: "Task",
          key: "task",
          cell: (row) => el("a", { href: address("trajectories", [], { task: row.task }) }, row.task),
        },
        { name: "Before", key: "before", number: true, text: (row) => rate(row.before) },
        { name: "After", key: "after", number: true, text: (row) => rate(row.after) },
        {
          name: "Difference",
          key: "difference",
          number: true,
          cell: (row) =>
            el(`span${row.difference > 0 ? ".good" : row.difference < 0 ? ".bad" : ""}`, null, sign(row.difference)),
        },
        { name: "Trajectories", key: "both", sort: () => 0, cell: both },
      ],
      rows,
      { noun: "task", sort: "difference" },
    ),
  ];
}
