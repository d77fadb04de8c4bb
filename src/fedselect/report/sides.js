// Two methods or settings side by side: their differences and costs, and each client's scores.

const sides = {
  id: "sides", title: "Two side by side", optional: true,
  say: () => "Choose two methods to compare on their common seeds. Each line leads from a client's score with the first (hollow) to its score with the second.",
  ready: () => shown().length > 1,
  picks() {
    const groups = shown().map(g => [g, label(g)]), order = ranked().map(r => groups.findIndex(([g]) => g === r.g));
    const right = chosen(this.id, "right", groups, preferred(groups));
    const left = chosen(this.id, "left", groups, order.find(at => groups[at][0] !== right));
    const common = this.seeds(left, right).map(seed => [seed, `seed ${seed}`]);
    const seeds = common.length > 1 ? [[null, "mean over seeds"], ...common] : common.length ? common : [[null, "mean over seeds"]];
    return [["left", "First", groups, left], ["right", "Second", groups, right], ["seed", "Seed", seeds, chosen(this.id, "seed", seeds)]];
  },
  seeds(left, right) {
    const there = new Set(groupRuns(right).map(r => r.seed));
    return groupRuns(left).map(r => r.seed).filter(s => there.has(s));
  },
  // both, with the runs to compare: of the chosen seed, or of all common seeds (all seeds if none is common)
  pair() {
    const [[, , , left], [, , , right], [, , , seed]] = this.picks(), common = this.seeds(left, right);
    const of = g => groupRuns(g).filter(r => seed === null ? !common.length || common.includes(r.seed) : r.seed === seed);
    return [left, right].map(g => ({ g, runs: of(g) }));
  },
  clients() {
    const [a, b] = this.pair(), own = (side, i) => mean(there(side.runs.map(r => r.last.value[i])));
    const n = Math.min(...[a, b].map(side => side.runs[0].last.value.length));
    return Array.from({ length: n }, (_, i) => ({ client: i, name: clientName(i), a: own(a, i), b: own(b, i) }))
      .filter(r => r.a !== null && r.b !== null).map(r => ({ ...r, gain: betterBy(r.b, r.a) })).sort((x, y) => y.gain - x.gain);
  },
  beside() {
    const [a, b] = this.pair(), all = (side, pick) => mean(there(side.runs.map(pick)));
    const row = (name, pick, show, by = null) => {
      const [x, y] = [a, b].map(side => all(side, pick));
      return [name, show(x), show(y), by && x !== null && y !== null ? by(x, y) : ""];
    };
    const score = key => r => finals(r, key), better = (x, y) => points(betterBy(y, x)), times = (x, y) => x > 0 ? `× ${(y / x).toFixed(2)}` : "";
    const worst = r => { const v = there(r.last.value); return data.headline.more_is_better ? Math.min(...v) : Math.max(...v); };
    const one = state.client, sent = r => one === null ? r.up.at(-1) : r.clients.up.at(-1)[one];
    const flat = g => new Map(Object.entries(data.groups[g].config).flatMap(([k, v]) =>
      v && typeof v === "object" ? Object.entries(v).map(([n, w]) => [`${k}.${n}`, w]) : [[k, v]]));
    const [left, right] = [flat(a.g), flat(b.g)], said = v => v === null ? "none" : String(v);
    const apart = [...left.keys()].filter(k => k !== "method.name" && right.has(k) && said(left.get(k)) !== said(right.get(k)));
    const head = side => [swatch(colour(side.g), symbol(side.g)), label(side.g)];
    return grid(["", head(a), head(b), "difference"], [
      row(`${metric()}${unit() && ` ${unit()}`}`, score("value"), v => written(v, 2), better),
      row("after local training", score("local"), v => written(v, 2), better),
      row("after aggregation", score("merged"), v => written(v, 2), better),
      ...(one === null ? [row("worst client", worst, v => written(v, 2), better)] : []),
      row("personal %", score("share"), percent), row("MB up", sent, mega, times), row("seconds", r => r.seconds, v => v.toFixed(1), times),
      ...apart.map(k => [k, said(left.get(k)), said(right.get(k)), ""]),
    ]);
  },
  draw(place) {
    const rows = this.clients(), [a, b] = this.pair(), loss = css("--loss"), dim = r => state.client === null || state.client === r.client ? 1 : 0.18;
    const dots = (side, key, marker) => ({
      x: rows.map(r => drawn(r[key])), y: rows.map((_, i) => i), customdata: rows.map(r => r.client), name: label(side.g), mode: "markers",
      marker: { symbol: symbol(side.g), opacity: rows.map(dim), ...marker },
      hovertemplate: `%{x:.${decimals()}f}${unit()}<extra>${label(side.g)}</extra>`,
    });
    const lines = (keep, paint) => ({
      x: rows.flatMap(r => keep(r) ? [drawn(r.a), drawn(r.b), null] : []), y: rows.flatMap((r, i) => keep(r) ? [i, i, null] : []),
      mode: "lines", line: { color: paint, width: 3 }, hoverinfo: "skip",
    });
    const lit = r => dim(r) === 1;
    draw(place, [
      lines(r => lit(r) && r.gain >= 0, colour(b.g)), lines(r => lit(r) && r.gain < 0, loss),
      dots(a, "a", { size: 9, color: css("--paper"), line: { color: colour(a.g), width: 2 } }), dots(b, "b", { size: 11, color: colour(b.g) }),
    ], {
      height: 26 * rows.length + 70, margin: { l: 20, r: data.headline.percent ? 52 : 68, t: 6, b: 44 },
      xaxis: { ticksuffix: unit(), title: { text: `${metric()} on own ${data.scored} data` }, nticks: phone() ? 5 : 9 },
      yaxis: {
        tickvals: rows.map((_, i) => i), ticktext: rows.map(r => r.name), range: [rows.length - 0.5, -0.5], showgrid: false,
        ticklen: 0, title: { text: "client" },
      },
      annotations: rows.map((r, i) => ({
        xref: "paper", x: 1, xanchor: "left", xshift: 8, y: i, text: points(r.gain), showarrow: false, opacity: dim(r),
        font: { color: even(r.gain) ? css("--soft") : r.gain < 0 ? loss : colour(b.g) },
      })),
    }, p => setClient(p.customdata));
  },
  caption() {
    const [a, b] = this.pair(), rows = this.clients(), up = rows.filter(r => r.gain > 0).length, gain = mean(rows.map(r => r.gain));
    const seeds = this.seeds(a.g, b.g).length ? "" : " They have no seed in common, so clients may have different data.";
    const apart = `${points(Math.abs(gain)).slice(1)}${inPoints()} ${gain < 0 ? "worse" : "better"} on average`;
    return `${label(b.g)} is better than ${label(a.g)} for ${up} of ${rows.length} clients, and ${apart}.${seeds}`;
  },
  numbers() {
    const [a, b] = this.pair();
    return [["client", head(label(a.g)), head(label(b.g)), "difference"],
      this.clients().map(r => [r.name, written(r.a), written(r.b), points(r.gain)])];
  },
};
