// The calculation of five tokens line by line: choose a line, see the values that it computes.
const TOKENS = ["The", "cat", "sat", "on", "mat"];
const CHANNELS = ["0", "1", "2", "3"];
let traceGrid = null;

// Every quantity as a matrix: a row for each query, a column for each key, or for each channel of q, k, v and output.
function traceValues() {
  const { traceDecay, traceLambda, reach, later } = state, [q, k, v] = [state.q, state.k, state.v].map((list) => split(list, WIDTH));
  const pairs = (call) => TOKENS.map((_, i) => TOKENS.map((_, j) => call(i, j)));
  const distance = pairs((i, j) => Math.abs(i - j)), limit = pairs((i, j) => Math.min(distance[i][j], reach));
  const growth = pairs((i, j) => GROWTH[traceDecay](limit[i][j])), bias = pairs((i, j) => -traceLambda * growth[i][j] * (j > i ? later : 1));
  const rows = q.map((query, i) => attentionRow(query, k, v, bias[i])), of = (call) => rows.map(call);
  return {
    q, k, v, distance, limit, growth, bias, rows,
    scores: of((row) => row.scores), scaled: of((row) => row.scaled), logits: of((row) => row.logits),
    shifted: of((row) => row.logits.map((value) => value - row.biased.top)), exps: of((row) => row.biased.exps),
    weights: of((row) => row.biased.weights), output: of((row) => row.outputs.biased),
    change: of((row) => row.biased.weights.map((weight, j) => weight - row.standard.weights[j])),
  };
}

// name: [the line, what it is for, how its value at row i and column j comes about (without the result)]
const LINES = {
  q: ["q[i] = what token i looks for", "An input: one query of four numbers for each token.", () => "given"],
  k: ["k[j] = what token j offers", "An input: one key of four numbers for each token.", () => "given"],
  v: ["v[j] = what token j hands over", "An input: one value of four numbers for each token.", () => "given"],
  scores: ["scores[i, j] = Σ q[i, c] · k[j, c]", "How well query and key match. Position has no part in it yet.", (t, i, j) => products(t.q[i], t.k[j])],
  scaled: ["scaled = scores / √d", "Divided by the root of the number of channels, so that more channels do not make larger scores.", (t, i, j) => `${short(t.scores[i][j])} / √${WIDTH}`],
  distance: ["distance[i, j] = |i − j|", "Steps from query to key; the sign is dropped.", (t, i, j) => `|${i} − ${j}|`],
  limit: ["limit = min(distance, R)", "Clipping: beyond R all distances count as R. With R = 4 none of five tokens is that far.", (t, i, j) => `min(${t.distance[i][j]}, ${state.reach})`],
  growth: ["growth = log(1 + limit)", "How the penalty grows: with the logarithm it grows ever more slowly.", (t, i, j) => ({ log: `ln(1 + ${t.limit[i][j]})`, linear: `${t.limit[i][j]}`, none: "no decay" })[state.traceDecay]],
  bias: ["bias = −λ · growth", "What position adds: nothing for the token itself, less for near keys than for far ones.", (t, i, j) => `−${state.traceLambda} · ${short(t.growth[i][j])}${state.later === 1 ? "" : j > i ? ` · ${state.later} (key after query)` : " (key not after query)"}`],
  logits: ["logits = scaled + bias", "The only line where position meets content.", (t, i, j) => `${short(t.scaled[i][j])} + ${bracket(t.bias[i][j])}`],
  shifted: ["shifted = logits − max of the row", "The largest becomes 0, so that no exponential overflows; the weights stay the same.", (t, i, j) => `${short(t.logits[i][j])} − ${bracket(t.rows[i].biased.top)}`],
  exps: ["exps = e^shifted", "All positive, the largest 1.", (t, i, j) => `e^${bracket(t.shifted[i][j])}`],
  weights: ["weights = exps / sum of the row", "Shares of attention: every row adds up to 1.", (t, i, j) => `${short(t.exps[i][j])} / ${short(t.rows[i].biased.sum)}`],
  output: ["output[i, c] = Σ weights[i, j] · v[j, c]", "Every token's result: the values of all tokens, mixed by its weights. Columns are channels.", (t, i, c) => products(t.weights[i], t.v.map((value) => value[c]))],
  change: ["change = weights − softmax(scaled)", "What the bias did: weight moved from far keys to near ones.", (t, i, j) => `${short(t.weights[i][j])} − ${short(t.rows[i].standard.weights[j])}`],
};
const CODE = { linear: { growth: "growth = limit" }, none: { growth: "growth = 0" }, log: {} }; // lines that another decay changes

// What stands beside a line: the number of the chosen pair, or the vector of its query or key.
function lineValue(all, name, i, j) {
  if (name === "q" || name === "output") return vector(all[name][i]);
  return name === "k" || name === "v" ? vector(all[name][j]) : short(all[name][i][j]);
}

function drawTrace() {
  const all = traceValues(), { line, traceQuery: i, traceKey } = state, matrix = all[line], columns = matrix[0].length;
  const names = columns === TOKENS.length ? TOKENS : CHANNELS, j = Math.min(traceKey, columns - 1);
  const code = (name) => (name === "bias" && state.later !== 1 ? `bias = −λ · growth · (${state.later} where j > i)` : CODE[state.traceDecay][name] || LINES[name][0]);
  for (const label of document.querySelectorAll("[data-line]")) {
    const name = label.dataset.line;
    label.querySelector("input").checked = name === line;
    label.querySelector("code").textContent = code(name);
    label.querySelector(".value").textContent = lineValue(all, name, i, traceKey);
  }
  const top = Math.max(...matrix.flat().map(Math.abs)), channel = columns === TOKENS.length ? "" : "channel ";
  const size = cellSize($("trace-cells"), columns, 48, 84, true);
  traceGrid.draw({
    rows: TOKENS.length, columns, size, high: 40, font: size < 56 || top >= 100 ? 11 : 13, picked: [i, j],
    heads: { corner: channel ? "token ↓\nchannel →" : "query ↓\nkey →", rows: TOKENS, columns: names },
    cell: (row, column) => {
      const value = matrix[row][column], label = `${line} of ${TOKENS[row]}, ${channel}${names[column]}: ${fixed(value)}`;
      return { text: fixed(value), label, ...color(value < 0 ? "down" : "up", top > 1e-9 ? (Math.abs(value) / top) * 0.8 : 0) };
    },
  });
  $("trace-title").textContent = code(line);
  $("trace-about").textContent = LINES[line][1];
  say($("trace-said"), `${line}[${TOKENS[i]}, ${channel}${names[j]}] = ${LINES[line][2](all, i, j)} = ${fixed(matrix[i][j])}`);
}

function startTrace() {
  for (const name of Object.keys(LINES)) {
    const button = make("input", { type: "radio", name: "line", value: name });
    button.addEventListener("change", () => change({ line: name }));
    $("lines").append(make("label", { "data-line": name }, button, make("code"), make("span", { class: "value" })));
  }
  for (const id of ["trace-query", "trace-key"]) $(id).append(...TOKENS.map((token, at) => make("option", { value: at }, token)));
  for (const name of ["q", "k", "v"])
    table($(`trace-${name}`), [name, ...CHANNELS], TOKENS.map((token, i) => [token, ...CHANNELS.map((_, c) => numberField(name, i * WIDTH + c, `${name} of ${token}, channel ${c}`))]));
  $("trace-reset").addEventListener("click", () => change({ q: DEFAULTS.q, k: DEFAULTS.k, v: DEFAULTS.v }));
  traceGrid = cellGrid($("trace-cells"), "Values of the chosen line", { pick: (traceQuery, traceKey) => change({ traceQuery, traceKey }) });
}
