// The page Checkpoint: what is in it, by bytes and as a table; totals, ties, values, metadata of the user.
"use strict";

const TENSORS = [
  {
    name: "key",
    title: "key",
    show: (row) => html`<span title=${printable(row.key)}>${printable(row.key)}</span>`,
    sorts: true,
    width: "minmax(240px, 4fr)",
  },
  { name: "dtype", title: "dtype", show: (row) => row.dtype, sorts: true },
  { name: "shape", title: "shape", show: (row) => shape(row.shape), isNumber: true, width: "minmax(110px, 1fr)" },
  { name: "bytes", title: "bytes", show: (row) => bytes(row.bytes), sorts: true, isNumber: true },
  { name: "chunks", title: "chunks", show: (row) => whole(row.chunks), isNumber: true },
];

const VALUES = [
  { name: "key", title: "key", show: (row) => printable(row.key), width: "minmax(200px, 1fr)" },
  { name: "kind", title: "kind", show: (row) => row.kind },
  {
    name: "shown",
    title: "value",
    show: (row) => html`<code title=${row.shown}>${row.shown}</code>`,
    width: "minmax(200px, 2fr)",
  },
];

/** A table of a few rows; numbers are in all its columns but the first. */
const Few = ({ heads, rows, isText }) => html`<table class="few">
  <thead><tr>${heads.map((head, index) => html`<th class=${index && !isText ? "number" : ""}>${head}</th>`)}</tr>
    </thead>
  <tbody>${rows.map((row) => html`<tr>${row.map((cell, index) => html`<td class=${index && !isText ? "number" : ""}>
    ${cell}</td>`)}</tr>`)}</tbody>
</table>`;

function Checkpoint({ checkpoint, route, go }) {
  const found = useAnswer(at("/api/checkpoint", { checkpoint }));
  const about = found.answer;
  // The tables do not wait for the totals: what is looked for is there sooner.
  return html`
    <${Answered} of=${found}>${() =>
      html`<${Facts} of=${[
        ["format", about.format],
        about.written_by && ["by", about.written_by],
        ["saved", time(about.saved_at)],
        ["bytes", bytes(about.bytes)],
        ["tensors", whole(about.tensors)],
        ["values", whole(about.values)],
        ["chunks", whole(about.chunks)],
        ["files", whole(about.files)],
        ["written by", about.ranks == null ? "not known" : counted(about.ranks, "rank")],
        ["digests", about.has_digests ? "of every block" : "none: damage cannot be told from data"],
      ]} />`}<//>
    ${
      !found.error &&
      html`
      <${Modules} ...${{ checkpoint, route, go }} />
      <${Tensors} ...${{ checkpoint, route, go }} />
      <${Values} checkpoint=${checkpoint} />
      ${about && html`<${Totals} about=${about} />`}`
    }`;
}

function Totals({ about }) {
  const all = about.dtypes.reduce((sum, each) => sum + each.bytes, 0);
  return html`<div class="columns">
      <${Panel} title="Totals by dtype"><${Few} heads=${["dtype", "tensors", "elements", "bytes", "share"]}
        rows=${about.dtypes.map((each) => [each.dtype, whole(each.tensors), whole(each.elements), bytes(each.bytes), percent(each.bytes, all)])} /><//>
      <${Panel} title="Ties">${
        about.ties.length === 0
          ? html`<p class="told">No two keys share their memory.</p>`
          : html`<ul>${about.ties.map((keys) => html`<li>${keys.map(printable).join("  =  ")}</li>`)}</ul>`
      }
        ${about.tied > about.ties.length && html`<p
          class="told">and ${whole(about.tied - about.ties.length)} more</p>`}<//>
      <${Panel} title="Metadata of the user">${
        about.user_metadata.length === 0
          ? html`<p class="told">None was saved.</p>`
          : html`<${Few} isText heads=${["name", "value"]}
            rows=${about.user_metadata.map((row) => [printable(row.key), html`<code>${row.shown}</code>`])} />`
      }<//>
  </div>`;
}

const [LEVELS, MOST_ASKED] = [4, 60];

/** The tree below `under`: its first level at once, what is large in it as it comes. */
function useTree(checkpoint, under) {
  const [state, setState] = useState({});
  useEffect(() => {
    const stop = new AbortController();
    const level = (prefix) => ask(at("/api/tree", { checkpoint, under: prefix }), { signal: stop.signal });
    const follow = async () => {
      const top = await level(under);
      let [parents, left] = [[top], MOST_ASKED];
      for (let depth = 1; !stop.signal.aborted; depth += 1) {
        const wanted = parents
          .flatMap((parent) => parent.children || [])
          .filter((each) => each.under && each.bytes > top.bytes / 120);
        parents = wanted.sort((a, b) => b.bytes - a.bytes).slice(0, left);
        left -= parents.length;
        const isBusy = parents.length > 0 && depth < LEVELS;
        setState({ answer: { ...top }, isBusy });
        if (!isBusy) return;
        // What a file has not is left as it is.
        await Promise.allSettled(
          parents.map((parent) =>
            level(parent.under).then(({ children, rest }) => Object.assign(parent, { children, rest })),
          ),
        );
      }
    };
    follow().catch((error) => stop.signal.aborted || setState({ error }));
    return () => stop.abort();
  }, [checkpoint, under]);
  return state;
}

function Modules({ checkpoint, route, go }) {
  const under = route.under || "";
  const found = useTree(checkpoint, under);
  const tell = (node) =>
    [
      printable(node.name),
      bytes(node.bytes),
      node.tensors > 1 && counted(node.tensors, "tensor"),
      node.dtype && `${node.dtype} ${shape(node.shape)}`,
    ]
      .filter(Boolean)
      .join(" · ");
  const open = (node) => go(node.under != null ? { under: node.under } : { page: "tensor", tensor: node.tensor });
  const back = html`${under && html`<button onClick=${() => go({ under: undefined })}>whole checkpoint</button> <code>
    ${printable(under)}</code>`}`;
  return html`<${Panel} title="Modules by bytes" beside=${back}><${Answered} of=${found}>${(tree) => html`
    <div aria-busy=${String(found.isBusy)}>
      <${Icicle} tree=${tree} tell=${tell} onOpen=${open} label="Modules by bytes; the table below has all tensors" />
    </div>
    <details><summary>Totals by module</summary><${Few} heads=${["module", "tensors", "bytes"]}
      rows=${tree.children.slice(0, 100).map((node) => [printable(node.name), whole(node.tensors), bytes(node.bytes)])} /></details>`}<//><//>`;
}

function Tensors({ checkpoint, route, go }) {
  const [{ total, left }, setAnswer] = useState({});
  const { search = "", sort = "state", descending = "0" } = route;
  const pathOf = (first, count) => at("/api/tensors", { checkpoint, search, sort, descending, first, count });
  return html`<${Panel} title="Tensors" beside=${html`
      <${Search} label="Search tensors" value=${search} onSearch=${(text) => go({ search: text || undefined }, true)} />
      <${Total} of=${total} noun="shown" />`}>
    <${Table} label="Tensors" columns=${TENSORS} pathOf=${pathOf} sort=${[sort, descending === "1"]}
      onAnswer=${setAnswer}
      onSort=${(name, down) => go({ sort: name, descending: down ? "1" : "0" })}
        onOpen=${(row) => go({ page: "tensor", tensor: row.tensor })}
      chosen=${(row) => String(row.tensor) === route.tensor} nothing="No tensor has this in its key." />
    ${left > 0 && html`<p class="told">
      ${counted(left, "more tensor")} not part of this file: open the checkpoint with holdfast view.</p>`}
  <//>`;
}

function Values({ checkpoint }) {
  const [search, setSearch] = useState("");
  const pathOf = (first, count) => at("/api/values", { checkpoint, search, first, count });
  return html`<${Panel} title="Values that are no tensors" beside=${html`<${Search} label="Search values"
    onSearch=${setSearch} />`}>
    <${Table} label="Values" columns=${VALUES} pathOf=${pathOf} height=${190} nothing="There are none." />
  <//>`;
}
