// Which experts each token used, layer by layer.

import { at, make } from "./dom.js";
import { Record } from "./record.js";

const LABELS = 34; // pixels left of the map

const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

export class Experts {
  constructor() {
    this.data = null;
    this.token = null; // null: all
    this.cell = [0, 0]; // layer, expert
    this.marked = false;
    this.waiting = false;
    at("tokens").addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) this.select(Number(option.dataset.index));
    });
    at("tokens").addEventListener("keydown", (event) => this.tokenKey(event));
    at("map").addEventListener("keydown", (event) => this.cellKey(event));
    at("map").addEventListener("pointermove", (event) => this.point(event));
    at("map").addEventListener("click", (event) => {
      this.point(event);
      this.mark(true);
    });
    new ResizeObserver(() => this.draw()).observe(at("insight"));
  }

  record(about) {
    return new Record(about.routed_layers);
  }

  /** An answer's record, or what there is to say without one. */
  show(record, about) {
    this.data = record ?? null;
    this.token = null;
    this.cell = [0, 0];
    this.marked = false;
    at("routing").hidden = !record;
    at("tokens").replaceChildren();
    at("cell").textContent = "";
    at("experts-note").textContent = record
      ? ""
      : about && !about.routed_layers.length
        ? "This model has no layers that choose experts."
        : "Ask something: the experts of each token appear here as it is computed.";
    this.changed(record);
  }

  /** There are more tokens: drawn once before the next frame. */
  changed(record) {
    if (record !== (this.data ?? undefined) || this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.list();
      this.draw();
    });
  }

  list() {
    const box = at("tokens");
    const data = this.data;
    if (!data) return;
    const near = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    for (let i = box.children.length; i < data.tokens.length; i++) {
      const position = data.start + i;
      const prompt = position < data.prompt;
      const option = make("span", visible(data.tokens[i]), {
        role: "option",
        id: `token-${i}`,
        "aria-selected": "false",
        "aria-label": `${JSON.stringify(data.tokens[i])}, ${prompt ? "prompt" : "answer"}, position ${position}`,
        class: prompt ? "prompt" : "answer",
        "data-index": i,
      });
      box.append(option);
    }
    if (data.start) at("experts-note").textContent = `The first ${data.start} tokens came from the prefix cache: they were not computed.`;
    this.mark(this.marked);
    if (near && this.token === null) box.scrollTop = box.scrollHeight;
  }

  select(index) {
    const box = at("tokens");
    box.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    this.token = index;
    if (index === null) box.removeAttribute("aria-activedescendant");
    else {
      const option = box.children[index];
      option.setAttribute("aria-selected", "true");
      option.scrollIntoView({ block: "nearest" });
      box.setAttribute("aria-activedescendant", option.id);
    }
    this.draw();
  }

  tokenKey(event) {
    const size = this.data?.tokens.length ?? 0;
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (!size) return;
    if (event.key in moves) this.select(Math.min(size - 1, Math.max(0, (this.token ?? (moves[event.key] > 0 ? -1 : size)) + moves[event.key])));
    else if (event.key === "Home") this.select(0);
    else if (event.key === "End") this.select(size - 1);
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  cellKey(event) {
    if (!this.data) return;
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      this.move(this.cell[0] + down, this.cell[1] + right);
    } else if (event.key === "Enter" || event.key === " ") this.mark(true);
    else if (event.key === "Escape") {
      this.mark(false);
      this.select(null);
    } else return;
    event.preventDefault();
  }

  move(layer, expert) {
    const data = this.data;
    this.cell = [
      Math.min(data.layers.length - 1, Math.max(0, layer)),
      Math.min(data.experts - 1, Math.max(0, expert)),
    ];
    this.draw();
  }

  point(event) {
    if (!this.data) return;
    const box = at("map").getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top) / this.height);
    const expert = Math.floor((event.clientX - box.left - LABELS) / this.width);
    if (layer < this.data.layers.length && expert >= 0 && expert < this.data.experts) this.move(layer, expert);
  }

  /** Shades the tokens by the weight of the cell's expert. */
  mark(on) {
    this.marked = on;
    const data = this.data;
    if (!data) return;
    const options = at("tokens").children;
    const weights = data.tokens.map((_, i) => (on ? data.weight(i, ...this.cell) : 0));
    const most = Math.max(1e-9, ...weights);
    weights.forEach((weight, i) => options[i]?.style.setProperty("--used", weight / most));
    if (on) this.tell();
  }

  tell() {
    const data = this.data;
    if (!data?.tokens.length) return;
    const [layer, expert] = this.cell;
    const place = `Layer ${data.layers[layer].layer}, expert ${expert}`;
    if (this.token !== null) {
      const weight = data.weight(this.token, layer, expert);
      const used = weight ? `weight ${weight.toFixed(3)}` : "not used";
      at("cell").textContent = `${place}: ${used} by “${visible(data.tokens[this.token])}”`;
      return;
    }
    const count = data.counts[layer][expert];
    const share = ((100 * count) / data.tokens.length).toFixed(0);
    const mean = count ? `, mean weight ${(data.sums[layer][expert] / count).toFixed(3)}` : "";
    at("cell").textContent = `${place}: used by ${count} of ${data.tokens.length} tokens (${share} %)${mean}`;
  }

  draw() {
    const canvas = at("map");
    const data = this.data;
    const room = canvas.parentElement.clientWidth - 2;
    if (!data || room <= LABELS) return;
    const rows = data.layers.length;
    this.width = Math.max(3, Math.floor((room - LABELS) / data.experts));
    this.height = Math.max(7, Math.min(22, Math.floor(330 / rows)));
    const [width, height] = [LABELS + this.width * data.experts, this.height * rows];
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const brush = canvas.getContext("2d");
    brush.scale(scale, scale);
    brush.font = "10px sans-serif";
    brush.textBaseline = "middle";
    brush.textAlign = "right";
    const gap = this.width > 4 ? 1 : 0;
    const labelled = Math.ceil(12 / this.height);
    const most = Math.max(1, ...data.counts.map((counts) => Math.max(...counts)));
    for (let layer = 0; layer < rows; layer++) {
      if (layer % labelled === 0) {
        brush.globalAlpha = 1;
        brush.fillStyle = colour("--quiet");
        brush.fillText(data.layers[layer].layer, LABELS - 6, (layer + 0.5) * this.height);
      }
      const own = this.token === null ? null : data.weights[this.token][layer];
      for (let expert = 0; expert < data.layers[layer].experts; expert++) {
        const value = own
          ? data.weight(this.token, layer, expert) / Math.max(...own)
          : data.counts[layer][expert] / most;
        brush.globalAlpha = value > 0 ? 0.2 + 0.8 * value : 1;
        brush.fillStyle = colour(value > 0 ? "--accent" : "--code");
        brush.fillRect(LABELS + expert * this.width, layer * this.height, this.width - gap, this.height - 1);
      }
    }
    brush.globalAlpha = 1;
    brush.strokeStyle = colour("--text");
    brush.lineWidth = 1.5;
    brush.strokeRect(LABELS + this.cell[1] * this.width - 1, this.cell[0] * this.height - 0.5, this.width + 1, this.height);
    at("map-title").textContent =
      this.token === null
        ? `Experts of all ${data.tokens.length} tokens`
        : `Experts of “${visible(data.tokens[this.token])}”, position ${data.start + this.token}`;
    this.tell();
    this.table();
  }

  table() {
    const data = this.data;
    const box = at("expert-table");
    const one = this.token !== null;
    const head = make("tr");
    for (const text of ["layer", one ? "experts (weight)" : "most used experts (tokens)"]) head.append(make("th", text, { scope: "col" }));
    box.tHead.replaceChildren(head);
    box.tBodies[0].replaceChildren(
      ...data.layers.map(({ layer }, i) => {
        const pairs = one
          ? data.ids[this.token][i].map((expert, k) => [expert, data.weights[this.token][i][k]])
          : [...data.counts[i].entries()].filter(([, count]) => count);
        pairs.sort((a, b) => b[1] - a[1]);
        const row = make("tr");
        const shown = pairs.filter(([expert]) => expert >= 0).slice(0, one ? pairs.length : 6);
        row.append(
          make("th", layer, { scope: "row" }),
          make("td", shown.map(([expert, value]) => `${expert} (${one ? value.toFixed(3) : value})`).join(", ")),
        );
        return row;
      }),
    );
  }
}
