// Groups and tasks, events, configuration, machine; and the start of the page, which comes last.

TABS.push({ id: "groups", title: "Groups and tasks", render: renderGroups, used: () => RUNS.some((run) => run.groups.length) });
TABS.push({ id: "events", title: "Events", render: renderEvents, used: () => RUNS.some((run) => run.events.length), count: () => RUNS.reduce((sum, run) => sum + importantEvents(run).length, 0) });
TABS.push({ id: "config", title: "Configuration", render: renderConfig, used: () => RUNS.some((run) => Object.keys(run.config).length) });
TABS.push({ id: "machine", title: "Machine", render: renderMachine, used: () => RUNS.some((run) => Object.keys(run.facts).length) });

const grouping = { run: 0, dead: false };
const percent = (value) => (value === null || value === undefined ? "" : `${(100 * value).toFixed(1)} %`);

function renderGroups(main) {
  const body = el("div");
  const draw = () => drawGroups(body, RUNS[grouping.run]);
  main.append(el("div", { class: "bar" }, runPicker(grouping, draw)), body);
  draw();
}

function drawGroups(body, run) {
  body.replaceChildren(el("h2", { text: "Tasks" }), table([
    { title: "task", of: (row) => row.task, key: (row) => row.task }, { title: "groups", n: true, of: (row) => row.groups }, { title: "samples", n: true, of: (row) => row.samples },
    { title: "reward, first tenth", n: true, of: (row) => row.first }, { title: "last tenth", n: true, of: (row) => row.last },
    { title: "gain", n: true, of: (row) => (row.first === null || row.last === null ? null : row.last - row.first) },
    { title: "dead groups", n: true, key: (row) => row.dead, of: (row) => percent(row.dead) }, { title: "mean tokens", n: true, of: (row) => row.tokens },
    { title: "truncated", n: true, key: (row) => row.truncated, of: (row) => percent(row.truncated) }, { title: "failed", n: true, key: (row) => row.failed, of: (row) => percent(row.failed) },
  ], run.tasks));
  body.append(el("p", { class: "note", text: "A group is dead if all its samples have the same reward: it gives no gradient." }));
  const stuck = run.prompts.filter((row) => row.dead > 0);
  body.append(el("details", {}, el("summary", {}, "Prompts that taught nothing most often", el("span", { class: "num", text: ` ${stuck.length}` })), table([
    { title: "prompt", of: (row) => row.prompt, mono: true, key: (row) => row.prompt }, { title: "groups", n: true, of: (row) => row.groups }, { title: "dead", n: true, of: (row) => row.dead }, { title: "mean reward", n: true, of: (row) => row.reward }], stuck, { limit: 100 })));
  if (!run.groups.length) return;
  const place = el("div");
  const select = el("select", {}, run.groups.map((block, i) => el("option", { value: i, selected: i === run.groups.length - 1, text: `steps ${block.from} to ${block.to}` })));
  const show = async () => {
    place.replaceChildren(el("div", { class: "empty", text: "loading" }));
    try { listGroups(place, await loadData(run, run.groups[Number(select.value)].name)); } catch (error) { place.replaceChildren(problem(error)); }
  };
  select.addEventListener("change", show);
  body.append(el("h2", { text: "Groups" }), el("div", { class: "bar" }, run.groups.length > 1 ? el("label", {}, "part", select) : null,
    el("label", {}, el("input", { type: "checkbox", id: "dead-only", checked: grouping.dead, onchange: (event) => { grouping.dead = event.target.checked; show(); } }), "dead groups only")), place);
  show();
}

function listGroups(place, lines) {
  const rows = lines.flatMap((line) => line.groups.map((group) => ({ step: line.step, ...group }))).map((row) => {
    const known = row.rewards.filter((reward) => reward !== null);
    const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    return { ...row, mean, dead: new Set(known).size < 2, longest: Math.max(...row.lengths), bad: [...row.status].filter((letter) => !"ct".includes(letter)).length };
  }).filter((row) => !grouping.dead || row.dead).reverse();
  const means = rows.map((row) => row.mean).filter((mean) => mean !== null), ends = [-largest(means.map((mean) => -mean), 0), largest(means, 1)];
  place.replaceChildren(table([
    { title: "step", n: true, of: (row) => row.step }, { title: "prompt", mono: true, of: (row) => row.prompt, key: (row) => row.prompt }, { title: "task", of: (row) => row.task, key: (row) => row.task },
    { title: "mean reward", n: true, of: (row) => row.mean }, { title: "dead", of: (row) => deadText(row, ends), key: (row) => Number(row.dead) },
    { title: "rewards of its samples", of: rewardBoxes }, { title: "longest", n: true, of: (row) => row.longest }, { title: "without outcome", n: true, of: (row) => row.bad },
    { title: "trained", of: (row) => (row.advantages.length ? "yes" : "no"), key: (row) => row.advantages.length },
  ], rows, { limit: 200, kind: (row) => (!row.dead ? "" : deadText(row, ends) === "all right" ? "fine" : "warn") }));
}

/** The kind of a group without a gradient: its samples share the best reward (1 or more), the worst (0 or less), or another one. */
function deadText(row, [worst, best]) {
  if (!row.dead) return "";
  return row.mean === null ? "no reward" : row.mean >= best ? "all right" : row.mean <= worst ? "all wrong" : "all equal";
}

/** A box per sample: green is the best reward of the group, grey has none. */
function rewardBoxes(row) {
  const known = row.rewards.filter((reward) => reward !== null), low = Math.min(0, ...known), high = Math.max(1, ...known);
  return el("span", { class: "boxes" }, row.rewards.map((reward, i) => el("span", {
    class: "box", title: `sample ${i}: ${reward === null ? "no reward" : `reward ${format(reward)}`}, ${row.lengths[i]} tokens${row.advantages.length ? `, advantage ${format(row.advantages[i])}` : ""}`,
    style: { background: reward === null ? "var(--line)" : `color-mix(in srgb, var(--good) ${Math.round((100 * (reward - low)) / (high - low))}%, var(--bad))` } })));
}

/** The events that the tab counts and lists at first: without messages. */
function importantEvents(run) { return run.events.filter((event) => event.kind !== "info"); }

function renderEvents(main) {
  for (const run of shownRuns().filter((one) => one.events.length)) {
    const important = importantEvents(run);
    const body = el("div");
    const show = (all) => body.replaceChildren(eventTable([...(all ? run.events : important)].reverse()));
    main.append(el("h2", { text: run.name }), el("div", { class: "bar" }, el("label", {}, el("input", { type: "checkbox", checked: !important.length, onchange: (event) => show(event.target.checked) }), "messages too")), body);
    show(!important.length);
  }
  main.append(el("p", { class: "note", text: "Warnings, faults and what the run did about them, alarms on learning, and how it ended. What workers in other processes logged is in the folder `ray` of the run." }));
}

// -- configuration

const wanted = { text: "" };

function renderConfig(main) {
  const runs = shownRuns(), text = (value) => (value === null || value === undefined ? "—" : String(value));
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  if (runs.length > 1) {
    const different = keys.filter((key) => new Set(runs.map((run) => run.config[key])).size > 1);
    main.append(el("h2", { text: `Differences between the runs: ${different.length}` }), table([{ title: "key", mono: true, of: (key) => key, key: (key) => key },
      ...runs.map((run) => ({ title: run.name, mono: true, wrap: true, of: (key) => text(run.config[key]) }))], different));
  }
  for (const run of runs.filter((one) => one.facts.from_parent)) {
    main.append(el("h2", { text: `${run.name}: ${run.facts.from_parent.length} differences from the parent` }),
      el("p", { class: "note", text: `${run.facts.config_file}${run.facts.overrides.length ? ` with ${run.facts.overrides.join(" ")}` : ""}. The parent is what its \`defaults:\` name, and the defaults of the library.` }),
      table([{ title: "key", mono: true, of: ([key]) => key, key: ([key]) => key }, { title: "parent", mono: true, wrap: true, of: ([, before]) => text(before) }, { title: "this run", mono: true, wrap: true, of: ([, , after]) => text(after) }], run.facts.from_parent));
  }
  const body = el("div");
  const list = () => body.replaceChildren(table([{ title: "key", mono: true, of: (key) => key, key: (key) => key }, ...runs.map((run) => ({ title: runs.length > 1 ? run.name : "value", mono: true, wrap: true, of: (key) => text(run.config[key]) }))],
    keys.filter((key) => !wanted.text || key.includes(wanted.text) || runs.some((run) => text(run.config[key]).includes(wanted.text)))));
  main.append(el("h2", { text: "All keys" }), el("div", { class: "bar" }, el("input", { type: "search", placeholder: "key or value", value: wanted.text, oninput: (event) => { wanted.text = event.target.value; list(); } })), body);
  list();
}

function renderMachine(main) {
  const runs = shownRuns().filter((run) => Object.keys(run.facts).length);
  const row = (title, of) => ({ title, values: runs.map((run) => of(run.facts)) });
  const packages = [...new Set(runs.flatMap((run) => Object.keys(run.facts.versions || {})))];
  const rows = [row("command", (f) => (f.command || []).join(" ")), row("in", (f) => f.folder), row("host, process", (f) => `${f.host}, ${f.pid}`), row("started", (f) => (f.started ? clock(f.started) : "")),
    row("system", (f) => f.system), row("processors", (f) => f.processors), row("memory", (f) => `${f.memory_gb} GB`), row("GPUs of this machine", (f) => (f.gpus || []).join(", ") || "none"), row("driver", (f) => f.driver || "none"),
    row("commit of the library", (f) => f.commit || "not a clone"), row("changed files", (f) => f.changed_files || "none"), row("Python", (f) => f.python), ...packages.map((name) => row(name, (f) => (f.versions || {})[name] || "not installed"))];
  main.append(table([{ title: "", of: (one) => one.title }, ...runs.map((run, i) => ({ title: run.name, wrap: true, mono: true, of: (one) => one.values[i] }))], rows.filter((one) => one.values.some(Boolean)),
    { kind: (one) => (new Set(one.values).size > 1 ? "warn" : "") }));
  for (const run of runs.filter((one) => (one.facts.nodes || []).length)) {
    const names = [...new Set(run.facts.nodes.flatMap(Object.keys))].filter((name) => name !== "address");
    main.append(el("h2", { text: `${run.name}: nodes of Ray` }), table([{ title: "address", mono: true, of: (node) => node.address }, ...names.map((name) => ({ title: name, n: true, of: (node) => (name.includes("memory") ? `${((node[name] || 0) / 2 ** 30).toFixed(1)} GB` : node[name]) }))], run.facts.nodes));
  }
}

start();
