// Puts the page together: controls, the address, the colors.
const CHOICES = { decay: Object.keys(GROWTH), traceDecay: Object.keys(GROWTH), sign: ["query", "key"], show: ["logits", "weights"], line: Object.keys(LINES) };
let writing = 0;

// Brings what is set into its limits.
function settle() {
  const clamp = (value, [low, high]) => Math.min(high, Math.max(low, value));
  for (const [name, limits] of Object.entries(LIMITS)) state[name] = clamp(state[name], limits);
  for (const [name, fallback] of Object.entries(DEFAULTS))
    if (Array.isArray(fallback)) state[name] = state[name].map((value) => clamp(value, [-LARGEST, LARGEST]));
  for (const name of ["clipQuery", "clipKey"]) state[name] = Math.min(state[name], state.length - 1);
  for (const name of ["query", "key"]) state[name] = clamp(Math.round(state[name]), [0, state.h * state.w - 1]);
  state.buckets -= state.buckets % 2;
  state.max = Math.max(state.max, exactBuckets());
  state.offset = clamp(Math.round(state.offset), [-reach(), reach()]);
}

const exactBuckets = () => Math.max(1, Math.floor((state.both ? state.buckets / 2 : state.buckets) / 2));

function drawControls() {
  $("max").min = exactBuckets();
  [$("offset").min, $("offset").max] = [-reach(), reach()];
  for (const control of document.querySelectorAll("[data-state]")) {
    const value = state[control.dataset.state];
    if (control.type === "checkbox") control.checked = value;
    else control.value = value;
  }
  drawFields();
  for (const output of document.querySelectorAll("output")) output.value = minus(String(state[$(output.htmlFor.value).dataset.state]));
  const named = `${state.h} × ${state.w}`;
  $("grid").value = [...$("grid").options].some((option) => option.value === named) ? named : "";
  $("lambda").disabled = state.decay === "none";
  $("trace-lambda").disabled = state.traceDecay === "none";
  $("offset").ariaValueText = `${signed(state.offset)}, bucket ${t5Bucket(t5Rule(state), state.offset)}`;
}

function draw() {
  drawControls();
  drawStory();
  drawClip();
  drawBias();
  drawWeights();
  drawTrace();
  drawBuckets();
}

function change(part) {
  Object.assign(state, part);
  settle();
  draw();
  clearTimeout(writing); // browsers refuse an address that changes with every step of a slider
  writing = setTimeout(writeAddress, 250);
}

// The address holds what differs from the page as it opens.
function writeAddress() {
  const changed = Object.entries(state).filter(([name, value]) => String(value) !== String(DEFAULTS[name]));
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
}

// What the address gives for a setting, or the fallback where that makes no sense.
function readSetting(name, text, fallback) {
  const whole = (word) => Math.round(Number(word) * (STEPS[name] || 1)) / (STEPS[name] || 1), number = (word) => word !== "" && Number.isFinite(Number(word));
  if (text === null) return fallback;
  if (Array.isArray(fallback)) return text.split(",").length === fallback.length && text.split(",").every(number) ? text.split(",").map(Number) : fallback;
  if (typeof fallback === "boolean") return text === "true";
  if (typeof fallback === "string") return CHOICES[name].includes(text) ? text : fallback;
  if (name === "span") return [0, 20, 40, 80].includes(Number(text)) ? Number(text) : fallback;
  return number(text) ? whole(text) : fallback;
}

// Takes what it knows from the address; false where the address names a section.
function readAddress() {
  if (!location.hash.includes("=")) return false;
  const found = new URLSearchParams(location.hash.slice(1));
  for (const [name, fallback] of Object.entries(DEFAULTS)) state[name] = readSetting(name, found.get(name), fallback);
  return true;
}

function theme() {
  const name = $("theme").value || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = name;
  draw();
}

function valueOf(control) {
  if (control.type === "checkbox") return control.checked;
  return typeof DEFAULTS[control.dataset.state] === "string" ? control.value : Number(control.value);
}

function startPage() {
  readAddress();
  startStory();
  startClip();
  startBias();
  startWeights();
  startTrace();
  startBuckets();
  settle();
  theme();
  for (const control of document.querySelectorAll("[data-state]"))
    control.addEventListener("input", () => change({ [control.dataset.state]: valueOf(control) }));
  $("theme").addEventListener("change", theme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
  addEventListener("hashchange", () => {
    if (readAddress()) change({});
    else writeAddress();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    draw();
  });
  document.documentElement.dataset.ready = "yes";
}

startPage();
