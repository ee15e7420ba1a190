// Draws the figures of a page in the reader's light or dark theme, zooms all timelines together, lays
// two of them over each other, and shows the panel that is chosen. Each figure is JSON in a script
// element of its own; if they are large, one element has all of them, compressed.
(async () => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  // Without a mouse the buttons of a chart are always there, and need a line of their own.
  const room = matchMedia("(hover: none)").matches ? 26 : 0;
  const config = {
    displaylogo: false,
    doubleClick: "reset",
    showSendToCloud: false,
    plotlyServerURL: "",
    displayModeBar: "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
  };
  const drawn = new Set();
  const gantts = new Map(); // each timeline's plot, and its range when nothing is zoomed

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function template() {
    const font = getComputedStyle(document.body).fontFamily;
    const text = variable("--text"), faint = variable("--faint"), line = variable("--line");
    const axis = {
      automargin: true, gridcolor: line, linecolor: line, zerolinecolor: line,
      tickcolor: line, ticklabelstandoff: 5, tickfont: { color: faint }, title: { font: { color: faint } },
    };
    return {
      layout: {
        font: { family: font, size: 12, color: text },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        colorway: COLOURS,
        colorscale: { sequential: "Cividis", sequentialminus: "Cividis" },
        margin: { l: 8, r: 14, t: 24, b: 40 },
        // A finger on a chart scrolls the page; the buttons of the chart zoom.
        dragmode: touch ? false : "zoom",
        hoverlabel: { bgcolor: variable("--panel"), bordercolor: line, align: "left", font: { family: font, color: text } },
        legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: faint, activecolor: text, orientation: "h" },
        xaxis: axis,
        yaxis: axis,
        annotationdefaults: { font: { color: faint } },
      },
      data: {
        heatmap: [{ xgap: 1, ygap: 1, colorbar: { thickness: 12, outlinewidth: 0 } }],
        scatter: [{ marker: { size: 8 } }],
      },
    };
  }

  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function scaled(value, unit) {
    for (const [prefix, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (value >= size) return `${(value / size).toPrecision(3)} ${prefix}${unit}`;
    }
    return `${value} ${unit}`;
  }

  // What a hover says of a span: task, where, when, and how much at which rate.
  function described([task, kind, bytes, flops], lane, start, ms) {
    const lines = [
      `<b>${escaped(task)}</b>`,
      escaped(`rank ${lane[0]}, ${lane[1]}, ${kind}`),
      `${ms.toFixed(3)} ms, from ${start.toFixed(3)} to ${(start + ms).toFixed(3)}`,
    ];
    const rate = (amount, unit) => (ms > 0 ? `, ${(amount / ms / 1e6).toPrecision(3)} ${unit}` : "");
    if (bytes) lines.push(scaled(bytes, "B") + rate(bytes, "GB/s"));
    if (flops) lines.push(scaled(flops, "FLOP") + rate(flops, "GFLOP/s"));
    return lines.join("<br>");
  }

  function isGantt({ layout }) {
    return Boolean(layout && layout.meta && layout.meta.gantt);
  }

  const packed = document.querySelector("script[data-figures]");
  let unpacked = null;

  async function unpack() {
    if (!window.DecompressionStream) {
      const said = document.createElement("p");
      said.textContent = "The figures of this page need a browser of 2023 or later.";
      document.querySelector("h1").after(said);
      return;
    }
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked = await new Response(stream).json();
  }

  function spec(id) {
    const figure = JSON.parse(unpacked ? unpacked[id]
      : document.querySelector(`script[data-figure="${id}"]`).textContent);
    if (!isGantt(figure)) return figure;
    const { meta } = figure.layout;
    for (const trace of figure.data) {
      trace.hovertext = trace.customdata.map((data, i) =>
        described(data, meta.lanes[trace.y[i]], trace.base[i], trace.x[i]));
      trace.hovertemplate = "%{hovertext}<extra></extra>";
    }
    return figure;
  }

  function zoomable({ layout }) {
    return !(layout && layout.xaxis && layout.xaxis.fixedrange);
  }

  function themed(figure) {
    figure.layout = { ...figure.layout, template: template() };
    if (room && zoomable(figure) && !figure.layout.roomy) {
      figure.layout.margin = { ...figure.layout.template.layout.margin, ...figure.layout.margin };
      figure.layout.margin.t += room;
      figure.layout.roomy = true;
    }
    if (isGantt(figure)) {
      for (const trace of figure.data) trace.marker.line.color = variable("--panel");
    }
    return figure;
  }

  async function draw(plot, figure) {
    const { data, layout } = themed(figure);
    const full = layout.xaxis && layout.xaxis.range && layout.xaxis.range.slice();
    await Plotly.newPlot(plot, data, layout, config); // not react: a double click goes to this range
    drawn.add(plot);
    resizer.observe(plot);
    if (layout.meta && layout.meta.picks) plot.on("plotly_click", ({ points }) => pick(layout.meta.picks, points[0]));
    if (!isGantt(figure)) return;
    gantts.set(plot, full);
    plot.on("plotly_relayout", (change) => zoomAll(plot, change));
    if (zoomed.get(groupOf(plot))) await zoom([plot]);
  }

  const resizer = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.offsetParent) Plotly.Plots.resize(target);
  });

  // What the others are told comes back from them as an event; those are not passed on again.
  let zooming = false;
  const zoomed = new Map(); // by panel: the timelines of one share an axis, those of two do not
  const groupOf = (plot) => plot.closest("[data-panel]");

  async function zoomAll(source, change) {
    if (zooming || !Object.keys(change).some((key) => key.startsWith("xaxis"))) return;
    const range = source.layout.xaxis.range.slice();
    const group = groupOf(source);
    zoomed.set(group, String(range) === String(gantts.get(source)) ? null : range);
    await zoom([...gantts.keys()].filter((plot) => plot !== source && groupOf(plot) === group));
  }

  async function zoom(plots) {
    zooming = true;
    try {
      await Promise.all(plots.map((plot) =>
        Plotly.relayout(plot, { "xaxis.range": [...(zoomed.get(groupOf(plot)) || gantts.get(plot))] })));
    } finally {
      zooming = false;
    }
  }

  function show(plot) {
    if (drawn.has(plot)) return;
    if (overlays.has(plot)) {
      overlays.get(plot)();
      return;
    }
    const figure = spec(plot.id);
    if (room && zoomable(figure)) plot.style.height = `${parseInt(plot.style.height, 10) + room}px`;
    draw(plot, figure);
  }

  // Lanes of either chart in the order of both: by rank, compute first, engines by number.
  function laneKey([rank, lane]) {
    const number = (lane.match(/\d+/g) || ["-1"]).pop();
    return [rank, lane === "compute" ? 0 : 1, Number(number), lane];
  }

  function compareLanes(a, b) {
    const x = laneKey(a), y = laneKey(b);
    for (let i = 0; i < x.length; i++) if (x[i] !== y[i]) return x[i] < y[i] ? -1 : 1;
    return 0;
  }

  // Both charts in one: in each lane the upper one's bars above the lower one's, of one rank or all.
  function overlaid(upper, lower, rank) {
    const byName = new Map([...upper.layout.meta.lanes, ...lower.layout.meta.lanes]
      .filter((lane) => rank === "all" || lane[0] === Number(rank))
      .map((lane) => [String(lane), lane]));
    const lanes = [...byName.values()].sort(compareLanes);
    const row = new Map(lanes.map((lane, index) => [String(lane), index]));
    const data = [];
    [[upper, -0.21], [lower, 0.21]].forEach(([figure, shift], side) => {
      const { lanes: own, title } = figure.layout.meta;
      for (const trace of figure.data) {
        const rows = trace.y.map((index) => row.get(String(own[index])));
        const kept = (values) => values.filter((_, index) => rows[index] !== undefined);
        if (rows.every((index) => index === undefined)) continue;
        data.push({
          ...trace,
          y: kept(rows).map((index) => index + shift),
          x: kept(trace.x),
          base: kept(trace.base),
          hovertext: kept(trace.hovertext),
          customdata: kept(trace.customdata),
          width: 0.38,
          marker: { ...trace.marker, opacity: trace.marker.opacity * (side ? 0.62 : 1) },
          hovertemplate: `${escaped(title)}<br>${trace.hovertemplate}`,
        });
      }
    });
    const edges = lanes.slice(1).map((lane, index) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: index + 0.5, y1: index + 0.5,
      line: { width: 1, color: variable("--line"), dash: lane[0] === lanes[index][0] ? "dot" : "solid" },
    }));
    const layout = structuredClone(upper.layout);
    layout.meta.lanes = lanes;
    layout.shapes = [...edges, ...layout.shapes.filter((shape) => shape.yref === "paper")];
    layout.xaxis.range = [0, 1.02 * Math.max(upper.layout.meta.ms, lower.layout.meta.ms) || 1];
    layout.yaxis.range = [lanes.length - 0.4, -0.6];
    layout.yaxis.tickvals = lanes.map((_, index) => index);
    layout.yaxis.ticktext = lanes.map(([owner, lane], index) =>
      (index && lanes[index - 1][0] === owner ? "" : `<b>rank ${owner}</b>  `) + escaped(lane));
    return { data, layout };
  }

  function setUpOverlay(box) {
    const plot = box.querySelector(".plot");
    const [first, second, rank] = box.querySelectorAll("select");
    const update = () => {
      const upper = spec(first.value), lower = spec(second.value);
      const figure = overlaid(upper, lower, rank.value);
      const lanes = figure.layout.meta.lanes.length;
      plot.style.height = `${Math.max(lanes, 2) * (lanes <= 8 ? 42 : lanes <= 20 ? 30 : 22) + 70 + room}px`;
      const ratio = upper.layout.meta.ms / lower.layout.meta.ms;
      box.querySelector("output").textContent = !isFinite(ratio) || first.value === second.value ? ""
        : ratio >= 1 ? `lower is ${ratio.toFixed(2)}x as fast` : `upper is ${(1 / ratio).toFixed(2)}x as fast`;
      return draw(plot, figure);
    };
    for (const select of [first, second, rank]) select.addEventListener("change", update);
    return [plot, update];
  }

  function setUpChoices(box) {
    const select = box.querySelector("select");
    const panels = [...box.querySelectorAll("[data-panel]")];
    const update = () => panels.forEach((panel) => { panel.hidden = panel.dataset.panel !== select.value; });
    select.addEventListener("change", update);
    update(); // a browser may bring back what was chosen before a reload
  }

  // A point of a figure was clicked whose data begin with a panel and the name of a timeline in it.
  function pick(name, { customdata }) {
    const select = customdata && document.querySelector(`.choices select[name="${name}"]`);
    if (!select || !select.options[customdata[0]]) return;
    select.value = customdata[0];
    select.dispatchEvent(new Event("change"));
    const box = select.closest(".choices");
    const lower = box.querySelector(`[data-panel="${customdata[0]}"] .overlay select[name="lower"]`);
    const option = lower && [...lower.options].find((one) => one.text === customdata[1]);
    if (option) {
      lower.value = option.value;
      lower.dispatchEvent(new Event("change"));
    }
    box.scrollIntoView({ behavior: "smooth" });
  }

  if (packed) await unpack();
  if (packed && !unpacked) return;
  const overlays = new Map([...document.querySelectorAll(".overlay")].map(setUpOverlay));
  const plots = [...document.querySelectorAll(".plot")];
  document.querySelectorAll(".choices").forEach(setUpChoices);

  // Figures are drawn when they come near the screen, so that long pages open at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      show(entry.target);
    }
  }, { rootMargin: "800px" });
  plots.forEach((plot) => watcher.observe(plot));
  addEventListener("beforeprint", () => plots.filter((plot) => !plot.closest("[hidden]")).forEach(show));

  dark.addEventListener("change", () => {
    for (const plot of drawn) {
      const range = gantts.get(plot);
      if (range) plot.layout.xaxis.range = range.slice();
      draw(plot, { data: plot.data, layout: plot.layout });
    }
  });
})();
