// What workers, streams and the engine's thread did in recorded steps.

import { postJson } from "./api.js";
import { at, make } from "./dom.js";

const FONT = "11px sans-serif";
const ROW = 20;
const COLOURS = [
  "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#44aa99",
  "#cc6633", "#8888dd", "#99aa00", "#bb5588",
];
const OWN = {
  wait: "#9a9a9a", schedule: "#7a8a99", inputs: "#b0a090", run: "#5f6f65", jobs: "#a9b4a2", deliver: "#8a6f80",
}; // what the engine's thread does is no computing

export class Workers {
  constructor() {
    this.data = null;
    this.recording = false;
    this.answering = false;
    this.labels = 0; // pixels left of the lanes
    this.automatic = null; // stops what an answer has begun to record
    at("record").addEventListener("click", () => this.record(30));
    at("step").addEventListener("change", () => this.draw());
    at("lanes").addEventListener("pointermove", (event) => this.point(event));
    new ResizeObserver(() => this.draw()).observe(at("insight"));
  }

  get open() {
    return !at("workers").hidden && !at("insight").hidden;
  }

  answerBegins() {
    this.answering = true;
    if (this.open) this.record(600, (this.automatic = new AbortController()));
  }

  /** What was to be recorded of it and was not never comes. */
  answerEnds() {
    this.answering = false;
    this.automatic?.abort();
  }

  async record(seconds, automatic = null) {
    if (this.recording) return;
    this.recording = true;
    at("record").disabled = true;
    at("workers-note").textContent = "Recording: ask something, if no answer is being written.";
    try {
      this.data = await postJson("/v1/pykernels/steps", { steps: 2, seconds }, automatic?.signal);
      at("workers-note").textContent = "While this view is open, two steps of each answer are recorded.";
      this.fill();
    } catch (error) {
      at("workers-note").textContent =
        error.name === "AbortError" ? "The answer was too short to record two of its steps." : error.message;
    }
    this.recording = false;
    at("record").disabled = false;
    // A long prompt takes many steps: those that follow are worth seeing, too.
    if (this.answering && this.open && this.data && !this.data.usage.decode) {
      this.record(600, this.automatic);
    }
  }

  colour(op) {
    if (op in OWN) return OWN[op];
    return COLOURS[this.data.ops.filter((name) => !(name in OWN)).indexOf(op) % COLOURS.length];
  }

  fill() {
    const { steps, usage } = this.data;
    at("step").replaceChildren(
      ...steps.map((step, i) => {
        const tokens = `${step.T} token${step.T === 1 ? "" : "s"}`;
        return make("option", `step ${i + 1}: ${step.kind}, ${tokens}`, { value: i });
      }),
    );
    at("step").value = steps.length - 1;
    const found = usage.decode ?? usage.prefill;
    const percent = (share) => `${(100 * share).toFixed(0)}\u00a0%`;
    if (found) {
      const streams = Object.entries(found.streams).map(([device, share]) => `${device} computed in ${percent(share)}`);
      at("workers-summary").textContent = [
        `A ${found.kind} step took ${(found.us / 1000).toFixed(2)}\u00a0ms`,
        `some worker computed in ${percent(found.cpu)} of it`,
        `a worker in ${percent(found.workers)} (the mean)`,
        ...streams,
        ...(streams.length ? [`both in ${percent(found.both)}`] : []),
        ...(found.copies ? [`links copied in ${percent(found.copies)}`] : []),
        `the engine's own Python ran in ${percent(found.engine)}.`,
      ].join(", ");
      const shown = found.ops.slice(0, 14);
      at("ops").tBodies[0].replaceChildren(
        ...shown.map((one) => {
          const row = make("tr");
          const name = make("th", undefined, { scope: "row" });
          name.append(this.swatch(one.op), one.op);
          row.append(name, make("td", one.where), make("td", one.us.toFixed(0)), make("td", one.lane_us.toFixed(0)));
          return row;
        }),
      );
      at("legend").replaceChildren(
        ...this.data.ops
          .filter((op) => !shown.some((one) => one.op === op))
          .map((op) => {
            const entry = make("li");
            entry.append(this.swatch(op), op);
            return entry;
          }),
      );
    }
    this.draw();
    this.tellLanes();
  }

  /** How much of the steps each worker, stream and link computes or copies. */
  tellLanes() {
    at("busy").tBodies[0].replaceChildren(
      ...this.data.lanes.map((lane) => {
        const row = make("tr");
        row.append(make("th", lane.name, { scope: "row" }), make("td", lane.device));
        row.append(make("td", `${(100 * lane.busy).toFixed(0)}\u00a0%`));
        return row;
      }),
    );
  }

  swatch(op) {
    const square = make("span", undefined, { class: "swatch" });
    square.style.background = this.colour(op);
    return square;
  }

  get step() {
    return this.data.steps[Number(at("step").value)] ?? this.data.steps.at(-1);
  }

  draw() {
    const canvas = at("lanes");
    canvas.hidden = !this.data?.steps.length;
    const room = canvas.parentElement.clientWidth;
    if (canvas.hidden || !this.open || !room) return;
    const { lanes, spans, ops } = this.data;
    const step = this.step;
    const height = ROW * lanes.length + 18;
    const scale = window.devicePixelRatio || 1;
    canvas.width = room * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const brush = canvas.getContext("2d");
    brush.scale(scale, scale);
    brush.font = FONT;
    brush.textBaseline = "middle";
    this.labels = 12 + Math.max(...lanes.map((lane) => brush.measureText(lane.name).width));
    const width = room - this.labels - 4;
    const x = (us) => this.labels + (width * (us - step.begin)) / (step.end - step.begin);
    lanes.forEach((lane, i) => {
      brush.fillStyle = colour("--text");
      brush.fillText(lane.name, 6, (i + 0.5) * ROW);
      brush.fillStyle = colour("--code");
      brush.fillRect(this.labels, i * ROW + 1, width, ROW - 2);
    });
    for (const [lane, op, , begin, end] of spans) {
      if (end < step.begin || begin > step.end) continue;
      const wait = ops[op] === "wait";
      const left = Math.max(this.labels, x(begin));
      brush.fillStyle = this.colour(ops[op]);
      brush.globalAlpha = wait ? 0.35 : 1;
      const top = lane * ROW + (wait ? ROW / 2 - 2 : 1);
      brush.fillRect(left, top, Math.max(0.6, Math.min(this.labels + width, x(end)) - left), wait ? 4 : ROW - 2);
    }
    brush.globalAlpha = 1;
    brush.fillStyle = colour("--quiet");
    brush.fillText("0", this.labels, height - 8);
    brush.textAlign = "right";
    brush.fillText(`${((step.end - step.begin) / 1000).toFixed(2)}\u00a0ms`, this.labels + width, height - 8);
    brush.textAlign = "left";
  }

  point(event) {
    if (!this.data) return;
    const box = at("lanes").getBoundingClientRect();
    const step = this.step;
    const us = step.begin + ((event.clientX - box.left - this.labels) / (box.width - this.labels - 4)) * (step.end - step.begin);
    const row = Math.floor((event.clientY - box.top) / ROW);
    const found = this.data.spans.findLast(([lane, , , begin, end]) => lane === row && begin <= us && us <= end);
    if (!found) {
      at("span").textContent = "";
      return;
    }
    const [lane, op, layer, begin, end, tasks] = found;
    const parts = [this.data.lanes[lane].name, this.data.ops[op]];
    if (layer !== null) parts.push(`layer ${layer}`);
    parts.push(`${(end - begin).toFixed(1)} µs`);
    if (tasks > 1) parts.push(`${tasks} tasks`);
    at("span").textContent = parts.join(", ");
  }
}
