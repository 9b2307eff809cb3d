// Elements, numbers, the packed data, and the address of what is shown. Texts of runs become text nodes only.

const FORMAT = 1;
const COLORS = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5", "--run-6", "--run-7"];

/** Make an element: el("a.link", {href: "#"}, "text", child). Names that begin with "on" are listeners. */
function el(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value") element.value = value;
    else if (key === "style") Object.entries(value).forEach(([rule, what]) => element.style.setProperty(rule, what));
    else element.setAttribute(key, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

const WHOLE = new Intl.NumberFormat("en-US");
const whole = (value) => (value === null || value === undefined ? "–" : WHOLE.format(Math.round(value)));
const plural = (count, noun, nouns) => `${whole(count)} ${count === 1 ? noun : nouns || `${noun}s`}`;

/** A number as a person reads it: four significant digits. */
function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return WHOLE.format(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

const rate = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
const estimate = ([mean, error]) =>
  mean === null ? "–" : error === null ? rate(mean) : `${rate(mean)} ± ${rate(error)}`;

// Data: JSON, compressed (raw deflate), in base64, in a script element of type text/plain.

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let place = 0; place < raw.length; place++) bytes[place] = raw.charCodeAt(place);
  return bytes;
}

/** Return the JSON text of packed data. */
async function unpackedText(name) {
  const element = document.getElementById(name);
  if (!element) throw new Error(`the report lacks its part ${name}: the file was cut off or changed`);
  const stream = new Blob([bytesOf(element.textContent)]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("deflate-raw"))).text();
}

async function unpacked(name) {
  return JSON.parse(await unpackedText(name));
}

class Run {
  constructor(number, head) {
    Object.assign(this, head);
    this.number = number;
    this.color = COLORS[number % COLORS.length];
    this.shown = true;
    this.chunks = new Map();
  }

  /** Read all but the contents of trajectories. */
  async load() {
    const names = ["facts", "tasks", "table"].map((part) => `run-${this.number}-${part}`);
    const [facts, tasks, table] = await Promise.all(names.map(unpacked));
    Object.assign(this, facts);
    this.tasks = tasks;
    this.rows = rowsOf(table, this);
    this.byId = new Map(this.rows.map((row) => [row.id, row]));
  }

  get partNames() {
    return Object.keys(this.parts);
  }

  async record(row) {
    if (row.chunk === null) return null;
    if (!this.chunks.has(row.chunk)) {
      // A few are kept: neighbours in the table are neighbours in a chunk.
      if (this.chunks.size > 7) this.chunks.delete(this.chunks.keys().next().value);
      this.chunks.set(row.chunk, unpacked(`run-${this.number}-chunk-${row.chunk}`));
    }
    return (await this.chunks.get(row.chunk))[row.place];
  }

  /** The texts of token ids, at least of those of a row. */
  async vocabulary() {
    this.words = this.words || unpacked(`run-${this.number}-vocabulary`);
    return this.words;
  }

  /** Add to `found` the trajectories with a text in their messages, a chunk at a time, so that the page stays usable. */
  async search(wanted, found, current, say) {
    const needle = wanted.toLowerCase();
    const escaped = JSON.stringify(wanted).slice(1, -1).toLowerCase();
    const chunks = [...new Set(this.rows.map((row) => row.chunk).filter((chunk) => chunk !== null))];
    for (const [place, chunk] of chunks.entries()) {
      if (!current()) return;
      say(`searching ${place + 1} of ${chunks.length} …`);
      const text = await unpackedText(`run-${this.number}-chunk-${chunk}`);
      if (!text.toLowerCase().includes(escaped)) continue;
      for (const record of JSON.parse(text)) {
        const texts = record.segments.flatMap((segment) => segment.messages);
        if (textsOf(texts).some((each) => each.toLowerCase().includes(needle))) found.add(`${this.number} ${record.id}`);
      }
    }
  }
}

function rowsOf(table, run) {
  const names = Object.keys(table);
  const count = names.length ? table[names[0]].length : 0;
  const rows = new Array(count);
  for (let place = 0; place < count; place++) {
    const row = { run, number: place };
    for (const name of names) row[name] = table[name][place];
    rows[place] = row;
  }
  return rows;
}

const runs = [];
const shownRuns = () => runs.filter((run) => run.shown);

/** Read the runs, and return the seconds after which the page is loaded again, null if they have ended. */
async function loadRuns() {
  const head = JSON.parse(document.getElementById("head").textContent);
  if (head.format !== FORMAT) throw new Error(`the data has format ${head.format}, and this page reads ${FORMAT}`);
  head.runs.forEach((each, number) => runs.push(new Run(number, each)));
  await Promise.all(runs.map((run) => run.load()));
  return head.reload;
}

// The address: #/view/part/part?key=value, so that every view can be linked to.

function readRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const decoded = path
    .split("/")
    .filter(Boolean)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  return { view: decoded[0] || "overview", parts: decoded.slice(1), query: new URLSearchParams(query || "") };
}

function address(view, parts, query) {
  const path = [view, ...(parts || [])].map(encodeURIComponent).join("/");
  const given = new URLSearchParams();
  for (const [key, value] of Object.entries(query || {})) {
    if (value !== null && value !== undefined && value !== "" && value !== false) given.set(key, value);
  }
  const text = given.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

// Where the list of trajectories was left, with its filters.
let listAddress = address("trajectories");

/** Change keys of the address in place: no entry in the history, and no new view. */
function setQuery(changes) {
  const route = readRoute();
  const next = address(route.view, route.parts, { ...Object.fromEntries(route.query), ...changes });
  history.replaceState(null, "", next);
  if (route.view === "trajectories") listAddress = next;
}

const trajectoryAddress = (row, query) => address("trajectory", [row.run.number, row.id], query);

// Parts that several views show.

function runMark(run) {
  return el("span.mark", { style: { "--color": `var(${run.color})` }, title: run.name });
}

function runName(run) {
  return el("span.run-name", null, runMark(run), run.name);
}

function select(label, options, value, onchange) {
  const choices = options.map(([key, text]) =>
    el("option", { value: key, selected: String(key) === String(value) }, text),
  );
  const control = el("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) }, choices);
  return el("label.field", null, el("span", null, label), control);
}

function input(label, value, onchange, attributes) {
  let timer = 0;
  const control = el("input", {
    type: "search",
    value,
    "aria-label": label,
    oninput: (event) => {
      clearTimeout(timer);
      // A view that was left while it waited has no say.
      timer = setTimeout(() => control.isConnected && onchange(event.target.value), 150);
    },
    ...attributes,
  });
  return el("label.field", null, el("span", null, label), control);
}

// task-2 stands before task-10.
const NAMES = new Intl.Collator("en", { numeric: true });

/** A table whose columns sort: columns are {name, key, text?, cell?, number?, title?}. */
function sortable(columns, rows, options) {
  const state = { sort: options.sort || "", page: 0, size: options.size || 100 };
  const body = el("tbody");
  const foot = el("div.pages");
  const head = el("tr");
  const keyOf = (column) => column.sort || ((row) => row[column.key]);
  const sorted = () => {
    const descending = state.sort.startsWith("-");
    const column = columns.find((each) => each.key === state.sort.replace("-", ""));
    if (!column) return rows;
    const key = keyOf(column);
    const order = (first, second) => {
      const [one, two] = [key(first), key(second)];
      if (one === two) return 0;
      // What has no value stands last either way.
      if (one === null || one === undefined) return 1;
      if (two === null || two === undefined) return -1;
      const before = typeof one === "string" && typeof two === "string" ? NAMES.compare(one, two) : one < two ? -1 : 1;
      return descending ? -before : before;
    };
    return [...rows].sort(order);
  };
  const draw = () => {
    const all = sorted();
    const pages = Math.max(1, Math.ceil(all.length / state.size));
    state.page = Math.min(state.page, pages - 1);
    const visible = all.slice(state.page * state.size, (state.page + 1) * state.size);
    fill(
      head,
      columns.map((column) => heading(column)),
    );
    fill(
      body,
      visible.map((row) => el(`tr${options.rowClass ? options.rowClass(row) : ""}`, null, cells(row))),
    );
    const step = (by) => () => {
      state.page += by;
      draw();
    };
    fill(foot, [
      el(
        "span",
        null,
        all.length > state.size
          ? `${state.page * state.size + 1}–${state.page * state.size + visible.length} of ${whole(all.length)}`
          : plural(all.length, options.noun || "row", options.nouns),
      ),
      pages > 1 && el("button", { onclick: step(-1), disabled: state.page === 0, "aria-label": "previous page" }, "‹"),
      pages > 1 &&
        el("button", { onclick: step(1), disabled: state.page === pages - 1, "aria-label": "next page" }, "›"),
    ]);
    if (options.ondraw) options.ondraw(all);
  };
  const cells = (row) =>
    columns.map((column) =>
      el(
        `td${column.number ? ".number" : ""}`,
        null,
        column.cell ? column.cell(row) : column.text ? column.text(row) : row[column.key],
      ),
    );
  const heading = (column) => {
    const now = state.sort.replace("-", "") === column.key;
    const descending = state.sort.startsWith("-");
    const next = now ? (descending ? column.key : `-${column.key}`) : column.number ? `-${column.key}` : column.key;
    const sort = () => {
      state.sort = next;
      state.page = 0;
      draw();
      if (options.onsort) options.onsort(state.sort);
    };
    return el(
      `th${column.number ? ".number" : ""}`,
      { scope: "col", title: column.title, "aria-sort": now ? (descending ? "descending" : "ascending") : null },
      el("button.sort", { onclick: sort }, column.name, now ? (descending ? " ↓" : " ↑") : ""),
    );
  };
  draw();
  return el("div.table", null, el("div.scroll", null, el("table", null, el("thead", null, head), body)), foot);
}

/** Text that is folded where it is long; it is made when it is opened. */
function foldable(text, limit, tag) {
  const kind = tag || "div.text";
  if (text.length <= limit) return el(kind, null, text);
  const holder = el("div");
  const draw = (open) =>
    fill(
      holder,
      el(kind, null, open ? text : `${text.slice(0, Math.floor(limit * 0.8))} …`),
      el(
        "button.more",
        { onclick: () => draw(!open) },
        open ? "show less" : `show all ${whole(text.length)} characters`,
      ),
    );
  draw(false);
  return holder;
}

function note(...children) {
  return el("p.note", null, children);
}
