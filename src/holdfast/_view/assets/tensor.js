// The page Tensor: how it is cut into chunks, its elements, its statistics, its blocks.
"use strict";

/** The columns of all chunks: pages of typed arrays, more with each answer. */
function useChunks(checkpoint, tensor) {
  const [state, setState] = useState({ pages: [] });
  useEffect(() => {
    const stop = new AbortController();
    const follow = async () => {
      const pages = [];
      let [first, total, told] = [0, 1, 1];
      while (first < total) {
        const page = columnsOf(await ask(at("/api/chunks", { checkpoint, tensor, first }), { signal: stop.signal }));
        if (stop.signal.aborted || !page.count) break;
        pages.push(page);
        ({ total } = page);
        first += page.count;
        // Drawn after 1, 2, 4, 8 pages, so that the drawing of many costs no more than twice their number.
        if (first < total && pages.length < told) continue;
        told = pages.length * 2;
        setState({ pages: [...pages], total, held: first });
      }
    };
    setState({ pages: [] });
    follow().catch((error) => stop.signal.aborted || setState((before) => ({ ...before, error })));
    return () => stop.abort();
  }, [checkpoint, tensor]);
  return state;
}

function columnsOf(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let start = Math.ceil((4 + length) / 8) * 8;
  const column = (Kind, many) => {
    start += many * Kind.BYTES_PER_ELEMENT;
    return new Kind(buffer, start - many * Kind.BYTES_PER_ELEMENT, many);
  };
  const { count, dims } = header;
  const [offsets, sizes] = [column(Float64Array, count * dims), column(Float64Array, count * dims)];
  return {
    ...header,
    offsets,
    sizes,
    bytes: column(Float64Array, count),
    rank: column(Int32Array, count),
    file: column(Int32Array, count),
  };
}

const number = (text) => Number(text) || 0;

function Tensor({ checkpoint, kind, route, go }) {
  const { tensor } = route;
  const found = useAnswer(tensor && at("/api/tensor", { checkpoint, tensor }));
  if (!tensor)
    return html`<p class="empty">No tensor is chosen. Choose one on the page <a href="#" onClick=${(event) => {
      event.preventDefault();
      go({ page: "checkpoint" });
    }}>Checkpoint</a>, in the picture or in the table.</p>`;
  return html`<${Answered} of=${found}>${(about) => html`
    <h1 class="key">${printable(about.key)}</h1>
    <${Facts} of=${[
      ["dtype", about.dtype],
      ["shape", shape(about.shape)],
      ["bytes", bytes(about.bytes)],
      ["chunks", whole(about.chunks)],
      about.requires_grad != null && ["requires grad", about.requires_grad ? "yes" : "no"],
      about.shared_with.length > 0 && [
        "the same memory as",
        about.shared_with.map((each) => printable(each.key)).join(", "),
      ],
    ]} />
    <${Cut} key=${tensor} ...${{ checkpoint, tensor, about, route, go }} />
    <div class="columns">
      <${Slice} ...${{ checkpoint, tensor, about, route, go }} />
      <${Numbers} ...${{ checkpoint, tensor, about, kind, go }} />
    </div>
    <${Blocks} ...${{ checkpoint, tensor, go }} />`}<//>`;
}

function Cut({ checkpoint, tensor, about, route, go }) {
  const { pages, total, held, error } = useChunks(checkpoint, tensor);
  const [told, setTold] = useState("");
  const { shape: sizes } = about;
  const by = route.colour === "file" ? "file" : "rank";
  const last = sizes.length - 1;
  const [rows, columns] = [number(route.rows ?? Math.max(last - 1, 0)), number(route.columns ?? last)];
  const axes = last < 0 ? [-1, -1] : last === 0 ? [-1, 0] : [rows, columns];
  const choose = (
    name,
    value,
  ) => html`<label>${name} <select value=${value} onChange=${(event) => go({ [name]: event.target.value })}>
    ${sizes.map((size, axis) => html`<option value=${axis}>dimension ${axis} (${whole(size)})</option>`)}</select>
      </label>`;
  const tell = (page, index) => {
    if (!page) return setTold("");
    const ranges = sizes.map((_, axis) => {
      const start = page.offsets[index * page.dims + axis];
      return `${whole(start)} to ${whole(start + page.sizes[index * page.dims + axis] - 1)}`;
    });
    const rank = page.rank[index] < 0 ? "" : `, written by rank ${page.rank[index]}`;
    const file = about.files[page.file[index]] || `file ${page.file[index]}`;
    setTold(
      `Chunk ${whole(page.first + index)}: [${ranges.join(", ")}], ${bytes(page.bytes[index])}${rank}, in ${file}`,
    );
  };
  const writers = new Set(pages.flatMap((page) => [...new Set(page[by])]));
  return html`<${Panel} title="Chunks" beside=${html`
      ${sizes.length > 2 && html`${choose("rows", rows)} ${choose("columns", columns)}`}
      <${Choice} label="Coloured by" of=${[
        ["rank", "by rank"],
        ["file", "by file"],
      ]} value=${by} onChoose=${(name) => go({ colour: name })} />`}>
    ${error && html`<${Trouble} error=${error} />`}
    <${Chunks} shape=${sizes} axes=${axes} pages=${pages} by=${by} onTell=${tell}
      label=${`${counted(about.chunks, "chunk")} of ${printable(about.key)}`} />
    <p class=${held === undefined && !error ? "told waiting" : "told"}>${
      told ||
      (held === undefined
        ? "Reading…"
        : `${counted(writers.size, by)} ${by === "rank" ? "wrote it" : "hold it"}. Rows go down, columns go to the right.`)
    }
      ${total > held && ` ${whole(held)} of ${whole(total)} chunks are here so far.`}</p>
  <//>`;
}

const MOST_SHOWN = { rows: 12, columns: 8 };

function Slice({ checkpoint, tensor, about, route, go }) {
  const sizes = about.shape;
  const here = sizes.map((size, axis) => Math.max(0, Math.min(size - 1, number((route.at || "").split(",")[axis]))));
  const found = useAnswer(
    at("/api/slice", { checkpoint, tensor, at: here.join(","), rows: MOST_SHOWN.rows, columns: MOST_SHOWN.columns }),
    true,
  );
  const move = (axis, to) =>
    go(
      { at: here.map((index, each) => (each === axis ? Math.max(0, Math.min(sizes[axis] - 1, to)) : index)).join(",") },
      true,
    );
  const ask_ = (axis) => html`<label>${axis} <input type="number" min="0" max=${sizes[axis] - 1} value=${here[axis]}
    aria-label=${`Start in dimension ${axis}`} onChange=${(event) => move(axis, number(event.target.value))} />
      </label>`;
  const onKey = (event) => {
    const [row, column] = [sizes.length - 2, sizes.length - 1];
    const step = { ArrowDown: [row, 1], ArrowUp: [row, -1], ArrowRight: [column, 1], ArrowLeft: [column, -1] }[
      event.key
    ];
    if (!step || step[0] < 0) return;
    event.preventDefault();
    move(step[0], here[step[0]] + step[1] * (step[0] === row ? MOST_SHOWN.rows : MOST_SHOWN.columns));
  };
  return html`<${Panel} title="Elements" beside=${html`from ${sizes.map((_, axis) => ask_(axis))}`}><${Answered}
    of=${found}>${({
    values,
  }) => {
    const most = Math.max(...values.flat().map((value) => (typeof value === "number" ? Math.abs(value) : 0)), 1e-300);
    const tint = (value) => ({
      background:
        typeof value === "number"
          ? `oklch(0.65 0.15 ${value < 0 ? 30 : 205} / ${(Math.abs(value) / most) * 0.38})`
          : "",
    });
    const [row, column] = [here[here.length - 2] || 0, here[here.length - 1] || 0];
    return html`<div class="scrolls" tabindex="0" role="group" aria-label="Elements; arrows move" onKeyDown=${onKey}>
      <table class="slice">
      <thead><tr><th></th>${(values[0] || []).map((_, index) => html`<th>${whole(column + index)}</th>`)}</tr></thead>
      <tbody>${values.map(
        (line, index) => html`<tr><th>${whole(row + index)}</th>
        ${line.map((value) => html`<td style=${tint(value)}>${digits(value, 3)}</td>`)}</tr>`,
      )}</tbody></table></div>`;
  }}<//><//>`;
}

const NUMBERS = ["norm", "rms", "mean", "std", "min", "max"];

function Numbers({ checkpoint, tensor, about, kind, go }) {
  const path = at("/api/statistics", { checkpoint, tensor });
  const sample = useAnswer(about.statistics?.magnitudes ? null : path); // a save keeps no histogram
  const exact = useTask(path);
  const found = exact.task?.result || about.statistics || sample.answer;
  const error = exact.error || (!found && sample.error);
  const { isRunning } = exact;
  const under = about.key.slice(0, about.key.lastIndexOf(".") + 1);
  const bins = found?.magnitudes || sample.answer?.magnitudes;
  return html`<${Panel} title="Statistics" beside=${html`<span class="quiet">${
    found &&
    (found.source === "save"
      ? "of all elements, kept by the save"
      : found.is_exact
        ? "of all elements"
        : `of a sample: ${percent(found.looked_at, found.elements)}`)
  }</span>
      ${found && !found.is_exact && !isRunning && !isFile && html`<button
        onClick=${exact.start}>Read all ${bytes(about.bytes)}</button>`}
      ${kind === "run" && html`<button onClick=${() => go({ page: "dynamics", under })}>Over the steps</button>`}`}>
    ${error && html`<${Trouble} error=${error} />`}
    ${isRunning && html`<${Progress} task=${exact.task} cancel=${exact.cancel} />`}
    ${
      found
        ? html`<${Facts} of=${[
            ...NUMBERS.map((name) => [name, digits(found[name])]),
            ["zeros", whole(found.zeros)],
            ["NaN", html`<span class=${found.nan ? "bad" : ""}>${found.nan ? "✕ " : ""}${whole(found.nan)}</span>`],
            [
              "infinite",
              html`<span class=${found.inf ? "bad" : ""}>${found.inf ? "✕ " : ""}${whole(found.inf)}</span>`,
            ],
          ]} />
      ${bins?.length > 0 && html`<${Histogram} bins=${bins} />`}`
        : !error && html`<p class="waiting" role="status">Reading…</p>`
    }
  <//>`;
}

function Blocks({ checkpoint, tensor, go }) {
  const found = useAnswer(at("/api/blocks", { checkpoint, tensor }));
  return html`<${Panel} title="Blocks" beside=${html`<button
    onClick=${() => go({ page: "integrity" })}>Verify</button>`}>
    <${Answered} of=${found}>${({ blocks, damaged, state, block_bytes: each }) => {
      const bad = damaged.reduce((sum, [first, last]) => sum + last - first + 1, 0);
      const isKnown = state === "verified";
      const draw = (pen, width, height) => {
        const gap = width / blocks > 3 ? 1 : 0;
        const paint = (first, last, top) => {
          for (let block = first; block <= last; block += gap ? 1 : last - first + 1) {
            const wide = ((gap ? 1 : last - first + 1) / blocks) * width;
            pen.fillRect((block / blocks) * width, top, Math.max(wide - gap, 1), height - top);
          }
        };
        pen.fillStyle = isKnown ? colour(10, 1.2) : colour(-1);
        paint(0, blocks - 1, 4);
        pen.fillStyle = "oklch(0.6 0.22 27)";
        damaged.forEach(([first, last]) => paint(first, last, 0));
      };
      return html`<${Canvas} label="Blocks of this tensor" height=${22} draw=${draw} deps=${[found.answer]} />
        <p class="told">${counted(blocks, "block")} of at most ${bytes(each)}, ${
          isKnown
            ? html`${whole(blocks - bad)} good, <span class=${bad ? "bad" : ""}>${
                bad ? "✕ " : ""
              }${whole(bad)} damaged</span>.`
            : "not verified yet."
        }</p>`;
    }}<//><//>`;
}
