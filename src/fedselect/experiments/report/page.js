// The page: its state (which client, which methods), its frame, and drawing it again when either changes.

let data = JSON.parse(document.getElementById("data").textContent);
const state = { client: null, hidden: new Set(), picks: {} };

// every method shown, best first, for all clients or the chosen one
function ranked() {
  return shown().map(g => {
    const runs = groupRuns(g), of = key => there(runs.map(r => finals(r, state.client, key)));
    const pairs = gains(g).filter(p => state.client === null || p.client === state.client);
    const crossed = runs.filter(r => r.cross).map(r => mean(there(r.cross.flatMap((row, i) => row.filter((_, j) => i !== j && (state.client === null || i === state.client))))));
    const alone = pairs.filter(p => p.alone !== null);
    return {
      g, runs, all: of("accuracy"), mean: mean(of("accuracy")), local: of("accuracy_local"), merged: of("accuracy_merged"), share: mean(of("share")),
      gain: alone.length ? mean(alone.map(p => p.own - p.alone)) : null, better: better(pairs), others: mean(there(crossed)),
      up: mean(runs.map(r => state.client === null ? r.up.at(-1) : r.clients.up.at(-1)[state.client])),
      down: mean(runs.map(r => state.client === null ? r.down : r.clients.down[state.client])), seconds: mean(runs.map(r => r.seconds)),
    };
  }).sort((a, b) => (b.mean ?? -1) - (a.mean ?? -1));
}

function header() {
  const rows = ranked(), best = rows[0], own = rows.find(r => strong(r.g)), text = [];
  const whose = state.client === null ? "" : `Client ${clientName(state.client)}: `;
  const said = r => `${label(r.g)} ${r.all.length > 1 ? `reaches ${percent(r.mean)} ± ${percent(spread(r.all))}%` : `reaches ${percent(r.mean)}%`}`;
  if (best) {
    if (rows.length > 1 && own !== best) text.push(`${label(best.g)} leads with ${percent(best.mean)}%.`);
    const r = own || best;
    text.push(said(r) + (r.gain !== null && data.groups[r.g].method !== "local" ? `, ${Math.abs(r.gain) < 0.0005 ? "as training alone does" : `${Math.abs(100 * r.gain).toFixed(1)} points ${r.gain < 0 ? "below" : "above"} training alone`}` +
      (state.client === null ? `; ${r.better[0]} of ${r.better[1]} clients gain` : "") : "") + ".");
    if (r.share > 0 && r.share < 1) text.push(`${percent(r.share)}% of its parameters are personal.`);
  }
  document.getElementById("lede").textContent = whose + text.join(" ");
  document.getElementById("title").textContent = data.title;
  const configs = data.groups.map(g => g.config), all = values => [...new Set(values)].join(", ");
  const facts = {
    data: all(configs.map(c => c.data.name)), model: all(configs.map(c => c.model.name)), clients: clientCount(),
    rounds: all(configs.map(c => c.rounds)), [seeded() ? "seeds" : "seed"]: all(data.runs.map(r => r.seed).sort((a, b) => a - b)),
    runs: data.runs.every(r => r.finished) ? data.runs.length : `${data.runs.filter(r => r.finished).length} of ${data.runs.length} finished`,
  };
  document.getElementById("facts").replaceChildren(...Object.entries(facts).map(([k, v]) => element("div", {}, element("dt", {}, k), element("dd", {}, String(v)))));
}

function filter() {
  const chip = (text, on, attributes, act, swatch) => {
    const made = element("button", { type: "button", "aria-pressed": String(on), ...attributes }, swatch ? element("span", { class: "swatch", style: `background:${swatch}` }) : null, text);
    made.addEventListener("click", act);
    return made;
  };
  const focus = document.activeElement?.dataset?.chip;
  document.getElementById("clients").replaceChildren(
    chip("all", state.client === null, { "data-chip": "all", "data-client": "all" }, () => setClient(null)),
    ...Array.from({ length: clientCount() }, (_, i) => chip(clientName(i), state.client === i, { "data-chip": `c${i}`, "data-client": i }, () => setClient(i))),
  );
  document.getElementById("methods").replaceChildren(...data.groups.map((_, g) => chip(label(g), !state.hidden.has(g), { "data-chip": `m${g}`, "data-method": label(g) }, () => {
    if (!state.hidden.delete(g) && shown().length > 1) state.hidden.add(g);
    render();
  }, colour(g))));
  document.querySelector(`[data-chip="${focus}"]`)?.focus();
  const who = state.client === null ? [] : data.federations.map((f, k) => [f.clients[state.client], data.runs.filter(r => r.federation === k).map(r => r.seed)]).filter(([c]) => c && c.classes.length);
  document.getElementById("who").textContent = state.client === null ? "" : `Showing client ${clientName(state.client)} alone. ` +
    [...new Set(who.map(([c, seeds]) => `${seeded() ? `seed ${[...new Set(seeds)].join(", ")}: ` : ""}${c.train} training samples of ${clip40(c.classes)}`))].join("; ") + ".";
}
const clip40 = classes => `class${classes.length === 1 ? "" : "es"} ` + (classes.length > 10 ? `${classes.slice(0, 10).join(" ")} and ${classes.length - 10} more` : classes.join(" "));

function grid(head, rows, mark = () => null) {
  return element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "table" }, element("table", {},
    element("thead", {}, element("tr", {}, head.map(h => element("th", { scope: "col" }, h)))),
    element("tbody", {}, rows.map((row, i) => element("tr", { class: mark(i) }, row.map(cell => element("td", {}, cell)))))));
}

function table() {
  const rows = ranked(), crossed = rows.some(r => r.others !== null), compared = rows.some(r => r.gain !== null);
  const figure = values => values.length > 1 ? [percent(mean(values), 2), element("small", {}, `± ${percent(spread(values), 2)}`)] : [percent(mean(values), 2)];
  const view = (r, name, values) => (r.runs.every(run => run.view === "local") ? "local" : "merged") === name ? [element("b", {}, percent(mean(values), 2))] : [percent(mean(values), 2)];
  const head = ["method", "accuracy %", ...(compared ? ["against local", "clients better"] : []), "after local training %", "after aggregation %", ...(crossed ? ["on others' data %"] : []), "personal %", "MB up", "MB down", "seconds"];
  const body = rows.map(r => [
    element("span", {}, element("span", { class: "swatch", style: `background:${colour(r.g)}` }), label(r.g)),
    figure(r.all),
    ...(compared ? [r.gain === null || data.groups[r.g].method === "local" ? element("span", { class: "quiet" }, "–") : element("span", { class: Math.abs(r.gain) < 0.0005 ? "quiet" : r.gain < 0 ? "lossy" : "gain" }, points(r.gain)),
      r.better && data.groups[r.g].method !== "local" ? `${r.better[0]} of ${r.better[1]}` : "–"] : []),
    view(r, "local", r.local), view(r, "merged", r.merged), ...(crossed ? [percent(r.others, 2)] : []), percent(r.share), mega(r.up), mega(r.down), r.seconds.toFixed(1),
  ]);
  const place = document.getElementById("table");
  place.querySelector(".wide")?.remove();
  place.querySelector(".say").textContent = `${state.client === null ? "Unweighted mean over clients of each client's accuracy" : `Accuracy of client ${clientName(state.client)}`} on its own test data in the last round${seeded() ? ", mean and standard deviation over seeds" : ""}. Bold: the model that counts, as local training left it or merged with the aggregate.`;
  place.append(grid(head, body, i => strong(rows[i].g) ? "own" : null));
}

function frame() {
  const main = document.getElementById("main");
  main.replaceChildren(element("section", { id: "table" }, element("h2", {}, "Results"), element("p", { class: "say" })));
  for (const f of FIGURES) {
    const home = f.paired ? main.querySelector(".pair") || main.appendChild(element("div", { class: "pair" })) : main;
    home.append(element("section", { id: f.id }, element("h2", {}, f.title), element("p", { class: "say" }), element("div", { class: "picks" }),
      element("figure", {}, element("div", { class: "chart", role: "img" }), element("figcaption", {})),
      element("details", {}, element("summary", {}, "Numbers as a table"))));
    main.querySelector(`#${f.id} details`).addEventListener("toggle", () => numbers(f));
  }
  main.append(element("section", { id: "config" }), element("section", { id: "environment" }));
}

function numbers(f) {
  const details = document.querySelector(`#${f.id} details`);
  details.querySelector(".wide")?.remove();
  if (details.open && f.ready()) details.append(grid(...f.numbers()));
}

function choices(f, place) {
  const list = f.picks ? f.picks().filter(([, , options]) => options.length > 1) : [], key = JSON.stringify([list.map(([name, , options]) => [name, options])]);
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    place.replaceChildren(...list.map(([name, text, options, , kind]) => {
      const control = kind === "range" ? element("input", { type: "range", min: 0, max: options.length - 1, step: 1 })
        : element("select", {}, options.map(([, said], i) => element("option", { value: i }, said)));
      control.addEventListener("input", () => { state.picks[f.id][name] = options[+control.value][0]; render([f]); });
      control.dataset.pick = name;
      return element("label", {}, text, control, kind === "range" ? element("output", {}) : null);
    }));
  }
  for (const [name, , options, value] of list) {
    const control = place.querySelector(`[data-pick=${name}]`), at = options.findIndex(([v]) => v === value);
    control.value = at;
    const said = control.parentElement.querySelector("output");
    if (said) { said.textContent = options[at][1]; control.setAttribute("aria-valuetext", options[at][1]); }
  }
}

function render(some = null) {
  if (!some) { header(); filter(); table(); }
  document.querySelector(".pair").classList.toggle("large", clientCount() > 12);
  for (const f of some || FIGURES) {
    const section = document.getElementById(f.id), chart = section.querySelector(".chart"), ready = Boolean(f.ready());
    section.querySelector(".say").textContent = ready ? f.say() : f.missing || "There is nothing to show here.";
    for (const part of section.querySelectorAll(".picks, figure, details")) part.hidden = !ready;
    if (!ready) continue;
    choices(f, section.querySelector(".picks"));
    f.draw(chart);
    section.querySelector("figcaption").textContent = f.caption();
    chart.setAttribute("aria-label", `${f.title}. ${f.alt ? f.alt() : ""} ${f.caption()}`);
    numbers(f);
  }
}

function setClient(client) {
  state.client = client === state.client ? null : client;
  history.replaceState(null, "", state.client === null ? location.pathname + location.search : `#client=${state.client}`);
  render();
}

function about() {
  const flat = c => Object.entries(c).flatMap(([k, v]) => v && typeof v === "object" ? Object.entries(v).map(([n, w]) => [`${k}.${n}`, w]) : [[k, v]]);
  const show = v => v === null ? "none" : typeof v === "boolean" ? (v ? "yes" : "no") : String(v);
  const all = data.groups.map(g => new Map(flat(g.config))), keys = [...new Set(all.flatMap(m => [...m.keys()]))];
  const common = keys.filter(k => all.every(m => m.has(k) && show(m.get(k)) === show(all[0].get(k)))), apart = keys.filter(k => !common.includes(k) && k !== "method.name");
  const pairs = list => element("dl", { class: "pairs" }, list.map(([k, v]) => element("div", {}, element("dt", {}, k), element("dd", {}, show(v)))));
  document.getElementById("config").replaceChildren(element("h2", {}, "Configuration"), element("p", { class: "say" }, "Complete: every value that a run depends on, defaults written out. A run directory's config.json replays it with fedselect run --config."),
    pairs(common.map(k => [k, all[0].get(k)])),
    ...(apart.length ? [element("h3", {}, "Where they differ"), grid(["option", ...data.groups.map(g => g.label)], apart.map(k => [k, ...all.map(m => m.has(k) ? show(m.get(k)) : "")]))] : []),
    element("details", {}, element("summary", {}, "As JSON, and where the runs are"), element("pre", {}, JSON.stringify({ runs: data.runs.map(r => r.path), configurations: Object.fromEntries(data.groups.map(g => [g.label, g.config])) }, null, 2))));
  document.getElementById("environment").replaceChildren(element("h2", {}, "Environment"), ...data.environments.map(e => pairs(Object.entries(e))));
  document.getElementById("footer").textContent = `Made with fedselect ${data.version}, ${data.made}. This page holds all it needs; nothing is fetched.`;
}

async function follow() {
  const note = document.getElementById("live"), busy = () => data.runs.filter(r => !r.finished).map(r => `${label(r.group)} seed ${r.seed}: round ${r.round.at(-1)} of ${r.rounds}`);
  note.textContent = `live · ${busy().join(", ") || "finished"}`;
  for (let tag = null; ;) {
    await new Promise(done => setTimeout(done, 2000));
    if (document.hidden) continue;
    try {
      const answer = await fetch("data.json", tag ? { headers: { "If-None-Match": tag } } : {});
      if (answer.status === 304 || answer.status === 204) continue;
      tag = answer.headers.get("ETag");
      data = await answer.json();
    } catch {
      note.textContent = "the run has ended; this page no longer follows it";
      return;
    }
    note.textContent = `live · ${busy().join(", ") || "finished"}`;
    render(); about();
  }
}

const asked = /client=(\d+)/.exec(location.hash);
if (asked && +asked[1] < clientCount()) state.client = +asked[1];
frame(); render(); about();
dark.addEventListener("change", () => render());
let width = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; render(); } });
if (document.body.classList.contains("live")) follow();
