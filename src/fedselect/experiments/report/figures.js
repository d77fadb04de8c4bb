// The figures: each has a title, what it shows in words, its choices, how it is drawn, a caption and its numbers.

const groupRuns = g => data.runs.filter(r => r.group === g);
const colour = g => data.groups[g].colour[dark.matches ? 1 : 0];
const label = g => data.groups[g].label;
const shown = () => data.groups.map((_, g) => g).filter(g => !state.hidden.has(g));
const local = () => data.groups.findIndex(g => g.method === "local");
const ours = () => Math.max(0, data.groups.findIndex(g => g.method === "fedselect"));
const seedsOf = g => groupRuns(g).map(r => r.seed);
const clientCount = () => Math.max(...data.runs.map(r => r.last.accuracy.length));
const clientName = i => (data.federations.find(f => f.clients.length > i) || { clients: [] }).clients[i]?.name ?? String(i);
const people = run => data.federations[run.federation].clients;
const tell = (run, i) => { const c = people(run)[i].classes; return c.length ? `${people(run)[i].name} · ${clip(c.join(" "))}` : people(run)[i].name; };
const clip = text => text.length > (phone() ? 12 : 16) ? text.slice(0, phone() ? 11 : 15) + "…" : text;
const finals = (run, client, key = "accuracy") => client === null ? mean(there(run.last[key])) : run.last[key][client];

function curve(g, x, y) {
  const at = new Map();
  for (const run of groupRuns(g)) run.round.forEach((round, i) => {
    const v = y(run, i);
    if (v === null || v === undefined) return;
    if (!at.has(round)) at.set(round, { xs: [], ys: [] });
    at.get(round).xs.push(x(run, i)); at.get(round).ys.push(100 * v);
  });
  return [...at].sort((a, b) => a[0] - b[0]).map(([round, { xs, ys }]) => {
    const m = mean(ys), off = spread(ys);
    return { x: mean(xs), y: m, low: m - off, high: m + off, round, text: ys.length > 1 ? ` ± ${off.toFixed(1)}` : "" };
  });
}
const accuracyAt = (run, i) => state.client === null ? run.accuracy[i] : run.clients.accuracy[i][state.client];
const upAt = (run, i) => (state.client === null ? run.up[i] : run.clients.up[i][state.client]) / 1e6;
const strong = g => data.groups[g].method === "fedselect";
const dash = g => data.groups[g].method === "local" ? "dot" : "solid";
const seeded = () => Math.max(...data.groups.map((_, g) => groupRuns(g).length)) > 1;

// gain of group g over Local, client by client, for the same seed: [{client, run, own, alone}]
function gains(g, seed = null) {
  const alone = local() < 0 ? [] : groupRuns(local());
  return groupRuns(g).filter(r => seed === null || r.seed === seed).flatMap(run => {
    const other = alone.find(r => r.seed === run.seed && r.last.accuracy.length === run.last.accuracy.length);
    return run.last.accuracy.map((own, client) => ({ client, run, own, alone: other ? other.last.accuracy[client] : null })).filter(p => p.own !== null);
  });
}
const better = pairs => { const p = pairs.filter(q => q.alone !== null); return p.length ? [p.filter(q => q.own > q.alone).length, p.length] : null; };

const runChoice = has => { const runs = data.runs.filter(has); return runs.length ? runs : null; };
const choiceOfGroup = runs => [...new Set(runs.map(r => r.group))].map(g => [g, label(g)]);
const choiceOfSeed = (runs, g) => runs.filter(r => r.group === g).map(r => [r.seed, `seed ${r.seed}`]);

// the value of a figure's select among [[value, text]]: what was chosen, or the first where that is not there any more
function chosen(id, key, list, first = 0) {
  const held = (state.picks[id] ||= {})[key];
  return list.some(([v]) => v === held) ? held : (list[first] || list[0])[0];
}

function runPicks(id, runs) {
  const groups = choiceOfGroup(runs);
  const preferred = Math.max(0, groups.findIndex(([g]) => g === ours()));
  const group = chosen(id, "group", groups, preferred), seeds = choiceOfSeed(runs, group);
  const seed = chosen(id, "seed", seeds);
  return { picks: [["group", "Method", groups, group], ["seed", "Seed", seeds, seed]], run: runs.find(r => r.group === group && r.seed === seed), group };
}

// ticks of a logarithmic axis: 1, 2 and 5 of each decade, or the decades alone where there are many
function decades(xs) {
  const low = Math.floor(Math.log10(Math.min(...xs))), high = Math.ceil(Math.log10(Math.max(...xs))), few = high - low < (phone() ? 3 : 5);
  const ticks = Array.from({ length: high - low + 1 }, (_, k) => (few ? [1, 2, 5] : [1]).map(m => +(m * 10 ** (low + k)).toPrecision(1))).flat();
  return { tickvals: ticks, ticktext: ticks.map(t => t.toLocaleString("en", { maximumFractionDigits: 9 })) };
}

const FIGURES = [
  {
    id: "convergence", title: "Accuracy over rounds",
    say: () => `${state.client === null ? "Each client's accuracy on its own test data, mean over clients" : `Accuracy of client ${clientName(state.client)} on its own test data`}.${seeded() ? " Bands are one standard deviation over seeds." : ""}`,
    ready: () => shown().length,
    draw(place) {
      drawLines(place, shown().map(g => ({ label: label(g), colour: colour(g), strong: strong(g), dash: dash(g), points: curve(g, (r, i) => r.round[i], accuracyAt) })).filter(c => c.points.length), {
        xaxis: { title: { text: "round" } }, hover: "%{y:.1f}%%{text}",
      });
    },
    alt: () => ranked().map(r => `${label(r.g)} ends at ${percent(r.mean)}%`).join(", ") + ".",
    caption() {
      const soon = shown().map(g => {
        const line = curve(g, (r, i) => r.round[i], accuracyAt), last = line.at(-1)?.y, at = line.findLastIndex(p => Math.abs(p.y - last) > 1);
        return line.length > 1 ? [label(g), line[at + 1].round] : null;
      }).filter(s => s).sort((a, b) => a[1] - b[1]);
      return soon.length ? `Rounds until accuracy stays within a point of where it ends: ${soon.map(([name, round]) => `${name} ${round}`).join(", ")}.` : "";
    },
    numbers() {
      const curves = shown().map(g => [g, new Map(curve(g, (r, i) => r.round[i], accuracyAt).map(p => [p.round, p]))]);
      const rounds = [...new Set(curves.flatMap(([, c]) => [...c.keys()]))].sort((a, b) => a - b);
      return [["round", ...curves.map(([g]) => `${label(g)} %`)], rounds.map(r => [r, ...curves.map(([, c]) => c.has(r) ? c.get(r).y.toFixed(1) + c.get(r).text : "–")])];
    },
  },
  {
    id: "gains", title: "Who gains, who loses",
    say: () => local() < 0 ? "Final accuracy of every client on its own test data. Run the method local on the same seeds to see who gains by taking part."
      : "Final accuracy of every client on its own test data. A line leads from training alone (hollow) to the chosen method; small dots are the other methods. Click a client to filter the page to it.",
    ready: () => shown().length,
    picks() {
      const groups = shown().map(g => [g, label(g)]);
      const group = chosen(this.id, "group", groups, Math.max(0, groups.findIndex(([g]) => g === ours())));
      const seeds = [...(seedsOf(group).length > 1 ? [[null, "mean over seeds"]] : []), ...choiceOfSeed(data.runs, group)];
      return [["group", "Method", groups, group], ["seed", "Seed", seeds, chosen(this.id, "seed", seeds)]];
    },
    rows() {
      const [[, , , group], [, , , seed]] = this.picks();
      const of = g => { const by = new Map(); for (const p of gains(g, seed)) by.set(p.client, [...(by.get(p.client) || []), p]); return by; };
      const all = new Map(shown().map(g => [g, of(g)]));
      return [...all.get(group)].map(([client, pairs]) => {
        const own = mean(pairs.map(p => p.own)), alone = mean(there(pairs.map(p => p.alone)));
        const same = new Set(pairs.map(p => tell(p.run, client))).size === 1;
        return { client, own, alone, gain: alone === null ? null : own - alone, name: same ? tell(pairs[0].run, client) : clientName(client),
          others: [...all].filter(([g]) => g !== group && g !== local()).map(([g, by]) => ({ g, v: mean((by.get(client) || []).map(p => p.own)) })) };
      }).sort((a, b) => (b.gain ?? b.own) - (a.gain ?? a.own));
    },
    draw(place) {
      const rows = this.rows(), [[, , , group]] = this.picks(), own = colour(group), solo = local() >= 0 && group !== local();
      const dim = r => state.client === null || state.client === r.client ? 1 : 0.18;
      const line = (rows_, c) => ({ x: rows_.flatMap(r => [100 * r.alone, 100 * r.own, null]), y: rows_.flatMap(r => [rows.indexOf(r), rows.indexOf(r), null]), mode: "lines", line: { color: c, width: 3 }, hoverinfo: "skip" });
      const lit = rows.filter(r => solo && r.alone !== null && dim(r) === 1);
      const dots = (name, c, at, value, marker) => ({ x: value.map(v => v === null ? null : 100 * v), y: at.map(r => rows.indexOf(r)), customdata: at.map(r => r.client), name, mode: "markers", marker: { color: c, opacity: at.map(dim), ...marker }, hovertemplate: "%{x:.1f}%<extra>" + name + "</extra>" });
      const rest = rows.length ? rows[0].others.map(({ g }, k) => dots(label(g), colour(g), rows, rows.map(r => r.others[k].v), { size: 6, opacity: rows.map(r => 0.6 * dim(r)) })) : [];
      draw(place, [
        ...rest, line(lit.filter(r => r.gain >= 0), own), line(lit.filter(r => r.gain < 0), css("--loss")),
        ...(solo ? [dots("local", css("--paper"), rows, rows.map(r => r.alone), { size: 9, line: { color: colour(local()), width: 2 } })] : []),
        dots(label(group), own, rows, rows.map(r => r.own), { size: 12 }),
      ], {
        height: 26 * rows.length + 70, margin: { l: 20, r: solo ? 52 : 12, t: 6, b: 44 },
        xaxis: { ticksuffix: "%", title: { text: "accuracy on own test data" }, nticks: phone() ? 5 : 9 },
        yaxis: { tickvals: rows.map((_, i) => i), ticktext: rows.map(r => r.name), range: [rows.length - 0.5, -0.5], showgrid: false, ticklen: 0, title: { text: "client" } },
        annotations: solo ? rows.filter(r => r.gain !== null).map(r => ({ xref: "paper", x: 1, xanchor: "left", xshift: 8, y: rows.indexOf(r), text: points(r.gain), showarrow: false, opacity: dim(r), font: { color: r.gain < 0 ? css("--loss") : r.gain > 0 ? own : css("--soft") } })) : [],
      }, p => setClient(p.customdata));
    },
    caption() {
      const [[, , , group], [, , , seed]] = this.picks(), found = better(gains(group, seed)), rows = this.rows().filter(r => r.gain !== null);
      if (!found || group === local() || !rows.length) return "Clients are sorted by accuracy.";
      const mine = rows.find(r => r.client === state.client), [best, worst] = [rows[0], rows.at(-1)];
      if (mine) return `Client ${clientName(mine.client)} has ${percent(mine.own)}% with ${label(group)} and ${percent(mine.alone)}% alone (${points(mine.gain)} points).`;
      return `With ${label(group)}, ${found[0]} of ${found[1]} ${seed === null && seedsOf(group).length > 1 ? "clients over all seeds" : "clients"} do better than alone. ` +
        `Client ${clientName(best.client)} ${best.gain < 0 ? "loses least" : "gains most"} (${points(best.gain)} points), client ${clientName(worst.client)} ${worst.gain < 0 ? "loses most" : "gains least"} (${points(worst.gain)}).`;
    },
    numbers() {
      const rows = this.rows(), [[, , , group]] = this.picks();
      return [["client", `${label(group)} %`, "local %", "gain", ...(rows[0]?.others || []).map(o => `${label(o.g)} %`)], rows.map(r => [r.name, percent(r.own), percent(r.alone), r.gain === null ? "–" : points(r.gain), ...r.others.map(o => percent(o.v))])];
    },
  },
  {
    id: "bytes", title: "Accuracy against bytes sent",
    say: () => `What accuracy costs: megabytes that ${state.client === null ? "all clients have" : `client ${clientName(state.client)} has`} sent to the server so far, on a logarithmic scale.`,
    ready: () => shown().some(g => groupRuns(g).some(r => r.up.at(-1) > 0)),
    draw(place) {
      const sends = shown().filter(g => groupRuns(g).some(r => r.up.at(-1) > 0)), quiet = shown().filter(g => !sends.includes(g));
      const curves = sends.map(g => ({ label: label(g), colour: colour(g), strong: strong(g), points: curve(g, upAt, accuracyAt).filter(p => p.x > 0).map(p => ({ ...p, low: p.y, high: p.y })) })).filter(c => c.points.length);
      if (!curves.length) return;
      const level = g => 100 * mean(there(groupRuns(g).map(r => finals(r, state.client))));
      drawLines(place, curves, {
        log: true, marks: true, hover: "%{x:.3~f} MB: %{y:.1f}%", xaxis: { title: { text: "MB sent" }, ...decades(curves.flatMap(c => c.points.map(p => p.x))) },
        before: quiet.map(g => ({ y: level(g), text: `${label(g)} sends nothing`, colour: colour(g) })),
        shapes: quiet.map(g => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: level(g), y1: level(g), line: { color: colour(g), width: 1.7, dash: "dot" } })),
      });
    },
    alt: () => ranked().map(r => `${label(r.g)}: ${percent(r.mean)}% for ${mega(r.up)} MB`).join(", ") + ".",
    caption() {
      if (local() < 0) return this.alt();
      const alone = 100 * mean(there(groupRuns(local()).map(r => finals(r, state.client))));
      const passed = shown().filter(g => g !== local()).map(g => [label(g), curve(g, upAt, accuracyAt).find(p => p.y > alone)?.x]);
      if (passed.every(([, x]) => x === undefined)) return `Nobody here passes training alone (${alone.toFixed(1)}%).`;
      return `MB sent until training alone (${alone.toFixed(1)}%) is passed: ${passed.map(([name, x]) => `${name} ${x === undefined ? "never" : mega(1e6 * x)}`).join(", ")}.`;
    },
    numbers: () => [["method", "MB sent", "accuracy %"], ranked().map(r => [label(r.g), mega(r.up), percent(r.mean)])],
  },
  {
    id: "shares", title: "What stays personal, layer by layer",
    say: () => `Share of each layer's parameters that stays with ${state.client === null ? "the client, mean over clients" : `client ${clientName(state.client)}`}${seeded() ? (state.client === null ? " and seeds" : ", mean over seeds") : ""}. Layers run from the input at the top to the output.`,
    ready: () => runChoice(r => r.shares.length),
    missing: "These runs keep no record of their masks; runs made with this version do.",
    picks() {
      const groups = choiceOfGroup(runChoice(r => r.shares.length));
      return [["group", "Method", groups, chosen(this.id, "group", groups, Math.max(0, groups.findIndex(([g]) => g === ours())))]];
    },
    grid() {
      const [[, , , group]] = this.picks(), runs = groupRuns(group).filter(r => r.shares.length);
      const layers = Object.keys(data.federations[runs[0].federation].layers), rounds = runs[0].round;
      const of = run => run.shares.map(([round, text]) => [round, unpack(text)]);
      const known = runs.map(of), clients = runs[0].last.accuracy.length;
      const at = (lines, round) => lines.findLast(([r]) => r <= round)?.[1];
      const value = (values, layer) => {
        if (!values) return null;
        const row = values.slice(layer * clients, (layer + 1) * clients);
        return state.client === null ? mean(there(row)) : row[state.client];
      };
      const z = layers.map((_, layer) => rounds.map(round => mean(there(known.map(lines => value(at(lines, round), layer))))));
      return { layers, rounds, z, sizes: Object.values(data.federations[runs[0].federation].layers) };
    },
    draw(place) {
      const { layers, rounds, z } = this.grid(), top = Math.max(0.01, ...z.flat().filter(v => v !== null)), many = layers.length > 30;
      const edges = [rounds[0] - 0.5, ...rounds.slice(1).map((r, i) => (r + rounds[i]) / 2), rounds.at(-1) + 0.5];
      draw(place, [{
        type: "heatmap", x: edges, y: layers.map((_, i) => i), z: z.map(row => row.map(v => v === null ? null : 100 * v)),
        zmin: 0, zmax: 100 * top, colorscale: scale(), ygap: many ? 0.5 : 2, showscale: many,
        colorbar: { thickness: 10, outlinewidth: 0, ticksuffix: "%", nticks: 5, len: 0.8, tickfont: { size: 11 } },
        text: z.map((row, l) => row.map((v, i) => `${layers[l]}, round ${rounds[i]}: ${percent(v)}% personal`)), hovertemplate: "%{text}<extra></extra>",
      }], {
        height: Math.max(200, (many ? 12 : 30) * layers.length) + 56, margin: { l: 20, r: many ? 10 : 60, t: 6, b: 44 },
        annotations: many ? [] : z.map((row, i) => ({ xref: "paper", x: 1, xanchor: "left", xshift: 6, y: i, text: `${percent(row.at(-1))}%`, showarrow: false })),
        xaxis: { title: { text: "round" }, showgrid: false },
        yaxis: { tickvals: layers.map((_, i) => i), ticktext: layers, range: [layers.length - 0.5, -0.5], showgrid: false, ticklen: 0, tickfont: { size: many || phone() ? 9 : 12 } },
      });
    },
    caption() {
      const { layers, z } = this.grid(), last = z.map(row => row.at(-1)), most = last.indexOf(Math.max(...last)), least = last.indexOf(Math.min(...last));
      return last[most] === last[least] ? `In the end every layer is ${percent(last[most])}% personal.`
        : `In the end ${layers[most]} is the most personal layer (${percent(last[most])}%), ${layers[least]} the least (${percent(last[least])}%).`;
    },
    numbers() {
      const { layers, rounds, z, sizes } = this.grid(), some = rounds.map((_, i) => i).filter(i => i === rounds.length - 1 || i % Math.ceil(rounds.length / 10) === 0);
      return [["layer", "parameters", ...some.map(i => `round ${rounds[i]} %`)], layers.map((l, k) => [l, sizes[k].toLocaleString("en"), ...some.map(i => percent(z[k][i]))])];
    },
  },
  {
    id: "overlap", title: "Do clients keep the same parameters?", paired: true,
    say: () => "Overlap of what two clients keep personal: entries both keep, as a share of those either keeps (intersection over union). Behind a client's name are the classes it trains on.",
    ready: () => runChoice(r => r.iou.length),
    missing: "No method here learns a mask of its own for each client, so there is no overlap to show.",
    picks() {
      const { picks, run } = runPicks(this.id, runChoice(r => r.iou.length));
      const layers = [[0, "all parameters"], ...Object.keys(data.federations[run.federation].layers).map((l, i) => [i + 1, l])];
      const rounds = run.iou.map(([r], i) => [i, `round ${r}`]);
      return [...picks, ["layer", "Layer", layers, chosen(this.id, "layer", layers)], ["round", "Round", rounds, chosen(this.id, "round", rounds, rounds.length - 1), "range"]];
    },
    matrix() {
      const runs = runChoice(r => r.iou.length), { run } = runPicks(this.id, runs), [, , [, , , layer], [, , , at]] = this.picks();
      const n = Math.min(run.last.accuracy.length, data.paired), pairs = n * (n - 1) / 2, values = unpack(run.iou[at][1]).slice(layer * pairs, (layer + 1) * pairs);
      const z = Array.from({ length: n }, () => Array(n).fill(null));
      let k = 0;
      for (let i = 0; i < n; i++) for (let j = i + 1; j < n; j++) z[i][j] = z[j][i] = values[k++];
      return { run, z };
    },
    draw(place) {
      const { run, z } = this.matrix(), who = people(run);
      const common = (i, j) => who[i].classes.filter(c => who[j].classes.includes(c));
      drawMatrix(place, z, run, {
        xtitle: "client", ytitle: phone() ? "client" : "client and its classes", unit: "%", only: state.client, pick: setClient,
        hover: (i, j) => z[i][j] === null ? "" : `clients ${who[i].name} and ${who[j].name}: ${percent(z[i][j])}%<br>classes in common: ${common(i, j).join(", ") || "none"}`,
      });
    },
    caption() {
      const { run, z } = this.matrix(), who = people(run), by = new Map();
      z.forEach((row, i) => row.forEach((v, j) => {
        if (i >= j || v === null || (state.client !== null && i !== state.client && j !== state.client)) return;
        const k = who[i].classes.filter(c => who[j].classes.includes(c)).length;
        by.set(k, [...(by.get(k) || []), v]);
      }));
      const all = [...by].sort((a, b) => a[0] - b[0]);
      if (!all.length) return "Nothing is personal here yet.";
      return `Percent overlap; mean ${percent(mean(all.flatMap(([, v]) => v)))}%. By number of classes in common: ${all.map(([k, v]) => `${k}: ${percent(mean(v))}%`).join(", ")}.`;
    },
    numbers() { const { run, z } = this.matrix(), names = z.map((_, i) => tell(run, i)); return [["", ...names], z.map((row, i) => [names[i], ...row.map(v => percent(v))])]; },
  },
  {
    id: "cross", title: "Every model on every client's data", paired: true,
    say: () => "Accuracy of each client's final model (row) on each client's test data (column). The diagonal is a client's own; what is left of it shows how much a model still knows that its client never saw.",
    ready: () => runChoice(r => r.cross),
    missing: "Runs made with --cross also try every client's model on every other client's data.",
    picks() { return runPicks(this.id, runChoice(r => r.cross)).picks; },
    draw(place) {
      const { run } = runPicks(this.id, runChoice(r => r.cross)), who = people(run);
      drawMatrix(place, run.cross, run, {
        xtitle: "test data of", ytitle: "model of", unit: "%", only: state.client, pick: setClient,
        hover: (i, j) => run.cross[i][j] === null ? "" : `model of client ${who[i].name} on data of client ${who[j].name}: ${percent(run.cross[i][j])}%`,
      });
    },
    caption() {
      const { run } = runPicks(this.id, runChoice(r => r.cross)), mine = (i, j) => state.client === null || i === state.client;
      const cells = own => there(run.cross.flatMap((row, i) => row.filter((_, j) => mine(i, j) && (i === j) === own)));
      return `${state.client === null ? "On their own client's data models reach" : "On its own data the model reaches"} ${percent(mean(cells(true)))}% ${state.client === null ? "on average" : ""}, on other clients' data ${percent(mean(cells(false)))}%.`.replace(" ,", ",");
    },
    numbers() {
      const { run } = runPicks(this.id, runChoice(r => r.cross)), names = people(run).map((_, i) => tell(run, i));
      return [["model of", ...names], run.cross.map((row, i) => [names[i], ...row.map(v => percent(v))])];
    },
  },
];
