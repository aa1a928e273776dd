// One query's attention with and without the bias, and every step on the way.
const weightGrids = {};

function drawMap(name, values, top, side) {
  const { h, w } = state, size = cellSize($(`${name}-cells`), w, 40, 84);
  weightGrids[name].draw({
    rows: h, columns: w, size, high: Math.min(size, 52), picked: place(state.query, w),
    cell: (y, x) => {
      const value = values[y * w + x], share = top ? Math.abs(value) / top : 0, { background, ink } = color(side(value), share);
      const own = y * w + x === state.query ? ", the query" : "";
      return { text: fixed(value), label: `${name}, key (${y}, ${x})${own}: ${fixed(value)}`, background, ink };
    },
  });
}

const highest = (values) => values.indexOf(Math.max(...values));

function summary(all) {
  const { standard, biased } = all, difference = biased.weights.map((value, key) => value - standard.weights[key]);
  const moved = difference.reduce((sum, value) => sum + Math.abs(value), 0) / 2;
  const best = ({ weights }) => `key ${patchName(highest(weights))} with ${fixed(Math.max(...weights))}`;
  const first = `For query ${patchName(state.query)} the largest weight goes to ${best(standard)} without the bias, and to ${best(biased)} with it.`;
  if (moved < 5e-5) return `${first} The bias changes nothing.`;
  const gains = patchName(highest(difference)), loses = patchName(highest(difference.map((value) => -value)));
  return `${first} The bias moves ${fixed(moved)} of the weight; key ${gains} gains most, key ${loses} loses most.`;
}

function drawSteps(all) {
  const heads = ["key", "distance", "score q·k", "scaled ÷ √d", "bias", "biased", "exp(biased − max)", "weight", "standard weight", "difference"];
  const columns = [all.scores, all.scaled, all.bias, all.logits, all.biased.exps, all.biased.weights, all.standard.weights];
  const lines = all.scores.map((_, key) => [
    `${key} ${patchName(key)}`, fixed(Math.hypot(...offsetOf(state.query, key, state.w))),
    ...columns.map((values) => fixed(values[key])), fixed(all.biased.weights[key] - all.standard.weights[key]),
  ]);
  const foot = ["", "", "", "", "", `max ${fixed(all.biased.top)}`, `sum ${fixed(all.biased.sum)}`, fixed(1), fixed(1), fixed(0)];
  table($("steps"), heads, lines, foot, state.key);
  const { standard, biased } = all.outputs, numbers = (values) => values.map((value) => fixed(value));
  table($("output"), ["output Σ weight · v", ...tokens(WIDTH, (at) => `channel ${at}`)], [
    ["standard", ...numbers(standard)], ["biased", ...numbers(biased)], ["difference", ...numbers(biased.map((value, at) => value - standard[at]))],
  ]);
}

function drawVectors() {
  const { q, k, v } = example(state.h, state.w);
  table($("vectors"), ["token", "q", "k", "v"], q.map((_, at) => [`${at} ${patchName(at)}`, vector(q[at]), vector(k[at]), vector(v[at])]), null, state.query);
  $("source").textContent = fromDocuments(state.h, state.w)
    ? `Queries, keys and values of the worked example of five tokens, d = ${WIDTH}. To try: for query (0, 0) its own weight becomes the largest where λ of the logarithmic decay passes 1/ln 2 = 1.4427, and more than half where it passes 2.055.`
    : `Queries, keys and values come from one formula, d = ${WIDTH}: element m of an array, counted row by row from 0, is a · sin(0.37 (m + 1)² + φ) rounded to four digits; q: a = 1.5, φ = 0.1; k: a = 1.5, φ = 0.7; v: a = 1, φ = 1.3.`;
}

function drawWeights() {
  const all = attend(state), { standard, biased } = all;
  const names = tokens(state.h * state.w, (at) => make("option", { value: at }, `${at} ${patchName(at)}`));
  if ($("query").dataset.shape !== `${state.h},${state.w}`) $("query").replaceChildren(...names);
  $("query").dataset.shape = `${state.h},${state.w}`;
  $("query").value = state.query;
  const difference = biased.weights.map((value, key) => value - standard.weights[key]);
  const top = Math.max(...standard.weights, ...biased.weights), most = Math.max(...difference.map(Math.abs));
  drawMap("standard", standard.weights, top, () => "down");
  drawMap("biased", biased.weights, top, () => "down");
  drawMap("difference", difference, most < 1e-9 ? 0 : most, (value) => (value < 0 ? "down" : "up"));
  $("summary").textContent = summary(all);
  drawSteps(all);
  drawVectors();
}

function startWeights() {
  for (const name of ["standard", "biased", "difference"])
    weightGrids[name] = cellGrid($(`${name}-cells`), `${name} weights by key patch; choose the query`, { pick: (y, x) => change({ query: y * state.w + x }) });
}
