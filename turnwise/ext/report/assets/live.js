// A served report: its runs are read while they are written, and the shown view goes on with them.

const RETRY_MS = 2000;
const connection = { served: false, position: "", lost: false };

class LiveRun extends Run {
  constructor(number, name) {
    super(number, { name, kind: "", total: 0, listed: 0, kept: 0, notes: [] });
    Object.assign(this, { series: {}, meanings: {}, warnings: [], parts: {}, errors: [], config: null, tasks: {} });
    Object.assign(this, { rows: [], byId: new Map(), answers: new Map() });
  }

  /** Take what is new. */
  take(news) {
    if (news.fresh) Object.assign(this, { series: {}, rows: [], byId: new Map(), answers: new Map() });
    Object.assign(this, news.head, news.facts || {});
    if (news.tasks) this.tasks = news.tasks;
    for (const [name, added] of Object.entries(news.series)) this.series[name] = joinedSeries(this.series[name], added);
    for (const [begin, columns] of news.rows)
      rowsOf(columns, this).forEach((row, place) => {
        const number = begin + place;
        // The same object, which tables and addresses already hold.
        const kept = this.rows[number] ? Object.assign(this.rows[number], row) : row;
        kept.number = number;
        this.rows[number] = kept;
        this.byId.set(kept.id, kept);
      });
  }

  async record(row) {
    return this.ask(row.chunk, "");
  }

  async vocabulary(row) {
    return this.ask(row.chunk, "/words");
  }

  /** Ask for a trajectory, or for its texts of tokens; a few answers are kept. */
  ask(offset, what) {
    const path = `runs/${this.number}/trajectories/${offset}${what}`;
    if (!this.answers.has(path)) {
      if (this.answers.size > 7) this.answers.delete(this.answers.keys().next().value);
      const asked = answer(path);
      this.answers.set(path, asked);
      asked.catch(() => this.answers.delete(path));
    }
    return this.answers.get(path);
  }

  async search(wanted, found, current, say) {
    for (let next = 0; next !== null && current(); ) {
      const part = await answer(`runs/${this.number}/search?text=${encodeURIComponent(wanted)}&from=${next}`);
      part.found.forEach((id) => found.add(`${this.number} ${id}`));
      next = part.next;
      if (next !== null) say(`searching ${whole(next)} of ${whole(part.of)} …`);
    }
  }
}

/** Add points to a curve, in order of their steps; a later value of a step counts. */
function joinedSeries(known, added) {
  if (!known) return added;
  const [steps, values] = known;
  added[0].forEach((step, place) => {
    let at = steps.length;
    while (at > 0 && steps[at - 1] >= step) at--;
    const again = steps[at] === step ? 1 : 0;
    steps.splice(at, again, step);
    values.splice(at, again, added[1][place]);
  });
  return known;
}

async function answer(path) {
  const response = await fetch(path);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error || `the server answered ${response.status}`);
  return found;
}

async function takeNews() {
  const news = await answer(`news?since=${encodeURIComponent(connection.position)}`);
  connection.position = news.position;
  news.runs.forEach((each) => runs[each.run].take(each));
  return news.runs.length > 0;
}

// Nothing is drawn anew under a pressed button of the mouse, or under a selected text: it would be lost.
const hands = { pressed: false, due: false };

function update() {
  hands.due = hands.pressed || !getSelection().isCollapsed;
  if (!hands.due) watchers.forEach((each) => each());
}

function watchHands() {
  const later = () => setTimeout(() => hands.due && update());
  addEventListener("pointerdown", () => (hands.pressed = true), true);
  for (const name of ["pointerup", "pointercancel", "blur"])
    addEventListener(
      name,
      () => {
        hands.pressed = false;
        later();
      },
      true,
    );
  document.addEventListener("selectionchange", later);
}

/** Read the runs, and then what is new of them for as long as the page is open. */
async function follow(head) {
  connection.served = true;
  head.runs.forEach((name, number) => runs.push(new LiveRun(number, name)));
  await takeNews();
  watchHands();
  (async () => {
    for (;;) {
      try {
        const changed = await takeNews();
        setLost(false);
        if (changed) update();
      } catch (error) {
        setLost(true, error);
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  })();
}

const lamp = el("span.lamp", { role: "status" });

function setLost(lost, error) {
  if (lost === connection.lost && lamp.childNodes.length) return;
  connection.lost = lost;
  lamp.className = lost ? "lamp lost" : "lamp";
  lamp.title = lost
    ? `the server does not answer (${error.message || error}); this shows what was read before`
    : "the page is updated while the runs go on";
  fill(lamp, lost ? "not connected" : "live");
}
