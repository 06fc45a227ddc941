// The page Run: the strip of steps, their metrics, and a table of them; new steps appear by themselves.
"use strict";

const STATES = { whole: "", damaged: "✕ damaged", unfinished: "… unfinished", retired: "⌫ deleted" };

const stepName = (step) => (step.step == null ? step.path.split("/").pop() : `step ${step.step}`);

const note = (step) =>
  [step.pinned && "◆ pinned", step.held && "held by a reader", step.why].filter(Boolean).join("; ");

/** What is said of a step that is pointed at. */
const described = (step) =>
  [
    `${stepName(step)}: ${step.state}, ${bytes(step.bytes)}`,
    step.seconds != null && seconds(step.seconds),
    step.blocked_s != null && `the training was blocked for ${seconds(step.blocked_s)}`,
    note(step),
  ]
    .filter(Boolean)
    .join(", ");

const LANES = [
  ["bytes", 64, bytes],
  ["seconds", 48, seconds],
];

function Strip({ steps, chosen, onPick, onTell }) {
  const lanes = LANES.filter(([name]) => steps.some((step) => step[name] != null));
  const wideOf = (width) => Math.min(140, (width - 66) / steps.length);
  const draw = (pen, width, height, ink) => {
    const wide = wideOf(width);
    let top = 8;
    for (const [name, tall, show] of lanes) {
      const most = Math.max(...steps.map((step) => step[name] || 0), 1e-9);
      pen.fillStyle = ink.text;
      pen.fillText(name, 0, top + 6);
      pen.globalAlpha = 0.6;
      pen.fillText(show(most), 0, top + 22);
      pen.globalAlpha = 1;
      steps.forEach((step, index) => {
        const high = ((step[name] || 0) / most) * tall;
        const blocked = name === "seconds" ? ((step.blocked_s || 0) / most) * tall : 0;
        pen.fillStyle = step.state === "whole" ? colour(0) : colour(step.state === "damaged" ? 2 : -1);
        pen.fillRect(66 + index * wide, top + tall - high, Math.max(wide - 2, 0.8), Math.max(high, 1));
        pen.fillStyle = colour(10, 1.4);
        pen.fillRect(66 + index * wide, top + tall - blocked, Math.max(wide - 2, 0.8), blocked);
      });
      top += tall + 12;
    }
    pen.fillStyle = ink.text;
    pen.fillText("state", 0, top + 4);
    const every = Math.ceil(44 / wide);
    steps.forEach((step, index) => {
      const x = 66 + index * wide;
      const mark = (STATES[step.state] ?? "?").slice(0, 1) + (step.pinned ? "◆" : "");
      pen.textAlign = "center";
      if (wide > 9 || mark) pen.fillText(mark || "✓", x + wide / 2, top + 4);
      if (index % every === 0 && step.step != null) pen.fillText(step.step, x + wide / 2, top + 22);
      if (String(step.checkpoint) !== chosen) return;
      pen.strokeStyle = ink.mark;
      pen.lineWidth = 2;
      pen.strokeRect(x - 1, 3, Math.max(wide, 3), top + 10);
    });
  };
  const under = (x, width) => (x < 66 ? null : steps[Math.floor((x - 66) / wideOf(width))] || null);
  return html`<${Canvas}
    label=${`Bytes, seconds and state of ${counted(steps.length, "step")}; the table below has the numbers`}
      height=${lanes.reduce((sum, [, tall]) => sum + tall + 12, 44)}
    draw=${draw} deps=${[steps, chosen]} onPoint=${(x, y, width) => onTell(under(x, width))}
    onPick=${(x, y, width) => under(x, width) && onPick(under(x, width))} />`;
}

function Run({ run, kind, route, go }) {
  const [told, setTold] = useState(null);
  if (kind !== "run")
    return html`<p class="empty">This is one checkpoint. Give holdfast view the directory of a run to see its steps.</p>`;
  const { steps } = run;
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.metrics || {})))];
  const metric = names.includes(route.metric) ? route.metric : names[0];
  const all = steps.reduce((sum, step) => sum + (step.bytes || 0), 0);
  const isTimed = steps.some((step) => step.seconds != null);
  const wholeOnes = steps.filter((step) => step.state === "whole");
  const newest = wholeOnes[wholeOnes.length - 1];
  const open = (step) => step.checkpoint != null && go({ page: "checkpoint", checkpoint: step.checkpoint });
  const text = (name, title, show, more) => ({ name, title, show, sorts: true, ...more });
  const columns = [
    text("step", "step", (step) => stepName(step), { width: "minmax(110px, 1.2fr)" }),
    text(
      "state",
      "state",
      (step) =>
        html`<span class=${`state ${step.state}`} title=${step.why || ""}>${STATES[step.state] || "✓ whole"}</span>`,
    ),
    text("saved_at", "saved", (step) => time(step.saved_at), { width: "170px" }),
    ...[
      ["bytes", bytes],
      ...(isTimed
        ? [
            ["seconds", seconds],
            ["blocked_s", seconds],
          ]
        : []),
    ].map(([name, show]) =>
      text(name, name === "blocked_s" ? "blocked" : name, (step) => show(step[name]), { isNumber: true }),
    ),
    ...names
      .slice(0, 4)
      .map((name) =>
        text(`metric ${name}`, name, (step) => digits(step.metrics?.[name]), {
          isNumber: true,
          value: (step) => step.metrics?.[name],
        }),
      ),
    text("note", "note", (step) => html`<span title=${note(step)}>${note(step)}</span>`, {
      width: "minmax(110px, 1.5fr)",
      value: note,
    }),
  ];
  const withMetric = steps.filter((step) => step.step != null && typeof step.metrics?.[metric] === "number");
  return html`
    <${Facts} of=${[
      ["steps", whole(steps.length)],
      ["whole", whole(wholeOnes.length)],
      ["newest whole", newest ? `${stepName(newest)}, ${time(newest.saved_at)}` : "none"],
      ["bytes", bytes(all)],
    ]} />
    ${
      steps.length > 0 &&
      html`<${Panel} title="Steps">
      <${Strip} steps=${steps} chosen=${route.checkpoint} onPick=${open} onTell=${setTold} />
      <p class="told" aria-live="polite">${
        told
          ? described(told)
          : `✓ whole, ✕ damaged, … unfinished, ◆ pinned. ${
              isTimed
                ? "The lower part of seconds is the time for which the training was blocked."
                : "How long the saves took is not known here."
            }`
      }</p>
    <//>`
    }
    ${
      metric &&
      withMetric.length > 0 &&
      html`<${Panel} title="Metrics" beside=${html`<${Choice} label="Metric" value=${metric}
        of=${names.map((name) => [name, name])} onChoose=${(name) => go({ metric: name })} />`}>
      <${Chart} steps=${withMetric.map((step) => step.step)} label=${`${metric} over steps`}
        series=${[{ name: metric, values: withMetric.map((step) => step.metrics[metric]) }]} />
    <//>`
    }
    <${Panel} title="Table of steps">
      <${Table} label="Steps" columns=${columns} rows=${steps}
        sort=${[route.sort || "step", route.sort ? route.descending === "1" : true]}
        onSort=${(name, down) => go({ sort: name, descending: down ? "1" : undefined })} onOpen=${open}
        chosen=${(step) => String(step.checkpoint) === route.checkpoint}
          nothing="No step has been saved here yet. New ones appear by themselves." />
    <//>`;
}
