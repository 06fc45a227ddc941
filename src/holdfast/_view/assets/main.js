// The frame of all pages: which page is shown is in the hash of the address, so that Back works and links can be sent.
"use strict";

// name: [title, letter after g, what shows it, whether it shows one checkpoint]
const PAGES = {
  run: ["Run", "r", Run, false],
  checkpoint: ["Checkpoint", "c", Checkpoint, true],
  tensor: ["Tensor", "t", Tensor, true],
  ranks: ["Ranks", "k", Ranks, true],
  diff: ["Diff", "d", Diff, false],
  dynamics: ["Dynamics", "y", Dynamics, false],
  integrity: ["Integrity", "i", Integrity, true],
};
const STAYS = ["source", "checkpoint", "tensor", "a", "b"]; // from page to page

function routeNow() {
  const [page, query] = location.hash.slice(1).split("?");
  return { ...Object.fromEntries(new URLSearchParams(query || "")), page };
}

function useRoute() {
  const [route, setRoute] = useState(routeNow);
  useEffect(() => {
    const changed = () => setRoute(routeNow());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const go = (changes, replaces = false) => {
    const before = routeNow();
    const isOther = "page" in changes && changes.page !== before.page;
    const kept = isOther
      ? Object.fromEntries(STAYS.filter((name) => name in before).map((name) => [name, before[name]]))
      : before;
    if (changes.checkpoint !== undefined && String(changes.checkpoint) !== before.checkpoint) delete kept.tensor;
    const { page, ...parameters } = { ...kept, ...changes };
    const hash = `#${at(page || "", Object.fromEntries(Object.entries(parameters).filter(([, value]) => value !== undefined)))}`;
    if (hash === location.hash) return;
    if (replaces) history.replaceState(null, "", hash);
    else location.hash = hash;
    setRoute(routeNow());
    if (isOther) scrollTo(0, 0);
  };
  return [route, go];
}

/** A word on the step that has come while the page is open. */
function useNews(newest, source) {
  const [news, setNews] = useState("");
  const last = useRef();
  useEffect(() => {
    if (!newest) return;
    const before = last.current;
    last.current = [source, newest.checkpoint];
    if (before?.[0] !== source || before[1] === newest.checkpoint) return;
    setNews(`${stepName(newest)} has been saved`);
    const timer = setTimeout(() => setNews(""), 8000);
    return () => clearTimeout(timer);
  }, [newest?.checkpoint]);
  return news;
}

/** The steps of all sources, of `source` as they are now: new ones appear while the page is open. */
function useRuns(sources, source) {
  const [runs, setRuns] = useState({});
  const keep = (number) => (run) =>
    setRuns((before) => ({ ...before, [number]: run.steps ? run : { steps: [], error: run } }));
  useEffect(() => {
    for (const each of sources || []) {
      const one = { checkpoint: each.checkpoint, step: null, path: each.path, state: "whole" };
      if (each.kind === "checkpoint") keep(each.source)({ path: each.path, steps: [one] });
      else ask(at("/api/run", { source: each.source })).then(keep(each.source), keep(each.source));
    }
  }, [sources]);
  const isThere = Boolean(runs[source]?.revision);
  useEffect(() => {
    if (!isThere || isFile) return;
    const stop = new AbortController();
    const follow = async () => {
      for (let { revision } = runs[source]; !stop.signal.aborted;) {
        const run = await ask(at("/api/run", { source, after: revision }), { signal: stop.signal });
        if (!run || run.revision === revision) continue;
        ({ revision } = run);
        keep(source)(run);
      }
    };
    follow().catch(
      (error) => stop.signal.aborted || setRuns((before) => ({ ...before, [source]: { ...before[source], error } })),
    );
    return () => stop.abort();
  }, [source, isThere]);
  return runs;
}

function Sources({ sources, runs, go }) {
  return html`<h1>What shall be shown?</h1><ul class="sources">${sources.map((each) => {
    const steps = runs[each.source]?.steps || [];
    return html`<li><button
      onClick=${() => go({ page: each.kind === "run" ? "run" : "checkpoint", source: each.source, checkpoint: undefined })}>
      <b>${each.path}</b><span class="quiet">
        ${each.kind === "run" ? `a run of ${steps.length} steps` : "a checkpoint"}</span></button></li>`;
  })}</ul>`;
}

/** What is said of a checkpoint that is damaged, or is not listed any more. */
function Gone({ step }) {
  if (step?.state === "whole") return null;
  return html`<div class="trouble" role="alert">${
    step
      ? html`<b>${stepName(step)} is damaged.</b> ${step.why}`
      : html`<b>This step has been deleted, or saved again.</b> What you still see was read before. Choose another step above.`
  }</div>`;
}

function Guarded({ children }) {
  const [error, again] = useErrorBoundary();
  return error ? html`<${Trouble} error=${error} /><button onClick=${again}>Try again</button>` : children;
}

const KEYS = [
  ["/", "search"],
  ["↑ ↓ PgUp PgDn Home End", "move in a table"],
  ["Enter", "open"],
  ["Esc", "leave a search"],
  ["?", "these keys"],
  ["g s", "what was given to look at"],
  ...Object.values(PAGES).map(([title, letter]) => [`g ${letter}`, title]),
];

function useKeys(go, help) {
  useEffect(() => {
    let isAfterG = false;
    const pressed = (event) => {
      const isTyping = /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
      if (event.key === "Escape" && isTyping) return event.target.blur();
      if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
      const page = isAfterG && Object.keys(PAGES).find((name) => PAGES[name][1] === event.key);
      if (page || (isAfterG && event.key === "s")) go({ page: page || "sources" });
      else if (event.key === "/") document.querySelector(".search")?.focus();
      else if (event.key === "?") help.current.showModal();
      else if (event.key !== "g") return void (isAfterG = false);
      isAfterG = event.key === "g";
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function theme(wanted) {
  document.documentElement.dataset.theme = wanted;
  try {
    localStorage.setItem("holdfast-theme", wanted);
  } catch {
    // A browser that keeps nothing: the choice holds until the page is closed.
  }
  dispatchEvent(new Event("theme"));
}

function View() {
  const [route, go] = useRoute();
  const [isLost, setLost] = useState(false);
  const given = useAnswer("/api/sources");
  const help = useRef();
  const sources = given.answer?.sources;
  const source = Number(route.source ?? sources?.[0]?.source);
  const runs = useRuns(sources, source);
  useEffect(() => watchServer(setLost), []);
  useKeys(go, help);
  const run = runs[source];
  const checkpoints = (sources || []).flatMap((each) =>
    (runs[each.source]?.steps || []).map((step) => ({ ...step, source: each.path })),
  );
  const usable = (run?.steps || []).filter((step) => step.state === "whole");
  const checkpoint = route.checkpoint ?? (usable.length ? String(usable[usable.length - 1].checkpoint) : undefined);
  const news = useNews(usable[usable.length - 1], source);
  const kind = sources?.find((each) => each.source === source)?.kind;
  const page = route.page || (sources?.length > 1 ? "sources" : kind === "checkpoint" ? "checkpoint" : "run");
  const [title, , Shown, isOfOne] = PAGES[page] || [];
  const step = checkpoints.find((each) => String(each.checkpoint) === checkpoint);
  const choose = (number) =>
    go({
      checkpoint: number,
      source: sources.find((each) => each.path === checkpoints.find((one) => String(one.checkpoint) === number).source)
        .source,
    });
  useEffect(
    () => void (document.title = [title, isOfOne && step && stepName(step), "Holdfast"].filter(Boolean).join(" · ")),
    [title, step],
  );
  let shown = null;
  if (run?.error) shown = html`<${Trouble} error=${run.error} />`;
  else if (page === "sources") shown = html`<${Sources} ...${{ sources, runs, go }} />`;
  else if (!Shown) shown = html`<${Trouble} error=${{ message: "There is no such page: choose one above." }} />`;
  else if (!run) shown = html`<p class="waiting" role="status">Reading…</p>`;
  else if (isOfOne && checkpoint === undefined)
    shown = html`<p class="empty">No whole checkpoint is here yet. A new one appears by itself.</p>`;
  else
    shown = html`<${Guarded} key=${page}><${Shown} ...${{ route, go, run, source, kind, checkpoint, checkpoints }}
      key=${isOfOne ? checkpoint : page} /><//>`;
  return html`
    <header class="top">
      <a class="brand" href="#sources" title="What was given to look at"><svg viewBox="0 0 16 16" width="18"
        height="18" aria-hidden="true">
        <path class="a" d="M1 1h6v6H1zM9 1h6v6H9zM1 9h6v6H1z" /><path class="b" d="M9 9h6v6H9z" /></svg> Holdfast</a>
      <nav aria-label="Pages">${Object.entries(PAGES).map(
        ([name, [shownTitle]]) => html`<button aria-current=${name === page ? "page" : null}
        onClick=${() => go({ page: name })}>${shownTitle}</button>`,
      )}</nav>
      ${isOfOne && checkpoints.length > 0 && html`<${Chooser} label="" checkpoints=${checkpoints} value=${checkpoint}
        onChoose=${choose} />`}
      <span class="end"><span class="news" role="status">${news}</span><button aria-label="Dark or light"
        title="Dark or light" onClick=${() => theme(isDark() ? "light" : "dark")}>◐</button>
        <button aria-label="Keys" title="Keys" onClick=${() => help.current.showModal()}>?</button></span>
    </header>
    ${isLost && html`<div class="trouble lost" role="alert">
      <b>The server does not answer.</b> It may have been ended. Trying again every two seconds.</div>`}
    <main id=${page}>
      ${sources && page !== "sources" && html`<p class="where"><code>${(isOfOne && step?.path) || run?.path || ""}
        </code></p>`}
      ${isOfOne && Object.keys(runs).length === sources?.length && checkpoint !== undefined && html`<${Gone}
        step=${step} />`}
      <${Answered} of=${given}>${() => shown}<//>
    </main>
    ${aboutFile && html`<footer
      class="quiet">This file was made ${time(aboutFile.made_at)} with Holdfast ${aboutFile.version}. ${aboutFile.left_out.join(". ")}</footer>`}
    <dialog ref=${help} aria-label="Keys"><h2>Keys</h2><dl class="keys">${KEYS.map(([key, does]) => html`<div><dt>
      <kbd>${key}</kbd></dt><dd>${does}</dd></div>`)}</dl>
      <form method="dialog"><button>Close</button></form></dialog>`;
}

try {
  const wanted = localStorage.getItem("holdfast-theme");
  if (wanted) document.documentElement.dataset.theme = wanted;
} catch {
  // Then it is as the system has it.
}
if (new URLSearchParams(location.search).has("token"))
  history.replaceState(null, "", location.pathname + location.hash);
render(html`<${View} />`, document.body);
