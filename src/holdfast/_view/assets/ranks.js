// The page Ranks: who wrote how much, for how long; the slowest is named.
"use strict";

const RANK_COLUMNS = [
  { name: "rank", title: "rank", show: (row) => `rank ${row.rank}`, sorts: true, width: "110px" },
  { name: "host", title: "host", show: (row) => row.host ?? "not known", sorts: true, width: "minmax(120px, 240px)" },
  { name: "bytes", title: "bytes", show: (row) => bytes(row.bytes), sorts: true, isNumber: true, width: "120px" },
  {
    name: "seconds",
    title: "seconds",
    show: (row) => seconds(row.seconds),
    sorts: true,
    isNumber: true,
    width: "120px",
  },
  {
    name: "rate",
    title: "per second",
    sorts: true,
    isNumber: true,
    width: "130px",
    show: (row) => (row.seconds ? `${bytes(row.bytes / row.seconds)}/s` : "–"),
    value: (row) => row.bytes / row.seconds,
  },
  { name: "files", title: "files", show: (row) => whole(row.files), sorts: true, isNumber: true, width: "90px" },
];

function Ranks({ checkpoint, route, go }) {
  const found = useAnswer(at("/api/ranks", { checkpoint }));
  return html`<${Answered} of=${found}>${(answer) => html`<${RanksShown} ...${{ answer, route, go }} />`}<//>`;
}

function RanksShown({ answer, route, go }) {
  const { ranks, slowest } = answer;
  const slow = ranks.find((each) => each.rank === slowest);
  if (!ranks.length) return html`<p class="empty">Who wrote this checkpoint is not known: ${answer.why}.</p>`;
  const times = ranks
    .map((each) => each.seconds)
    .filter((each) => each != null)
    .sort((a, b) => a - b);
  const columns = RANK_COLUMNS.filter(({ name }) =>
    name === "host" ? ranks.some((each) => each.host) : times.length || !["seconds", "rate"].includes(name),
  );
  const median = times[Math.floor(times.length / 2)];
  return html`
    ${
      slow?.seconds != null &&
      html`<p class="verdict">Rank ${slow.rank}${slow.host ? ` on ${slow.host}` : ""} was the slowest: ${seconds(slow.seconds)}${
        median ? `, ${(slow.seconds / median).toFixed(1)} times the median of ${seconds(median)}` : ""
      }, for ${bytes(slow.bytes)}.</p>`
    }
    <${RankMap} title="Bytes" name="bytes" show=${bytes} ...${{ ranks }} />
    ${
      median !== undefined
        ? html`<${RankMap} title="Seconds" name="seconds" show=${seconds} ...${{ ranks, slowest }} />`
        : html`<p class="told">How long each rank took is not in this checkpoint.</p>`
    }
    <${Panel} title="Table of ranks"><${Table} label="Ranks" columns=${columns} rows=${ranks}
      chosen=${(row) => row.rank === slowest}
      sort=${[route.sort || "rank", route.descending === "1"]}
        onSort=${(name, down) => go({ sort: name, descending: down ? "1" : undefined })} /><//>`;
}

function RankMap({ title, name, show, ranks, slowest }) {
  const [told, setTold] = useState(null);
  const cells = useMemo(
    () =>
      ranks.map((each) => ({
        name: `${each.rank}`,
        value: each[name],
        shown: show(each[name]),
        host: each.host,
        isMarked: each.rank === slowest,
      })),
    [ranks, slowest],
  );
  const of = (cell) => `Rank ${cell.name}${cell.host ? ` on ${cell.host}` : ""}: ${cell.shown}`;
  const legend = `The more ${name}, the stronger the colour.${slowest != null ? " The slowest has a thick frame." : ""}`;
  return html`<${Panel} title=${`${title} per rank`}>
    <${HeatMap} of=${cells} label=${`${title} of ${ranks.length} ranks; the table below has the numbers`}
      onTell=${setTold} />
    <p class="told">${told ? of(told) : legend}</p>
  <//>`;
}
