// One query of the 2 × 2 grid in sentences made from its numbers: which key gets what, and why.
const listed = (keys) => (keys.length === 1 ? `patch ${keys[0]}` : `patches ${keys.slice(0, -1).join(", ")} and ${keys[keys.length - 1]}`);
const sideOf = (query, key) => (key === query ? "itself" : `patch ${key}, ${side(query, key)}`);
const offsetText = (query, key) => `(${squareOffset(query, key).map(signed).join(", ")})`;

function because(query, key, { scaled, bias }) {
  const content = targets(scaled);
  if (!content.includes(key)) return `By content alone it would be ${content.length === 1 ? sideOf(query, content[0]) : listed(content)}; the biases overrule the content.`;
  if (content.length > 1) return `By content alone ${content.length === 4 ? "all four patches" : listed(content)} would be alike; the biases decide.`;
  return bias[key] < 0 ? "The bias speaks against this key, but the content outweighs it." : "By content alone it would be the same key.";
}

function readRow(query, all) {
  const row = all.relative[query], best = targets(row.logits), start = `Patch ${query}, ${CORNERS[query]}, looks`;
  const elsewhere = targets(all.absolute[query].logits);
  const absolute = `With absolute position ${elsewhere.length === 4 ? "all four are alike" : `its target is ${elsewhere.length === 1 ? sideOf(query, elsewhere[0]) : listed(elsewhere)}`}.`;
  if (best.length === 4) return `${start} at all four patches alike: every logit is ${short(row.logits[0])}. ${absolute}`;
  if (best.length > 1) return `${start} most at ${listed(best)}, alike: ${short(row.logits[best[0]])} each. ${absolute}`;
  const [key] = best;
  const total = `Content ${short(row.scaled[key])} + bias ${bracket(row.bias[key])} of offset ${offsetText(query, key)} = ${short(row.logits[key])}, the largest of the row, with ${fixed(row.biased.weights[key])} of the weight.`;
  const others = [0, 1, 2, 3].filter((at) => at !== key).sort((a, b) => row.logits[b] - row.logits[a]);
  const rest = `Then come ${others.map((at) => `patch ${at} (${short(row.logits[at])})`).join(", ")}.`;
  return `${start} most at ${sideOf(query, key)}. ${total} ${because(query, key, row)} ${rest} ${absolute}`;
}

const ofPatch = (name, patch) => name + "₀₁₂₃"[patch];
const scaledProduct = (a, b) => `(${products(a, b)}) / √${a.length}`;

function readPair(query, key, all) {
  const x = contents(), xp = placed(), { scaled, bias, logits, biased } = all.relative[query];
  const rank = ["the largest", "the second", "the third", "the smallest"][logits.filter((value) => value > logits[key] + 1e-9).length];
  const order = state.sign === "query" ? [query, key] : [key, query], [[row, column], [lessRow, lessColumn]] = order.map((patch) => place(patch, 2));
  return [
    ["Query, key", `patch ${query}, ${CORNERS[query]}; patch ${key}, ${key === query ? "the query itself" : side(query, key)}`],
    ["No position", `${ofPatch("x", query)}·${ofPatch("x", key)} / √d = ${scaledProduct(x[query], x[key])} = ${fixed(scaled[key])}`],
    ["Absolute", `(${ofPatch("x", query)} + ${ofPatch("p", query)})·(${ofPatch("x", key)} + ${ofPatch("p", key)}) / √d = ${scaledProduct(xp[query], xp[key])} = ${fixed(all.absolute[query].logits[key])}`],
    ["Offset", `${state.sign === "query" ? "query − key" : "key − query"} = (${row} − ${lessRow}, ${column} − ${lessColumn}) = ${offsetText(query, key)}`],
    ["Same bias", sharing(query, key).map(([i, j]) => `query ${i}, key ${j}`).join("; ") || "no other pair has this offset"],
    ["Relative", `${short(scaled[key])} + ${bracket(bias[key])} = ${fixed(logits[key])}: ${targets(logits).length === 4 ? "as large as the others" : rank} of its row`],
    ["Weight", `e^${bracket(logits[key])} / (sum of e^logit over the row) = ${fixed(biased.weights[key])}`],
  ];
}

function drawReading(all) {
  const { storyQuery: query, storyKey: key } = state, { scaled, bias, logits, biased } = all.relative[query];
  $("row-name").textContent = `Query ${query} of 0 to 3, ${CORNERS[query]}`;
  say($("row-said"), readRow(query, all));
  table($("row-table"), ["key", "offset", "content", "bias", "logit", "weight"], [0, 1, 2, 3].map((at) => [
    `${at}, ${at === query ? "the query itself" : side(query, at)}`, offsetText(query, at),
    fixed(scaled[at]), fixed(bias[at]), fixed(logits[at]) + (targets(logits).length < 4 && targets(logits).includes(at) ? " ★" : ""), fixed(biased.weights[at]),
  ]), null, key);
  say($("pair-said"), ...readPair(query, key, all).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}
