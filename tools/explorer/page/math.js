// The definitions, without any drawing. Tokens are numbered row by row; offsets are query minus key, in patches.
const WIDTH = 4;
const WAVES = { q: [0.1, 1.5], k: [0.7, 1.5], v: [1.3, 1] }; // phase, amplitude

const place = (token, w) => [Math.floor(token / w), token % w];

function offsetOf(query, key, w) {
  const [i, j] = [place(query, w), place(key, w)];
  return [i[0] - j[0], i[1] - j[1]];
}

const GROWTH = { log: Math.log1p, linear: (distance) => distance, none: () => 0 }; // of the penalty with distance
const biasAt = ([dy, dx], decay, lambda) => -lambda * GROWTH[decay](Math.hypot(dy, dx));

const tokens = (n, call) => Array.from({ length: n }, (_, at) => call(at));
const split = (list, width) => tokens(list.length / width, (at) => list.slice(at * width, (at + 1) * width));
const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);

// n vectors: element m of all of them, row by row, is amplitude sin(0.37 (m + 1)^2 + phase), to four digits.
function wave(name, n) {
  const [phase, amplitude] = WAVES[name];
  const value = (m) => Math.round(amplitude * Math.sin(0.37 * (m + 1) ** 2 + phase) * 1e4) / 1e4;
  return tokens(n, (token) => tokens(WIDTH, (at) => value(token * WIDTH + at)));
}

const fromDocuments = (h, w) => h === 1 && w === 5;
const vectors = (h, w, name) => (fromDocuments(h, w) ? split(DEFAULTS[name], WIDTH) : wave(name, h * w));
const example = (h, w) => ({ q: vectors(h, w, "q"), k: vectors(h, w, "k"), v: vectors(h, w, "v") });

function softmax(logits) {
  const top = Math.max(...logits), exps = logits.map((logit) => Math.exp(logit - top)), sum = exps.reduce((a, b) => a + b, 0);
  return { top, exps, sum, weights: exps.map((value) => value / sum) };
}

// Everything that happens to one query; lists have one entry per key, outputs one per channel.
function attentionRow(query, keys, values, bias) {
  const scores = keys.map((key) => dot(query, key));
  const scaled = scores.map((score) => score / Math.sqrt(query.length));
  const logits = scaled.map((value, key) => value + bias[key]);
  const standard = softmax(scaled), biased = softmax(logits);
  const mix = (weights) => tokens(values[0].length, (at) => dot(weights, values.map((value) => value[at])));
  return { scores, scaled, bias, logits, standard, biased, outputs: { standard: mix(standard.weights), biased: mix(biased.weights) } };
}

function attend({ h, w, decay, lambda, query }) {
  const { q, k, v } = example(h, w);
  return attentionRow(q[query], k, v, k.map((_, key) => biasAt(offsetOf(query, key, w), decay, lambda)));
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
