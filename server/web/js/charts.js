/** Charts: uPlot with the page's colours, limit lines, shaded floods, a readout, and a summary for screen readers. */

import { el } from "./dom.js";
import { compact } from "./format.js";

const charts = new Set();
const HEIGHT = 150;
let library;

/** Whether the chart library is there. The first chart asks for it, so that nothing waits for it; all are drawn once it comes. */
function drawable() {
  if (!library) {
    library = el("script", { src: "charts/uPlot.iife.min.js", on: { load: () => charts.forEach((chart) => chart.fit()), error: () => { library = undefined; } } });
    document.head.append(library);
  }
  return "uPlot" in globalThis;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Redraw all charts after a change of theme. */
export function redrawAll() {
  for (const chart of charts) chart.recolour();
}

/**
 * Time chart in a `figure` element.
 *
 * `series` are `{key, label, colour, dash, width}`, `limits` are `{value, label}`, named beside the title; `log` makes
 * the axis logarithmic, `stepped` draws each value as a step of its second, `unit` stands in the title and readout,
 * `sync` links the cursors of charts with the same key.
 */
export class TimeChart {
  constructor({ title, unit = "", series, limits = [], log = false, stepped = false, sync, min = 0, height = HEIGHT, xLabel = "s", tools = null }) {
    Object.assign(this, { title, unit, series, log, stepped, sync, min, xLabel, height });
    this.hidden = new Set();
    this.shaded = [];
    this.marks = [];
    this.readout = el("span", { class: "readout", "aria-hidden": "true" });
    this.summary = el("p", { class: "unseen" });
    this.plotBox = el("div", { class: "plot", "aria-hidden": "true" });
    const name = el("span", { class: "name", text: unit ? `${title} (${unit})` : title });
    this.limitNames = el("span");
    this.limit(limits);
    this.figure = el("figure", { class: "chart" }, el("figcaption", {}, name, tools, this.limitNames, this.readout), this.plotBox, this.summary);
    charts.add(this);
    this.data = [[], ...series.map(() => [])];
    this.watcher = new ResizeObserver(() => this.fit());
    this.watcher.observe(this.plotBox);
  }

  /** `x` values and one array per series, null where there is nothing yet; `span` fixes the x-axis. */
  set(x, columns, span) {
    this.data = [x, ...this.series.map(({ key }) => this.log ? columns[key].map((v) => (v === null || v === undefined ? null : Math.max(v, 1))) : columns[key])];
    this.span = span ?? [x[0] ?? 0, x.at(-1) ?? 1];
    if (!this.plot) this.build();
    else this.plot.setData(this.data, true);
    this.say();
  }

  /** Draw and name these limits from now on. */
  limit(limits) {
    this.limits = limits;
    this.limitNames.replaceChildren(...limits.map(({ label }) => el("span", { class: "chip limit", text: label })));
  }

  /** Stretches of x to shade, as [from, to] pairs. */
  shade(stretches) {
    this.shaded = stretches;
  }

  /** Vertical marks, as {x, label}. */
  mark(marks) {
    this.marks = marks;
    this.plot?.redraw();
  }

  setHidden(keys) {
    this.hidden = keys;
    if (this.plot) this.series.forEach(({ key }, i) => this.plot.setSeries(i + 1, { show: !keys.has(key) }));
  }

  build() {
    this.plot?.destroy();
    const width = this.plotBox.clientWidth;
    if (!width || !drawable()) { this.plot = null; return; }
    const ink = colour("muted"), grid = { stroke: colour("grid"), width: 1 }, font = "11px system-ui, sans-serif";
    this.plot = new uPlot({
      width, height: this.height, legend: { show: false },
      padding: [6, 14, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 }, ...(this.sync ? { sync: { key: this.sync } } : {}) },
      scales: { x: { time: false, range: () => this.span }, y: { distr: this.log ? 3 : 1, range: (u, low, high) => this.range(low, high) } },
      axes: [
        { stroke: ink, grid, ticks: grid, font, size: 24, values: (u, ticks) => ticks },
        { stroke: ink, grid, ticks: grid, font, size: 50, values: (u, ticks) => ticks.map((t) => (t === null || (this.log && !Number.isInteger(Math.log10(t))) ? "" : compact(t))) },
      ],
      series: [{}, ...this.series.map((s) => ({
        label: s.label, stroke: () => colour(s.colour), width: s.width ?? 1.5, dash: s.dash, points: { show: false },
        show: !this.hidden.has(s.key), ...(this.stepped ? { paths: uPlot.paths.stepped({ align: -1 }) } : {}),
      }))],
      hooks: { drawClear: [(u) => this.drawBehind(u)], draw: [(u) => this.drawLimits(u)], setCursor: [(u) => this.read(u)] },
    }, this.data, this.plotBox);
  }

  range(low, high) {
    const values = this.limits.map(({ value }) => value);
    if (high === null || high === undefined) [low, high] = [this.min, 1];
    const top = Math.max(high, ...values) * (this.log ? 1.5 : 1.08) || 1;
    if (this.log) return [10 ** Math.floor(Math.log10(Math.max(1, Math.min(low, ...values)))), 10 ** Math.ceil(Math.log10(top))];
    return [Math.min(this.min, low), Math.max(top, this.min + 1e-6)];
  }

  drawBehind(u) {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.fillStyle = colour("flood");
    for (const [from, to] of this.shaded) {
      const a = Math.max(left, u.valToPos(from, "x", true)), b = Math.min(left + width, u.valToPos(to, "x", true));
      if (b > a) u.ctx.fillRect(a, top, b - a, height);
    }
    u.ctx.restore();
  }

  drawLimits(u) {
    const { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    const { ctx } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("limit");
    ctx.lineWidth = 1.5 * ratio;
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.setLineDash([5 * ratio, 4 * ratio]);
    const line = (x1, y1, x2, y2) => { ctx.beginPath(); ctx.moveTo(x1, y1); ctx.lineTo(x2, y2); ctx.stroke(); };
    for (const { value } of this.limits) {
      const y = u.valToPos(value, "y", true);
      line(left, y, left + width, y);
    }
    for (const { x, label } of this.marks) {
      const at = u.valToPos(x, "x", true);
      line(at, top, at, top + height);
      const fits = at < left + width * 0.7;
      ctx.textAlign = fits ? "left" : "right";
      ctx.fillText(label, at + (fits ? 4 : -4) * ratio, top + 12 * ratio);
    }
    ctx.restore();
  }

  read(u) {
    const { idx } = u.cursor;
    if (idx === null || idx === undefined) { this.readout.replaceChildren(); return; }
    const parts = this.series.flatMap((s, i) => {
      const value = this.data[i + 1][idx];
      if (this.hidden.has(s.key) || value === null || value === undefined) return [];
      return [el("span", { class: `ink-${s.colour}` }, el("b", { text: s.label }), ` ${compact(value)}`)];
    });
    this.readout.replaceChildren(`${this.data[0][idx]} ${this.xLabel}: `, ...parts);
  }

  /** Write the chart's summary for screen readers. */
  say() {
    const parts = this.series.flatMap((s, i) => {
      const seen = this.data[i + 1].filter((v) => v !== null && v !== undefined);
      if (!seen.length || this.hidden.has(s.key)) return [];
      return [`${s.label}: now ${compact(seen.at(-1))}, highest ${compact(seen.reduce((a, b) => Math.max(a, b)))}`];
    });
    const limits = this.limits.map(({ value, label }) => `${label} ${compact(value)}`);
    this.summary.textContent = `${this.title}${this.unit ? ` in ${this.unit}` : ""}. ${[...parts, ...limits].join("; ")}.`;
  }

  fit() {
    const width = this.plotBox.clientWidth;
    if (!width || !this.data[0].length) return;
    if (!this.plot) this.build();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this.height });
  }

  recolour() {
    if (this.plot) this.build();
  }

  destroy() {
    this.watcher.disconnect();
    this.plot?.destroy();
    charts.delete(this);
    this.figure.remove();
  }
}

/** Stretches where `phases[i]` is "burst", as [from, to] of seconds. */
export function floods(phases) {
  const stretches = [];
  phases.forEach((phase, i) => {
    if (phase !== "burst") return;
    if (stretches.length && stretches.at(-1)[1] === i) stretches.at(-1)[1] = i + 1;
    else stretches.push([i, i + 1]);
  });
  return stretches;
}

/** Scatter chart of predicted against measured, logarithmic, with the diagonal; points {measured, predicted, key, name}. */
export class Scatter {
  constructor({ title, unit, groups, points, height = 320 }) {
    Object.assign(this, { title, unit, groups, height });
    this.points = [...points].sort((a, b) => a.measured - b.measured);
    this.readout = el("span", { class: "readout" });
    this.plotBox = el("div", { class: "plot", "aria-hidden": "true" });
    const legend = el("div", { class: "legend" }, ...groups.map(({ label, colour: ink, fitted }) => el("span", { class: `chip dot ${fitted ? "fitted " : ""}ink-${ink}`, text: label })));
    const within = this.points.filter(({ measured, predicted }) => Math.abs(predicted / measured - 1) <= 0.1).length;
    const summary = el("p", { class: "unseen", text: `${title}: ${within} of ${this.points.length} predictions within 10% of the measurement. The tables below have the errors.` });
    this.figure = el("figure", { class: "chart" }, el("figcaption", {}, el("span", { class: "name", text: `${title} (${unit})` }), this.readout), legend, this.plotBox, summary);
    charts.add(this);
    new ResizeObserver(() => this.fit()).observe(this.plotBox);
  }

  build() {
    this.plot?.destroy();
    const width = this.plotBox.clientWidth;
    if (!width || !drawable()) { this.plot = null; return; }
    const values = this.points.flatMap(({ measured, predicted }) => [measured, predicted]);
    const span = [10 ** Math.floor(Math.log10(Math.min(...values))), 10 ** Math.ceil(Math.log10(Math.max(...values)))];
    const x = [span[0], ...this.points.map(({ measured }) => measured), span[1]];
    const inner = (column) => [null, ...column, null];
    const data = [x, x, ...this.groups.map(({ key }) => inner(this.points.map((p) => (p.key === key ? p.predicted : null))))];
    const ink = colour("muted"), grid = { stroke: colour("grid"), width: 1 }, font = "11px system-ui, sans-serif";
    const ticks = (u, list) => list.map((t) => (t !== null && Number.isInteger(Math.round(1e6 * Math.log10(t)) / 1e6) ? compact(t) : ""));
    const scale = { distr: 3, range: () => span };
    this.plot = new uPlot({
      width, height: this.height, legend: { show: false }, padding: [8, 14, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false, ...scale }, y: scale },
      axes: [{ stroke: ink, grid, ticks: grid, font, size: 42, values: ticks, label: "measured", labelFont: font, labelSize: 16 },
        { stroke: ink, grid, ticks: grid, font, size: 48, values: ticks, label: "predicted", labelFont: font, labelSize: 16 }],
      series: [{}, { label: "exact", stroke: () => colour("limit"), dash: [5, 4], width: 1, points: { show: false } },
        ...this.groups.map((group) => ({ label: group.label, paths: () => null,
          points: { show: true, size: 8, width: group.fitted ? 2 : 1, stroke: () => colour(group.fitted ? group.colour : "card"), fill: () => colour(group.fitted ? "card" : group.colour) } }))],
      hooks: { setCursor: [(u) => this.read(u.cursor.idx)] },
    }, data, this.plotBox);
  }

  read(index) {
    const point = this.points[(index ?? 0) - 1];
    this.readout.textContent = point ? `${point.name}: ${compact(point.measured)} measured, ${compact(point.predicted)} predicted` : "";
  }

  fit() {
    const width = this.plotBox.clientWidth;
    if (!width) return;
    if (!this.plot) this.build();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this.height });
  }

  recolour() {
    if (this.plot) this.build();
  }
}
