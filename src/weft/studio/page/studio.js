// The studio: reads what is asked from the link and the controls, asks the server, draws answers.
// While a slider moves, one question is under way at a time, and only the newest waits for it.
import * as timelines from "./timelines.js";
import * as charts from "./charts.js";
import * as live from "./live.js";

const $ = (id) => document.getElementById(id);
const tab = crypto.randomUUID();
const form = $("controls");
const LOSSES = [["needed", "needed at least", "#8a9bab"], ["exposed_communication", "exposed communication", "#e69f00"], ["decomposition", "cost of splitting", "#009e73"], ["contention", "contention", "#d55e00"], ["launch", "launches", "#7d5ba6"]];
// name: label, least, most, unit, whether the slider is logarithmic
const SLIDERS = {
  m: ["M", 64, 262144, "", true], n: ["N", 64, 131072, "", true], k: ["K", 64, 65536, "", true],
  world: ["Ranks", 2, 8, "", false], link: ["Link rate out of a device, GB/s", 5, 2000, "GB/s", true],
  latency: ["Latency of a link, µs", 0, 20, "µs", false], engines: ["Copy engines", 1, 32, "", false],
  launch: ["Cost of starting kernels, × the machine's", 0, 8, "×", false], contention: ["Contention, × the machine's (0: none)", 0, 3, "×", false],
};
let about, state, machines = [], models = [];
const numeric = (name) => name in SLIDERS;

async function ask(path, query, options) {
  const response = await fetch(`api/${path}?${query}`, options);
  if (response.status === 204) return null; // a newer question has come
  const answer = await response.json().catch(() => ({ error: `the server answers ${response.status}` }));
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

function query(more = {}) {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (value !== about.default[key]) found.set(key, typeof value === "boolean" ? Number(value) : value);
  }
  for (const [key, value] of Object.entries(more)) found.set(key, value);
  return found.toString();
}

const tell = (error) => { $("error").textContent = error ? error.message : ""; $("error").hidden = !error; };
const time = (ms) => (ms >= 1 ? `${ms.toPrecision(3)} ms` : `${(1e3 * ms).toPrecision(3)} µs`);
const machine = (name = state.machine) => about.machines.find((one) => one.name === name);
const shown = (name) => (name === "link" && !state.link ? machine().link : name === "latency" && state.latency < 0 ? machine().latency : name === "engines" && !state.engines ? machine().engines : state[name]);

// --- controls -----------------------------------------------------------------------------------
const toSlider = (name, value) => (SLIDERS[name][4] ? Math.log2(Math.max(value, 1)) : value);
function fromSlider(name, text) {
  const raw = Number(text);
  if (!SLIDERS[name][4]) return raw;
  const value = 2 ** raw;
  return name === "link" ? Number(value.toPrecision(3)) : Math.max(64, Math.round(value / 64) * 64);
}

function makeSliders() {
  for (const box of document.querySelectorAll(".slider")) {
    const name = box.dataset.name, [label, least, most, , log] = SLIDERS[name];
    box.innerHTML = `<label for="in-${name}"></label><input type="range" id="range-${name}"><input type="number" id="in-${name}" step="any">`;
    box.querySelector("label").textContent = label;
    const [slider, field] = box.querySelectorAll("input");
    Object.assign(slider, { min: toSlider(name, least), max: toSlider(name, most), step: log ? 0.02 : ["world", "engines"].includes(name) ? 1 : 0.05 });
    slider.setAttribute("aria-label", label);
    slider.addEventListener("input", () => change({ [name]: fromSlider(name, slider.value) }, false));
    slider.addEventListener("change", () => change({ [name]: fromSlider(name, slider.value) }, true));
    field.addEventListener("change", () => { if (field.value !== "") change({ [name]: Number(field.value) }, true); });
  }
}

const options = (select, list) => {
  select.replaceChildren(...list.map(([value, text]) => Object.assign(document.createElement("option"), { value, textContent: text })));
};

function fill() {
  for (const name of Object.keys(SLIDERS)) {
    const value = shown(name), [slider, field] = [$(`range-${name}`), $(`in-${name}`)];
    if (name === "world") slider.max = Math.min(16, machine().world);
    slider.value = toSlider(name, value);
    slider.setAttribute("aria-valuetext", `${Number(value.toPrecision(6))} ${SLIDERS[name][3]}`.trim());
    if (document.activeElement !== field) field.value = Number(value.toPrecision(6));
  }
  const op = about.operations.find((one) => one.name === state.op);
  ["m", "n", "k"].forEach((name, i) => {
    const label = `${name.toUpperCase()}: ${op.sizes[i].toLowerCase()}`;
    document.querySelector(`[data-name=${name}] label`).textContent = label;
    $(`range-${name}`).setAttribute("aria-label", label);
  });
  $("op-text").textContent = op.text;
  const part = Math.ceil(state[op.shared] / state.world);
  $("shared").textContent = `Sizes are those of the whole product. The ranks share ${op.shared.toUpperCase()}: ${part} for each of ${state.world}.`;
  for (const name of ["machine", "beside", "op", "dtype"]) form.elements[name].value = state[name];
  form.elements.captured.checked = state.captured;
  for (const option of form.elements.beside.options) option.disabled = option.value === state.machine;
  const rank = $("rank").value;
  if ($("rank").options.length !== state.world + 1) options($("rank"), [...Array(state.world).keys()].map((n) => [String(n), String(n)]).concat([["all", "all"]]));
  live.asked(query(), machine().title);
  $("rank").value = rank && [...$("rank").options].some((o) => o.value === rank) ? rank : "0";
}

function change(difference, released) {
  state = { ...state, ...difference };
  if (state.beside === state.machine) state.beside = "";
  if (difference.op || numeric(Object.keys(difference)[0])) if (!("layer" in difference)) $("layer").value = "";
  delete state.layer;
  fill();
  moved = performance.now();
  newest = query();
  if (released) {
    history.replaceState(null, "", newest ? `?${newest}` : location.pathname);
    clearTimeout(resting); // keys of a slider follow each other: all schedules when they rest
    resting = setTimeout(later, 250);
  } else forgetAnswers(); // what is still computed is of other sizes, and would slow the timelines
  redraw();
}

// --- timelines: while dragging ------------------------------------------------------------------
let newest = "", asking = false, moved = 0, resting = 0;
export const redraws = (window.weftRedraws = []); // milliseconds from a change to the frame that shows it

async function redraw() {
  if (asking) return;
  asking = true;
  try {
    for (let done = null; done !== newest;) {
      done = newest;
      const since = moved;
      try {
        const answer = await ask("quick", query({ tab, rank: $("rank").value || "0" }));
        if (answer) {
          drawTimelines(answer);
          tell(null);
          requestAnimationFrame(() => redraws.push(performance.now() - since));
        }
      } catch (error) { tell(error); }
    }
  } finally { asking = false; }
}

function drawTimelines(answer) {
  const box = $("machines");
  machines = answer.machines;
  const lines = machines.map((one) => one.timelines.length).join();
  if (box.dataset.lines !== lines) {
    box.dataset.lines = lines;
    timelines.forget("asked");
    box.replaceChildren(...machines.map((one) => {
      const card = document.createElement("article");
      card.className = "card";
      card.innerHTML = '<h3 class="title"></h3><dl class="facts"></dl><p class="why"></p>' + one.timelines.map(() => '<div class="lane"><h3><b></b><em hidden class="tag"></em><span></span></h3><canvas tabindex="0" role="img"></canvas></div>').join("");
      return card;
    }));
  }
  machines.forEach((one, i) => {
    const card = box.children[i];
    card.querySelector(".title").textContent = one.title;
    const best = one.timelines.reduce((a, b) => (b.ms < a.ms ? b : a));
    const facts = [["serial", time(one.serial_ms)], ["best of these", time(best.ms)], ["compute alone", time(one.compute_ms)], ["communication alone", time(one.communication_ms)], ["complete overlap", time(one.ideal_ms)]];
    card.querySelector(".facts").replaceChildren(...facts.map(([name, value]) => {
      const div = document.createElement("div");
      div.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }));
      return div;
    }));
    card.querySelector(".why").textContent = one.auto ? `auto chooses ${one.auto.name}. ${one.auto.why} ${one.auto.does}` : `${one.balance} There is no rule for this operation: name a schedule.`;
    const end = Math.min(1.02 * Math.max(...one.timelines.map((line) => line.ms)), 1.6 * one.serial_ms);
    one.timelines.forEach((line, j) => {
      const row = card.querySelectorAll(".lane")[j], tag = row.querySelector(".tag"), canvas = row.querySelector("canvas");
      row.querySelector("b").textContent = line.name;
      row.title = line.does;
      tag.hidden = !(line.auto || line.name === state.pinned);
      tag.textContent = line.auto ? "auto" : "kept";
      row.querySelector("span").textContent = `${time(line.ms)} · ${line.speedup.toFixed(2)}x`;
      canvas.setAttribute("aria-label", `Timeline of ${line.name} on ${one.machine}: ${time(line.ms)}, ${line.speedup.toFixed(2)} times as fast as serial. ${line.does}`);
      timelines.show(canvas, { ...line, machine: one.machine }, end);
    });
  });
  const seen = new Map(machines.flatMap((one) => one.legend).map((fill) => [fill.name, fill.colour]));
  legend($("legend"), [...seen]);
}

function legend(list, items) {
  list.replaceChildren(...items.map(([name, colour]) => {
    const item = document.createElement("li"), dot = document.createElement("i");
    dot.style.background = colour;
    item.append(dot, name);
    return item;
  }));
}

// --- everything else: on release ----------------------------------------------------------------
let turn = 0, mapWanted = false, waiting = 0;

// Tells the server that nobody waits for tables, curves and maps any more.
function forgetAnswers() {
  clearTimeout(resting);
  turn++;
  if (waiting) fetch(`api/cancel?${new URLSearchParams({ tab })}`, { method: "POST" }).catch(() => {});
}

async function later() {
  const mine = ++turn;
  for (const id of ["tables", "curves"]) $(id).classList.add("waiting");
  waiting++;
  try {
    const full = await ask("full", query({ tab }));
    if (!full || mine !== turn) return;
    $("verdict").textContent = full.verdict;
    drawTables(full);
    $("tables").classList.remove("waiting");
    const found = await ask("curve", query({ tab }));
    if (!found || mine !== turn) return;
    drawCurves(found);
    $("curves").classList.remove("waiting");
    if (mapWanted) await drawMap(mine);
  } catch (error) { if (mine === turn) tell(error); } finally { waiting--; }
}

function drawTables({ machines: list }) {
  $("tables").replaceChildren(...list.map((one) => {
    const card = document.createElement("article");
    card.className = "card scroll";
    card.tabIndex = 0;
    const longest = Math.min(Math.max(...one.schedules.map((row) => row.ms)), 1.6 * one.serial_ms);
    card.innerHTML = `<h3></h3><p class="why"></p><table><thead><tr><th scope="col">schedule</th><th scope="col" class="number">time</th><th scope="col" class="number">speedup</th><th scope="col">where the time goes</th></tr></thead><tbody></tbody></table>`;
    card.querySelector("h3").textContent = one.title;
    card.querySelector(".why").textContent = list.length > 1 ? one.verdict : "";
    card.querySelector("tbody").replaceChildren(...one.schedules.map((row) => {
      const line = document.createElement("tr");
      if (row.best) line.className = "best";
      const keep = Object.assign(document.createElement("button"), { type: "button", textContent: row.name, title: row.does });
      keep.setAttribute("aria-pressed", String(state.pinned === row.name));
      keep.addEventListener("click", () => change({ pinned: state.pinned === row.name ? "" : row.name }, true));
      const name = document.createElement("td");
      name.append(keep);
      if (row.auto) name.append(" ", Object.assign(document.createElement("em"), { className: "tag", textContent: "auto" }));
      const cell = (text) => Object.assign(document.createElement("td"), { className: "number", textContent: text });
      const parts = { needed: one.ideal_ms + Math.min(0, row.losses.hidden), ...row.losses };
      const bar = Object.assign(document.createElement("div"), { className: "bar" });
      bar.setAttribute("role", "img");
      bar.setAttribute("aria-label", LOSSES.map(([key, label]) => `${label} ${time(Math.max(0, parts[key]))}`).join(", "));
      bar.title = bar.getAttribute("aria-label").replaceAll(", ", "\n");
      for (const [key, , colour] of LOSSES) {
        const part = document.createElement("i");
        part.style.background = colour;
        part.style.width = `${(100 * Math.max(0, parts[key])) / longest}%`;
        part.style.flexShrink = "0";
        bar.append(part);
      }
      const where = document.createElement("td");
      where.append(bar);
      line.append(name, cell(time(row.ms)), cell(`${row.speedup.toFixed(2)}x`), where);
      return line;
    }));
    for (const { name, why } of one.refused) card.append(Object.assign(document.createElement("p"), { className: "hint", textContent: `${name} is left out: ${why}` }));
    return card;
  }));
}

let lastCurves = null, lastMap = null;
function drawCurves(found) {
  lastCurves = found;
  const box = $("curves");
  while (box.children.length > found.machines.length) box.lastChild.remove();
  while (box.children.length < found.machines.length) {
    const card = document.createElement("article");
    card.className = "card";
    card.innerHTML = '<h3></h3><p class="why"></p><div class="plot"></div>';
    box.append(card);
  }
  found.machines.forEach((one, i) => {
    box.children[i].querySelector("h3").textContent = one.machine;
    box.children[i].querySelector(".why").textContent = one.said;
    charts.curve(box.children[i].querySelector(".plot"), one);
  });
}

async function drawMap(mine) {
  const rows = [], bar = $("map-progress");
  waiting++;
  bar.hidden = $("cancel-map").hidden = false;
  try {
    for (let row = 0; row < 7; row++) {
      bar.value = row;
      const answer = await ask("map", query({ tab, row }));
      if (!answer || mine !== turn || !mapWanted) return;
      rows.push(answer.cells);
    }
    lastMap = rows;
    await charts.map($("map"), rows, (m, n) => change({ m, n }, true));
  } finally { waiting--; if (mine === turn || !mapWanted) bar.hidden = $("cancel-map").hidden = true; }
}

// --- models, copies, exports --------------------------------------------------------------------
function offerModels(chosen = "") {
  const select = $("layer");
  select.replaceChildren(new Option("own sizes", ""));
  models.forEach((model, i) => {
    const group = Object.assign(document.createElement("optgroup"), { label: model.title });
    model.layers.forEach((layer, j) => group.append(new Option(`${layer.name} (${layer.m} × ${layer.n} × ${layer.k})`, `${i}.${j}`)));
    select.append(group);
  });
  select.value = chosen;
}

function takeLayer() {
  if (!$("layer").value) return;
  const [i, j] = $("layer").value.split(".").map(Number), { op, m, n, k } = models[i].layers[j];
  const dtype = op === "embedding_all_to_all" && !["float32", "float16", "bfloat16"].includes(state.dtype) ? "float32" : state.dtype;
  change({ op, m, n, k, dtype, layer: true }, true);
}

async function readConfig(file) {
  try {
    if (file.size > 256 * 1024) throw new Error("a config has at most 256 KiB");
    const found = await ask("config", new URLSearchParams({ world: state.world }), { method: "POST", body: await file.arrayBuffer() });
    models = [found, ...models];
    offerModels("0.0");
    takeLayer();
  } catch (error) { tell(error); }
}

function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function copy(kind) {
  try {
    const text = kind === "link" ? location.href : (await ask("copies", query()))[kind];
    $("snippet").textContent = text;
    $("snippet").hidden = false;
    await navigator.clipboard.writeText(text).then(() => { $("copied").textContent = "Copied."; }, () => { $("copied").textContent = "Select the text below to copy it."; });
  } catch (error) { tell(error); }
}

function listen() {
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const name of ["machine", "beside", "op", "dtype"]) form.elements[name].addEventListener("change", (event) => change({ [name]: event.target.value }, true));
  form.elements.captured.addEventListener("change", (event) => change({ captured: event.target.checked }, true));
  $("reset").addEventListener("click", () => change({ link: 0, latency: -1, engines: 0, launch: 1, contention: 1, captured: false }, true));
  $("layer").addEventListener("change", takeLayer);
  $("rank").addEventListener("change", () => { $("machines").dataset.lines = ""; newest = `${query()}#${$("rank").value}`; moved = performance.now(); redraw(); });
  $("search").addEventListener("input", (event) => timelines.setSearch(event.target.value));
  $("zoom-out").addEventListener("click", () => timelines.zoomOut());
  timelines.onZoom((zoomed) => { $("zoom-out").disabled = !zoomed; });
  $("draw-map").addEventListener("click", () => { mapWanted = true; drawMap(turn).catch(tell); });
  $("cancel-map").addEventListener("click", () => { mapWanted = false; forgetAnswers(); $("cancel-map").hidden = $("map-progress").hidden = true; });
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));
  $("trace").addEventListener("click", async () => {
    try {
      const response = await fetch(`api/trace?${query({ tab })}`);
      if (!response.ok) throw new Error((await response.json()).error || "there is no trace");
      save(await response.blob(), "weft-trace.json");
    } catch (error) { tell(error); }
  });
  $("png").addEventListener("click", async () => save(await timelines.picture(), "weft-timelines.png"));
  $("file").addEventListener("change", (event) => { if (event.target.files[0]) readConfig(event.target.files[0]); });
  const area = $("drop");
  addEventListener("dragover", (event) => { event.preventDefault(); area.classList.add("over"); });
  addEventListener("dragleave", () => area.classList.remove("over"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    if (event.dataTransfer.files[0]) readConfig(event.dataTransfer.files[0]);
  });
  addEventListener("resize", timelines.redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    timelines.redraw();
    if (lastCurves) drawCurves(lastCurves);
    live.redraw();
    if (lastMap) charts.map($("map"), lastMap, (m, n) => change({ m, n }, true));
  });
}

function fromLink() {
  const found = { ...about.default };
  for (const [key, text] of new URLSearchParams(location.search)) {
    if (!(key in found)) continue;
    found[key] = typeof found[key] === "boolean" ? text === "1" : typeof found[key] === "number" ? Number(text) : text;
  }
  if (!machine(found.machine)) found.machine = about.default.machine;
  if (found.beside && !machine(found.beside)) found.beside = "";
  return found;
}

async function start() {
  about = await ask("about", "");
  models = about.presets;
  if (matchMedia("(max-width: 860px)").matches) $("changed").open = false;
  makeSliders();
  options(form.elements.machine, about.machines.map((one) => [one.name, one.title]));
  options(form.elements.beside, [["", "nothing"], ...about.machines.map((one) => [one.name, one.title])]);
  options(form.elements.op, about.operations.map((one) => [one.name, one.title]));
  options(form.elements.dtype, [...new Set(about.machines.flatMap((one) => one.dtypes))].map((name) => [name, name]));
  legend($("losses"), LOSSES.map(([, label, colour]) => [label, colour]));
  offerModels();
  listen();
  live.start({ tab, query, time, legend, loom: about.loom, take: (sizes) => change(sizes, true) });
  state = fromLink();
  fill();
  moved = performance.now();
  newest = query() || " ";
  redraw();
  later();
}
start().catch(tell);
