"use strict";
// Numbers and drawing functions for all figures.

const there = values => values.filter(v => v !== null && v !== undefined && !Number.isNaN(v));
const mean = values => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
const spread = values => {
  if (values.length < 2) return 0;
  const m = mean(values);
  return Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / (values.length - 1));
};
const percent = (v, digits = 1) => v === null || v === undefined ? "–" : (100 * v).toFixed(digits);

// the headline metric: name and unit, values as drawn and as written, and differences (positive is better)
const metric = () => data.headline.name;
const Metric = () => metric()[0].toUpperCase() + metric().slice(1);
const unit = () => data.headline.percent ? "%" : "";
const head = name => data.headline.percent ? `${name} %` : name;
const decimals = (digits = 1) => data.headline.percent ? digits : digits + 2;
const drawn = v => v === null || v === undefined ? null : data.headline.percent ? 100 * v : v;
const written = (v, digits = 1) => drawn(v) === null ? "–" : drawn(v).toFixed(decimals(digits));
const betterBy = (own, other) => data.headline.more_is_better ? own - other : other - own;
const even = v => Math.abs(drawn(v)) < 0.5 * 10 ** -decimals(); // too small to show
const points = v => (even(v) ? "±" : v < 0 ? "−" : "+") + Math.abs(drawn(v)).toFixed(decimals());
const inPoints = () => data.headline.percent ? " points" : "";

const mega = v => v === null ? "–" : v === 0 ? "0" : (v / 1e6).toFixed(v < 1e5 ? 3 : v < 1e8 ? 1 : 0);
const phone = () => !printing && window.innerWidth < 640;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let printing = false; // paper has its own colors and width
const night = () => dark.matches && !printing;
const scale = () => [[0, css("--low")], [0.5, css("--mid")], [1, css("--high")]];
const percents = { thickness: 10, outlinewidth: 0, ticksuffix: "%", nticks: 5, tickfont: { size: 11 } };

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) if (v !== null && v !== undefined) made.setAttribute(k, v);
  made.append(...children.flat().filter(c => c !== null && c !== undefined));
  return made;
}

const SHAPES = { // the chart markers, for legends in text
  circle: "M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9z", square: "M2 2h8v8h-8z", diamond: "M6 .7 11.3 6 6 11.3 .7 6z",
  "triangle-up": "M6 1 11.2 10H.8z", "triangle-down": "M6 11 .8 2h10.4z",
  cross: "M4.2 1h3.6v3.2H11v3.6H7.8V11H4.2V7.8H1V4.2h3.2z", x: "M3 .9 6 3.9 9 .9 11.1 3 8.1 6l3 3L9 11.1l-3-3-3 3L.9 9l3-3-3-3z",
  star: "M6 .4 7.5 4.2l4.1.3L8.5 7.1l1 4L6 8.9l-3.5 2.2 1-4L.4 4.5l4.1-.3z",
};
function swatch(paint, symbol) {
  const space = "http://www.w3.org/2000/svg", made = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  for (const [k, v] of [["class", "swatch"], ["viewBox", "0 0 12 12"], ["aria-hidden", "true"]]) made.setAttribute(k, v);
  path.setAttribute("d", SHAPES[symbol] || SHAPES.circle);
  path.setAttribute("fill", paint);
  made.append(path);
  return made;
}

// masks.jsonl packs numbers as little-endian uint16 in units of 1/10000; 65535 means undefined
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
  const soft = css("--soft"), line = css("--line"), size = phone() ? 11 : 12.5;
  const plain = {
    gridcolor: line, linecolor: line, tickcolor: line, ticklen: 4, zeroline: false, automargin: true, fixedrange: phone(),
  };
  const axis = own => ({ ...plain, ...own, title: { standoff: 12, font: { size }, ...own.title } });
  Plotly.react(place, traces, {
    font: { family: getComputedStyle(document.body).fontFamily, size, color: soft },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: css("--paper"), bordercolor: line, font: { color: css("--ink") }, align: "left" },
    ...layout, ...(printing ? { width: place.clientWidth } : {}), xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
  }, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  place.removeAllListeners("plotly_click");
  if (onClick) place.on("plotly_click", e => onClick(e.points[0]));
}

// Positions for labels in a column, given their sorted heights: at least `gap` apart, each moved as little as possible.
function apart(wanted, gap, height) {
  const blocks = [];
  wanted.forEach((at, i) => {
    blocks.push({ sum: at - i * gap, n: 1 });
    while (blocks.length > 1 && blocks.at(-2).sum / blocks.at(-2).n > blocks.at(-1).sum / blocks.at(-1).n) {
      const last = blocks.pop();
      blocks.at(-1).sum += last.sum;
      blocks.at(-1).n += last.n;
    }
  });
  const most = Math.max(0, height - (wanted.length - 1) * gap);
  return blocks.flatMap(b => Array(b.n).fill(Math.min(Math.max(b.sum / b.n, 0), most))).map((at, i) => at + i * gap);
}

// Labels in a column right of the plot, each with a thin line from the end of its curve. Ends are {text, colour, x, y}, in data units.
const LABEL = 17, LEAD = 22; // pixels from one label to the next, and from the plot to its labels
function endLabels(ends, plot) {
  const across = v => plot.log ? Math.log10(v) : v;
  const px = v => (across(v) - plot.x[0]) / (plot.x[1] - plot.x[0]) * plot.width;
  const py = v => (plot.y[1] - v) / (plot.y[1] - plot.y[0]) * plot.height;
  const sorted = [...ends].sort((a, b) => py(a.y) - py(b.y)), tops = apart(sorted.map(e => py(e.y)), LABEL, plot.height);
  return sorted.map((e, i) => ({
    x: across(e.x), y: e.y, ax: plot.width - px(e.x) + LEAD, ay: tops[i] - py(e.y), xanchor: "left", yanchor: "middle",
    text: e.text, font: { color: e.colour, size: 12.5 }, showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: faint(e.colour, 0.5),
    standoff: 6, borderpad: 1,
  }));
}

// A legend below the chart, since a phone has no room beside it.
function keyBelow(place, curves) {
  place.parentElement.querySelector(".key")?.remove();
  if (!phone()) return;
  place.after(element("ul", { class: "key" }, curves.toSorted((a, b) => betterBy(b.points.at(-1).y, a.points.at(-1).y)).map(c =>
    element("li", {}, swatch(c.colour, c.symbol), c.label, element("b", {}, c.points.at(-1).y.toFixed(decimals()) + unit())))));
}

// Labels cut to fit, without the method's name if all start with it.
function brief(labels) {
  const heads = new Set(labels.map(text => text.split(" ")[0])), most = 30;
  const plain = heads.size === 1 && labels.length > 1 && labels.every(text => text.includes(" "))
    ? labels.map(text => text.slice(text.indexOf(" ") + 1)) : labels;
  return plain.map(text => text.length > most ? text.slice(0, most - 1) + "…" : text);
}

// Lines with bands, `curves` = [{label, colour, symbol, strong, dash, points: [{x, y, low, high, text}]}], and level lines beside them,
// `levels` = [{y, text, label, colour, symbol}].
function drawLines(place, curves, { xaxis, hover, log = false, levels = [] }) {
  const all = curves.flatMap(c => c.points);
  const ys = all.flatMap(p => [p.low, p.high]).concat(levels.map(l => l.y)), xs = all.map(p => log ? Math.log10(p.x) : p.x);
  const span = Math.max(...ys) - Math.min(...ys), pad = Math.max(data.headline.percent ? 1.5 : 0, 0.06 * span || 0.06);
  const bounds = data.headline.percent ? [-2, 102] : [-Infinity, Infinity];
  const y = [Math.max(bounds[0], Math.min(...ys) - pad), Math.min(bounds[1], Math.max(...ys) + pad)];
  const room = Math.max(Math.max(...xs) - Math.min(...xs), log ? 0.5 : 1);
  const x = [Math.min(...xs) - 0.02 * room, Math.max(...xs) + 0.02 * room];
  const names = brief(curves.map(c => c.label)), edge = log ? 10 ** x[1] : x[1];
  const ends = curves.map(({ colour, points }, i) => (
    { text: `${names[i]} ${points.at(-1).y.toFixed(decimals())}`, colour, x: points.at(-1).x, y: points.at(-1).y }
  )).concat(levels.map(l => ({ text: l.text, colour: l.colour, x: edge, y: l.y })));
  const height = phone() ? 320 : Math.max(440, ends.length * LABEL + 70);
  const margin = { l: 46, r: phone() ? 14 : LEAD + 8 + 7 * Math.max(...ends.map(e => e.text.length)), t: 14, b: 46 };
  const plot = { x, y, log, width: place.clientWidth - margin.l - margin.r, height: height - margin.t - margin.b };
  const bands = curves.filter(c => c.points.some(p => p.high > p.low)).map(c => ({
    x: [...c.points.map(p => p.x), ...c.points.map(p => p.x).reverse()],
    y: [...c.points.map(p => p.high), ...c.points.map(p => p.low).reverse()],
    fill: "toself", fillcolor: faint(c.colour, 0.1), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
  }));
  const lines = curves.map((c, k) => { // a few markers on each curve, not all at the same x, and a larger one at its end
    const n = c.points.length, step = Math.max(1, Math.ceil(n / 6)), shift = Math.floor(k * step / curves.length);
    const sizes = c.points.map((_, i) => i === n - 1 ? 9 : log || i % step === shift ? 6 : 0.1);
    return {
      x: c.points.map(p => p.x), y: c.points.map(p => p.y), text: c.points.map(p => p.text), name: c.label, hovertemplate: hover,
      mode: "lines+markers", line: { color: c.colour, width: c.strong ? 3 : 1.7, dash: c.dash },
      marker: { color: c.colour, symbol: c.symbol, opacity: 1, line: { width: 0 }, size: sizes },
    };
  });
  draw(place, [...bands, ...lines], {
    height, margin, hovermode: log || phone() || curves.length > 12 ? "closest" : "x unified",
    annotations: phone() ? [] : endLabels(ends, plot),
    shapes: levels.map(l => (
      { type: "line", xref: "paper", x0: 0, x1: 1, y0: l.y, y1: l.y, line: { color: l.colour, width: 1.7, dash: "dot" } })),
    xaxis: { range: x, type: log ? "log" : "linear", showgrid: false, ...xaxis },
    yaxis: { range: y, ticksuffix: unit(), nticks: 7 },
  });
  keyBelow(place, curves.concat(levels.map(l => ({ ...l, label: l.text, points: [{ y: l.y }] }))));
}

// ticks of a logarithmic axis: 1, 2 and 5 of each decade, or only decades if there are many
function decades(xs) {
  const low = Math.floor(Math.log10(Math.min(...xs))), high = Math.ceil(Math.log10(Math.max(...xs)));
  const each = high - low < (phone() ? 3 : 5) ? [1, 2, 5] : [1];
  const ticks = Array.from({ length: high - low + 1 }, (_, k) => each.map(m => +(m * 10 ** (low + k)).toPrecision(1))).flat();
  return { tickvals: ticks, ticktext: ticks.map(t => t.toLocaleString("en", { maximumFractionDigits: 9 })) };
}

// A matrix of clients by clients; z is null for undefined cells and for clients filtered out.
// Shares (0 to 1) are drawn in percent; other numbers use their own range.
// Row labels include the clients' classes; column labels are only names, to leave room for the cells.
function drawMatrix(place, z, run, { xtitle, ytitle, hover, shares = true, more = true }) {
  const all = there(z.flat()), [low, high] = shares ? [0, 1] : [Math.min(...all), Math.max(...all)], by = shares ? 100 : 1;
  const strong = v => (more ? v - low : high - v) > 0.6 * (high - low);
  const n = z.length, only = state.client === null || state.client >= n ? null : state.client;
  const cells = z.map((row, i) => row.map((v, j) => only === null || i === only || j === only ? v : null));
  const words = n <= 12, side = Math.min(place.clientWidth, 640);
  const font = { size: Math.max(7, Math.min(12, 0.8 * (side - 130) / n)) };
  const order = z.map((_, i) => i), short = order.map(i => people(run)[i].name);
  const names = order.map(i => words || !phone() ? tell(run, i) : short[i]);
  const angle = phone() || short.some(s => s.length > 2) ? -90 : 0;
  const sides = { tickvals: order, showgrid: false, ticklen: 0, tickfont: font };
  draw(place, [{
    type: "heatmap", z: cells.map(row => row.map(v => v === null ? null : by * v)), x: order, y: order, zmin: by * low, zmax: by * high,
    colorscale: scale(), reversescale: !more, showscale: !words, xgap: 2, ygap: 2, hoverongaps: false,
    colorbar: { ...percents, ticksuffix: shares ? "%" : "", len: 0.6 },
    text: cells.map((row, i) => row.map((v, j) => v === null ? "" : hover(i, j))), hovertemplate: "%{text}<extra></extra>",
  }], {
    height: side - 20, margin: { l: 10, r: 10, t: 6, b: 10 },
    xaxis: { ...sides, ticktext: short, tickangle: angle, title: { text: xtitle }, range: [-0.5, n - 0.5] },
    yaxis: { ...sides, ticktext: names, title: { text: ytitle }, range: [n - 0.5, -0.5] },
    annotations: words ? cells.flatMap((row, i) => row.flatMap((v, j) => v === null ? [] : [{
      x: j, y: i, text: (by * v).toFixed(shares ? 0 : 2), showarrow: false,
      font: { size: phone() ? 9 : 11, color: css(strong(v) ? "--paper" : "--ink") },
    }])) : [],
  }, p => setClient(p.y));
}
