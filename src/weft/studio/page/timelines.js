// Draws timelines on canvases: zoom, hover, search, keyboard, and a PNG. The canvases of a group
// have one time axis: "asked" are those that follow the sliders, others are of other machines.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LEFT = 92, AXIS = 18;
const views = {}; // group -> the part of the time that is shown
const viewOf = (group) => (views[group] ||= { from: 0, to: null });
const drawn = new Map(); // canvas -> {line, end, group}
let search = "";
let changed = () => {};

export const onZoom = (listener) => { changed = listener; };
export function setSearch(text) { search = text.trim().toLowerCase(); redraw(); }
export function zoomOut(group = "asked") { views[group] = null; redraw(); changed(viewOf("asked").to !== null); }
export function redraw() { for (const canvas of drawn.keys()) paint(canvas); }
export function forget(group) { for (const [canvas, one] of drawn) if (one.group === group) drawn.delete(canvas); }

export function show(canvas, line, end, group = "asked") {
  if (!canvas.dataset.ready) listen(canvas);
  drawn.set(canvas, { line, end, group });
  paint(canvas);
}

const height = (line) => line.lanes.length * (line.lanes.length <= 10 ? 14 : 9) + AXIS + 4;
const range = ({ end, group }) => [viewOf(group).from, viewOf(group).to ?? end];

function paint(canvas) {
  const shown = drawn.get(canvas), { line } = shown;
  const wide = canvas.clientWidth, high = height(line), scale = devicePixelRatio || 1;
  if (!wide) return;
  if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(high * scale)) {
    canvas.width = Math.round(wide * scale);
    canvas.height = Math.round(high * scale);
    canvas.style.height = `${high}px`;
  }
  draw(canvas.getContext("2d"), line, range(shown), wide, high, scale);
}

function draw(pen, line, [from, to], wide, high, scale) {
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, high);
  const room = wide - LEFT - 6;
  const x = (ms) => LEFT + ((ms - from) / (to - from)) * room;
  const step = (high - AXIS - 4) / line.lanes.length;
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  const tick = nice((to - from) / Math.max(2, room / 90));
  pen.strokeStyle = css("--line"); pen.fillStyle = css("--faint"); pen.lineWidth = 1; pen.textAlign = "center";
  for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
    pen.beginPath(); pen.moveTo(x(at), 2); pen.lineTo(x(at), high - AXIS); pen.stroke();
    pen.fillText(`${Number(at.toPrecision(4))} ms`, Math.min(x(at), wide - 22), high - AXIS / 2);
  }
  pen.textAlign = "right";
  let last = null;
  line.lanes.forEach(([rank, lane], row) => {
    if (line.lanes.length > 24 && rank === last) return;
    const several = line.lanes[line.lanes.length - 1][0] !== line.lanes[0][0];
    pen.fillText(several && rank !== last ? `rank ${rank}` : several ? "" : lane, LEFT - 6, 2 + (row + 0.5) * step);
    last = rank;
  });
  pen.save();
  pen.beginPath(); pen.rect(LEFT, 0, room + 6, high - AXIS); pen.clip();
  const thin = Math.max(2, step - 3);
  for (let i = 0; i < line.row.length; i++) {
    const left = x(line.start[i]), width = Math.max(0.7, (line.length[i] / (to - from)) * room);
    if (left > wide || left + width < LEFT) continue;
    pen.globalAlpha = matches(line, i) ? (line.kind[i] === "wait" ? 0.18 : 1) : 0.12;
    pen.fillStyle = line.colour[i];
    pen.fillRect(left, 2 + line.row[i] * step + 1, Math.max(0.7, width - (width > 4 ? 0.6 : 0)), thin);
  }
  pen.restore();
}

function matches(line, i) {
  return !search || line.task[i].toLowerCase().includes(search) || line.kind[i].includes(search);
}

function nice(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((s) => s * power).find((s) => s >= raw);
}

function at(canvas, event) {
  const shown = drawn.get(canvas), { line } = shown, box = canvas.getBoundingClientRect();
  const [from, to] = range(shown), room = box.width - LEFT - 6;
  const step = (box.height - AXIS - 4) / line.lanes.length;
  return { ms: from + ((event.clientX - box.left - LEFT) / room) * (to - from), row: Math.floor((event.clientY - box.top - 2) / step), each: (to - from) / room };
}

function found(canvas, event) {
  const { line } = drawn.get(canvas), { ms, row, each } = at(canvas, event);
  for (let i = line.row.length - 1; i >= 0; i--) {
    if (line.row[i] === row && ms >= line.start[i] - each && ms <= line.start[i] + line.length[i] + each) return i;
  }
  return -1;
}

function amount(value, unit) {
  for (const [prefix, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${(value / size).toPrecision(3)} ${prefix}${unit}`;
  }
  return `${value} ${unit}`;
}

function described(line, i) {
  const [rank, lane] = line.lanes[line.row[i]], ms = line.length[i], start = line.start[i];
  const said = [line.task[i], `rank ${rank}, ${lane}, ${line.kind[i]}`, `${ms.toFixed(4)} ms, from ${start.toFixed(4)} to ${(start + ms).toFixed(4)}`];
  if (line.bytes[i]) said.push(`${amount(line.bytes[i], "B")} at ${amount((line.bytes[i] / ms) * 1e3, "B/s")}`);
  if (line.flops[i]) said.push(`${amount(line.flops[i], "flop")} at ${amount((line.flops[i] / ms) * 1e3, "flop/s")}`);
  return said.join("\n");
}

function zoomTo(from, to, { end, group }) {
  const least = end / 2000, view = viewOf(group);
  if (to - from < least) return;
  view.from = Math.max(0, from);
  view.to = Math.min(end, to);
  if (view.to - view.from >= end * 0.999) { view.from = 0; view.to = null; }
  redraw();
  changed(viewOf("asked").to !== null);
}

function listen(canvas) {
  canvas.dataset.ready = "1";
  let pressed = null;
  const tip = () => document.getElementById("tip") || Object.assign(document.body.appendChild(document.createElement("div")), { id: "tip", hidden: true });
  canvas.addEventListener("pointermove", (event) => {
    const i = found(canvas, event), box = tip();
    box.hidden = i < 0;
    if (i < 0) return;
    box.textContent = described(drawn.get(canvas).line, i);
    box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
    box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8)}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip().hidden = true; });
  canvas.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") pressed = at(canvas, event).ms; });
  addEventListener("pointerup", (event) => {
    if (pressed === null || !drawn.has(canvas)) return;
    const { ms, each } = at(canvas, event), from = pressed;
    pressed = null;
    if (Math.abs(ms - from) > 6 * each) zoomTo(Math.min(from, ms), Math.max(from, ms), drawn.get(canvas));
  });
  canvas.addEventListener("dblclick", () => zoomOut(drawn.get(canvas).group));
  canvas.addEventListener("keydown", (event) => {
    const shown = drawn.get(canvas), { end } = shown, view = viewOf(shown.group), [from, to] = range(shown), span = to - from, middle = (from + to) / 2;
    const move = { ArrowLeft: -0.15, ArrowRight: 0.15 }[event.key];
    if (event.key === "+" || event.key === "=") zoomTo(middle - span / 4, middle + span / 4, shown);
    else if (event.key === "-") zoomTo(middle - span, middle + span, shown);
    else if (event.key === "0" || event.key === "Escape") zoomOut(shown.group);
    else if (move && view.to !== null) zoomTo(Math.min(Math.max(0, from + move * span), end - span), Math.min(end, Math.max(span, to + move * span)), shown);
    else return;
    event.preventDefault();
  });
}

// All timelines below each other in one picture, with their names.
export function picture() {
  const wide = 1200, gap = 30, parts = [...drawn.values()].filter((one) => one.group === "asked");
  const canvas = document.createElement("canvas");
  canvas.width = wide * 2;
  canvas.height = 2 * parts.reduce((sum, { line }) => sum + height(line) + gap, 20);
  const pen = canvas.getContext("2d");
  let top = 10;
  for (const shown of parts) {
    const { line } = shown;
    const part = document.createElement("canvas");
    part.width = wide * 2;
    part.height = 2 * height(line);
    draw(part.getContext("2d"), line, range(shown), wide, height(line), 2);
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.globalCompositeOperation = "source-over";
    if (top === 10) { pen.fillStyle = css("--panel"); pen.fillRect(0, 0, canvas.width, canvas.height); }
    pen.fillStyle = css("--text");
    pen.font = `600 26px ${getComputedStyle(document.body).fontFamily}`;
    pen.fillText(`${line.machine}   ${line.name}   ${line.ms.toPrecision(3)} ms   ${line.speedup.toFixed(2)}x`, 20, 2 * (top + 18));
    pen.drawImage(part, 0, 2 * (top + gap - 4));
    top += height(line) + gap;
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
