// The page Diff: where two checkpoints differ, by digests; how far, for the key that is opened.
"use strict";

const MARKS = {
  added: "+",
  removed: "−",
  reshaped: "⤢",
  retyped: "τ",
  changed: "≠",
  unchanged: "=",
  "not compared": "?",
};

const stored = (side) =>
  !side
    ? "–"
    : side.kind === "value"
      ? (side.shown ?? `a value of ${bytes(side.bytes)}`)
      : `${side.dtype} ${shape(side.shape)}`;
const DIFF_COLUMNS = [
  {
    name: "status",
    title: "status",
    width: "130px",
    show: (row) =>
      html`<span class=${`mark ${row.status.replace(" ", "-")}`}>${MARKS[row.status]} ${row.status}</span>`,
  },
  {
    name: "key",
    title: "key",
    show: (row) => html`<span title=${printable(row.key)}>${printable(row.key)}</span>`,
    width: "minmax(240px, 4fr)",
  },
  { name: "a", title: "in A", show: (row) => stored(row.a), width: "minmax(120px, 1.3fr)" },
  {
    name: "b",
    title: "in B",
    show: (row) => (row.a && row.b && stored(row.a) === stored(row.b) ? "the same" : stored(row.b)),
    width: "minmax(120px, 1.3fr)",
  },
  { name: "bytes", title: "bytes", show: (row) => bytes((row.b || row.a)?.bytes), isNumber: true },
  { name: "by", title: "told by", show: (row) => row.why || row.by || "–", width: "minmax(110px, 1fr)" },
];

function Chooser({ label, checkpoints, value, onChoose }) {
  const paths = [...new Set(checkpoints.map((each) => each.source))];
  return html`<label>${label} <select value=${value} onChange=${(event) => onChoose(event.target.value)}>
    ${paths.map(
      (path) =>
        html`<optgroup label=${path}>${checkpoints
          .filter((each) => each.source === path && each.state !== "retired")
          .reverse()
          .map(
            (step) => html`
      <option value=${step.checkpoint} selected=${String(step.checkpoint) === String(value)}>${stepName(step)}${
        step.state === "whole" ? "" : ` (${step.state})`
      }</option>`,
          )}</optgroup>`,
    )}</select></label>`;
}

function Diff({ checkpoint, checkpoints, route, go }) {
  const usable = checkpoints.filter((each) => each.state === "whole");
  const b = route.b ?? checkpoint;
  const place = usable.findIndex((each) => String(each.checkpoint) === String(b));
  const a = route.a ?? (usable[place > 0 ? place - 1 : usable.length - 1] || usable[0])?.checkpoint;
  const [answer, setAnswer] = useState();
  const { status = "", search = "", row: opened } = route;
  if (usable.length < 2)
    return html`<p class="empty">It takes two whole checkpoints to compare. Give holdfast view another path, or wait for the next step.</p>`;
  const pathOf = (first, count) => at("/api/diff", { a, b, status, search, first, count });
  const counts = Object.entries(answer?.counts || {});
  const choices = [["", "all"], ...counts.map(([name, many]) => [name, `${MARKS[name]} ${name} ${whole(many)}`])];
  return html`
    <div class="row bar">
      <${Chooser} label="A" value=${a} ...${{ checkpoints }}
        onChoose=${(to) => go({ a: to, b: String(b), row: undefined })} />
      <button aria-label="Exchange A and B" onClick=${() => go({ a: String(b), b: String(a) })}>⇄</button>
      <${Chooser} label="B" value=${b} ...${{ checkpoints }}
        onChoose=${(to) => go({ b: to, a: String(a), row: undefined })} />
    </div>
    ${
      answer &&
      html`<p class="verdict">${
        answer.same
          ? "= They are the same: all was compared."
          : `≠ They differ: ${counts
              .filter(([name, many]) => name !== "unchanged" && many)
              .map(([name, many]) => `${whole(many)} ${name}`)
              .join(", ")}.`
      }</p>`
    }
    <${Panel} title="Keys" beside=${html`<${Choice} label="Status" of=${choices} value=${status}
      onChoose=${(name) => go({ status: name || undefined })} />
        <${Search} label="Search keys" value=${search} onSearch=${(text) => go({ search: text || undefined }, true)} />
        <${Total} of=${answer?.total} noun="shown" />`}>
      <${Table} label="Keys of both" columns=${DIFF_COLUMNS} pathOf=${pathOf} onAnswer=${setAnswer}
        onOpen=${(row) => go({ row: row.row, a: String(a), b: String(b) })}
        chosen=${(row) => String(row.row) === opened} nothing="No key is like that." />
    <//>
    ${
      opened === undefined
        ? html`<p class="told">Open a tensor to see how far its elements differ; that reads them.</p>`
        : html`<${Distance} key=${`${a} ${b} ${opened}`} ...${{ a, b, row: opened }} />`
    }`;
}

function Distance({ a, b, row }) {
  const { task, error, isRunning, start, cancel } = useTask(at("/api/diff/values", { a, b, row }));
  useEffect(() => void start(), []);
  const far = task?.result;
  return html`<${Panel} title=${far ? `How far: ${printable(far.key)}` : "How far"}>
    ${error && html`<${Trouble} error=${error} />`}
    ${isRunning && html`<${Progress} ...${{ task, cancel }} />`}
    ${
      far &&
      (far.elements == null
        ? html`<p class="told">${far.status}: there are no elements to compare.</p>`
        : html`<${Facts} of=${[
            ["different", `${whole(far.differing)} of ${counted(far.elements, "element")}`],
            ["first at", far.first_index ? `[${far.first_index.join(", ")}]` : "–"],
            ["relative L2", digits(far.relative_l2, 6)],
            ["greatest difference", digits(far.max_abs, 6)],
            ["cosine", digits(far.cosine, 8)],
            ["NaN in A, in B", `${whole(far.nan_a)}, ${whole(far.nan_b)}`],
            far.unmeasured > 0 && ["not measured", whole(far.unmeasured)],
          ]} />`)
    }
  <//>`;
}
