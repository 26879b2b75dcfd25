// Draws the charts of a board by Plotly, each while it is in view, as the controls of the page say.

const controls = document.getElementById("controls").elements;
const all = (selector, parent = document) => [...parent.querySelectorAll(selector)];
const inView = new Set();
const settings = { responsive: true, displayModeBar: false, showTips: false, doubleClick: "autosize" };
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a finger scrolls the page
const colours = getComputedStyle(document.documentElement); // those of the screen: --c0 to --c5, --ink and so on
const coloured = (_, name) => JSON.stringify(colours.getPropertyValue(name));
const plots = JSON.parse((await unpacked("plots")).replace(/"(--\w+)"/g, coloured));
let range; // of all x axes

/** Returns a text that the page carries. */
function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Exponential moving average without bias at the start, as in TensorBoard. */
function smoothed(values, weight) {
  let sum = 0;
  return values.map((value, n) => (sum = weight * sum + (1 - weight) * value) / (1 - weight ** (n + 1)));
}

/** Returns the values of a curve at some steps, between its own by straight lines; NaN before and behind it. */
function valuesAt({ step, y }, steps) {
  let n = 0;
  return steps.map((at) => {
    while (step[n + 1] <= at) n += 1;
    const part = (at - step[n]) / (step[n + 1] - step[n]);
    return at === step[n] ? y[n] : part > 0 ? y[n] + part * (y[n + 1] - y[n]) : NaN;
  });
}

/** Returns mean and standard deviation of the curves of one config, at the steps of the longest. */
function meanOf(lines) {
  if (lines.length === 1) return lines[0];
  const longest = lines.reduce((one, other) => (other.step.at(-1) > one.step.at(-1) ? other : one));
  const all = lines.map((line) => valuesAt(line, longest.step));
  const known = longest.step.map((_, n) => all.map((ys) => ys[n]).filter(Number.isFinite));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const y = known.map(mean);
  const sd = known.map((ys, n) => Math.sqrt(mean(ys.map((one) => (one - y[n]) ** 2)) * (ys.length / (ys.length - 1 || 1))));
  const [low, high] = [-1, 1].map((sign) => y.map((middle, n) => middle + sign * sd[n]));
  const name = `${lines.length} seeds of ${lines[0].trace.name}`;
  return { ...longest, y, low, high, trace: { ...longest.trace, name, legendgroup: name, line: lines[0].trace.line } };
}

/** Returns where the values of a curve stand on the x axis that is chosen. */
const along = ({ step, minute, epoch }) => ({ step, minute, epoch: step.map((n) => n / epoch) })[controls.axis.value];

/** Returns the band of a curve, its values as a faint line, and the curve. */
function traces({ trace, noisy, ...line }, number, crowded) {
  const weight = noisy ? Number(controls.smoothing.value) : 0;
  const xs = along(line);
  const before = (edge) => xs.filter((x) => x < edge).length;
  const seen = range ? [Math.max(0, before(range[0]) - 1), before(range[1]) + 1] : [0]; // y fits what is seen
  const parts = [xs, smoothed(line.y, weight), line.y, line.low, line.high];
  const [x, y, raw, low, high] = parts.map((each) => each?.slice(...seen));
  const behind = { ...trace, showlegend: false, hoverinfo: "skip", mode: "lines", opacity: 0.35 };
  const within = low ? ` (%{customdata[0]:${number}} to %{customdata[1]:${number}})` : "";
  const band = { x: [...x, ...[...x].reverse()], y: low && [...high, ...[...low].reverse()], fill: "toself" };
  return [
    low && !crowded && { ...behind, ...band, line: { width: 0 }, fillcolor: trace.line.color },
    weight && !crowded && { ...behind, x, y: raw, line: { color: trace.line.color, width: 1 } },
    { ...trace, x, y, customdata: low?.map((value, n) => [value, high[n]]), hovertemplate: `%{y:${number}}${within}` },
  ].filter(Boolean);
}

/** Returns what a chart of curves now shows: the runs that are ticked, or their means. */
function curves({ lines, layout, best, number }) {
  const ticked = all("input[name=run]").map((box) => box.checked);
  let drawn = lines.filter(({ run }) => ticked[run] ?? true);
  if (controls.mean?.checked) drawn = Object.values(Object.groupBy(drawn, ({ group }) => group)).map(meanOf);
  const data = drawn.flatMap((line) => traces(line, number, drawn.length > 8));
  const ys = data.filter((one) => one.hoverinfo !== "skip").flatMap((one) => one.y);
  const [low, high, log] = [Math.min(...ys), Math.max(...ys), controls.log.checked];
  const room = (high - low) / 2 || Math.abs(high) / 10 || 1; // so that outliers do not flatten the curves
  const limits = log ? {} : { clipmin: low - room, clipmax: high + room };
  const yaxis = { ...layout.yaxis, type: log ? "log" : "linear", autorangeoptions: limits };
  const unifiedhovertitle = { text: `${controls.axis.value} %{x:,.6~g}` };
  const xaxis = { ...layout.xaxis, unifiedhovertitle, range, autorange: !range, uirevision: String(range) };
  const [at] = best ? along(best) : [];
  const line = { color: colours.getPropertyValue("--faint"), dash: "dot", width: 1.5 };
  const shapes = best ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: at, x1: at, line }] : [];
  return { data, layout: { ...layout, xaxis, yaxis, shapes } };
}

function draw(place) {
  const plot = plots[place.dataset.plot];
  const { data, layout } = plot.lines ? curves(plot) : plot;
  Plotly.react(place, data, { ...layout, dragmode }, settings);
  if (plot.lines) place.zooms ??= place.on("plotly_relayout", zoom);
}

/** Zooms all curves as one was. */
function zoom({ "xaxis.autorange": whole, "xaxis.range[0]": from, "xaxis.range[1]": to }) {
  if (!whole && from === undefined) return;
  range = whole ? undefined : [from, to];
  inView.forEach(draw);
}

function sort(column) {
  const sign = column.ariaSort === "ascending" ? -1 : 1;
  all("th", column.parentElement).forEach((other) => { other.ariaSort = "none"; });
  column.ariaSort = sign > 0 ? "ascending" : "descending";
  const [body, rank] = [column.closest("table").tBodies[0], (row) => row.cells[column.cellIndex].dataset.rank];
  body.append(...[...body.rows].sort((one, other) => sign * (rank(one) - rank(other))));
}

document.addEventListener("input", ({ target }) => {
  const moments = target.closest(".moments");
  if (target.name === "axis") range = undefined;
  if (target.name === "all") all("input[name=run]").forEach((box) => { box.checked = target.checked; });
  if (!moments) return inView.forEach(draw);
  all("section", moments).forEach((one, n) => { one.hidden = n !== Number(target.value); });
});

document.addEventListener("click", ({ target }) => {
  if (target.name === "sort") sort(target.parentElement);
  if (target.hash) document.querySelector(target.hash).parentElement.open = true;
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());

const observer = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  inView[isIntersecting ? "add" : "delete"](target);
  if (isIntersecting) draw(target);
}));

document.head.append(Object.assign(document.createElement("script"), { textContent: await unpacked("plotly") }));
all("[data-plot]").forEach((place) => observer.observe(place));
