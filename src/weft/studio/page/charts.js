// The curve of speedups over the link rate, the map of winners, and the paired bars of a live run,
// drawn by plotly.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const CONFIG = { displaylogo: false, displayModeBar: false, showSendToCloud: false, plotlyServerURL: "", responsive: true };
const COLOURS = ["#8a9bab", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#0072b2", "#56b4e9", "#7d5ba6", "#b8a800", "#a65628", "#5f7d8c"];

function layout(more) {
  const line = css("--line"), faint = css("--faint");
  const axis = { gridcolor: line, linecolor: line, zeroline: false, tickfont: { color: faint }, title: { font: { color: faint } }, automargin: true };
  return {
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--text") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 46, r: 12, t: 30, b: 44 }, dragmode: false,
    hoverlabel: { bgcolor: css("--panel"), bordercolor: line, font: { color: css("--text") }, align: "left" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    ...more, xaxis: { ...axis, fixedrange: true, ...more.xaxis }, yaxis: { ...axis, fixedrange: true, ...more.yaxis },
  };
}

export function curve(plot, found) {
  const rates = found.points.map((p) => p.rate);
  const trace = (name, key, more) => ({
    type: "scatter", mode: "lines+markers", name, x: rates, y: found.points.map((p) => p[key]), marker: { size: 5 },
    text: found.points.map((p) => p.name), hovertemplate: `%{x:.0f} GB/s: %{y:.2f}x${key === "best" ? "<br>%{text}" : ""}<extra>${name}</extra>`, ...more,
  });
  const data = [trace("complete overlap", "possible", { mode: "lines", line: { dash: "dot", color: "#8a9bab" } }), trace("best", "best", { line: { color: "#0072b2" } })];
  if (found.points.some((p) => p.auto !== null)) data.push(trace("auto", "auto", { line: { color: "#e69f00", dash: "dash" } }));
  const mark = (rate, text, colour) => ({
    shape: { type: "line", x0: rate, x1: rate, y0: 0, y1: 1, yref: "paper", line: { color: colour, width: 1, dash: "dot" } },
    note: { x: Math.log10(rate), y: 0.02, yref: "paper", yanchor: "bottom", xanchor: "left", text, showarrow: false, textangle: -90, font: { size: 11, color: css("--faint") } },
  });
  const marks = [mark(found.rate, "asked about", css("--accent"))];
  if (found.crossover) marks.push(mark(found.crossover, "communication = compute", "#d55e00"));
  return Plotly.react(plot, data, layout({
    xaxis: { type: "log", title: { text: "link rate out of a device, GB/s" }, dtick: "D2" }, yaxis: { title: { text: "speedup over serial" }, rangemode: "normal" },
    shapes: marks.map((m) => m.shape), annotations: marks.map((m) => m.note),
  }), CONFIG);
}

export function map(plot, rows, pick) {
  const names = [...new Set(rows.flat().map((cell) => cell.name))].sort((a, b) => b.startsWith("serial") - a.startsWith("serial") || a.localeCompare(b));
  const scale = names.flatMap((_, i) => [[i / names.length, COLOURS[i % COLOURS.length]], [(i + 1) / names.length, COLOURS[i % COLOURS.length]]]);
  const cells = (value) => rows.map((row) => row.map(value));
  const heat = {
    type: "heatmap", x: rows[0].map((c) => String(c.m)), y: rows.map((r) => String(r[0].n)), z: cells((c) => names.indexOf(c.name)), zmin: -0.5, zmax: names.length - 0.5,
    colorscale: scale, showscale: false, xgap: 2, ygap: 2, text: cells((c) => `${c.speedup.toFixed(2)}x`), texttemplate: "%{text}", textfont: { color: "#ffffff", size: 12 },
    customdata: cells((c) => [c.name, c.auto || "no rule"]), hovertemplate: "M %{x}, N %{y}<br><b>%{customdata[0]}</b> %{text}<br>auto: %{customdata[1]}<extra></extra>",
  };
  const legend = names.map((name, i) => ({ type: "scatter", x: [null], y: [null], mode: "markers", name, marker: { symbol: "square", size: 11, color: COLOURS[i % COLOURS.length] } }));
  plot.hidden = false;
  return Plotly.react(plot, [heat, ...legend], layout({ xaxis: { type: "category", title: { text: "M" } }, yaxis: { type: "category", title: { text: "N" } }, margin: { l: 60, r: 12, t: 60, b: 44 } }), CONFIG).then(() => {
    plot.removeAllListeners("plotly_click");
    plot.on("plotly_click", ({ points }) => pick(Number(points[0].x), Number(points[0].y)));
  });
}

// A figure of weft's pages: what a measurement and its prediction took.
export function figure(plot, { data, layout: own }, height) {
  plot.style.height = `${height}px`;
  const narrow = plot.clientWidth < 560; // names and times would take most of it
  const text = (note) => (narrow ? note.text.replace(/ ±.*/, "") : note.text);
  const notes = own.annotations.map((note) => ({ ...note, text: text(note), font: { ...note.font, color: css("--text") } }));
  const drawn = layout({ ...own, annotations: notes, height });
  if (narrow) {
    Object.assign(drawn.yaxis, { tickfont: { ...drawn.yaxis.tickfont, size: 10 }, ticktext: own.yaxis.ticktext.map((name) => name.replace("auto: ", "auto:<br>").replace("@", "<br>@")) });
    drawn.xaxis.range = [0, 1.45 * own.xaxis.range[1]];
  }
  return Plotly.react(plot, data, drawn, CONFIG);
}
