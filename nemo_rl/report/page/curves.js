// Curves of the metrics. Drag zooms all of them to the same steps, a double click shows everything again.

const MAIN = [
  ["Reward", "train/reward", "validation/reward"],
  ["Accuracy", "validation/accuracy", "train/accuracy"],
  ["Loss", "train/loss", "validation/val_loss"],
  ["Length of answers, tokens", "train/mean_gen_tokens_per_sample", "train/max_gen_tokens_per_sample", "validation/avg_length"],
  ["KL from the reference, per token", "train/kl_penalty", "train/reverse_kl", "train/forward_kl"],
  ["Entropy, per token", "train/approx_entropy", "train/student_entropy", "train/teacher_entropy"],
  ["Disagreement of training and generation", "train/token_mult_prob_error"],
  ["Gradient norm", "train/grad_norm", "train/value/grad_norm"],
  ["Learning rate", "train/lr", "train/value/lr"],
  ["Groups: share by rewards", "train/baseline_reward/pct_mixed", "train/baseline_reward/pct_0", "train/baseline_reward/pct_1"],
  ["Margin of rewards", "train/rewards_margin_mean", "train/rewards_chosen_mean", "train/rewards_rejected_mean"],
  ["Value model", "train/value/loss", "train/value/explained_variance"],
  ["Clipped tokens, share", "train/clip_fraction"],
  ["Truncated answers, share", "train/truncation_rate"],
  ["Answers that end in a loop, share", "train/repetition_loop_rate"],
  ["Age of weights, updates", "train/weight_version_lag/mean", "train/weight_version_lag/max"],
  ["Seconds of a step", "timing/train/total_step_time"],
  ["Tokens per second", "performance/tokens_per_sec"],
];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const curves = { smooth: 0, log: false, outliers: false, filter: "", charts: new Set() };

TABS.push({ id: "curves", title: "Curves", render: renderCurves });

function metricNames() {
  const names = new Set();
  for (const run of shownRuns()) for (const name of Object.keys(run.metrics)) names.add(name);
  return [...names].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

function renderCurves(main) {
  curves.charts.clear();
  const body = el("div");
  const again = () => { for (const chart of curves.charts) chart.draw(); };
  main.append(el("div", { class: "bar" },
    el("input", { type: "search", placeholder: "name of a metric", value: curves.filter, "aria-label": "filter", oninput: (event) => { curves.filter = event.target.value; list(); } }),
    el("label", {}, "smooth", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: curves.smooth, oninput: (event) => { curves.smooth = Number(event.target.value); again(); } })),
    el("label", {}, el("input", { type: "checkbox", checked: curves.log, onchange: (event) => { curves.log = event.target.checked; again(); } }), "logarithmic"),
    el("label", {}, el("input", { type: "checkbox", checked: curves.outliers, onchange: (event) => { curves.outliers = event.target.checked; again(); } }), "without outliers"),
    el("button", { class: "plain", id: "unzoom", text: "all steps", onclick: () => { state.view = null; again(); } }),
    el("span", { class: "soft", text: "drag: zoom to these steps; double click: all steps" })), body);
  const list = () => {
    curves.charts.clear();
    const names = metricNames(), wanted = curves.filter.trim().toLowerCase();
    if (wanted) {
      const found = names.filter((name) => name.toLowerCase().includes(wanted)).slice(0, 200);
      body.replaceChildren(found.length ? el("div", { class: "grid" }, found.map((name) => chart(name, [name]))) : el("div", { class: "empty", text: `no metric has "${curves.filter}" in its name` }));
      return;
    }
    const main = MAIN.map(([title, ...of]) => [title, of.filter((name) => names.includes(name))]).filter(([, of]) => of.length);
    const groups = new Map();
    for (const name of names) {
      const cut = name.lastIndexOf("/");
      const group = cut < 0 ? "" : name.slice(0, cut);
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    body.replaceChildren(el("div", { class: "grid", id: "main-curves" }, main.map(([title, of]) => chart(title, of))),
      el("h2", { text: "All metrics" }),
      ...[...groups].map(([group, of]) => {
        const details = el("details", {}, el("summary", {}, group || "other", el("span", { class: "num", text: ` ${of.length}` })));
        details.addEventListener("toggle", () => {
          if (details.open && details.children.length === 1) details.append(el("div", { class: "grid" }, of.map((name) => chart(name, [name]))));
        });
        return details;
      }));
  };
  list();
}

/** A card with the curves of several metrics of all shown runs. It is drawn once it is on the screen. */
function chart(title, names) {
  const plot = svg("svg", { height: 190 });
  const card = el("div", { class: "card" }, el("div", { class: "head" }, el("b", { text: title, title: names.join("\n") }),
    el("button", { title: "larger", text: "⤢", onclick: () => { card.classList.toggle("wide"); plot.setAttribute("height", card.classList.contains("wide") ? 420 : 190); own.draw(); } })));
  const series = [];
  for (const run of shownRuns()) for (const [number, name] of names.entries()) {
    if (!(name in run.metrics)) continue;
    const points = [];
    run.metrics[name].forEach((value, i) => { if (typeof value === "number") points.push([run.steps[i], value]); });
    const broken = run.metrics[name].flatMap((value, i) => (typeof value === "string" ? [run.steps[i]] : []));
    series.push({ run, name, points, broken, dash: DASHES[number % DASHES.length], colour: shownRuns().length > 1 ? run.colour : `var(--c${number % COLOURS})` });
  }
  if (names.length > 1) card.append(el("div", { class: "legend" }, [...new Set(series.map((line) => line.name))].map((name) => {
    const line = series.find((one) => one.name === name);
    const mark = svg("svg", { width: 20, height: 8, style: { width: "20px" } }, svg("line", { x1: 0, x2: 20, y1: 4, y2: 4, "stroke-width": 2, "stroke-dasharray": shownRuns().length > 1 ? line.dash : "", style: { stroke: shownRuns().length > 1 ? "var(--soft)" : line.colour } }));
    return el("span", {}, mark, name);
  })));
  card.append(plot);
  const own = { seen: false, draw: () => { if (own.seen) drawChart(plot, series); } };
  curves.charts.add(own);
  watcher.observe(card);
  card.own = own;
  listen(plot, series);
  return card;
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting && entry.target.own && !entry.target.own.seen) { entry.target.own.seen = true; entry.target.own.draw(); }
}, { rootMargin: "300px" });
addEventListener("resize", () => { for (const chart of curves.charts) chart.draw(); });

function smoothed(points) {
  if (!curves.smooth) return points;
  let mean = 0, weight = 0;
  return points.map(([x, y]) => {
    mean = curves.smooth * mean + (1 - curves.smooth) * y;
    weight = curves.smooth * weight + (1 - curves.smooth);
    return [x, mean / weight];
  });
}

/** At most four points for each pixel: first, smallest, largest, last. */
function thinned(points, x, width) {
  if (points.length <= 4 * width) return points;
  const kept = [];
  let start = 0;
  for (let i = 1; i <= points.length; i++) {
    if (i < points.length && Math.floor(x(points[i][0])) === Math.floor(x(points[start][0]))) continue;
    const part = points.slice(start, i);
    let low = part[0], high = part[0];
    for (const point of part) { if (point[1] < low[1]) low = point; if (point[1] > high[1]) high = point; }
    kept.push(...new Set([part[0], low[0] < high[0] ? low : high, low[0] < high[0] ? high : low, part[part.length - 1]]));
    start = i;
  }
  return kept;
}

/** The mean of the points of every four pixels, at the mean of their steps. */
function averaged(points, x) {
  const parts = new Map();
  for (const [step, value] of points) {
    const at = Math.floor(x(step) / 4), [count, steps, sum] = parts.get(at) || [0, 0, 0];
    parts.set(at, [count + 1, steps + step, sum + value]);
  }
  return [...parts.values()].map(([count, steps, sum]) => [steps / count, sum / count]);
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough) || rough;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** 1, 2 and 5 times powers of ten between 10^low and 10^high; over many decades powers alone, over few linear ticks. */
function logTicks(low, high) {
  if (high - low < 0.6) return ticks(10 ** low, 10 ** high, 4);
  const every = Math.ceil((high - low) / 6), found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const m of high - low > 3 ? [1] : [1, 2, 5]) {
      const at = power + Math.log10(m);
      if (at >= low && at <= high && power % every === 0) found.push(Number(`${m}e${power}`));
    }
  }
  return found;
}

const EDGE = { left: 52, right: 10, top: 8, bottom: 20 };

/** The scales of a chart: pixels of a step and of a value, and back. */
function scales(plot, series) {
  const width = Math.max(160, plot.clientWidth || 360), height = Number(plot.getAttribute("height"));
  const all = series.flatMap((line) => [...line.points.map(([x]) => x), ...line.broken]);
  if (!all.length) return null;
  let first = Infinity, last = -Infinity;
  for (const x of all) { if (x < first) first = x; if (x > last) last = x; }
  let [from, to] = state.view || [first, last];
  if (from === to) { from -= 0.5; to += 0.5; }
  if (!state.view) { const margin = (to - from) * 0.015; from -= margin; to += margin; }  // points at the ends stay whole
  const inView = series.map((line) => smoothed(line.points).filter(([x]) => x >= from && x <= to));
  let values = inView.flat().map(([, y]) => y);
  const log = curves.log && values.length > 0 && values.every((y) => y > 0);
  if (curves.outliers && values.length > 20) {
    const sorted = [...values].sort((a, b) => a - b), at = (q) => sorted[Math.floor(q * (sorted.length - 1))];
    const margin = (at(0.95) - at(0.05)) * 0.5;
    values = values.filter((y) => y >= at(0.05) - margin && y <= at(0.95) + margin);
  }
  let low = Infinity, high = -Infinity;
  for (const y of values) { if (y < low) low = y; if (y > high) high = y; }
  if (!values.length) { low = 0; high = 1; }
  if (log) { low = Math.log10(low); high = Math.log10(high); }
  const room = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.05 || 1;
  low -= room; high += room;
  const w = width - EDGE.left - EDGE.right, h = height - EDGE.top - EDGE.bottom;
  return {
    width, height, from, to, low, high, log, inView,
    x: (step) => EDGE.left + ((step - from) / (to - from)) * w,
    y: (value) => EDGE.top + (1 - ((log ? Math.log10(value) : value) - low) / (high - low)) * h,
    step: (pixel) => from + ((pixel - EDGE.left) / w) * (to - from),
  };
}

function drawChart(plot, series) {
  const scale = scales(plot, series);
  if (scale === null) { plot.replaceChildren(svg("text", { x: 10, y: 24, text: "no finite value" })); return; }
  const { width, height, x, y } = scale;
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const parts = [];
  const values = scale.log ? logTicks(scale.low, scale.high) : ticks(scale.low, scale.high, 4);
  for (const value of values) {
    parts.push(svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      svg("text", { x: EDGE.left - 6, y: y(value) + 3.5, "text-anchor": "end", text: scale.log ? format(value) : tickText(value, values) }));
  }
  for (const step of ticks(scale.from, scale.to, Math.max(3, width / 90)).filter(Number.isInteger)) {
    const text = step.toLocaleString("en"), isCut = x(step) + 3.5 * text.length > width;
    parts.push(svg("text", { x: isCut ? width : x(step), y: height - 5, "text-anchor": isCut ? "end" : "middle", text }));
  }
  const clip = `clip${drawChart.next = (drawChart.next || 0) + 1}`;
  parts.push(svg("clipPath", { id: clip }, svg("rect", { x: EDGE.left, y: EDGE.top - 2, width: width - EDGE.left - EDGE.right, height: height - EDGE.top - EDGE.bottom + 4 })));
  const lines = svg("g", { "clip-path": `url(#${clip})` });
  const path = (points) => thinned(points, x, width).map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  series.forEach((line) => {
    const style = { stroke: line.colour };
    const dash = shownRuns().length > 1 ? line.dash : "";
    const points = smoothed(line.points).filter(([, value]) => !scale.log || value > 0);
    const visible = points.filter(([step]) => step >= scale.from && step <= scale.to);
    const isDense = !curves.smooth && visible.length > 2 * width;  // a noisy curve would be a block of one colour
    if (curves.smooth || isDense) lines.append(svg("path", { class: "curve faint", d: path(line.points), style }));
    lines.append(svg("path", { class: "curve", d: path(isDense ? averaged(points, x) : points), style, "stroke-dasharray": dash }));
    if (visible.length <= 40) for (const [step, value] of visible) lines.append(svg("circle", { cx: x(step), cy: y(value), r: 2.2, style: { fill: line.colour } }));
    for (const step of line.broken) lines.append(svg("text", { x: x(step), y: EDGE.top + 10, "text-anchor": "middle", text: "✕", style: { fill: "var(--bad)" } }));
  });
  plot.replaceChildren(...parts, lines);
}

function tickText(value, all) {
  const step = all.length > 1 ? Math.abs(all[1] - all[0]) : Math.abs(value);
  const size = Math.max(...all.map(Math.abs));
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value === 0 ? "0" : value.toExponential(1);
  let digits = 0;  // as many as the distance of two ticks has
  while (digits < 8 && Math.abs(Number(step.toFixed(digits)) - step) > step * 1e-6) digits++;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function listen(plot, series) {
  let began = null;
  const pixel = (event) => event.clientX - plot.getBoundingClientRect().left;
  plot.addEventListener("pointerdown", (event) => { began = pixel(event); plot.setPointerCapture(event.pointerId); });
  plot.addEventListener("pointermove", (event) => {
    const scale = scales(plot, series);
    if (scale === null) return;
    for (const old of plot.querySelectorAll(".cursor, .brush")) old.remove();
    const at = pixel(event);
    if (began !== null && Math.abs(at - began) > 4) {
      plot.append(svg("rect", { class: "brush", x: Math.min(at, began), width: Math.abs(at - began), y: EDGE.top, height: scale.height - EDGE.top - EDGE.bottom }));
    }
    const wanted = scale.step(at);
    let near = null;
    for (const points of scale.inView) for (const [step] of points) if (near === null || Math.abs(step - wanted) < Math.abs(near - wanted)) near = step;
    if (near === null) return;
    plot.append(svg("line", { class: "cursor", x1: scale.x(near), x2: scale.x(near), y1: EDGE.top, y2: scale.height - EDGE.bottom }));
    const rows = series.flatMap((line) => {
      const found = line.points.find(([step]) => step === near);
      const label = shownRuns().length > 1 ? `${line.run.name} ${series.some((o) => o.name !== line.name) ? line.name : ""}` : line.name;
      return found ? [el("div", { class: "row" }, swatch(line.colour), label, el("b", { text: format(found[1]) }))] : [];
    });
    showTip(event, el("div", { class: "soft", text: `step ${near}` }), rows);
  });
  plot.addEventListener("pointerup", (event) => {
    const scale = scales(plot, series), at = pixel(event);
    if (scale !== null && began !== null && Math.abs(at - began) > 6) {
      const [from, to] = [scale.step(Math.min(at, began)), scale.step(Math.max(at, began))];
      if (to - from >= 0.5) state.view = [from, to];
      for (const chart of curves.charts) chart.draw();
    }
    began = null;
  });
  plot.addEventListener("pointerleave", () => { hideTip(); for (const old of plot.querySelectorAll(".cursor, .brush")) old.remove(); });
  plot.addEventListener("dblclick", () => { state.view = null; for (const chart of curves.charts) chart.draw(); });
}
