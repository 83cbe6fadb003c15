"use strict";
const runs = JSON.parse(document.getElementById("runs").textContent);
const SVG = "http://www.w3.org/2000/svg";
const AXES = {env_steps: "environment steps", seconds: "time", step: "log step"};
const settings = {x: "env_steps", smooth: 0};
const PATHS = ["eval", "train"];
const N_COLOURS = 10;

// -- data ---------------------------------------------------------------------------------------------

const decoded = new Map();
function numbers(text) {
  if (!decoded.has(text)) {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer), values = new Float64Array(bytes.length / 8);
    for (let index = 0; index < values.length; index++) values[index] = view.getFloat64(8 * index, true);
    decoded.set(text, values);
  }
  return decoded.get(text);
}
for (const run of runs) for (const path of Object.values(run.paths)) path.columns = new Map(path.columns);

function column(series, name) {
  const path = runs[series.run || 0]?.paths[series.path], text = name && path?.columns?.get(name);
  return text === undefined || text === null || name === undefined ? null : numbers(text);
}
function axis(series, kind) {
  const path = runs[series.run || 0].paths[series.path];
  return path[kind] === undefined ? null : numbers(path[kind]);
}
const hasAxis = kind => runs.some(run => Object.values(run.paths).some(
  path => path[kind] !== undefined && numbers(path[kind]).some(Number.isFinite)));
if (!hasAxis("env_steps")) settings.x = "step";

// -- text ---------------------------------------------------------------------------------------------

function text(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e5 && size < 1e15) return Math.round(value).toLocaleString("en");
  if (value !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(3);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));
}
/** A number in few digits, but in as many as tell it from one that is `step` away. */
function shortText(value, step = 0) {
  const size = Math.abs(value);
  const needed = step && value ? Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step) + 1e-9) + 1 : 4;
  const rounded = number => Number(number.toPrecision(Math.min(Math.max(needed, 1), 15)));
  if (size >= 1e15 || (value !== 0 && size < 1e-3)) return String(rounded(value).toExponential()).replace("+", "");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit * 10 || (size >= unit && unit > 1e3)) return rounded(value / unit) + letter;
  return String(rounded(value));
}
function duration(seconds) {
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  return seconds < 7200 ? `${Number((seconds / 60).toPrecision(3))} min` : `${Number((seconds / 3600).toPrecision(3))} h`;
}
const axisText = (value, kind) => kind === "seconds" ? duration(value) : shortText(value);

// -- elements -----------------------------------------------------------------------------------------

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}
function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
const colour = index => `var(--c${index % N_COLOURS})`;
const LONGEST = 160;
const cut = name => name.length > LONGEST ? `${name.slice(0, LONGEST)}\u2026` : name;
// Long names may break after a slash, a dot or an underscore.
const breakable = name => cut(name).replace(/[/._](?!\d)/g, "$&\u200b");

/** The name of a chart; of `Interface/event/...` the interface in small letters behind it. */
function caption(chart) {
  const [, first, rest] = chart.name.match(/^([A-Z]\w*)\/(.+)$/) || [null, "", chart.name];
  return element("figcaption", {}, breakable(rest), " ", element("small", {}, first));
}

// -- charts -------------------------------------------------------------------------------------------

// Halves, because the difference of two numbers may be larger than the largest number.
const share = (value, low, high) => (value / 2 - low / 2) / (high / 2 - low / 2);

/** Round numbers with what they are called, in as many digits as tell them apart. */
function ticks(low, high, count, kind = "", least = 0) {
  const raw = (high / 2 - low / 2) / count * 2, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(least, [1, 2, 5, 10].map(factor => factor * power).find(each => each >= raw * 0.75));
  const first = Math.ceil(low / step - 1e-9), found = [];
  for (let index = 0; index <= 2 * count; index++)
    if (Number.isFinite((first + index) * step) && (first + index) * step <= high + step * 1e-9) found.push((first + index) * step);
  return [...new Set(found)].map(value => [value, kind === "seconds" ? duration(value) : shortText(value, step)]);
}

function smoothed(values) {
  const weight = settings.smooth;
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** The lines of a chart: x, y and the ends of a band, where all x are known. */
function prepared(chart) {
  const lines = [], isStack = chart.kind === "stack";
  const parts = isStack ? chart.series.map(series => column(series, series.column)).filter(part => part !== null) : [];
  // A category that did not occur has a share of 0; where none is known, there was nothing to count.
  const counted = value => (_, at) => parts.some(part => !Number.isNaN(part[at])) ? value[at] || 0 : NaN;
  let floor = null;
  chart.series.forEach((series, index) => {
    const raw = column(series, series.column);
    if (raw === null) return;
    let kind = chart.x || settings.x;
    let x = axis(series, kind);
    if (x === null || !x.some(Number.isFinite)) { kind = "step"; x = axis(series, "step"); }
    const known = isStack ? raw.map(counted(raw)) : raw;
    let y = isStack ? known : smoothed(raw);
    let low = null, high = null, least = null, most = null;
    if (isStack) {
      low = floor === null ? new Float64Array(y.length) : floor;
      high = y.map((value, position) => value + low[position]);
      floor = high;
    } else {
      const std = column(series, series.std);
      [least, most] = [column(series, series.low), column(series, series.high)];
      if (std) {  // no further than what occurred
        const inside = (value, at) => least && most ? Math.min(Math.max(value, least[at]), most[at]) : value;
        low = y.map((value, at) => inside(value - std[at], at));
        high = y.map((value, at) => inside(value + std[at], at));
      }
      else if (least && most) { [low, high] = [least, most]; [least, most] = [null, null]; }
    }
    const hue = series.colour ?? (runs.length === 1 && chart.kind === "line" && PATHS.includes(series.path) ? PATHS.indexOf(series.path) : index);
    lines.push({label: series.label, colour: hue, kind, x, raw: known, y, low, high, least, most});
  });
  return lines;
}

/** Positions to draw: all, or the first, smallest, largest and last of each pixel column. */
function kept(x, y, n) {
  const finite = [];
  for (let index = 0; index < x.length; index++)
    if (Number.isFinite(x[index])) finite.push(index);
  if (finite.length <= 2 * n) return finite;
  const size = finite.length / (n / 2), found = [];
  for (let start = 0; start < finite.length; start += size) {
    const part = finite.slice(Math.floor(start), Math.floor(start + size));
    const known = part.filter(index => Number.isFinite(y[index]));
    const order = known.sort((one, two) => y[one] - y[two]);
    found.push(...new Set([part[0], order[0], order.at(-1), part.at(-1)].filter(index => index !== undefined)));
  }
  return [...new Set(found)].sort((one, two) => one - two);
}

function draw(figure) {
  const chart = figure.chart, lines = prepared(chart);
  const isLarge = figure.classList.contains("large");
  const width = Math.max(figure.clientWidth - 26, 200), height = isLarge ? 250 : 165;
  const right = 8, top = 8, bottom = 20;
  figure.replaceChildren();
  const name = caption(chart);
  const shown = lines.filter(line => line.y.some(Number.isFinite));
  const legend = element("div", {className: "legend"});
  const kind = shown[0]?.kind;
  if (!shown.length) { figure.append(name, element("p", {className: "note"}, "no finite values")); return; }
  if (isLarge) name.append(" ", element("small", {}, `over ${chart.x_label || AXES[kind]}`));
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const line of shown) {
    for (const value of line.x) if (Number.isFinite(value)) { x0 = Math.min(x0, value); x1 = Math.max(x1, value); }
    for (const values of [line.y, line.low, line.high])
      if (values && chart.kind !== "stack") for (const value of values) if (Number.isFinite(value)) { y0 = Math.min(y0, value); y1 = Math.max(y1, value); }
  }
  if (chart.kind === "stack") [y0, y1] = [0, 1];
  if (!(x1 > x0)) [x0, x1] = [x0 - 0.5, x0 + 0.5];
  if (!(y1 > y0)) {
    const room = Math.abs(y0) * 0.05 || 0.5;
    [y0, y1] = [Math.max(y0 - room, -Number.MAX_VALUE), Math.min(y0 + room, Number.MAX_VALUE)];
  }
  const yTicks = ticks(y0, y1, isLarge ? 6 : 4);
  const left = 14 + 6.6 * Math.max(2, ...yTicks.map(([, label]) => label.length));
  const X = value => left + (width - left - right) * share(value, x0, x1);
  const Y = value => height - bottom - (height - top - bottom) * share(value, y0, y1);
  const at = (px, py) => `${px.toFixed(1)} ${py.toFixed(1)}`;

  const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true"});
  for (const [value, shown] of yTicks) {
    svg.append(shape("line", {class: "grid", x1: left, x2: width - right, y1: Y(value), y2: Y(value)}));
    const label = shape("text", {x: left - 6, y: Y(value) + 4, "text-anchor": "end"});
    label.textContent = shown;
    svg.append(label);
  }
  const nTicks = Math.max(2, Math.min(8, Math.floor(width / 90)));
  for (const [value, shown] of ticks(x0, x1, nTicks, kind, kind === "seconds" ? 0 : 1)) {
    const label = shape("text", {x: X(value), y: height - 4, "text-anchor": X(value) > width - 30 ? "end" : "middle"});
    label.textContent = shown;
    svg.append(label);
  }
  svg.append(shape("line", {class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
  for (const line of shown) {
    const positions = kept(line.x, line.y, width);
    const known = positions.filter(index => Number.isFinite(line.y[index]));
    if (line.low) {
      const band = positions.filter(index => Number.isFinite(line.low[index]) && Number.isFinite(line.high[index]));
      const upper = band.map(index => at(X(line.x[index]), Y(line.high[index])));
      const lower = band.map(index => at(X(line.x[index]), Y(line.low[index]))).reverse();
      if (band.length === 1)  // a column where there is a single row
        for (const [ends, sign] of [[upper, 1], [lower, -1]]) {
          const [cx, cy] = ends[0].split(" ").map(Number);
          ends.splice(0, 1, `${cx - 3 * sign} ${cy}`, `${cx + 3 * sign} ${cy}`);
        }
      if (band.length) svg.append(shape("path", {
        d: `M${[...upper, ...lower].join("L")}Z`, style: `fill: ${colour(line.colour)}`,
        "fill-opacity": chart.kind === "stack" ? 0.75 : 0.16}));
    }
    if (chart.kind === "stack") continue;
    const parts = known.map(index => at(X(line.x[index]), Y(line.y[index])));
    if (parts.length === 1) {
      const [cx, cy] = parts[0].split(" ");
      svg.append(shape("circle", {cx, cy, r: 3, style: `fill: ${colour(line.colour)}`}));
    } else svg.append(shape("path", {class: "line", d: `M${parts.join("L")}`, style: `stroke: ${colour(line.colour)}`}));
  }
  const cursor = shape("line", {class: "cursor", y1: top, y2: height - bottom, visibility: "hidden"});
  svg.append(cursor);

  const places = [...new Set(shown.flatMap(line => [...line.x].filter(Number.isFinite)))].sort((one, two) => one - two);
  const spoken = element("span", {className: "visually-hidden", role: "status"});
  let position = null;
  function tell(place) {
    const parts = shown.map(line => {
      let nearest = -1;
      for (let index = 0; index < line.x.length; index++)
        if (Number.isFinite(line.y[index]) && (nearest < 0 || Math.abs(line.x[index] - place) < Math.abs(line.x[nearest] - place)))
          nearest = index;
      return [line, nearest];
    }).filter(([, nearest]) => nearest >= 0);
    legend.replaceChildren(...parts.map(([line, nearest]) => {
      const mark = element("i");
      mark.style.background = colour(line.colour);
      const spread = line.low && chart.kind !== "stack" ? ` (${text(line.low[nearest])} to ${text(line.high[nearest])})` : "";
      const range = line.least ? `, from ${text(line.least[nearest])} to ${text(line.most[nearest])}` : "";
      const value = element("b", {title: String(line.raw[nearest])}, text(line.raw[nearest]));
      return element("span", {}, mark, line.label ? `${cut(line.label)} ` : "", value, position === null ? "" : spread + range);
    }));
    if (position !== null) {
      cursor.setAttribute("x1", X(place));
      cursor.setAttribute("x2", X(place));
      cursor.setAttribute("visibility", "visible");
      legend.append(element("span", {}, `at ${axisText(place, kind)}`));
      spoken.textContent = legend.textContent;
    } else cursor.setAttribute("visibility", "hidden");
  }
  function move(index) {
    position = index === null ? null : Math.min(Math.max(index, 0), places.length - 1);
    tell(position === null ? places.at(-1) : places[position]);
  }
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const wanted = x0 + (x1 - x0) * ((event.clientX - box.left) * width / box.width - left) / (width - left - right);
    let nearest = 0;
    places.forEach((place, index) => { if (Math.abs(place - wanted) < Math.abs(places[nearest] - wanted)) nearest = index; });
    move(nearest);
  });
  svg.addEventListener("pointerleave", () => move(null));
  figure.onkeydown = event => {
    const steps = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -places.length, End: places.length};
    if (!(event.key in steps)) return;
    event.preventDefault();
    move((position ?? places.length - 1) + steps[event.key]);
  };
  figure.onblur = () => move(null);
  figure.tabIndex = 0;
  figure.setAttribute("aria-label", `${cut(chart.name)}: chart with ${shown.length} lines; arrow keys read its values`);
  figure.append(name, svg, legend, spoken);
  move(null);
}

const figures = [...document.querySelectorAll("figure[data-chart]")];
const waiting = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) if (isIntersecting) { waiting.unobserve(target); drawSoon(target); }
}, {rootMargin: "400px"});
// As many in a frame as leave the page time to scroll.
const MOST_OF_A_FRAME = 8;
const queue = [];
function drawSoon(figure) {
  if (queue.push(figure) > 1) return;
  requestAnimationFrame(function drawSome() {
    const end = performance.now() + MOST_OF_A_FRAME;
    while (queue.length && performance.now() < end) draw(queue.shift());
    if (queue.length) requestAnimationFrame(drawSome);
  });
}
function drawAll() {
  for (const figure of figures) { waiting.unobserve(figure); waiting.observe(figure); }
}
for (const figure of figures) {
  figure.chart = JSON.parse(figure.dataset.chart);
  figure.append(caption(figure.chart));
}
addEventListener("beforeprint", () => {
  figures.forEach(draw);
  document.querySelectorAll("details").forEach(each => { each.open = true; });
});
let resized = null;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawAll, 150); });

// -- controls -----------------------------------------------------------------------------------------

const controls = document.querySelector(".controls");
if (figures.some(figure => !figure.chart.x)) {
  const select = element("select");
  for (const [kind, label] of Object.entries(AXES))
    if (hasAxis(kind)) select.append(element("option", {value: kind, textContent: label, selected: kind === settings.x}));
  select.addEventListener("change", () => { settings.x = select.value; remember(); drawAll(); });
  const range = element("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: 0});
  range.addEventListener("input", () => { settings.smooth = Number(range.value); remember(); drawAll(); });
  controls.append(element("label", {}, "horizontal axis", select), element("label", {}, "smoothing", range));
  try { Object.assign(settings, JSON.parse(sessionStorage.getItem("maze-report") || "{}")); } catch { /* no storage */ }
  if (![...select.options].some(option => option.value === settings.x)) settings.x = select.value;
  select.value = settings.x;
  range.value = settings.smooth;
}
function remember() {
  try { sessionStorage.setItem("maze-report", JSON.stringify(settings)); } catch { /* no storage */ }
}

// -- tables -------------------------------------------------------------------------------------------

for (const place of document.querySelectorAll(".statistics-table")) {
  const rows = [];
  runs.forEach((run, index) => {
    for (const [path, {columns}] of Object.entries(run.paths)) for (const name of columns.keys())
      rows.push({run: index, path, name, title: runs.length > 1 ? `${run.name}: ${path}_${name}` : path ? `${path}_${name}` : name});
  });
  const body = element("tbody"), filter = element("input", {type: "search", placeholder: "name contains"});
  const count = element("span", {role: "status"});
  const table = element("table", {}, element("thead", {}, element("tr", {},
    ...["statistic", "latest", "history", "first", "smallest", "largest"].map(name =>
      element("th", {scope: "col", textContent: name, className: ["statistic", "history"].includes(name) ? "" : "number"})))), body);
  const lazy = new IntersectionObserver(entries => {
    for (const {target, isIntersecting} of entries) if (isIntersecting) { lazy.unobserve(target); fillRow(target); }
  }, {rootMargin: "300px"});
  function fillRow(row) {
    const {item} = row, values = numbers(runs[item.run].paths[item.path].columns.get(item.name));
    const known = values.filter(Number.isFinite);
    const exact = value => element("td", {className: "number", textContent: value === undefined ? "–" : String(value)});
    let [low, high] = [Infinity, -Infinity];
    for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
    const spark = shape("svg", {viewBox: "0 0 120 22", "aria-hidden": "true"});
    if (known.length > 1) {
      const at = (value, index) => `${(2 + 116 * index / (known.length - 1)).toFixed(1)} ${(20 - 18 * (high > low ? share(value, low, high) : 0)).toFixed(1)}`;
      const every = Math.ceil(known.length / 120);
      const points = [...known].map((value, index) => [value, index]).filter((_, index) => index % every === 0);
      spark.append(shape("path", {d: "M" + points.map(([value, index]) => at(value, index)).join("L"), fill: "none", style: "stroke: var(--c0)"}));
    }
    const [latest, ...others] = known.length ? [known.at(-1), known[0], low, high] : [undefined, undefined, undefined, undefined];
    row.append(exact(latest), element("td", {}, spark), ...others.map(exact));
  }
  const made = rows.map(item => {
    const row = element("tr", {}, element("th", {scope: "row", textContent: breakable(item.title)}));
    row.item = item;
    return row;
  });
  function apply() {
    const wanted = filter.value.toLowerCase();
    const shown = made.filter(row => row.item.title.toLowerCase().includes(wanted));
    body.replaceChildren(...shown);
    for (const row of shown) if (row.children.length === 1) lazy.observe(row);
    count.textContent = `${shown.length} of ${made.length}`;
  }
  filter.addEventListener("input", apply);
  place.append(element("p", {className: "controls"}, element("label", {}, "search", filter), count),
    element("div", {className: "wide", tabIndex: 0, role: "group", ariaLabel: "all statistics"}, table));
  addEventListener("beforeprint", () => made.filter(row => row.isConnected && row.children.length === 1).forEach(fillRow));
  apply();
}

const UNKNOWN = new Set(["", "-", "nan"]);  // last in both directions
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((cell, index) => {
    const button = element("button", {type: "button"}, ...cell.childNodes);
    cell.append(button);
    if ([...body.rows].some(row => row.cells[index]?.classList.contains("number"))) cell.classList.add("number");
    button.addEventListener("click", () => {
      const sign = cell.ariaSort === "descending" ? 1 : -1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.ariaSort = sign < 0 ? "descending" : "ascending";
      const key = row => { const found = row.cells[index]; return found.dataset.value ?? found.textContent; };
      const compare = (one, two) => {
        const [s, t] = [key(one), key(two)], last = sign * (UNKNOWN.has(s) - UNKNOWN.has(t));
        const [a, b] = [s, t].map(text => Number(text.replace("inf", "Infinity")));
        return last || (Number.isNaN(a) || Number.isNaN(b) ? s.localeCompare(t) : a - b);
      };
      body.append(...[...body.rows].sort((one, two) => sign * compare(one, two)));
    });
  });
}

// -- commands -----------------------------------------------------------------------------------------

if (navigator.clipboard) for (const command of document.querySelectorAll(".command")) {
  const button = element("button", {type: "button", textContent: "copy"});
  button.setAttribute("aria-label", `copy: ${command.querySelector("h3").textContent}`);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(command.querySelector("pre").textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  command.append(button);
}

drawAll();
