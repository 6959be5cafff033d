/** Fidelity tab: predictions compared with measurements on real hardware, including failures. */

import { own } from "./api.js";
import { Scatter } from "./charts.js";
import { el, field, fill, scrolling, select, table } from "./dom.js";
import { compact, percent } from "./format.js";

export async function start(panel) {
  const data = await own("data/fidelity.json");
  fill(panel,
    el("h2", { text: "How far is the simulated fleet from a real one?" }),
    el("p", { class: "verdict", text: inShort(data.served_errors) }),
    el("p", { text: `All of ${data.model} on A100 GPUs. Each point is one published measurement; on the diagonal the prediction is exact. Hollow points (calibration) were used to fit the simulator; filled ones were held out: only they are predictions.` }));
  const batches = batchScatter(data.batches), served = servedScatter(data.served);
  panel.append(
    el("div", { class: "charts wide" }, batches.figure, served.figure),
    table("Static batches: error of the time to finish", ["Runs", "Predicted by", "Measurements", "Median", "90th percentile", "Worst", "Mean, with sign"],
      data.batch_errors.map((e) => [e.group, e.predicted_by === "committed table" ? "lookup table" : e.predicted_by, e.rows, percent(e.median, 1), percent(e.p90, 1), percent(e.worst, 1), signed(e.bias)])),
    el("p", { class: "note", text: `Step model: formulas for the time of one step of an engine. Lookup table: what episodes read, computed with them for ${data.hardware}. Fits the cache: only runs whose whole batch fits into the KV cache. A negative mean: the prediction is too fast.` }),
    servedTable(data.served_errors),
    el("p", { class: "note", text: "TTFT: time to first token; TPOT: time per output token; p50, p90, p99: percentiles; burst: while the arrival rate peaks, pre-burst: before that. Eager: these runs did not use CUDA graphs, which the model assumes, so its predictions for them are too fast. Output lengths were not published; they are inferred." }),
    coverage(data.coverage));
  batches.fit();
  served.fit();
  return {};
}

/** The errors of held-out BF16 runs in a sentence. */
function inShort(errors) {
  const held = errors.filter(({ group }) => group.endsWith("BF16, held out"));
  const between = (name) => {
    const [least, most] = [Math.min, Math.max].map((end) => percent(end(...held.filter(({ metric }) => metric === name).map(({ median }) => median))));
    return least === most ? least : `${least.replace(" %", "")} to ${most}`;
  };
  const worst = percent(Math.max(...held.filter(({ metric }) => metric.startsWith("TTFT")).map((error) => error.worst)));
  return `In short: on held-out runs of vLLM in BF16 the median error is ${between("TPOT p50")} for the time per token (TPOT p50), ${between("TTFT p50")} for TTFT p50 and ${between("TTFT p99")} for TTFT p99; a single TTFT was off by up to ${worst}.`;
}

const signed = (share) => `${share > 0 ? "+" : ""}${percent(share, 1)}`;

function batchScatter(rows) {
  const groups = [
    { key: "held", label: "vLLM, held out", colour: "heuristic", of: (row) => row.engine === "vLLM" && !row.fitted },
    { key: "fitted", label: "vLLM, fitted", colour: "naive", fitted: true, of: (row) => row.fitted },
    { key: "trt", label: "TensorRT-LLM, nothing fitted", colour: "ppo", of: (row) => row.engine !== "vLLM" && !row.fitted },
  ];
  const points = rows.map((row) => ({ measured: row.measured_s, predicted: row.predicted_s, key: groups.find(({ of }) => of(row)).key,
    name: `${row.engine}, batch ${row.batch}, ${row.input_tokens} + ${row.output_tokens} tokens` }));
  return new Scatter({ title: "Static batches, seconds to finish", unit: "s", groups, points });
}

function servedScatter(rows) {
  // Fitted groups are hollow and without colour, so that colour means a prediction.
  const inks = { true: ["naive", "ink"], false: ["heuristic", "static", "ppo", "you"] };
  const groups = [...new Set(rows.map(({ group }) => group))].map((name) => {
    const fitted = name.includes("calibration");
    return { key: name, label: name, colour: inks[fitted].shift() ?? "ink", fitted };
  });
  const points = rows.filter(({ metric }) => /^T(TFT|POT)/.test(metric)).map((row) => ({ ...row, key: row.group, name: `${row.group} ${row.precision}, ${row.scenario}, ${row.metric}` }));
  return new Scatter({ title: "Served loads: TTFT and TPOT", unit: "ms", groups, points });
}

/** One row per group of runs, one column per figure: median absolute error, the worst in brackets. */
function servedTable(errors) {
  const groups = [...new Set(errors.map(({ group }) => group))].sort();
  const figures = [...new Set(errors.map(({ metric }) => metric))].sort();
  const cell = (group, figure) => {
    const found = errors.find((e) => e.group === group && e.metric === figure);
    return found ? `${percent(found.median)} (${percent(found.worst)})` : "–";
  };
  return table("Served loads on an A100-80GB: the environment's dynamics compared with vLLM, median error and in brackets the worst",
    ["Runs", ...figures], groups.map((group) => [group, ...figures.map((figure) => cell(group, figure))]));
}

/** Heat map of how well measurements support each cell of the lookup table. */
function coverage(cover) {
  const box = el("div");
  const tier = select(cover.quant_tier.map((name, i) => [i, name]), 0, () => draw());
  const draft = select(cover.spec_length.map((k, i) => [i, k ? `${k} draft tokens` : "no speculation"]), 0, () => draw());
  function draw() {
    const cells = cover.cells[tier.value][draft.value];
    fill(box, scrolling("Coverage of the table", el("table", { class: "heat" },
      el("caption", { class: "unseen", text: "How well measurements support each cell, batch size by prompt length" }),
      el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "batch \\ prompt" }), ...cover.prompt_tokens.map((tokens) => el("th", { scope: "col", text: compact(tokens) })))),
      el("tbody", {}, ...cover.batch_size.map((batch, i) => el("tr", {}, el("th", { scope: "row", text: String(batch) }),
        ...cells[i].map((level) => el("td", { class: `level${level}`, title: cover.levels[level] }, cover.levels[level]))))))));
  }
  draw();
  const shares = Object.entries(cover.shares.all).map(([level, share]) => `${level} ${percent(share)}`).join(", ");
  return el("section", {},
    el("h2", { text: "Measurements behind the lookup table" }),
    el("p", { text: `Over all cells: ${shares}. The answer to each step says which of these levels it used.` }),
    el("div", { class: "controls" }, field("Precision", tier), field("Speculation", draft)), box);
}
