// Lines over steps.
"use strict";

const [LEFT, RIGHT, BELOW, ABOVE] = [68, 14, 24, 10];
const DASHES = [[], [7, 3], [2, 3], [10, 3, 2, 3]];

const tint = (index) => `oklch(${isDark() ? 0.76 : 0.52} 0.14 ${(index * 137.508 + 215) % 360})`;
const isNumber = (value) => typeof value === "number";

/** Round numbers from `low` to `high`, about `many` of them. */
function ticks(low, high, many) {
  const rough = (high - low) / many || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-6; at += 1) found.push(at * step);
  return found;
}

/** Powers of ten from 10 ** `low` to 10 ** `high`, with 2 and 5 times them where there is room; as their logarithms. */
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power += Math.ceil((high - low) / 8) || 1) {
    for (const times of high - low < 2.5 ? [1, 2, 5] : [1]) found.push(power + Math.log10(times));
  }
  return found.filter((tick) => tick >= low && tick <= high);
}

/** The least and the most of `values`, a little apart where they are the same. */
function range(values) {
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
  return low < high ? [low, high] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
}

/** Lines over `steps`. `series`: [{name, values}]; values that are no numbers are gaps, on a log scale those up to 0 too. */
function Chart({ steps, series, height = 220, isLog = false, label }) {
  const [told, setTold] = useState(null);
  const scaled = (value) => (isLog ? Math.log10(value) : value);
  const isShown = (value) => isNumber(value) && (!isLog || value > 0);
  const shown = series.flatMap((each) => each.values.filter(isShown).map(scaled));
  const [from, to] = range(steps);
  const [low, high] = range(shown.length ? shown : [0]);
  const across = (step, width) => LEFT + ((step - from) / (to - from)) * (width - LEFT - RIGHT);
  const draw = (pen, width, tall, ink) => {
    const up = (value) => ABOVE + (1 - (scaled(value) - low) / (high - low)) * (tall - ABOVE - BELOW);
    pen.lineWidth = 1;
    pen.fillStyle = ink.text;
    pen.strokeStyle = ink.line;
    const rule = (...ends) => {
      pen.beginPath();
      pen.moveTo(ends[0], ends[1]);
      pen.lineTo(ends[2], ends[3]);
      pen.stroke();
    };
    pen.textAlign = "right";
    for (const tick of isLog ? logTicks(low, high) : ticks(low, high, tall / 44)) {
      const value = isLog ? 10 ** tick : tick;
      rule(LEFT, up(value), width - RIGHT, up(value));
      pen.fillText(digits(value, 3), LEFT - 8, up(value));
    }
    pen.textAlign = "center";
    for (const tick of ticks(from, to, width / 90)) {
      if (Number.isInteger(tick)) pen.fillText(tick, across(tick, width), tall - 9);
    }
    if (told !== null) rule(across(steps[told], width), ABOVE, across(steps[told], width), tall - BELOW);
    series.forEach(({ values }, index) => {
      pen.strokeStyle = pen.fillStyle = tint(index);
      pen.lineWidth = 1.8;
      pen.setLineDash(DASHES[index % DASHES.length]);
      pen.beginPath();
      let isOn = false;
      values.forEach((value, at) => {
        if (isShown(value)) pen[isOn ? "lineTo" : "moveTo"](across(steps[at], width), up(value));
        isOn = isShown(value);
      });
      pen.stroke();
      pen.setLineDash([]);
      values.forEach((value, at) => {
        if (!isShown(value) || (steps.length > 60 && at !== told)) return;
        pen.beginPath();
        pen.arc(across(steps[at], width), up(value), at === told ? 4.5 : 2.5, 0, 7);
        pen.fill();
      });
    });
  };
  const choose = (at) => setTold(at < 0 || at >= steps.length ? null : at);
  const point = (x, y, width) => {
    if (x < 0) return choose(-1);
    const apart = steps.map((step) => Math.abs(across(step, width) - x));
    choose(apart.indexOf(Math.min(...apart)));
  };
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(steps.length - 1, (told ?? (by > 0 ? -1 : steps.length)) + by)));
  };
  const at = told !== null && told < steps.length ? told : steps.length - 1;
  return html`<${Canvas} height=${height} draw=${draw} onPoint=${point} onKey=${onKey}
    deps=${[JSON.stringify([steps, series]), isLog, told]}
      label=${`${label}: ${counted(steps.length, "step")}; arrows read the values`} />
    <ul class="legend" aria-live="polite"><li>step ${steps[at]}</li>${series.map(
      ({ name, values }, index) => html`<li>
      <svg width="22" height="8" aria-hidden="true"><line x2="22" y1="4" y2="4" stroke=${tint(index)} stroke-width="2.5"
        stroke-dasharray=${DASHES[index % DASHES.length].join(" ")} /></svg> ${name} <b>${digits(values[at])}</b></li>`,
    )}</ul>`;
}
