// What every section uses: what is set, elements, numbers as text, colors.
const $ = (id) => document.getElementById(id);
const DEFAULTS = {
  contents: [1, 0, 0, 1, 1, 1, 0, 0], positions: [0, 0, 0, 0.5, 0.5, 0, 0.5, 0.5], // two numbers for each patch
  biases: [0.3, 0.1, 0, 0.2, 0, -0.2, 0, -0.1, -0.3], // by offset, (−1, −1), (−1, 0) ... (1, 1)
  sign: "query", show: "logits", storyQuery: 0, storyKey: 2,
  length: 7, radius: 2, clipBiases: [-0.5, -0.4, -0.3, -0.2, 0, 0.2, 0.3, 0.4, 0.5], clipQuery: 3, clipKey: 0, // offsets −4 to 4
  q: [1, 0, 1, 0, 0, 2, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1], // five tokens, four channels
  k: [0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0.5, 0.5],
  v: [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0.5, 0.5, 0.5, 0.5],
  line: "scores", traceDecay: "log", traceLambda: 0.3, reach: 4, later: 1, traceQuery: 0, traceKey: 1,
  h: 1, w: 5, decay: "log", lambda: 0.3, query: 0, key: 1, buckets: 32, max: 128, both: true, span: 0, offset: -20, rows: 5, columns: 6,
};
const LIMITS = {
  storyQuery: [0, 3], storyKey: [0, 3], length: [2, 8], radius: [0, 4], clipQuery: [0, 7], clipKey: [0, 7],
  traceLambda: [0, 3], reach: [0, 4], later: [0, 4], traceQuery: [0, 4], traceKey: [0, 4], h: [1, 6], w: [1, 6], lambda: [0, 3], buckets: [2, 64], max: [1, 256], rows: [1, 8], columns: [1, 8], span: [0, 80],
};
const LARGEST = 99; // what a field takes, in either sign
const STEPS = { lambda: 20, traceLambda: 20, later: 4 }; // steps in 1; other numbers are whole
const state = { ...DEFAULTS };

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A true minus sign, and no negative zero.
const minus = (text) => (Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−"));
const fixed = (value, digits = 4) => minus(value.toFixed(digits));
const short = (value) => minus(String(Number(value.toFixed(4))));
const signed = (value) => (value > 0 ? `+${value}` : minus(String(value)));
const bracket = (value) => (value < 0 ? `(${short(value)})` : short(value));
const products = (a, b) => a.map((value, at) => `${bracket(value)}·${bracket(b[at])}`).join(" + "); // the dot product, written out
const vector = (values, show = short) => `[${values.map((value) => show(value)).join(", ")}]`;

// Text that is read aloud when it changes, so it is touched only then.
function say(element, ...children) {
  const said = make("div", {}, ...children);
  if (said.textContent !== element.textContent) element.replaceChildren(...said.childNodes);
}

const dark = () => document.documentElement.dataset.theme === "dark";
const RAMPS = { // from nothing to much; the difference has one for each sign
  light: { down: ["#ffffff", "#4a9fd0", "#00395c"], up: ["#ffffff", "#e58a4e", "#7a2f00"] },
  dark: { down: ["#16181b", "#2f8fc9", "#9ad7ff"], up: ["#16181b", "#d5752e", "#ffd29a"] },
};
const ramp = (side) => RAMPS[dark() ? "dark" : "light"][side];

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// The color at a share of 0 to 1 of a ramp, and black or white for text on it, whichever stands out more.
function color(side, share) {
  const stops = ramp(side), at = Math.min(1, Math.max(0, share)) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  const [from, to] = [channels(stops[low]), channels(stops[low + 1])];
  const mixed = from.map((value, i) => Math.round(value + (to[i] - value) * (at - low)));
  const linear = mixed.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return { background: `rgb(${mixed.join(", ")})`, ink: luminance > 0.179 ? "#000000" : "#ffffff" };
}

function table(element, heads, lines, foot = null, chosen = -1) {
  const cells = (line) => line.map((text, at) => make(at ? "td" : "th", at ? {} : { scope: "row" }, text));
  const body = make("tbody", {}, ...lines.map((line, at) => make("tr", at === chosen ? { class: "chosen" } : {}, ...cells(line))));
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
  element.replaceChildren(head, body, ...(foot ? [make("tfoot", {}, make("tr", {}, ...cells(foot)))] : []));
}
