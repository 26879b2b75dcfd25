"use strict";

const board = JSON.parse(document.getElementById("data").textContent);
const runs = board.runs;
const single = runs.length === 1;
const view = { on: new Set(runs), x: "step", range: null, smooth: 0.6, mean: false, log: false, run: runs[0], at: null, sort: null };
const groups = [...new Set(runs.map((run) => run.group))].sort((a, b) => a - b);
runs.forEach((run) => {
  const own = runs.filter((other) => other.group === run.group).indexOf(run);
  run.colour = run.group % 6;
  run.dash = own + Math.floor(run.group / 6);
});
const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3], [14, 4], [4, 2, 1, 2, 1, 2]];
const FRACTION = /(^|[/_])(acc|acc5|ece|mfu|f1)$|accuracy/;
const SECTIONS = { "Quality": /^(train|val)\//, "Optimization": /^(lr$|lr[/-]|optim\/)/, "Speed": /^speed\//, "System": /^system\// };

// elements ------------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function table(header, rows, attributes = {}) {
  const line = (cells) => make("tr", {}, cells.map((cell, place) => make(place ? "td" : "th", {}, cell)));
  const head = header.length ? make("thead", {}, make("tr", {}, header.map((cell) => make("th", {}, cell)))) : "";
  return make("div", { class: "wide" }, make("table", attributes, head, make("tbody", {}, rows.map(line))));
}

const note = (...text) => make("p", { class: "note" }, ...text);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (number) => css(`--c${number % 6}`);

// numbers -------------------------------------------------------------------------------------------------------------

function show(value, name = "") {
  if (value === null || value === undefined || value === "") return "\u2013";
  if (typeof value !== "number") return String(value);
  if (FRACTION.test(name)) return `${(100 * value).toFixed(2)} %`;
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

function duration(seconds) {
  if (typeof seconds !== "number") return "\u2013";
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return seconds < 6000 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Values for marks on an axis, about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, n) => (first + n) * step);
}

/** Value at x of a line through points with increasing x; null outside it. */
function at(xs, ys, x) {
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const width = xs[high] - xs[low];
  return width ? ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / width : ys[low];
}

/** Exponential moving average without bias at the start, as in TensorBoard. */
function smoothed(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function xOf(run, step) {
  if (view.x === "epoch") return run.steps_per_epoch > 1 ? (step + 1) / run.steps_per_epoch : step + 1;
  if (view.x === "minute") {
    const [steps, minutes] = run.minutes ??= [run.clock.map((pair) => pair[0]), run.clock.map((pair) => pair[1])];
    return at(steps, minutes, step) ?? minutes[step < (steps[0] ?? 0) ? 0 : minutes.length - 1] ?? 0;
  }
  return step;
}

// curves --------------------------------------------------------------------------------------------------------------

/** The charts: [section, title, names]. One metric each for several runs; for one, those that can be compared share one. */
function layout() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))];
  const objective = runs[0].plain ? ["train/loss"] : [];
  const shared = !single ? [] : [
    ["accuracy", ["train/acc", "val/acc", "val/raw_acc"]],
    [runs[0].plain ? "loss" : "cross entropy", ["val/loss", "train/ce", ...objective]],
    [runs[0].plain ? "loss of a batch" : "training loss (its objective)", ["train/loss_step", "train/loss"]],
  ];
  const charts = shared.map(([title, own]) => [title, own.filter((name) => names.includes(name))]);
  const used = new Set(charts.flatMap(([, own]) => own));
  charts.push(...names.filter((name) => !used.has(name)).map((name) => [name, [name]]));
  const order = ["val/acc", "val/loss", "train/ce", "train/loss", "train/loss_step", "train/acc"];
  const place = (chart) => (order.indexOf(chart[0]) + 100) % 100;
  const found = Object.entries(SECTIONS).map(([section, test]) => [section, charts.filter(([, own]) => own.length && test.test(own[0]))]);
  const rest = charts.filter(([, own]) => own.length && !Object.values(SECTIONS).some((test) => test.test(own[0])));
  if (!single) found[0][1].sort((a, b) => place(a) - place(b));
  return [...found, ["Other", rest]].filter(([, own]) => own.length);
}

/** The lines of a chart: {label, colour, dash, x, y, lo, hi, line}; `line` is what is drawn fully. */
function lines(names) {
  const weight = view.smooth;
  const found = [];
  for (const run of runs.filter((one) => view.on.has(one))) {
    names.forEach((name, place) => {
      const series = run.series[name];
      if (!series || !series.s.length) return;
      const noisy = series.s.length > 30 && series.n > 2 * ((series.s[series.s.length - 1] + 1) / run.steps_per_epoch) && name !== "lr";
      const y = series.v;
      found.push({
        run, label: single ? name : run.name, colour: single ? place : run.colour, dash: single ? place : run.dash,
        x: series.s.map((step) => xOf(run, step)), y, lo: series.lo, hi: series.hi,
        line: noisy && weight ? smoothed(y, weight) : y, raw: Boolean(noisy && weight),
      });
    });
  }
  return view.mean && !single ? averaged(found) : found;
}

/** Mean and standard deviation over the runs of a group, at 200 places. */
function averaged(all) {
  return groups.flatMap((group) => {
    const own = all.filter((one) => one.run.group === group);
    if (own.length < 2) return own;
    const low = Math.min(...own.map((one) => one.x[0]));
    const high = Math.max(...own.map((one) => one.x[one.x.length - 1]));
    const grid = Math.max(...own.map((one) => one.x.length)) <= 200
      ? [...new Set(own.flatMap((one) => one.x))].sort((a, b) => a - b)
      : Array.from({ length: 200 }, (_, n) => low + ((high - low) * n) / 199);
    const x = [];
    const line = [];
    const lo = [];
    const hi = [];
    for (const place of grid) {
      const values = own.map((one) => at(one.x, one.line, place)).filter((value) => value !== null);
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, values.length - 1));
      x.push(place);
      line.push(mean);
      lo.push(mean - spread);
      hi.push(mean + spread);
    }
    const { run } = own[0];
    const label = `${own.length} seeds of ${run.name}`;
    return [{ run, label, colour: run.colour, dash: Math.floor(group / 6), x, y: line, lo, hi, line, raw: false, band: true }];
  });
}

const charts = [];

function chart(title, names) {
  const canvas = make("canvas", { role: "img" });
  const caption = note();
  const one = { title, names, canvas, caption, drag: null };
  canvas.addEventListener("pointermove", (event) => hover(one, event));
  canvas.addEventListener("pointerleave", () => { one.pointer = null; if (!one.drag) { tip.hidden = true; draw(one); } });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    one.drag = event.offsetX;
    try { canvas.setPointerCapture(event.pointerId); } catch { /* the pointer is gone */ }
  });
  canvas.addEventListener("pointercancel", () => { one.drag = null; draw(one); });
  canvas.addEventListener("pointerup", (event) => {
    const from = one.drag;
    one.drag = null;
    if (from !== null && Math.abs(event.offsetX - from) > 8 && one.toX) zoom([from, event.offsetX].sort((a, b) => a - b).map(one.toX));
    else draw(one);
  });
  canvas.addEventListener("dblclick", () => zoom(null));
  charts.push(one);
  const key = single && names[0] !== title ? names.flatMap((name, n) => [swatch({ colour: n, dash: n }), ` ${name} `]) : "";
  return make("div", { class: "chart" }, make("h3", {}, title), key ? note(key) : "", canvas, caption);
}

function zoom(range) {
  view.range = range;
  reset.hidden = range === null;
  drawAll();
}

function hover(one, event) {
  one.pointer = [event.offsetX, event.clientX, event.clientY];
  draw(one);
  if (!one.toX || !one.lines.length) return;
  const x = one.toX(event.offsetX);
  const known = one.lines.map((line) => [line, at(line.x, line.line, x), line.lo && at(line.x, line.lo, x), line.hi && at(line.x, line.hi, x)])
    .filter((entry) => entry[1] !== null).sort((a, b) => b[1] - a[1]);
  const named = view.x === "step" ? `step ${show(Math.round(x))}` : `${view.x} ${x.toFixed(2)}`;
  const rows = known.slice(0, 14).map(([line, value, lo, hi]) => {
    const name = one.names[0];
    const range = lo !== undefined && lo !== null ? ` (${show(lo, name)} to ${show(hi, name)})` : "";
    return make("tr", {}, make("td", {}, swatch(line)), make("td", {}, line.label), make("td", {}, show(value, name) + range));
  });
  tip.replaceChildren(named, make("table", {}, rows), known.length > 14 ? `and ${known.length - 14} more` : "");
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
}

function swatch({ colour, dash }) {
  const canvas = make("canvas", { class: "swatch", width: 54, height: 20, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  pen.strokeStyle = colourOf(colour);
  pen.lineWidth = 5;
  pen.setLineDash(DASHES[dash % DASHES.length].map((length) => 2 * length));
  pen.beginPath();
  pen.moveTo(0, 10);
  pen.lineTo(54, 10);
  pen.stroke();
  return canvas;
}

function limits(all, low, high) {
  const inside = (line, values) => values.filter((_, n) => line.x[n] >= low && line.x[n] <= high);
  const main = all.flatMap((line) => inside(line, line.line));
  const raw = all.flatMap((line) => (line.raw ? inside(line, line.y) : line.band ? [...inside(line, line.lo), ...inside(line, line.hi)] : [])).sort((a, b) => a - b);
  const edges = raw.length ? [raw[Math.floor(0.02 * (raw.length - 1))], raw[Math.ceil(0.98 * (raw.length - 1))]] : [];
  return [...main, ...edges].reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
}

function draw(one) {
  const { canvas } = one;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const all = (one.lines = one.made ?? (one.made = lines(one.names)));
  const crowded = all.length > 8 && !view.mean;
  const series = runs.filter((run) => view.on.has(run)).flatMap((run) => one.names.map((name) => run.series[name]).filter(Boolean));
  const bad = series.reduce((sum, each) => sum + each.bad, 0);
  const thin = series.find((each) => each.lo);
  one.caption.textContent = [
    thin ? `${show(thin.n)} values in ${thin.s.length} parts: mean${crowded || view.mean ? "" : " and range"}` : "",
    bad ? `${show(bad)} values are not finite` : "",
  ].filter(Boolean).join("; ");
  canvas.setAttribute("aria-label", `${one.title}: ${all.map((line) => `${line.label} ${show(line.y[line.y.length - 1], one.names[0])}`).slice(0, 10).join(", ")}`);
  const xs = all.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
  let [left, right] = view.range ?? [Math.min(...xs), Math.max(...xs)];
  if (!all.length) { one.toX = null; return; }
  if (left === right) [left, right] = [left - 0.5, right + 0.5];
  let [low, high] = limits(all, left, right);
  if (low > high) [low, high] = [0, 1];
  const log = view.log && low > 0;
  const warp = log ? Math.log10 : (value) => value;
  let [bottom, top] = [warp(low), warp(high)];
  const flat = top - bottom < 1e-6 * Math.max(Math.abs(top), Math.abs(bottom)); // but for rounding
  const pad = (flat ? Math.abs(top) : top - bottom) * 0.05 || 0.5;
  [bottom, top] = [bottom - pad, top + pad];
  const marks = log ? ticks(bottom, top, 4).map((value) => 10 ** value) : ticks(bottom, top, 4);
  const text = (value) => (FRACTION.test(one.names[0]) ? `${Number((100 * value).toPrecision(4))} %` : show(Number(value.toPrecision(log ? 2 : 6))));
  pen.font = "11px system-ui, sans-serif";
  const margin = Math.max(...marks.map((value) => pen.measureText(text(value)).width), 10) + 8;
  const [x0, x1, y0, y1] = [margin, width - 6, height - 20, 6];
  const toPixel = (x) => x0 + ((x - left) / (right - left)) * (x1 - x0);
  const toHeight = (y) => y0 - ((warp(y) - bottom) / (top - bottom)) * (y0 - y1);
  one.toX = (pixel) => left + ((Math.min(x1, Math.max(x0, pixel)) - x0) / (x1 - x0)) * (right - left);
  pen.fillStyle = css("--faint");
  pen.strokeStyle = css("--line");
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const value of marks) {
    pen.fillText(text(value), x0 - 5, toHeight(value));
    stroke(pen, [[x0, toHeight(value)], [x1, toHeight(value)]]);
  }
  pen.textAlign = "center";
  for (const value of ticks(left, right, Math.max(2, Math.min(6, width / 80)))) {
    const label = show(Number(value.toPrecision(6)));
    const half = pen.measureText(label).width / 2;
    pen.fillText(label, Math.min(toPixel(value), width - half), height - 8);
  }
  pen.save();
  pen.beginPath();
  pen.rect(x0, y1, x1 - x0, y0 - y1);
  pen.clip();
  const drop = (y) => (log && y <= 0 ? low : y);
  for (const line of all) {
    pen.strokeStyle = pen.fillStyle = colourOf(line.colour);
    const points = (values) => values.map((y, n) => [toPixel(line.x[n]), toHeight(drop(y))]);
    pen.setLineDash([]);
    if (line.lo && !crowded) {
      pen.globalAlpha = 0.16;
      pen.beginPath();
      [...points(line.hi), ...points(line.lo).reverse()].forEach(([x, y], n) => (n ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.fill();
    }
    if (line.raw && !crowded) {
      pen.globalAlpha = 0.28;
      pen.lineWidth = 1;
      stroke(pen, points(line.y));
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1.7;
    pen.setLineDash(DASHES[line.dash % DASHES.length]);
    stroke(pen, points(line.line));
    pen.setLineDash([]);
    if (line.x.length <= 30) for (const [x, y] of points(line.line)) pen.fillRect(x - 2, y - 2, 4, 4);
  }
  const best = single && runs[0].results.best_step;
  pen.strokeStyle = css("--faint");
  if (best) {
    pen.setLineDash([1, 3]);
    stroke(pen, [[toPixel(xOf(runs[0], best - 1)), y1], [toPixel(xOf(runs[0], best - 1)), y0]]);
    pen.setLineDash([]);
  }
  if (one.pointer) {
    const [x] = one.pointer;
    if (one.drag !== null) {
      pen.globalAlpha = 0.2;
      pen.fillStyle = css("--link");
      pen.fillRect(Math.min(x, one.drag), y1, Math.abs(x - one.drag), y0 - y1);
    } else stroke(pen, [[x, y1], [x, y0]]);
  }
  pen.restore();
}

function stroke(pen, points) {
  pen.beginPath();
  points.forEach(([x, y], n) => (n ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.stroke();
}

function drawAll() {
  for (const one of charts) { one.made = null; draw(one); }
}

// table of the runs ---------------------------------------------------------------------------------------------------

const COLUMNS = [
  ["run", (run) => run.name],
  ["state", (run) => run.state],
  ["test accuracy", (run) => run.results["test/acc"], "acc"],
  ["best validation", (run) => run.best, "monitor"],
  ["seed", (run) => run.seed],
  ["time", (run) => run.seconds, "time"],
  ["images/s", (run) => run.images_per_second],
  ...board.differing.map((key) => [key, (run) => run.config[key]]),
];

function cell(run, [, value, kind]) {
  if (kind === "time") return duration(value(run));
  if (kind === "acc") return accuracy(run);
  if (kind === "monitor") return `${show(value(run), run.monitor)}${run.monitor === "val/acc" ? "" : ` ${run.monitor}`}`;
  const number = value(run);
  return kind === undefined && typeof number === "number" && number >= 1000 ? show(Math.round(number)) : show(number);
}

function accuracy(run) {
  const { "test/acc": acc, "test/acc_low": low, "test/acc_high": high } = run.results;
  if (acc === undefined || acc === null) return "\u2013";
  return low === undefined ? show(acc, "acc") : `${show(acc, "acc")} (${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)})`;
}

function sorted() {
  if (!view.sort) return runs;
  const [column, down] = view.sort;
  const number = (value) => (typeof value === "string" && value.trim() !== "" && !Number.isNaN(Number(value)) ? Number(value) : value);
  const empty = (value) => value === undefined || value === null;
  return [...runs].sort((one, other) => {
    const [a, b] = [one, other].map((run) => number(COLUMNS[column][1](run)));
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return down ? -order : order;
  });
}

function runTable() {
  const header = COLUMNS.map(([name], place) => {
    const now = view.sort && view.sort[0] === place;
    const turn = () => { view.sort = [place, now ? !view.sort[1] : place > 1 && place !== 4]; fill(); };
    return make("th", { "aria-sort": now ? (view.sort[1] ? "descending" : "ascending") : "none" },
      make("button", { class: "plain", onclick: turn }, name, now ? (view.sort[1] ? " \u25bc" : " \u25b2") : ""));
  });
  const body = sorted().map((run) => {
    const change = (event) => { view.on[event.target.checked ? "add" : "delete"](run); drawAll(); };
    const choose = () => { view.run = run; view.at = null; fill(); details.scrollIntoView({ behavior: "smooth" }); };
    const first = make("th", {},
      make("input", { type: "checkbox", checked: view.on.has(run), onchange: change, "aria-label": `draw ${run.name}` }),
      " ", swatch(run), " ", make("button", { class: "plain", onclick: choose, title: "show its details" }, run.name));
    return make("tr", run === view.run ? { class: "chosen" } : {}, first, COLUMNS.slice(1).map((column) =>
      make("td", { title: column[0] === "state" ? run.cause : show(column[1](run)) },
        column[0] === "state" ? make("span", { class: `state ${run.state}` }, run.state) : cell(run, column))));
  });
  return make("div", { class: "wide runs" }, make("table", {}, make("thead", {}, make("tr", {}, header)), make("tbody", {}, body)));
}

// one run -------------------------------------------------------------------------------------------------------------

function facts(run) {
  const { environment: place, results } = run;
  const git = Object.entries(place.git ?? {}).filter(([, found]) => found)
    .map(([name, { commit, changed }]) => `${String(commit).slice(0, 12)} (${name}${changed?.length ? `, ${changed.length} files changed` : ""})`);
  const device = place.gpus?.length ? `${place.gpus.length} x ${place.gpus[0]}` : place.processor && `${place.processor}, ${place.cores} cores, threads: ${place.threads}`;
  const best = results.best_step && `step ${show(results.best_step)}${run.steps_per_epoch > 1 ? `, epoch ${show(Math.round((100 * results.best_step) / run.steps_per_epoch) / 100)}` : ""}, `;
  const found = {
    "test accuracy": results["test/acc"] !== undefined && `${accuracy(run)}${results.test_images ? `, ${show(results.test_images)} images; in brackets its 95 % interval over images` : ""}`,
    [`best ${run.monitor}`]: run.best !== null && `${best || ""}${show(run.best, run.monitor)}`,
    "config": [run.experiment, run.seed !== null && run.seed !== undefined && `seed ${run.seed}`].filter(Boolean).join(", "),
    "started": place.started,
    "time": run.seconds && `${duration(run.seconds)}${run.images_per_second ? `, ${show(Math.round(run.images_per_second))} images/s` : ""}`,
    "last row": run.last,
    "parameters": results.parameters && show(results.parameters),
    "device": device,
    "commit": git.join(", "),
    "command": place.command && make("code", {}, place.command),
  };
  return make("dl", {}, Object.entries(found).filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

const title = (run) => [run.name, " ", make("span", { class: `state ${run.state}` }, run.state)];

function fillDetails() {
  const { run } = view;
  const parts = single ? [] : [make("h2", {}, "Run ", ...title(run)), run.cause && note(run.cause), facts(run)];
  const evaluations = run.evaluations;
  const validations = run.pictures.filter((one) => one.title.startsWith("validation"));
  const titles = [...new Set([...validations, ...evaluations].map((one) => one.title))]
    .sort((a, b) => (a === "test") - (b === "test") || a.localeCompare(b, "en", { numeric: true }));
  if (titles.length) {
    const last = titles.length - (titles.length > 1 && titles[titles.length - 1] === "test" ? 2 : 1);
    const place = titles.includes(view.at) ? titles.indexOf(view.at) : last;
    const slide = (event) => { view.at = titles[event.target.value]; moment.replaceChildren(...shown(view.at)); label.textContent = view.at; };
    const label = make("output", {}, titles[place]);
    const slider = make("input", { type: "range", min: "0", max: String(titles.length - 1), "aria-label": "validation" , oninput: slide });
    slider.value = place;
    const final = evaluations[evaluations.length - 1];
    const shown = (name) => {
      const evaluation = evaluations.find((one) => one.title === name);
      const picture = validations.find((one) => one.title === name);
      return [
        picture ? figure(picture) : "",
        evaluation ? make("div", { class: "row" }, matrix(evaluation), final !== evaluation ? matrix(final) : "", bars(evaluation), histogram(evaluation)) : "",
      ];
    };
    const moment = make("div", {}, ...shown(titles[place]));
    parts.push(make("h2", {}, "Predictions"), titles.length > 1 ? make("p", { class: "moments" }, make("label", {}, slider, " ", label)) : note(titles[0]), moment);
  }
  const others = run.pictures.filter((one) => !validations.includes(one));
  if (others.length) parts.push(make("h2", {}, "Figures of the test"), make("div", { class: "row" }, others.map(figure)));
  if (run.left_out) parts.push(note(`${run.left_out} pictures are left out of this page: lightning board with this run alone shows more.`));
  if (run.errors.length > 1) parts.push(fold("Misclassified test images of highest loss", table(run.errors[0], run.errors.slice(1))));
  const changed = new Set(single ? [] : board.differing);
  const options = Object.entries(run.config).map(([key, value]) =>
    make("tr", changed.has(key) ? { class: "differs" } : {}, make("th", {}, key), make("td", {}, value)));
  if (options.length) parts.push(fold("Config", changed.size ? note("Marked: options in which the runs differ.") : "", make("div", { class: "wide" }, make("table", {}, make("tbody", {}, options)))));
  if (Object.keys(run.environment).length) parts.push(fold("Environment", make("pre", {}, JSON.stringify(run.environment, null, 2))));
  if (run.warnings.length) parts.push(fold(`Warnings (the last ${run.warnings.length} lines)`, make("pre", {}, run.warnings.join("\n"))));
  details.replaceChildren(...parts.filter(Boolean));
}

const fold = (name, ...content) => make("details", {}, make("summary", {}, name), ...content);
const figure = (picture) => make("figure", { class: "picture" }, make("img", { src: picture.url, alt: picture.title }), make("figcaption", {}, picture.title));

/** Confusion matrix: rows are true classes, shades are shares of a row, errors have a colour of their own. */
function matrix({ title: name, classes, confusion, class_images: images, cut }) {
  const count = classes.length;
  const named = count <= 20;
  const size = Math.max(1, Math.floor(300 / count));
  const margin = named ? Math.min(80, 12 + 7 * Math.max(...classes.map((text) => String(text).length))) : 4;
  const side = size * count;
  const scale = devicePixelRatio || 1;
  const canvas = make("canvas", { width: (side + margin) * scale, height: (side + margin) * scale, role: "img", "aria-label": `confusion matrix of ${name}` });
  canvas.style.width = `${side + margin}px`;
  const read = make("figcaption", {}, "\u00a0");
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.strokeStyle = css("--line");
  pen.strokeRect(margin, 0, side, side);
  for (const [truth, guess, number] of confusion) {
    pen.globalAlpha = 0.12 + 0.88 * Math.sqrt(number / (images[truth] || number));
    pen.fillStyle = colourOf(truth === guess ? 0 : 1);
    pen.fillRect(margin + guess * size, truth * size, size, size);
    if (named && size >= 22) {
      pen.globalAlpha = 1;
      pen.fillStyle = css("--ink");
      pen.font = "10px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillText(String(number), margin + (guess + 0.5) * size, (truth + 0.5) * size + 3);
    }
  }
  pen.globalAlpha = 1;
  if (named) {
    pen.font = `${Math.min(11, size)}px system-ui, sans-serif`;
    pen.fillStyle = css("--faint");
    classes.forEach((text, n) => {
      pen.textAlign = "right";
      pen.fillText(String(text).slice(0, 12), margin - 4, (n + 0.5) * size + 4);
      pen.save();
      pen.translate(margin + (n + 0.5) * size + 4, side + 6);
      pen.rotate(-Math.PI / 2);
      pen.fillText(String(text).slice(0, 12), 0, 0);
      pen.restore();
    });
  }
  const cells = new Map(confusion.map(([truth, guess, number]) => [truth * count + guess, number]));
  canvas.addEventListener("pointermove", (event) => {
    const shrunk = canvas.clientWidth / (side + margin);
    const [guess, truth] = [Math.floor((event.offsetX / shrunk - margin) / size), Math.floor(event.offsetY / shrunk / size)];
    const inside = guess >= 0 && truth >= 0 && guess < count && truth < count;
    read.textContent = inside ? `${show(cells.get(truth * count + guess) ?? 0)} of ${show(images[truth])} images of ${classes[truth]} are taken for ${classes[guess]}` : "\u00a0";
  });
  return make("figure", { class: "matrix" }, make("h3", {}, `Confusion matrix, ${name}`), canvas, read,
    note(`Rows: true class; columns: prediction.${cut ? ` The ${show(confusion.length)} largest cells.` : ""}`));
}

function bars({ classes, class_accuracy: accuracies, class_images: images }) {
  const all = classes.map((name, n) => [name, accuracies[n], images[n]]).filter(([, value]) => value !== null);
  const worst = all.length > 30 ? [...all].sort((a, b) => a[1] - b[1]).slice(0, 30) : all;
  return make("div", { class: "bars" }, make("h3", {}, `Accuracy of classes${all.length > 30 ? `, the lowest 30 of ${all.length}` : ""}`),
    worst.map(([name, value, number]) => {
      const bar = make("i");
      bar.style.width = `${100 * value}%`;
      return make("div", { title: `${show(number)} images` }, make("span", {}, String(name)), make("span", {}, bar), make("span", {}, show(value, "acc")));
    }));
}

function histogram({ confidence }) {
  if (!confidence) return "";
  const { edges, right, wrong } = confidence;
  const most = Math.max(...right.map((number, n) => number + wrong[n]), 1);
  const columns = right.map((number, n) => {
    const parts = [make("b"), make("i")];
    [wrong[n], number].forEach((value, place) => { parts[place].style.height = `${(100 * value) / most}%`; });
    return make("div", { title: `confidence ${edges[n]} to ${edges[n + 1]}: ${show(number)} right, ${show(wrong[n])} wrong` }, parts);
  });
  return make("div", {}, make("h3", {}, "Confidence of the predictions"), make("div", { class: "histogram" }, columns),
    make("div", { class: "scale note" }, make("span", {}, "0"), make("span", {}, `largest bin: ${show(most)} images`), make("span", {}, "1")),
    note(make("span", { class: "key" }), " right ", make("span", { class: "key wrong" }), " wrong"));
}

// the page ------------------------------------------------------------------------------------------------------------

const tip = make("div", { id: "tip", hidden: true });
const tableRoom = make("div");
const details = make("section");
const reset = make("button", { hidden: true, onclick: () => zoom(null) }, "reset zoom");

function fill() {
  if (!single) tableRoom.replaceChildren(runTable());
  fillDetails();
}

function start() {
  const running = runs.filter((run) => run.state === "running");
  const check = (name, text) => make("label", {}, make("input", { type: "checkbox", onchange: (event) => { view[name] = event.target.checked; drawAll(); } }), text);
  const smoothing = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", oninput: (event) => { view.smooth = Number(event.target.value); drawAll(); } });
  smoothing.value = view.smooth;
  const axis = make("select", { onchange: (event) => { view.x = event.target.value; zoom(null); } }, ["step", "epoch", "minute"].map((name) => make("option", {}, name)));
  const all = (on) => () => { view.on = new Set(on ? runs : []); fill(); drawAll(); };
  const seeds = groups.length < runs.length;
  const controls = make("div", { class: "controls" },
    make("label", {}, "x axis", axis), make("label", {}, "smoothing", smoothing), check("log", "logarithmic"),
    seeds ? check("mean", "mean and standard deviation of seeds") : "",
    single ? "" : make("span", {}, make("button", { onclick: all(true) }, "all runs"), " ", make("button", { onclick: all(false) }, "none")),
    reset, make("span", { class: "note" }, "drag in a chart to zoom, double click to reset"));
  const sections = layout().map(([section, own]) => make("section", {}, make("h2", {}, section), make("div", { class: "charts" }, own.map(([name, names]) => chart(name, names)))));
  document.getElementById("board").replaceChildren(
    make("h1", {}, ...(single ? title(runs[0]) : [board.name, ` \u2013 ${runs.length} runs`])),
    single && runs[0].cause ? note(runs[0].cause) : "",
    single ? facts(runs[0]) : "",
    note(running.length ? `${running.length === 1 ? `${running[0].name} was` : `${running.length} runs were`} running at ${board.made}; to refresh: ` : `Made at ${board.made} by `, make("code", {}, board.command)),
    tableRoom,
    sections.length ? controls : note("No metric has been logged yet."),
    single && sections.length ? legend() : "",
    ...sections, details, tip);
  fill();
  drawAll();
  new ResizeObserver(() => charts.forEach(draw)).observe(document.getElementById("board"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { fill(); drawAll(); });
}

function legend() {
  const best = runs[0].results.best_step;
  return note("A faint line is the values themselves, a full one their smoothed mean", best ? "; the dotted line marks the best checkpoint." : ".");
}

start();
