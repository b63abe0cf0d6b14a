// The first tab: where each run stands, what went wrong, how the runs differ. And the loader of files beside the page.

const arrived = new Map();  // name -> data of a file beside the page
const samplesOf = new Map();  // "run/step/id" -> sample
let loadingRun = 0;
let queue = Promise.resolve();
globalThis.nemo_rl_data = (name, data) => arrived.set(name, data);
globalThis.nemo_rl_sample = (sample) => samplesOf.set(`${loadingRun}/${sample.step}/${sample.id}`, sample);

/** Run a script beside the page. Scripts run one after another, so that each knows its run. */
function loadScript(run, source) {
  const load = () => new Promise((resolve, reject) => {
    loadingRun = run.index;
    const script = el("script", { src: source, onload: () => { script.remove(); resolve(); }, onerror: () => { script.remove(); reject(new Error(`${decodeURI(source)} is not beside this page`)); } });
    document.head.append(script);
  });
  const done = queue.then(load);
  queue = done.catch(() => undefined);
  return done;
}

async function loadData(run, name) {
  if (!arrived.has(name)) await loadScript(run, `${DATA.files}/${name}.js`);
  return arrived.get(name);
}

function problem(error) { return el("div", { class: "empty badtext", text: `${error.message}. Move the report together with its folders, or make it again: examples/report.py` }); }

TABS.push({ id: "overview", title: "Overview", render: renderOverview });

const KEY_NUMBERS = [
  ["reward", "train/reward"], ["accuracy", "validation/accuracy"], ["loss", "train/loss"], ["val. loss", "validation/val_loss"],
  ["answer tokens", "train/mean_gen_tokens_per_sample"], ["KL", "train/kl_penalty"], ["entropy", "train/approx_entropy"],
  ["disagreement", "train/token_mult_prob_error"], ["grad norm", "train/grad_norm"], ["seconds a step", "timing/train/total_step_time"],
  ["tokens/s", "performance/tokens_per_sec"],
];

function renderOverview(main) {
  const runs = shownRuns();
  // A KL of exactly 0 in every step is that of a run without a reference model.
  const isMeasured = (run, name) => name in run.metrics && (name !== "train/kl_penalty" || run.metrics[name].some((value) => value));
  const used = KEY_NUMBERS.filter(([, name]) => runs.some((run) => isMeasured(run, name)));
  const worst = (run, kinds) => run.events.filter((event) => kinds.includes(event.kind)).length;
  main.append(el("h2", { text: "Runs" }), table([
    { title: "run", of: (run) => el("span", { class: "nowrap" }, swatch(run.colour), ` ${run.name}`) },
    { title: "state", of: (run) => el("span", { class: `badge ${run.status.kind}`, text: run.status.text }) },
    { title: "warnings", n: true, of: (run) => worst(run, ["warning", "log"]) },
    { title: "errors", n: true, of: (run) => worst(run, ["error"]) },
    { title: "steps", n: true, of: (run) => run.steps[run.steps.length - 1] ?? 0 },
    { title: "time", n: true, key: elapsed, of: (run) => (elapsed(run) ? span(elapsed(run)) : "") },
    ...used.map(([title, name]) => ({ title, n: true, of: (run) => latest(run, name) })),
  ], runs));
  main.append(el("p", { class: "note", text: "Numbers are the newest of each run." }));
  for (const run of runs) {
    const bad = run.events.filter((event) => ["warning", "error", "log"].includes(event.kind)).slice(-6).reverse();
    if (bad.length) main.append(el("h2", { text: `${run.name}: latest warnings and errors` }), eventTable(bad));
  }
  const rewarded = ["validation/accuracy", "validation/reward", "train/reward"].some((name) => runs.some((run) => name in run.metrics));
  if (rewarded) main.append(el("h2", { text: "Reward" }), el("div", { class: "grid" },
    [["Reward", "train/reward", "validation/reward"], ["Seconds of a step", "timing/train/total_step_time"]].map(([title, ...names]) => chart(title, names.filter((name) => runs.some((run) => name in run.metrics))))));
  else main.append(el("h2", { text: "Loss" }), el("div", { class: "grid" }, [chart("Loss", ["train/loss", "validation/val_loss"].filter((name) => runs.some((run) => name in run.metrics)))]));
}

function elapsed(run) {
  const times = run.metrics["timing/train/total_step_time"];
  if (run.facts.started) return Math.max(0, run.written_at - run.facts.started);  // the file is made before the run starts
  return times ? times.reduce((sum, value) => sum + (typeof value === "number" ? value : 0), 0) : 0;
}

function latest(run, name) {
  const values = run.metrics[name] || [];
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}

function eventTable(events) {
  return table([
    { title: "time", of: (event) => clock(event.time), mono: true, key: (event) => event.time },
    { title: "step", n: true, of: (event) => event.step },
    { title: "kind", of: (event) => (event.kind === "log" ? "warning (log)" : event.kind), key: (event) => event.kind },
    { title: "what", wrap: true, of: (event) => el("span", { style: { whiteSpace: "pre-wrap" }, text: event.kind === "end" ? `exit status ${event.status}` : event.text }) },
  ], events, { kind: (event) => ({ error: "bad", warning: "warn", log: "warn" }[event.kind] || "") });
}
