// Data, elements, numbers, tabs. Text of a run enters the page through textContent alone.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COLOURS = 8;
const SVG = "http://www.w3.org/2000/svg";
const state = { shown: RUNS.map(() => true), tab: "", view: null };
const TABS = [];  // {id, title, used(), count(), render(main)}, in order

RUNS.forEach((run, i) => { run.index = i; run.colour = `var(--c${i % COLOURS})`; });

/** An element with attributes (`on...` are listeners, `text` its text) and children; null children are left out. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes);
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  fill(node, attributes);
  node.append(...children);
  return node;
}

function fill(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, value);
  }
}

/** A small square of a colour; one without colour has an edge, so that it shows on any background. */
function swatch(colour) { return el("span", { class: colour === "transparent" ? "swatch hollow" : "swatch", style: { background: colour } }); }

/** A number for people: four significant digits, no exponent where it can be read without. */
function format(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits + (size > 0.99 && size < 1.01 ? 3 : 0))));
}

/** The largest of the numbers. As arguments of one call, 200,000 of them would overflow the stack. */
function largest(numbers, atLeast = -Infinity) {
  let most = atLeast;
  for (const number of numbers) if (number > most) most = number;
  return most;
}

function clock(seconds) { return new Date(seconds * 1000).toLocaleString("sv"); }

function span(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function shownRuns() { return RUNS.filter((run) => state.shown[run.index]); }

/** A table. `columns`: {title, of(row) -> text or node, n: is a number, wrap, mono, key(row) -> what sorts it}. */
function table(columns, rows, { limit = 500, onpick = null, kind = null } = {}) {
  const body = el("tbody");
  const box = el("div", { class: "scroll" });
  let sorted = rows, by = -1, up = false, num = limit;
  const more = el("button", { class: "plain", onclick: () => { num += limit; draw(); } });
  function draw() {
    body.replaceChildren(...sorted.slice(0, num).map((row) => el("tr",
      { class: [onpick ? "pick" : "", kind ? kind(row) : ""].join(" ").trim() || null, onclick: onpick ? () => onpick(row) : null },
      columns.map((column) => {
        const value = column.of(row);
        const cell = el("td", { class: [column.n ? "n" : "", column.wrap ? "wrap" : "", column.mono ? "mono" : ""].join(" ").trim() || null });
        cell.append(typeof value === "number" ? format(value) : value ?? "");
        return cell;
      }))));
    more.hidden = sorted.length <= num;
    more.textContent = `${(sorted.length - num).toLocaleString("en")} more rows`;
  }
  const heads = columns.map((column, i) => el("th", {
    class: [column.n ? "n" : "", column.key || column.n ? "sortable" : ""].join(" ").trim() || null,
    text: column.title,
    onclick: column.key || column.n ? () => {
      up = by === i ? !up : false;
      by = i;
      const key = column.key || column.of;
      sorted = [...rows].sort((a, b) => compare(key(a), key(b)) * (up ? 1 : -1));
      draw();
    } : null,
  }));
  box.append(el("table", {}, el("thead", {}, el("tr", {}, heads)), body), more);
  draw();
  // A table that goes on to the right fades out there.
  const hint = () => box.classList.toggle("cut", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
  box.addEventListener("scroll", hint);
  new ResizeObserver(hint).observe(box);
  return box;
}

/** Numbers and texts in order; what is missing comes first. */
function compare(a, b) {
  const missing = (value) => value === null || value === undefined || Number.isNaN(value);
  if (missing(a) || missing(b)) return missing(a) - missing(b) === 0 ? 0 : missing(a) ? -1 : 1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

const tip = document.getElementById("tip");
function showTip(event, ...content) {
  tip.replaceChildren(...content.flat(Infinity));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  const y = Math.min(event.clientY + 14, innerHeight - height - 6);
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
function hideTip() { tip.hidden = true; }

// -- the frame of the page

function drawHeader() {
  const runs = el("ul", { class: "runs" }, RUNS.map((run) => el("li", {}, el("label", { title: run.folder },
    RUNS.length > 1 ? el("input", { type: "checkbox", checked: state.shown[run.index], onchange: (event) => {
      state.shown[run.index] = event.target.checked;
      drawTab();
    } }) : null,
    swatch(run.colour), el("b", { text: run.name }),
    el("span", { class: "soft", text: `${run.algorithm} ${run.steps.length ? `step ${run.steps[run.steps.length - 1]}` : "no step"}${run.num_steps ? ` of ${run.num_steps}` : ""}` }),
    el("span", { class: `badge ${run.status.kind}`, text: run.status.text })))));
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.getElementById("header").replaceChildren(
    runs, el("span", { class: "grow" }), el("span", { class: "soft", text: `made ${clock(DATA.made)}` }),
    el("button", { class: "plain", text: "light / dark", onclick: () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; } }));
}

/** Tabs with something to show. A tab without `used` always is. */
function usedTabs() { return TABS.filter((tab) => !tab.used || tab.used()); }

function drawTabs() {
  const there = usedTabs();
  document.getElementById("tabs").replaceChildren(...there.map((tab) => {
    const count = tab.count ? tab.count() : null;
    return el("button", { role: "tab", id: `tab-${tab.id}`, "aria-selected": String(tab.id === state.tab), onclick: () => choose(tab.id) },
      tab.title, count ? el("span", { class: "num", text: ` ${count.toLocaleString("en")}` }) : null);
  }));
}

function choose(id, detail = "") {
  state.tab = id;
  history.replaceState(null, "", `#${id}${detail}`);
  drawTabs();
  drawTab();
}

function drawTab() {
  hideTip();
  const main = document.getElementById("main");
  main.replaceChildren();
  TABS.find((tab) => tab.id === state.tab).render(main);
}

function start() {
  drawHeader();
  const wanted = location.hash.slice(1).split("/")[0];
  const there = usedTabs();
  choose(there.some((tab) => tab.id === wanted) ? wanted : there[0].id, there.some((tab) => tab.id === wanted) ? location.hash.slice(1 + wanted.length) : "");
  document.documentElement.dataset.ready = "true";
}
