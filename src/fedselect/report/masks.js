// Figures of masks, and of models on other clients' data.

// the choices of a figure that shows one run, and that run
function oneRun(id, runs) {
  const groups = groupsOf(runs), group = chosen(id, "group", groups, preferred(groups));
  const seeds = seedsOf(runs, group), seed = chosen(id, "seed", seeds);
  const picks = [["group", "Method", groups, group], ["seed", "Seed", seeds, seed]];
  return { picks, run: runs.find(r => r.group === group && r.seed === seed) };
}

const shares = {
  id: "shares", title: "Personal parameters by layer",
  say: () => "Share of each layer's parameters that is personal "
    + (state.client === null ? `(mean over clients${seeded() ? " and seeds" : ""})`
      : `on client ${clientName(state.client)}${seeded() ? " (mean over seeds)" : ""}`)
    + ". Layers run from the input at the top to the output.",
  runs: () => data.runs.filter(r => r.shares.length),
  ready() { return this.runs().length; },
  get missing() {
    return networked() ? "Deployed runs do not record masks by round; each client keeps its mask in its vault."
      : "These runs have no record of masks. Runs in several processes, with rows=personal or of older versions do not record them.";
  },
  picks() {
    const groups = groupsOf(this.runs());
    return [["group", "Method", groups, chosen(this.id, "group", groups, preferred(groups))]];
  },
  grid() {
    const [[, , , group]] = this.picks(), runs = this.runs().filter(r => r.group === group), { round: rounds } = runs[0];
    const layers = data.federations[runs[0].federation].layers, clients = runs[0].last.value.length;
    const known = runs.map(run => run.shares.map(([round, text]) => [round, unpack(text)]));
    const value = (lines, round, layer) => { // the last recorded value: there is a line only for changes
      const held = lines.findLast(([r]) => r <= round);
      if (!held) return null;
      const row = held[1].slice(layer * clients, (layer + 1) * clients);
      return state.client === null ? mean(there(row)) : row[state.client];
    };
    const names = Object.keys(layers);
    const z = names.map((_, k) => rounds.map(round => mean(there(known.map(lines => value(lines, round, k))))));
    return { names, sizes: Object.values(layers), rounds, z };
  },
  draw(place) {
    const { names, rounds, z } = this.grid(), many = names.length > 30, top = Math.max(0.01, ...there(z.flat()));
    const edges = [rounds[0] - 0.5, ...rounds.slice(1).map((r, i) => (r + rounds[i]) / 2), rounds.at(-1) + 0.5];
    draw(place, [{
      type: "heatmap", x: edges, y: names.map((_, i) => i), z: z.map(row => row.map(v => v === null ? null : 100 * v)),
      zmin: 0, zmax: 100 * top, colorscale: scale(), ygap: many ? 0.5 : 2, showscale: many, colorbar: { ...percents, len: 0.8 },
      text: z.map((row, k) => row.map((v, i) => `${names[k]}, round ${rounds[i]}: ${percent(v)}% personal`)),
      hovertemplate: "%{text}<extra></extra>",
    }], {
      height: Math.max(200, (many ? 12 : 30) * names.length) + 56, margin: { l: 20, r: many ? 10 : 60, t: 6, b: 44 },
      annotations: many ? [] : z.map((row, i) => (
        { xref: "paper", x: 1, xanchor: "left", xshift: 6, y: i, text: `${percent(row.at(-1))}%`, showarrow: false })),
      xaxis: { ...roundAxis(), showgrid: false },
      yaxis: {
        tickvals: names.map((_, i) => i), ticktext: names, range: [names.length - 0.5, -0.5], showgrid: false, ticklen: 0,
        tickfont: { size: many || phone() ? 9 : 12 },
      },
    });
  },
  caption() {
    const { names, z } = this.grid(), last = z.map(row => row.at(-1));
    const most = last.indexOf(Math.max(...last)), least = last.indexOf(Math.min(...last));
    if (last[most] === last[least]) return `After the last round, every layer is ${percent(last[most])}% personal.`;
    return `After the last round, ${names[most]} is the most personal layer (${percent(last[most])}%), ${names[least]} the least `
      + `(${percent(last[least])}%).`;
  },
  numbers() {
    const { names, sizes, rounds, z } = this.grid(), step = Math.ceil(rounds.length / 10);
    const some = rounds.map((_, i) => i).filter(i => i === rounds.length - 1 || i % step === 0);
    return [
      ["layer", "parameters", ...some.map(i => `round ${rounds[i]} %`)],
      names.map((name, k) => [name, sizes[k].toLocaleString("en"), ...some.map(i => percent(z[k][i]))]),
    ];
  },
};

const overlap = {
  id: "overlap", title: "Do clients personalize the same parameters?", paired: true,
  say: () => "Overlap of the personal parameters of two clients: entries personal on both, as a share of those personal on either "
    + "(intersection over union). Classes that a client trains on follow its name.",
  runs: () => data.runs.filter(r => r.iou.length),
  ready() { return this.runs().length; },
  get missing() {
    return networked() ? "Deployed runs do not record masks by round, so there is no overlap to show."
      : "No run here has a record of masks that differ between clients, so there is no overlap to show.";
  },
  picks() {
    const { picks, run } = oneRun(this.id, this.runs());
    const layers = ["all parameters", ...Object.keys(data.federations[run.federation].layers)].map((name, i) => [i, name]);
    const rounds = run.iou.map(([round], i) => [i, `round ${round}`]);
    return [
      ...picks, ["layer", "Layer", layers, chosen(this.id, "layer", layers)],
      ["round", "Round", rounds, chosen(this.id, "round", rounds, rounds.length - 1), "range"],
    ];
  },
  matrix() {
    const { run } = oneRun(this.id, this.runs()), [, , [, , , layer], [, , , at]] = this.picks();
    const n = run.paired, pairs = n * (n - 1) / 2;
    const values = unpack(run.iou[at][1]).slice(layer * pairs, (layer + 1) * pairs);
    const z = Array.from({ length: n }, () => Array(n).fill(null));
    for (let i = 0, k = 0; i < n; i++) for (let j = i + 1; j < n; j++) z[i][j] = z[j][i] = values[k++];
    const common = (i, j) => people(run)[i].classes.filter(c => people(run)[j].classes.includes(c));
    return { run, z, common };
  },
  // the expected overlap of random masks with the same shares in each layer, on average over pairs
  chance() {
    const { run, z } = this.matrix(), [, , [, , , layer], [, , , at]] = this.picks(), round = run.iou[at][0];
    const sizes = Object.values(data.federations[run.federation].layers), clients = run.last.value.length;
    const share = unpack((run.shares.findLast(([r]) => r <= round) || run.shares[0])[1]);
    const layers = sizes.map((_, k) => k).filter(k => layer === 0 || k === layer - 1);
    const expected = (i, j) => {
      const parts = layers.map(k => [sizes[k], share[k * clients + i], share[k * clients + j]]);
      const both = parts.reduce((sum, [n, a, b]) => sum + n * a * b, 0);
      return both / (parts.reduce((sum, [n, a, b]) => sum + n * (a + b), 0) - both);
    };
    return mean(z.flatMap((row, i) => row.flatMap((v, j) => v === null || i > j ? [] : [expected(i, j)])));
  },
  draw(place) {
    const { run, z, common } = this.matrix(), who = people(run);
    drawMatrix(place, z, run, {
      xtitle: "client", ytitle: phone() ? "client" : "client and its classes",
      hover: (i, j) => `clients ${who[i].name} and ${who[j].name}: ${percent(z[i][j])}%<br>`
        + `classes in common: ${common(i, j).join(", ") || "none"}`,
    });
  },
  caption() {
    const { z, common } = this.matrix(), by = new Map();
    z.forEach((row, i) => row.forEach((v, j) => {
      if (i >= j || v === null || (state.client !== null && i !== state.client && j !== state.client)) return;
      by.set(common(i, j).length, [...(by.get(common(i, j).length) || []), v]);
    }));
    const all = [...by].sort((a, b) => a[0] - b[0]);
    if (!all.length) return "No parameters are personal yet.";
    return `Mean overlap ${percent(mean(all.flatMap(([, v]) => v)))}%; random masks of the same shares would overlap by about `
      + `${percent(this.chance())}%. By number of classes in common: `
      + all.map(([k, v]) => `${k}: ${percent(mean(v))}%`).join(", ") + ".";
  },
  numbers() {
    const { run, z } = this.matrix(), names = z.map((_, i) => tell(run, i));
    return [["client", ...names], z.map((row, i) => [names[i], ...row.map(v => percent(v))])];
  },
};

const cross = {
  id: "cross", title: "Every model on every client's data", paired: true,
  say: () => `${Metric()} of each client's final model (row) on each client's ${data.scored} data (column). On the diagonal, models meet their own `
    + "client's data; elsewhere, data of clients they were not personalized for.",
  runs: () => data.runs.filter(r => r.cross),
  ready() { return this.runs().length; },
  get missing() {
    return networked() ? "In a deployment, no model is evaluated on another client's data, because the data never leaves its client."
      : "Run with --cross to evaluate every client's model on every other client's data.";
  },
  picks() { return oneRun(this.id, this.runs()).picks; },
  draw(place) {
    const { run } = oneRun(this.id, this.runs()), who = people(run);
    drawMatrix(place, run.cross, run, {
      xtitle: `${data.scored} data of`, ytitle: "model of", shares: data.headline.percent, more: data.headline.more_is_better,
      hover: (i, j) => `model of client ${who[i].name} on data of client ${who[j].name}: ${written(run.cross[i][j])}${unit()}`,
    });
  },
  caption() {
    const { run } = oneRun(this.id, this.runs()), one = state.client !== null;
    const cells = own => there(run.cross.flatMap((row, i) =>
      row.filter((_, j) => (!one || i === state.client) && (i === j) === own)));
    const said = own => `${written(mean(cells(own)))}${unit()}`;
    return one ? `The model of client ${clientName(state.client)} reaches ${said(true)} on its own data, ${said(false)} on other clients' data.`
      : `Models reach ${said(true)} on average on their own client's data, ${said(false)} on other clients' data.`;
  },
  numbers() {
    const { run } = oneRun(this.id, this.runs()), names = people(run).map((_, i) => tell(run, i));
    return [["model of", ...names], run.cross.map((row, i) => [names[i], ...row.map(v => written(v))])];
  },
};

const clientAxis = who => ({
  title: { text: "client" }, tickvals: who.map((_, i) => i), ticktext: who.map(c => c.name), showgrid: false, ticklen: 0,
  tickfont: { size: who.length > 20 || phone() ? 9 : 12 },
});

const persistence = {
  id: "persistence", title: "Persistent disagreement", optional: true,
  say: () => "Persistence: the share of a client's pull away from the shared model that repeats across rounds and samples, measured "
    + "while all parameters were shared. 0 is noise, 1 a constant pull. Layers run from the input at the top to the output.",
  runs: () => data.runs.filter(r => r.persistence),
  ready() { return this.runs().length; },
  picks() { return oneRun(this.id, this.runs()).picks; },
  draw(place) {
    const { run } = oneRun(this.id, this.runs()), { tensors, values } = run.persistence, who = people(run);
    const many = tensors.length > 30, few = tensors.length * who.length <= 240 && !phone();
    draw(place, [{
      type: "heatmap", x: who.map((_, i) => i), y: tensors.map((_, k) => k), z: values, zmin: 0, zmax: 1, colorscale: scale(),
      xgap: many ? 0.5 : 2, ygap: many ? 0.5 : 2, colorbar: { thickness: 10, outlinewidth: 0, nticks: 5, tickfont: { size: 11 }, len: 0.8 },
      text: values.map(row => row.map(v => v === null ? "" : v.toFixed(2))), texttemplate: few ? "%{text}" : "",
      hovertext: values.map((row, k) => row.map((v, i) =>
        `client ${who[i].name}, ${tensors[k]}: ${v === null ? "not tested yet" : v.toFixed(2)}`)),
      hovertemplate: "%{hovertext}<extra></extra>",
    }], {
      height: Math.max(200, (many ? 12 : 30) * tensors.length) + 70, margin: { l: 20, r: 10, t: 6, b: 60 },
      xaxis: clientAxis(who),
      yaxis: {
        tickvals: tensors.map((_, k) => k), ticktext: tensors, range: [tensors.length - 0.5, -0.5], showgrid: false, ticklen: 0,
        tickfont: { size: many || phone() ? 9 : 12 },
      },
    }, point => setClient(point.x));
  },
  caption() { return oneRun(this.id, this.runs()).run.persistence.sentences.join(" "); },
  numbers() {
    const { run } = oneRun(this.id, this.runs()), { tensors, values } = run.persistence;
    return [["client", ...tensors], people(run).map((c, i) => [c.name, ...values.map(row => row[i] === null ? "–" : row[i].toFixed(2))])];
  },
};

const heads = {
  id: "heads", title: "Groups that share a head", optional: true,
  say: () => "Each row is a head, shared by the clients marked in it. All clients share the layers below.",
  runs: () => data.runs.filter(r => r.heads),
  ready() { return this.runs().length; },
  picks() { return oneRun(this.id, this.runs()).picks; },
  grid() {
    const { run } = oneRun(this.id, this.runs()), { groups } = run.heads, who = people(run);
    const others = i => who.filter((_, k) => k !== i && groups[k] === groups[i]).map(c => c.name).join(", ") || "no other client";
    return { who, groups, rows: [...new Set(there(groups))], shares: who.map((_, i) => groups[i] === null ? "not tested yet" : others(i)) };
  },
  draw(place) {
    const { who, groups, rows, shares } = this.grid(), many = rows.length > 30;
    draw(place, [{
      type: "heatmap", x: who.map((_, i) => i), y: rows.map((_, k) => k), z: rows.map(g => groups.map(own => own === g ? 1 : 0)),
      zmin: 0, zmax: 1, colorscale: scale(), showscale: false, xgap: many ? 0.5 : 2, ygap: many ? 0.5 : 2,
      text: rows.map(() => who.map((c, i) => `client ${c.name} shares its head with: ${shares[i]}`)),
      hovertemplate: "%{text}<extra></extra>",
    }], {
      height: (many ? 12 : 26) * rows.length + 70, margin: { l: 20, r: 10, t: 6, b: 60 },
      xaxis: clientAxis(who),
      yaxis: {
        tickvals: rows.map((_, k) => k), ticktext: rows.map((_, k) => `head ${k + 1}`), range: [rows.length - 0.5, -0.5],
        showgrid: false, ticklen: 0, tickfont: { size: many || phone() ? 9 : 12 },
      },
    }, point => setClient(point.x));
  },
  caption() { return oneRun(this.id, this.runs()).run.heads.sentences.join(" "); },
  numbers() {
    const { who, shares } = this.grid();
    return [["client", "shares its head with"], who.map((c, i) => [c.name, shares[i]])];
  },
};

const FIGURES = [convergence, gained, sides, bytes, shares, heads, persistence, overlap, cross];
