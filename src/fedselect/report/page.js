// The page: its state (selected client and methods), its frame, and redrawing when the state changes.

let data = JSON.parse(document.getElementById("data").textContent);
const state = { client: null, hidden: new Set(), picks: {}, unfolded: false };
const MANY = 8;  // methods that fit into the bar; more are folded
const byId = id => document.getElementById(id);

// every visible method, best first, for all clients or the selected one
function ranked() {
  const one = state.client, mine = i => one === null || i === one;
  return shown().map(g => {
    const runs = groupRuns(g), of = key => there(runs.map(r => finals(r, key)));
    const pairs = gains(g).filter(p => mine(p.client)), known = pairs.filter(p => p.alone !== null);
    const elsewhere = r => mean(there(r.cross.flatMap((row, i) => row.filter((_, j) => i !== j && mine(i)))));
    return {
      g, runs, all: of("value"), mean: mean(of("value")), local: of("local"), merged: of("merged"),
      share: mean(of("share")), others: mean(there(runs.filter(r => r.cross).map(elsewhere))),
      gain: known.length ? mean(known.map(p => betterBy(p.own, p.alone))) : null, better: better(pairs),
      up: mean(there(runs.map(r => one === null ? r.up.at(-1) : r.clients.up.at(-1)[one]))),
      down: mean(there(runs.map(r => one === null ? r.down : r.clients.down[one]))), seconds: mean(runs.map(r => r.seconds)),
    };
  }).sort((a, b) => a.mean === null || b.mean === null ? (a.mean === null) - (b.mean === null) : betterBy(b.mean, a.mean));
}

function header() {
  const rows = ranked(), best = rows[0], r = rows.find(row => strong(row.g) && row.mean !== null) || best, text = [];
  if (!data.runs.every(run => run.finished)) text.push("So far:");
  if (state.client !== null) text.push(`Client ${clientName(state.client)}:`);
  if (r !== best) text.push(`${label(best.g)} leads with ${written(best.mean)}${unit()}.`);
  let said = `${label(r.g)} reaches ${data.headline.percent ? "" : `${metric()} `}${written(r.mean)}${r.all.length > 1 ? ` ± ${written(spread(r.all))}` : ""}${unit()}`;
  if (r.gain !== null) {
    said += even(r.gain) ? ", the same as training alone"
      : `, ${points(Math.abs(r.gain)).slice(1)}${inPoints()} ${r.gain < 0 ? "worse" : "better"} than training alone`;
    if (state.client === null) said += `; ${r.better[0]} of ${r.better[1]} clients gain`;
  }
  text.push(said + ".");
  if (r.share > 0 && r.share < 1) text.push(`${percent(r.share)}% of its parameters are personal.`);
  byId("lede").textContent = text.join(" ");
  byId("title").textContent = data.title;
  const all = pick => [...new Set(data.groups.map(g => pick(g.config)))].join(", ");
  const done = data.runs.filter(run => run.finished).length;
  const facts = {
    data: all(c => c.data.name), model: all(c => c.model.name), clients: clientCount(), rounds: all(c => c.rounds),
    [seeded() ? "seeds" : "seed"]: [...new Set(data.runs.map(run => run.seed))].sort((a, b) => a - b).join(", "),
    runs: done === data.runs.length ? done : `${done} of ${data.runs.length} finished`,
  };
  byId("facts").replaceChildren(...Object.entries(facts).map(([k, v]) =>
    element("div", {}, element("dt", {}, k), element("dd", {}, String(v)))));
}

function filter() {
  const chip = (text, on, attributes, act, paint) => {
    const made = element("button", { type: "button", "aria-pressed": String(on), ...attributes }, paint || null, text);
    made.addEventListener("click", act);
    return made;
  };
  const focus = document.activeElement?.dataset?.chip;
  byId("clients").replaceChildren(
    chip("all", state.client === null, { "data-chip": "all", "data-client": "all" }, () => setClient(null)),
    ...Array.from({ length: clientCount() }, (_, i) =>
      chip(clientName(i), state.client === i, { "data-chip": `c${i}`, "data-client": i }, () => setClient(i))),
  );
  const many = data.groups.length > MANY, open = !many || state.unfolded;
  const fold = chip(`${shown().length} of ${data.groups.length} shown ${open ? "▴" : "▾"}`, true, { "data-chip": "fold", "aria-expanded": String(open) },
    () => { state.unfolded = !open; render(); });
  fold.removeAttribute("aria-pressed");
  byId("methods").parentElement.classList.toggle("unfolded", many && open);
  byId("methods").replaceChildren(...(many ? [fold] : []), ...(open ? data.groups : []).map((_, g) =>
    chip(label(g), !state.hidden.has(g), { "data-chip": `m${g}`, "data-method": label(g) }, () => {
      if (!state.hidden.delete(g) && shown().length > 1) state.hidden.add(g);
      render();
    }, swatch(colour(g), symbol(g)))));
  document.querySelector(`[data-chip="${focus}"]`)?.focus();
  byId("who").textContent = state.client === null ? "" : `Showing only client ${clientName(state.client)}. ${holdings()}`;
  const whose = state.client === null ? "All clients" : `Client ${clientName(state.client)}`, few = shown().length < data.groups.length;
  byId("filtered").textContent = `${whose} · ${few ? `${shown().length} of ` : ""}${data.groups.length} method${data.groups.length > 1 ? "s" : ""}`;
}

// the training data of the selected client, by seed
function holdings() {
  const said = data.federations.flatMap((f, k) => {
    const c = f.clients[state.client], seeds = new Set(data.runs.filter(r => r.federation === k).map(r => r.seed));
    if (!c || !c.classes.length) return [];
    const more = c.classes.length > 10 ? ` and ${c.classes.length - 10} more` : "";
    const kinds = `${c.classes.length === 1 ? "class" : "classes"} ${c.classes.slice(0, 10).join(" ")}${more}`;
    const held = `${c.train} training samples of ${kinds}`;
    return [seeded() ? `seed ${[...seeds].join(", ")}: ${held}` : held];
  });
  return said.length ? `It has ${[...new Set(said)].join("; ")}.`.replace("It has seed", "Seed") : "";
}

// a table that scrolls sideways if it is too wide, with a hint until it has been scrolled
function grid(head, rows, mark = () => null) {
  const wide = element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "table" }, element("table", {},
    element("thead", {}, element("tr", {}, head.map(h => element("th", { scope: "col" }, h)))),
    element("tbody", {}, rows.map((row, i) => element("tr", { class: mark(i) }, row.map(c => element("td", {}, c)))))));
  const made = element("div", { class: "grid" }, element("p", { class: "hint", "aria-hidden": "true" }, "scroll for more columns →"), wide);
  const look = () => {
    made.classList.toggle("cut", wide.scrollLeft + wide.clientWidth < wide.scrollWidth - 2);
    made.classList.toggle("moved", made.classList.contains("moved") || wide.scrollLeft > 8);
  };
  wide.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(wide);
  return made;
}

// which of several local groups is training alone, and which methods are not compared
function remarks() {
  if (!data.groups.some((_, g) => isLocal(g))) return "";
  const used = [...new Set(shown().map(base).filter(g => g !== null))], many = data.groups.filter((_, g) => isLocal(g)).length > 1;
  const named = many && used.length ? [`Training alone is ${used.map(label).join("; ")}.`] : [];
  return [...named, ...shown().map(g => data.groups[g].why).filter(why => why)].map(said => ` ${said}`).join("");
}

// the round that numbers are of: the last, or the kept one
const ending = () => data.runs.some(r => r.kept) ? "in the round chosen on validation data" : "in the last round";

// kept rounds, and runs that stopped early
function keptRounds() {
  return data.runs.filter(r => r.kept).map(r => ` ${label(r.group)}, seed ${r.seed}: ${r.kept}${r.stopped ? "; stopped early" : ""}.`).join("");
}

// settings of a search that the table omits
function leftOut() {
  if (!data.tuning || data.groups.length === data.tuning.settings.length) return "";
  const { settings } = data.tuning, longest = settings.filter(s => s.rounds === settings[0].rounds).length;
  const best = data.groups.length < longest ? `best ${data.groups.length} of the ${longest}` : longest;
  return ` The table and the figures show the ${best} settings that trained longest. All ${settings.length} of the search are listed under `
    + "“How the setting was chosen”, in “Numbers as a table”.";
}

// the models that clients chose: counts, or the choice of the selected client
function chosenModels() {
  return data.runs.filter(r => r.chosen).map(r => {
    const whose = ` ${label(r.group)}, seed ${r.seed}:`, one = state.client === null ? null : r.chosen[state.client];
    if (one) return one.model ? `${whose} the client chose ${one.model} in round ${one.round}${one.validation === undefined ? "" : `, on ${one.validation} validation samples`}.` : "";
    const names = r.chosen.map(c => c.model).filter(m => m), count = m => names.filter(n => n === m).length;
    const said = [...new Set(names)].sort((a, b) => count(b) - count(a)).map(m => `${m} ${count(m)}`).join(", ");
    return `${whose} each client chose on its validation data (${said}).`;
  }).join("");
}

function table() {
  const rows = ranked(), crossed = rows.some(r => r.others !== null), compared = rows.some(r => r.gain !== null);
  const figure = v => [written(mean(v), 2), v.length > 1 ? element("small", {}, `± ${written(spread(v), 2)}`) : null];
  const view = (r, name, v) => {
    const counts = ["local", "best"].find(one => r.runs.every(run => run.view === one)) ?? "merged";
    return counts === name ? element("b", {}, written(mean(v), 2)) : written(mean(v), 2);
  };
  const against = r => {
    if (r.gain === null) return ["–", "–"];
    const kind = even(r.gain) ? "quiet" : r.gain < 0 ? "lossy" : "gain";
    return [element("span", { class: kind }, points(r.gain)), r.better.join(" of ")];
  };
  const survived = r => data.groups[r.g].lost ? `, ${r.runs.length} of ${r.runs.length + data.groups[r.g].lost} seeds` : "";
  const budgets = r => there(r.runs.map(run => run.epsilon)), kept = rows.some(r => budgets(r).length);
  const spent = r => budgets(r).length ? Math.max(...budgets(r)).toFixed(2) : "none";
  const columns = [
    "method", head(metric()), ...(compared ? ["against local", "clients better"] : []), head("after local training"),
    head("after aggregation"), ...(crossed ? [head("on others' data")] : []), "personal %", ...(kept ? ["epsilon"] : []), "MB up", "MB down", "seconds",
  ];
  const body = rows.map(r => [
    [swatch(colour(r.g), symbol(r.g)), label(r.g) + survived(r)], figure(r.all),
    ...(compared ? against(r) : []), view(r, "local", r.local), view(r, "merged", r.merged),
    ...(crossed ? [written(r.others, 2)] : []), percent(r.share), ...(kept ? [spent(r)] : []), mega(r.up), mega(r.down), r.seconds.toFixed(1),
  ]);
  const place = byId("table");
  place.querySelector(".grid")?.remove();
  const whose = state.client === null ? `Unweighted mean over clients of each client's ${metric()}`
    : `${Metric()} of client ${clientName(state.client)}`;
  place.querySelector(".say").textContent = `${whose} on its own ${data.scored} data ${ending()}`
    + `${seeded() ? ", mean and standard deviation over seeds" : ""}. Bold: the model that the method reports, after local training `
    + "or after aggregation. MB and seconds are for the whole run."
    + (kept ? " Epsilon: the differential privacy of one client or one sample; none: no guarantee." : "") + remarks() + keptRounds()
    + chosenModels() + leftOut();
  place.append(grid(columns, body, i => strong(rows[i].g) ? "own" : null));
  const failed = place.querySelector(".failed");
  failed.hidden = !data.failed.length;
  failed.replaceChildren(...data.failed.flatMap(([run, why]) => [`${run} diverged: ${why}`, element("br")]));
  place.append(failed);
}

// every metric over clients or of the selected client, one row per method and metric
function metrics() {
  const one = state.client, show = (m, v) => v === null ? "–" : m.percent ? (100 * v).toFixed(2) : v.toFixed(4);
  const found = ranked().flatMap(({ g, runs }) => data.metrics.filter(m => runs.some(r => r.metrics[m.name])).map(m => {
    const all = runs.filter(r => r.metrics[m.name]).map(r => r.metrics[m.name]), of = key => there(all.map(s => s[key]));
    const own = one === null ? of("mean") : there(all.map(s => s.values[one]));
    const over = key => of(key).length === all.length ? show(m, mean(of(key))) : "–";
    const [least, most] = [Math.min(...of("defined")), Math.max(...of("defined"))];
    const value = [show(m, mean(own)), own.length > 1 ? element("small", {}, `± ${show(m, spread(own))}`) : null];
    const rest = [over("worst_tenth"), over("weighted"), `${least === most ? least : `${least} to ${most}`} of ${all[0].clients}`];
    return [label(g), m.percent ? `${m.name} %` : m.name, value, ...(one === null ? rest : [])];
  }));
  const whose = one === null ? `Each metric over clients ${ending()}: ` + "the mean, the mean of the worst tenth of clients (at least "
    + "one), the mean weighted by test samples, and the number of clients for which it is defined; the others are excluded."
    : `Each metric of client ${clientName(one)} ${ending()}; – means that it is not defined on the client's data.`;
  const columns = one === null ? ["method", "metric", "mean", "worst tenth", "weighted", "clients"] : ["method", "metric", "value"];
  byId("metrics").replaceChildren(element("h2", {}, "Every metric"), element("p", { class: "say" }, whose), grid(columns, found));
}

// only for deployed runs: clients that missed rounds, rejected messages, and clients that lost their state
function attendance() {
  const section = byId("missed"), runs = data.runs.filter(r => r.missed), one = state.client;
  section.hidden = !runs.length;
  if (!runs.length) return;
  const name = r => `${label(r.group)}, seed ${r.seed}`;
  const gaps = runs.flatMap(r => Object.entries(r.missed).filter(([c]) => one === null || +c === one)
    .map(([c, rounds]) => [name(r), clientName(+c), rounds.join(", ")]));
  const listed = kind => runs.flatMap(r => r[kind].filter(x => one === null || x.who === `client ${one}`)
    .map(x => [name(r), x.round, x.who, x.why]));
  const turned = listed("rejected"), back = listed("set_back");
  const away = runs.flatMap(r => Object.entries(r.absent).filter(([c]) => one === null || +c === one)
    .map(([c, why]) => [name(r), clientName(+c), why]));
  const say = (list, none, some) => element("p", { class: "say" }, list.length ? some : none);
  section.replaceChildren(
    element("h2", {}, "Missed rounds"),
    say(gaps, `${one === null ? "No client" : `Client ${clientName(one)} never`} missed a round.`,
      "These rounds ran without these clients, which later rejoined with their own state."),
    ...(gaps.length ? [grid(["run", "client", "rounds missed"], gaps)] : []),
    ...(turned.length ? [say(turned, "", "Rejected:"), grid(["run", "round", "who", "why"], turned)] : []),
    ...(back.length ? [say(back, "", "Reset to an older state, because the vault had lost a round:"), grid(["run", "round", "who", "why"], back)] : []),
    ...(away.length ? [say(away, "", "Absent at the end, so without a final model until the run is resumed:"),
      grid(["run", "client", "why"], away)] : []),
  );
}

function frame() {
  const main = byId("main"), pair = element("div", { class: "pair" });
  main.replaceChildren(element("section", { id: "table" }, element("h2", {}, "Results"), element("p", { class: "say" }),
    element("p", { class: "failed say" })));
  for (const f of FIGURES) {
    const details = element("details", {}, element("summary", {}, "Numbers as a table"));
    details.addEventListener("toggle", () => numbers(f));
    (f.paired ? pair : main).append(element("section", { id: f.id },
      element("h2", {}, f.title), element("p", { class: "say" }), element("div", { class: "picks" }),
      f.beside ? element("div", { class: "beside" }) : null,
      element("figure", {}, element("div", { class: "chart", role: "img" }), element("figcaption", {})), details));
  }
  main.append(pair, element("section", { id: "metrics" }), element("section", { id: "missed", hidden: "" }),
    element("section", { id: "config" }), element("section", { id: "environment" }));
}

function numbers(f) {
  const details = byId(f.id).querySelector("details");
  details.querySelector(".grid")?.remove();
  if (details.open && f.ready()) details.append(grid(...f.numbers()));
}

// a figure's choices, rebuilt when the available options change
function choices(f, place) {
  const list = f.picks ? f.picks().filter(([, , options]) => options.length > 1) : [];
  const key = JSON.stringify(list.map(([name, , options]) => [name, options]));
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    place.replaceChildren(...list.map(([name, text, options, , kind]) => {
      const control = kind === "range" ? element("input", { type: "range", min: 0, max: options.length - 1, step: 1 })
        : element("select", {}, options.map(([, said], i) => element("option", { value: i }, said)));
      control.dataset.pick = name;
      control.addEventListener("input", () => {
        state.picks[f.id][name] = options[+control.value][0];
        render([f]);
      });
      return element("label", {}, text, control, kind === "range" ? element("output", {}) : null);
    }));
  }
  for (const [name, , options, value] of list) {
    const control = place.querySelector(`[data-pick=${name}]`), at = options.findIndex(([v]) => v === value);
    control.value = at;
    const said = control.parentElement.querySelector("output");
    if (said) {
      said.textContent = options[at][1];
      control.setAttribute("aria-valuetext", options[at][1]);
    }
  }
}

function render(some = FIGURES) {
  if (some === FIGURES) {
    header();
    filter();
    table();
    metrics();
    attendance();
    document.querySelector(".pair").classList.toggle("large", clientCount() > 12);
  }
  for (const f of some) {
    const section = byId(f.id), chart = section.querySelector(".chart"), ready = Boolean(f.ready());
    section.hidden = Boolean(f.optional) && !ready;
    section.querySelector(".say").textContent = ready ? f.say() : f.missing || "Nothing to show.";
    for (const part of section.querySelectorAll(".picks, .beside, figure, details")) part.hidden = !ready;
    if (!ready) continue;
    choices(f, section.querySelector(".picks"));
    if (f.beside) section.querySelector(".beside").replaceChildren(f.beside());
    f.draw(chart);
    const caption = f.caption();
    section.querySelector("figcaption").textContent = caption;
    chart.setAttribute("aria-label", [f.title + ".", f.alt?.(), caption].filter(Boolean).join(" "));
    numbers(f);
  }
}

// on a phone, the filter is one line until opened
function unfold() {
  byId("filter").open = !phone();
}

function setClient(client) {
  state.client = client === state.client ? null : client;
  history.replaceState(null, "", state.client === null ? location.pathname + location.search : `#client=${state.client}`);
  render();
}

function about() {
  const flat = c => Object.entries(c).flatMap(([k, v]) =>
    v && typeof v === "object" ? Object.entries(v).map(([n, w]) => [`${k}.${n}`, w]) : [[k, v]]);
  const show = v => v === null ? "none" : typeof v === "boolean" ? (v ? "yes" : "no") : String(v);
  const pairs = list => element("dl", { class: "pairs" },
    list.map(([k, v]) => element("div", {}, element("dt", {}, k), element("dd", {}, show(v)))));
  const all = data.groups.map(g => new Map(flat(g.config))), keys = [...new Set(all.flatMap(m => [...m.keys()]))];
  const common = keys.filter(k => all.every(m => m.has(k) && show(m.get(k)) === show(all[0].get(k))));
  const apart = keys.filter(k => !common.includes(k) && k !== "method.name");
  const raw = { runs: data.runs.map(r => r.path), configurations: Object.fromEntries(data.groups.map(g => [g.label, g.config])) };
  byId("config").replaceChildren(
    element("h2", {}, "Configuration"),
    element("p", { class: "say" }, [
      networked() ? "" : "The complete configuration, including defaults. To repeat a run, pass the config.json in its directory to "
        + "fedselect run --config.",
      data.runs.some(r => r.deployed) ? "For deployed runs: the settings that all clients share, including defaults." : "",
    ].filter(Boolean).join(" ")),
    pairs(common.map(k => [k, all[0].get(k)])),
    ...(apart.length ? [
      element("h3", {}, "Differences"),
      grid(["option", ...data.groups.map(g => g.label)], apart.map(k => [k, ...all.map(m => m.has(k) ? show(m.get(k)) : "")])),
    ] : []),
    element("details", {}, element("summary", {}, "JSON and paths of the runs"),
      element("pre", {}, JSON.stringify(raw, null, 2))),
  );
  byId("environment").replaceChildren(element("h2", {}, "Environment"), ...data.environments.map(e => pairs(Object.entries(e))),
    data.environments.length ? "" : element("p", { class: "say" }, "Recorded when a run finishes."));
  byId("footer").textContent =
    `Made with fedselect ${data.version}, ${data.made}. This page is self-contained and loads nothing from the network.`;
}

// while a run is running: poll for news as long as the server answers and the page is visible
async function follow() {
  const tellBusy = () => {
    const busy = data.runs.filter(r => !r.finished);
    const said = busy.map(r => `${label(r.group)} seed ${r.seed}: round ${r.round.at(-1)} of ${r.rounds}`);
    byId("live").textContent = `live · ${said.join(", ") || "finished"}`;
  };
  tellBusy();
  for (let tag = null; ;) {
    await new Promise(done => setTimeout(done, 2000));
    if (document.hidden) continue;
    try {
      const answer = await fetch("data.json", tag ? { headers: { "If-None-Match": tag } } : {});
      if (answer.status !== 200) continue;
      tag = answer.headers.get("ETag");
      data = await answer.json();
    } catch {
      byId("live").textContent = "the run has ended; this page no longer updates";
      return;
    }
    tellBusy();
    render();
    about();
  }
}

const asked = /client=(\d+)/.exec(location.hash);
if (asked && +asked[1] < clientCount()) state.client = +asked[1];
frame();
unfold();
render();
about();
dark.addEventListener("change", () => render());
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (printing || window.innerWidth === width) return;
  width = window.innerWidth;
  unfold();
  render();
});
function paper(on) {
  printing = on;
  document.documentElement.classList.toggle("paper", on);
  render();
}
window.addEventListener("beforeprint", () => paper(true));
window.addEventListener("afterprint", () => paper(false));
if (document.body.classList.contains("live")) follow();
