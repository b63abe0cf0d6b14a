// Samples: a table with paging, sorting and filters, and one sample with its tokens and turns.

TABS.push({
  id: "samples", title: "Samples", render: renderSamples, used: () => RUNS.some((run) => run.samples),
  count: () => RUNS.reduce((sum, run) => sum + (run.samples ? run.samples.num : 0), 0),
});

const PAGE = 50;
const browse = { run: Math.max(0, RUNS.findIndex((run) => run.samples)), sort: "step", up: false, page: 0, from: "", to: "", task: "", status: "", text: "", chosen: null, colour: "difference", order: [], index: null };
const SORTS = [["step", "step"], ["reward", "reward"], ["advantage", "advantage"], ["length", "tokens"], ["turns", "turns"], ["error", "disagreement"], ["output", "mean logprob or score"]];
const COLOURINGS = [["difference", "train − generation logprob"], ["advantage", "advantage"], ["probability", "probability of the token"], ["mask", "loss mask"], ["none", "nothing"]];

function renderSamples(main) {
  const list = el("div"), view = el("div", { id: "sample" }), bar = el("div", { class: "bar" });
  main.append(bar, el("div", { class: "split" }, list, view));
  const open = async () => {
    const run = RUNS[browse.run];
    list.replaceChildren(el("div", { class: "empty", text: run.samples ? "loading" : "This run kept no samples." }));
    view.replaceChildren();
    bar.replaceChildren();
    if (!run.samples) { bar.append(runPicker(browse, change) ?? ""); return; }
    try { browse.index = await loadData(run, run.samples.index); } catch (error) { list.replaceChildren(problem(error)); return; }
    browse.page = 0;
    browse.chosen = null;
    fillBar(bar, change, again);
    again();
  };
  const change = () => { Object.assign(browse, { index: null, task: "", status: "" }); open(); };  // the filters are numbers of its index
  const again = () => { order(); drawList(list, view); };
  open();
}

function fillBar(bar, change, again) {
  const { index } = browse;
  const options = (column) => [...new Set(index[column])].map((number) => [number, index.names[number]]).filter(([, name]) => name).sort((a, b) => a[1].localeCompare(b[1]));
  const select = (title, key, choices) => (choices.length < 2 ? null : el("label", {}, title, el("select", { onchange: (event) => { browse[key] = event.target.value; browse.page = 0; again(); } },
    el("option", { value: "", text: "all" }), choices.map(([number, name]) => el("option", { value: number, text: name, selected: String(number) === browse[key] })))));
  const field = (key, hint, size) => el("input", { type: "search", placeholder: hint, value: browse[key], size, "aria-label": hint, oninput: (event) => { browse[key] = event.target.value; browse.page = 0; again(); } });
  bar.replaceChildren(...[runPicker(browse, change),
    el("label", {}, "sort by", el("select", { id: "sort", onchange: (event) => { browse.sort = event.target.value; browse.page = 0; again(); } }, SORTS.map(([key, title]) => el("option", { value: key, text: title, selected: key === browse.sort })))),
    el("button", { class: "plain", id: "direction", text: browse.up ? "smallest first" : "largest first", onclick: (event) => { browse.up = !browse.up; event.target.textContent = browse.up ? "smallest first" : "largest first"; browse.page = 0; again(); } }),
    el("label", {}, "steps", field("from", "from", 6), field("to", "to", 6)), select("task", "task", options("task")), select("ended", "status", options("status")), field("text", "prompt or sample id", 18)].filter(Boolean));
}

function order() {
  const { index, text } = browse, column = index[browse.sort], chosen = [];
  const from = browse.from === "" ? -Infinity : Number(browse.from), to = browse.to === "" ? Infinity : Number(browse.to);
  for (let i = 0; i < index.step.length; i++) {
    if (index.step[i] < from || index.step[i] > to) continue;
    if (browse.task !== "" && index.task[i] !== Number(browse.task)) continue;
    if (browse.status !== "" && index.status[i] !== Number(browse.status)) continue;
    if (text && !index.id[i].includes(text) && !index.names[index.prompt[i]].includes(text)) continue;
    chosen.push(i);
  }
  const sign = browse.up ? 1 : -1;
  const lacking = browse.up ? Infinity : -Infinity;  // what has no value comes last
  chosen.sort((a, b) => { const x = column[a] ?? lacking, y = column[b] ?? lacking; return x === y ? a - b : (x < y ? -1 : 1) * sign; });
  browse.order = chosen;
}

function drawList(list, view) {
  const { index } = browse, pages = Math.max(1, Math.ceil(browse.order.length / PAGE));
  browse.page = Math.min(browse.page, pages - 1);
  const rows = browse.order.slice(browse.page * PAGE, (browse.page + 1) * PAGE);
  const turn = (by) => () => { browse.page += by; drawList(list, view); };
  const has = (name) => index[name].some((value) => value !== null && value !== undefined && value !== 0);
  const columns = [
    { title: "step", n: true, of: (i) => index.step[i] },
    { title: "prompt", mono: true, of: (i) => index.names[index.prompt[i]] || index.id[i] },
    ...(has("reward") ? [{ title: "reward", n: true, of: (i) => index.reward[i] }] : []),
    ...(has("advantage") ? [{ title: "advantage", n: true, of: (i) => index.advantage[i] }] : []),
    { title: "tokens", n: true, of: (i) => index.length[i] },
    ...(index.turns.some((n) => n > 1) ? [{ title: "turns", n: true, of: (i) => index.turns[i] }] : []),
    ...(has("error") ? [{ title: "disagreement", n: true, of: (i) => index.error[i] }] : []),
    ...(has("output") && !has("error") ? [{ title: "mean output", n: true, of: (i) => index.output[i] }] : []),
    ...(has("status") ? [{ title: "ended", of: (i) => index.names[index.status[i]] }] : []),
  ].map((column) => ({ ...column, n: column.n, key: undefined }));
  const shown = table(columns, rows, { onpick: (i) => { browse.chosen = i; drawList(list, view); }, kind: (i) => (i === browse.chosen ? "on" : "") });
  for (const head of shown.querySelectorAll("th.sortable")) head.replaceWith(el("th", { class: "n", text: head.textContent }));
  list.replaceChildren(el("div", { class: "bar" },
    el("button", { class: "plain", text: "‹", title: "earlier page", disabled: browse.page === 0, onclick: turn(-1) }),
    el("span", { class: "soft", id: "pages", text: `page ${browse.page + 1} of ${pages.toLocaleString("en")}, ${browse.order.length.toLocaleString("en")} samples` }),
    el("button", { class: "plain", text: "›", id: "next", title: "next page", disabled: browse.page >= pages - 1, onclick: turn(1) })), shown);
  if (browse.chosen === null && rows.length) browse.chosen = rows[0];
  if (browse.chosen !== null) showSample(view, browse.chosen);
  const number = rows.indexOf(browse.chosen);
  if (number >= 0) shown.querySelectorAll("tbody tr")[number].classList.add("on");
}

addEventListener("keydown", (event) => {
  if (state.tab !== "samples" || !browse.index || event.target.closest("input, select")) return;
  const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  const at = browse.order.indexOf(browse.chosen) + (by || 0);
  if (!by || at < 0 || at >= browse.order.length) return;
  event.preventDefault();
  browse.chosen = browse.order[at];
  browse.page = Math.floor(at / PAGE);
  const split = document.querySelector(".split");
  drawList(split.children[0], split.children[1]);
});

async function showSample(view, i) {
  const run = RUNS[browse.run], { index } = browse;
  const key = `${run.index}/${index.step[i]}/${index.id[i]}`;
  if (!samplesOf.has(key)) {
    try { await loadScript(run, index.blocks[index.block[i]]); } catch (error) { view.replaceChildren(problem(error)); return; }
  }
  if (browse.chosen !== i) return;  // another one was chosen meanwhile
  const sample = samplesOf.get(key);
  if (!sample) { view.replaceChildren(problem(new Error("the block holds no such sample"))); return; }
  view.replaceChildren(...sampleView(sample, () => showSample(view, i)));
}

function sampleView(sample, again) {
  const facts = [["step", sample.step], ["sample", sample.id], ["reward", sample.reward], ["advantage", typeof sample.advantages === "number" ? sample.advantages : sample.advantages ? "by token" : null],
    ["disagreement", sample.error], ["of its worst token", sample.worst], ["tokens with the prompt", sample.length], ["role", sample.role || null], ["reward of the row", sample.own_reward], ["credit", sample.credit === 1 ? null : sample.credit],
    ["ended", sample.status], ["answer", sample.answer], ["failure", sample.failure],
    ["in the loss", sample.in_loss === 0 ? "no" : null], ["weights", sample.weight_version], ["margin", sample.margin || null], ...Object.entries(sample.metrics || {})].filter(([, value]) => value !== null && value !== undefined);
  const parts = [el("div", { class: "facts" }, facts.map(([name, value]) => el("span", {}, el("span", { class: "soft", text: `${name} ` }), el("b", { text: format(value, 6) }))))];
  const choices = colourings(sample);
  if (!choices.some(([key]) => key === browse.colour)) browse.colour = choices[0][0];
  parts.push(el("div", { class: "bar" }, el("label", {}, "colour tokens by", el("select", { id: "colouring", onchange: (event) => { browse.colour = event.target.value; again(); } },
    choices.map(([key, title]) => el("option", { value: key, text: title, selected: key === browse.colour })))), legend(sample)));
  if (sample.pictures && sample.pictures.length) parts.push(el("div", { class: "bar pictures" }, sample.pictures.map((source, i) => el("img", { src: source, alt: `image ${i + 1}` }))));
  parts.push(tokensView(sample));
  if (sample.turns && sample.turns.length) parts.push(el("h3", { text: "Turns" }), turnsTable(sample));
  if (sample.messages && sample.messages.length) parts.push(el("h3", { text: "Messages" }), ...sample.messages.map(messageView));
  return parts;
}

function numbersOf(sample) {
  const train = sample.prev_logprobs || (sample.generation_logprobs ? sample.outputs : null), generation = sample.generation_logprobs;
  return { train: train || null, generation: generation || null, score: generation ? null : sample.outputs || null };
}

function scaleOf(sample) {
  const { train, generation } = numbersOf(sample);
  let most = 0;
  if (browse.colour === "difference" && train && generation) train.forEach((value, i) => { if (sample.mask[i] === "1") most = Math.max(most, Math.abs(value - generation[i])); });
  if (browse.colour === "advantage") most = typeof sample.advantages === "number" ? Math.abs(sample.advantages) : largest((sample.advantages || []).map(Math.abs), 0);
  return browse.colour === "difference" ? Math.max(most, 0.02) : Math.max(most, 1e-6);
}

/** The colourings that a sample has numbers for; a row of a dataset was not generated. */
function colourings(sample) {
  const { train, generation } = numbersOf(sample);
  const there = { difference: train && generation, advantage: sample.advantages !== undefined, probability: generation || (sample.outputs && RUNS[browse.run].algorithm !== "rm"), mask: true, none: true };
  return COLOURINGS.filter(([key]) => there[key]);
}

function legend(sample) {
  const scale = scaleOf(sample);
  const mark = (colour, text) => el("span", { class: "soft" }, swatch(colour), ` ${text}`);
  return el("span", { class: "bar", style: { margin: 0 } }, {
    difference: () => [mark(tint("bad", 1), `training less likely by ${format(scale)}`), mark(tint("c0", 1), "more likely")],
    advantage: () => [mark(tint("good", 1), `+${format(scale)}`), mark(tint("bad", 1), `−${format(scale)}`)],
    probability: () => [mark(tint("bad", 1), "improbable"), mark("transparent", "certain")],
    mask: () => [mark(tint("c0", 0.5), "carries loss")],
    none: () => [],
  }[browse.colour]());
}

function tint(name, strength) { return `color-mix(in srgb, var(--${name}) ${Math.round(Math.min(1, strength) * 62)}%, transparent)`; }

function tokenColour(sample, i, scale) {
  const { train, generation } = numbersOf(sample), on = sample.mask[i] === "1";
  if (!on) return null;
  if (browse.colour === "mask") return tint("c0", 0.5);
  if (browse.colour === "difference" && train && generation) { const d = train[i] - generation[i]; return Math.abs(d) < scale / 50 ? null : tint(d < 0 ? "bad" : "c0", Math.abs(d) / scale); }
  if (browse.colour === "advantage") { const a = typeof sample.advantages === "number" ? sample.advantages : (sample.advantages || [])[i] || 0; return a === 0 ? null : tint(a > 0 ? "good" : "bad", Math.abs(a) / scale); }
  if (browse.colour === "probability") { const values = generation || sample.outputs; return values ? tint("bad", 1 - Math.exp(Math.min(0, values[i]))) : null; }
  return null;
}

function tokensView(sample) {
  const scale = scaleOf(sample), { train, generation, score } = numbersOf(sample);
  const box = el("div", { class: "tokens" });
  sample.texts.forEach((text, i) => {
    if (sample.left_out && i === sample.left_out[0]) box.append(el("span", { class: "gap", text: `… ${(sample.left_out[1] - sample.left_out[0]).toLocaleString("en")} tokens …` }));
    const colour = tokenColour(sample, i, scale);
    box.append(el("span", { class: sample.mask[i] === "1" ? "t on" : "t", "data-i": i, style: colour ? { background: colour } : {}, text: text.replaceAll("\n", "⏎\n") }));
  });
  box.addEventListener("pointermove", (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined) { hideTip(); return; }
    const at = (values) => (values ? values[i] : null);
    const rows = [["token", `${sample.ids[i]} ${JSON.stringify(sample.texts[i])}`], ["generation logprob", at(generation)], ["training logprob", at(train)],
      ["difference", train && generation ? train[i] - generation[i] : null], ["ratio", train && generation ? Math.exp(train[i] - generation[i]) : null], ["output", at(score)],
      ["advantage", typeof sample.advantages === "number" ? sample.advantages : at(sample.advantages)], ["reference logprob", at(sample.reference_policy_logprobs)], ["value", at(sample.values)], ["return", at(sample.returns)]];
    const meaning = sample.mask[i] === "1" ? "carries loss" : "no loss";
    showTip(event, el("div", { class: "soft", text: `position ${i}, ${meaning}` }), rows.filter(([name, value]) => value !== null && value !== undefined && (sample.mask[i] === "1" || name === "token")).map(([name, value]) => el("div", { class: "row" }, name, el("b", { text: format(value, 5) }))));
  });
  box.addEventListener("pointerleave", hideTip);
  return box;
}

function turnsTable(sample) {
  return table([
    { title: "turn", n: true, of: (turn) => sample.turns.indexOf(turn) + 1 }, { title: "sampled tokens", n: true, of: (turn) => turn.num_generated_tokens },
    { title: "tokens of the reply", n: true, of: (turn) => turn.num_env_tokens }, { title: "reward", n: true, of: (turn) => turn.reward },
    { title: "stopped by", of: (turn) => turn.stop_reason }, { title: "weights", n: true, of: (turn) => turn.weight_version },
    { title: "sampling", n: true, key: (turn) => turn.generation_s, of: (turn) => span(turn.generation_s) }, { title: "environment", n: true, key: (turn) => turn.env_s, of: (turn) => span(turn.env_s) },
  ], sample.turns);
}

/** A message by role. Calls of tools inside it stand out. */
function messageView(message) {
  const body = el("div", { class: "content" });
  const text = String(message.content);
  let end = 0;
  for (const call of text.matchAll(/<tool_call>[\s\S]*?(<\/tool_call>|$)|```[\s\S]*?(```|$)/g)) {
    body.append(text.slice(end, call.index), el("span", { class: "call", text: call[0] }));
    end = call.index + call[0].length;
  }
  body.append(text.slice(end));
  return el("div", { class: `message ${["system", "user", "assistant"].includes(message.role) ? message.role : "tool"}` }, el("div", { class: "role", text: message.role }), body);
}
