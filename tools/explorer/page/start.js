// Puts the page together: controls, the address, the colours.
let later = 0;

// Brings what is set into its limits.
function settle() {
  const clamp = (value, [low, high]) => Math.min(high, Math.max(low, value));
  for (const [name, limits] of Object.entries(LIMITS)) state[name] = clamp(state[name], limits);
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
  for (const output of document.querySelectorAll("output")) output.value = minus(String(state[$(output.htmlFor.value).dataset.state]));
  const named = `${state.h} × ${state.w}`;
  $("grid").value = [...$("grid").options].some((option) => option.value === named) ? named : "";
  $("lambda").disabled = state.decay === "none";
  $("offset").ariaValueText = `${signed(state.offset)}, bucket ${t5Bucket(t5Rule(state), state.offset)}`;
}

function draw() {
  drawControls();
  drawBias();
  drawWeights();
  drawBuckets();
}

function change(part) {
  Object.assign(state, part);
  settle();
  draw();
  clearTimeout(later); // browsers refuse an address that changes with every step of a slider
  later = setTimeout(writeAddress, 250);
}

function writeAddress() {
  history.replaceState(null, "", `#${new URLSearchParams(Object.entries(state))}`);
}

// Takes what it knows from the address; false where the address names a section.
function readAddress() {
  if (!location.hash.includes("=")) return false;
  const found = new URLSearchParams(location.hash.slice(1));
  for (const [name, fallback] of Object.entries(DEFAULTS)) {
    const text = found.get(name), number = Number(text);
    if (text === null) state[name] = fallback;
    else if (typeof fallback === "boolean") state[name] = text === "true";
    else if (name === "decay") state[name] = Object.hasOwn(FORMULAS, text) ? text : fallback;
    else if (name === "span") state[name] = [0, 20, 40, 80].includes(number) ? number : fallback;
    else if (Number.isFinite(number) && text !== "") state[name] = name === "lambda" ? Math.round(number * 20) / 20 : Math.round(number);
    else state[name] = fallback;
  }
  return true;
}

function theme() {
  const name = $("theme").value || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = name;
  draw();
}

function valueOf(control) {
  if (control.type === "checkbox") return control.checked;
  return control.id === "decay" ? control.value : Number(control.value);
}

function startPage() {
  readAddress();
  startBias();
  startWeights();
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
