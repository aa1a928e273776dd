// The bias matrix, and the calculation of one of its cells.
const FORMULAS = {
  log: "bias = −λ · ln(1 + distance), the distance Euclidean, ln the natural logarithm",
  linear: "bias = −λ · distance, the distance Euclidean",
  none: "bias = 0: position adds nothing",
};
let biasGrid = null;

const patchName = (token) => `(${place(token, state.w).join(", ")})`;

function direction(dy, dx) {
  const part = (n, before, after) => (n ? [`${Math.abs(n)} ${n > 0 ? before : after}`] : []);
  const words = [...part(dy, "up", "down"), ...part(dx, "to the left", "to the right")];
  return words.length ? `the key is ${words.join(" and ")}` : "the query itself";
}

function calculation(query, key) {
  const [i, j] = [place(query, state.w), place(key, state.w)], [dy, dx] = offsetOf(query, key, state.w);
  const distance = Math.hypot(dy, dx), { decay, lambda } = state, bias = biasAt([dy, dx], decay, lambda);
  const steps = {
    log: `−λ · ln(1 + distance) = −${lambda} · ln(${fixed(1 + distance)}) = −${lambda} · ${fixed(Math.log1p(distance))} = ${fixed(bias)}`,
    linear: `−λ · distance = −${lambda} · ${fixed(distance)} = ${fixed(bias)}`,
    none: `no decay: ${fixed(bias)}`,
  };
  return [
    ["Query", `token ${query}, row ${i[0]}, column ${i[1]}`],
    ["Key", `token ${key}, row ${j[0]}, column ${j[1]}`],
    ["Offset", `query − key = (${i[0]} − ${j[0]}, ${i[1]} − ${j[1]}) = (${short(dy)}, ${short(dx)}): ${direction(dy, dx)}`],
    ["Distance", `√(${bracket(dy)}² + ${bracket(dx)}²) = √${dy * dy + dx * dx} = ${fixed(distance)}`],
    ["Bias", steps[decay]],
    ["Factor", `e^bias = ${fixed(Math.exp(bias))}: what the bias multiplies the weight by before the softmax divides by the sum`],
  ];
}

function showCalculation(query, key) {
  say($("calculation"), ...calculation(query, key).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  const side = 26, center = (n) => n * side + side / 2 + 1, [i, j] = [place(query, state.w), place(key, state.w)];
  const patches = tokens(state.h * state.w, (at) => {
    const [y, x] = place(at, state.w), kind = at === query ? "query" : at === key ? "goal" : "";
    return `<rect class="patch ${kind}" x="${x * side + 1}" y="${y * side + 1}" width="${side}" height="${side}"/>`;
  });
  const line = `<line class="here" x1="${center(j[1])}" y1="${center(j[0])}" x2="${center(i[1])}" y2="${center(i[0])}"/>`;
  const legend = ["query", "goal"].map((kind, at) => `<rect class="${kind}" x="${1 + at * 70}" y="${state.h * side + 10}" width="12" height="12"/><text x="${18 + at * 70}" y="${state.h * side + 20}">${at ? "key" : "query"}</text>`);
  const wide = Math.max(state.w * side + 2, 130), high = state.h * side + 28;
  $("bias-picture").innerHTML = `<svg width="${wide}" height="${high}" viewBox="0 0 ${wide} ${high}">${patches.join("")}${line}${legend.join("")}</svg>`;
}

function drawBias() {
  const { h, w, decay, lambda } = state, n = h * w, names = tokens(n, (at) => place(at, w).join(",")), size = cellSize($("bias-cells"), n, 24, 72, true);
  $("formula").textContent = FORMULAS[decay];
  $("bias-ramp").style.background = `linear-gradient(to right, ${ramp("down").join(", ")})`;
  biasGrid.draw({
    rows: n, columns: n, size, high: Math.min(size, 52), font: size < 46 ? 11 : 13, picked: [state.query, state.key],
    heads: { corner: "query ↓\nkey →", rows: names, columns: names }, block: h > 1 && w > 1 ? [w, w] : null,
    cell: (query, key) => {
      const bias = biasAt(offsetOf(query, key, w), decay, lambda), { background, ink } = color("down", 1 - Math.exp(bias));
      const label = `query ${patchName(query)}, key ${patchName(key)}: bias ${fixed(bias)}`;
      return { text: size < 34 ? "" : fixed(bias, 2), label, background, ink };
    },
  });
  showCalculation(state.query, state.key);
}

function startBias() {
  biasGrid = cellGrid($("bias-cells"), "Bias of every query and key", {
    pick: (query, key) => change({ query, key }),
    point: (at) => showCalculation(...(at || [state.query, state.key])),
  });
  $("grid").addEventListener("input", () => {
    const [h, w] = $("grid").value.split(" × ").map(Number);
    if (w) change({ h, w });
  });
}
