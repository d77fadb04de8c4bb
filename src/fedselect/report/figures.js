// Figures of the headline metric. A figure has a title, a description, choices, a drawing, a caption and its numbers as a table;
// `ready` tells whether there is anything to show.

const groupRuns = g => data.runs.filter(r => r.group === g);
const colour = g => data.groups[g].colour[night() ? 1 : 0];
const symbol = g => data.groups[g].symbol;
const label = g => data.groups[g].label;
const shown = () => data.groups.map((_, g) => g).filter(g => !state.hidden.has(g));
const base = g => data.groups[g].alone; // the group of local that it is compared with, or null
const isLocal = g => data.groups[g].method === "local";
const ours = () => Math.max(0, data.groups.findIndex(g => g.method === "fedselect"));
const strong = g => data.groups[g].method === "fedselect";
const seeded = () => Math.max(...data.groups.map((_, g) => groupRuns(g).length)) > 1;
const networked = () => data.runs.every(r => r.deployed);

const clientCount = () => Math.max(...data.runs.map(r => r.last.value.length));
const people = run => data.federations[run.federation].clients;
const clientName = i => data.federations.find(f => f.clients.length > i).clients[i].name;
const clip = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;
const tell = (run, i) => {
  const { name, classes } = people(run)[i];
  return classes.length ? `${name} · ${clip(classes.join(" "), phone() ? 12 : 16)}` : name;
};

const finals = (run, key = "value") => state.client === null ? mean(there(run.last[key])) : run.last[key][state.client];
const valueAt = (run, i) => state.client === null ? run.value[i] : run.clients.value[i][state.client];
const upAt = (run, i) => (state.client === null ? run.up[i] : run.clients.up[i][state.client]) / 1e6;
const roundAt = (run, i) => run.round[i];

const roundAxis = () => {
  const few = Math.max(...data.runs.map(r => r.round.at(-1))) < 10;
  return { title: { text: "round" }, unifiedhovertitle: { text: "round %{x}" }, ...(few ? { dtick: 1 } : {}) };
};

// the headline metric of a group's runs over x, mean and spread over seeds
function curve(g, x) {
  const at = new Map();
  for (const run of groupRuns(g)) {
    run.round.forEach((round, i) => {
      const y = valueAt(run, i);
      if (y === null || y === undefined) return;
      if (!at.has(round)) at.set(round, { xs: [], ys: [] });
      at.get(round).xs.push(x(run, i));
      at.get(round).ys.push(drawn(y));
    });
  }
  return [...at].sort((a, b) => a[0] - b[0]).map(([round, { xs, ys }]) => {
    const y = mean(ys), off = spread(ys);
    return { round, x: mean(xs), y, low: y - off, high: y + off, text: ys.length > 1 ? ` ± ${off.toFixed(decimals())}` : "" };
  });
}

// a group's clients with their scores and those of training alone: [{client, run, own, alone}]
function gains(g, seed = null) {
  return groupRuns(g).filter(r => seed === null || r.seed === seed).flatMap(run => {
    const other = run.alone === null ? null : data.runs[run.alone];
    return run.last.value
      .map((own, client) => ({ client, run, own, alone: other ? other.last.value[client] : null }))
      .filter(p => p.own !== null);
  });
}
function better(pairs) {
  const known = pairs.filter(p => p.alone !== null);
  return known.length ? [known.filter(p => betterBy(p.own, p.alone) > 0).length, known.length] : null;
}

// the selected value among [[value, text]], or the first if the selection no longer exists
function chosen(id, key, list, first = 0) {
  const held = (state.picks[id] ||= {})[key];
  return list.some(([v]) => v === held) ? held : (list[first] || list[0])[0];
}
const preferred = groups => Math.max(0, groups.findIndex(([g]) => g === ours()));
const groupsOf = runs => [...new Set(runs.map(r => r.group))].map(g => [g, label(g)]);
const seedsOf = (runs, g) => runs.filter(r => r.group === g).map(r => [r.seed, `seed ${r.seed}`]);

const convergence = {
  id: "convergence", get title() { return `${Metric()} over rounds`; },
  say: () => (state.client === null ? `Each client's ${metric()} on its own ${data.scored} data, mean over clients.`
    : `${Metric()} of client ${clientName(state.client)} on its own ${data.scored} data.`)
    + (seeded() ? " Bands are one standard deviation over seeds." : ""),
  ready: () => shown().length,
  draw(place) {
    drawLines(place, shown().map(g => ({
      label: label(g), colour: colour(g), symbol: symbol(g), strong: strong(g), dash: isLocal(g) ? "dot" : "solid", points: curve(g, roundAt),
    })).filter(c => c.points.length), { xaxis: roundAxis(), hover: `%{y:.${decimals()}f}${unit()}%{text}` });
  },
  alt: () => ranked().map(r => `${label(r.g)} ends at ${written(r.mean)}${unit()}`).join(", ") + ".",
  caption() {
    if (!data.headline.percent) return "";
    const settled = shown().map(g => [label(g), curve(g, roundAt)]).filter(([, line]) => line.length > 1).map(([name, line]) => {
      const last = line.at(-1).y, at = line.findLastIndex(p => Math.abs(p.y - last) > 1);
      return [name, line[at + 1].round, at + 2 === line.length];
    }).sort((a, b) => a[1] - b[1]);
    const most = 10, more = settled.length > most ? `, and ${settled.length - most} more` : "";
    const said = settled.slice(0, most).map(([name, round, never]) => `${name} ${never ? "only at the end" : round}`).join(", ") + more;
    return said && `Rounds until ${metric()} stays within one point of its final value: ${said}.`;
  },
  numbers() {
    const curves = shown().map(g => [g, new Map(curve(g, roundAt).map(p => [p.round, p.y.toFixed(decimals()) + p.text]))]);
    const rounds = [...new Set(curves.flatMap(([, c]) => [...c.keys()]))].sort((a, b) => a - b);
    return [["round", ...curves.map(([g]) => head(label(g)))], rounds.map(r => [r, ...curves.map(([, c]) => c.get(r) || "–")])];
  },
};

const gained = {
  id: "gains", title: "Which clients gain or lose",
  say() {
    const [[, , , group]] = this.picks(), { why } = data.groups[group], solo = base(group);
    return `Final ${metric()} of every client on its own ${data.scored} data.${why && ` ${why}`}` + (solo === null ? ""
      : ` A line leads from training alone (${label(solo)}, hollow) to the chosen method; small dots are the other methods. `
        + "Click a client to filter the page to it.");
  },
  ready: () => shown().length,
  picks() {
    const groups = shown().map(g => [g, label(g)]), group = chosen(this.id, "group", groups, preferred(groups));
    const each = seedsOf(data.runs, group), seeds = each.length > 1 ? [[null, "mean over seeds"], ...each] : each;
    return [["group", "Method", groups, group], ["seed", "Seed", seeds, chosen(this.id, "seed", seeds)]];
  },
  rows() {
    const [[, , , group], [, , , seed]] = this.picks();
    const others = shown().filter(g => g !== group && g !== base(group)).map(g => ({ g, pairs: gains(g, seed) }));
    const by = new Map();
    for (const p of gains(group, seed)) by.set(p.client, [...(by.get(p.client) || []), p]);
    return [...by].map(([client, pairs]) => {
      const known = pairs.filter(p => p.alone !== null); // seeds without a local run are omitted if others have one
      const own = mean((known.length ? known : pairs).map(p => p.own)), alone = mean(known.map(p => p.alone));
      const names = [...new Set(pairs.map(p => tell(p.run, client)))];
      return {
        client, own, alone, gain: alone === null ? null : betterBy(own, alone), name: names.length === 1 ? names[0] : clientName(client),
        others: others.map(o => ({ g: o.g, v: mean(o.pairs.filter(p => p.client === client).map(p => p.own)) })),
      };
    }).sort((a, b) => a.gain === null || b.gain === null ? betterBy(b.own, a.own) : b.gain - a.gain);
  },
  draw(place) {
    const rows = this.rows(), [[, , , group]] = this.picks(), own = colour(group), loss = css("--loss");
    const solo = base(group) !== null;
    const dim = r => state.client === null || state.client === r.client ? 1 : 0.18;
    const dots = (name, paint, value, marker) => ({
      x: rows.map(r => drawn(value(r))), y: rows.map((_, i) => i), customdata: rows.map(r => r.client),
      name, mode: "markers", marker: { color: paint, opacity: rows.map(dim), ...marker },
      hovertemplate: `%{x:.${decimals()}f}${unit()}<extra>${name}</extra>`,
    });
    const lines = (keep, paint) => ({
      x: rows.flatMap(r => keep(r) ? [drawn(r.alone), drawn(r.own), null] : []),
      y: rows.flatMap((r, i) => keep(r) ? [i, i, null] : []), mode: "lines", line: { color: paint, width: 3 }, hoverinfo: "skip",
    });
    const lit = r => solo && r.gain !== null && dim(r) === 1;
    const others = rows[0].others.map(({ g }, k) =>
      dots(label(g), colour(g), r => r.others[k].v, { size: 6, symbol: symbol(g), opacity: rows.map(r => 0.6 * dim(r)) }));
    const hollow = solo
      ? [dots(label(base(group)), css("--paper"), r => r.alone, { size: 9, symbol: symbol(base(group)), line: { color: colour(base(group)), width: 2 } })] : [];
    draw(place, [
      ...others, lines(r => lit(r) && r.gain >= 0, own), lines(r => lit(r) && r.gain < 0, loss), ...hollow,
      dots(label(group), own, r => r.own, { size: 12, symbol: symbol(group) }),
    ], {
      height: 26 * rows.length + 70, margin: { l: 20, r: solo ? (data.headline.percent ? 52 : 68) : 12, t: 6, b: 44 },
      xaxis: { ticksuffix: unit(), title: { text: `${metric()} on own ${data.scored} data` }, nticks: phone() ? 5 : 9 },
      yaxis: {
        tickvals: rows.map((_, i) => i), ticktext: rows.map(r => r.name), range: [rows.length - 0.5, -0.5], showgrid: false,
        ticklen: 0, title: { text: "client" },
      },
      annotations: rows.flatMap((r, i) => !solo || r.gain === null ? [] : [{
        xref: "paper", x: 1, xanchor: "left", xshift: 8, y: i, text: points(r.gain), showarrow: false, opacity: dim(r),
        font: { color: even(r.gain) ? css("--soft") : r.gain < 0 ? loss : own },
      }]),
    }, p => setClient(p.customdata));
  },
  caption() {
    const [[, , , group], [, , , seed]] = this.picks(), found = better(gains(group, seed));
    const rows = this.rows().filter(r => r.gain !== null), mine = rows.find(r => r.client === state.client);
    if (!found) return `Clients are sorted by ${metric()}.`;
    if (mine) {
      return `Client ${clientName(mine.client)} has ${written(mine.own)}${unit()} with ${label(group)} and ${written(mine.alone)}${unit()} alone `
        + `(${points(mine.gain)}${inPoints()}).`;
    }
    const [best, worst] = [rows[0], rows.at(-1)], all = seed === null && seedsOf(data.runs, group).length > 1;
    return `With ${label(group)}, ${found[0]} of ${found[1]} clients${all ? " over all seeds" : ""} do better than alone. `
      + `Client ${clientName(best.client)} ${best.gain < 0 ? "loses least" : "gains most"} (${points(best.gain)}${inPoints()}), `
      + `client ${clientName(worst.client)} ${worst.gain < 0 ? "loses most" : "gains least"} (${points(worst.gain)}).`;
  },
  numbers() {
    const rows = this.rows(), [[, , , group]] = this.picks(), solo = base(group) === null ? "local" : label(base(group));
    return [
      ["client", head(label(group)), head(solo), "gain", ...rows[0].others.map(o => head(label(o.g)))],
      rows.map(r => [
        r.name, written(r.own), written(r.alone), r.gain === null ? "–" : points(r.gain), ...r.others.map(o => written(o.v)),
      ]),
    ];
  },
};

const bytes = {
  id: "bytes", get title() { return `${Metric()} against bytes sent`; },
  say: () => `${Metric()} over the megabytes that `
    + (state.client === null ? "all clients have" : `client ${clientName(state.client)} has`)
    + " uploaded so far, on a logarithmic scale.",
  sends: () => shown().filter(g => groupRuns(g).some(r => r.up.at(-1) > 0)),
  ready() { return this.sends().length; },
  missing: "No method here uploads anything.",
  draw(place) {
    const sends = this.sends(), quiet = shown().filter(g => !sends.includes(g));
    const curves = sends.map(g => ({
      label: label(g), colour: colour(g), symbol: symbol(g), strong: strong(g),
      points: curve(g, upAt).filter(p => p.x > 0).map(p => ({ ...p, low: p.y, high: p.y })),
    })).filter(c => c.points.length);
    drawLines(place, curves, {
      log: true, hover: `%{x:.3~f} MB: %{y:.${decimals()}f}${unit()}`,
      xaxis: { title: { text: "MB sent" }, ...decades(curves.flatMap(c => c.points.map(p => p.x))) },
      levels: quiet.map(g => ({
        y: drawn(mean(there(groupRuns(g).map(r => finals(r))))), text: `${label(g)} sends nothing`, colour: colour(g), symbol: symbol(g),
      })),
    });
  },
  alt: () => ranked().map(r => `${label(r.g)}: ${written(r.mean)}${unit()} for ${mega(r.up)} MB`).join(", ") + ".",
  caption() {
    const partners = this.sends().map(g => groupRuns(g).map(r => r.alone)), solo = [...new Set(partners[0])];
    const one = partners.every(p => new Set(p).size === solo.length && p.every(at => at !== null && solo.includes(at)));
    if (!one || !solo.every(at => data.runs[at].finished)) return this.alt(); // no common baseline
    const alone = drawn(mean(there(solo.map(at => finals(data.runs[at])))));
    const passed = this.sends().map(g => [label(g), curve(g, upAt).find(p => betterBy(p.y, alone) > 0)?.x]);
    if (passed.every(([, x]) => x === undefined)) return `No method here exceeds training alone (${alone.toFixed(decimals())}${unit()}).`;
    const said = passed.map(([name, x]) => `${name} ${x === undefined ? "never" : mega(1e6 * x)}`).join(", ");
    return `MB sent until training alone (${alone.toFixed(decimals())}${unit()}) is exceeded: ${said}.`;
  },
  numbers: () => [["method", "MB sent", head(metric())], ranked().map(r => [label(r.g), mega(r.up), written(r.mean)])],
};
