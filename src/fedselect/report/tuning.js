// The figure of a search: every setting's validation score over the total number of rounds spent.

const tuning = {
  id: "tuning", title: "How the setting was chosen", optional: true,
  ready: () => data.tuning && data.tuning.settings.some(s => s.points.length),
  say() {
    const { chosen, judged_by, seeds, ends, settings } = data.tuning;
    const rungs = ends.slice(0, -1).map(e => `${e.kept} of ${e.of} continued after round ${e.round}`).join(", ");
    return `${settings.length} settings, compared by the ${judged_by} on validation data, seeds ${seeds.join(", ")}.`
      + `${rungs ? ` ${rungs[0].toUpperCase()}${rungs.slice(1)}.` : ""} Chosen: ${chosen}. ${this.look()}`;
  },
  // the final score on test data
  look() {
    const t = data.tuning.test;
    if (!t) return "Test data was not used.";
    const off = t.values.length > 1 ? ` ± ${written(spread(t.values) / Math.sqrt(t.values.length))}` : "";
    return `On test data, with fresh seeds ${t.seeds.join(", ")}: ${metric()} ${written(mean(t.values))}${off}${unit()} `
      + "(mean over clients, ± standard error over seeds).";
  },
  draw(place) {
    const { settings, ends, chosen, rounds } = data.tuning, tint = s => s.colour[night() ? 1 : 0];
    const kind = s => s.name === chosen ? 2 : s.rounds === settings[0].rounds ? 1 : 0, named = new Set();
    const traces = [...settings].filter(s => s.points.length).sort((a, b) => kind(a) - kind(b)).map(s => {
      const first = !named.has(s.method);
      named.add(s.method);
      return {
        x: s.points.map(p => p[0]), y: s.points.map(p => drawn(p[1])), customdata: s.points.map(p => p[2]), name: s.method, legendgroup: s.method,
        showlegend: first, mode: s.points.length > 12 ? "lines" : "lines+markers", opacity: [0.45, 0.85, 1][kind(s)],
        line: { color: tint(s), width: [1, 1.8, 3.5][kind(s)] }, marker: { color: tint(s), symbol: s.symbol, size: kind(s) === 2 ? 9 : 5 },
        hovertemplate: `${s.name}<br>round %{customdata} of ${rounds}: %{y:.${decimals()}f}${unit()}<extra></extra>`,
      };
    });
    const ink = css("--soft"), last = ends.length - 1;
    draw(place, traces, {
      height: phone() ? 380 : 460, margin: { l: 46, r: 16, t: 26, b: 92 }, showlegend: true, hovermode: "closest",
      legend: { orientation: "h", y: -0.2, x: 0 },
      xaxis: { title: { text: "total rounds trained, over all settings and seeds" }, showgrid: false, rangemode: "tozero" },
      yaxis: { ticksuffix: unit(), nticks: 7, title: { text: `validation ${metric()}` } },
      shapes: ends.slice(0, last).map(e => (
        { type: "line", x0: e.x, x1: e.x, yref: "paper", y0: 0, y1: 1, line: { color: ink, width: 1, dash: "dot" } })),
      annotations: ends.slice(0, last).map(e => ({
        x: e.x, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: phone() ? `${e.kept}` : `${e.kept} of ${e.of} continue`,
        font: { color: ink, size: 11.5 },
      })),
    });
  },
  caption() {
    const near = data.tuning.settings.filter(s => s.chance).map(s => s.name);
    return near.length ? `Not significantly worse than the chosen setting (within two standard errors, paired by seed and client): ${near.join(", ")}.`
      : "Every other fully trained setting is significantly worse than the chosen one.";
  },
  numbers() {
    const pm = (v, e) => v === null ? "–" : [written(v, 2), e === null ? null : element("small", {}, `± ${written(e, 2)}`)];
    return [
      ["setting", "rounds", head(`validation ${metric()}`), "behind the first", "", "MB", "seconds"],
      data.tuning.settings.map(s => [
        s.name, s.rounds, s.score === null ? "diverged" : pm(s.score, s.error), pm(s.behind, s.behind_error), s.chance ? "n.s." : "",
        mega(s.bytes), s.seconds.toFixed(1),
      ]),
    ];
  },
};
FIGURES.unshift(tuning);
