// What the server answers, or the file that this page is: then its answers are in it, and nothing is asked.
"use strict";

const held = document.getElementById("holdfast-data");
const answers = held && new Map(Object.entries(JSON.parse(held.textContent)));
const isFile = answers != null;
const aboutFile = answers?.get("/about");

let onLost = () => {};
/** Call `listener` with true when the server does not answer, and with false when it does again. */
const watchServer = (listener) => (onLost = listener);

class Refused extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/** The answer to `path`: JSON, or the bytes of what is binary. Waits for a server that is lost; raises what it refuses. */
async function ask(path, { signal, method = "GET" } = {}) {
  if (isFile) return fromFile(path);
  for (let failures = 1; ; failures += 1) {
    try {
      const answer = await fetch(path, { signal, method });
      const type = answer.headers.get("content-type") || "";
      const body = type.includes("octet-stream") ? await answer.arrayBuffer() : await answer.text();
      onLost(false);
      if (answer.status === 204) return null;
      if (answer.ok) return typeof body === "string" ? JSON.parse(body) : body;
      throw refusal(answer.status, body);
    } catch (error) {
      if (signal?.aborted || !(error instanceof TypeError)) throw error;
      // A connection that was kept may just have been closed: that is no loss yet.
      if (failures > 1) onLost(true);
      await new Promise((resolve) => setTimeout(resolve, failures > 1 ? 2000 : 100));
      if (signal?.aborted) throw error;
    }
  }
}

function refusal(status, body) {
  if (status === 403) return new Refused("Forbidden", "Open the link that holdfast view has printed.");
  try {
    const { kind, message } = JSON.parse(body).error;
    return new Refused(kind, message);
  } catch {
    return new Refused("", `The server answers with ${status}: ${body}`);
  }
}

function fromFile(path) {
  const found = answers.has(path) ? answers.get(path) : fromRows(path);
  if (found === undefined) throw new Refused("NotInFile", "Open the checkpoint with holdfast view to see this.");
  if (found.error) throw new Refused(found.error.kind, found.error.message);
  return found;
}

/** Rows of a table that the file has: searched and sorted here. */
function fromRows(path) {
  const { pathname, searchParams } = new URL(path, "http://file");
  const all = answers.get(`${pathname}?checkpoint=${searchParams.get("checkpoint")}`);
  if (!all?.rows) return undefined;
  const wanted = (searchParams.get("search") || "").toLowerCase();
  const rows = all.rows.filter((row) => row.key.toLowerCase().includes(wanted));
  const by = searchParams.get("sort") || "state";
  const order = searchParams.get("descending") === "1" ? -1 : 1;
  if (by === "state" && order < 0) rows.reverse();
  else if (by !== "state") rows.sort((a, b) => order * (a[by] < b[by] ? -1 : a[by] > b[by] ? 1 : 0));
  const first = Number(searchParams.get("first"));
  const left = all.total - all.rows.length;
  return { total: rows.length, left, first, rows: rows.slice(first, first + Number(searchParams.get("count"))) };
}

/** {answer} or {error} of `path`, or {waiting}; with `keeps`, the last answer stays until the next one is there. */
function useAnswer(path, keeps = false) {
  const [state, setState] = useState({});
  useEffect(() => {
    if (!path) return setState({});
    const stop = new AbortController();
    ask(path, { signal: stop.signal }).then(
      (answer) => stop.signal.aborted || setState({ path, answer }),
      (error) => stop.signal.aborted || setState({ path, error }),
    );
    return () => stop.abort();
  }, [path]);
  if (state.path === path) return state;
  return { answer: keeps ? state.answer : undefined, waiting: true };
}

function Answered({ of, children }) {
  if (of.error) return html`<${Trouble} error=${of.error} />`;
  return of.answer == null ? html`<p class="waiting" role="status">Reading…</p>` : children(of.answer);
}

/** A path with parameters; those that are undefined are left out. */
function at(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined);
  return `${path}?${given.map(([name, value]) => `${name}=${encodeURIComponent(String(value).toWellFormed())}`).join("&")}`;
}

/** A task that the server begins for `path`: {task, isRunning, error, start, cancel}; `task` is what it says of itself. */
function useTask(path) {
  const [state, setState] = useState({});
  const number = state.path === path ? state.number : undefined;
  useEffect(() => {
    if (number === undefined) return;
    const stop = new AbortController();
    const follow = async () => {
      for (;;) {
        const task = await ask(at("/api/task", { task: number }), { signal: stop.signal });
        setState((before) => ({ ...before, task }));
        if (task.state !== "running") return;
        await new Promise((resolve) => setTimeout(resolve, 200));
        if (stop.signal.aborted) return;
      }
    };
    follow().catch((error) => stop.signal.aborted || setState((before) => ({ ...before, error })));
    return () => stop.abort();
  }, [number]);
  const start = async () => {
    setState({ path, started: true });
    try {
      const { task } = await ask(path, { method: "POST" });
      setState({ path, started: true, number: task });
    } catch (error) {
      setState({ path, error });
    }
  };
  const cancel = () => ask(at("/api/task", { task: number }), { method: "DELETE" }).catch(() => {});
  const { started, task, error } = state.path === path ? state : {};
  const failed = error || task?.error;
  return {
    task,
    error: failed,
    isRunning: Boolean(started && !failed && (!task || task.state === "running")),
    start,
    cancel,
  };
}

const Progress = ({ task, cancel }) => html`<div class="row">
  <progress max=${task?.total_bytes || 1} value=${task?.bytes || 0} aria-label="Read so far" />
  <button onClick=${cancel}>Cancel</button>
</div>`;
