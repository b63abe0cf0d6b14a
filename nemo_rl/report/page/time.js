// Where the time went: phases by step, and a timeline of the controller and every worker with what waited for what.

TABS.push({ id: "time", title: "Time", render: renderTime, used: () => RUNS.some((run) => phaseNames(run).length || run.timeline.length) });

const timing = { run: 0, view: null };

function phaseNames(run) {
  return Object.keys(run.metrics).filter((name) => name.startsWith("timing/train/") && !name.slice(13).includes("/") && !name.includes("per_sec") && !name.endsWith("total_step_time"));
}

function phaseColour(name) {
  if (!phaseColour.known.has(name)) phaseColour.known.set(name, phaseColour.known.size);
  const number = phaseColour.known.get(name);
  return number < COLOURS ? `var(--c${number})` : `hsl(${(number * 67) % 360} 45% 55%)`;
}
phaseColour.known = new Map(["generation", "policy_training", "weight_sync", "policy_and_reference_logprobs", "validation", "checkpointing", "data_processing", "wait_for_rollouts"].map((name, i) => [name, i]));

function runPicker(holder, redraw) {
  return RUNS.length < 2 ? null : el("label", {}, "run", el("select", { onchange: (event) => { holder.run = Number(event.target.value); redraw(); } },
    RUNS.map((run) => el("option", { value: run.index, selected: run.index === holder.run, text: run.name }))));
}

function renderTime(main) {
  const body = el("div");
  const draw = () => { timing.view = null; drawTime(body, RUNS[timing.run]); };
  main.append(el("div", { class: "bar" }, runPicker(timing, draw)), body);
  draw();
}

function drawTime(body, run) {
  const names = phaseNames(run);
  const sum = (values) => values.reduce((total, value) => total + (typeof value === "number" ? value : 0), 0);
  const totals = names.map((name) => [name.slice(13), run.metrics[name].filter((value) => typeof value === "number")]).sort((a, b) => sum(b[1]) - sum(a[1]));
  const whole = totals.reduce((total, [, values]) => total + sum(values), 0);
  body.replaceChildren(el("h2", { text: "Phases of a step" }));
  body.append(el("div", { class: "bar legendbar" }, totals.filter(([, values]) => sum(values) > whole / 500).map(([name]) => el("span", { class: "soft" }, swatch(phaseColour(name)), ` ${name}`))));
  const bars = svg("svg", { height: 200, class: "bars" });
  const note = el("p", { class: "note", hidden: true, text: "▲ marks a bar that is longer than the axis; its tooltip has the seconds." });
  body.append(el("div", { class: "card" }, bars), note);
  requestAnimationFrame(() => { note.hidden = !drawBars(bars, run, totals.map(([name]) => name)); });
  // Of runs on GPUs whose rates are known: what a model of the step and the hardware itself would take.
  const told = (kind, name) => (run.metrics[`performance/${kind}_s/${name}`] || []).filter((value) => typeof value === "number");
  const models = ["predicted", "ideal"].filter((kind) => totals.some(([name]) => told(kind, name).length)).map((kind) => (
    { title: kind, n: true, key: ([name]) => median(told(kind, name)), of: ([name]) => (told(kind, name).length ? span(median(told(kind, name))) : "") }));
  body.append(el("h3", { text: "Seconds" }), table([
    { title: "phase", of: ([name]) => el("span", {}, swatch(phaseColour(name)), ` ${name}`), key: ([name]) => name },
    { title: "in all", n: true, key: ([, values]) => sum(values), of: ([, values]) => span(sum(values)) },
    { title: "share", n: true, key: ([, values]) => sum(values), of: ([, values]) => `${((100 * sum(values)) / whole).toFixed(1)} %` },
    { title: "median", n: true, key: ([, values]) => median(values), of: ([, values]) => span(median(values)) },
    ...models,
    { title: "largest", n: true, key: ([, values]) => largest(values), of: ([, values]) => span(largest(values)) },
    { title: "steps", n: true, of: ([, values]) => values.length },
  ], totals));
  if (!run.timeline.length) { body.append(el("div", { class: "empty", text: "This run kept no times of its workers (logger.report.enabled)." })); return; }
  const select = el("select", {}, run.timeline.map((block, i) => el("option", { value: i, selected: i === run.timeline.length - 1, text: `steps ${block.from} to ${block.to}` })));
  const place = el("div");
  select.addEventListener("change", () => showTimeline(place, run, run.timeline[Number(select.value)]));
  body.append(el("h2", { text: "Timeline" }), el("div", { class: "bar" }, run.timeline.length > 1 ? el("label", {}, "part", select) : null,
    el("span", { class: "soft", text: "drag: zoom; double click: everything; wheel with Ctrl: closer" })), place);
  showTimeline(place, run, run.timeline[run.timeline.length - 1]);
}

function median(values) { const sorted = [...values].sort((a, b) => a - b); return sorted.length ? sorted[Math.floor(sorted.length / 2)] : 0; }

/** Stacked bars; several steps share a bar if there are more steps than pixels. Says whether the axis ends below one. */
function drawBars(plot, run, names) {
  const width = Math.max(300, plot.clientWidth || 900), height = 200, left = 52, bottom = 20, top = 8;
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const kept = run.steps.map((step, i) => [step, i]).filter(([, i]) => names.some((name) => typeof run.metrics[`timing/train/${name}`][i] === "number"));
  if (!kept.length) return false;
  const per = Math.max(1, Math.ceil(kept.length / ((width - left) / 4)));
  const bars = [];
  for (let i = 0; i < kept.length; i += per) {
    const part = kept.slice(i, i + per);
    bars.push({ step: part[0][0], parts: names.map((name) => part.reduce((sum, [, k]) => sum + (run.metrics[`timing/train/${name}`][k] || 0), 0) / part.length) });
  }
  const total = (bar) => bar.parts.reduce((a, b) => a + b, 0);
  const sorted = bars.map(total).sort((a, b) => a - b);
  const high = Math.min(sorted[sorted.length - 1], 3 * sorted[Math.floor(sorted.length * 0.9)]) * 1.05 || 1;
  const y = (seconds) => top + (1 - Math.min(seconds, high) / high) * (height - top - bottom);
  const nodes = [];
  for (const value of ticks(0, high, 4)) nodes.push(svg("line", { class: "axis", x1: left, x2: width, y1: y(value), y2: y(value) }), svg("text", { x: left - 6, y: y(value) + 3.5, "text-anchor": "end", text: `${format(value)} s` }));
  const w = (width - left) / bars.length;
  bars.forEach((bar, i) => {
    let below = 0;
    const column = svg("g", {});
    names.forEach((name, k) => {
      if (!bar.parts[k]) return;
      const from = y(below), to = y(below + bar.parts[k]);
      column.append(svg("rect", { x: left + i * w + 0.5, width: Math.max(1, w - 1), y: to, height: Math.max(0, from - to), style: { fill: phaseColour(name) } }));
      below += bar.parts[k];
    });
    if (total(bar) > high) column.append(svg("text", { class: "cut", x: left + (i + 0.5) * w, y: top + 2, "text-anchor": "middle", text: "▲" }));
    column.addEventListener("pointermove", (event) => showTip(event, el("div", { class: "soft", text: per > 1 ? `steps ${bar.step} to ${bar.step + per - 1}, mean` : `step ${bar.step}` }),
      names.map((name, k) => [name, bar.parts[k]]).filter(([, s]) => s > 0.0005).sort((a, b) => b[1] - a[1]).map(([name, s]) => el("div", { class: "row" }, swatch(phaseColour(name)), name, el("b", { text: span(s) }))), el("div", { class: "row" }, "in all", el("b", { text: span(total(bar)) }))));
    column.addEventListener("pointerleave", hideTip);
    nodes.push(column);
  });
  for (const step of ticks(bars[0].step, bars[bars.length - 1].step + 0.5, 8).filter(Number.isInteger)) {
    const i = bars.findLastIndex((bar) => bar.step <= step);  // the bar that has this step
    nodes.push(svg("text", { x: left + (i + 0.5) * w, y: height - 5, "text-anchor": "middle", text: step.toLocaleString("en") }));
  }
  plot.replaceChildren(...nodes);
  return bars.some((bar) => total(bar) > high);
}

// -- the timeline

// What the calls of an engine are; while some of them run, the engine itself waits or does what it notes by itself.
const CALLS = { start_weight_update: "refit", receive_bucket: "refit", finish_weight_update: "refit", submit: null, drain: null, check_health: null };

async function showTimeline(place, run, block) {
  place.replaceChildren(el("div", { class: "empty", text: "loading" }));
  let lines;
  try { lines = await loadData(run, block.name); } catch (error) { place.replaceChildren(problem(error)); return; }
  const lanes = new Map([["controller", []]]);
  for (const line of lines) {
    lanes.get("controller").push(...line.phases);
    for (const [worker, spans] of Object.entries(line.workers)) {
      for (const [what, start, end] of spans) {
        const name = what in CALLS ? CALLS[what] : what, lane = what.startsWith("environment ") ? what : worker;
        if (name === null) continue;
        if (!lanes.has(lane)) lanes.set(lane, []);
        lanes.get(lane).push([name, start, end]);
      }
    }
  }
  let first = Infinity, last = -Infinity;
  for (const spans of lanes.values()) for (const [, start, end] of spans) { if (start < first) first = start; if (end > last) last = end; }
  const phases = lanes.get("controller");
  // A few steps at first: more are a blur.
  const usual = median(RUNS[run.index].metrics["timing/train/total_step_time"]?.filter((s) => typeof s === "number") || [1]);
  timing.view = [Math.max(first, last - Math.max(4 * usual, 1)), last];
  const plot = svg("svg", { class: "lanes" });
  const waits = el("div");
  const draw = () => { drawLanes(plot, lanes, first); drawWaits(waits, lanes); };
  place.replaceChildren(el("div", { class: "card" }, plot), waits);
  if (!phases.length) place.prepend(el("div", { class: "note", text: "no phase of the controller in this part" }));
  listenLanes(plot, lanes, [first, last], draw);
  draw();
}

const LANE = { height: 22, left: 185, top: 20 };

function laneOrder(lanes) {
  const rank = (name) => (name === "controller" ? 0 : name.startsWith("policy") ? 1 : name.startsWith("environment") ? 4 : name.startsWith("rollout") ? 3 : 2);
  return [...lanes.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
}

function drawLanes(plot, lanes, origin) {
  const names = laneOrder(lanes), [from, to] = timing.view;
  const width = Math.max(400, plot.clientWidth || 1000), height = LANE.top + names.length * LANE.height + 4;
  plot.setAttribute("height", height);
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const x = (time) => LANE.left + ((time - from) / (to - from)) * (width - LANE.left - 8);
  const nodes = [];
  for (const at of ticks(from - origin, to - origin, Math.max(3, width / 130))) {
    nodes.push(svg("line", { class: "axis", x1: x(at + origin), x2: x(at + origin), y1: LANE.top - 4, y2: height }), svg("text", { x: x(at + origin), y: 11, "text-anchor": "middle", text: `${format(at)} s` }));
  }
  names.forEach((name, i) => {
    const y = LANE.top + i * LANE.height;
    nodes.push(svg("text", { x: LANE.left - 8, y: y + 14, "text-anchor": "end", class: "lane", text: name.length > 28 ? `${name.slice(0, 27)}…` : name }));
    let right = -1;
    for (const [what, start, end] of lanes.get(name).filter(([, s, e]) => e >= from && s <= to).sort((a, b) => a[1] - b[1] || b[2] - a[2])) {
      const a = Math.max(x(start), LANE.left), b = Math.min(x(end), width - 8);
      if (b - a < 0.4 && a < right) continue;  // too small to be seen beside the one before
      right = Math.max(right, b);
      const bar = svg("rect", { x: a, y: y + 2, width: Math.max(0.7, b - a), height: LANE.height - 5, rx: 2, style: { fill: phaseColour(what), opacity: name === "controller" ? 1 : 0.8 } });
      bar.addEventListener("pointermove", (event) => showTip(event, `${name}: ${what}`, el("div", { class: "soft", text: `${span(end - start)}, from ${(start - origin).toFixed(3)} s on` })));
      bar.addEventListener("pointerleave", hideTip);
      nodes.push(bar);
      if (b - a > what.length * 6.2 + 8) nodes.push(svg("text", { x: a + 5, y: y + 14, class: "inside", text: what }));
    }
  });
  plot.replaceChildren();
  for (const node of nodes) plot.append(node);
}

function listenLanes(plot, lanes, whole, draw) {
  let began = null;
  const width = () => Math.max(400, plot.clientWidth || 1000) - LANE.left - 8;
  const time = (event) => timing.view[0] + ((event.clientX - plot.getBoundingClientRect().left - LANE.left) / width()) * (timing.view[1] - timing.view[0]);
  plot.addEventListener("pointerdown", (event) => { began = [time(event), event.clientX]; });
  plot.addEventListener("pointerup", (event) => {
    if (began && Math.abs(event.clientX - began[1]) > 6) { timing.view = [Math.min(began[0], time(event)), Math.max(began[0], time(event))]; draw(); }
    began = null;
  });
  plot.addEventListener("dblclick", () => { timing.view = [...whole]; draw(); });
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const at = time(event), factor = event.deltaY > 0 ? 1.3 : 1 / 1.3;
    timing.view = timing.view.map((edge) => at + (edge - at) * factor);
    draw();
  }, { passive: false });
}

/** Seconds of `spans` inside [from, to], overlaps counted once. */
function covered(spans, from, to) {
  const inside = spans.map(([, s, e]) => [Math.max(s, from), Math.min(e, to)]).filter(([s, e]) => e > s).sort((a, b) => a[0] - b[0]);
  let total = 0, end = -Infinity;
  for (const [s, e] of inside) { total += Math.max(0, e - Math.max(s, end)); end = Math.max(end, e); }
  return total;
}

/** For the shown stretch: how long each worker was idle, and in which phase of the controller; which worker ended last. */
function drawWaits(place, lanes) {
  const [from, to] = timing.view;
  const phases = lanes.get("controller").filter(([, s, e]) => e > from && s < to);
  const kinds = [...new Set(phases.map(([name]) => name))];
  const workers = laneOrder(lanes).filter((name) => name !== "controller");
  const rows = workers.map((worker) => {
    const spans = lanes.get(worker).filter(([what]) => what !== "asleep"), busy = covered(spans, from, to);
    const idle = kinds.map((kind) => [kind, phases.filter(([name]) => name === kind).reduce((sum, [, s, e]) => sum + Math.max(0, Math.min(e, to) - Math.max(s, from)) - covered(spans, Math.max(s, from), Math.min(e, to)), 0)]).filter(([, s]) => s > 0.0005).sort((a, b) => b[1] - a[1]);
    return { worker, busy, idle, share: busy / (to - from) };
  });
  const ends = phases.map(([name, start, end]) => {
    const last = workers.map((worker) => [worker, largest(lanes.get(worker).filter(([, s, e]) => e <= end + 0.02 && s >= start - 0.02).map(([, , e]) => e))]).filter(([, e]) => e > -Infinity).sort((a, b) => b[1] - a[1]);
    if (!last.length) return null;
    const peers = last.filter(([worker]) => worker.replace(/-\d+$/, "") === last[0][0].replace(/-\d+$/, ""));
    return { name, start, seconds: end - start, last: last[0][0], waited: peers.slice(1).reduce((sum, [, e]) => sum + peers[0][1] - e, 0), peers: peers.length };
  }).filter(Boolean);
  place.replaceChildren(el("h3", { text: "Waits in the stretch above" }), table([
    { title: "worker", of: (row) => row.worker, key: (row) => row.worker },
    { title: "busy", n: true, key: (row) => row.share, of: (row) => `${(100 * row.share).toFixed(0)} %` },
    { title: "idle", n: true, key: (row) => -row.share, of: (row) => span(to - from - row.busy) },
    { title: "it was idle while the controller was in", wrap: true, of: (row) => row.idle.slice(0, 4).map(([kind, s]) => `${kind} ${span(s)}`).join(", ") },
  ], rows), ...(ends.length ? [el("h3", { text: "The last worker of each phase" }), table([
    { title: "phase", of: (row) => row.name, key: (row) => row.name },
    { title: "seconds", n: true, of: (row) => row.seconds },
    { title: "last worker", of: (row) => row.last, key: (row) => row.last },
    { title: "its equals waited for it", n: true, key: (row) => row.waited, of: (row) => (row.peers > 1 ? span(row.waited) : "") },
  ], ends.sort((a, b) => b.seconds - a.seconds).slice(0, 60), { limit: 12 })] : []));
}
