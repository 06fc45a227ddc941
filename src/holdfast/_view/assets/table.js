// Tables of which only the rows in view exist: from pages of the server, or from rows that are all here.
"use strict";

const LINE = 27;
const PAGE = 200;
const TALLEST = 15e6; // of what a browser can scroll; a longer table scrolls faster than the hand

const compared = (a, b) => (a == null ? 1 : b == null ? -1 : a < b ? -1 : a > b ? 1 : 0);

/** Rows of `pathOf(first, count)`, asked for page by page by `want`. Old rows stay until the first new ones are there. */
function usePages(pathOf) {
  const base = pathOf ? pathOf(0, PAGE) : "";
  const [, setTurn] = useState(0);
  const held = useRef({ pages: new Map(), asked: new Map() });
  if (held.current.base !== base) {
    const { pages, asked, answer } = held.current;
    for (const stop of asked.values()) stop.abort();
    held.current = { base, pages: new Map(), asked: new Map(), before: pages, answer };
  }
  const { pages, asked, before, answer, error } = held.current;
  const want = (first, last) => {
    const wanted = new Set();
    for (let page = Math.floor(first / PAGE); pathOf && page * PAGE < Math.max(last, 1); page += 1) wanted.add(page);
    for (const [page, stop] of asked) {
      if (wanted.has(page) || pages.has(page)) continue;
      stop.abort();
      asked.delete(page);
    }
    for (const page of wanted) {
      if (asked.has(page)) continue;
      const stop = new AbortController();
      asked.set(page, stop);
      const keep = (change) => {
        if (stop.signal.aborted) return;
        Object.assign(held.current, change);
        setTurn((turn) => turn + 1);
      };
      ask(pathOf(page * PAGE, PAGE), { signal: stop.signal }).then(
        (found) => keep({ answer: found, rows: pages.set(page, found.rows) }),
        (refused) => keep({ error: refused }),
      );
    }
  };
  const shown = pages.size || !before ? pages : before;
  return { answer, error, want, isNew: base, row: (index) => shown.get(Math.floor(index / PAGE))?.[index % PAGE] };
}

/**
 * A table with keys, sorting and any number of rows. `columns`: {name, title, show(row), width, isNumber, sorts, value}.
 * Either `rows`, or `pathOf(first, count)` of the server. `sort` is [name, descending]; `onSort(name, descending)`.
 * `onAnswer` is called with what the server says beside the rows; `chosen(row)` marks a row.
 */
function Table({ label, columns, rows, pathOf, sort = [], onSort, onOpen, onAnswer, chosen, nothing, height = 420 }) {
  const body = useRef();
  const [top, setTop] = useState(0);
  const [active, setActive] = useState(0);
  const pages = usePages(pathOf);
  const sorted = useMemo(() => {
    const by = rows && columns.find((column) => column.name === sort[0]);
    if (!by) return rows;
    const value = by.value || ((row) => row[by.name]);
    return [...rows].sort((a, b) => compared(value(a), value(b)) * (sort[1] ? -1 : 1));
  }, [rows, ...sort]);
  const total = rows ? rows.length : pages.answer?.total;
  const tall = Math.min((total || 0) * LINE, TALLEST);
  const room = Math.min(height, tall);
  const inView = Math.ceil(room / LINE) + 1;
  const isScaled = tall < total * LINE;
  const first = isScaled ? Math.round((top / (tall - room)) * (total - inView + 1)) : Math.floor(top / LINE);
  useEffect(() => pages.want(first, first + inView));
  useEffect(() => {
    body.current.scrollTop = 0;
    setActive(0);
  }, [pages.isNew, ...sort]);
  useEffect(() => pages.answer && onAnswer && onAnswer(pages.answer), [pages.answer]);
  useEffect(() => total !== undefined && performance.mark("holdfast-rows"), [total]);

  const row = (index) => (sorted ? sorted[index] : pages.row(index));
  const move = (to) => {
    const next = Math.max(0, Math.min(total - 1, to));
    setActive(next);
    if (next < first + 1) body.current.scrollTop = isScaled ? (next / total) * (tall - room) : next * LINE;
    else if (next > first + inView - 3)
      body.current.scrollTop = isScaled ? (next / total) * (tall - room) : (next + 1) * LINE - room;
  };
  const onKey = (event) => {
    const to = {
      ArrowDown: active + 1,
      ArrowUp: active - 1,
      PageDown: active + inView - 2,
      PageUp: active - inView + 2,
      Home: 0,
      End: total - 1,
    };
    if (event.key in to) move(to[event.key]);
    else if (event.key === "Enter" && onOpen && row(active)) onOpen(row(active));
    else return;
    event.preventDefault();
  };
  const widths = { gridTemplateColumns: columns.map((column) => column.width || "minmax(80px, 0.6fr)").join(" ") };
  const shown = [];
  for (let index = first; index < Math.min(total || 0, first + inView); index += 1) shown.push(index);
  const id = label.replace(/\W/g, "-");
  return html`<div class="table" role="grid" tabindex="0" aria-label=${label} aria-rowcount=${total ?? -1}
      aria-activedescendant=${`${id}-${active}`} onKeyDown=${onKey}>
    <div class="rows" ref=${body} style=${{ height: `${room + LINE + 1}px` }}
      onScroll=${(event) => setTop(event.target.scrollTop)}>
      <div class="heads" role="row" style=${widths}>
        ${columns.map((column) => html`<${Head} ...${{ column, sort, onSort }} />`)}</div>
      <div class="tall" style=${{ height: `${tall}px` }}>
        <div style=${{ transform: `translateY(${isScaled ? top : first * LINE}px)` }}>
          ${shown.map(
            (
              index,
            ) => html`<div key=${index} id=${`${id}-${index}`} role="row" aria-rowindex=${index + 1} style=${widths}
              class=${`tr${index === active ? " active" : ""}${row(index) && chosen?.(row(index)) ? " chosen" : ""}${onOpen ? " opens" : ""}`}
              onClick=${() => {
                setActive(index);
                if (onOpen && row(index)) onOpen(row(index));
              }}>
            ${columns.map(
              (column) => html`<span role="gridcell" class=${column.isNumber ? "number" : ""}>
              ${row(index) ? column.show(row(index)) : ""}</span>`,
            )}
          </div>`,
          )}
        </div>
      </div>
    </div>
    ${pages.error ? html`<${Trouble} error=${pages.error} />` : total === undefined ? html`<p
      class="told waiting">Reading…</p>` : total === 0 && html`<p class="told">${nothing || "There are none."}</p>`}
  </div>`;
}

function Head({ column, sort, onSort }) {
  const { name, title, isNumber, sorts } = column;
  const isBy = sort[0] === name;
  const arrow = isBy ? (sort[1] ? " ↓" : " ↑") : "";
  const turned = isBy ? !sort[1] : Boolean(isNumber);
  return html`<span role="columnheader" class=${isNumber ? "number" : ""}
    aria-sort=${isBy ? (sort[1] ? "descending" : "ascending") : "none"}>
    ${sorts && onSort ? html`<button onClick=${() => onSort(name, turned)}>${title}${arrow}</button>` : title}
  </span>`;
}

/** A field that searches a little after the last key. */
function Search({ label, value = "", onSearch }) {
  const timer = useRef();
  const later = (event) => {
    const text = event.target.value;
    clearTimeout(timer.current);
    timer.current = setTimeout(() => onSearch(text), 150);
  };
  return html`<input type="search" class="search" placeholder=${`${label}  ( / )`} aria-label=${label} value=${value}
    onInput=${later} />`;
}

const Total = ({ of, noun }) => html`<span class="quiet">${of === undefined ? "" : `${whole(of)} ${noun}`}</span>`;
