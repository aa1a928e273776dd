// The definitions, without any drawing. Tokens are numbered row by row; offsets are query minus key, in patches.
const WIDTH = 4;
const DOCUMENTS = { // the worked example of five tokens
  q: [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]],
  k: [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]],
  v: [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]],
};
const WAVES = { q: [0.1, 1.5], k: [0.7, 1.5], v: [1.3, 1] }; // phase, amplitude

const place = (token, w) => [Math.floor(token / w), token % w];

function offsetOf(query, key, w) {
  const [i, j] = [place(query, w), place(key, w)];
  return [i[0] - j[0], i[1] - j[1]];
}

function biasAt([dy, dx], decay, lambda) {
  const distance = Math.hypot(dy, dx);
  if (decay === "log") return -lambda * Math.log1p(distance);
  return decay === "linear" ? -lambda * distance : 0;
}

const tokens = (n, call) => Array.from({ length: n }, (_, at) => call(at));

// n vectors: element m of all of them, row by row, is amplitude sin(0.37 (m + 1)^2 + phase), to four digits.
function wave(name, n) {
  const [phase, amplitude] = WAVES[name];
  const value = (m) => Math.round(amplitude * Math.sin(0.37 * (m + 1) ** 2 + phase) * 1e4) / 1e4;
  return tokens(n, (token) => tokens(WIDTH, (at) => value(token * WIDTH + at)));
}

const fromDocuments = (h, w) => h === 1 && w === 5;
const example = (h, w) => (fromDocuments(h, w) ? DOCUMENTS : { q: wave("q", h * w), k: wave("k", h * w), v: wave("v", h * w) });

function softmax(logits) {
  const top = Math.max(...logits), exps = logits.map((logit) => Math.exp(logit - top)), sum = exps.reduce((a, b) => a + b, 0);
  return { top, exps, sum, weights: exps.map((value) => value / sum) };
}

// Everything that happens to one query; lists have one entry per key, outputs one per channel.
function attend({ h, w, decay, lambda, query }) {
  const { q, k, v } = example(h, w);
  const scores = k.map((key) => key.reduce((sum, value, at) => sum + q[query][at] * value, 0));
  const scaled = scores.map((score) => score / Math.sqrt(WIDTH));
  const bias = k.map((_, key) => biasAt(offsetOf(query, key, w), decay, lambda));
  const logits = scaled.map((value, key) => value + bias[key]);
  const standard = softmax(scaled), biased = softmax(logits);
  const mix = (weights) => tokens(WIDTH, (at) => weights.reduce((sum, weight, key) => sum + weight * v[key][at], 0));
  return { scores, scaled, bias, logits, standard, biased, outputs: { standard: mix(standard.weights), biased: mix(biased.weights) } };
}

// T5's rule for one sign: the first distance of every bucket. Bucket exact + t begins at ceil(exact (max / exact)^(t / logs)),
// found in integers, since rounding would move a boundary that is a whole number.
function t5Rule({ buckets, max, both }) {
  const count = both ? buckets / 2 : buckets, exact = Math.floor(count / 2), logs = count - exact, first = tokens(exact, (d) => d);
  const [e, top, n] = [exact, max, logs].map(BigInt);
  for (let t = 0n, d = e; t < n; t += 1n) {
    while (d ** n * e ** t < top ** t * e ** n) d += 1n;
    first.push(Number(d));
  }
  return { count, exact, logs, first, max, both };
}

// Number of the bucket within its sign.
const t5Within = (rule, distance) => rule.first.filter((first) => distance >= first).length - 1;
const t5Distance = (rule, offset) => (rule.both ? Math.abs(offset) : Math.max(offset, 0));
const t5Bucket = (rule, offset) => t5Within(rule, t5Distance(rule, offset)) + (rule.both && offset < 0 ? rule.count : 0);
