// Heat maps of the position bias by offset, one per head, with a slider over sizes.
let PICTURES = null; // pictures.json.gz, see `collect_pictures`

async function readPictures() {
  const text = $("pictures").textContent.trim();
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const bySize = (names) => [...new Set(names)].sort((a, b) => sizeOf(a).h * sizeOf(a).w - sizeOf(b).h * sizeOf(b).w || sizeOf(a).h - sizeOf(b).h);

// Fill a slider over named sizes, keeping the current size if the new list has it; returns the size.
function sizeSlider(id, output, names, fallback) {
  const before = $(id).dataset.names ? JSON.parse($(id).dataset.names)[$(id).value] : fallback;
  $(id).dataset.names = JSON.stringify(names);
  $(id).max = Math.max(0, names.length - 1);
  $(id).value = Math.max(0, names.indexOf(names.includes(before) ? before : fallback));
  $(id).disabled = names.length < 2;
  return showSize(id, output);
}

// Show the size of a slider beside it; returns the size.
function showSize(id, output) {
  const name = JSON.parse($(id).dataset.names)[$(id).value] || "";
  $(output).value = name ? `${name} px` : "";
  $(id).setAttribute("aria-valuetext", name ? `${name} pixels` : "none");
  return name;
}

// [heads][rows][columns], null where no visible pair has the offset
function latticeValues(item) {
  const [heads, rows, columns] = item.shape, steps = new Int8Array(bytesOf(PICTURES.blobs[item.values]).buffer);
  return Array.from({ length: heads }, (_, head) => Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (_, column) => {
    const step = steps[(head * rows + row) * columns + column];
    return step === -128 ? null : (step / 127) * item.scale[head];
  })));
}

const latticeModel = () => PICTURES.models[$("lattice-model").value];
const latticePolicies = (model) => [...new Set(model.lattices.map((item) => item.policy))];

// A map with policy "none" is of a size at which policies do not differ, and belongs to all policies.
function latticeAt(model, policy, layer, size) {
  const here = model.lattices.filter((item) => item.layer === layer && item.size === size);
  return here.find((item) => item.policy === policy) || here.find((item) => item.policy === "none") || here[0];
}

function latticeSizes(model, policy, layer) {
  return bySize(model.lattices.filter((item) => item.layer === layer && (item.policy === policy || item.policy === "none")).map((item) => item.size));
}

const GREY = [[0, "#9e9e9e"], [1, "#9e9e9e"]]; // of a layer in which position is negligible
let latticeFigure = null, latticeDrawn = null;

function changeLatticeModel() {
  const model = latticeModel(), policies = latticePolicies(model);
  const real = policies.filter((policy) => policy !== "none");
  options($("lattice-policy"), (real.length ? real : policies).map((policy) => [policy, policy]), $("lattice-policy").value);
  const layers = [...new Set(model.lattices.map((item) => item.layer))].sort((a, b) => a - b);
  options($("lattice-layer"), layers.map((layer) => [layer, model.layers[layer]]), $("lattice-layer").value);
  changeLattice();
}

function changeLattice() {
  const model = latticeModel();
  sizeSlider("lattice-size", "lattice-at", latticeSizes(model, $("lattice-policy").value, Number($("lattice-layer").value)), model.train_size);
  drawLattice();
}

function drawLattice() {
  const model = latticeModel();
  const size = showSize("lattice-size", "lattice-at"), policy = $("lattice-policy").value, layer = Number($("lattice-layer").value);
  const item = latticeAt(model, policy, layer, size), trained = latticeAt(model, policy, layer, model.train_size);
  const largest = Math.max(0, ...model.lattices.filter((other) => other.layer === layer).flatMap((other) => other.scale));
  const top = Math.max(1, largest), negligible = largest < 0.01; // logits: one scale for all that is small, grey below NEGLIGIBLE
  const values = latticeValues(item), [heads, rows, columns] = item.shape;
  latticeDrawn = { item, values };
  latticeFigure.title(`Position bias by offset: ${model.label}, ${model.layers[layer]}, ${size} px${item.policy === "none" ? "" : `, ${item.policy}`}, ${DATA.data}`);
  if (latticeFigure.narrow !== narrow()) Plotly.purge(latticeFigure.plot); // otherwise the other colour bar's labels stay
  latticeFigure.narrow = narrow();
  draw(latticeFigure.plot, values.map((z, head) => ({ ...heatMap(z, head, rows, columns, top), ...(negligible ? { colorscale: GREY } : {}) })), latticeLayout(heads, rows, columns, item, trained));
  const words = [`${heads} heads of ${model.layers[layer]} at ${size}: offsets within ±${(rows - 1) / 2} × ±${(columns - 1) / 2} tokens.`];
  if (negligible) words.push(largest <= 1e-9 ? "Position adds nothing to the logits of this layer." : "What position adds to the logits of this layer is negligible, below 0.01.");
  if (item.full[0] > rows || item.full[1] > columns) words.push(`Larger offsets, up to ±${(item.full[0] - 1) / 2} × ±${(item.full[1] - 1) / 2}, are not drawn.`);
  if (trained && (item.window[0] > trained.window[0] || item.window[1] > trained.window[1])) words.push(`The outline encloses the offsets at ${model.train_size}; offsets outside it did not occur in training.`);
  words.push("Values are means over the sample images, stored in steps of 1/127 of each head's largest value.");
  $("lattice-note").textContent = words.join(" ");
}

// One line for each model that a section cannot show, and why.
function others(id, kind, why) {
  const left = PICTURES.models.filter((model) => !model[kind].length);
  $(id).textContent = left.map((model) => `${model.label} is not shown: ${model.error || why(model)}.`).join(" ");
}

const span = (n) => Array.from({ length: n }, (_, i) => i - (n - 1) / 2);

function heatMap(z, head, rows, columns, top) {
  const at = head ? String(head + 1) : "";
  return {
    type: "heatmap", z, x: span(columns), y: span(rows), xaxis: `x${at}`, yaxis: `y${at}`, zmin: -top, zmax: top, zmid: 0, colorscale: diverging(),
    hovertemplate: `head ${head}<br>%{y} down, %{x} right<br>%{z:.3f}<extra></extra>`, hoverongaps: false, showscale: head === 0,
    colorbar: { thickness: 12, outlinewidth: 0, len: 1, ...colorbarSide() },
  };
}

const narrow = () => latticeFigure.plot.clientWidth < 560;

function colorbarSide() {
  if (narrow()) return { orientation: "h", x: 0.5, xanchor: "center", y: 1, yanchor: "bottom", ypad: 28, title: { text: "" } };
  return { orientation: "v", x: 1.02, xanchor: "left", y: 0.5, yanchor: "middle", ypad: 10, title: { text: "logit", side: "top" }, x: 1.01 };
}

// Axes for small pictures side by side, `across` in a row, each with its caption; aspect is their height by width.
function cells(captions, across, aspect, plot, titles, margin = {}) {
  const count = captions.length, down = Math.ceil(count / across), gap = 0.05, around = { l: 46, r: 12, t: 28, b: 44, ...margin };
  const room = (plot.clientWidth - around.l - around.r) / across - 8, shape = Math.min(1.5, Math.max(0.4, aspect));
  const cellHeight = Math.min(330, room * shape);
  around.r += across * (room - cellHeight / shape); // patches stay square where the height is the limit
  const how = layout({ height: down * (cellHeight + 50) + around.t + around.b - 8, margin: around, shapes: [], annotations: [] });
  const width = (1 - gap * (across - 1)) / across, rise = 50 / (cellHeight + 50);
  captions.forEach((text, cell) => {
    const row = Math.floor(cell / across), column = cell % across, at = cell ? String(cell + 1) : "";
    const left = column * (width + gap), bottom = 1 - (row + 1) / down, high = (1 - rise) / down;
    how[`xaxis${at}`] = { ...how.xaxis, domain: [left, left + width], anchor: `y${at}`, showgrid: false, title: { text: cell + across >= count ? titles[1] : "", standoff: 4 } };
    how[`yaxis${at}`] = { ...how.yaxis, domain: [bottom, bottom + high], anchor: `x${at}`, showgrid: false, autorange: "reversed", showticklabels: column === 0, title: { text: column ? "" : titles[0], standoff: 4 } };
    how.annotations.push({ text, x: left, xref: "paper", y: bottom + high, yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false });
  });
  return how;
}

function latticeLayout(heads, rows, columns, item, trained) {
  const margin = narrow() ? { t: 84 } : { r: 104 };
  const captions = Array.from({ length: heads }, (_, head) => `head ${head}`);
  const how = cells(captions, Math.min(heads, narrow() ? 2 : 4), rows / columns, latticeFigure.plot, ["down (tokens)", "right (tokens)"], margin);
  if (!trained) return how;
  const [y, x] = trained.window.map((n) => n - 0.5);
  if (y >= rows / 2 && x >= columns / 2) return how;
  const box = { x0: -Math.min(x, columns / 2), x1: Math.min(x, columns / 2), y0: -Math.min(y, rows / 2), y1: Math.min(y, rows / 2) };
  how.shapes = captions.map((_, head) => ({ type: "rect", xref: `x${head ? head + 1 : ""}`, yref: `y${head ? head + 1 : ""}`, ...box, line: { color: colours().ink, width: 1.5 } }));
  return how;
}

function latticeCsv() {
  const { item, values } = latticeDrawn, [heads, rows, columns] = item.shape, lines = [["head", "down", "right", "logit"]];
  for (let head = 0; head < heads; head += 1)
    span(rows).forEach((down, i) => span(columns).forEach((right, j) => lines.push([head, down, right, values[head][i][j]])));
  return lines;
}

function startLattices() {
  const shown = [...PICTURES.models.entries()].filter(([, model]) => model.lattices.length);
  if (!shown.length) return hide("lattices");
  latticeFigure = figure($("lattice"), "lattice-plot", latticeCsv);
  options($("lattice-model"), shown.map(([at, model]) => [at, model.label]));
  others("lattice-others", "lattices", (model) => (model.acts ? "its layers exceed the size limit of this page" : "position adds nothing to its attention logits"));
  $("lattice-model").addEventListener("change", changeLatticeModel);
  $("lattice-policy").addEventListener("change", changeLattice);
  $("lattice-layer").addEventListener("change", changeLattice);
  $("lattice-size").addEventListener("input", drawLattice);
  changeLatticeModel();
  redraws.push(drawLattice);
}
