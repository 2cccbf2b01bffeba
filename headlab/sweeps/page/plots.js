"use strict";
// The plots, drawn anew when the theme or a choice changes.

const data = JSON.parse(document.getElementById("data").textContent);
const entries = Object.fromEntries(data.entries.map((entry) => [entry.id, entry]));
const chosen = { x: "parameters", sizeLog: true, bands: "loss", logX: false, logY: false, training: true, end: false };
const hidden = new Set(); // names of runs
const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it doesn't zoom

// [on light, on dark]: tied blue and untied red, others chosen to differ in lightness too; markers tell them apart
// without colour
const COLOURS = {
  tied: ["#0b5fa5", "#6fb7ee"], untied: ["#c62828", "#ff8a80"], low_rank: ["#2f8578", "#4fd6bf"],
  adaptive: ["#b86208", "#ffc94d"], mixture_of_softmaxes: ["#7f00ff", "#b98aff"],
  mixture_of_contexts: ["#3d8b49", "#8fd98f"], sigsoftmax: ["#660044", "#ee6fb8"],
  mixture_of_sigsoftmaxes: ["#a95cf5", "#dccbff"], mixtape: ["#5a6068", "#c3c9cf"],
};
const MORE = [["#5c4a1f", "#d9c38a"], ["#00666b", "#7fe0e6"], ["#8a2d6b", "#f5a8dc"]];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon", "triangle-down"];
const DASHES = ["solid", "dash", "dashdot", "longdash", "longdashdot"]; // dotted: not finished
const heads = [...new Set([...Object.keys(COLOURS), ...data.entries.map((entry) => entry.head)])];

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function mixed(a, b, share) {
  const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const [from, to] = [parts(a), parts(b)];
  return "#" + from.map((v, i) => Math.round(v + (to[i] - v) * share).toString(16).padStart(2, "0")).join("");
}

function style(id) {
  const { head, rank, unfinished } = entries[id];
  const number = heads.indexOf(head);
  const dark = document.documentElement.dataset.theme === "dark" ? 1 : 0;
  const base = (COLOURS[head] || MORE[number % MORE.length])[dark];
  const colour = mixed(base, css("--ink"), [0, 0.35, 0.15, 0.5][rank % 4]);
  return {
    colour, faint: mixed(colour, css("--paper"), 0.55), dash: unfinished ? "dot" : DASHES[rank % DASHES.length],
    symbol: SYMBOLS[number % SYMBOLS.length],
  };
}

// Plotly reads a little HTML in its texts
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function name(id) { return plain(entries[id].name); }

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 8, font: { size: 13 } }, gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false,
    automargin: true, ...more,
  };
}

function draw(id, traces, layout) {
  Plotly.react(document.getElementById("plot-" + id), traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") },
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
    margin: { l: 8, r: 12, t: 8, b: 8 }, dragmode: coarse ? false : "zoom",
    ...layout,
  }, { displayModeBar: false, responsive: true, scrollZoom: false });
}

// --- loss curves ---------------------------------------------------------------------------------------------------

function curveTraces() {
  const traces = [];
  for (const part of ["train", "heldOut"]) {
    if (part === "train" && !chosen.training) continue;
    for (const run of data.runs) {
      const look = style(run.entry);
      const held = part === "heldOut";
      traces.push({
        x: run[part][0], y: run[part][1], visible: !hidden.has(run.name), mode: held ? "lines+markers" : "lines",
        line: { color: held ? look.colour : look.faint, width: held ? 1.75 : 1, dash: held ? look.dash : "solid" },
        marker: { symbol: look.symbol, size: 5, color: look.colour },
        hovertemplate: `${plain(run.name)}<br>${held ? "held-out" : "training"}, step %{x:,}: %{y:.4f}<extra></extra>`,
      });
    }
  }
  return traces;
}

function endRange(traces) {
  const shown = traces.filter((trace) => trace.visible);
  const last = Math.max(0, ...shown.flatMap((trace) => trace.x.slice(-1)));
  const values = shown.flatMap((trace) => trace.y.filter((_, i) => trace.x[i] >= last / 2));
  if (!values.length) return null;
  const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const room = (high - low) * 0.05 || 0.01;
  return { x: [last / 2, last * 1.01], y: [low - room, high + room] };
}

function drawCurves() {
  const traces = curveTraces();
  const end = chosen.end ? endRange(traces) : null;
  const scaled = (range, log) => (range && log ? range.map(Math.log10) : range);
  const layoutOf = (log, range) => ({
    type: log ? "log" : "linear", ...(range ? { range: scaled(range, log), autorange: false } : { autorange: true }),
  });
  draw("curves", traces, {
    xaxis: axis("step", layoutOf(chosen.logX, end && end.x)),
    yaxis: axis("loss, nats a token", layoutOf(chosen.logY, end && end.y)),
  });
}

function toggle(names) {
  const allShown = names.every((run) => !hidden.has(run));
  for (const run of names) allShown ? hidden.add(run) : hidden.delete(run);
  showLegend();
  drawCurves();
}

function legendButton(label, names, kind) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = kind;
  button.dataset.runs = JSON.stringify(names);
  button.append(label);
  button.addEventListener("click", () => toggle(names));
  return button;
}

function buildLegend() {
  for (const entry of data.entries) {
    const runs = data.runs.filter((run) => run.entry === entry.id);
    const line = document.createElement("div");
    const whole = legendButton(entry.name, runs.map((run) => run.name), "whole");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.dataset.group = entry.id;
    swatch.setAttribute("aria-hidden", "true");
    whole.prepend(swatch);
    line.append(whole);
    if (runs.length > 1) {
      line.append("seeds");
      for (const run of runs) {
        const button = legendButton(String(run.seed), [run.name], "seed");
        button.setAttribute("aria-label", `seed ${run.seed}, ${run.name}`);
        line.append(button);
      }
    }
    document.getElementById("legend").append(line);
  }
}

function showLegend() {
  for (const button of document.querySelectorAll("#legend button")) {
    const shown = JSON.parse(button.dataset.runs).some((run) => !hidden.has(run));
    button.setAttribute("aria-pressed", String(shown));
  }
}

// --- groups --------------------------------------------------------------------------------------------------------

// on a narrow page names stand above the bars, not left of them
function rows(count) { return { height: 90 + 44 * count }; }

function labels(ids) {
  return ids.map((id, i) => ({
    x: 0, xref: "paper", xanchor: "left", y: i, yshift: 17, text: name(id), showarrow: false, font: { size: 12 },
  }));
}

function downwards(count) {
  return { visible: false, range: [count - 0.5, -0.75], fixedrange: true };
}

function drawDifferences() {
  const found = data.differences;
  const { unit, digits } = data.metric || {};
  const traces = found.flatMap((one, i) => {
    const look = style(one.entry);
    const interval = one.low === null ? "" : `<br>95%%: ${one.low.toFixed(digits)} to ${one.high.toFixed(digits)}`;
    const bounds = one.low === null ? {} : {
      error_x: {
        type: "data", symmetric: false, array: [one.high - one.mean], arrayminus: [one.mean - one.low],
        color: look.colour, thickness: 2, width: 5,
      },
    };
    return [
      {
        x: one.values, y: one.values.map(() => i), mode: "markers", text: one.seeds.map(String),
        marker: { color: look.faint, size: 6, symbol: look.symbol },
        hovertemplate: `${name(one.entry)}, seed %{text}: %{x:.${digits}f}<extra></extra>`,
      },
      {
        x: [one.mean], y: [i], mode: "markers", marker: { color: look.colour, size: 10, symbol: look.symbol }, ...bounds,
        hovertemplate: `${name(one.entry)}: %{x:.${digits}f}${interval.replace("%%", "%")}<extra></extra>`,
      },
    ];
  });
  const ends = found.flatMap((one) => [0, one.low ?? one.mean, one.high ?? one.mean, ...one.values]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const room = (high - low) * 0.08 || 0.01;
  const baselines = [...new Set(found.map((one) => one.baseline))];
  const to = baselines.length === 1 ? plain(baselines[0]) : "its baseline";
  draw("differences", traces, {
    ...rows(found.length), annotations: labels(found.map((one) => one.entry)), yaxis: downwards(found.length),
    xaxis: axis(`difference to ${to}, ${unit}`, {
      range: [low - room, high + room], zeroline: true, zerolinecolor: css("--ink"), zerolinewidth: 1,
    }),
  });
}

function drawParameters() {
  const ids = data.sizes.map((_, i) => String(i));
  const shades = { embedding: 0.72, body: 0.45, head: 0 };
  const traces = Object.entries(shades).map(([part, share]) => ({
    type: "bar", orientation: "h", x: data.sizes.map((size) => size[part]), y: ids.map((_, i) => i), width: 0.34,
    marker: {
      color: ids.map((id) => mixed(style(id).colour, css("--paper"), share)),
      line: { color: css("--paper"), width: 1 },
    },
    text: data.sizes.map((size) => (size[part] > 0.12 * size.parameters ? part : "")), textposition: "inside",
    insidetextanchor: "middle", textangle: 0, constraintext: "none",
    insidetextfont: { size: 11, color: css(share ? "--ink" : "--paper") },
    hovertemplate: `${part}: %{x:,} parameters<extra></extra>`,
  }));
  draw("parameters", traces, {
    ...rows(ids.length), barmode: "stack", annotations: labels(ids), yaxis: downwards(ids.length),
    xaxis: axis("parameters", { rangemode: "tozero" }),
  });
}

function drawSizes() {
  const titles = { parameters: "parameters", flops: "training FLOPs", rank: "bound on the rank of the log-probabilities" };
  const { words, unit, digits } = data.metric || {};
  const traces = data.sizes.map((size, i) => {
    const look = style(String(i));
    const hollow = chosen.x === "rank" && !size.bounded;
    const error = size.error === null ? {} : {
      error_y: { type: "data", array: [size.error], color: look.colour, thickness: 1.5, width: 4 },
    };
    return {
      x: [size[chosen.x]], y: [size.mean], mode: "markers", ...error,
      marker: { color: look.colour, size: 11, symbol: look.symbol + (hollow ? "-open" : ""), line: { width: hollow ? 2 : 0 } },
      hovertemplate: `${name(String(i))}<br>%{x:.4s}: %{y:.${digits}f}<extra></extra>`,
    };
  });
  draw("size", traces, {
    xaxis: axis(titles[chosen.x], { type: chosen.sizeLog ? "log" : "linear" }), yaxis: axis(`${words}, ${unit}`),
  });
}

function drawBands() {
  const traces = [];
  data.bands.groups.forEach((band, i) => {
    const look = style(String(i));
    const key = chosen.bands;
    if (!band[key]) return;
    const bounds = key !== "difference" ? {} : {
      error_y: {
        type: "data", symmetric: false, color: look.colour, thickness: 1, width: 3,
        array: band.high.map((high, j) => (high === null ? 0 : high - band.difference[j])),
        arrayminus: band.low.map((low, j) => (low === null ? 0 : band.difference[j] - low)),
      },
    };
    traces.push({
      x: data.bands.names, y: band[key], mode: "lines+markers", ...bounds,
      line: { color: look.colour, width: 2, dash: look.dash }, marker: { symbol: look.symbol, size: 7, color: look.colour },
      hovertemplate: `${name(String(i))}<br>band %{x}: %{y:.4f}<extra></extra>`,
    });
  });
  const difference = chosen.bands === "difference";
  draw("bands", traces, {
    xaxis: axis("tenth of the vocabulary, the most frequent first", { type: "category", tickangle: 0 }),
    yaxis: axis(difference ? "difference to baseline, nats a token" : "loss, nats a token", {
      zeroline: difference, zerolinecolor: css("--ink"),
    }),
  });
}

function drawSpectra() {
  const entryOf = Object.fromEntries(data.runs.map((run) => [run.name, run.entry]));
  const traces = data.spectra.map((found) => {
    const look = style(entryOf[found.run]);
    return {
      x: found.numbers, y: found.values.map((value) => (value > 0 ? value : null)), mode: "lines",
      line: { color: look.colour, width: 1.5, dash: look.dash },
      hovertemplate: `${plain(found.run)} ${plain(found.name)}<br>%{x}: %{y:.4g}<extra></extra>`,
    };
  });
  draw("spectra", traces, {
    xaxis: axis("number of the singular value", { type: "log", dtick: 1 }),
    yaxis: axis("singular value", { type: "log", dtick: 1, exponentformat: "power" }),
  });
}

// --- choices -------------------------------------------------------------------------------------------------------

function press(action, on) {
  document.querySelector(`[data-action="${action}"]`).setAttribute("aria-pressed", String(on));
}

function flip(key, action, redraw) {
  chosen[key] = !chosen[key];
  press(action, action === "no-training" ? !chosen[key] : chosen[key]);
  redraw();
}

function choose(key, value, actions, redraw) {
  chosen[key] = value;
  for (const [action, meant] of Object.entries(actions)) press(action, meant === value);
  redraw();
}

const SIZES = { "x-parameters": "parameters", "x-flops": "flops", "x-rank": "rank" };
const BAND_VIEWS = { "band-loss": "loss", "band-difference": "difference" };
const ACTIONS = {
  "log-x": () => flip("logX", "log-x", drawCurves),
  "log-y": () => flip("logY", "log-y", drawCurves),
  "no-training": () => flip("training", "no-training", drawCurves),
  "zoom-end": () => flip("end", "zoom-end", drawCurves),
  "size-log": () => flip("sizeLog", "size-log", drawSizes),
};
for (const action of Object.keys(SIZES)) ACTIONS[action] = () => choose("x", SIZES[action], SIZES, drawSizes);
for (const action of Object.keys(BAND_VIEWS)) {
  ACTIONS[action] = () => choose("bands", BAND_VIEWS[action], BAND_VIEWS, drawBands);
}
for (const button of document.querySelectorAll("[data-action]")) {
  button.addEventListener("click", () => ACTIONS[button.dataset.action]());
}

// --- when ----------------------------------------------------------------------------------------------------------

const DRAW = {
  differences: drawDifferences, curves: drawCurves, parameters: drawParameters, size: drawSizes, bands: drawBands,
  spectra: drawSpectra,
};
const places = [...document.querySelectorAll(".plot")];
const drawn = new Set(); // ids of plots that a reader has come near to

function drawPlace(place) {
  drawn.add(place.id);
  place.removeAttribute("aria-busy");
  DRAW[place.id.slice("plot-".length)]();
}

function paintSwatches() {
  for (const swatch of document.querySelectorAll(".swatch[data-group]")) {
    if (entries[swatch.dataset.group]) swatch.style.background = style(swatch.dataset.group).colour;
  }
}

// The page can be read before the plotting library, which is most of this file, has been compiled.
function begin() {
  const library = document.createElement("script");
  library.textContent = document.getElementById("plotly").textContent;
  document.head.append(library);
  const watch = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) if (isIntersecting && !drawn.has(target.id)) drawPlace(target);
  }, { rootMargin: "300px" });
  places.forEach((place) => watch.observe(place));
  addEventListener("beforeprint", () => {
    places.forEach(drawPlace);
    places.forEach((place) => Plotly.relayout(place, { width: 680 }));
  });
  addEventListener("afterprint", () => {
    places.forEach((place) => Plotly.relayout(place, { width: null, autosize: true }));
  });
}

buildLegend();
showLegend();
paintSwatches();
document.addEventListener("theme", () => {
  paintSwatches();
  places.filter((place) => drawn.has(place.id)).forEach(drawPlace);
});
requestAnimationFrame(() => setTimeout(begin));
