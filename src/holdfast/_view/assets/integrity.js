// The page Integrity: reads all bytes of a checkpoint, and says what is damaged: file, key, range.
"use strict";

const DAMAGE_COLUMNS = [
  { name: "file", title: "file", show: (row) => row.file, width: "minmax(140px, 1fr)" },
  {
    name: "key",
    title: "key",
    show: (row) => (row.key == null ? "–" : printable(row.key)),
    width: "minmax(160px, 2fr)",
  },
  {
    name: "first",
    title: "bytes",
    show: (row) => (row.first == null ? "–" : `${whole(row.first)} to ${whole(row.last)}`),
    isNumber: true,
    width: "200px",
  },
  {
    name: "problem",
    title: "what is wrong",
    show: (row) => html`<span title=${row.problem}>${row.problem}</span>`,
    width: "minmax(200px, 3fr)",
  },
];

function Integrity({ checkpoint }) {
  const { task, error, isRunning, start, cancel } = useTask(at("/api/verify", { checkpoint }));
  const done = task?.result;
  const rate = task?.seconds > 0 ? `, ${bytes(task.bytes / task.seconds)}/s` : "";
  return html`<${Panel} title="Verify" beside=${!isRunning && !isFile && html`<button class="main" onClick=${start}>
    ${task ? "Verify again" : "Verify"}</button>`}>
    ${
      isFile
        ? html`<p class="empty">Not part of this file: open the checkpoint with holdfast view to verify it.</p>`
        : !task &&
          !isRunning &&
          html`<p class="empty">Every byte is read and compared with its digest. That takes as long as the disk needs.</p>`
    }
    ${error && html`<${Trouble} error=${error} />`}
    ${isRunning && html`<${Progress} ...${{ task, cancel }} />`}
    ${task && html`<p class="told" aria-live="polite">
      ${bytes(task.bytes)} of ${bytes(task.total_bytes)} (${percent(task.bytes, task.total_bytes)}) in ${seconds(task.seconds)}${rate}</p>`}
    ${task?.state === "cancelled" && html`<p
      class="verdict">Verifying was cancelled: what was not read may be damaged.</p>`}
    ${
      done &&
      html`<p class=${`verdict ${done.ok ? "good" : "bad"}`}>${
        done.ok
          ? `✓ It is whole: ${counted(done.keys, "key")} in ${counted(done.files, "file")}, and every byte is as it was written.`
          : `✕ It is damaged: ${counted(done.damaged_keys, "key")} in ${counted(done.damaged_files, "file")}.`
      }</p>`
    }
    ${done?.unchecked.length > 0 && html`<p
      class="told">Not checked, for want of digests: ${done.unchecked.slice(0, 20).join(", ")}${done.unchecked.length > 20 ? " …" : ""}</p>`}
    ${done?.damage.length > 0 && html`<${Table} label="Damage" columns=${DAMAGE_COLUMNS} rows=${done.damage} />`}
    ${done?.rest > 0 && html`<p class="told">${counted(done.rest, "more place")} not listed.</p>`}
  <//>`;
}
