// Curves of metrics, runs overlaid.

const FIRST = [
  "reward/mean",
  "eval/sampled",
  "eval/sampled/reward",
  "eval/greedy",
  "eval/greedy/reward",
  "train/loss",
  "train/entropy",
  "kl/value",
  "train/grad_norm",
  "rollout/turns",
  "rollout/sampled_tokens",
  "tools/error_rate",
  "gap/mean",
  "lag/mean",
  "time/step_s",
  "time/sampled_tokens_per_s",
  "memory/peak",
];

const viewCurves = (main, route) => {
  const state = {
    q: route.query.get("q") || "",
    smooth: Number(route.query.get("smooth") || 0),
    log: route.query.get("log") === "1",
    all: route.query.get("all") === "1",
  };
  const grid = el("div");
  const keep = () =>
    setQuery({ q: state.q, smooth: state.smooth || null, log: state.log ? 1 : null, all: state.all ? 1 : null });
  const draw = () => {
    keep();
    drawCharts(grid, state, () => {
      state.all = true;
      draw();
    });
  };
  const change = (key, read) => (event) => {
    state[key] = read(event.target);
    draw();
  };
  fill(main, [
    el("div.controls", null, [
      input("Metrics", state.q, (text) => ((state.q = text), draw()), { placeholder: "reward entropy …" }),
      el(
        "label.field",
        null,
        el("span", null, "Smoothing"),
        el("input", {
          type: "range",
          min: 0,
          max: 0.95,
          step: 0.05,
          value: state.smooth,
          onchange: change("smooth", (target) => Number(target.value)),
        }),
      ),
      el(
        "label.check",
        null,
        el("input", { type: "checkbox", checked: state.log, onchange: change("log", (target) => target.checked) }),
        "logarithmic",
      ),
      el(
        "label.check",
        null,
        el("input", { type: "checkbox", checked: state.all, onchange: change("all", (target) => target.checked) }),
        "all metrics",
      ),
      el("span.hint", null, "drag over a curve to zoom, double-click to zoom out"),
    ]),
    grid,
  ]);
  draw();
};

function metricNames(state) {
  const names = new Set(shownRuns().flatMap((run) => Object.keys(run.series)));
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [...names].filter((name) => !words.length || words.some((word) => name.toLowerCase().includes(word)));
  if (words.length || state.all) return found.sort();
  return FIRST.filter((name) => names.has(name));
}

function drawCharts(grid, state, showAll) {
  const names = metricNames(state);
  const total = new Set(shownRuns().flatMap((run) => Object.keys(run.series))).size;
  if (!total) {
    fill(grid, note("No run that is shown has curves: they come from metrics.jsonl of a training run."));
    return;
  }
  const groups = new Map();
  const grouped = state.all || state.q;
  for (const name of names) {
    const group = grouped ? name.split("/")[0] : "";
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  fill(grid, [
    !names.length && note(`No metric has ${state.q} in its name.`),
    [...groups].map(([group, members]) => [
      group && el("h2.group", null, group),
      el(
        "div.charts",
        null,
        members.map((name) => chartCard(name, state)),
      ),
    ]),
    !state.all &&
      !state.q &&
      names.length < total &&
      el("p", null, el("button", { onclick: showAll }, `show all ${total} metrics`)),
  ]);
}

function chartCard(name, state) {
  const meant = shownRuns()
    .map((run) => run.meanings[name])
    .find(Boolean);
  const readout = el("div.readout");
  const place = el("div.plot");
  const card = el(
    "figure.card.chart",
    null,
    el("figcaption", { title: meant || name }, el("strong", null, name), meant && el("span.meaning", null, meant)),
    place,
    readout,
  );
  // Only what is seen is drawn: a run has some hundred metrics.
  const seen = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      drawChart(place, readout, name, state);
    },
    { rootMargin: "400px" },
  );
  seen.observe(card);
  return card;
}

function smoothed(values, weight) {
  let [mean, mass] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return mean / mass;
  });
}

/** The runs that have a metric, their values at all steps, and what is drawn of them. */
function chartData(name, state) {
  const having = shownRuns().filter((run) => run.series[name]);
  const joined = having.length ? uPlot.join(having.map((run) => run.series[name])) : [[]];
  const data = [joined[0]];
  for (const values of joined.slice(1)) {
    if (state.smooth) data.push(values);
    data.push(state.smooth ? smoothed(values, state.smooth) : values);
  }
  return { having, joined, data };
}

/** The y axis of a curve: one of zeros alone reaches to 1, where uPlot's own goes to 100. */
function linearRange(_, low, high) {
  if (low === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

function drawChart(place, readout, name, state) {
  const { having, joined, data } = chartData(name, state);
  const styles = getComputedStyle(document.documentElement);
  const color = (variable) => styles.getPropertyValue(variable).trim();
  const series = [{}];
  for (const run of having) {
    const few = run.series[name][0].length < 40;
    if (state.smooth)
      series.push({ stroke: color(run.color), width: 1, alpha: 0.25, spanGaps: true, points: { show: false } });
    series.push({ stroke: color(run.color), width: 2, spanGaps: true, points: { show: few, size: 5 } });
  }
  const positive = data
    .slice(1)
    .every((values) => values.every((value) => value === null || value === undefined || value > 0));
  const show = (plot) => {
    const index = plot.cursor.idx;
    fill(
      readout,
      having.map((run, number) => {
        const values = joined[number + 1];
        const steps = run.series[name];
        const value = index === null || index === undefined ? steps[1][steps[1].length - 1] : values[index];
        return el("span", null, runMark(run), figure(value));
      }),
      el(
        "span.step",
        null,
        `step ${index === null || index === undefined ? joined[0][joined[0].length - 1] : joined[0][index]}`,
      ),
    );
  };
  const axis = {
    stroke: color("--muted"),
    grid: { stroke: color("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui",
  };
  const plot = new uPlot(
    {
      width: place.clientWidth || 360,
      height: 190,
      legend: { show: false },
      cursor: { sync: { key: "steps", setSeries: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: state.log && positive ? { distr: 3 } : { range: linearRange } },
      axes: [
        { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6] },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) },
      ],
      series,
      hooks: { setCursor: [show], ready: [show] },
    },
    data,
    place,
  );
  new ResizeObserver(() => {
    if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: 190 });
  }).observe(place);
}
