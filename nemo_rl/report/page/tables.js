// What happened, the configuration, the machine; and the start of the page, which comes last.

TABS.push({ id: "config", title: "Configuration", render: renderConfig, used: () => RUNS.some((run) => Object.keys(run.config).length) });

function renderConfig(main) {
  const runs = shownRuns();
  main.append(el("p", { class: "note", text: "configuration" }));
  for (const run of runs) main.append(el("h2", { text: run.name }), table([{ title: "key", of: ([key]) => key, mono: true }, { title: "value", of: ([, value]) => value, wrap: true, mono: true }], Object.entries(run.config)));
}

start();
