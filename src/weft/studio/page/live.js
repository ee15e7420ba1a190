// The live run: asks the server to measure the case here, follows it line by line, draws the result.
// The run lives as long as its request: cancelling, another run, or closing the tab ends it.
import * as charts from "./charts.js";
import * as timelines from "./timelines.js";

const $ = (id) => document.getElementById(id);
let studio, running = null, shown = null, measured = "", now = "", fits = null;

export function start(given) {
  studio = given;
  const loom = $("live-where").querySelector("[value=loom]");
  loom.disabled = !studio.loom;
  if (!studio.loom) loom.textContent += " (not built: weft loom build)";
  $("live-run").addEventListener("click", run);
  $("live-cancel").addEventListener("click", () => running?.abort("cancelled"));
  $("live-fit").addEventListener("click", () => { studio.take(fits); say(""); $("live-run").focus(); });
  $("live-schedule").addEventListener("change", drawCall);
}

// What is asked now: the result may be of another case.
export function asked(query, machine) {
  now = query;
  $("live-machine").textContent = machine;
  $("live-stale").hidden = !shown || now === measured;
}

export function redraw() { if (shown) draw(); }

function say(text, { wrong = false, progress = null } = {}) {
  const bar = $("live-progress");
  $("live-state").hidden = !text;
  $("live-state").classList.toggle("wrong", wrong);
  $("live-said").textContent = text;
  bar.hidden = progress === null;
  if (progress) bar.value = progress; else bar.removeAttribute("value"); // not known: it moves
  $("live-fit").hidden = true;
}

async function run() {
  running?.abort("again");
  const mine = (running = new AbortController()), begun = studio.query();
  $("live-cancel").hidden = false;
  $("live-result").classList.add("waiting");
  say("Starting…", { progress: 0 });
  let ended = false;
  try {
    const more = { tab: studio.tab, where: $("live-where").value, rounds: $("live-rounds").value, pace: $("live-pace").value };
    const response = await fetch(`api/live?${studio.query(more)}`, { method: "POST", signal: mine.signal });
    if (!response.ok) throw new Error((await response.json()).error || response.statusText);
    for await (const message of lines(response.body)) {
      if (mine !== running) return;
      if (message.error) { ended = true; refused(message); }
      else if (message.result) {
        ended = true;
        shown = message.result;
        measured = begun;
        asked(now, $("live-machine").textContent);
        say("");
        fill();
      } else say(message.text[0].toUpperCase() + message.text.slice(1), { progress: message.progress });
    }
    if (!ended) say("The run ended before it had a result; run it again.", { wrong: true });
  } catch (error) {
    if (mine !== running) return;
    if (mine.signal.aborted) say("Cancelled. Nothing of this run was kept, and its processes have been ended.");
    else say(error.message, { wrong: true });
  } finally {
    if (mine === running) {
      running = null;
      $("live-cancel").hidden = true;
      $("live-result").classList.remove("waiting");
    }
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) if (part.trim()) yield JSON.parse(part);
  }
}

function refused({ error, fits: found }) {
  say(error, { wrong: true });
  fits = found && Object.keys(found).length ? found : null;
  if (!fits) return;
  const names = { m: "M", n: "N", k: "K", world: "ranks", dtype: "dtype" };
  $("live-fit").textContent = `Ask about a case that fits: ${Object.entries(fits).map(([key, value]) => `${names[key]} ${value}`).join(", ")}`;
  $("live-fit").hidden = false;
}

function fill() {
  $("live-run").textContent = "Run it again";
  $("live-result").hidden = false;
  for (const [id, key] of [["case", "case"], ["where-said", "where"], ["verdict", "verdict"], ["compared", "compared"], ["recorded", "recorded"]]) $(`live-${id}`).textContent = shown[key];
  $("live-facts").replaceChildren(...Object.entries(shown.facts).map(([name, ms]) => {
    const div = document.createElement("div");
    div.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: studio.time(ms) }));
    return div;
  }));
  $("live-schedule").replaceChildren(...shown.calls.map((call, i) => new Option(call.name, i)));
  const overlapped = shown.calls.findIndex((call) => !call.name.includes("serial"));
  $("live-schedule").value = String(Math.max(0, overlapped));
  draw();
}

function draw() {
  studio.legend($("live-colours"), shown.colours);
  charts.figure($("live-plot"), shown.figure, shown.height);
  drawCall();
}

function drawCall() {
  const call = shown.calls[Number($("live-schedule").value)];
  const lanes = document.querySelectorAll("#live-result .lane");
  studio.legend($("live-legend"), call.legend.map((fill) => [fill.name, fill.colour]));
  const drawn = [call.recorded, call.predicted], end = 1.02 * Math.max(...drawn.map((line) => (line ? line.ms : 0)));
  lanes.forEach((lane, i) => {
    const line = drawn[i], canvas = lane.querySelector("canvas");
    lane.hidden = !line;
    if (!line) return;
    lane.querySelector("span").textContent = studio.time(line.ms);
    canvas.setAttribute("aria-label", `${i ? "Predicted for this computer" : "One recorded call here"}: ${line.name}, ${studio.time(line.ms)}`);
    timelines.show(canvas, line, end, "live");
  });
}
