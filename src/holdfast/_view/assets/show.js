// How things are written: numbers, bytes, times, troubles. Texts from checkpoints become text nodes, and nothing else.
"use strict";

const { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useErrorBoundary } = window.htmPreact;

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Bytes as the command line writes them: in the largest binary unit that leaves at least one. */
function bytes(count) {
  if (count == null) return "–";
  if (count < 1024) return `${count} B`;
  let unit = -1;
  do {
    count /= 1024;
    unit += 1;
  } while (count >= 1023.95 && unit < UNITS.length - 1);
  return `${count.toFixed(1)} ${UNITS[unit]}`;
}

const whole = (count) => (count == null ? "–" : count.toLocaleString("en-US"));

const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Four digits of a number; what is no number (NaN comes as text) as it is. */
function digits(value, many = 4) {
  if (value == null) return "–";
  if (Array.isArray(value)) return value.map((part) => digits(part, many)).join(" + i ");
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  const text = Math.abs(value) < 1e-4 ? value.toExponential(many - 1) : value.toPrecision(many);
  const [mantissa, power] = text.split("e");
  const short = mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa;
  return power ? `${short}e${power}` : short;
}

function seconds(value) {
  if (value == null) return "–";
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Local time, in an order that sorts. */
function time(unix) {
  if (unix == null) return "–";
  const at = new Date(unix * 1000);
  return new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19).replace("T", " ");
}

const shape = (sizes) => (sizes == null ? "–" : sizes.length ? sizes.join(" × ") : "scalar");

const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(part === all ? 0 : 1)} %` : "–");

/** A name with everything escaped that does not print, or would turn the text around it; an empty one in quotes. */
function printable(name) {
  const escaped = (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`;
  return name === "" ? '""' : String(name).replace(/[\p{C}\u2028\u2029]/gu, escaped);
}

/** What is told of a trouble, by the class of its error: a headline; the message of the library follows it. */
const HEADLINES = {
  NotFoundError: "It is not there any more",
  CorruptError: "It is damaged",
  NotInFile: "Not part of this file",
  Forbidden: "The server does not know this page",
};

function Trouble({ error }) {
  return html`<div class="trouble" role="alert">
    <b>${HEADLINES[error.kind] || "This did not work"}.</b> ${error.message}
  </div>`;
}

const Facts = ({ of }) => html`<dl class="facts">
  ${of.filter(Boolean).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
</dl>`;

const Panel = ({ title, beside, children }) => html`<section class="panel" aria-label=${title}>
  <header><h2>${title}</h2>${beside}</header>${children}
</section>`;

/** A choice of few: buttons of which one is pressed. */
const Choice = ({ label, of, value, onChoose }) => html`<span class="choice" role="group" aria-label=${label}>
  ${of.map(
    ([name, shown]) => html`<button aria-pressed=${String(name === value)} onClick=${() => onChoose(name)}>
    ${shown}</button>`,
  )}
</span>`;
