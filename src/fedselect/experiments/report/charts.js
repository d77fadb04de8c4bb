"use strict";
// Numbers and drawing that every figure shares.

const there = values => values.filter(v => v !== null && v !== undefined && !Number.isNaN(v));
const mean = values => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
const spread = values => {
  if (values.length < 2) return 0;
  const m = mean(values);
  return Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / (values.length - 1));
};
const percent = (v, digits = 1) => v === null || v === undefined ? "–" : (100 * v).toFixed(digits);
const points = v => (Math.abs(v) < 0.0005 ? "±" : v < 0 ? "−" : "+") + Math.abs(100 * v).toFixed(1);
const mega = v => v === null ? "–" : v === 0 ? "0" : v < 1e5 ? (v / 1e6).toFixed(3) : v < 1e8 ? (v / 1e6).toFixed(1) : (v / 1e6).toFixed(0);
const phone = () => window.innerWidth < 640;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) if (v !== null && v !== undefined) made.setAttribute(k, v);
  made.append(...children.flat().filter(c => c !== null && c !== undefined));
  return made;
}

// masks.jsonl packs numbers as little-endian uint16 in units of 1/10000; 65535 is none
function unpack(text) {
  const raw = atob(text);
  return Array.from({ length: raw.length / 2 }, (_, i) => {
    const v = raw.charCodeAt(2 * i) | raw.charCodeAt(2 * i + 1) << 8;
    return v === 65535 ? null : v / 10000;
  });
}

function faint(colour, alpha) {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

function draw(place, traces, layout, onClick) {
  const soft = css("--soft"), line = css("--line");
  const axis = { gridcolor: line, zeroline: false, linecolor: line, tickcolor: line, ticklen: 4, automargin: true, fixedrange: phone() };
  const base = {
    font: { family: getComputedStyle(document.body).fontFamily, size: phone() ? 11 : 12.5, color: soft },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    hoverlabel: { bgcolor: css("--paper"), bordercolor: line, font: { color: css("--ink") }, align: "left" },
    margin: { l: 46, r: 12, t: 10, b: 44 }, hovermode: "closest", ...layout,
  };
  const named = a => a?.title ? { ...a, title: { standoff: 12, font: { size: base.font.size }, ...a.title } } : a;
  base.xaxis = { ...axis, ...named(layout.xaxis) };
  base.yaxis = { ...axis, ...named(layout.yaxis) };
  Plotly.react(place, traces, base, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  place.removeAllListeners("plotly_click");
  if (onClick) place.on("plotly_click", e => onClick(e.points[0]));
}

// Labels at the ends of lines, moved apart where they would lie on each other. Ends are {text, colour, x, y}, in data units.
function endLabels(ends, plot) {
  const across = v => plot.log ? Math.log10(v) : v;
  const px = v => (across(v) - plot.x[0]) / (plot.x[1] - plot.x[0]) * plot.width;
  const py = v => (plot.y[1] - v) / (plot.y[1] - plot.y[0]) * plot.height;
  const step = phone() ? 13 : 16;
  const boxes = ends.map(e => ({ ...e, left: px(e.x), top: py(e.y), own: py(e.y), wide: e.text.length * 7 + 12 })).sort((a, b) => a.own - b.own);
  for (let again = 0; again < 200; again++) {
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, b] = [boxes[i], boxes[j]];
      const beside = Math.abs(a.left - b.left) < (a.left < b.left ? a.wide : b.wide);
      const near = step - (b.top - a.top);
      if (beside && near > 0) { a.top -= near / 2; b.top += near / 2; }
    }
    for (const b of boxes) b.top = Math.min(Math.max(b.top, 0), plot.height);
  }
  return boxes.map(b => ({
    x: across(b.x), y: b.y, text: b.text, showarrow: false, xanchor: "left", yanchor: "middle", xshift: 7, yshift: b.own - b.top,
    font: { color: b.colour, size: phone() ? 11 : 12.5 },
  }));
}

// Lines with bands: one for each of `curves` = {label, colour, points: [{x, y, low, high}]}.
function drawLines(place, curves, { xaxis, log = false, before = [], shapes = [], marks = false, hover }) {
  const all = curves.flatMap(c => c.points);
  const xs = all.map(p => p.x), ys = all.flatMap(p => [p.low, p.high]).concat(before.map(b => b.y));
  const pad = Math.max(1.5, 0.06 * (Math.max(...ys) - Math.min(...ys)));
  const y = [Math.max(-2, Math.min(...ys) - pad), Math.min(102, Math.max(...ys) + pad)];
  const ends = log ? xs.map(Math.log10) : xs;
  const room = Math.max(Math.max(...ends) - Math.min(...ends), log ? 0.5 : 1);
  const x = [Math.min(...ends) - 0.02 * room, Math.max(...ends) + 0.01 * room];
  const short = c => c.label.length > 22 ? c.label.slice(0, 21) + "…" : c.label;
  const named = c => phone() ? short(c) : `${short(c)} ${c.points.at(-1).y.toFixed(1)}`;
  const right = 14 + 7 * Math.max(...curves.map(c => named(c).length));
  const height = phone() ? 340 : 440, margin = { l: 46, r: right, t: 14, b: 46 };
  const plot = { x, y, log, width: place.clientWidth - margin.l - margin.r, height: height - margin.t - margin.b };
  const traces = [];
  for (const c of curves) {
    if (c.points.some(p => p.high > p.low)) traces.push({
      x: [...c.points.map(p => p.x), ...c.points.map(p => p.x).reverse()],
      y: [...c.points.map(p => p.high), ...c.points.map(p => p.low).reverse()],
      fill: "toself", fillcolor: faint(c.colour, 0.1), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
    });
  }
  for (const c of curves) {
    traces.push({
      x: c.points.map(p => p.x), y: c.points.map(p => p.y), name: c.label, mode: c.points.length > 1 && !marks ? "lines" : "lines+markers",
      line: { color: c.colour, width: c.strong ? 3 : 1.7, dash: c.dash || "solid" }, marker: { color: c.colour, opacity: 1, line: { width: 0 }, size: c.points.map((_, i) => i === c.points.length - 1 ? 8 : 0.1) },
      text: c.points.map(p => p.text || ""), hovertemplate: hover,
    });
  }
  draw(place, traces, {
    height, margin, shapes, hovermode: log || phone() ? "closest" : "x unified",
    annotations: endLabels(curves.map(c => ({ text: named(c), colour: c.colour, x: c.points.at(-1).x, y: c.points.at(-1).y })), plot)
      .concat(before.map(b => ({ xref: "paper", x: 0, y: b.y, text: b.text, showarrow: false, xanchor: "left", yanchor: "top", font: { color: b.colour } }))),
    xaxis: { range: x, type: log ? "log" : "linear", showgrid: false, ...xaxis },
    yaxis: { range: y, ticksuffix: "%", nticks: 7 },
  });
}

const scale = () => [[0, css("--low")], [0.5, css("--mid")], [1, css("--high")]];

// A matrix of clients by clients; z is null where there is nothing, or where the page is filtered to another client.
// Rows carry the clients' classes as well, columns the names alone: twice would leave no room for the cells.
function drawMatrix(place, z, run, { xtitle, ytitle, hover, unit, only, pick }) {
  const n = z.length, filtered = only === null || only >= n ? z : z.map((row, i) => row.map((v, j) => i === only || j === only ? v : null));
  const words = n <= 12, side = Math.min(place.clientWidth, 640), font = { size: Math.max(7, Math.min(12, 0.8 * (side - 130) / n)) };
  const short = people(run).slice(0, n).map(c => c.name), names = short.map((name, i) => words || !phone() ? tell(run, i) : name);
  const order = short.map((_, i) => i), across = phone() || short.some(s => s.length > 2) ? -90 : 0;
  draw(place, [{
    type: "heatmap", z: filtered.map(row => row.map(v => v === null ? null : 100 * v)), x: order, y: order, zmin: 0, zmax: 100,
    colorscale: scale(), showscale: !words, xgap: 2, ygap: 2, hoverongaps: false,
    colorbar: { thickness: 10, outlinewidth: 0, ticksuffix: unit, nticks: 5, len: 0.6, tickfont: { size: 11 } },
    text: filtered.map((row, i) => row.map((_, j) => hover(i, j))), hovertemplate: "%{text}<extra></extra>",
  }], {
    height: side - 20, margin: { l: 10, r: 10, t: 6, b: 10 },
    xaxis: { tickvals: order, ticktext: short, tickangle: across, title: { text: xtitle }, showgrid: false, ticklen: 0, tickfont: font, range: [-0.5, n - 0.5] },
    yaxis: { tickvals: order, ticktext: names, range: [n - 0.5, -0.5], title: { text: ytitle }, showgrid: false, ticklen: 0, tickfont: font },
    annotations: words ? filtered.flatMap((row, i) => row.map((v, j) => v === null ? null : {
      x: j, y: i, text: (100 * v).toFixed(0), showarrow: false, font: { size: phone() ? 9 : 11, color: css(v > 0.6 ? "--paper" : "--ink") },
    }).filter(a => a)) : [],
  }, p => pick(p.y));
}
