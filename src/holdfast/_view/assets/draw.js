// Pictures on canvas: what has more parts than a page may have elements. A line of text below says what is pointed at.
"use strict";

const isDark = () =>
  (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

/** A colour for the number `index`: neighbours are far apart. */
const colour = (index, weight = 1) =>
  index < 0
    ? `oklch(${isDark() ? 0.4 : 0.8} 0 0)`
    : `oklch(${isDark() ? 0.5 : 0.8} ${0.095 * weight} ${(index * 137.508 + 205) % 360})`;

/** A colour for `share` of the most, from 0 to 1. */
const heat = (share) =>
  isDark()
    ? `oklch(${0.27 + 0.27 * share} ${0.02 + 0.08 * share} 215)`
    : `oklch(${0.97 - 0.2 * share} ${0.01 + 0.1 * share} 215)`;

/** The width of what `place` refers to, and a number that grows when the theme changes. */
function useSize(place) {
  const [width, setWidth] = useState(0);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    const again = () => setTurn((before) => before + 1);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    watch.observe(place.current);
    scheme.addEventListener("change", again);
    addEventListener("theme", again);
    return () => {
      watch.disconnect();
      scheme.removeEventListener("change", again);
      removeEventListener("theme", again);
    };
  }, []);
  return [width, turn];
}

/** A canvas as wide as its place. `draw(pen, width, height, ink)` is called when `deps`, size or theme change. */
function Canvas({ label, height, draw, deps, onPoint, onPick, onKey }) {
  const [place, ref] = [useRef(), useRef()];
  const [width, turn] = useSize(place);
  useLayoutEffect(() => {
    if (!width) return;
    const canvas = ref.current;
    const scale = devicePixelRatio || 1;
    Object.assign(canvas, { width: width * scale, height: height * scale });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    pen.scale(scale, scale);
    pen.font = `12px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    draw(pen, width, height, { text: style.color, line: style.outlineColor, mark: style.caretColor });
  }, [width, height, turn, ...deps]);
  const from = (event, then) => then && then(event.offsetX, event.offsetY, width);
  return html`<div class="picture" ref=${place}><canvas ref=${ref} role="img" aria-label=${label}
    tabindex=${onKey ? 0 : -1}
    class=${onPick ? "picks" : ""} onKeyDown=${onKey} onClick=${(event) => from(event, onPick)}
    onMouseMove=${(event) => from(event, onPoint)} onMouseLeave=${() => onPoint && onPoint(-1, -1, width)} /></div>`;
}

/** Write `text` into `width`, cut where it is too long; nothing where there is no room. */
function write(pen, text, x, y, width) {
  const room = Math.floor(width / 6.4);
  if (room < 2 && text.length > room) return;
  pen.fillText(text.length > room ? `${text.slice(0, room - 1)}…` : text, x, y, width);
}

const ROW = 30;

function icicleBoxes(tree, width) {
  const boxes = [];
  const place = (node, x, wide, depth, hue, parent) => {
    const inside = node.children.reduce((sum, child) => sum + child.bytes, node.rest?.bytes || 0);
    const all = Math.max(inside, node.bytes || 0) || 1;
    node.children.forEach((child, number) => {
      const own = (wide * child.bytes) / all;
      // Colours begin where there is more than one module.
      const box = {
        node: child,
        x,
        y: depth * ROW,
        wide: own,
        depth,
        hue: hue ?? (node.children.length > 1 ? number : null),
        parent,
      };
      boxes.push(box);
      if (child.children && own > 3) place(child, x, own, depth + 1, box.hue, box);
      x += own;
    });
    const { children, bytes } = node.rest || {};
    if (children)
      boxes.push({ rest: children, bytes, x, y: depth * ROW, wide: (wide * bytes) / all, depth, hue: -1, parent });
  };
  place(tree, 0, width, 0, null, null);
  return boxes;
}

/** The tree by bytes: below each module what is in it. `tell(node)` is text; `onOpen(node)` opens a tensor or module. */
function Icicle({ tree, label, tell, onOpen }) {
  const boxes = useRef([]);
  const [chosen, setChosen] = useState(null);
  useEffect(() => setChosen(null), [tree]);
  const depth = (node) => 1 + Math.max(0, ...(node.children || []).map((child) => (child.children ? depth(child) : 0)));
  const draw = (pen, width, height, ink) => {
    boxes.current = icicleBoxes(tree, width);
    for (const { node, rest, x, y, wide, depth, hue } of boxes.current) {
      pen.fillStyle = colour(hue ?? 0, node && node.tensor == null ? 0.65 : 1);
      pen.globalAlpha = depth % 2 ? 0.82 : 1;
      pen.fillRect(x, y, Math.max(wide - 1, 0.6), ROW - 1);
      pen.globalAlpha = 1;
      pen.fillStyle = ink.text;
      write(pen, node ? printable(node.name) : `${rest} smaller`, x + 6, y + ROW / 2, wide - 10);
    }
    if (!chosen) return;
    pen.strokeStyle = ink.mark;
    pen.lineWidth = 2;
    pen.strokeRect(chosen.x + 1, chosen.y + 1, Math.max(chosen.wide - 3, 1), ROW - 3);
  };
  const under = (x, y) =>
    boxes.current.find((box) => x >= box.x && x < box.x + Math.max(box.wide, 1) && y >= box.y && y < box.y + ROW) ||
    null;
  const onKey = (event) => {
    const all = boxes.current;
    if (event.key === "Enter") return chosen?.node && onOpen(chosen.node);
    const row = chosen && all.filter((box) => box.depth === chosen.depth);
    const move = {
      ArrowRight: () => row[row.indexOf(chosen) + 1],
      ArrowLeft: () => row[row.indexOf(chosen) - 1],
      ArrowUp: () => chosen.parent,
      ArrowDown: () => all.find((box) => box.parent === chosen),
    }[event.key];
    if (!move) return;
    event.preventDefault();
    setChosen((chosen ? move() : all[0]) || chosen);
  };
  const said = chosen
    ? chosen.node
      ? tell(chosen.node)
      : tell({ name: `${chosen.rest} smaller ones`, bytes: chosen.bytes })
    : "";
  return html`<${Canvas} label=${label} height=${Math.min(6, depth(tree)) * ROW} draw=${draw} deps=${[tree, chosen]}
      onPoint=${(x, y) => setChosen(under(x, y))} onKey=${onKey}
      onPick=${(x, y) => under(x, y)?.node && onOpen(under(x, y).node)} />
    <p class="told" aria-live="polite">${said || "A click, or arrows and Enter, go into a module or open a tensor."}
      </p>`;
}

const MOST_DRAWN = 4000; // chunks with lines and numbers; of more, their pixels are coloured
const MOST_HUES = 12; // writers that are told apart by colours; of more, neighbours have neighbouring ones
const HUES = 256;

const writerColour = (index, most) =>
  most < MOST_HUES || index < 0 ? colour(index) : `oklch(${isDark() ? 0.5 : 0.78} 0.1 ${(index / most) * 330 + 10})`;

/** The rectangle of two axes of a tensor, cut into its chunks. `pages` are as `useChunks` has them. */
function Chunks({ shape, axes, pages, by, label, onTell }) {
  const [rows, columns] = axes.map((axis) => (axis < 0 ? 1 : shape[axis]));
  const height = Math.max(44, Math.min(230, axes[0] < 0 ? 44 : (rows / columns) * 700));
  const boxOf = (page, index, wide, high) => {
    const of = (axis, name) => page[name][index * page.dims + axis];
    const [y, x] = axes.map((axis) => (axis < 0 ? 0 : of(axis, "offsets")));
    const [h, w] = axes.map((axis) => (axis < 0 ? 1 : of(axis, "sizes")));
    return [(x / columns) * wide, (y / rows) * high, (w / columns) * wide, (h / rows) * high];
  };
  const shown = pages.reduce((sum, page) => sum + page.count, 0);
  const most = pages.reduce((last, page) => page[by].reduce((a, b) => Math.max(a, b), last), 0);
  const draw = (pen, width, high, ink) => {
    const small = pages.some((page) => boxOf(page, 0, width, high).some((side, at) => at > 1 && side < 2));
    if (shown > MOST_DRAWN || small) return drawPixels(pen, width, high, pages, by, boxOf, most);
    for (const page of pages) {
      for (let index = 0; index < page.count; index += 1) {
        const [x, y, w, h] = boxOf(page, index, width, high);
        pen.fillStyle = writerColour(page[by][index], most);
        pen.fillRect(x, y, Math.max(w - 1, 0.7), Math.max(h - 1, 0.7));
        pen.fillStyle = ink.text;
        const name = by === "rank" ? `rank ${page.rank[index]}` : `file ${page.file[index]}`;
        if (h > 13 && page[by][index] >= 0) write(pen, w < 50 ? name.slice(5) : name, x + 5, y + h / 2, w - 8);
      }
    }
  };
  const point = (x, y, width) => {
    for (const page of pages) {
      for (let index = 0; x >= 0 && index < page.count; index += 1) {
        const [left, top, w, h] = boxOf(page, index, width, height);
        if (x >= left && x < left + w && y >= top && y < top + h) return onTell(page, index);
      }
    }
    onTell(null);
  };
  return html`<${Canvas} label=${label} height=${height} draw=${draw} deps=${[pages, by, ...axes]} onPoint=${point} />`;
}

function drawPixels(pen, width, height, pages, by, boxOf, most) {
  const palette = new OffscreenCanvas(HUES + 1, 1).getContext("2d");
  const step = Math.max(1, most / (HUES - 1));
  for (let index = -1; index < HUES; index += 1) {
    palette.fillStyle = writerColour(index < 0 ? -1 : index * step, most);
    palette.fillRect(index + 1, 0, 1, 1);
  }
  const colours = new Uint32Array(palette.getImageData(0, 0, HUES + 1, 1).data.buffer);
  const [wide, high] = [Math.floor(width), Math.floor(height)];
  const image = new ImageData(wide, high);
  const pixels = new Uint32Array(image.data.buffer);
  for (const page of pages) {
    for (let index = 0; index < page.count; index += 1) {
      const [x, y, w, h] = boxOf(page, index, wide, high);
      const tint = colours[page[by][index] < 0 ? 0 : 1 + Math.floor(page[by][index] / step)];
      const [right, bottom] = [Math.max(x + w, Math.floor(x) + 1), Math.max(y + h, Math.floor(y) + 1)];
      for (let row = Math.floor(y); row < bottom && row < high; row += 1) {
        pixels.fill(tint, row * wide + Math.floor(x), row * wide + Math.min(right, wide));
      }
    }
  }
  const picture = new OffscreenCanvas(wide, high);
  picture.getContext("2d").putImageData(image, 0, 0);
  pen.drawImage(picture, 0, 0, width, height);
}

/** One cell for each of `of`, in rows, coloured by its share of the most: {name, value, shown, isMarked}. */
function HeatMap({ of, label, onTell }) {
  const most = Math.max(...of.map((cell) => cell.value), 1e-12);
  const perRow = (width) =>
    Math.min(of.length, of.length <= 16 ? Math.floor(width / 66) : Math.floor(width / (of.length > 256 ? 15 : 30)));
  const [high, setHigh] = useState(40);
  const size = of.length <= 16 ? 40 : of.length > 256 ? 14 : 28;
  const draw = (pen, width, height, ink) => {
    const each = perRow(width);
    setHigh(Math.ceil(of.length / each) * size);
    of.forEach(({ name, value, shown, isMarked }, index) => {
      const [x, y, w] = [((index % each) * width) / each, Math.floor(index / each) * size, width / each - 2];
      pen.fillStyle = value == null ? "transparent" : heat(value / most);
      pen.fillRect(x, y, w, size - 2);
      pen.strokeStyle = isMarked ? ink.mark : ink.line;
      pen.lineWidth = isMarked ? 2.5 : 0.5;
      pen.strokeRect(x + 1, y + 1, w - 2, size - 4);
      pen.fillStyle = ink.text;
      if (size === 40) write(pen, shown, x + 6, y + 27, w - 8);
      if (size > 14) write(pen, name, x + 6, y + (size === 40 ? 12 : 13), w - 6);
    });
  };
  const point = (x, y, width) =>
    onTell(x < 0 ? null : of[Math.floor(y / size) * perRow(width) + Math.floor((x / width) * perRow(width))]);
  return html`<${Canvas} label=${label} height=${high} draw=${draw} deps=${[of]} onPoint=${point} />`;
}

/** A histogram of magnitudes: positive elements above the line, negative ones below. `bins`: [exponent, negative, positive]. */
function Histogram({ bins }) {
  const [told, setTold] = useState("");
  const first = bins.length ? bins[0][0] : 0;
  const many = bins.length ? bins[bins.length - 1][0] - first + 1 : 1;
  const most = Math.max(...bins.map(([, negative, positive]) => Math.max(negative, positive)), 1);
  const draw = (pen, width, height, ink) => {
    const [step, middle] = [width / many, (height - 16) / 2];
    for (const [exponent, negative, positive] of bins) {
      const x = (exponent - first) * step;
      pen.fillStyle = colour(0);
      pen.fillRect(x, middle - (positive / most) * middle, Math.max(step - 1, 0.7), (positive / most) * middle);
      pen.fillStyle = colour(2);
      pen.fillRect(x, middle, Math.max(step - 1, 0.7), (negative / most) * middle);
      pen.fillStyle = ink.text;
      if ((exponent - first) % Math.ceil(56 / step) === 0) pen.fillText(digits(2 ** exponent, 1), x, height - 7);
    }
    pen.fillStyle = ink.line;
    pen.fillRect(0, middle, width, 1);
  };
  const point = (x, y, width) => {
    const bin = x < 0 ? null : bins.find(([exponent]) => exponent === first + Math.floor((x / width) * many));
    const [from, to] = bin ? [2 ** bin[0], 2 ** (bin[0] + 1)].map((edge) => edge.toPrecision(3)) : [];
    setTold(
      bin
        ? `from ${from} up to ${to}: ${bin[2].toLocaleString("en-US")} positive, ${bin[1].toLocaleString("en-US")} negative`
        : "",
    );
  };
  return html`<${Canvas} label="Histogram of absolute values" height=${150} draw=${draw} deps=${[bins]}
    onPoint=${point} />
    <p class="told">${told || "How many elements have which absolute value: positive above the line, negative below."}
      </p>`;
}
