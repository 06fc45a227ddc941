// The page Dynamics: how tensors or modules develop over the steps, from the statistics that were saved with them.
"use strict";

const MEASURES = [
  ["norm", "norm"],
  ["rms", "RMS"],
  ["update_ratio", "update ratio"],
  ["non_finite", "not finite"],
];
const MOST_LINES = 12; // lines that an eye can tell apart

function Dynamics({ source, kind, route, go }) {
  const { under = "", measure = "norm", scale = "linear" } = route;
  const found = useAnswer(kind === "run" ? at("/api/dynamics", { source, under }) : null, true);
  if (kind !== "run")
    return html`<p class="empty">This is one checkpoint. Give holdfast view the directory of a run to see how it develops.</p>`;
  // An update ratio needs the elements of two steps: statistics that a save keeps have none.
  const measures = MEASURES.filter(
    ([name]) => name !== "update_ratio" || found.answer?.series.some((each) => each.update_ratio),
  );
  const parts = under.split(".").slice(0, -1);
  const path = html`<span class="path"><button onClick=${() => go({ under: undefined })}>all</button>${parts.map(
    (part, index) => html`
    <button onClick=${() => go({ under: `${parts.slice(0, index + 1).join(".")}.` })}>${printable(part)}</button>`,
  )}</span>`;
  return html`<${Panel} title="Over the steps" beside=${html`${path}
      <${Choice} label="Measure" of=${measures} value=${measure} onChoose=${(name) => go({ measure: name })} />
      <${Choice} label="Scale" of=${[
        ["linear", "linear"],
        ["log", "log"],
      ]} value=${scale} onChoose=${(name) => go({ scale: name })} />`}>
    <${Answered} of=${found}>${(answer) => html`<${Lines} ...${{ answer, measure, scale, go }} />`}<//>
  <//>`;
}

function Lines({ answer, measure, scale, go }) {
  const { steps, series, missing, rest, left_out: left } = answer;
  const [, title] = MEASURES.find(([name]) => name === measure) || MEASURES[0];
  const drawn = series.filter((each) => each[measure]?.some((value) => value != null));
  const bad = series.filter((each) => each.non_finite.some((count) => count > 0));
  const [shown, more] = [drawn.slice(0, MOST_LINES), drawn.length - MOST_LINES + rest];
  const last = (values) => values[values.length - 1];
  const name = (each) =>
    each.under
      ? html`<button class="link" onClick=${() => go({ under: each.under })}>${printable(each.name)} ›</button>`
      : printable(each.name);
  return html`
    ${
      missing.length > 0 &&
      html`<p class="told">${counted(missing.length, "step")} without statistics: ${missing.slice(0, 12).join(", ")}${
        missing.length > 12 ? " …" : ""
      }. Save with statistics=True to see them here.</p>`
    }
    ${left > 0 && html`<p class="told">${counted(left, "step")} between these left out, because there are so many.</p>`}
    ${
      bad.length > 0 &&
      html`<p class="verdict bad">✕ NaN or infinity in ${bad
        .slice(0, 5)
        .map((each) => printable(each.name))
        .join(", ")}${bad.length > 5 ? ` and ${bad.length - 5} more` : ""}.</p>`
    }
    ${
      shown.length === 0
        ? html`<p class="empty">Nothing to draw${series.length ? ` of ${title}` : ": no step has stored statistics of this"}.</p>`
        : html`
      <${Chart} steps=${steps} height=${330} isLog=${scale === "log"} label=${`${title} over steps`}
        series=${shown.map((each) => ({ name: printable(each.name), values: each[measure] }))} />
      ${more > 0 && html`<p class="told">The largest ${shown.length}; ${whole(more)} more are not drawn.</p>`}
      <table class="few"><thead><tr><th>module or tensor</th>
        ${["tensors", `${title} at first`, "at last", "not finite"].map((head) => html`<th class="number">${head}
          </th>`)}</tr></thead>
        <tbody>${shown.map(
          (each) =>
            html`<tr><td>${name(each)}</td>${[
              whole(each.tensors),
              digits(each[measure][0]),
              digits(last(each[measure])),
              whole(last(each.non_finite)),
            ].map((cell) => html`<td class="number">${cell}</td>`)}</tr>`,
        )}</tbody></table>`
    }`;
}
